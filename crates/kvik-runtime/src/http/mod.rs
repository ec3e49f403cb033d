//! The HTTP server loop.

mod tls;

pub use tls::{TlsServerConfig, tls_acceptor};

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::Service as _;

use crate::error::{Result, RuntimeError};
use crate::shutdown::Shutdown;

/// Time for a client to send the head of a request, so that idle connections do not pile up.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failed accept, which mostly means that file descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Tells connections that the request they have is their last.
#[derive(Debug, Default)]
struct End {
    is_announced: AtomicBool,
    /// Cancelled after the flag is set.
    announced: CancellationToken,
}

/// Listens on `address`, such as `127.0.0.1:8080`; port 0 takes a free one.
///
/// # Errors
/// If the address cannot be listened on.
pub async fn listen(address: &str) -> Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .map_err(|source| RuntimeError::Listen { address: address.to_owned(), source })
}

/// Serves `router` until `closing` is ready, then lets requests that run finish, and returns when
/// all connections are closed or everything stops. The peer's [`SocketAddr`] is a request extension.
///
/// A gateway closes when it drains; a worker only when it has drained, because it is asked for its
/// state until then.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<TlsAcceptor>,
    closing: impl Future<Output = ()>,
    shutdown: &Shutdown,
) {
    let end = Arc::new(End::default());
    let mut connections = JoinSet::new();
    let mut closing = std::pin::pin!(closing);
    loop {
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(connection) => connection,
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
            () = &mut closing => break,
            () = shutdown.stopping() => break,
        };
        // Small frames of a stream must not wait for each other.
        let _ = stream.set_nodelay(true);
        spawn_connection(&mut connections, stream, peer, router.clone(), tls.clone(), Arc::clone(&end));
    }
    drop(listener);
    end.announce();
    tokio::select! {
        () = async { while connections.join_next().await.is_some() {} } => {}
        () = shutdown.stopping() => connections.shutdown().await,
    }
}

/// Not a part of [`serve`], which is compiled with each program that calls it: the HTTP server is compiled here, once.
fn spawn_connection(
    connections: &mut JoinSet<()>,
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    tls: Option<TlsAcceptor>,
    end: Arc<End>,
) {
    connections.spawn(serve_connection(stream, peer, router, tls, end));
}

async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    tls: Option<TlsAcceptor>,
    end: Arc<End>,
) {
    match tls {
        None => serve_requests(TokioIo::new(stream), peer, router, &end).await,
        Some(acceptor) => match acceptor.accept(stream).await {
            Ok(stream) => serve_requests(TokioIo::new(stream), peer, router, &end).await,
            Err(error) => tracing::debug!(%peer, %error, "TLS handshake failed"),
        },
    }
}

/// Serves the requests of one connection; must be polled by one task only.
async fn serve_requests(
    stream: impl hyper::rt::Read + hyper::rt::Write + Unpin + 'static,
    peer: SocketAddr,
    router: Router,
    end: &End,
) {
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        router.clone().call(request)
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    let mut connection = std::pin::pin!(builder.serve_connection(stream, service));
    let mut announcement = std::pin::pin!(end.announced.cancelled());
    let (mut is_awaited, mut is_told) = (false, false);
    // A connection that breaks is the client's affair and is seen by the request's own guards.
    let _ = std::future::poll_fn(|context| {
        // This runs for every frame of every stream. The announcement wakes this task once it has been
        // polled; after that a look at the flag, which nobody writes, takes no lock.
        if !is_awaited {
            is_awaited = true;
            let _ = announcement.as_mut().poll(context);
        }
        if !is_told && end.is_announced.load(Ordering::Acquire) {
            is_told = true;
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(context)
    })
    .await;
}

impl End {
    fn announce(&self) {
        // Release: whoever the token wakes sees the flag.
        self.is_announced.store(true, Ordering::Release);
        self.announced.cancel();
    }
}

#[cfg(test)]
mod tests;
