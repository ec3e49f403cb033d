//! A server of LMCache's plain remote protocol as a tier.
//!
//! The protocol stores, reads and asks for whole values by name, and that is all: no ranges, no deletion, and no
//! reply to a store. So a value is stored only where the server says that it has none, and the server is asked
//! again behind it; a range is read by reading past the rest; and a chunk is deleted by a value without bytes in its
//! place. A server goes on saying that such a value is there, so this tier remembers what it deleted and what it found
//! deleted (`absent.rs`). `frame.rs` is the protocol, `connection.rs` a connection that speaks it,
//! and `serve.rs` the answering side, for kvik's own server.
//!
//! A chunk is the value of `<prefix>@0@<rank>@<namespace><chunk>@uint8`. LMCache's keys have the number of an
//! engine's ranks in the place of the 0, so that no key of one is a key of the other.

mod absent;
mod connection;
mod frame;
mod serve;
mod url;

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use frame::{
    LM_KEY_BYTES, LM_MAX_VALUE_BYTES, LM_REPLY_BYTES, LM_REQUEST_BYTES, LmCommand, LmForm, LmKey, LmReply,
    LmRequest,
};
pub use serve::{LmSource, LmWriter, serve_lm};
pub use url::LmUrl;

use self::absent::AbsentKeys;
use self::connection::{Connection, Dialer, Received};
use crate::channel::Resolver;
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::lanes::{LaneThreads, split};
use crate::pool::Node;
use crate::tally::Tally;
use crate::tier::{
    Arrived, GetItem, GetOutcome, Heads, NoHeads, PutItem, PutOutcome, Tier, TierKind, TierStat,
};

/// A call with more bytes than this uses several connections: below it, waking a thread costs more than it brings.
const LANE_BYTES: usize = 4 << 20;

/// Requests without a reply at a time: their replies fit into the buffers of a connection, so that a server that
/// answers is never held up by a client that still sends.
const WINDOW_REQUESTS: usize = 64;

/// The longest prefix of keys: what is left has room for namespace, chunk and rank.
const MAX_PREFIX_BYTES: usize = 48;

const MAX_TIMEOUT: Duration = Duration::from_hours(1);

/// How an [`LmTier`] works.
#[derive(Debug, Clone)]
pub struct LmOptions {
    /// Time to connect. Default: 2 s.
    pub connect_timeout: Duration,
    /// Longest silence of a server that should answer. Default: 2 s.
    pub response_timeout: Duration,
    /// Speed below which a server counts as failed: a call takes no longer than both timeouts and its bytes at this
    /// speed. Default: 16 MiB a second.
    pub min_bytes_per_s: u64,
    /// Connections to the server. Default: 4.
    pub n_connections: usize,
    /// What all keys begin with, in the place of a model's name. Default: `kvik`.
    pub key_prefix: String,
}

/// A server of LMCache's plain remote protocol: LMCache's own, or kvik's.
///
/// Chunks have at most 2 GiB. Without a range in the protocol, a section costs the time of its chunk. The server's
/// answers are not verified; wrap it in a decorator that verifies. Where two clients store one chunk at a time, the later
/// one takes the place of the earlier: a key has one content.
#[derive(Debug)]
pub struct LmTier {
    node: Node<Dialer>,
    options: LmOptions,
    lane_threads: LaneThreads,
    absent: AbsentKeys,
    tally: Tally,
}

/// Items that go over one connection.
type Lane<'r, T> = Vec<(usize, &'r mut T)>;

impl LmTier {
    /// A tier at `url`. Nothing is connected before the first call, so a server may come later.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if an option is.
    pub fn open(url: &LmUrl, options: &LmOptions) -> Result<Self> {
        options.check()?;
        let dialer = Dialer {
            connect_timeout: options.connect_timeout,
            response_timeout: options.response_timeout,
            min_bytes_per_s: options.min_bytes_per_s,
            resolver: Resolver::new(),
        };
        Ok(Self {
            node: Node::new(url.clone(), Arc::new(dialer), options.n_connections),
            options: options.clone(),
            lane_threads: LaneThreads::new("kvik-lm", options.n_connections),
            absent: AbsentKeys::default(),
            tally: Tally::default(),
        })
    }

