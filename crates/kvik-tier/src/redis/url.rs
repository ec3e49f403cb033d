//! Addresses of Redis servers.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

use crate::error::{Result, TierError};

/// Port of a server whose URL has none.
const DEFAULT_PORT: u16 = 6379;
const ALLOWED: &str = "redis://, rediss://, redis+cluster://, rediss+cluster:// with \
    [user[:password]@]host[:port][,host...][/database], or unix://[user[:password]@]/path[?db=database]";

/// A server, or servers of one cluster, and how to log in there.
///
/// `redis` is plain TCP and `rediss` is TLS; with `+cluster` (or `-cluster`) the hosts are members of a
/// cluster, of which one that answers is enough. `unix` is a socket of this machine. Its printed form has no
/// password.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(super) is_cluster: bool,
    pub(super) is_tls: bool,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: u32,
    pub(super) endpoints: Vec<Endpoint>,
}

/// Where one server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Endpoint {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl RedisUrl {
    /// Whether `scheme` is one of Redis.
    pub(crate) fn has_scheme(scheme: &str) -> bool {
        parse_scheme(scheme).is_some()
    }
}

impl FromStr for RedisUrl {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("no scheme"))?;
        let (is_cluster, is_tls, is_unix) = parse_scheme(scheme).ok_or_else(|| invalid("unknown scheme"))?;
        let (login, rest) = split_login(rest);
        let (user, password) = parse_login(login)?;
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut url = Self { is_cluster, is_tls, user, password, database: 0, endpoints: Vec::new() };
        if is_unix {
            if !address.starts_with('/') {
                return Err(invalid("the path of a socket must be absolute"));
            }
            if !query.is_empty() {
                let database = query.strip_prefix("db=").ok_or_else(|| invalid("unknown parameter"))?;
                url.database = parse_database(database)?;
            }
            url.endpoints.push(Endpoint::Unix(PathBuf::from(decode(address)?)));
            return Ok(url);
        }
        if !query.is_empty() {
            return Err(invalid("parameters are not known here"));
        }
        let (hosts, database) = address.split_once('/').unwrap_or((address, ""));
        if !database.is_empty() {
            url.database = parse_database(database)?;
        }
        url.endpoints = hosts.split(',').map(parse_endpoint).collect::<Result<_>>()?;
        if is_cluster && url.database != 0 {
            return Err(invalid("a cluster has database 0 only"));
        }
        if !is_cluster && url.endpoints.len() > 1 {
            return Err(invalid("several hosts are members of a cluster: use redis+cluster://"));
        }
        Ok(url)
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_unix = matches!(self.endpoints.first(), Some(Endpoint::Unix(_)));
        let scheme = match (is_unix, self.is_tls) {
            (true, _) => "unix",
            (false, false) => "redis",
            (false, true) => "rediss",
        };
        write!(formatter, "{scheme}{}://", if self.is_cluster { "+cluster" } else { "" })?;
        for (idx, endpoint) in self.endpoints.iter().enumerate() {
            write!(formatter, "{}{endpoint}", if idx == 0 { "" } else { "," })?;
        }
        match (is_unix, self.database) {
            (_, 0) => Ok(()),
            (true, database) => write!(formatter, "?db={database}"),
            (false, database) => write!(formatter, "/{database}"),
        }
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RedisUrl({self})")
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(formatter, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(formatter, "{host}:{port}"),
            Self::Unix(path) => write!(formatter, "{}", path.display()),
        }
    }
}

/// Whether a scheme means a cluster, TLS, a unix socket.
fn parse_scheme(scheme: &str) -> Option<(bool, bool, bool)> {
    Some(match scheme {
        "redis" => (false, false, false),
        "rediss" => (false, true, false),
        "redis+cluster" | "redis-cluster" => (true, false, false),
        "rediss+cluster" | "rediss-cluster" => (true, true, false),
        "unix" | "redis+unix" => (false, false, true),
        _ => return None,
    })
}

/// Splits what stands before the last `@` of the authority off: a password may have an `@` of its own.
fn split_login(rest: &str) -> (Option<&str>, &str) {
    let authority_end = rest.find('/').unwrap_or(rest.len());
    match rest[..authority_end].rfind('@') {
        Some(at) => (Some(&rest[..at]), &rest[at + 1..]),
        None => (None, rest),
    }
}

fn parse_login(login: Option<&str>) -> Result<(Option<String>, Option<String>)> {
    let Some(login) = login else { return Ok((None, None)) };
    let (user, password) = match login.split_once(':') {
        Some((user, password)) => (user, Some(decode(password)?)),
        None => (login, None),
    };
    let user = decode(user)?;
    if password.is_none() {
        return Err(invalid("a user needs a password"));
    }
    Ok((Some(user).filter(|user| !user.is_empty()), password))
}

fn parse_endpoint(text: &str) -> Result<Endpoint> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(|| invalid("an open bracket"))?;
            match port.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if port.is_empty() => (host, None),
                None => return Err(invalid("something stands between bracket and port")),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if host.is_empty() {
        return Err(invalid("no host"));
    }
    let port = port.map_or(Ok(DEFAULT_PORT), |port| port.parse().map_err(|_| invalid("not a port")))?;
    Ok(Endpoint::Tcp { host: host.to_owned(), port })
}

fn parse_database(text: &str) -> Result<u32> {
    text.parse().map_err(|_| invalid("not a number of a database"))
}

fn decode(text: &str) -> Result<String> {
    let decoded = percent_decode_str(text).decode_utf8().map_err(|_| invalid("not UTF-8"))?;
    Ok(decoded.into_owned())
}

/// The URL itself is not repeated: it may have a password.
fn invalid(reason: &'static str) -> TierError {
    TierError::invalid("url", &reason, ALLOWED)
}
