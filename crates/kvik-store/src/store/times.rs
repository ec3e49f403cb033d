//! Chunks that are not served any more after some time.
//!
//! A chunk behind another one never lives longer than it: the end of a chunk is at most that of its parent when it becomes
//! visible, and an end only moves away. So chunks that have ended leave with all that hangs on them.

use kvik_types::BlockHash;

use super::core::Core;
use crate::chain::{Chain, block_id};
use crate::directory::Entry;
use crate::policy::BlockId;
use crate::retention::{KeptUntil, NEVER_MS};
use crate::tiers::RAM;

/// A chunk with a time, as one store leaves it to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeptTime {
    /// The chunk.
    pub chunk: BlockHash,
    /// Milliseconds that are left. The time that a hand-over takes is added to it.
    pub left_ms: u64,
}

impl Core {
    /// Takes chunks whose time is over out of memory. Called before chunks are looked for and before room is made; the caller
    /// holds no lock of residents.
    pub(crate) fn end_times(&self) {
        let now_ms = self.now_ms();
        let ended = self.times.take_ended(now_ms);
        if ended.is_empty() {
            return;
        }
        let mut residents = self.ram_residents.lock();
        let depth_of = |id: BlockId| {
            let depth = |_, entry: &mut Entry| (entry.end_ms <= now_ms).then_some(entry.depth);
            self.directory.update_known(id, depth).flatten()
        };
        let mut ended: Vec<(u32, BlockId)> =
            ended.into_iter().filter_map(|id| Some((depth_of(id)?, id))).collect();
        // Children before their parents.
        ended.sort_unstable_by(|left, right| right.cmp(left));
        ended.dedup();
        for (_, id) in ended {
            self.unpublish(id);
            // One that is pinned stays in the tree, as after a clear.
            residents.remove(id);
        }
    }

    /// Notes how long a chunk of a writer is kept. The later of two ends counts, and the higher of two priorities. `was_there`
    /// says whether memory had any rank of it before.
    pub(crate) fn note_kept_until(
        &self,
        entry: &mut Entry,
        kept: KeptUntil,
        chain: &Chain,
        chunk_idx: usize,
        parent_end_ms: u64,
        was_there: bool,
    ) {
        let end_ms = kept.end_ms.min(parent_end_ms);
        entry.end_ms = if was_there { entry.end_ms.max(end_ms) } else { end_ms };
        entry.is_low = kept.is_low && (!was_there || entry.is_low);
        self.times.add(entry.end_ms, chain.id(chunk_idx));
    }

    /// When the chunk before one ends; never where it is the first.
    pub(crate) fn parent_end_ms(&self, chain: &Chain, chunk_idx: usize) -> u64 {
        let parent = chunk_idx.checked_sub(1).map(|parent_idx| self.directory.view(chain.hash(parent_idx)));
        parent.filter(|parent| parent.ranks[RAM] != 0).map_or(NEVER_MS, |parent| parent.end_ms)
    }

    /// Takes note that a chunk which is there is written again.
    pub(crate) fn keep_longer(&self, chain: &Chain, chunk_idx: usize, kept: KeptUntil) {
        let parent_end_ms = self.parent_end_ms(chain, chunk_idx);
        let mut residents = self.ram_residents.lock();
        let leaves_early = self.directory.update_known(chain.id(chunk_idx), |hash, entry| {
            if hash != chain.hash(chunk_idx) || entry.ranks[RAM] == 0 {
                return None;
            }
            self.note_kept_until(entry, kept, chain, chunk_idx, parent_end_ms, true);
            Some(entry.leaves_early())
        });
        if let Some(leaves_early) = leaves_early.flatten() {
            residents.set_copy(chain.id(chunk_idx), leaves_early);
        }
    }

    /// The chunks with a time.
    pub(super) fn kept_times(&self) -> Vec<KeptTime> {
        let now_ms = self.now_ms();
        let mut times = Vec::new();
        self.directory.visit(|chunk, entry| {
            if entry.ranks[RAM] != 0 && entry.end_ms != NEVER_MS {
                times.push(KeptTime { chunk, left_ms: entry.end_ms.saturating_sub(now_ms) });
            }
        });
        times.sort_unstable();
        times
    }

    /// Goes on with the times of chunks that an earlier store left.
    pub(super) fn learn_times(&self, times: &[KeptTime]) {
        let now_ms = self.now_ms();
        for KeptTime { chunk, left_ms } in times {
            let end_ms = now_ms.saturating_add(*left_ms).min(NEVER_MS - 1);
            let id = block_id(*chunk);
            let noted = self.directory.update_known(id, |hash, entry| {
                let is_meant = hash == *chunk && entry.ranks[RAM] != 0;
                if is_meant {
                    entry.end_ms = end_ms;
                }
                is_meant
            });
            if noted == Some(true) {
                self.times.add(end_ms, id);
            }
        }
    }
}
