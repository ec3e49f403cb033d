//! Addresses of Redis and Valkey servers.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Port of a server whose URL has none.
const DEFAULT_PORT: u16 = 6379;
/// What is escaped in the path of a socket.
const IN_PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_');

/// A server, or members of one cluster, and how to log in there.
///
/// `redis` and `valkey` are plain TCP, `rediss` and `valkeys` are TLS. With `+cluster` (or `-cluster`) the hosts are
/// members of a cluster, of which one that answers is enough. `unix` is a socket of this machine. A login ends at
/// the last `@`, so a password may have `/` and `@`; its other characters may be escaped as `%XX`. The printed forms
/// have no login.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    /// Whether the hosts are members of a cluster.
    pub is_cluster: bool,
    /// Whether connections use TLS.
    pub is_tls: bool,
    /// The user; `None` for the default one.
    pub user: Option<String>,
    /// The password; always there beside a user.
    pub password: Option<String>,
    /// The database; 0 in a cluster.
    pub database: u32,
    /// Where the servers listen, at least one; several in a cluster only.
    pub endpoints: Vec<RedisEndpoint>,
}

/// Where one server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RedisEndpoint {
    /// A host and a port.
    Tcp {
        /// The host, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A socket of this machine.
    Unix(PathBuf),
}

/// Why text is no address of Redis. It repeats nothing of the text, which may have a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}; allowed: {}", RedisUrlError::ALLOWED)]
pub struct RedisUrlError {
    /// What is wrong.
    pub reason: &'static str,
}

impl RedisUrlError {
    /// The addresses that there are.
    pub const ALLOWED: &str = "redis://, rediss://, valkey://, valkeys:// (each also with +cluster) with \
        [user:password@]host[:port][,host...][/database], or \
        unix://[user:password@]/path[?db=database][&user=user][&pass=password]";
}

impl RedisUrl {
    /// Whether `scheme` is one of Redis.
    pub fn has_scheme(scheme: &str) -> bool {
        parse_scheme(scheme).is_some()
    }

    /// One URL for each endpoint, with the login and everything that needs it escaped. They are secret.
    pub fn node_urls(&self) -> Vec<String> {
        let escaped = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let user = self.user.as_deref().map(escaped).unwrap_or_default();
        let password = self.password.as_deref().map(escaped);
        let database = self.database;
        let node = |endpoint: &RedisEndpoint| match endpoint {
            RedisEndpoint::Tcp { .. } => {
                let scheme = if self.is_tls { "rediss" } else { "redis" };
                let login =
                    password.as_ref().map(|password| format!("{user}:{password}@")).unwrap_or_default();
                format!("{scheme}://{login}{endpoint}/{database}")
            }
            RedisEndpoint::Unix(path) => {
                let path = path.to_string_lossy();
                let path = utf8_percent_encode(&path, IN_PATH);
                let user = if user.is_empty() { String::new() } else { format!("&user={user}") };
                let login = password.as_ref().map(|password| format!("{user}&pass={password}"));
                format!("unix://{path}?db={database}{}", login.unwrap_or_default())
            }
        };
        self.endpoints.iter().map(node).collect()
    }
}

impl FromStr for RedisUrl {
    type Err = RedisUrlError;

    fn from_str(text: &str) -> Result<Self, RedisUrlError> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("an address without a scheme"))?;
        let (is_cluster, is_tls, is_unix) =
            parse_scheme(scheme).ok_or_else(|| invalid("an address with another scheme"))?;
        let (login, address) = split_login(rest, is_unix);
        let (user, password) = login.map(parse_login).transpose()?.unwrap_or_default();
        let mut url = Self { is_cluster, is_tls, user, password, database: 0, endpoints: Vec::new() };
        if is_unix {
            return url.with_socket(address);
        }
        if address.contains(['?', '#']) {
            return Err(invalid("an address with parameters, which only a socket has"));
        }
        let (hosts, database) = address.split_once('/').unwrap_or((address, ""));
        if !database.is_empty() {
            url.database = parse_database(database)?;
        }
        url.endpoints = hosts.split(',').map(parse_endpoint).collect::<Result<_, _>>()?;
        if is_cluster && url.database != 0 {
            return Err(invalid("an address with a database of a cluster, which has only 0"));
        }
        if !is_cluster && url.endpoints.len() > 1 {
            return Err(invalid("several hosts, which are members of a cluster: use redis+cluster://"));
        }
        Ok(url)
    }
}

