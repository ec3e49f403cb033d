//! A listener of the log.

use std::sync::Arc;

use kvik_proto::kv_stream::{ALIVE_INTERVAL, Frame, KvKey, KvTier, MAX_FRAME_KEYS, SnapshotPart};
use tokio::sync::watch;

use super::holding::Shard;
use super::{KvLog, Read};

/// Size from which frames are handed out although more could follow.
const PIECE_BYTES: usize = 64 << 10;

/// Reads the log at its own pace.
#[derive(Debug)]
pub struct KvListener {
    log: Arc<KvLog>,
    changed: watch::Receiver<u64>,
    /// Groups that its stream began with.
    n_groups: usize,
    place: Place,
}

/// How far a listener is.
#[derive(Debug)]
enum Place {
    /// Before everything.
    Start { resumes_at: Option<u64> },
    /// Inside of a snapshot that counts all batches before `next_sequence` in.
    Snapshot { shards: std::vec::IntoIter<Arc<Shard>>, next_sequence: u64 },
    /// At the batch of this number.
    Batch(u64),
}

impl KvListener {
    pub(super) fn new(log: Arc<KvLog>, resumes_at: Option<u64>) -> Self {
        let changed = log.next_sequence.subscribe();
        let n_groups = log.n_groups();
        Self { log, changed, n_groups, place: Place::Start { resumes_at } }
    }

    /// The next bytes of the stream, whole frames of them; `None` when there are groups that the stream did not begin
    /// with, or the log has ended.
    ///
    /// Cancel safe.
    pub async fn next(&mut self) -> Option<Vec<u8>> {
        let frames = self.read().await;
        // After the read: a group is added before anything of it is held, so the frames are of groups that were named.
        (!self.log.is_over(self.n_groups)).then_some(frames)
    }

    /// The next frames; perhaps none where there are other groups.
    async fn read(&mut self) -> Vec<u8> {
        loop {
            match &mut self.place {
                Place::Start { resumes_at } => {
                    let resumes_at = *resumes_at;
                    let mut frames = Vec::new();
                    self.log.hello(self.n_groups, resumes_at).encode(&mut frames);
                    self.place = match resumes_at {
                        Some(sequence) => Place::Batch(sequence),
                        None => self.snapshot(),
                    };
                    return frames;
                }
                Place::Snapshot { shards, next_sequence } => {
                    let next_sequence = *next_sequence;
                    let mut parts = Parts::default();
                    while parts.n_keys < MAX_FRAME_KEYS
                        && let Some(shard) = shards.next()
                    {
                        parts.add(&shard);
                    }
                    let is_last = shards.len() == 0;
                    let mut frames = parts.into_frames();
                    if is_last {
                        Frame::SnapshotEnd { next_sequence }.encode(&mut frames);
                        self.place = Place::Batch(next_sequence);
                    }
                    if !frames.is_empty() {
                        return frames;
                    }
                }
                Place::Batch(sequence) => {
                    // Before the look, so that what comes after it wakes.
                    self.changed.mark_unchanged();
                    if self.log.is_over(self.n_groups) {
                        return Vec::new();
                    }
                    match self.log.read(*sequence, PIECE_BYTES) {
                        Read::Batches { frames, next_sequence } => {
                            self.place = Place::Batch(next_sequence);
                            return frames;
                        }
                        Read::Gone => self.place = self.snapshot(),
                        Read::Nothing => {
                            let next_sequence = *sequence;
                            // The log is held by `self`, so its sender is there.
                            if tokio::time::timeout(ALIVE_INTERVAL, self.changed.changed()).await.is_err() {
                                let mut frames = Vec::new();
                                Frame::Alive { next_sequence }.encode(&mut frames);
                                return frames;
                            }
                        }
                    }
                }
            }
        }
    }

    fn snapshot(&self) -> Place {
        let (holding, next_sequence) = self.log.snapshot();
        Place::Snapshot { shards: holding.into_shards(), next_sequence }
    }
}

/// Keys of some shards, by their group and tier.
#[derive(Debug, Default)]
struct Parts {
    parts: Vec<(u32, KvTier, Vec<KvKey>)>,
    n_keys: usize,
}

impl Parts {
    fn add(&mut self, shard: &Shard) {
        for ((group, key), tiers) in shard {
            for tier in KvTier::ALL.into_iter().filter(|tier| tiers & (1 << tier.as_index()) != 0) {
                self.n_keys += 1;
                let part = self.parts.iter_mut().find(|(of, at, _)| (*of, *at) == (*group, tier));
                match part {
                    Some((_, _, keys)) => keys.push(*key),
                    None => self.parts.push((*group, tier, vec![*key])),
                }
            }
        }
    }

    fn into_frames(self) -> Vec<u8> {
        let mut frames = Vec::new();
        for (group, tier, keys) in self.parts {
            for keys in keys.chunks(MAX_FRAME_KEYS) {
                Frame::SnapshotPart(SnapshotPart { group, tier, keys: keys.to_vec() }).encode(&mut frames);
            }
        }
        frames
    }
}
