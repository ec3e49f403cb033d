//! Settings towards other nodes.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvik_runtime::secret::Secret;
use kvik_runtime::tls::TlsClientFiles;
use kvik_tier::peer::{PeerAdmission, PeerHints, PeerTlsFiles, PeerToken};
use kvik_tier::{PeerAddress, PeerOptions, PeerTier};
use serde::{Deserialize, Serialize};

use super::field::{TIMEOUTS, check, parse_size, refuse, size_text};
use crate::error::{NodeError, Result};
use crate::peers::IndexHints;

/// The least that a token of peers must have: one that cannot be guessed.
const MIN_TOKEN_BYTES: usize = 16;

/// How a node reads chunks of others, and others those of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PeerConfig {
    /// Address at which other nodes read chunks of this one; port 0 takes a free one. One that other machines can
    /// reach needs `token_file`, `tls` or `insecure`. Default: none, no node reads from this one.
    pub listen: Option<String>,
    /// Nodes whose chunks are read, `host:port` each. A name stands for all its addresses, which are looked up again
    /// every few seconds; this node itself is left out. Default: none.
    pub nodes: Vec<String>,
    /// Base addresses of coordinators, tried in order: this node has itself listed there, where it listens, and reads
    /// from all nodes of the list, besides `nodes`. Default: none.
    pub coordinators: Vec<String>,
    /// Address at which other nodes reach this one, `host:port`, which is registered with coordinators. Default: none, that of
    /// `listen`, which then must not be a wildcard.
    pub advertise: Option<String>,
    /// TLS towards coordinators and the index. Default: none, only `http://` works.
    pub coordinator_tls: TlsClientFiles,
    /// Base address of a gateway or `kvik indexer` whose index is asked first which nodes have chunks, in a fifth of
    /// `lookup_timeout_ms`; only those are asked then. It needs `coordinators`, which say on which node each worker is.
    /// Default: none, all nodes are asked.
    pub index: Option<String>,
    /// File with a token of at least 16 bytes that all nodes share. Default: none.
    pub token_file: Option<PathBuf>,
    /// PEM files of TLS between nodes: each shows its certificate and checks that of the other. Default: none, no TLS.
    pub tls: Option<PeerTlsConfig>,
    /// Whether nodes on other machines are served without a token and without TLS. Default: false.
    pub insecure: bool,
    /// Time for one question to other nodes which chunks they have; what was found by then counts. Default: 50 ms.
    pub lookup_timeout_ms: u64,
    /// Longest silence of a node that should send; it is a miss then, and the node is left alone for a while.
    /// Default: 1000 ms.
    pub response_timeout_ms: u64,
    /// Connections to each node, and threads that read from nodes. Default: 8.
    pub connections: usize,
    /// Bytes a second that are read from other nodes, such as `5GB`: what is over is not read, and is counted as
    /// skipped. Default: `0`, no bound.
    #[serde(deserialize_with = "size_text")]
    pub bytes_per_s: String,

    /// LMCache's name: whether other nodes read chunks of this one; `p2p_host` and `p2p_init_ports` say where. Default:
    /// none.
    pub enable_p2p: Option<bool>,
    /// LMCache's name for the address of `listen`. Default: none.
    pub p2p_host: Option<String>,
    /// LMCache's name for the port of `listen`, the first of the list; its ranks have one each. Default: none.
    pub p2p_init_ports: Option<Vec<u16>>,
}

/// PEM files of TLS between nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerTlsConfig {
    /// Authorities that sign the nodes' certificates.
    pub authorities: PathBuf,
    /// The certificate chain of this node.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The chunks of other nodes, as a tier of a tenant's store.
#[derive(Debug, Clone)]
pub struct PeerPlan {
    /// The tier, which may get other peers later.
    pub(crate) tier: Arc<PeerTier>,
    pub(crate) n_read_threads: usize,
    pub(crate) lookup_timeout: Duration,
    /// `None`: no bound.
    pub(crate) bytes_per_s: Option<u64>,
}

