//! The side that answers: one connection, until it ends.

use std::fmt;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ServerConfig;

use super::PIECE_BYTES;
use super::frame::{
    KEY_BYTES, PeerRequest, REQUEST_BYTES, RangeAnswer, RangeOutcome, WANTED_BYTES, WantedRange, decode_key,
};
use super::handshake::{PeerToken, accept, read_array, refuse};
use crate::arena::Lease;
use crate::arena::shared::RunningChecksum;
use crate::channel::{Channel, TimedSocket, write_all_slices};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tls::{self, PeerTlsFiles};

/// Time for a client to prove the token.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which a connection without requests ends; the client makes another when it needs one.
const IDLE_TIMEOUT: Duration = Duration::from_mins(2);

/// Time for one request and its answer: a client that stops reading holds what it was given no longer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What is handed to peers.
pub trait PeerSource: Send + Sync + fmt::Debug {
    /// Says which chunks are there, and keeps those for [`LEASE_TIME`](super::LEASE_TIME) as far as it can.
    fn find(&self, keys: &[ChunkKey]) -> Vec<bool>;

    /// A range of a chunk.
    fn read(&self, wanted: &WantedRange) -> Provided;
}

/// What became of a range that a peer wants.
#[derive(Debug)]
pub enum Provided {
    /// It is this part of leased memory.
    Bytes(Lease, Range<usize>),
    /// It is not there, or has another length.
    Miss,
    /// A chunk of other tokens has the name.
    TokenMismatch,
    /// There is no memory for it now.
    Busy,
}

/// Which clients are served.
#[derive(Debug, Clone)]
pub struct PeerAdmission {
    token: PeerToken,
    tls: Option<Arc<ServerConfig>>,
}

impl PeerAdmission {
    /// Serves clients that know `token` and, with TLS, show a certificate of the authorities.
    ///
    /// # Errors
    /// If a file of TLS cannot be used.
    pub fn new(token: PeerToken, tls: Option<&PeerTlsFiles>) -> Result<Self> {
        let tls = tls.map(tls::mutual_server_config).transpose()?.map(Arc::new);
        Ok(Self { token, tls })
    }
}

/// Serves one client until it or the caller ends the connection; `sources` gives what a tenant's peers may read.
///
/// # Errors
/// Why the connection ended, where it was not the client's wish.
pub fn serve_peer(
    stream: TcpStream,
    admission: &PeerAdmission,
    sources: impl FnOnce(&str) -> Option<Arc<dyn PeerSource>>,
) -> Result<()> {
    let failed = |error: io::Error| TierError::remote("serve a peer", &error, true);
    let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
    let socket = TimedSocket::accepted(stream, IDLE_TIMEOUT, deadline).map_err(failed)?;
    let mut channel = match &admission.tls {
        Some(config) => Channel::server(socket, config)?,
        None => Channel::Plain(socket),
    };
    let tenant = admission.token.answer_greeting(&mut channel).map_err(failed)?;
    let Some(source) = sources(&tenant) else {
        // A client that is gone does not need to know.
        let _ = refuse(&mut channel);
        return Err(TierError::remote("serve a peer", &format!("tenant `{tenant}` is unknown"), false));
    };
    accept(&mut channel).map_err(failed)?;
    loop {
        channel.set_deadline(Instant::now() + IDLE_TIMEOUT);
        let head = match read_array::<REQUEST_BYTES>(&mut channel) {
            Ok(head) => head,
            Err(error) if is_end(&error) => return Ok(()),
            Err(error) => return Err(failed(error)),
        };
        channel.set_deadline(Instant::now() + REQUEST_TIMEOUT);
        let request = PeerRequest::decode(head)
            .ok_or_else(|| TierError::invalid("request of a peer", &format!("{head:02x?}"), "a known one"))?;
        match request {
            PeerRequest::Lookup { n_items } => answer_lookup(&mut channel, n_items, &*source),
            PeerRequest::Read { n_items } => answer_read(&mut channel, n_items, &*source),
        }
        .map_err(failed)?;
    }
}

fn answer_lookup(channel: &mut Channel, n_items: usize, source: &dyn PeerSource) -> io::Result<()> {
    let mut names = vec![0; n_items * KEY_BYTES];
    channel.read_exact(&mut names)?;
    let (names, _) = names.as_chunks::<KEY_BYTES>();
    let keys: Vec<ChunkKey> = names.iter().map(decode_key).collect();
    let answer: Vec<u8> = source.find(&keys).into_iter().map(u8::from).collect();
    if answer.len() != n_items {
        return Err(io::Error::other("the source did not answer to each chunk"));
    }
    channel.write_all(&answer)?;
    channel.flush()
}

fn answer_read(channel: &mut Channel, n_items: usize, source: &dyn PeerSource) -> io::Result<()> {
    let mut ranges = vec![0; n_items * WANTED_BYTES];
    channel.read_exact(&mut ranges)?;
    let (ranges, _) = ranges.as_chunks::<WANTED_BYTES>();
    let wanted: Option<Vec<WantedRange>> = ranges.iter().map(WantedRange::decode).collect();
    let wanted = wanted.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a range is impossible"))?;
    // Small parts wait here until bytes follow, so that they need no packet of their own.
    let mut pending = Vec::new();
    for wanted in &wanted {
        // A slow client has the time of a request for each range.
        channel.set_deadline(Instant::now() + REQUEST_TIMEOUT);
        let provided = source.read(wanted);
        let outcome = match &provided {
            Provided::Bytes(lease, range) if lease.get(range.clone()).is_some() => RangeOutcome::Hit,
            Provided::Bytes(..) | Provided::Miss => RangeOutcome::Miss,
            Provided::TokenMismatch => RangeOutcome::TokenMismatch,
            Provided::Busy => RangeOutcome::Busy,
        };
        let bytes = match &provided {
            Provided::Bytes(lease, range) => lease.get(range.clone()).unwrap_or_default(),
            _ => &[],
        };
        let answer = RangeAnswer { outcome, n_bytes: bytes.len() as u64, range: wanted.fingerprint() };
        pending.extend(answer.encode());
        if outcome != RangeOutcome::Hit {
            continue;
        }
        let mut sum = RunningChecksum::default();
        for piece in bytes.chunks(PIECE_BYTES) {
            sum.update(piece);
            write_all_slices(channel, &mut [IoSlice::new(&pending), IoSlice::new(piece)])?;
            pending.clear();
        }
        pending.extend(sum.finish().0.to_le_bytes());
    }
    channel.write_all(&pending)?;
    channel.flush()
}

/// Whether a client has ended its connection, or was silent for long.
fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::TimedOut
    )
}
