//! Chunks whose bytes their writer puts into a file by itself, past memory: a device that writes from memory of its own.

use std::sync::Arc;
use std::time::Instant;

use kvik_tier::{FileItem, Fill, PutOutcome};

use super::Store;
use super::core::Core;
use super::write_back::MAX_ROUNDS;
use crate::chain::Chain;
use crate::counters::Counter;
use crate::lower::{ChunkPart, Lower, WriteJob};
use crate::options::WriteBack;
use crate::promise::promise;

/// Sections are a multiple of this, so that writers write whole blocks.
const SECTION_ALIGNMENT: usize = 4096;

/// What became of a chunk whose writer puts it into a file by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileWrite {
    /// It is on the disk, and can be retrieved.
    Stored,
    /// It was on the disk before.
    Present,
    /// It goes by way of memory ([`Store::begin_write`]): no disk takes files, other tiers want it too, chunks are written when they are
    /// used again, or the chunk before it is not on the disk.
    Elsewhere,
    /// The disk is full of what is worth more, or the namespace was cleared meanwhile: the chain ends here.
    Refused,
    /// The writer or the disk failed.
    Failed,
}

impl Store {
    /// Stores a chunk of one rank on the disk, with bytes that `fill` writes there and sums up: layer 0 first, one section a layer.
    /// Memory gets nothing of it.
    ///
    /// `fill` may be called more than once, each time with another place. Waits for the disk.
    pub fn write_to_file(&self, chain: &Chain, chunk_idx: usize, fill: Fill<'_>) -> FileWrite {
        let core = self.core();
        core.end_times();
        let n_layers = chain.space().format().n_layers as usize;
        if chain.n_ranks() != 1 || core.n_chunks(chain) <= chunk_idx || chain.key(chunk_idx, 0).is_none() {
            return FileWrite::Elsewhere;
        }
        let Some(lower) = core.file_tier() else { return FileWrite::Elsewhere };
        let generation = chain.namespace().generation();
        let part = ChunkPart { chain: chain.clone(), chunk_idx, rank: 0, generation };
        if core.has_written(lower, &part) {
            core.counters.add(Counter::StoredBefore, 1);
            return FileWrite::Present;
        }
        let section_bytes = chain.section_bytes(chunk_idx);
        let n_bytes = chain.payload_bytes(chunk_idx);
        let is_by_layers = section_bytes.is_multiple_of(SECTION_ALIGNMENT)
            && section_bytes > 0
            && n_bytes == section_bytes * n_layers;
        if !is_by_layers || !core.may_write(lower, &part, &[]) {
            return FileWrite::Elsewhere;
        }
        let item = FileItem {
            key: part.key(),
            digest: chain.digest_of(chunk_idx),
            n_bytes: n_bytes as u64,
            section_bytes: section_bytes as u64,
        };
        let written = core.put_file(lower, &part, &item, fill);
        match written {
            FileWrite::Stored => {
                core.counters.add(Counter::Written(lower.tier_idx), 1);
                core.counters.add(Counter::StoredPayloads, 1);
                core.counters.add(Counter::StoredBytes, item.n_bytes);
                core.counters.add(Counter::DirectWrites, 1);
                core.counters.add(Counter::DirectWrittenBytes, item.n_bytes);
            }
            FileWrite::Present => core.counters.add(Counter::StoredBefore, 1),
            FileWrite::Refused => core.counters.add(Counter::DroppedWrites(lower.tier_idx), 1),
            FileWrite::Failed => core.counters.add(Counter::FailedDirectWrites, 1),
            FileWrite::Elsewhere => {}
        }
        written
    }
}

impl Core {
    /// The disk whose files writers fill by themselves: where it is all that chunks are written to, and at once.
    fn file_tier(&self) -> Option<&Lower> {
        let mut written = self.written_lowers();
        let first = written.next().filter(|lower| lower.is_local() && lower.tier.has_files());
        first.filter(|_| written.next().is_none() && self.options.write_back == WriteBack::OnStore)
    }

    /// Puts a chunk on the disk; where that is full, others leave for it.
    ///
    /// The bytes are written on this thread. What is known of the tier changes on its writing thread alone, so that a chunk which
    /// that thread deletes is not made known here.
    fn put_file(
        self: &Arc<Self>,
        lower: &Lower,
        part: &ChunkPart,
        item: &FileItem,
        fill: Fill<'_>,
    ) -> FileWrite {
        for round in 0..=MAX_ROUNDS {
            let put = lower.tier.put_file(item, &mut *fill);
            let noted = match &put {
                PutOutcome::Stored | PutOutcome::Present => {
                    let part = part.clone();
                    self.in_order(lower, move |core, lower| core.note_file(lower, &part))
                }
                PutOutcome::NoRoom => {
                    let part = part.clone();
                    let has_room =
                        self.in_order(lower, move |core, lower| core.make_room(lower, &part, 1 << round));
                    if has_room == Some(true) {
                        continue;
                    }
                    has_room
                }
                PutOutcome::Skipped => return FileWrite::Elsewhere,
                _ => return FileWrite::Failed,
            };
            return match (noted, put) {
                (Some(true), PutOutcome::Stored) => FileWrite::Stored,
                (Some(true), _) => FileWrite::Present,
                (Some(false), _) => FileWrite::Refused,
                // A chunk that is not known lies there until the next start finds it.
                (None, _) => FileWrite::Failed,
            };
        }
        FileWrite::Refused
    }

    /// Does something on the writing thread of a tier, after what is queued there; `None` where it does not come to it in time.
    fn in_order<T: Send + 'static>(
        self: &Arc<Self>,
        lower: &Lower,
        act: impl FnOnce(&Self, &Lower) -> T + Send + 'static,
    ) -> Option<T> {
        let (promise, answer) = promise();
        let core = Arc::clone(self);
        let task = move |lower: &Lower| promise.keep(act(&core, lower));
        lower.writes.push(0, WriteJob::Task(Box::new(task))).ok()?;
        answer.wait(Instant::now() + self.options.retrieve_timeout)
    }

    /// Makes a chunk known that was put into a file, if it is still there.
    fn note_file(&self, lower: &Lower, part: &ChunkPart) -> bool {
        let mut is_there = [false];
        lower.tier.contains(&[part.key()], &mut is_there).is_ok()
            && is_there[0]
            && self.note_written(lower, part)
    }

    /// Makes chunks leave for one that is worth more; whether any left.
    fn make_room(&self, lower: &Lower, part: &ChunkPart, n_victims: usize) -> bool {
        let (chain, chunk_idx) = (&part.chain, part.chunk_idx);
        let is_admitted = lower
            .residents
            .as_ref()
            .is_some_and(|residents| residents.lock().admits(self.now_ms(), chain, chunk_idx));
        is_admitted && self.evict_from(lower, n_victims) > 0
    }
}
