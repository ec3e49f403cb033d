//! Connections to other machines whose every read and write ends in time.

mod resolve;

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use resolve::Resolver;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};

use crate::error::{Result, TierError};

/// A connection, with or without TLS.
#[derive(Debug)]
pub(crate) enum Channel {
    Plain(TimedSocket),
    TlsClient(Box<StreamOwned<ClientConnection, TimedSocket>>),
    TlsServer(Box<StreamOwned<ServerConnection, TimedSocket>>),
}

/// A socket whose reads and writes end in time: none waits longer than `silence`, and none after `deadline`.
#[derive(Debug)]
pub(crate) struct TimedSocket {
    socket: Socket,
    silence: Duration,
    deadline: Instant,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

// === impl Channel ===

impl Channel {
    /// Begins TLS as a client, with the server `host`. The handshake happens with the first bytes.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if the host cannot be that of a certificate.
    pub(crate) fn client(socket: TimedSocket, config: &Arc<ClientConfig>, host: &str) -> Result<Self> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            TierError::invalid("url", &host, "the host of a TLS server is a DNS name or an address")
        })?;
        let session = ClientConnection::new(Arc::clone(config), name)
            .map_err(|error| TierError::remote("begin TLS", &error, false))?;
        Ok(Self::TlsClient(Box::new(StreamOwned::new(session, socket))))
    }

    /// Begins TLS as a server. The handshake happens with the first bytes.
    ///
    /// # Errors
    /// [`TierError::Remote`] if the settings do not allow it.
    pub(crate) fn server(socket: TimedSocket, config: &Arc<ServerConfig>) -> Result<Self> {
        let session = ServerConnection::new(Arc::clone(config))
            .map_err(|error| TierError::remote("begin TLS", &error, false))?;
        Ok(Self::TlsServer(Box::new(StreamOwned::new(session, socket))))
    }

    /// Sets the time at which every read and write gives up.
    pub(crate) fn set_deadline(&mut self, deadline: Instant) {
        self.socket_mut().deadline = deadline;
    }

    fn socket_mut(&mut self) -> &mut TimedSocket {
        match self {
            Self::Plain(socket) => socket,
            Self::TlsClient(stream) => &mut stream.sock,
            Self::TlsServer(stream) => &mut stream.sock,
        }
    }
}

impl Read for Channel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buffer),
            Self::TlsClient(stream) => stream.read(buffer),
            Self::TlsServer(stream) => stream.read(buffer),
        }
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write(bytes),
            Self::TlsClient(stream) => stream.write(bytes),
            Self::TlsServer(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write_vectored(slices),
            Self::TlsClient(stream) => stream.write_vectored(slices),
            Self::TlsServer(stream) => stream.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::TlsClient(stream) => stream.flush(),
            Self::TlsServer(stream) => stream.flush(),
        }
    }
}

// === impl TimedSocket ===

impl TimedSocket {
    /// Connects to the first address of `host` that answers, until `deadline` at the latest.
    ///
    /// # Errors
    /// Of the resolver, or of the last address.
    pub(crate) fn connect(
        resolver: &Resolver,
        (host, port): (&str, u16),
        silence: Duration,
        deadline: Instant,
    ) -> io::Result<Self> {
        let mut last_error = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in resolver.resolve(host, port, deadline)? {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(out_of_time());
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Self::accepted(stream, silence, deadline),
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    /// Connects to a socket of this machine.
    ///
    /// # Errors
    /// Of the operating system. It connects at once or waits for its server's backlog.
    pub(crate) fn connect_unix(path: &Path, silence: Duration, deadline: Instant) -> io::Result<Self> {
        Ok(Self { socket: Socket::Unix(UnixStream::connect(path)?), silence, deadline })
    }

    /// Takes a connection that is there.
    ///
    /// # Errors
    /// Of the operating system.
    pub(crate) fn accepted(stream: TcpStream, silence: Duration, deadline: Instant) -> io::Result<Self> {
        // What is sent is gathered before, so there is nothing to wait for.
        stream.set_nodelay(true)?;
        Ok(Self { socket: Socket::Tcp(stream), silence, deadline })
    }

    /// Another descriptor of the socket.
    ///
    /// # Errors
    /// If there are too many.
    pub(crate) fn try_clone_descriptor(&self) -> io::Result<OwnedFd> {
        match &self.socket {
            Socket::Tcp(stream) => stream.as_fd().try_clone_to_owned(),
            Socket::Unix(stream) => stream.as_fd().try_clone_to_owned(),
        }
    }

    fn patience(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now()).min(self.silence);
        // The operating system takes a timeout of 0 for none.
        if left < Duration::from_millis(1) { Err(out_of_time()) } else { Ok(left) }
    }

    fn write_timed(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<usize>) -> io::Result<usize> {
        let patience = Some(self.patience()?);
        let written = match &mut self.socket {
            Socket::Tcp(stream) => stream.set_write_timeout(patience).and_then(|()| write(stream)),
            Socket::Unix(stream) => stream.set_write_timeout(patience).and_then(|()| write(stream)),
        };
        written.map_err(name_timeout)
    }
}

impl Read for TimedSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let patience = Some(self.patience()?);
        let read = match &mut self.socket {
            Socket::Tcp(stream) => stream.set_read_timeout(patience).and_then(|()| stream.read(buffer)),
            Socket::Unix(stream) => stream.set_read_timeout(patience).and_then(|()| stream.read(buffer)),
        };
        read.map_err(name_timeout)
    }
}

impl Write for TimedSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_timed(|stream| stream.write(bytes))
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_timed(|stream| stream.write_vectored(slices))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes all slices, in as few calls as the socket takes.
///
/// # Errors
/// If the connection fails.
pub(crate) fn write_all_slices(stream: &mut impl Write, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match stream.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n_written) => IoSlice::advance_slices(&mut slices, n_written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A socket's own limit is reported as "would block".
fn name_timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { out_of_time() } else { error }
}

fn out_of_time() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
}