impl Default for PeerConfig {
    fn default() -> Self {
        Self {
            listen: None,
            nodes: Vec::new(),
            coordinators: Vec::new(),
            advertise: None,
            index: None,
            coordinator_tls: TlsClientFiles::default(),
            token_file: None,
            tls: None,
            insecure: false,
            lookup_timeout_ms: 50,
            response_timeout_ms: 1000,
            connections: 8,
            bytes_per_s: "0".to_owned(),
            enable_p2p: None,
            p2p_host: None,
            p2p_init_ports: None,
        }
    }
}

impl PeerConfig {
    /// Opens what other nodes are read through for one tenant; `None` where no node is named and no coordinator asked.
    ///
    /// # Errors
    /// For the first value that is not allowed, and where a token or a file of TLS cannot be read.
    pub(crate) fn open_tier(
        &self,
        tenant: &str,
        hints: Option<&Arc<IndexHints>>,
    ) -> Result<Option<PeerPlan>> {
        self.addresses()?;
        for (field, milliseconds) in [
            ("peer.lookup_timeout_ms", self.lookup_timeout_ms),
            ("peer.response_timeout_ms", self.response_timeout_ms),
        ] {
            check((1..=600_000).contains(&milliseconds), field, &milliseconds, TIMEOUTS)?;
        }
        check((1..=64).contains(&self.connections), "peer.connections", &self.connections, "1 to 64")?;
        let bytes_per_s = parse_size("peer.bytes_per_s", &self.bytes_per_s)?;
        if self.nodes.is_empty() && self.coordinators.is_empty() {
            return Ok(None);
        }
        let options = PeerOptions {
            tenant: tenant.to_owned(),
            token: self.token()?,
            lookup_timeout: Duration::from_millis(self.lookup_timeout_ms),
            response_timeout: Duration::from_millis(self.response_timeout_ms),
            n_connections: self.connections,
            tls: self.tls.as_ref().map(PeerTlsConfig::files),
            hints: hints.map(|hints| Arc::clone(hints) as Arc<dyn PeerHints>),
            ..PeerOptions::default()
        };
        let tier = PeerTier::open(options).map_err(NodeError::opening)?;
        Ok(Some(PeerPlan {
            tier: Arc::new(tier),
            n_read_threads: self.connections,
            lookup_timeout: Duration::from_millis(self.lookup_timeout_ms),
            bytes_per_s: (bytes_per_s > 0).then_some(bytes_per_s),
        }))
    }

    /// The nodes that are named.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] for the first that is no address.
    pub(crate) fn addresses(&self) -> Result<Vec<PeerAddress>> {
        let parse = |node: &String| {
            let parsed = node.parse::<PeerAddress>();
            parsed.map_err(|_| NodeError::invalid("peer.nodes", node, "host:port each, such as node-2:9106"))
        };
        self.nodes.iter().map(parse).collect()
    }

    /// What `listen` says, under its own name or under those of LMCache.
    fn listen_text(&self) -> Result<Option<String>> {
        let named = match (&self.p2p_host, self.p2p_init_ports.as_deref()) {
            (Some(host), Some([port, ..])) if host.contains(':') => Some(format!("[{host}]:{port}")),
            (Some(host), Some([port, ..])) => Some(format!("{host}:{port}")),
            (None, None) => None,
            _ => {
                return refuse(
                    "peer.p2p_host",
                    "alone",
                    "together with `peer.p2p_init_ports`, which has a port",
                );
            }
        };
        match (self.enable_p2p, named, &self.listen) {
            (Some(true), None, None) => {
                refuse("peer.enable_p2p", "true", "together with `peer.p2p_host`, or `peer.listen`")
            }
            (Some(true) | None, Some(named), Some(listen)) if named != *listen => {
                refuse("peer.p2p_host", named.as_str(), "what `peer.listen` says, or nothing")
            }
            (Some(false), _, listen) => Ok(listen.clone()),
            (_, named, listen) => Ok(listen.clone().or(named)),
        }
    }