    /// The name of a chunk on the server.
    fn name(&self, key: &ChunkKey) -> Result<LmKey> {
        let ChunkKey { namespace, chunk, rank } = key;
        let text = format!("{}@0@{rank}@{namespace}{chunk}@uint8", self.options.key_prefix);
        LmKey::new(&text).ok_or_else(|| TierError::invalid("key", &text, "at most 150 bytes"))
    }

    /// When a call for so many bytes gives up.
    fn deadline(&self, n_bytes: usize) -> Instant {
        let LmOptions { connect_timeout, response_timeout, min_bytes_per_s, .. } = &self.options;
        let transfer = Duration::from_secs_f64(n_bytes as f64 / *min_bytes_per_s as f64);
        Instant::now() + *connect_timeout + *response_timeout + transfer
    }

    /// Connections that a call for so many bytes uses.
    fn n_lanes(&self, n_bytes: usize) -> usize {
        (n_bytes / LANE_BYTES).clamp(1, self.node.n_free())
    }

    /// Lends a connection to `exchange` until all is done. One that was idle may have been closed since, and a server may
    /// end one in the middle: as long as `n_done` rises, the rest goes over a new one.
    fn converse(
        &self,
        deadline: Instant,
        mut exchange: impl FnMut(&mut Connection, &mut usize) -> io::Result<()>,
    ) -> Result<()> {
        let mut lent = self.node.lend(deadline)?;
        let mut n_done = 0;
        loop {
            let Some(connection) = lent.connection() else { return Ok(()) };
            connection.set_deadline(deadline);
            let n_before = n_done;
            let error = match exchange(connection, &mut n_done) {
                Ok(()) => {
                    lent.give_back();
                    return Ok(());
                }
                Err(error) => error,
            };
            let is_final = matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::InvalidData);
            if is_final || !(lent.is_used() || n_done > n_before) {
                self.node.set_suspect(true);
                let is_transient = error.kind() != io::ErrorKind::InvalidData;
                return Err(TierError::remote(format!("ask {}", self.node.endpoint()), &error, is_transient));
            }
            lent.replace(deadline)?;
        }
    }

    /// Asks of every name whether it is there.
    fn ask(&self, names: &[LmKey], deadline: Instant) -> Result<Vec<bool>> {
        let mut found = Vec::with_capacity(names.len());
        self.converse(deadline, |connection, n_done| {
            while *n_done < names.len() {
                let window = &names[*n_done..(*n_done + WINDOW_REQUESTS).min(names.len())];
                for name in window {
                    connection.push(LmCommand::Exist, *name);
                }
                connection.flush()?;
                for _ in window {
                    found.push(connection.receive_answer()?);
                    *n_done += 1;
                }
            }
            Ok(())
        })?;
        Ok(found)
    }

    fn names(&self, keys: &[ChunkKey]) -> Result<Vec<LmKey>> {
        keys.iter().map(|key| self.name(key)).collect()
    }

    fn put_lane(&self, lane: &mut Lane<'_, PutItem<'_>>, heads: &dyn Heads, deadline: Instant) {
        let put = |lane: &mut Lane<'_, PutItem<'_>>| -> Result<()> {
            let keys: Vec<ChunkKey> = lane.iter().map(|(_, item)| item.key).collect();
            let names = self.names(&keys)?;
            let found = self.ask(&names, deadline)?;
            // Those of this call, so that a key that is there twice is stored once.
            let mut stored = HashSet::new();
            self.converse(deadline, |connection, n_done| {
                while *n_done < lane.len() {
                    let place = *n_done;
                    let (item_idx, item) = &mut lane[place];
                    let is_there = found[place] && !self.absent.contains(&item.key);
                    if is_there || stored.contains(&item.key) {
                        item.outcome = PutOutcome::Present;
                        *n_done += 1;
                        continue;
                    }
                    // Until the server says that it has all of it.
                    self.absent.insert(item.key);
                    let parts = [&[heads.head_of(*item_idx)], item.parts].concat();
                    connection.put(names[place], &parts)?;
                    item.outcome = if connection.receive_answer()? {
                        self.absent.remove(&item.key);
                        stored.insert(item.key);
                        PutOutcome::Stored
                    } else {
                        PutOutcome::NoRoom
                    };
                    *n_done += 1;
                }
                Ok(())
            })
        };
        if let Err(error) = put(lane) {
            for (_, item) in lane.iter_mut().filter(|(_, item)| matches!(item.outcome, PutOutcome::Pending)) {
                item.outcome = PutOutcome::Failed(error.clone());
            }
        }
    }

    fn get_lane(&self, lane: &mut Lane<'_, GetItem<'_>>, arrived: Arrived<'_>, deadline: Instant) {
        let mut n_arrived = 0;
        let got = lane.iter().map(|(_, item)| self.name(&item.key)).collect::<Result<Vec<LmKey>>>();
        let got = got.and_then(|names| {
            self.converse(deadline, |connection, n_done| {
                while *n_done < names.len() {
                    let window = *n_done..(*n_done + WINDOW_REQUESTS).min(names.len());
                    for name in &names[window.clone()] {
                        connection.push(LmCommand::Get, *name);
                    }
                    connection.flush()?;
                    for place in window {
                        let (item_idx, item) = &mut lane[place];
                        let Received { outcome, is_hollow } = connection.receive_value(item)?;
                        if is_hollow {
                            self.absent.insert(item.key);
                        } else {
                            self.absent.remove(&item.key);
                        }
                        item.outcome = outcome;
                        arrived(*item_idx, item);
                        *n_done += 1;
                        n_arrived = *n_done;
                        if connection.is_ended() && *n_done < names.len() {
                            return Err(io::ErrorKind::ConnectionReset.into());
                        }
                    }
                }
                Ok(())
            })
        });
        if let Err(error) = got {
            for (item_idx, item) in &mut lane[n_arrived..] {
                item.outcome = GetOutcome::Failed(error.clone());
                arrived(*item_idx, item);
            }
        }
    }

    /// Puts values without bytes in the place of those that are there; how many these were.
    fn bury(&self, keys: &[ChunkKey]) -> Result<usize> {
        let mut distinct = HashSet::new();
        let is_new = |key: &&ChunkKey| distinct.insert(**key) && !self.absent.contains(key);
        let keys: Vec<ChunkKey> = keys.iter().filter(is_new).copied().collect();
        let deadline = self.deadline(0);
        let names = self.names(&keys)?;
        let found = self.ask(&names, deadline)?;
        let there: Vec<(ChunkKey, LmKey)> = keys
            .into_iter()
            .zip(names)
            .zip(found)
            .filter_map(|(named, is_found)| is_found.then_some(named))
            .collect();
        self.converse(deadline, |connection, n_done| {
            while *n_done < there.len() {
                let window = &there[*n_done..(*n_done + WINDOW_REQUESTS).min(there.len())];
                for (key, name) in window {
                    self.absent.insert(*key);
                    connection.put(*name, &[])?;
                }
                for _ in window {
                    // LMCache's server says that it is there, and kvik's that it is not.
                    connection.receive_answer()?;
                    *n_done += 1;
                }
            }
            Ok(())
        })?;
        Ok(there.len())
    }
}

