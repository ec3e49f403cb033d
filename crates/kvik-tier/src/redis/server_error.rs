//! Errors that a Redis server answers.

use kvik_types::RedisEndpoint as Endpoint;

use crate::error::TierError;

/// A reply that is an error, by what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServerError {
    /// The key is another server's; `None` for the host means the one that said so.
    Moved { host: Option<String>, port: u16 },
    /// The key is being moved and may be at another server already.
    Ask { host: Option<String>, port: u16 },
    /// The server's memory is full.
    NoRoom,
    /// The server takes no writes.
    ReadOnly(String),
    /// It may work later.
    Transient(String),
    /// It will not work.
    Final(String),
}

impl ServerError {
    pub(super) fn parse(message: &str) -> Self {
        let mut words = message.split(' ');
        let code = words.next().unwrap_or_default();
        match code {
            "MOVED" | "ASK" => match words.nth(1).and_then(parse_address) {
                Some((host, port)) if code == "MOVED" => Self::Moved { host, port },
                Some((host, port)) => Self::Ask { host, port },
                None => Self::Final(message.to_owned()),
            },
            "OOM" => Self::NoRoom,
            // The second is a server that cannot save its state and was told to stop writing then.
            "READONLY" | "MISCONF" => Self::ReadOnly(message.to_owned()),
            "LOADING" | "BUSY" | "CLUSTERDOWN" | "TRYAGAIN" | "MASTERDOWN" | "NOREPLICAS" => {
                Self::Transient(message.to_owned())
            }
            _ if message.contains("max number of clients") => Self::Transient(message.to_owned()),
            _ => Self::Final(message.to_owned()),
        }
    }

    /// The error of an item that is not tried again.
    pub(super) fn to_error(&self, action: &str) -> TierError {
        match self {
            Self::Moved { .. } | Self::Ask { .. } => {
                let reason = "the server is a member of a cluster and the key is elsewhere: \
                    use redis+cluster://, or the cluster does not agree on where it is";
                TierError::remote(action, &reason, true)
            }
            Self::NoRoom => TierError::remote(action, &"the server's memory is full", true),
            Self::Transient(message) => TierError::remote(action, message, true),
            Self::ReadOnly(message) | Self::Final(message) => TierError::remote(action, message, false),
        }
    }

    /// Where a redirection leads, and whether it is for this one time.
    pub(super) fn redirection(&self, from: &Endpoint) -> Option<(Endpoint, bool)> {
        let (host, port, is_once) = match self {
            Self::Moved { host, port } => (host, *port, false),
            Self::Ask { host, port } => (host, *port, true),
            _ => return None,
        };
        let host = match (host, from) {
            (Some(host), _) | (None, Endpoint::Tcp { host, .. }) => host.clone(),
            (None, Endpoint::Unix(_)) => return None,
        };
        Some((Endpoint::Tcp { host, port }, is_once))
    }
}

/// `host:port`; the host may be an address with colons, or nothing.
fn parse_address(text: &str) -> Option<(Option<String>, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Some((Some(host.to_owned()).filter(|host| !host.is_empty()), port.parse().ok()?))
}
