//! One connection to one server.

use std::io::{self, IoSlice, Read, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_types::RedisEndpoint as Endpoint;
use rustls::ClientConfig;

use super::resp::{Reply, ReplyReader, push_argument, push_command};
use super::server_error::ServerError;
use crate::channel::{Channel, Resolver, TimedSocket, write_all_slices};
use crate::error::{Result, TierError};
use crate::pool::Dial;

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

// === impl Dialer ===

impl Dial for Dialer {
    type Endpoint = Endpoint;
    type Connection = Connection;

    /// Connects and logs in, until `deadline` at the latest.
    ///
    /// # Errors
    /// [`TierError::Remote`]; it is not transient where the login is refused.
    fn connect(&self, endpoint: &Endpoint, deadline: Instant) -> Result<Connection> {
        let connect_deadline = deadline.min(Instant::now() + self.connect_timeout);
        let failed = |error: io::Error| TierError::remote(format!("connect to {endpoint}"), &error, true);
        let silence = self.response_timeout;
        let socket = match endpoint {
            Endpoint::Unix(path) => TimedSocket::connect_unix(path, silence, connect_deadline),
            Endpoint::Tcp { host, port } => {
                TimedSocket::connect(&self.resolver, (host, *port), silence, connect_deadline)
            }
        };
        let socket = socket.map_err(failed)?;
        let channel = match (&self.tls, endpoint) {
            (Some(config), Endpoint::Tcp { host, .. }) => Channel::client(socket, config, host)?,
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

    /// A server that sent bytes without a request would have its next replies taken for others.
    fn is_reusable(connection: &Connection) -> bool {
        !connection.reader.has_leftover()
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
        self.reader.stream_mut().set_deadline(deadline);
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
