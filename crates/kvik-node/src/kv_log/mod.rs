//! What a worker or a daemon holds, as a numbered log.
//!
//! An engine's thread and the store say what changed; the log keeps what is held now, gives each batch of
//! changes a number and keeps the last batches. Listeners read at their own pace: one that asks for a batch
//! that is gone gets a snapshot of what is held.
//!
//! **Invariant:** what is held is the sum of all batches up to the last, in their order, and no batch
//! repeats what holds already. An append never waits for a listener: the lock is held for a few operations
//! on memory, a snapshot shares what is held and copies it only where it changes meanwhile, and the batches
//! take a bounded number of bytes.
//!
//! Two blocks whose hashes have the same first half are one here, as for every reader of keys alone; the
//! first that goes takes both along.

mod holding;
mod listener;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kvik_proto::kv_stream::{BlockGroup, Frame, Hello, KvBatch, KvChange, KvKey, KvTier, MAX_FRAME_KEYS};
use kvik_store::{ChunkChange, ChunkObserver};
use kvik_tier::TierKind;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use holding::Holding;
pub use listener::KvListener;

/// Bytes of batches that are kept for listeners that come back: some hundred thousand blocks, minutes of a
/// busy engine.
pub const KEPT_BYTES: usize = 4 << 20;

/// The most listeners at a time: each may hold a copy of what is held while it reads a snapshot.
const MAX_LISTENERS: usize = 64;

/// Where a worker or a daemon writes down what it holds.
#[derive(Debug)]
pub struct KvLog {
    worker: String,
    epoch: u64,
    model: String,
    /// Only ever longer.
    groups: RwLock<Vec<BlockGroup>>,
    kept_bytes: usize,
    state: Mutex<State>,
    /// The number of the next batch; wakes the listeners.
    next_sequence: watch::Sender<u64>,
    is_ended: AtomicBool,
}

/// A block that a tier has since now, or has no more.
#[derive(Debug, Clone, Copy)]
pub struct HeldChange {
    /// The block.
    pub key: KvKey,
    /// The block before it, where that is known.
    pub parent: Option<KvKey>,
    /// The tier.
    pub tier: KvTier,
    /// Whether the tier has it.
    pub is_held: bool,
}

/// Writes the chunks of one space down, as a group of a log.
#[derive(Debug)]
pub struct LoggedChunks {
    log: Arc<KvLog>,
    group: u32,
}

#[derive(Debug)]
struct State {
    holding: Holding,
    /// The last batches as frames, the oldest first.
    batches: VecDeque<Bytes>,
    batch_bytes: usize,
    /// The number of the next batch, which is behind the last of `batches`.
    next_sequence: u64,
}

/// What comes next for a listener.
#[derive(Debug)]
enum Read {
    /// These frames, which end before the batch of this number.
    Batches { frames: Vec<u8>, next_sequence: u64 },
    /// Nothing, until there is such a batch.
    Nothing,
    /// The batch is not kept any more, or never was.
    Gone,
}

impl KvLog {
    /// The log of `worker` in its life `epoch`, where nothing is held yet.
    pub fn new(
        worker: String,
        epoch: u64,
        model: String,
        groups: Vec<BlockGroup>,
        kept_bytes: usize,
    ) -> Self {
        let state =
            State { holding: Holding::default(), batches: VecDeque::new(), batch_bytes: 0, next_sequence: 0 };
        let next_sequence = watch::Sender::new(0);
        let groups = RwLock::new(groups);
        let (state, is_ended) = (Mutex::new(state), AtomicBool::new(false));
        Self { worker, epoch, model, groups, kept_bytes, state, next_sequence, is_ended }
    }

    /// The life that it is the log of.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether it has a group of this number.
    pub fn has_group(&self, group: u32) -> bool {
        self.groups.read().iter().any(|known| known.number == group)
    }

    /// Adds a group before anything of it is held, and ends the streams of all listeners: those that come back learn of it.
    pub fn add_group(&self, group: BlockGroup) {
        self.groups.write().push(group);
        self.next_sequence.send_modify(|_| {});
    }

    fn n_groups(&self) -> usize {
        self.groups.read().len()
    }

    /// Ends the streams of all listeners, and those that begin later at once: what it reported is not true any more.
    pub fn end(&self) {
        // Relaxed: listeners look at it after they were woken, or with their next frame.
        self.is_ended.store(true, Ordering::Relaxed);
        self.next_sequence.send_modify(|_| {});
    }

    /// Whether a stream that began with `n_groups` groups is over.
    fn is_over(&self, n_groups: usize) -> bool {
        self.is_ended.load(Ordering::Relaxed) || self.n_groups() != n_groups
    }

