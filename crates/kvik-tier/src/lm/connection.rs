//! One connection to one server.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::time::{Duration, Instant};

use super::frame::{LM_REPLY_BYTES, LmCommand, LmForm, LmKey, LmReply, LmRequest};
use super::url::LmUrl;
use crate::channel::{Channel, Resolver, TimedSocket, write_all_slices};
use crate::error::{Result, TierError};
use crate::pool::Dial;
use crate::tier::{GetItem, GetOutcome};

/// Bytes of a value that are not wanted are read past in such pieces.
const SKIP_BYTES: usize = 16 << 10;

/// More unwanted bytes than these are not read: a new connection is cheaper.
const MAX_SKIPPED_BYTES: usize = 64 << 20;

/// What all connections of a tier have in common.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) min_bytes_per_s: u64,
    pub(super) resolver: Resolver,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    channel: Channel,
    min_bytes_per_s: u64,
    /// Requests that were not written yet.
    out: Vec<u8>,
    deadline: Instant,
    /// Whether nothing more can be read.
    is_ended: bool,
}

/// What a server sent of a value.
#[derive(Debug)]
pub(super) struct Received {
    /// What became of the item.
    pub(super) outcome: GetOutcome,
    /// Whether the server has the name and no bytes.
    pub(super) is_hollow: bool,
}

// === impl Dialer ===

impl Dial for Dialer {
    type Endpoint = LmUrl;
    type Connection = Connection;

    /// Connects, until `deadline` at the latest.
    ///
    /// # Errors
    /// [`TierError::Remote`].
    fn connect(&self, url: &LmUrl, deadline: Instant) -> Result<Connection> {
        let connect_deadline = deadline.min(Instant::now() + self.connect_timeout);
        let address = (url.host.as_str(), url.port);
        let socket = TimedSocket::connect(&self.resolver, address, self.response_timeout, connect_deadline)
            .map_err(|error| TierError::remote(format!("connect to {url}"), &error, true))?;
        let channel = Channel::Plain(socket);
        Ok(Connection {
            channel,
            min_bytes_per_s: self.min_bytes_per_s,
            out: Vec::new(),
            deadline,
            is_ended: false,
        })
    }

    /// Of replies all bytes were read, or nothing more is.
    fn is_reusable(connection: &Connection) -> bool {
        !connection.is_ended
    }
}

// === impl Connection ===