impl Tier for LmTier {
    fn kind(&self) -> TierKind {
        TierKind::Lm
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        self.put_each(batch, &NoHeads);
    }

    fn put_each(&self, batch: &mut [PutItem<'_>], heads: &dyn Heads) {
        let n_bytes_of = |item: &PutItem<'_>| heads.n_bytes() + item.n_bytes();
        for item in batch.iter_mut() {
            let n_bytes = n_bytes_of(item);
            if !(1..=LM_MAX_VALUE_BYTES).contains(&n_bytes) {
                let allowed = "1 byte to 2 GiB in a server of LMCache's protocol";
                item.outcome = PutOutcome::Failed(TierError::invalid("chunk length", &n_bytes, allowed));
            }
        }
        let n_bytes = batch.iter().map(n_bytes_of).sum();
        let deadline = self.deadline(n_bytes);
        let items =
            batch.iter_mut().enumerate().filter(|(_, item)| matches!(item.outcome, PutOutcome::Pending));
        let mut lanes = split(items, self.n_lanes(n_bytes), |(_, item)| (item.key, item.n_bytes()));
        self.lane_threads.run_all(&mut lanes, |lane| self.put_lane(lane, heads, deadline));
        self.tally.note_put(batch, None);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        self.get_each(batch, &|_, _| {});
    }

    fn get_each(&self, batch: &mut [GetItem<'_>], arrived: Arrived<'_>) {
        let n_bytes = batch.iter().map(GetItem::n_bytes).sum();
        let deadline = self.deadline(n_bytes);
        let items = batch.iter_mut().enumerate();
        let mut lanes = split(items, self.n_lanes(n_bytes), |(_, item)| (item.key, item.n_bytes()));
        self.lane_threads.run_all(&mut lanes, |lane| self.get_lane(lane, arrived, deadline));
        self.tally.note_get(batch);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        let found = self.names(keys).and_then(|names| self.ask(&names, self.deadline(0)));
        self.tally.note_answer(found.as_ref().err());
        for ((is_present, is_found), key) in present.iter_mut().zip(found?).zip(keys) {
            *is_present = is_found && !self.absent.contains(key);
        }
        Ok(())
    }

    /// Puts values without bytes in the place of the chunks: the protocol has no deletion.
    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        let n_deleted = self.bury(keys);
        self.tally.note_answer(n_deleted.as_ref().err());
        n_deleted
    }

    fn visit_keys(&self, _visit: &mut dyn FnMut(ChunkKey, u64)) {}

    /// Does nothing: the protocol knows no such wish.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn stat(&self) -> TierStat {
        let mut details = self.tally.counts();
        details.push(("connects", self.node.n_connects()));
        TierStat { health: self.tally.health(), details, ..TierStat::default() }
    }
}

