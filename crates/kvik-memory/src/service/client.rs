//! A process' end of a session with the memory service.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::frame::{DeviceStanding, FromServer, Notice, Outcome, Reply, Request, RequestBody, Standing};
use crate::ledger::Policy;
use crate::pages::Claim;
use crate::socket::SocketAddress;
use crate::socket::{Connection, FrameBuffer, wait_ready};
use crate::{MemoryError, Result};

/// How long a request that does not wait for memory may take.
const REPLY_WITHIN: Duration = Duration::from_secs(10);

/// How a session is opened.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// The group; empty for the server's own.
    pub ipc_name: String,
    /// What the process calls itself, for tools.
    pub label: String,
    /// The policy of the group if it does not exist yet.
    pub policy: Policy,
}

/// A session with the memory service; dropping it gives back everything that it holds.
///
/// After an error of the connection the session is over and its grants are gone: release the memory and
/// connect again.
#[derive(Debug)]
pub struct MemoryClient {
    socket: PathBuf,
    connection: Connection,
    buffer: FrameBuffer,
    n_requests: u32,
    standing: Standing,
    notices: VecDeque<Notice>,
}

impl MemoryClient {
    /// Connects to the server at `socket` and opens a session.
    pub fn connect(socket: &Path, options: &SessionOptions) -> Result<Self> {
        let connection = Connection::open(&SocketAddress::Path(socket.to_owned())).map_err(|source| {
            MemoryError::Segment { action: "connect to", path: socket.to_owned(), source }
        })?;
        let mut client = Self {
            socket: socket.to_owned(),
            connection,
            buffer: FrameBuffer::new(),
            n_requests: 0,
            standing: Standing::default(),
            notices: VecDeque::new(),
        };
        let SessionOptions { ipc_name, label, policy } = options.clone();
        match client.ask(RequestBody::Open { ipc_name, label, policy }, REPLY_WITHIN)? {
            Outcome::Opened => Ok(client),
            other => Err(client.unexpected(other)),
        }
    }

    /// Claims `n_bytes`, a multiple of 2 MiB, and waits up to `timeout` for others to give them back.
    pub fn claim(&mut self, n_bytes: u64, timeout: Duration) -> Result<Claim> {
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let body = RequestBody::Claim { n_bytes, timeout_ms };
        match self.ask(body, REPLY_WITHIN.saturating_add(timeout))? {
            Outcome::Granted => Ok(Claim::Granted),
            Outcome::Denied(shortage) => Ok(Claim::Denied(shortage)),
            other => Err(self.unexpected(other)),
        }
    }

    /// Gives back `n_bytes` that are held; their memory is released.
    pub fn give_back(&mut self, n_bytes: u64) -> Result<()> {
        match self.ask(RequestBody::GiveBack { n_bytes }, REPLY_WITHIN)? {
            Outcome::GivenBack => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Asks for the numbers of the device.
    pub fn stats(&mut self) -> Result<DeviceStanding> {
        match self.ask(RequestBody::Stats, REPLY_WITHIN)? {
            Outcome::Stats(device) => Ok(device),
            other => Err(self.unexpected(other)),
        }
    }

    /// Sets the limit of the session's group; `None` for all that the device has.
    ///
    /// Where more is held it is asked for, of this client too.
    pub fn set_limit(&mut self, limit_bytes: Option<u64>) -> Result<()> {
        match self.ask(RequestBody::SetLimit { limit_bytes }, REPLY_WITHIN)? {
            Outcome::LimitSet => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// What the session had after the last request.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Waits for the next notice, at most `timeout`; `None` where there was none.
    ///
    /// Fails where the server is gone, so this is also how to see its end.
    pub fn next_notice(&mut self, timeout: Duration) -> Result<Option<Notice>> {
        let deadline = Instant::now() + timeout;
        while self.notices.is_empty() {
            match self.receive(deadline)? {
                None => return Ok(None),
                Some(FromServer::Notice(notice)) => self.notices.push_back(notice),
                Some(FromServer::Reply(_)) => return Err(self.broken("an answer to no request")),
            }
        }
        Ok(self.notices.pop_front())
    }

    fn ask(&mut self, body: RequestBody, timeout: Duration) -> Result<Outcome> {
        self.n_requests = self.n_requests.wrapping_add(1);
        let request = Request { number: self.n_requests, body };
        match self.connection.send(&request.encode()) {
            Ok(true) => {}
            Ok(false) => return Err(self.broken("the server does not read")),
            Err(source) => return Err(self.lost(source)),
        }
        let deadline = Instant::now() + timeout;
        loop {
            match self.receive(deadline)? {
                None => return Err(self.broken("no answer in time")),
                Some(FromServer::Notice(notice)) => self.notices.push_back(notice),
                Some(FromServer::Reply(Reply { number, outcome, standing })) => {
                    // A frame that the server could not read has no number.
                    if number != request.number && !matches!(outcome, Outcome::Refused { .. }) {
                        return Err(self.broken("an answer to another request"));
                    }
                    self.standing = standing;
                    return Ok(outcome);
                }
            }
        }
    }

    fn receive(&mut self, deadline: Instant) -> Result<Option<FromServer>> {
        loop {
            let received = match self.connection.receive(&mut self.buffer) {
                Ok(Some(frame)) => Some(FromServer::decode(frame)?),
                Ok(None) => None,
                Err(source) => return Err(self.lost(source)),
            };
            if received.is_some() {
                return Ok(received);
            }
            let mut descriptors = [PollFd::new(&self.connection, PollFlags::IN)];
            match wait_ready(&mut descriptors, Some(deadline)) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(source) => return Err(self.lost(source)),
            }
        }
    }

    fn lost(&self, source: io::Error) -> MemoryError {
        MemoryError::Segment { action: "talk to the memory service at", path: self.socket.clone(), source }
    }

    fn broken(&self, reason: &str) -> MemoryError {
        self.lost(io::Error::new(io::ErrorKind::InvalidData, reason))
    }

    fn unexpected(&self, outcome: Outcome) -> MemoryError {
        match outcome {
            Outcome::Refused { reason, .. } => MemoryError::Device { call: "the memory service", reason },
            other => self.broken(&format!("an answer of another kind: {other:?}")),
        }
    }
}