impl RedisUrl {
    fn with_socket(mut self, address: &str) -> Result<Self, RedisUrlError> {
        let (path, query) = address.split_once('?').unwrap_or((address, ""));
        if !path.starts_with('/') {
            return Err(invalid("a socket whose path is not absolute"));
        }
        let (mut user, mut password) = (None, None);
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            match parameter.split_once('=') {
                Some(("db", number)) => self.database = parse_database(number)?,
                Some(("user" | "username", name)) => user = Some(decode(name)?),
                Some(("pass" | "password", secret)) => password = Some(decode(secret)?),
                _ => return Err(invalid("a socket with an unknown parameter")),
            }
        }
        if user.is_some() && password.is_none() {
            return Err(invalid("a user without a password"));
        }
        if password.is_some() {
            if self.password.is_some() {
                return Err(invalid("a login before the path and one in the parameters"));
            }
            (self.user, self.password) = (user.filter(|user| !user.is_empty()), password);
        }
        self.endpoints.push(RedisEndpoint::Unix(PathBuf::from(decode(path)?)));
        Ok(self)
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_unix = matches!(self.endpoints.first(), Some(RedisEndpoint::Unix(_)));
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

impl fmt::Display for RedisEndpoint {
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
    let (base, is_cluster) = match scheme.strip_suffix("+cluster").or(scheme.strip_suffix("-cluster")) {
        Some(base) => (base, true),
        None => (scheme, false),
    };
    match base {
        "redis" | "valkey" => Some((is_cluster, false, false)),
        "rediss" | "valkeys" => Some((is_cluster, true, false)),
        "unix" | "redis+unix" | "valkey+unix" if !is_cluster => Some((false, false, true)),
        _ => None,
    }
}

/// Splits a login off. It ends at the last `@`, since neither a host nor a database has one; that of a socket ends
/// where its path begins.
fn split_login(rest: &str, is_unix: bool) -> (Option<&str>, &str) {
    let end = if !is_unix {
        rest.rfind('@')
    } else if rest.starts_with('/') {
        None
    } else {
        rest.rfind("@/")
    };
    end.map_or((None, rest), |end| (Some(&rest[..end]), &rest[end + 1..]))
}

fn parse_login(login: &str) -> Result<(Option<String>, Option<String>), RedisUrlError> {
    let (user, password) = login.split_once(':').ok_or_else(|| invalid("a user without a password"))?;
    let user = decode(user)?;
    Ok((Some(user).filter(|user| !user.is_empty()), Some(decode(password)?)))
}

fn parse_endpoint(text: &str) -> Result<RedisEndpoint, RedisUrlError> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(|| invalid("a host with an open bracket"))?;
            match port.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if port.is_empty() => (host, None),
                None => return Err(invalid("a host with text between bracket and port")),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let is_host = |byte: u8| byte.is_ascii_graphic() && !b"/?#@\\\"<>^`{|}".contains(&byte);
    if host.is_empty() || !host.bytes().all(is_host) {
        return Err(invalid("an address without a host"));
    }
    let port =
        port.map_or(Ok(DEFAULT_PORT), |port| port.parse().map_err(|_| invalid("a port that is no number")))?;
    Ok(RedisEndpoint::Tcp { host: host.to_owned(), port })
}

fn parse_database(text: &str) -> Result<u32, RedisUrlError> {
    text.parse().map_err(|_| invalid("a database that is no number"))
}

fn decode(text: &str) -> Result<String, RedisUrlError> {
    let decoded =
        percent_decode_str(text).decode_utf8().map_err(|_| invalid("an address that is not UTF-8"))?;
    Ok(decoded.into_owned())
}

