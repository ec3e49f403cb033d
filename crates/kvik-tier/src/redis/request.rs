//! The four things a server is asked, as commands and replies.

use std::{io, mem};

use super::connection::Connection;
use super::resp::{Reply, ValueReply, push_argument, push_argument_length, push_command};
use super::server_error::ServerError;
use crate::error::TierError;
use crate::key::ChunkKey;
use crate::tier::{Arrived, GetItem, GetOutcome, Heads, PutItem, PutOutcome};

/// Longest value a server takes, unless it was told otherwise.
pub(super) const MAX_VALUE_BYTES: usize = 512 << 20;

/// One question about one key, and what becomes of it.
pub(super) trait Request: Send {
    fn key(&self) -> ChunkKey;

    /// Bytes of the chunk that go either way.
    fn n_bytes(&self) -> usize;

    /// Commands that it takes, one after the other over one connection; each has a reply.
    fn n_commands(&self) -> usize {
        1
    }

    /// Writes a command; `name` is the key as the server knows it.
    fn send(&self, command_idx: usize, name: &[u8], connection: &mut Connection) -> io::Result<()>;

    /// Reads the reply to a command; after the last one the outcome is set, unless the server refused any.
    fn receive(&mut self, command_idx: usize, connection: &mut Connection)
    -> io::Result<Option<ServerError>>;

    /// Sets the outcome after an error of the server that is final.
    fn refuse(&mut self, error: &ServerError);

    /// Sets the outcome where no reply came.
    fn fail(&mut self, error: TierError);

    /// Takes note, once, that the outcome stands.
    fn settle(&self) {}
}

/// Stores a chunk unless its key is present.
pub(super) struct PutRequest<'r, 'a> {
    pub(super) item_idx: usize,
    pub(super) item: &'r mut PutItem<'a>,
    pub(super) heads: &'r dyn Heads,
    pub(super) ttl_ms: Option<&'r str>,
    /// Set if the server takes no writes.
    pub(super) read_only: Option<String>,
}

