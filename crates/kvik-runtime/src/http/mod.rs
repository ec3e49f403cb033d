//! The HTTP server loop.
//!
//! Every listener is bounded: connections, bytes of bodies that arrive, and the time for a handshake, a head, a body, a
//! pause between requests and a client that does not read. [`ListenLimits`] has the values.

mod body;
mod connection;
mod connections;
mod limits;
mod monitor;
mod stream;
mod tls;

pub use body::{RequestBodyError, discard};
pub use limits::{AnswerLimits, InvalidLimit, ListenLimits};
pub use tls::{TlsServerConfig, tls_acceptor};

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use crate::error::{Result, RuntimeError};
use crate::shutdown::Shutdown;

use self::body::BodyBudget;
use self::connection::{End, Listening, serve_connection};
use self::connections::Connections;
use self::monitor::Monitor;

/// Pause after an accept that failed, and between two attempts to make room for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Connections that the server closed, by `reason`: `handshake`, `header`, `idle`, `stall`, `limit`.
const CLOSED: &str = "kvik_http_connections_closed_total";

/// What an address to listen on looks like.
const ADDRESS_RULE: &str = "no address; allowed: an address and a port, such as 127.0.0.1:8080 or [::]:8080";

/// Listens on `address`, such as `127.0.0.1:8080`; port 0 takes a free one.
///
/// # Errors
/// If it is no address, or one that cannot be listened on.
pub async fn listen(address: &str) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|source| {
        let is_address = source.kind() != io::ErrorKind::InvalidInput && !address.starts_with(':');
        let source =
            if is_address { source } else { io::Error::new(io::ErrorKind::InvalidInput, ADDRESS_RULE) };
        RuntimeError::Listen { address: address.to_owned(), source }
    })
}

/// Raises the process's limit of open files as far as the system lets it; returns the limit then. Most systems
/// start programs with a limit far below `limits.max_connections`.
pub fn raise_file_limit() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    }
}

/// Serves `router` until `closing` is ready, then lets requests that run finish, and returns when
/// all connections are closed or everything stops. The peer's [`SocketAddr`] is a request extension;
/// [`AnswerLimits`] is an extension that a response may have.
///
/// A gateway closes when it drains; a worker only when it has drained, because it is asked for its
/// state until then.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<TlsAcceptor>,
    limits: &ListenLimits,
    closing: impl Future<Output = ()>,
    shutdown: &Shutdown,
) {
    let budget = Arc::new(BodyBudget::new(limits.max_body_bytes_in_flight));
    let listening = Arc::new(Listening { router, tls, limits: limits.clone(), budget, end: End::default() });
    let mut connections = Connections::new(limits.max_connections);
    // Accepted while there was no room.
    let mut in_hand: Option<(TcpStream, SocketAddr)> = None;
    let mut closing = std::pin::pin!(closing);
    loop {
        if connections.has_room()
            && let Some((stream, peer)) = in_hand.take()
        {
            open(&mut connections, stream, peer, &listening);
        }
        tokio::select! {
            accepted = listener.accept(), if in_hand.is_none() => match accepted {
                Ok(connection) => {
                    in_hand = Some(connection);
                    if !connections.has_room() {
                        connections.evict();
                    }
                }
                // Mostly means that file descriptors are used up.
                Err(error) => {
                    if !connections.evict() {
                        tracing::warn!(%error, "failed to accept a connection");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            true = connections.join_next() => {}
            () = tokio::time::sleep(ACCEPT_PAUSE), if in_hand.is_some() => {
                connections.evict();
            }
            () = &mut closing => break,
            () = shutdown.stopping() => break,
        }
    }
    drop((listener, in_hand));
    listening.end.announce();
    tokio::select! {
        () = async { while connections.join_next().await {} } => {}
        () = shutdown.stopping() => connections.shutdown().await,
    }
}

/// Not a part of [`serve`], which is compiled with each program that calls it: the HTTP server is compiled here, once.
fn open(connections: &mut Connections, stream: TcpStream, peer: SocketAddr, listening: &Arc<Listening>) {
    let monitor = Arc::new(Monitor::new(Instant::now()));
    let connection = serve_connection(stream, peer, Arc::clone(listening), Arc::clone(&monitor));
    connections.spawn(monitor, connection);
}

fn count_closed(reason: &'static str) {
    metrics::counter!(CLOSED, "reason" => reason).increment(1);
}

#[cfg(test)]
mod tests;
