//! One connection to one peer.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::ClientConfig;

use super::frame::{
    ANSWER_BYTES, PeerRequest, RangeAnswer, RangeOutcome, TRAILER_BYTES, WantedRange, encode_key,
};
use super::handshake::{PeerToken, read_array};
use super::parts::Part;
use super::{PIECE_BYTES, PeerAddress};
use crate::arena::shared::{Checksum, RunningChecksum};
use crate::channel::{Channel, Resolver, TimedSocket};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tier::GetOutcome;

/// What all connections of a tier have in common.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) tls: Option<Arc<ClientConfig>>,
    pub(super) token: PeerToken,
    pub(super) tenant: String,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) resolver: Resolver,
}

/// A connection to a peer that has accepted the tenant.
#[derive(Debug)]
pub(super) struct Connection {
    channel: Channel,
    /// The same socket, to ask whether the peer has ended it.
    socket: OwnedFd,
    out: Vec<u8>,
}

impl Dialer {
    /// Connects and proves the token, until `deadline` at the latest.
    ///
    /// # Errors
    /// [`TierError::Remote`]; it is not transient where the peer refuses.
    pub(super) fn connect(&self, address: &PeerAddress, deadline: Instant) -> Result<Connection> {
        let deadline = deadline.min(Instant::now() + self.connect_timeout);
        let failed = |error: io::Error| {
            let is_transient = error.kind() != io::ErrorKind::PermissionDenied;
            TierError::remote(format!("connect to peer {address}"), &error, is_transient)
        };
        let endpoint = (address.host.as_str(), address.port);
        let timed = TimedSocket::connect(&self.resolver, endpoint, self.response_timeout, deadline);
        let timed = timed.map_err(failed)?;
        let socket = timed.try_clone_descriptor().map_err(failed)?;
        let mut channel = match &self.tls {
            Some(config) => Channel::client(timed, config, &address.host)?,
            None => Channel::Plain(timed),
        };
        self.token.greet(&mut channel, &self.tenant).map_err(failed)?;
        Ok(Connection { channel, socket, out: Vec::new() })
    }
}

impl Connection {
    /// Whether it can be used again: the peer has neither ended it nor sent what was not asked for.
    pub(super) fn is_quiet(&self) -> bool {
        let mut descriptors =
            [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN | PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut descriptors, Some(&now)).is_ok_and(|n_ready| n_ready == 0)
    }

    pub(super) fn set_deadline(&mut self, deadline: Instant) {
        self.channel.set_deadline(deadline);
    }

    /// Asks which of the chunks are there.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn send_lookup(&mut self, keys: &[ChunkKey]) -> io::Result<()> {
        self.out.clear();
        self.out.extend(PeerRequest::Lookup { n_items: keys.len() }.encode());
        for key in keys {
            self.out.extend(encode_key(key));
        }
        self.send()
    }

    /// The answer to [`Self::send_lookup`].
    ///
    /// # Errors
    /// If the connection fails, or the answer is none.
    pub(super) fn receive_lookup(&mut self, n_keys: usize) -> io::Result<Vec<bool>> {
        let mut answer = vec![0; n_keys];
        self.channel.read_exact(&mut answer)?;
        let found = answer.into_iter().map(|byte| match byte {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(wrong("an answer is neither yes nor no")),
        });
        found.collect()
    }

    /// Asks for all of the parts.
    ///
    /// # Errors
    /// If the connection fails.
    pub(super) fn send_reads(&mut self, parts: &[Part<'_>]) -> io::Result<()> {
        self.out.clear();
        let ranges = parts.iter().flat_map(ranges_of);
        self.out.extend(PeerRequest::Read { n_items: ranges.clone().count() }.encode());
        for wanted in ranges {
            self.out.extend(wanted.encode());
        }
        self.send()
    }

    /// The answer for one part; parts are answered in the order in which they were asked for.
    ///
    /// # Errors
    /// If the connection fails or the peer does not answer to what was asked: nothing more can be read from it.
    pub(super) fn receive(&mut self, part: &mut Part<'_>) -> io::Result<GetOutcome> {
        let mut outcome = GetOutcome::Hit;
        let ranges: Vec<WantedRange> = ranges_of(part).collect();
        for (range_idx, range) in ranges.iter().enumerate() {
            let is_head = range_idx == 0 && !part.head.is_empty();
            let buffer = if is_head { &mut *part.head } else { &mut *part.buffer };
            let received = receive_range(&mut self.channel, range, buffer)?;
            // What is not there in one range is not there.
            if outcome.is_hit() {
                outcome = received;
            }
        }
        Ok(outcome)
    }

    fn send(&mut self) -> io::Result<()> {
        self.channel.write_all(&self.out)?;
        self.channel.flush()
    }
}

/// The ranges that a part is read in: its head where it has one, then its buffer.
fn ranges_of<'a>(part: &'a Part<'_>) -> impl Iterator<Item = WantedRange> + Clone + use<'a> {
    let Part { key, digest, chunk_bytes, .. } = *part;
    let range = move |offset, n_bytes: usize| WantedRange {
        key,
        digest,
        offset,
        n_bytes: n_bytes as u64,
        chunk_bytes,
    };
    let head = (!part.head.is_empty()).then(|| range(0, part.head.len()));
    // A part without a head has one range, also if it is empty.
    let has_buffer = head.is_none() || !part.buffer.is_empty();
    head.into_iter().chain(has_buffer.then(|| range(part.offset, part.buffer.len())))
}

fn receive_range(channel: &mut Channel, range: &WantedRange, buffer: &mut [u8]) -> io::Result<GetOutcome> {
    let answer = RangeAnswer::decode(&read_array::<ANSWER_BYTES>(channel)?)
        .filter(|answer| answer.range == range.fingerprint())
        .ok_or_else(|| wrong("an answer is not to what was asked"))?;
    match answer.outcome {
        RangeOutcome::Miss => return Ok(GetOutcome::Miss),
        RangeOutcome::TokenMismatch => return Ok(GetOutcome::TokenMismatch),
        RangeOutcome::Busy => return Ok(GetOutcome::Skipped),
        RangeOutcome::Hit => {}
    }
    if answer.n_bytes != buffer.len() as u64 {
        return Err(wrong("a range has another length"));
    }
    let mut sum = RunningChecksum::default();
    let mut n_received = 0;
    while n_received < buffer.len() {
        let end = buffer.len().min(n_received + PIECE_BYTES);
        match channel.read(&mut buffer[n_received..end]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n_bytes) => {
                // While the processor's caches have it.
                sum.update(&buffer[n_received..n_received + n_bytes]);
                n_received += n_bytes;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let expected = Checksum(u64::from_le_bytes(read_array::<TRAILER_BYTES>(channel)?));
    Ok(if sum.finish() == expected { GetOutcome::Hit } else { GetOutcome::Corrupt("checksum of a peer") })
}

fn wrong(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
