//! How a daemon finds the others of its cluster.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderName, HeaderValue, Uri};
use kvik_proto::client::{CoordinatorClient, HttpClient, IndexClient, TlsClientConfig, http_client};
use kvik_proto::stores::StoreInfo;
use kvik_runtime::http::TlsServerConfig;
use kvik_runtime::secret::redacted_url;
use kvik_runtime::tls::TlsClientPem;
use kvik_runtime::trust::{Trust, TrustSettings};
use kvik_tier::PeerAddress;

use super::field::{check, refuse};
use super::{DaemonConfig, PeerConfig};
use crate::error::{NodeError, Result};

const BASE: &str = "http://host:port or https://host:port, without a login";

impl PeerConfig {
    /// The address that others receive, where nothing but the port may differ from the one that is listened on;
    /// `None` where they receive none.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] if it cannot be reached from anywhere, or is no address.
    pub(crate) fn advertised(&self, listening: Option<SocketAddr>) -> Result<Option<PeerAddress>> {
        if let Some(text) = &self.advertise {
            let Ok(address) = text.parse::<PeerAddress>() else {
                return refuse("peer.advertise", text, "host:port, such as node-2:9106");
            };
            return Ok(listening.map(|_| address));
        }
        let Some(listening) = listening.filter(|_| !self.coordinators.is_empty()) else { return Ok(None) };
        if listening.ip().is_unspecified() {
            let allowed =
                "host:port at which other nodes reach this one, because `peer.listen` is every address";
            return refuse("peer.advertise", "not set", allowed);
        }
        Ok(Some(PeerAddress { host: listening.ip().to_string(), port: listening.port() }))
    }
}

impl DaemonConfig {
    /// Checks what says how the cluster is found, before anything is opened.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] for the first value that is not allowed.
    pub(crate) fn check_cluster(&self) -> Result<()> {
        for coordinator in &self.peer.coordinators {
            let shown = redacted_url(coordinator);
            check(is_base_address(coordinator), "peer.coordinators", &shown, BASE)?;
        }
        if let Some(index) = &self.peer.index {
            check(is_base_address(index), "peer.index", &redacted_url(index), BASE)?;
            let allowed = "none without `peer.coordinators`, which say on which node each worker is";
            check(!self.peer.coordinators.is_empty(), "peer.index", index, allowed)?;
        }
        self.peer.advertised(self.peer.check_listener()?).map(|_| ())
    }

    /// The coordinators that list the stores of the cluster.
    ///
    /// # Errors
    /// If a token or a file of TLS cannot be read.
    pub(crate) fn coordinator_clients(&self) -> Result<Vec<CoordinatorClient>> {
        if self.peer.coordinators.is_empty() {
            return Ok(Vec::new());
        }
        let (http, header) = (self.cluster_http()?, self.cluster_header()?);
        let client = |base: &String| CoordinatorClient::new(http.clone(), base).with_header(header.clone());
        Ok(self.peer.coordinators.iter().map(client).collect())
    }

    /// The index that says where chunks may be; `None` where none is asked.
    ///
    /// # Errors
    /// If a token or a file of TLS cannot be read.
    pub(crate) fn index_client(&self) -> Result<Option<IndexClient>> {
        let Some(index) = &self.peer.index else { return Ok(None) };
        let client = IndexClient::new(self.cluster_http()?, index);
        Ok(Some(client.with_header(self.cluster_header()?)))
    }

    fn cluster_http(&self) -> Result<HttpClient> {
        let TlsClientPem { authorities_pem, identity_pem } = self.peer.coordinator_tls.read()?;
        http_client(&TlsClientConfig { authorities_pem, identity_pem })
            .map_err(|error| NodeError::Open { reason: error.to_string() })
    }

    /// What calls to other services of the cluster show.
    fn cluster_header(&self) -> Result<Option<(HeaderName, HeaderValue)>> {
        Ok(self.trust()?.cluster_header())
    }

