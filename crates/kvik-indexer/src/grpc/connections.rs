//! The connections of the gRPC service: plain or TLS, bounded, each with a deadline for its handshake.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use kvik_runtime::shutdown::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

/// Pause after a failed accept, which mostly means that file descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection that counts until it is dropped.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    _permit: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Accepts connections for `accepted` until `shutdown` drains: at most `max_connections` at a time, each with `handshake_timeout`
/// for TLS.
pub async fn accept(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    (max_connections, handshake_timeout): (usize, Duration),
    accepted: mpsc::Sender<io::Result<Connection>>,
    shutdown: Shutdown,
) {
    let tls = tls.as_ref().map(with_http2);
    let permits = Arc::new(Semaphore::new(max_connections));
    let mut handshakes = JoinSet::new();
    loop {
        let next = async {
            let permit = Arc::clone(&permits).acquire_owned().await.map_err(io::Error::other)?;
            let (stream, _) = listener.accept().await?;
            io::Result::Ok((stream, permit))
        };
        let (stream, permit) = tokio::select! {
            next = next => match next {
                Ok(next) => next,
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a gRPC connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            Some(_) = handshakes.join_next() => continue,
            () = shutdown.draining() => return,
        };
        // Small frames must not wait for each other.
        let _ = stream.set_nodelay(true);
        let (tls, accepted) = (tls.clone(), accepted.clone());
        handshakes.spawn(async move {
            let stream = match tls {
                None => Stream::Plain(stream),
                Some(tls) => match tokio::time::timeout(handshake_timeout, tls.accept(stream)).await {
                    Ok(Ok(stream)) => Stream::Tls(Box::new(stream)),
                    // A client that cannot be understood is its own affair.
                    Ok(Err(_)) | Err(_) => return,
                },
            };
            // The receiver is gone when the service ends.
            let _ = accepted.send(Ok(Connection { stream, _permit: permit })).await;
        });
    }
}

/// The same acceptor for clients that speak HTTP/2.
fn with_http2(acceptor: &TlsAcceptor) -> TlsAcceptor {
    let mut config = rustls::ServerConfig::clone(acceptor.config());
    config.alpn_protocols = vec![b"h2".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(context),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
