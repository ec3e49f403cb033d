//! Where a socket is.

use std::fmt;
use std::path::PathBuf;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// An address that can be connected to: `tcp://host:port` or `ipc://path`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::sources) enum Endpoint {
    /// A host's name or address, without brackets, and a port.
    Tcp { host: String, port: u16 },
    /// The path of a unix socket.
    Ipc(PathBuf),
}

/// Both directions of a connection.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

impl Endpoint {
    /// What may be written, for messages.
    pub(in crate::sources) const ALLOWED: &'static str =
        "tcp://host:port, tcp://[address]:port or ipc:///path";

    /// Reads an address; `None` if it is not an address. A wildcard (`tcp://*:5557`) is where an engine listens and
    /// nothing to connect to.
    pub(in crate::sources) fn parse(text: &str) -> Option<Self> {
        if let Some(path) = text.strip_prefix("ipc://") {
            return (!path.is_empty()).then(|| Self::Ipc(path.into()));
        }
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port > 0)?;
        let bare = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').filter(|host| host.contains(':'))?,
            None if host.contains(':') => return None,
            None => host,
        };
        let is_host =
            !bare.is_empty() && bare.chars().all(|c| c.is_ascii_alphanumeric() || "-._:%".contains(c));
        is_host.then(|| Self::Tcp { host: bare.to_owned(), port })
    }

    /// Connects, as long as the system lets it take.
    pub(super) async fn connect(&self) -> std::io::Result<Box<dyn Duplex>> {
        Ok(match self {
            Self::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
            Self::Ipc(path) => Box::new(UnixStream::connect(path).await?),
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(formatter, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(formatter, "tcp://{host}:{port}"),
            Self::Ipc(path) => write!(formatter, "ipc://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_alike() {
        for text in ["tcp://10.0.0.7:5557", "tcp://[fd00::7]:5557", "tcp://vllm-0.vllm:1", "ipc:///run/kv"] {
            assert_eq!(Endpoint::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_cannot_be_connected_to_is_no_address() {
        for text in [
            "",
            "tcp://",
            "tcp://*:5557",
            "tcp://host",
            "tcp://host:0",
            "tcp://host:65536",
            "tcp://:5557",
            "tcp://fd00::7:5557",
            "tcp://[host]:5557",
            "tcp://a b:5557",
            "ipc://",
            "inproc://kv",
            "http://host:80",
        ] {
            assert_eq!(Endpoint::parse(text), None, "{text}");
        }
    }
}
