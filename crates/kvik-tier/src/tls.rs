//! TLS towards remote stores.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};

use crate::error::{Result, TierError};

/// The TLS settings of a client that trusts `ca_file`, or the authorities of this system without one.
///
/// # Errors
/// [`TierError::Invalid`] if the file has no certificate, [`TierError::Io`] if it cannot be read.
pub(crate) fn client_config(ca_file: Option<&Path>) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(path) => {
            let pem = fs::read(path)
                .map_err(|error| TierError::io(format!("read authorities {}", path.display()), error))?;
            for certificate in CertificateDer::pem_slice_iter(&pem) {
                let certificate = certificate.map_err(|error| bad_file(path, &error.to_string()))?;
                roots.add(certificate).map_err(|error| bad_file(path, &error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(bad_file(path, "it has none"));
            }
        }
        None => {
            // A system's store may have certificates that are not understood; the others still count.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| TierError::remote("prepare TLS", &error, false))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

fn bad_file(path: &Path, reason: &str) -> TierError {
    TierError::invalid("ca_file", &path.display(), format!("a PEM file with certificates; {reason}"))
}