    /// The address at which other nodes are served, if it may be used.
    ///
    /// # Errors
    /// If it cannot be parsed, or other machines can reach it and neither a token nor TLS is configured.
    pub(crate) fn check_listener(&self) -> Result<Option<SocketAddr>> {
        let Some(address) = &self.listen_text()? else { return Ok(None) };
        let Ok(parsed) = address.parse::<SocketAddr>() else {
            return refuse("peer.listen", address.as_str(), "an address and a port, such as 0.0.0.0:9106");
        };
        let is_reachable = !parsed.ip().to_canonical().is_loopback();
        if is_reachable && self.token_file.is_none() && self.tls.is_none() && !self.insecure {
            let allowed = "an address of loopback; any address together with `peer.token_file` or `peer.tls`; or \
                `peer.insecure: true`, which serves every caller";
            return refuse("peer.listen", address.as_str(), allowed);
        }
        Ok(Some(parsed))
    }

    /// Listens for other nodes, and says which of them are served; `None` where none are.
    ///
    /// # Errors
    /// As [`Self::check_listener`], and if the address cannot be used.
    pub(crate) fn listen(&self) -> Result<Option<(TcpListener, PeerAdmission)>> {
        let Some(address) = self.check_listener()? else { return Ok(None) };
        let tls = self.tls.as_ref().map(PeerTlsConfig::files);
        let admission = PeerAdmission::new(self.token()?, tls.as_ref()).map_err(NodeError::opening)?;
        let listener =
            TcpListener::bind(address).map_err(NodeError::io(format!("listen for peers on {address}")))?;
        if !address.ip().to_canonical().is_loopback() && tls.is_none() {
            if self.token_file.is_none() {
                tracing::warn!(%address, "insecure: other machines read chunks without credentials");
            } else {
                tracing::warn!(%address, "chunks go over the network unencrypted; `peer.tls` encrypts them");
            }
        }
        Ok(Some((listener, admission)))
    }

    fn token(&self) -> Result<PeerToken> {
        let Some(file) = &self.token_file else { return Ok(PeerToken::from_secret(b"")) };
        let secret = Secret::read(file)?;
        let n_bytes = secret.expose().len();
        if n_bytes < MIN_TOKEN_BYTES {
            let value = format!("{} with {n_bytes} bytes", file.display());
            return refuse("peer.token_file", value.as_str(), "a file with 16 bytes or more");
        }
        Ok(PeerToken::from_secret(secret.expose().as_bytes()))
    }
}

impl PeerTlsConfig {
    fn files(&self) -> PeerTlsFiles {
        let Self { authorities, certificate, key } = self.clone();
        PeerTlsFiles { authorities, certificate, key }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listens(json: &str) -> Result<Option<SocketAddr>> {
        serde_json::from_str::<PeerConfig>(json).unwrap().check_listener()
    }

    #[test]
    fn lmcaches_names_say_where_nodes_are_served() {
        let address = |text: &str| Some(text.parse().unwrap());
        let named = r#"{"enable_p2p": true, "p2p_host": "127.0.0.1", "p2p_init_ports": [8200, 8201]}"#;
        assert_eq!(listens(named).unwrap(), address("127.0.0.1:8200"));
        assert_eq!(listens(r#"{"p2p_host": "::1", "p2p_init_ports": [1]}"#).unwrap(), address("[::1]:1"));
        assert_eq!(listens(&named.replace("true", "false")).unwrap(), None);
        assert_eq!(
            listens(r#"{"enable_p2p": true, "listen": "127.0.0.1:9"}"#).unwrap(),
            address("127.0.0.1:9")
        );
        assert_eq!(listens("{}").unwrap(), None);
        for (wrong, field) in [
            (r#"{"enable_p2p": true}"#, "peer.enable_p2p"),
            (r#"{"p2p_host": "127.0.0.1"}"#, "peer.p2p_host"),
            (r#"{"p2p_host": "127.0.0.1", "p2p_init_ports": []}"#, "peer.p2p_host"),
            (&named.replace('{', r#"{"listen": "127.0.0.1:1", "#), "peer.p2p_host"),
            (&named.replace("127.0.0.1", "10.0.0.1"), "peer.listen"),
        ] {
            let error = listens(wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}`")), "{wrong}: {error}");
        }
    }
}
