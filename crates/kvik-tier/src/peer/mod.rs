//! Chunks of other nodes: a tier that asks their stores, and the side that answers.
//!
//! A lookup asks peers which chunks they have, and the peers keep those for a moment ([`LEASE_TIME`]), so that the read
//! that follows finds them. A read asks one peer for ranges of chunks and receives them where they are wanted, each
//! with a checksum that the peer made of it.
//!
//! A peer that is gone, stalls, or sends other bytes than it says is a miss, and is left alone for a while. `frame.rs` is
//! what is said, `handshake.rs` how two peers trust each other, `connection.rs` a connection, `peer.rs` the connections to
//! one peer, `parts.rs` how a read is shared out among them, `reads.rs` the read, `locations.rs` what peers have said, `hints.rs`
//! what something else knows of them, and `serve.rs` the answering side.

mod connection;
mod frame;
mod handshake;
mod hints;
mod locations;
mod parts;
#[expect(clippy::module_inception, reason = "it is one of the peers")]
mod peer;
mod reads;
mod serve;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

pub use frame::{PeerRequest, RangeAnswer, RangeFingerprint, RangeOutcome, WantedRange};
pub use handshake::PeerToken;
pub use hints::PeerHints;
pub use peer::PeerAddress;
pub use serve::{PeerAdmission, PeerSource, Provided, serve_peer};

pub use crate::tls::PeerTlsFiles;

use self::connection::{Connection, Dialer};
use self::frame::MAX_ITEMS;
use self::hints::HintCounts;
use self::locations::{Locations, PeerId};
use self::peer::{Borrowed, Peer};
use crate::channel::Resolver;
use crate::decorator::{Gate, Permit, SystemClock, Verdict};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierHealth, TierKind, TierStat};
use crate::tls;

/// How long a peer keeps a chunk that it has announced.
pub const LEASE_TIME: Duration = Duration::from_secs(2);

/// Bytes that are sent or received and then summed up while the processor's second cache has them.
const PIECE_BYTES: usize = 256 << 10;

/// How a [`PeerTier`] works.
#[derive(Debug, Clone)]
pub struct PeerOptions {
    /// Whose chunks are asked for.
    pub tenant: String,
    /// What all peers share.
    pub token: PeerToken,
    /// Time for one lookup, connections included. Default: 50 ms.
    pub lookup_timeout: Duration,
    /// Time to connect and to prove the token. Default: 1 s.
    pub connect_timeout: Duration,
    /// Longest silence of a peer that should send. Default: 1 s.
    pub response_timeout: Duration,
    /// Speed below which a peer counts as failed: a call takes no longer than both timeouts and its bytes at this
    /// speed. Default: 16 MiB a second.
    pub min_bytes_per_s: u64,
    /// Connections to each peer. Default: 8.
    pub n_connections: usize,
    /// Peers that one lookup asks at a time, in turns where there are more. Default: 8.
    pub n_asked: usize,
    /// Files of TLS. Default: none, no TLS.
    pub tls: Option<PeerTlsFiles>,
    /// What says which peers are asked first. Default: none.
    pub hints: Option<Arc<dyn PeerHints>>,
}

/// The chunks of other nodes. It is read only: what is put is skipped.
///
/// Dropping it ends its connections. Peers may come and go ([`Self::set_peers`]).
#[derive(Debug)]
pub struct PeerTier {
    options: PeerOptions,
    dialer: Dialer,
    peers: RwLock<Vec<Arc<Peer>>>,
    locations: Locations,
    next_id: AtomicU64,
    /// Where the next lookup begins, where not all peers are asked.
    turn: AtomicU64,
    counters: Counters,
    hints: HintCounts,
}

#[derive(Debug, Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    corrupt: AtomicU64,
    failures: AtomicU64,
    received_bytes: AtomicU64,
}

impl Default for PeerOptions {
    fn default() -> Self {
        Self {
            tenant: String::new(),
            token: PeerToken::from_secret(b""),
            lookup_timeout: Duration::from_millis(50),
            connect_timeout: Duration::from_secs(1),
            response_timeout: Duration::from_secs(1),
            min_bytes_per_s: 16 << 20,
            n_connections: 8,
            n_asked: 8,
            tls: None,
            hints: None,
        }
    }
}

// === impl PeerTier ===