/// Reads a chunk or a range of it.
///
/// A head that is not before the range takes a command of its own, and a third one tells, where the range is
/// not there, a chunk that is too short from one that was deleted since the first.
pub(super) struct GetRequest<'r, 'a> {
    pub(super) item_idx: usize,
    pub(super) item: &'r mut GetItem<'a>,
    pub(super) arrived: Arrived<'r>,
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
        self.heads.n_bytes() + self.item.n_bytes()
    }

    fn send(&self, _command_idx: usize, name: &[u8], connection: &mut Connection) -> io::Result<()> {
        let parts = [&[self.heads.head_of(self.item_idx)], self.item.parts].concat();
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
            push_argument_length(out, self.n_bytes());
        };
        connection.send_around(begin, &parts, &end)
    }

    fn receive(
        &mut self,
        _command_idx: usize,
        connection: &mut Connection,
    ) -> io::Result<Option<ServerError>> {
        self.item.outcome = match connection.replies()?.read_reply()? {
            Reply::Status(_) => PutOutcome::Stored,
            Reply::Nil => PutOutcome::Present,
            Reply::Error(message) => return Ok(Some(ServerError::parse(&message))),
            _ => return Err(unexpected_reply()),
        };
        Ok(None)
    }

    fn refuse(&mut self, error: &ServerError) {
        self.item.outcome = match error {
            ServerError::NoRoom => PutOutcome::NoRoom,
            error => PutOutcome::Failed(error.to_error("store a chunk")),
        };
        if let ServerError::ReadOnly(reason) = error {
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
        self.item.n_bytes()
    }

    fn n_commands(&self) -> usize {
        if self.item.start_of_one_range().is_some() { 1 } else { 3 }
    }

    fn send(&self, command_idx: usize, name: &[u8], connection: &mut Connection) -> io::Result<()> {
        let GetItem { head, offset, buffer, is_whole, .. } = &*self.item;
        match (command_idx, self.item.start_of_one_range()) {
            (_, Some(_)) if *is_whole => connection.send(&[b"GET", name]),
            // A range without bytes cannot be said: its end is before its start, and -1 is the last byte.
            (_, Some(_)) if self.n_bytes() == 0 => connection.send(&[b"EXISTS", name]),
            (_, Some(start)) => send_get_range(connection, name, start, self.n_bytes()),
            (0, None) => send_get_range(connection, name, 0, head.len()),
            (1, None) => send_get_range(connection, name, *offset, buffer.len()),
            (_, None) => connection.send(&[b"STRLEN", name]),
        }
    }

    fn receive(
        &mut self,
        command_idx: usize,
        connection: &mut Connection,
    ) -> io::Result<Option<ServerError>> {
        let replies = connection.replies()?;
        let item = &mut *self.item;
        let outcome = match (command_idx, item.start_of_one_range()) {
            (_, Some(_)) if item.n_bytes() == 0 && !item.is_whole => number_of(replies.read_reply()?)?
                .map(|n_keys| if n_keys == 0 { GetOutcome::Miss } else { GetOutcome::Hit }),
            (_, Some(_)) => outcome_of(replies.read_value_in_two(item.head, item.buffer)?, item.is_whole),
            (0, None) => outcome_of(replies.read_value(item.head)?, item.is_whole),
            (1, None) => outcome_of(replies.read_value(item.buffer)?, item.is_whole).map(|range| {
                match (mem::take(&mut item.outcome), range) {
                    (GetOutcome::Hit, GetOutcome::Hit) => GetOutcome::Hit,
                    (GetOutcome::Hit, _) => GetOutcome::Corrupt("length"),
                    (head, _) => head,
                }
            }),
            (_, None) => {
                number_of(replies.read_reply()?)?.map(|n_bytes| match mem::take(&mut item.outcome) {
                    GetOutcome::Corrupt(_) if n_bytes == 0 => GetOutcome::Miss,
                    outcome => outcome,
                })
            }
        };
        match outcome {
            Ok(outcome) => {
                item.outcome = outcome;
                Ok(None)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    fn refuse(&mut self, error: &ServerError) {
        self.item.outcome = GetOutcome::Failed(error.to_error("read a chunk"));
    }

    fn fail(&mut self, error: TierError) {
        self.item.outcome = GetOutcome::Failed(error);
    }

    fn settle(&self) {
        (self.arrived)(self.item_idx, self.item);
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

    fn send(&self, _command_idx: usize, name: &[u8], connection: &mut Connection) -> io::Result<()> {
        connection.send(&[self.command.as_bytes(), name])
    }

    fn receive(
        &mut self,
        _command_idx: usize,
        connection: &mut Connection,
    ) -> io::Result<Option<ServerError>> {
        match number_of(connection.replies()?.read_reply()?)? {
            Ok(count) => {
                self.count = Ok(count);
                Ok(None)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    fn refuse(&mut self, error: &ServerError) {
        self.count = Err(error.to_error("ask for a key"));
    }

    fn fail(&mut self, error: TierError) {
        self.count = Err(error);
    }
}

/// Asks for so many bytes, at least one, from `start` on.
fn send_get_range(connection: &mut Connection, name: &[u8], start: u64, n_bytes: usize) -> io::Result<()> {
    // The command's numbers are signed; what does not fit is past the end of every value.
    let first = start.min(i64::MAX as u64);
    let last = first.saturating_add(n_bytes as u64 - 1).min(i64::MAX as u64);
    connection.send(&[b"GETRANGE", name, first.to_string().as_bytes(), last.to_string().as_bytes()])
}

/// What the reply to a read says of the chunk.
fn outcome_of(reply: ValueReply, is_whole: bool) -> Result<GetOutcome, ServerError> {
    match reply {
        ValueReply::Filled => Ok(GetOutcome::Hit),
        ValueReply::Nil => Ok(GetOutcome::Miss),
        // A key that is not there has an empty range.
        ValueReply::OtherLength(0) if !is_whole => Ok(GetOutcome::Miss),
        ValueReply::OtherLength(_) => Ok(GetOutcome::Corrupt("length")),
        ValueReply::Error(message) => Err(ServerError::parse(&message)),
    }
}

fn number_of(reply: Reply) -> io::Result<Result<i64, ServerError>> {
    match reply {
        Reply::Integer(number) => Ok(Ok(number)),
        Reply::Error(message) => Ok(Err(ServerError::parse(&message))),
        _ => Err(unexpected_reply()),
    }
}

fn unexpected_reply() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a reply of another kind than was asked for")
}
