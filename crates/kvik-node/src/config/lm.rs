//! Settings towards clients of LMCache's plain remote protocol.

use std::net::{SocketAddr, TcpListener};

use serde::{Deserialize, Serialize};

use super::field::refuse;
use crate::error::{NodeError, Result};

/// How clients of LMCache's plain remote protocol (`remote_url: lm://host:port`) are served.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LmConfig {
    /// Address at which LMCache's clients store and read their chunks; port 0 takes a free one. The protocol knows no
    /// credentials: one that other machines can reach needs `insecure`. Default: none.
    pub listen: Option<String>,
    /// Name of the tenant in whose store the chunks are. Default: none, that of `tiers`; with `tenants` it must be set.
    pub tenant: Option<String>,
    /// Whether clients on other machines are served, all of them. Default: false.
    pub insecure: bool,
}

impl LmConfig {
    /// The address at which clients are served, if it may be used.
    ///
    /// # Errors
    /// If it cannot be parsed, or other machines can reach it and that is not allowed.
    pub(crate) fn check_listener(&self) -> Result<Option<SocketAddr>> {
        let Some(address) = &self.listen else { return Ok(None) };
        let Ok(parsed) = address.parse::<SocketAddr>() else {
            return refuse("lm.listen", address.as_str(), "an address and a port, such as 127.0.0.1:65432");
        };
        if !parsed.ip().to_canonical().is_loopback() && !self.insecure {
            let allowed = "an address of loopback; or any address together with `lm.insecure: true`, which serves every \
                caller, because the protocol knows no credentials";
            return refuse("lm.listen", address.as_str(), allowed);
        }
        Ok(Some(parsed))
    }

    /// Listens for clients; `None` where none are served.
    ///
    /// # Errors
    /// As [`Self::check_listener`], and if the address cannot be used.
    pub(crate) fn listen(&self) -> Result<Option<TcpListener>> {
        let Some(address) = self.check_listener()? else { return Ok(None) };
        let listener = TcpListener::bind(address)
            .map_err(NodeError::io(format!("listen for clients of LMCache on {address}")))?;
        if !address.ip().to_canonical().is_loopback() {
            tracing::warn!(%address, "insecure: other machines store and read LMCache's chunks without credentials");
        }
        Ok(Some(listener))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str) -> Result<Option<SocketAddr>> {
        serde_json::from_str::<LmConfig>(json).unwrap().check_listener()
    }

    #[test]
    fn other_machines_are_served_only_where_that_is_said() {
        assert_eq!(check("{}").unwrap(), None);
        for allowed in [
            r#"{"listen": "127.0.0.1:65432"}"#,
            r#"{"listen": "[::1]:0"}"#,
            r#"{"listen": "0.0.0.0:65432", "insecure": true}"#,
        ] {
            assert!(check(allowed).unwrap().is_some(), "{allowed}");
        }
        for refused in
            [r#"{"listen": "0.0.0.0:65432"}"#, r#"{"listen": "10.0.0.1:1"}"#, r#"{"listen": "localhost"}"#]
        {
            let error = check(refused).unwrap_err().to_string();
            assert!(error.contains("`lm.listen`"), "{refused}: {error}");
        }
    }
}