impl LmOptions {
    fn check(&self) -> Result<()> {
        let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'@';
        let is_prefix_allowed =
            (1..=MAX_PREFIX_BYTES).contains(&self.key_prefix.len()) && self.key_prefix.bytes().all(is_plain);
        if !is_prefix_allowed {
            let allowed = "1 to 48 printable ASCII characters without spaces and @";
            return Err(TierError::invalid("key_prefix", &self.key_prefix, allowed));
        }
        if !(1..=64).contains(&self.n_connections) {
            return Err(TierError::invalid("n_connections", &self.n_connections, "1 to 64"));
        }
        if self.min_bytes_per_s == 0 {
            return Err(TierError::invalid("min_bytes_per_s", &0, "1 or more"));
        }
        for (field, timeout) in
            [("connect_timeout", self.connect_timeout), ("response_timeout", self.response_timeout)]
        {
            if timeout < Duration::from_millis(1) || timeout > MAX_TIMEOUT {
                return Err(TierError::invalid(field, &format!("{timeout:?}"), "1 ms to 1 hour"));
            }
        }
        Ok(())
    }
}

impl Default for LmOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            response_timeout: Duration::from_secs(2),
            min_bytes_per_s: 16 << 20,
            n_connections: 4,
            key_prefix: "kvik".to_owned(),
        }
    }
}
