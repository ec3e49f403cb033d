//! TLS of the server side.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use serde::{Deserialize, Serialize};
use tokio_rustls::TlsAcceptor;

use crate::error::{Result, RuntimeError};

/// Files of a server's TLS, all PEM; without a certificate the server speaks plain HTTP.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsServerConfig {
    /// The certificate chain. Default: none.
    pub certificate: Option<PathBuf>,
    /// Its private key. Default: none.
    pub key: Option<PathBuf>,
    /// Authorities that must have signed a client's certificate (mTLS). Default: none; clients
    /// need no certificate.
    pub client_authorities: Option<PathBuf>,
}

/// Builds the acceptor of `config`; `None` for plain HTTP.
///
/// # Errors
/// If a file cannot be read, or only one of certificate and key is given.
pub fn tls_acceptor(config: &TlsServerConfig) -> Result<Option<TlsAcceptor>> {
    let (certificate, key) = match (&config.certificate, &config.key) {
        (None, None) => return Ok(None),
        (Some(certificate), Some(key)) => (certificate, key),
        _ => return Err(RuntimeError::Tls("`certificate` and `key` must be given together".to_owned())),
    };
    let chain = certificates(certificate)?;
    let key_der = PrivateKeyDer::from_pem_slice(&read(key)?)
        .map_err(|error| RuntimeError::Tls(format!("{}: {error}", key.display())))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = |error: &dyn std::fmt::Display| RuntimeError::Tls(error.to_string());
    let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| tls(&error))?;
    let builder = match &config.client_authorities {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for authority in certificates(path)? {
                roots.add(authority).map_err(|error| tls(&error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| tls(&error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let server = builder.with_single_cert(chain, key_der).map_err(|error| tls(&error))?;
    Ok(Some(TlsAcceptor::from(Arc::new(server))))
}

fn read(path: &PathBuf) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| RuntimeError::Io { path: path.clone(), source })
}

fn certificates(path: &PathBuf) -> Result<Vec<CertificateDer<'static>>> {
    let pem = read(path)?;
    let chain = CertificateDer::pem_slice_iter(&pem)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|error| RuntimeError::Tls(format!("{}: {error}", path.display())))?;
    if chain.is_empty() {
        return Err(RuntimeError::Tls(format!("{} holds no certificate", path.display())));
    }
    Ok(chain)
}
