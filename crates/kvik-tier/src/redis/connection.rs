//! One connection to one server.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_types::RedisEndpoint as Endpoint;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::resolve::Resolver;
use super::resp::{Reply, ReplyReader, push_argument, push_command};
use super::server_error::ServerError;
use crate::error::{Result, TierError};

/// Small commands are gathered up to so many bytes before they are written.
const GATHER_BYTES: usize = 64 << 10;

/// What all connections of a tier have in common.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) tls: Option<Arc<ClientConfig>>,
    pub(super) login: Option<Login>,
    pub(super) database: u32,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) resolver: Resolver,
}

/// A user and its password.
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: String,
}

/// A connection that is logged in.
#[derive(Debug)]
pub(super) struct Connection {
    reader: ReplyReader<Channel>,
    /// Commands that were not written yet.
    out: Vec<u8>,
}

/// The way bytes go.
#[derive(Debug)]
enum Channel {
    Plain(TimedSocket),
    Tls(Box<StreamOwned<ClientConnection, TimedSocket>>),
}

/// A socket whose reads and writes end in time: none waits longer than `silence`, and none after `deadline`.
#[derive(Debug)]
struct TimedSocket {
    socket: Socket,
    silence: Duration,
    deadline: Instant,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

// === impl Dialer ===

impl Dialer {
    /// Connects and logs in, until `deadline` at the latest.
    ///
    /// # Errors
    /// [`TierError::Remote`]; it is not transient where the login is refused.
    pub(super) fn connect(&self, endpoint: &Endpoint, deadline: Instant) -> Result<Connection> {
        let connect_deadline = deadline.min(Instant::now() + self.connect_timeout);
        let failed = |error: io::Error| TierError::remote(format!("connect to {endpoint}"), &error, true);
        let socket = open_socket(&self.resolver, endpoint, connect_deadline).map_err(failed)?;
        let socket = TimedSocket { socket, silence: self.response_timeout, deadline: connect_deadline };
        let channel = match (&self.tls, endpoint) {
            (Some(config), Endpoint::Tcp { host, .. }) => {
                let name = ServerName::try_from(host.clone()).map_err(|_| {
                    TierError::invalid("url", host, "the host of a TLS server is a DNS name or an address")
                })?;
                let session = ClientConnection::new(Arc::clone(config), name)
                    .map_err(|error| TierError::remote("begin TLS", &error, false))?;
                Channel::Tls(Box::new(StreamOwned::new(session, socket)))
            }
            _ => Channel::Plain(socket),
        };
        let mut connection = Connection { reader: ReplyReader::new(channel), out: Vec::new() };
        if let Some(Login { user, password }) = &self.login {
            let arguments = match user {
                Some(user) => vec!["AUTH", user, password],
                None => vec!["AUTH", password],
            };
            connection.demand(endpoint, "log in", &arguments)?;
        }
        if self.database != 0 {
            connection.demand(endpoint, "select a database", &["SELECT", &self.database.to_string()])?;
        }
        Ok(connection)
    }
}

impl std::fmt::Debug for Login {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

// === impl Connection ===

impl Connection {
    /// Sets the time at which every read and write gives up.
    pub(super) fn set_deadline(&mut self, deadline: Instant) {
        self.reader.stream_mut().socket_mut().deadline = deadline;
    }

    /// Whether the server sent bytes without a request, so that replies would be taken for others.
    pub(super) fn has_leftover(&self) -> bool {
        self.reader.has_leftover()
    }

    /// Sends a command of small arguments, at the latest when a reply is read.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn send(&mut self, arguments: &[&[u8]]) -> io::Result<()> {
        push_command(&mut self.out, arguments.len());
        for argument in arguments {
            push_argument(&mut self.out, argument);
        }
        if self.out.len() >= GATHER_BYTES { self.flush() } else { Ok(()) }
    }

    /// Sends what `begin` writes, then `parts` from where they lie, then `end`.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn send_around(
        &mut self,
        begin: impl FnOnce(&mut Vec<u8>),
        parts: &[&[u8]],
        end: &[u8],
    ) -> io::Result<()> {
        begin(&mut self.out);
        let n_bytes = parts.iter().map(|part| part.len()).sum::<usize>();
        if self.out.len() + n_bytes + end.len() < GATHER_BYTES {
            for part in parts {
                self.out.extend_from_slice(part);
            }
            self.out.extend_from_slice(end);
            return Ok(());
        }
        let mut slices = Vec::with_capacity(parts.len() + 2);
        slices.push(IoSlice::new(&self.out));
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        slices.push(IoSlice::new(end));
        write_all_slices(self.reader.stream_mut(), &mut slices)?;
        self.out.clear();
        Ok(())
    }

    /// Writes all commands and hands out the reader of their replies.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn replies(&mut self) -> io::Result<&mut ReplyReader<impl Read>> {
        self.flush()?;
        Ok(&mut self.reader)
    }

    /// Sends one command and reads its reply.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn ask(&mut self, arguments: &[&str]) -> io::Result<Reply> {
        let arguments: Vec<&[u8]> = arguments.iter().map(|argument| argument.as_bytes()).collect();
        self.send(&arguments)?;
        self.replies()?.read_reply()
    }

    /// Sends a command that must succeed for the connection to be of use.
    fn demand(&mut self, endpoint: &Endpoint, action: &str, arguments: &[&str]) -> Result<()> {
        let action = format!("{action} at {endpoint}");
        match self.ask(arguments) {
            Ok(Reply::Error(message)) => Err(ServerError::parse(&message).to_error(&action)),
            Ok(_) => Ok(()),
            Err(error) => Err(TierError::remote(action, &error, true)),
        }
    }

    /// Writes all commands that were gathered.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let channel = self.reader.stream_mut();
        if !self.out.is_empty() {
            channel.write_all(&self.out)?;
            self.out.clear();
        }
        channel.flush()
    }
}

// === impl Channel, TimedSocket, Socket ===

impl Channel {
    fn socket_mut(&mut self) -> &mut TimedSocket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => &mut stream.sock,
        }
    }
}

impl Read for Channel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write(bytes),
            Self::Tls(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write_vectored(slices),
            Self::Tls(stream) => stream.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

impl TimedSocket {
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

fn open_socket(resolver: &Resolver, endpoint: &Endpoint, deadline: Instant) -> io::Result<Socket> {
    match endpoint {
        // A unix socket connects at once or waits for its server's backlog; the server is on this machine.
        Endpoint::Unix(path) => Ok(Socket::Unix(UnixStream::connect(path)?)),
        Endpoint::Tcp { host, port } => {
            let mut last_error = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            for address in resolver.resolve(host, *port, deadline)? {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(out_of_time());
                }
                match TcpStream::connect_timeout(&address, left) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        return Ok(Socket::Tcp(stream));
                    }
                    Err(error) => last_error = error,
                }
            }
            Err(last_error)
        }
    }
}

fn write_all_slices(stream: &mut impl Write, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
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

/// A socket's own limit is told as "would block".
fn name_timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { out_of_time() } else { error }
}

fn out_of_time() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
}
