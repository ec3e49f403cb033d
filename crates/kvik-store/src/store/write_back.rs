//! Writing to a lower tier.

use std::sync::Arc;

use kvik_tier::{Lease, PutItem, PutOutcome};

use super::core::Core;
use crate::chain::Chain;
use crate::counters::Counter;
use crate::lower::{ChunkPart, Lower, PutJob, QueueGuard, WriteJob};
use crate::residents::ResidentPin;
use crate::tiers::{RAM, TierIdx};

/// Doublings of the number of victims before a full tier is given up.
pub(crate) const MAX_ROUNDS: u32 = 8;

impl Core {
    /// Works on a tier's writes until its queue ends, then makes them durable.
    pub(crate) fn run_writes(self: &Arc<Self>, tier: TierIdx) {
        let Some(lower) = self.lower(tier) else { return };
        let _guard = QueueGuard(lower);
        while let Some(mut batch) = lower.writes.pop(self.options.batch_bytes) {
            let mut puts = Vec::new();
            for job in batch.jobs.drain(..) {
                match job {
                    WriteJob::Put(put) => puts.push(put),
                    WriteJob::Task(task) => {
                        self.write_down(lower, std::mem::take(&mut puts));
                        task(lower);
                    }
                }
            }
            self.write_down(lower, puts);
        }
        // What is not durable is a miss after the next start, and never wrong.
        let _ = lower.tier.flush();
    }

    /// Leaves a chunk to the writing thread of a tier, and keeps it in memory until then; counted where the
    /// queue is full.
    pub(crate) fn queue_write(
        self: &Arc<Self>,
        lower: &Lower,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        lease: &Lease,
        generation: u64,
    ) {
        let job = PutJob {
            part: ChunkPart { chain: chain.clone(), chunk_idx, rank, generation },
            lease: lease.clone(),
            _pin: ResidentPin::new(&self.ram_residents, chain.id(chunk_idx)),
            is_requested: false,
        };
        if lower.writes.push(job.lease.len() as u64, WriteJob::Put(job)).is_err() {
            self.counters.add(Counter::DroppedWrites(lower.tier_idx), 1);
        }
    }

    /// Writes chunks, parents first; returns how many of them the tier has now.
    pub(crate) fn write_down(&self, lower: &Lower, jobs: Vec<PutJob>) -> usize {
        let mut n_jobs = jobs.len();
        let mut n_there = 0;
        let mut waiting: Vec<PutJob> = Vec::with_capacity(n_jobs);
        for job in jobs {
            if self.has_written(lower, &job.part) {
                n_there += 1;
            } else if waiting.iter().any(|other| other.part.key() == job.part.key()) {
                n_jobs -= 1;
            } else if self.may_write(lower, &job.part, &waiting) {
                waiting.push(job);
            }
        }
        // What makes room must not push out the chunks before it, which were not used there yet.
        let _parents: Vec<ResidentPin> = waiting.iter().filter_map(|job| pin_parent(lower, job)).collect();
        for round in 0..=MAX_ROUNDS {
            if waiting.is_empty() {
                break;
            }
            let outcomes = put_all(lower, &waiting);
            let mut refused = Vec::new();
            for (job, outcome) in waiting.into_iter().zip(outcomes) {
                match outcome {
                    PutOutcome::NoRoom => refused.push(job),
                    _ if outcome.is_present() && self.note_written(lower, &job.part) => {
                        self.counters.add(Counter::Written(lower.tier_idx), 1);
                        n_there += 1;
                    }
                    _ => {}
                }
            }
            waiting = self.admitted(lower, refused);
            let n_victims = waiting.len() << round;
            if !waiting.is_empty() && self.evict_from(lower, n_victims) == 0 {
                break;
            }
        }
        self.counters.add(Counter::DroppedWrites(lower.tier_idx), (n_jobs - n_there) as u64);
        n_there
    }

    pub(crate) fn has_written(&self, lower: &Lower, part: &ChunkPart) -> bool {
        let ranks = self.directory.view(part.chain.hash(part.chunk_idx)).ranks[lower.tier_idx];
        ranks & (1 << part.rank) != 0
    }

    /// A chunk without its parent would lie in a local tier for nothing, and one with a time beyond it.
    pub(crate) fn may_write(&self, lower: &Lower, part: &ChunkPart, before: &[PutJob]) -> bool {
        let ChunkPart { chain, chunk_idx, rank, .. } = part;
        if part.is_stale() || self.directory.view(chain.hash(*chunk_idx)).is_timed() {
            return false;
        }
        if !lower.is_local() || self.has_parent_in(lower.tier_idx, chain, *chunk_idx, *rank) {
            return true;
        }
        let parent = chain.key_of(chunk_idx - 1, *rank);
        before.iter().any(|other| other.part.key() == parent)
    }

