//! The HTTP client that all calls between services go through.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::ClientError;

/// A pooled HTTP/1.1 client for bodies that are whole in memory.
pub type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// Time to establish a connection: far above any network a service should have to its worker, far
/// below what a client waits.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle connections kept for each host.
const MAX_IDLE_PER_HOST: usize = 256;

/// TLS towards other services, all PEM.
#[derive(Debug, Clone, Default)]
pub struct TlsClientConfig {
    /// Authorities that sign servers' certificates; empty: none is trusted and only `http://` works.
    pub authorities_pem: Vec<u8>,
    /// The certificate chain and key that this client shows, for mTLS.
    pub identity_pem: Option<(Vec<u8>, Vec<u8>)>,
}

/// Sends a request.
///
/// The same as the client's own method, whose whole machinery is compiled again in each crate that calls it; here it
/// is compiled once.
pub fn send(http: &HttpClient, request: Request<Full<Bytes>>) -> ResponseFuture {
    http.request(request)
}

/// Builds a client.
///
/// # Errors
/// [`ClientError::Configuration`] if a PEM cannot be read or a key does not fit its certificate.
pub fn http_client(tls: &TlsClientConfig) -> Result<HttpClient, ClientError> {
    let configuration = |reason: String| ClientError::Configuration(reason);
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&tls.authorities_pem) {
        let certificate = certificate.map_err(|error| configuration(format!("read authorities: {error}")))?;
        roots.add(certificate).map_err(|error| configuration(format!("add authority: {error}")))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| configuration(error.to_string()))?
        .with_root_certificates(roots);
    let config = match &tls.identity_pem {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => {
            let chain = CertificateDer::pem_slice_iter(chain)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| configuration(format!("read certificate: {error}")))?;
            let key = PrivateKeyDer::from_pem_slice(key)
                .map_err(|error| configuration(format!("read key: {error}")))?;
            builder.with_client_auth_cert(chain, key).map_err(|error| configuration(error.to_string()))?
        }
    };
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_or_http()
        .enable_http1()
        .wrap_connector(connector);
    Ok(Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_max_idle_per_host(MAX_IDLE_PER_HOST)
        .build(connector))
}