impl PeerTier {
    /// A tier without peers.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if an option is, [`TierError::Io`] if a file of TLS cannot be read.
    pub fn open(options: PeerOptions) -> Result<Self> {
        for (field, value) in [("n_connections", options.n_connections), ("n_asked", options.n_asked)] {
            if !(1..=64).contains(&value) {
                return Err(TierError::invalid(field, &value, "1 to 64"));
            }
        }
        if options.tenant.len() > frame::MAX_TENANT_BYTES {
            return Err(TierError::invalid("tenant", &options.tenant, "at most 256 bytes"));
        }
        let tls = options.tls.as_ref().map(tls::mutual_client_config).transpose()?.map(Arc::new);
        let dialer = Dialer {
            tls,
            token: options.token.clone(),
            tenant: options.tenant.clone(),
            connect_timeout: options.connect_timeout,
            response_timeout: options.response_timeout,
            resolver: Resolver::new(),
        };
        Ok(Self {
            options,
            dialer,
            peers: RwLock::default(),
            locations: Locations::default(),
            next_id: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            counters: Counters::default(),
            hints: HintCounts::default(),
        })
    }

    /// Asks these peers from now on. Those that it knows keep their connections.
    pub fn set_peers(&self, addresses: &[PeerAddress]) {
        let mut peers = self.peers.write();
        let mut wanted = addresses.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        let new = wanted.into_iter().map(|address| match peers.iter().find(|peer| peer.address == address) {
            Some(known) => Arc::clone(known),
            None => self.new_peer(address),
        });
        let new = new.collect();
        *peers = new;
    }

    fn new_peer(&self, address: PeerAddress) -> Arc<Peer> {
        let id = PeerId(self.next_id.fetch_add(1, Ordering::Relaxed));
        Arc::new(Peer::new(id, address, Arc::new(SystemClock)))
    }

    /// The peers that are asked now.
    pub fn peers(&self) -> Vec<PeerAddress> {
        self.peers.read().iter().map(|peer| peer.address.clone()).collect()
    }

    /// The peers of a lookup: all of them, or as many as are asked at a time, in turns.
    fn asked_peers(&self) -> Vec<Arc<Peer>> {
        let peers = self.peers.read();
        let n_asked = self.options.n_asked.min(peers.len());
        let first =
            if n_asked < peers.len() { self.turn.fetch_add(n_asked as u64, Ordering::Relaxed) } else { 0 };
        (0..n_asked).map(|place| Arc::clone(&peers[(first as usize + place) % peers.len()])).collect()
    }

    /// The peers that a hint names, of those that are asked at all; none without one.
    fn hinted_peers(&self, keys: &[ChunkKey]) -> Vec<Arc<Peer>> {
        let Some(hints) = self.options.hints.as_ref().filter(|_| !self.peers.read().is_empty()) else {
            return Vec::new();
        };
        let deadline = hints::hint_deadline(Instant::now(), self.options.lookup_timeout);
        let addresses = hints.holders(keys, deadline);
        let peers = self.peers.read();
        let named = addresses.iter().filter_map(|address| peers.iter().find(|peer| peer.address == *address));
        named.take(self.options.n_asked).cloned().collect()
    }

    /// Asks peers which of the chunks they have, all at a time.
    fn ask(&self, peers: &[Arc<Peer>], keys: &[ChunkKey], present: &mut [bool], deadline: Instant) {
        let mut sent = Vec::with_capacity(peers.len());
        // What a peer has is of no use while nothing is read from it.
        for peer in peers.iter().filter(|peer| peer.reads.is_passable()) {
            let send = |connection: &mut Connection| connection.send_lookup(keys);
            sent.extend(self.send((peer, &peer.lookups), deadline, send));
        }
        for (mut borrowed, permit) in sent {
            let peer = Arc::clone(borrowed.peer());
            match borrowed.with(|connection| connection.receive_lookup(keys.len())) {
                Ok(found) => {
                    permit.settle([Verdict::Success].into_iter());
                    borrowed.give_back();
                    let now = Instant::now();
                    for ((key, is_present), _) in
                        keys.iter().zip(present.iter_mut()).zip(&found).filter(|(_, is_found)| **is_found)
                    {
                        *is_present = true;
                        self.locations.note(*key, peer.id, now);
                    }
                }
                Err(error) => self.fail(&peer, permit, &error),
            }
        }
    }