    /// Those of the chunks that a full tier refused for which others shall leave.
    fn admitted(&self, lower: &Lower, refused: Vec<PutJob>) -> Vec<PutJob> {
        let Some(residents) = lower.residents.as_ref().filter(|_| !refused.is_empty()) else {
            return Vec::new();
        };
        let mut residents = residents.lock();
        let (admitted, dropped): (Vec<PutJob>, Vec<PutJob>) = refused.into_iter().partition(|job| {
            job.is_requested || residents.admits(self.now_ms(), &job.part.chain, job.part.chunk_idx)
        });
        // What is dropped unpins, which takes the lock of another tier's residents.
        drop(residents);
        drop(dropped);
        admitted
    }

    /// Makes a written chunk known; false, and takes it back, where it may not be.
    pub(crate) fn note_written(&self, lower: &Lower, part: &ChunkPart) -> bool {
        let ChunkPart { chain, chunk_idx, rank, .. } = part;
        let mut residents = lower.residents.as_ref().map(|residents| residents.lock());
        let (mut is_known, mut leaves_early) = (true, false);
        if let Some(residents) = &mut residents {
            is_known = self.has_parent_in(lower.tier_idx, chain, *chunk_idx, *rank)
                && residents.insert(self.now_ms(), chain, *chunk_idx);
        }
        if is_known {
            let noted = self.directory.update(chain, *chunk_idx, |entry| {
                if part.is_stale() {
                    return false;
                }
                entry.ranks[lower.tier_idx] |= 1 << rank;
                leaves_early = entry.leaves_early();
                true
            });
            is_known = noted == Some(true);
            if let Some(residents) = residents.as_mut().filter(|_| is_known && leaves_early) {
                residents.set_copy(chain.id(*chunk_idx), true);
            }
            if !is_known
                && let Some(residents) = &mut residents
                && self.directory.ranks(chain.id(*chunk_idx), lower.tier_idx) == 0
            {
                residents.remove(chain.id(*chunk_idx));
            }
        }
        drop(residents);
        if !is_known {
            // Where that fails, an unknown chunk lies there until the next start finds it.
            let _ = lower.tier.delete(&[part.key()]);
        }
        is_known
    }

    /// Makes chunks leave a local tier; says how many did.
    pub(crate) fn evict_from(&self, lower: &Lower, n_wanted: usize) -> usize {
        let Some(residents) = &lower.residents else { return 0 };
        let mut keys = Vec::new();
        let mut n_evicted = 0;
        {
            let mut residents = residents.lock();
            while n_evicted < n_wanted
                && let Some(id) = residents.victim(self.now_ms())
            {
                let left = self.directory.update_known(id, |hash, entry| {
                    if entry.ranks[RAM] != 0 {
                        entry.left_tiers.insert(lower.tier_idx);
                    }
                    let ranks = std::mem::take(&mut entry.ranks[lower.tier_idx]);
                    self.keys(hash, entry, ranks)
                });
                let left = left.unwrap_or_default();
                n_evicted += usize::from(!left.is_empty());
                keys.extend(left);
            }
        }
        self.counters.add(Counter::EvictedChunks(lower.tier_idx), n_evicted as u64);
        // A tier that cannot delete stays full: no more is forgotten for nothing.
        if lower.tier.delete(&keys).is_ok() { n_evicted } else { 0 }
    }
}

/// Keeps the chunk before one that a request puts into a tier.
fn pin_parent(lower: &Lower, job: &PutJob) -> Option<ResidentPin> {
    let residents = lower.residents.as_ref().filter(|_| job.is_requested)?;
    let parent = job.part.chunk_idx.checked_sub(1)?;
    ResidentPin::new(residents, job.part.chain.id(parent))
}

fn put_all(lower: &Lower, jobs: &[PutJob]) -> Vec<PutOutcome> {
    let parts: Vec<[&[u8]; 1]> = jobs.iter().map(|job| [&job.lease[..]]).collect();
    let mut items: Vec<PutItem<'_>> = jobs
        .iter()
        .zip(&parts)
        .map(|(PutJob { part, .. }, parts)| {
            let section_bytes = part.chain.section_bytes(part.chunk_idx);
            let digest = part.chain.digest_of(part.chunk_idx);
            PutItem::with_sections(part.key(), parts, section_bytes).for_tokens(digest)
        })
        .collect();
    lower.tier.put(&mut items);
    items.into_iter().map(|item| item.outcome).collect()
}
