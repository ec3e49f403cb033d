//! TLS towards remote stores and between peers.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::error::{Result, TierError};

/// PEM files of TLS between peers: each side shows its certificate and checks that of the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerTlsFiles {
    /// Authorities that sign the peers' certificates.
    pub authorities: PathBuf,
    /// The certificate chain of this node.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The TLS settings of a client that trusts `ca_file`, or the authorities of this system without one.
///
/// # Errors
/// [`TierError::Invalid`] if the file has no certificate, [`TierError::Io`] if it cannot be read.
pub(crate) fn client_config(ca_file: Option<&Path>) -> Result<ClientConfig> {
    let roots = if let Some(path) = ca_file { read_authorities(path)? } else { system_authorities() };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(unusable)?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// The TLS settings of a client that shows a certificate and trusts the same authorities as its servers.
///
/// # Errors
/// [`TierError::Invalid`] if a file has not what it should, [`TierError::Io`] if it cannot be read.
pub(crate) fn mutual_client_config(files: &PeerTlsFiles) -> Result<ClientConfig> {
    let (chain, key) = read_identity(files)?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(unusable)?;
    let builder = builder.with_root_certificates(read_authorities(&files.authorities)?);
    builder.with_client_auth_cert(chain, key).map_err(unusable)
}

/// The TLS settings of a server whose clients show a certificate of the authorities that it trusts.
///
/// # Errors
/// As for [`mutual_client_config`].
pub(crate) fn mutual_server_config(files: &PeerTlsFiles) -> Result<ServerConfig> {
    let (chain, key) = read_identity(files)?;
    let roots = Arc::new(read_authorities(&files.authorities)?);
    let verifier =
        WebPkiClientVerifier::builder_with_provider(roots, provider()).build().map_err(unusable)?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(unusable)?;
    builder.with_client_cert_verifier(verifier).with_single_cert(chain, key).map_err(unusable)
}

/// A system's store may have certificates that are not understood; the others still count.
fn system_authorities() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn read_authorities(path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates("ca_file", path)? {
        let refuse = |error: rustls::Error| bad_file("ca_file", path, &error.to_string());
        roots.add(certificate).map_err(refuse)?;
    }
    Ok(roots)
}

fn read_identity(files: &PeerTlsFiles) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let chain = read_certificates("certificate", &files.certificate)?;
    let pem = read(&files.key)?;
    let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| {
        TierError::invalid("key", &files.key.display(), format!("a PEM file with a key; {error}"))
    })?;
    Ok((chain, key))
}

fn read_certificates(field: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = read(path)?;
    let certificates: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates.map_err(|error| bad_file(field, path, &error.to_string()))?;
    if certificates.is_empty() {
        return Err(bad_file(field, path, "it has none"));
    }
    Ok(certificates)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| TierError::io(format!("read {}", path.display()), error))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn unusable(error: impl Display) -> TierError {
    TierError::remote("prepare TLS", &error, false)
}

fn bad_file(field: &'static str, path: &Path, reason: &str) -> TierError {
    TierError::invalid(field, &path.display(), format!("a PEM file with certificates; {reason}"))
}