impl Connection {
    /// Sets the time at which every read and write gives up.
    pub(super) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
        self.channel.set_deadline(deadline);
        // What a failed call left here is of no request.
        self.out.clear();
    }

    /// Has a request without a value sent with the next flush.
    pub(super) fn push(&mut self, command: LmCommand, key: LmKey) {
        self.out.extend(LmRequest::new(command, key).encode());
    }

    /// Sends a value in several parts, after what is waiting, and then the question whether it is there.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn put(&mut self, key: LmKey, parts: &[&[u8]]) -> io::Result<()> {
        let n_bytes = parts.iter().map(|part| part.len()).sum();
        let form = LmForm::of_bytes(n_bytes);
        self.out.extend(LmRequest { command: LmCommand::Put, n_bytes, form, key }.encode());
        let question = LmRequest::new(LmCommand::Exist, key).encode();
        let mut slices = Vec::with_capacity(parts.len() + 2);
        slices.push(IoSlice::new(&self.out));
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        slices.push(IoSlice::new(&question));
        write_all_slices(&mut self.channel, &mut slices)?;
        self.out.clear();
        Ok(())
    }

    /// Sends what is waiting.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.channel.write_all(&self.out)?;
        self.out.clear();
        self.channel.flush()
    }

    /// Reads a reply that has no value.
    ///
    /// # Errors
    /// If the connection fails, or what came is no such reply.
    pub(super) fn receive_answer(&mut self) -> io::Result<bool> {
        let reply = self.receive_reply()?;
        if reply.n_bytes > 0 {
            return Err(invalid("a server answers a question with a value"));
        }
        Ok(reply.is_found)
    }

    /// Reads a value into the head and the buffer of an item.
    ///
    /// # Errors
    /// If the connection fails, or what came is no reply; the item is as it was then.
    pub(super) fn receive_value(&mut self, item: &mut GetItem<'_>) -> io::Result<Received> {
        let reply = self.receive_reply()?;
        let received = |outcome| Received { outcome, is_hollow: false };
        if !reply.is_found {
            return Ok(received(GetOutcome::Miss));
        }
        // A deleted value has no bytes.
        if reply.n_bytes == 0 {
            return Ok(Received { outcome: GetOutcome::Miss, is_hollow: true });
        }
        let Some(skipped) = Skipped::of(item, reply.n_bytes) else {
            self.skip_unwanted(reply.n_bytes)?;
            return Ok(received(GetOutcome::Corrupt("length")));
        };
        // LMCache's server has a length and no bytes for a value of which it did not receive all: it ends the
        // connection where they should come. No later read can find them either.
        let Some(n_first) = self.read_first(item)? else {
            self.is_ended = true;
            return Ok(Received { outcome: GetOutcome::Corrupt("no bytes"), is_hollow: true });
        };
        self.read_wanted(item, n_first, skipped.before)?;
        self.skip_unwanted(skipped.after)?;
        Ok(received(GetOutcome::Hit))
    }

    /// Whether nothing more can be read over it.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended
    }

    fn receive_reply(&mut self) -> io::Result<LmReply> {
        let mut frame = [0; LM_REPLY_BYTES];
        self.channel.read_exact(&mut frame)?;
        LmReply::decode(&frame).ok_or_else(|| invalid("not a reply of LMCache's protocol"))
    }

    /// Reads the first bytes of a value, as many as come, into the head or the buffer; `None` where the server
    /// has ended the connection in their place.
    fn read_first(&mut self, item: &mut GetItem<'_>) -> io::Result<Option<usize>> {
        let wanted = if !item.head.is_empty() {
            &mut *item.head
        } else if item.offset == 0 {
            &mut *item.buffer
        } else {
            &mut []
        };
        if wanted.is_empty() {
            return Ok(Some(0));
        }
        loop {
            match self.channel.read(wanted) {
                Ok(0) => return Ok(None),
                Ok(n_read) => return Ok(Some(n_read)),
                // It is reset where the server had not read all requests.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads the rest of the head and of the buffer, behind the first `n_first` bytes.
    fn read_wanted(&mut self, item: &mut GetItem<'_>, n_first: usize, n_between: usize) -> io::Result<()> {
        let GetItem { head, buffer, offset, .. } = item;
        if head.is_empty() {
            self.skip(n_between)?;
            return self.channel.read_exact(&mut buffer[n_first..]);
        }
        self.channel.read_exact(&mut head[n_first..])?;
        self.skip(n_between)?;
        let offset = usize::try_from(*offset).unwrap_or(usize::MAX);
        let shared = head.get(offset..).unwrap_or_default();
        let n_shared = shared.len().min(buffer.len());
        buffer[..n_shared].copy_from_slice(&shared[..n_shared]);
        self.channel.read_exact(&mut buffer[n_shared..])
    }

    /// Reads past bytes behind what is wanted, or ends the connection where that would take too long.
    fn skip_unwanted(&mut self, n_bytes: usize) -> io::Result<()> {
        if n_bytes > MAX_SKIPPED_BYTES {
            self.is_ended = true;
            return Ok(());
        }
        self.skip(n_bytes)
    }

    fn skip(&mut self, n_bytes: usize) -> io::Result<()> {
        // The time of a call is by the bytes that were wanted, and these come on top.
        self.deadline += Duration::from_secs_f64(n_bytes as f64 / self.min_bytes_per_s as f64);
        self.channel.set_deadline(self.deadline);
        let mut scratch = [0; SKIP_BYTES];
        let mut n_left = n_bytes;
        while n_left > 0 {
            let piece = &mut scratch[..n_left.min(SKIP_BYTES)];
            self.channel.read_exact(piece)?;
            n_left -= piece.len();
        }
        Ok(())
    }
}

/// The bytes of a value that are not wanted.
struct Skipped {
    /// Before the buffer's and behind the head's.
    before: usize,
    /// Behind all others.
    after: usize,
}

impl Skipped {
    /// `None` where a value of so many bytes is not what the item asks for.
    fn of(item: &GetItem<'_>, n_bytes: usize) -> Option<Self> {
        let offset = usize::try_from(item.offset).ok()?;
        let buffer_end = offset.checked_add(item.buffer.len())?;
        // A buffer without room asks for nothing, wherever it begins.
        let (start, end) = if item.buffer.is_empty() { (0, 0) } else { (offset, buffer_end) };
        let last = end.max(item.head.len());
        if last > n_bytes || (item.is_whole && item.n_bytes() != n_bytes) {
            return None;
        }
        Some(Self { before: start.saturating_sub(item.head.len()), after: n_bytes - last })
    }
}

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