    /// Borrows a connection and sends over it. A failure counts against the peer; a peer that is busy or left alone is
    /// `None` as well.
    fn send<'a>(
        &self,
        (peer, gate): (&Arc<Peer>, &'a Gate),
        deadline: Instant,
        send: impl FnOnce(&mut Connection) -> io::Result<()>,
    ) -> Option<(Borrowed, Permit<'a>)> {
        let permit = gate.enter()?;
        match peer.borrow(&self.dialer, self.options.n_connections, deadline) {
            Ok(Some(mut borrowed)) => match borrowed.with(send) {
                Ok(()) => Some((borrowed, permit)),
                Err(error) => {
                    self.fail(peer, permit, &error);
                    None
                }
            },
            Ok(None) => {
                permit.settle([Verdict::Nothing].into_iter());
                None
            }
            Err(error) => {
                self.fail(peer, permit, &error);
                None
            }
        }
    }

    fn fail(&self, peer: &Peer, permit: Permit<'_>, error: &dyn std::fmt::Display) {
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
        permit.settle([Verdict::Failure].into_iter());
        tracing::debug!(peer = %peer.address, %error, "a peer of the store failed");
    }

    fn count(&self, batch: &[GetItem<'_>]) {
        for item in batch {
            let counter = match &item.outcome {
                GetOutcome::Hit => {
                    self.counters.received_bytes.fetch_add(item.n_bytes() as u64, Ordering::Relaxed);
                    &self.counters.hits
                }
                GetOutcome::Corrupt(_) => &self.counters.corrupt,
                _ => &self.counters.misses,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Tier for PeerTier {
    fn kind(&self) -> TierKind {
        TierKind::Peer
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        for item in batch {
            item.outcome = PutOutcome::Skipped;
        }
    }

    /// Reads from peers that a lookup has named; an item whose peer fails is asked of the next one that has it.
    fn get(&self, batch: &mut [GetItem<'_>]) {
        let n_bytes: u64 = batch.iter().map(|item| item.n_bytes() as u64).sum();
        let slow = Duration::from_secs_f64(n_bytes as f64 / self.options.min_bytes_per_s.max(1) as f64);
        let deadline = Instant::now() + self.options.connect_timeout + self.options.response_timeout + slow;
        for item in batch.iter_mut() {
            item.outcome = GetOutcome::Miss;
        }
        let mut tried = vec![Vec::new(); batch.len()];
        while self.get_round(batch, &mut tried, deadline) && Instant::now() < deadline {}
        self.count(batch);
    }

    /// Asks the peers that a hint names, and all peers, in turns, where no hint is of use.
    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        present.fill(false);
        let deadline = Instant::now() + self.options.lookup_timeout;
        for (keys, present) in keys.chunks(MAX_ITEMS).zip(present.chunks_mut(MAX_ITEMS)) {
            let hinted = self.hinted_peers(keys);
            if !hinted.is_empty() {
                self.ask(&hinted, keys, present, deadline);
                let is_right = present.contains(&true);
                self.hints.note(is_right);
                if is_right {
                    continue;
                }
            }
            let mut peers = self.asked_peers();
            peers.retain(|peer| !hinted.iter().any(|asked| asked.id == peer.id));
            self.ask(&peers, keys, present, deadline);
        }
        Ok(())
    }

    /// Forgets where the chunks are; they stay with the peers, whose they are.
    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        Ok(self.locations.forget_all(keys))
    }

    fn visit_keys(&self, _visit: &mut dyn FnMut(ChunkKey, u64)) {}

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn stat(&self) -> TierStat {
        let peers = self.peers.read();
        let n_avoided = peers.iter().filter(|peer| peer.is_avoided()).count();
        let health = if n_avoided == peers.len() && n_avoided > 0 {
            TierHealth::Down("no peer answers".to_owned())
        } else {
            TierHealth::Up
        };
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut details = vec![
            ("peers", peers.len() as u64),
            ("avoided_peers", n_avoided as u64),
            ("hits", read(&self.counters.hits)),
            ("misses", read(&self.counters.misses)),
            ("corrupt", read(&self.counters.corrupt)),
            ("failures", read(&self.counters.failures)),
            ("received_bytes", read(&self.counters.received_bytes)),
        ];
        details.extend(self.hints.details());
        TierStat { health, details, ..TierStat::default() }
    }
}