fn invalid(reason: &'static str) -> RedisUrlError {
    RedisUrlError { reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> RedisUrl {
        text.parse().unwrap()
    }

    fn tcp(host: &str, port: u16) -> RedisEndpoint {
        RedisEndpoint::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn addresses_are_understood() {
        let url = parse("rediss://me:p%40ss@w@host:1/3");
        assert_eq!((url.is_cluster, url.is_tls, url.database), (false, true, 3));
        assert_eq!((url.user.as_deref(), url.password.as_deref()), (Some("me"), Some("p@ss@w")));
        assert_eq!(url.endpoints, [tcp("host", 1)]);
        let url = parse("redis+cluster://:secret@a,b:7000,[::1]:7001");
        assert_eq!((url.is_cluster, url.is_tls), (true, false));
        assert_eq!((url.user.as_deref(), url.password.as_deref()), (None, Some("secret")));
        assert_eq!(url.endpoints, [tcp("a", 6379), tcp("b", 7000), tcp("::1", 7001)]);
        assert_eq!(parse("valkey-cluster://a,b:7000,[::1]:7001").endpoints, url.endpoints);
        let url = parse("unix:///run/redis.sock?db=2");
        assert_eq!(url.endpoints, [RedisEndpoint::Unix(PathBuf::from("/run/redis.sock"))]);
        assert_eq!((url.database, url.password), (2, None));
    }

    #[test]
    fn a_password_may_have_slashes_and_at_signs() {
        let url = parse("redis://u:a/b@c?d@host:1/2");
        assert_eq!((url.user.as_deref(), url.password.as_deref()), (Some("u"), Some("a/b@c?d")));
        assert_eq!((url.database, &url.endpoints[..]), (2, &[tcp("host", 1)][..]));
        assert_eq!(url.node_urls(), ["redis://u:a%2Fb%40c%3Fd@host:1/2"]);
    }

    #[test]
    fn a_socket_takes_its_login_before_the_path_or_in_the_parameters() {
        let before = parse("unix://u:a/b@/run/s?db=1");
        assert_eq!((before.user.as_deref(), before.password.as_deref()), (Some("u"), Some("a/b")));
        assert_eq!(parse("unix:///run/s?db=1&user=u&pass=a%2Fb"), before);
        assert_eq!(before.node_urls(), ["unix:///run/s?db=1&user=u&pass=a%2Fb"]);
    }

    #[test]
    fn each_host_of_a_cluster_gets_the_login() {
        let url = parse("valkeys+cluster://u:p%40ss@a:1,b,[::1]:3");
        assert_eq!(
            url.node_urls(),
            ["rediss://u:p%40ss@a:1/0", "rediss://u:p%40ss@b:6379/0", "rediss://u:p%40ss@[::1]:3/0"]
        );
    }

    #[test]
    fn no_printed_form_has_the_password() {
        for text in [
            "redis://u:canary@h:1/3",
            "rediss+cluster://:canary@h:1",
            "unix://:canary@/s?db=1",
            "unix:///s?db=1&pass=canary",
            "redis://u:x/canary@h",
        ] {
            let url = parse(text);
            for shown in [url.to_string(), format!("{url:?}"), super::super::redacted_url(text)] {
                assert!(!shown.contains("canary"), "{shown}");
            }
        }
    }

    #[test]
    fn what_is_no_address_is_refused_without_its_text() {
        for text in [
            "canary:6379",
            "http://canary",
            "redis://",
            "redis://canary:port",
            "redis://u:canary",
            "redis://canary/x",
            "redis://canary,b",
            "redis://u:canary@",
            "redis+cluster://canary/1",
            "redis://canary@host",
            "redis://[::1canary",
            "redis://[::1]canary",
            "redis://canary?x=1",
            "redis://h/0?password=canary@h",
            "unix://canary",
            "unix:///canary?x=1",
            "unix:///s?user=canary",
            "unix://u:canary@/s?pass=canary",
        ] {
            let error = text.parse::<RedisUrl>().unwrap_err().to_string();
            assert!(error.contains("allowed: redis://"), "{error}");
            assert!(!error.contains("canary"), "{error}");
        }
    }
}