    /// Which callers may read over HTTP what the daemon holds.
    ///
    /// # Errors
    /// If the token cannot be read, or is none that can be used.
    pub(crate) fn trust(&self) -> Result<Trust> {
        let settings = TrustSettings {
            cluster_token: self.cluster_token.as_ref(),
            cluster_token_file: self.cluster_token_file.as_deref(),
            ..TrustSettings::default()
        };
        Ok(settings.read(&TlsServerConfig::default())?)
    }
}

/// What a daemon that starts now registers with the cluster. Its address is its name too: no two daemons have the same.
pub(crate) fn store_info(address: &PeerAddress, memory_bytes: u64) -> StoreInfo {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    StoreInfo {
        // Without the brackets, which no name of a member has.
        id: format!("{}:{}", address.host, address.port),
        epoch: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).max(1),
        address: address.to_string(),
        memory_bytes,
    }
}

/// Whether it is where a service is: no path, no query, no login.
pub(super) fn is_base_address(address: &str) -> bool {
    address.parse::<Uri>().is_ok_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.host().is_some_and(|host| !host.is_empty())
            && uri.path() == "/"
            && uri.query().is_none()
            // A login would be sent to no server, and be printed wherever the address is.
            && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advertised(json: &str) -> Result<Option<String>> {
        let config = serde_json::from_str::<PeerConfig>(json).unwrap();
        let listening = config.check_listener().unwrap();
        Ok(config.advertised(listening)?.map(|address| address.to_string()))
    }

    #[test]
    fn others_are_told_an_address_that_they_can_reach() {
        let told = |text: &str| Some(text.to_owned());
        let coordinators = r#""coordinators": ["http://c:1"]"#;
        let of = |rest: &str| advertised(&format!("{{{coordinators}, {rest}}}"));
        assert_eq!(of(r#""listen": "127.0.0.1:9106""#).unwrap(), told("127.0.0.1:9106"));
        assert_eq!(of(r#""listen": "[::1]:9106""#).unwrap(), told("[::1]:9106"));
        let any = r#""listen": "0.0.0.0:9106", "insecure": true"#;
        assert_eq!(of(&format!(r#"{any}, "advertise": "n1:9106""#)).unwrap(), told("n1:9106"));
        let error = of(any).unwrap_err().to_string();
        assert!(error.contains("`peer.advertise` is not set"), "{error}");
        let error = of(r#""listen": "127.0.0.1:1", "advertise": "n1""#).unwrap_err().to_string();
        assert!(error.contains("`peer.advertise` is n1"), "{error}");
        assert_eq!(advertised(&format!("{{{any}}}")).unwrap(), None, "without a coordinator none is told");
        assert_eq!(of(r#""advertise": "n1:9106""#).unwrap(), None, "nothing is read from it");
    }

    #[test]
    fn coordinators_that_cannot_be_asked_are_named() {
        let mut config = DaemonConfig::default();
        for wrong in ["c:1", "http://c:1/x", "http://u:canary@c:1", "ftp://c:1"] {
            config.peer.coordinators = vec![wrong.to_owned()];
            let error = config.check_cluster().unwrap_err().to_string();
            assert!(error.contains("`peer.coordinators`") && !error.contains("canary"), "{wrong}: {error}");
        }
        config.peer.coordinators = vec!["https://c:1".to_owned(), "http://[::1]:8081".to_owned()];
        config.check_cluster().unwrap();
        config.peer.index = Some("http://g:1".to_owned());
        config.check_cluster().unwrap();
        config.peer.coordinators.clear();
        let error = config.check_cluster().unwrap_err().to_string();
        assert!(error.contains("`peer.index`"), "{error}");
    }

    #[test]
    fn the_name_of_a_store_is_one_that_coordinators_take() {
        let address = "[fd00::1]:9106".parse().unwrap();
        let info = store_info(&address, 7);
        assert_eq!((info.id.as_str(), info.address.as_str()), ("fd00::1:9106", "[fd00::1]:9106"));
    }
}
