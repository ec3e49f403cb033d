//! Addresses of Redis and Valkey servers.

use std::fmt;
use std::str::FromStr;

use redis::IntoConnectionInfo as _;

use crate::error::{IndexerError, Result};

const ALLOWED: &str = "redis://, rediss://, valkey://, valkeys:// (each also with +cluster) with \
    [user[:password]@]host[:port][,host...][/database], or unix:///path[?db=database]";

/// A server, or members of one cluster, and how to log in there.
///
/// `redis` and `valkey` are plain TCP, `rediss` and `valkeys` are TLS. With `+cluster` (or `-cluster`) the
/// hosts are members of a cluster, of which one that answers is enough. `unix` is a socket of this machine.
/// Its printed form has no login.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(super) is_cluster: bool,
    pub(super) is_tls: bool,
    /// One address a host, each with the login.
    pub(super) nodes: Vec<String>,
    shown: String,
}

impl FromStr for RedisUrl {
    type Err = IndexerError;

    fn from_str(text: &str) -> Result<Self> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("an address without a scheme"))?;
        let (base, is_cluster) = match scheme.strip_suffix("+cluster").or(scheme.strip_suffix("-cluster")) {
            Some(base) => (base, true),
            None => (scheme, false),
        };
        let is_tls = matches!(base, "rediss" | "valkeys");
        if matches!(base, "unix" | "redis+unix" | "valkey+unix") && !is_cluster {
            let url = Self { is_cluster, is_tls, nodes: vec![text.to_owned()], shown: text.to_owned() };
            return url.checked();
        }
        if !is_tls && !matches!(base, "redis" | "valkey") {
            return Err(invalid(&format!("an address with the scheme {scheme:?}")));
        }
        let (login, address) = match rest.rsplit_once('@') {
            Some((login, address)) => (format!("{login}@"), address),
            None => (String::new(), rest),
        };
        let (hosts, database) = address.split_once('/').unwrap_or((address, ""));
        if is_cluster && !matches!(database, "" | "0") {
            return Err(invalid(&format!("database {database:?} of a cluster, which has only 0")));
        }
        if !is_cluster && hosts.contains(',') {
            return Err(invalid("several hosts, which are members of a cluster: use redis+cluster://"));
        }
        let nodes = hosts.split(',').map(|host| format!("{base}://{login}{host}/{database}")).collect();
        Self { is_cluster, is_tls, nodes, shown: format!("{scheme}://{address}") }.checked()
    }
}

impl RedisUrl {
    fn checked(self) -> Result<Self> {
        for node in &self.nodes {
            let parsed = node.as_str().into_connection_info();
            parsed.map_err(|error| {
                invalid(&format!("{}, of which a host is no address: {error}", self.shown))
            })?;
        }
        Ok(self)
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.shown)
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RedisUrl({self})")
    }
}

fn invalid(value: &str) -> IndexerError {
    IndexerError::Invalid { field: "redis.url".into(), value: value.into(), allowed: ALLOWED.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(text: &str) -> Vec<String> {
        text.parse::<RedisUrl>().unwrap().nodes
    }

    #[test]
    fn each_host_of_a_cluster_gets_the_login() {
        let url: RedisUrl = "rediss+cluster://u:p%40ss@a:1,b,[::1]:3".parse().unwrap();
        assert_eq!(
            url.nodes,
            ["rediss://u:p%40ss@a:1/", "rediss://u:p%40ss@b/", "rediss://u:p%40ss@[::1]:3/"]
        );
        assert!(url.is_cluster && url.is_tls);
        assert_eq!(url.to_string(), "rediss+cluster://a:1,b,[::1]:3");
        assert_eq!(format!("{url:?}"), "RedisUrl(rediss+cluster://a:1,b,[::1]:3)");
    }

    #[test]
    fn servers_databases_and_sockets_are_addresses() {
        assert_eq!(nodes("valkey://host:7000/3"), ["valkey://host:7000/3"]);
        assert_eq!(nodes("redis://host"), ["redis://host/"]);
        assert_eq!(nodes("unix:///run/redis.sock?db=1"), ["unix:///run/redis.sock?db=1"]);
    }

    #[test]
    fn what_is_no_address_is_refused_without_its_login() {
        for text in [
            "host:1",
            "http://secret@host",
            "redis://secret@a,b",
            "redis+cluster://secret@a/2",
            "redis://secret@host:port",
            "redis://secret@host/seven",
        ] {
            let error = text.parse::<RedisUrl>().unwrap_err().to_string();
            assert!(error.starts_with("`redis.url` is "), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
