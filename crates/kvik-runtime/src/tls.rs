//! The files of TLS towards other services.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Result, RuntimeError};

/// Files of a client's TLS, all PEM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsClientFiles {
    /// Authorities that sign the servers' certificates. Default: none, only `http://` works.
    pub authorities: Option<PathBuf>,
    /// The certificate chain that the client shows (mTLS). Default: none.
    pub certificate: Option<PathBuf>,
    /// Its private key. Default: none.
    pub key: Option<PathBuf>,
}

/// The content of [`TlsClientFiles`].
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TlsClientPem {
    /// Authorities that sign the servers' certificates; empty for none.
    pub authorities_pem: Vec<u8>,
    /// The certificate chain that the client shows, and its private key.
    pub identity_pem: Option<(Vec<u8>, Vec<u8>)>,
}

impl TlsClientFiles {
    /// Whether certificate and key are both given or both missing; one alone is of no use.
    pub fn is_paired(&self) -> bool {
        self.certificate.is_some() == self.key.is_some()
    }

    /// Reads the files.
    ///
    /// # Errors
    /// If a file cannot be read, or only one of certificate and key is given.
    pub fn read(&self) -> Result<TlsClientPem> {
        let identity_pem = match (&self.certificate, &self.key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((read(certificate)?, read(key)?)),
            _ => return Err(RuntimeError::Tls("`certificate` and `key` must be given together".to_owned())),
        };
        let authorities_pem = self.authorities.as_deref().map(read).transpose()?.unwrap_or_default();
        Ok(TlsClientPem { authorities_pem, identity_pem })
    }
}

impl std::fmt::Debug for TlsClientPem {
    /// Tells nothing of the key.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("TlsClientPem")
            .field("n_authorities_bytes", &self.authorities_pem.len())
            .field("has_identity", &self.identity_pem.is_some())
            .finish()
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| RuntimeError::Io { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_and_an_error_names_the_one_that_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| Some(folder.path().join(name));
        for name in ["ca.pem", "chain.pem", "key.pem"] {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        let mut files = TlsClientFiles {
            authorities: path("ca.pem"),
            certificate: path("chain.pem"),
            key: path("key.pem"),
        };
        let pem = files.read().unwrap();
        assert_eq!(pem.authorities_pem, b"ca.pem");
        assert_eq!(pem.identity_pem, Some((b"chain.pem".to_vec(), b"key.pem".to_vec())));
        assert!(!format!("{pem:?}").contains("key.pem"));

        files.key = path("none.pem");
        assert!(files.read().unwrap_err().to_string().contains("none.pem"));
        files.key = None;
        assert!(!files.is_paired());
        assert!(files.read().unwrap_err().to_string().contains("together"));
        assert_eq!(TlsClientFiles::default().read().unwrap(), TlsClientPem::default());
    }
}
