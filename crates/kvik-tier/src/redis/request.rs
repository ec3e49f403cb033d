//! The four things a server is asked, as commands and replies.

use std::io;

use super::connection::Connection;
use super::refusal::Refusal;
use super::resp::{Reply, ValueReply, push_argument, push_argument_length, push_command};
use crate::error::TierError;
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome};

/// Longest value a server takes, unless it was told otherwise.
pub(super) const MAX_VALUE_BYTES: usize = 512 << 20;

/// One command for one key, and what becomes of it.
pub(super) trait Request: Send {
    fn key(&self) -> ChunkKey;

    /// Bytes of the chunk that go either way.
    fn n_bytes(&self) -> usize;

    /// Writes the command; `name` is the key as the server knows it.
    fn send(&self, name: &[u8], connection: &mut Connection) -> io::Result<()>;

    /// Reads the reply and sets the outcome, unless the server refuses.
    fn receive(&mut self, connection: &mut Connection) -> io::Result<Option<Refusal>>;

    /// Sets the outcome after a refusal that is the last word.
    fn refuse(&mut self, refusal: &Refusal);

    /// Sets the outcome where no reply came.
    fn fail(&mut self, error: TierError);
}

/// Stores a chunk unless its key is present.
pub(super) struct PutRequest<'r, 'a> {
    pub(super) item: &'r mut PutItem<'a>,
    pub(super) ttl_ms: Option<&'r str>,
    /// Set if the server takes no writes.
    pub(super) read_only: Option<String>,
}

/// Reads a chunk or a range of it.
pub(super) struct GetRequest<'r, 'a> {
    pub(super) item: &'r mut GetItem<'a>,
}

/// Asks for a number about a key: whether it is there, or how many were deleted.
pub(super) struct CountRequest {
    pub(super) key: ChunkKey,
    pub(super) command: &'static str,
    pub(super) count: Result<i64, TierError>,
}

impl Request for PutRequest<'_, '_> {
    fn key(&self) -> ChunkKey {
        self.item.key
    }

    fn n_bytes(&self) -> usize {
        self.item.n_bytes()
    }

    fn send(&self, name: &[u8], connection: &mut Connection) -> io::Result<()> {
        let mut end = b"\r\n".to_vec();
        push_argument(&mut end, b"NX");
        if let Some(ttl_ms) = self.ttl_ms {
            push_argument(&mut end, b"PX");
            push_argument(&mut end, ttl_ms.as_bytes());
        }
        let n_arguments = if self.ttl_ms.is_some() { 6 } else { 4 };
        let begin = |out: &mut Vec<u8>| {
            push_command(out, n_arguments);
            push_argument(out, b"SET");
            push_argument(out, name);
            push_argument_length(out, self.item.n_bytes());
        };
        connection.send_around(begin, self.item.parts, &end)
    }

    fn receive(&mut self, connection: &mut Connection) -> io::Result<Option<Refusal>> {
        self.item.outcome = match connection.replies()?.read_reply()? {
            Reply::Status(_) => PutOutcome::Stored,
            Reply::Nil => PutOutcome::Present,
            Reply::Error(message) => return Ok(Some(Refusal::parse(&message))),
            _ => return Err(unexpected_reply()),
        };
        Ok(None)
    }

    fn refuse(&mut self, refusal: &Refusal) {
        self.item.outcome = match refusal {
            Refusal::NoRoom => PutOutcome::NoRoom,
            refusal => PutOutcome::Failed(refusal.to_error("store a chunk")),
        };
        if let Refusal::ReadOnly(reason) = refusal {
            self.read_only = Some(reason.clone());
        }
    }

    fn fail(&mut self, error: TierError) {
        self.item.outcome = PutOutcome::Failed(error);
    }
}

impl Request for GetRequest<'_, '_> {
    fn key(&self) -> ChunkKey {
        self.item.key
    }

    fn n_bytes(&self) -> usize {
        self.item.buffer.len()
    }

    fn send(&self, name: &[u8], connection: &mut Connection) -> io::Result<()> {
        if self.item.is_whole {
            return connection.send(&[b"GET", name]);
        }
        if self.item.buffer.is_empty() {
            // A range without bytes cannot be said: its end is before its start, and -1 is the last byte.
            return connection.send(&[b"EXISTS", name]);
        }
        // The command's numbers are signed; what does not fit is past the end of every value.
        let first = self.item.offset.min(i64::MAX as u64);
        let last = first.saturating_add(self.item.buffer.len() as u64 - 1).min(i64::MAX as u64);
        connection.send(&[b"GETRANGE", name, first.to_string().as_bytes(), last.to_string().as_bytes()])
    }

    fn receive(&mut self, connection: &mut Connection) -> io::Result<Option<Refusal>> {
        let replies = connection.replies()?;
        if !self.item.is_whole && self.item.buffer.is_empty() {
            self.item.outcome = match replies.read_reply()? {
                Reply::Integer(0) => GetOutcome::Miss,
                Reply::Integer(_) => GetOutcome::Hit,
                Reply::Error(message) => return Ok(Some(Refusal::parse(&message))),
                _ => return Err(unexpected_reply()),
            };
            return Ok(None);
        }
        self.item.outcome = match replies.read_value(self.item.buffer)? {
            ValueReply::Filled => GetOutcome::Hit,
            ValueReply::Nil => GetOutcome::Miss,
            // A key that is not there has an empty range.
            ValueReply::OtherLength(0) if !self.item.is_whole => GetOutcome::Miss,
            ValueReply::OtherLength(_) => GetOutcome::Corrupt("length"),
            ValueReply::Error(message) => return Ok(Some(Refusal::parse(&message))),
        };
        Ok(None)
    }

    fn refuse(&mut self, refusal: &Refusal) {
        self.item.outcome = GetOutcome::Failed(refusal.to_error("read a chunk"));
    }

    fn fail(&mut self, error: TierError) {
        self.item.outcome = GetOutcome::Failed(error);
    }
}

impl CountRequest {
    pub(super) fn new(key: ChunkKey, command: &'static str) -> Self {
        Self { key, command, count: Ok(0) }
    }
}

impl Request for CountRequest {
    fn key(&self) -> ChunkKey {
        self.key
    }

    fn n_bytes(&self) -> usize {
        0
    }

    fn send(&self, name: &[u8], connection: &mut Connection) -> io::Result<()> {
        connection.send(&[self.command.as_bytes(), name])
    }

    fn receive(&mut self, connection: &mut Connection) -> io::Result<Option<Refusal>> {
        match connection.replies()?.read_reply()? {
            Reply::Integer(count) => self.count = Ok(count),
            Reply::Error(message) => return Ok(Some(Refusal::parse(&message))),
            _ => return Err(unexpected_reply()),
        }
        Ok(None)
    }

    fn refuse(&mut self, refusal: &Refusal) {
        self.count = Err(refusal.to_error("ask for a key"));
    }

    fn fail(&mut self, error: TierError) {
        self.count = Err(error);
    }
}

fn unexpected_reply() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a reply of another kind than was asked for")
}
