//! Chunks that change their tier on request.

use std::sync::Arc;
use std::time::Instant;

use super::Store;
use super::retrieve::Retrieved;
use crate::chain::Chain;
use crate::lower::{ChunkPart, PutJob, WriteJob};
use crate::promise::promise;
use crate::tiers::{RAM, TierIdx, TierName};

impl Store {
    /// Copies a chain from one tier to another, and removes it from the first if `keep_source` is false;
    /// returns the number of chunks, from the first on, that are in `to` now.
    ///
    /// Only chunks that are in `from` are moved, up to the first that is not. What cannot be read or written
    /// in time stays where it was, and so do chunks on which others hang. Others leave a full local tier below memory for them.
    pub fn relocate(
        &self,
        chain: &Chain,
        from: impl Into<TierName>,
        to: impl Into<TierName>,
        keep_source: bool,
    ) -> usize {
        let core = self.core();
        let (Some(from), Some(to)) = (core.tier_idx(&from.into()), core.tier_idx(&to.into())) else {
            return 0;
        };
        if from == to {
            return 0;
        }
        let generation = chain.namespace().generation();
        // What a remote tier has is known for sure only by what comes from it.
        let only = core.lower(from).filter(|lower| !lower.is_local()).map(|_| from);
        let retrieved = core.bring(chain, only);
        let n_found = match only {
            Some(_) => retrieved.chunks().len(),
            None => self.n_chunks_in(from, chain, &retrieved),
        };
        let n_moved = if to == RAM {
            core.settle(chain, generation, &retrieved).min(n_found)
        } else {
            self.copy_to(to, chain, generation, &retrieved, n_found)
        };
        if !keep_source {
            core.remove_chunks(from, chain, n_moved, Instant::now() + core.options.retrieve_timeout);
        }
        n_moved
    }

    /// Retrieved chunks, from the first on, that a local tier has.
    fn n_chunks_in(&self, tier: TierIdx, chain: &Chain, retrieved: &Retrieved) -> usize {
        let core = self.core();
        let all_ranks = chain.space().format().all_ranks();
        let is_there = |chunk_idx: usize| core.directory.view(chain.hash(chunk_idx)).ranks[tier] == all_ranks;
        (0..retrieved.chunks().len()).take_while(|chunk_idx| is_there(*chunk_idx)).count()
    }

    fn copy_to(
        &self,
        to: TierIdx,
        chain: &Chain,
        generation: u64,
        retrieved: &Retrieved,
        n_chunks: usize,
    ) -> usize {
        let core = self.core();
        let Some(lower) = core.lower(to) else { return 0 };
        let mut answers = Vec::with_capacity(n_chunks);
        for (chunk_idx, chunk) in retrieved.chunks().iter().enumerate().take(n_chunks) {
            let jobs: Vec<PutJob> = (0..chain.n_ranks())
                .filter_map(|rank| {
                    let lease = chunk.lease(rank)?.clone();
                    let part = ChunkPart { chain: chain.clone(), chunk_idx, rank, generation };
                    Some(PutJob { part, lease, _pin: None, is_requested: true })
                })
                .collect();
            let n_bytes = jobs.iter().map(|job| job.lease.len() as u64).sum();
            let (promise, answer) = promise();
            let core = Arc::clone(core);
            let task = WriteJob::Task(Box::new(move |lower| {
                let n_jobs = jobs.len();
                if promise.is_wanted() {
                    promise.keep(core.write_down(lower, jobs) == n_jobs);
                }
            }));
            if lower.writes.push(n_bytes, task).is_err() {
                break;
            }
            answers.push(answer);
        }
        let deadline = Instant::now() + core.options.retrieve_timeout;
        answers.into_iter().map_while(|answer| answer.wait(deadline).filter(|is_there| *is_there)).count()
    }
}