    /// Writes down changes of one group under as few numbers as frames allow.
    pub fn append(&self, group: u32, changes: impl Iterator<Item = HeldChange>) {
        let mut state = self.state.lock();
        let first_sequence = state.next_sequence;
        let mut batch = Vec::new();
        let mut n_keys = 0;
        for change in changes {
            if !state.holding.set(group, change.tier, change.key, change.is_held) {
                continue;
            }
            extend(&mut batch, group, change);
            n_keys += 1;
            if n_keys == MAX_FRAME_KEYS {
                state.push(std::mem::take(&mut batch), self.kept_bytes);
                n_keys = 0;
            }
        }
        if !batch.is_empty() {
            state.push(batch, self.kept_bytes);
        }
        if state.next_sequence != first_sequence {
            self.next_sequence.send_replace(state.next_sequence);
        }
    }

    /// Begins to listen, from the batch of an epoch on if it is still here and with a snapshot otherwise;
    /// `None` where too many listen.
    pub fn listen(self: &Arc<Self>, resume: Option<(u64, u64)>) -> Option<KvListener> {
        if self.next_sequence.receiver_count() >= MAX_LISTENERS {
            return None;
        }
        let resumes_at = resume.filter(|(epoch, from)| {
            *epoch == self.epoch && !matches!(self.state.lock().read(*from, 0), Read::Gone)
        });
        Some(KvListener::new(Arc::clone(self), resumes_at.map(|(_, from)| from)))
    }

    /// The first frame for a listener that knows the first `n_groups` groups.
    fn hello(&self, n_groups: usize, resumes_at: Option<u64>) -> Frame {
        Frame::Hello(Hello {
            worker: self.worker.clone(),
            epoch: self.epoch,
            model: self.model.clone(),
            groups: self.groups.read()[..n_groups].to_vec(),
            resumes_at,
        })
    }

    /// Reads batches from the number `sequence` on, about `n_bytes` of them.
    fn read(&self, sequence: u64, n_bytes: usize) -> Read {
        self.state.lock().read(sequence, n_bytes)
    }

    /// What is held now, and the number of the first batch that is not counted in.
    fn snapshot(&self) -> (Holding, u64) {
        let state = self.state.lock();
        (state.holding.clone(), state.next_sequence)
    }
}

impl LoggedChunks {
    /// Its chunks are the group `group` of `log`.
    pub fn new(log: Arc<KvLog>, group: u32) -> Self {
        Self { log, group }
    }
}

impl ChunkObserver for LoggedChunks {
    fn changed(&self, changes: &[ChunkChange]) {
        self.log.append(
            self.group,
            changes.iter().map(|change| HeldChange {
                key: KvKey::from(change.hash),
                parent: change.parent.map(KvKey::from),
                tier: kv_tier(change.tier),
                is_held: change.is_held,
            }),
        );
    }
}

/// What a tier of the store is to others. A worker has at most one that is remote; what peers have they tell themselves.
pub fn kv_tier(tier: TierKind) -> KvTier {
    match tier {
        TierKind::Ram => KvTier::Cpu,
        TierKind::Nvme => KvTier::Disk,
        TierKind::Peer | TierKind::Redis | TierKind::Object | TierKind::Lm | TierKind::Plugin => {
            KvTier::Remote
        }
    }
}

/// Unix time in seconds with their fractions. A clock before 1970 is set wrongly; nothing here depends on it being right.
fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Adds a change to a batch: to its last run if it goes on from there.
fn extend(batch: &mut Vec<KvChange>, group: u32, change: HeldChange) {
    let HeldChange { key, parent, tier, is_held } = change;
    match batch.last_mut() {
        Some(KvChange::Stored { tier: at, keys, .. })
            if is_held && *at == tier && parent.is_some() && parent == keys.last().copied() =>
        {
            keys.push(key);
        }
        Some(KvChange::Removed { tier: at, keys, .. }) if !is_held && *at == tier => keys.push(key),
        _ if is_held => batch.push(KvChange::Stored { group, tier, parent, keys: vec![key] }),
        _ => batch.push(KvChange::Removed { group, tier, keys: vec![key] }),
    }
}

impl State {
    /// Gives a batch its number and keeps it; the oldest go if it is too much.
    fn push(&mut self, changes: Vec<KvChange>, kept_bytes: usize) {
        let published_s = unix_seconds();
        let batch = KvBatch { sequence: self.next_sequence, published_s, changes };
        let mut frame = Vec::new();
        Frame::Batch(batch).encode(&mut frame);
        self.next_sequence += 1;
        self.batch_bytes += frame.len();
        self.batches.push_back(Bytes::from(frame));
        while self.batch_bytes > kept_bytes
            && let Some(oldest) = self.batches.pop_front()
        {
            self.batch_bytes -= oldest.len();
        }
    }

    fn read(&self, sequence: u64, n_bytes: usize) -> Read {
        let first_sequence = self.next_sequence - self.batches.len() as u64;
        if !(first_sequence..=self.next_sequence).contains(&sequence) {
            return Read::Gone;
        }
        if sequence == self.next_sequence {
            return Read::Nothing;
        }
        let mut frames = Vec::new();
        let mut next_sequence = sequence;
        for batch in self.batches.iter().skip((sequence - first_sequence) as usize) {
            frames.extend_from_slice(batch);
            next_sequence += 1;
            if frames.len() >= n_bytes {
                break;
            }
        }
        Read::Batches { frames, next_sequence }
    }
}
