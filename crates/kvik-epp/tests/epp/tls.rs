//! TLS towards data planes, with certificates on both sides.

use std::sync::Arc;

use hyper_util::rt::TokioIo;
use kvik_epp::{Epp, EppConfig};
use kvik_gateway::GatewayConfig;
use kvik_runtime::http::TlsServerConfig;
use kvik_runtime::shutdown::Shutdown;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tonic::transport::Endpoint;

use crate::data_plane::{DataPlane, completion};
use crate::engine::Engine;
use crate::support::{backends, start_metrics};

#[tokio::test]
async fn only_data_planes_with_a_certificate_are_served_where_one_is_wanted() {
    let engines = Engine::start_many(1).await;
    let folder = tempfile::tempdir().unwrap();
    let certified = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let certificate = file("certificate.pem", certified.cert.pem());
    let tls = TlsServerConfig {
        certificate: Some(certificate.clone()),
        key: Some(file("key.pem", certified.signing_key.serialize_pem())),
        // Both sides have the same one.
        client_authorities: Some(certificate),
    };
    let config = EppConfig { listen: "127.0.0.1:0".to_owned(), tls, ..EppConfig::default() };
    let gateway = GatewayConfig {
        listen: "127.0.0.1:0".to_owned(),
        backends: backends(&engines),
        ..GatewayConfig::default()
    };
    start_metrics();
    let epp = Epp::start(config, gateway, &Shutdown::new()).await.unwrap();
    let address = epp.address();
    let connect = async |has_certificate: bool| {
        let mut roots = RootCertStore::empty();
        roots.add(certified.cert.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
        let mut client = if has_certificate {
            let chain = vec![certified.cert.der().clone()];
            client.with_client_auth_cert(chain, PrivateKeyDer::from(key)).unwrap()
        } else {
            client.with_no_client_auth()
        };
        client.alpn_protocols = vec![b"h2".to_vec()];
        let connector = TlsConnector::from(Arc::new(client));
        let connect = tower::service_fn(move |_| {
            let connector = connector.clone();
            async move {
                let name = ServerName::try_from("localhost").unwrap();
                let stream = connector.connect(name, TcpStream::connect(address).await?).await?;
                std::io::Result::Ok(TokioIo::new(stream))
            }
        });
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        DataPlane::new(endpoint.connect_with_connector_lazy(connect))
    };
    let (mut exchange, outcome) = connect(true).await.complete(&completion(1, 10)).await;
    assert_eq!(outcome.sent().endpoints, [engines[0].endpoint()]);
    exchange.answer(200, None, &[b"{}"]).await;
    assert!(connect(false).await.try_open().await.is_err());
    assert!(DataPlane::connect_lazy(address).try_open().await.is_err());
}
