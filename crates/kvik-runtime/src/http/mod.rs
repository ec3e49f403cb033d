//! The HTTP server loop.

mod tls;

pub use tls::{TlsServerConfig, tls_acceptor};

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::error::{Result, RuntimeError};
use crate::shutdown::Shutdown;

/// Time for a client to send the head of a request, so that idle connections do not pile up.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failed accept, which mostly means that file descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

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
    let graceful = GracefulShutdown::new();
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
            () = &mut closing => break,
            () = shutdown.stopping() => break,
        };
        // Small frames of a stream must not wait for each other.
        let _ = stream.set_nodelay(true);
        let (router, tls, watcher, shutdown_task) =
            (router.clone(), tls.clone(), graceful.watcher(), shutdown.clone());
        shutdown.spawn(async move {
            let connection = serve_connection(stream, peer, router, tls, watcher);
            tokio::select! {
                () = connection => {}
                () = shutdown_task.stopping() => {}
            }
        });
    }
    drop(listener);
    tokio::select! {
        () = graceful.shutdown() => {}
        () = shutdown.stopping() => {}
    }
}

async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    tls: Option<TlsAcceptor>,
    watcher: hyper_util::server::graceful::Watcher,
) {
    let router = router.layer(axum::Extension(peer));
    let service = TowerToHyperService::new(router);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    // A connection that breaks is the client's affair and is seen by the request's own guards.
    match tls {
        None => {
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            let _ = watcher.watch(connection).await;
        }
        Some(acceptor) => match acceptor.accept(stream).await {
            Ok(stream) => {
                let connection = builder.serve_connection(TokioIo::new(stream), service);
                let _ = watcher.watch(connection).await;
            }
            Err(error) => tracing::debug!(%peer, %error, "TLS handshake failed"),
        },
    }
}
