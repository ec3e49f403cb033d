//! TLS towards clients and mutual TLS towards workers.

use std::path::{Path, PathBuf};

use axum::Router;
use axum::routing::{get, post};
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use kvik_gateway::{BackendConfig, GatewayConfig};
use kvik_proto::client::{TlsClientConfig, http_client};
use kvik_runtime::http::{ListenLimits, TlsServerConfig, listen, serve, tls_acceptor};
use kvik_runtime::shutdown::Shutdown;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use crate::support::{TestGateway, until, whole};

/// An authority and a certificate that it signed, as files.
pub(crate) struct Files {
    pub(crate) authority: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

pub(crate) fn make_files(folder: &Path) -> Files {
    let authority_key = KeyPair::generate().unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_certificate = authority.self_signed(&authority_key).unwrap();
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()])
        .unwrap()
        .signed_by(&key, &issuer)
        .unwrap();
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    Files {
        authority: write("authority.pem", authority_certificate.pem()),
        certificate: write("certificate.pem", certificate.pem()),
        key: write("key.pem", key.serialize_pem()),
    }
}

#[tokio::test]
async fn both_sides_can_be_encrypted_and_the_worker_can_check_the_client() {
    let folder = tempfile::tempdir().unwrap();
    let files = make_files(folder.path());
    let server = TlsServerConfig {
        certificate: Some(files.certificate.clone()),
        key: Some(files.key.clone()),
        client_authorities: Some(files.authority.clone()),
    };
    let worker_shutdown = Shutdown::new();
    let listener = listen("127.0.0.1:0").await.unwrap();
    let worker = format!("https://{}", listener.local_addr().unwrap());
    let router =
        Router::new().route("/health", get(async || "ok")).route("/v1/completions", post(async || "{}"));
    let (acceptor, serving) = (tls_acceptor(&server).unwrap(), worker_shutdown.clone());
    worker_shutdown.spawn(async move {
        serve(listener, router, acceptor, &ListenLimits::default(), serving.stopping(), &serving).await;
    });

    let mut config = GatewayConfig::default();
    let backend = BackendConfig { url: worker, model: Some("m".to_owned()), ..BackendConfig::default() };
    config.backends.push(backend);
    config.tls = TlsServerConfig { client_authorities: None, ..server };
    config.backend_tls.authorities = Some(files.authority.clone());
    config.backend_tls.certificate = Some(files.certificate);
    config.backend_tls.key = Some(files.key);
    let mut gateway = TestGateway::start(config).await;
    let authorities_pem = std::fs::read(&files.authority).unwrap();
    gateway.http = http_client(&TlsClientConfig { authorities_pem, identity_pem: None }).unwrap();
    let url = format!("https://{}/v1/completions", gateway.running.address());
    until("a request is served", async || {
        let body = Full::new(Bytes::from_static(br#"{"model":"m","prompt":"x"}"#));
        let response = gateway.http.request(Request::post(&url).body(body).unwrap()).await.unwrap();
        whole(response).await.status == 200
    })
    .await;
    worker_shutdown.finish().await;
}
