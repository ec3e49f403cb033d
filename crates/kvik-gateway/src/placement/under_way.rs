//! Prompts that were sent to a worker and whose answers have not ended.
//!
//! The worker will have their KV before a request that is placed behind them starts, but no event says so yet. Without
//! this, prompts that share a beginning and come at the same time are computed on several workers, just when the fleet
//! is busy.
//!
//! A prompt is a chain of block hashes, computed once. For each pair of block and worker there is a count of the prompts
//! that have it; since a chain that has a block has all blocks before it, the longest beginning that a worker will have
//! is found by bisection. Sending a prompt costs one step for each of its blocks and asking costs the logarithm of that
//! for each worker, however many prompts are under way; each lock is held for one step.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::upstream::backend::Backend;

/// Blocks that are remembered; a prompt that goes beyond them is not, which costs what others could have shared with it.
/// Some 32 million tokens, in about 50 MB.
const MAX_BLOCKS: usize = 1 << 21;
/// A common beginning counts in steps of a usual token block: engines share whole blocks only.
const BLOCK_TOKENS: usize = 16;
/// Locks that the counts are spread over, so that requests rarely wait for each other.
const N_SHARDS: usize = 64;
/// Spreads the numbers of backends over all bits: the golden ratio, as in Fibonacci hashing.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Prompts by pairs of block and backend.
type Counts = HashMap<u64, u32>;

/// All prompts that are under way.
#[derive(Debug)]
pub(crate) struct UnderWay {
    shards: Box<[Mutex<Counts>]>,
    /// Of all prompts; blocks that several share count each time.
    n_blocks: AtomicUsize,
}

/// The whole blocks of a prompt, each hash standing for the prompt up to its end.
#[derive(Debug, Clone)]
pub(crate) struct PromptBlocks(Arc<[u64]>);

/// A prompt that is under way until this is dropped.
#[derive(Debug)]
pub(crate) struct UnderWayGuard {
    under_way: Arc<UnderWay>,
    blocks: PromptBlocks,
    backend: u64,
}

impl PromptBlocks {
    /// Hashes a prompt; prompts with another salt, or without one, have nothing in common with it.
    pub(crate) fn new(tokens: &[u32], salt: Option<&str>) -> Self {
        let mut parent = salt.map_or(0, |salt| xxh3_64_with_seed(salt.as_bytes(), 1));
        let hashes = tokens.chunks_exact(BLOCK_TOKENS).map(|block| {
            let mut bytes = [0; 4 * BLOCK_TOKENS];
            for (place, token) in bytes.chunks_exact_mut(4).zip(block) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            parent = xxh3_64_with_seed(&bytes, parent);
            parent
        });
        Self(hashes.collect())
    }
}

impl UnderWay {
    /// Notes that a prompt was sent to a backend; `None` if too many blocks are remembered.
    pub(crate) fn send(self: &Arc<Self>, backend: &Backend, blocks: &PromptBlocks) -> Option<UnderWayGuard> {
        let n_blocks = blocks.0.len();
        // Relaxed: a count that bounds memory, and nothing else is read by it.
        if MAX_BLOCKS < self.n_blocks.fetch_add(n_blocks, Ordering::Relaxed).saturating_add(n_blocks) {
            self.n_blocks.fetch_sub(n_blocks, Ordering::Relaxed);
            return None;
        }
        for &block in &*blocks.0 {
            let key = key(block, backend.number);
            *self.shard(key).lock().entry(key).or_default() += 1;
        }
        Some(UnderWayGuard { under_way: Arc::clone(self), blocks: blocks.clone(), backend: backend.number })
    }

    /// Raises `saved` of each of `backends` to the whole blocks that the prompt shares with one that is under way there.
    pub(crate) fn raise<'a>(
        &self,
        blocks: &PromptBlocks,
        backends: impl Iterator<Item = &'a Arc<Backend>>,
        saved: &mut [f64],
    ) {
        for (backend, saved) in backends.zip(saved) {
            let n_shared = blocks.0.partition_point(|&block| self.has(key(block, backend.number)));
            *saved = saved.max((n_shared * BLOCK_TOKENS) as f64);
        }
    }

    fn has(&self, key: u64) -> bool {
        self.shard(key).lock().contains_key(&key)
    }

    fn shard(&self, key: u64) -> &Mutex<Counts> {
        &self.shards[key as usize % N_SHARDS]
    }
}

impl Default for UnderWay {
    fn default() -> Self {
        Self { shards: (0..N_SHARDS).map(|_| Mutex::default()).collect(), n_blocks: AtomicUsize::new(0) }
    }
}

impl Drop for UnderWayGuard {
    fn drop(&mut self) {
        // From the end, so that what is left of the chain is always a beginning.
        for &block in self.blocks.0.iter().rev() {
            let key = key(block, self.backend);
            if let Entry::Occupied(mut count) = self.under_way.shard(key).lock().entry(key) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
        self.under_way.n_blocks.fetch_sub(self.blocks.0.len(), Ordering::Relaxed);
    }
}

/// Stands for a block on a backend.
fn key(block: u64, backend: u64) -> u64 {
    block ^ backend.wrapping_mul(SPREAD)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::upstream::backend::BackendKind;

    fn backend(id: &str) -> Arc<Backend> {
        Arc::new(Backend::new(id.to_owned(), BackendKind::Worker, 1, "http://127.0.0.1:1"))
    }

    fn plain(tokens: &[u32]) -> PromptBlocks {
        PromptBlocks::new(tokens, None)
    }

    #[test]
    fn a_prompt_under_way_counts_for_its_worker_until_it_ends() {
        let under_way = Arc::new(UnderWay::default());
        let backends = [backend("a"), backend("b")];
        let tokens: Vec<u32> = (0..40).collect();
        let saved = |blocks: &PromptBlocks| {
            let mut saved = vec![5.0, 20.0];
            under_way.raise(blocks, backends.iter(), &mut saved);
            saved
        };
        let guard = under_way.send(&backends[0], &plain(&tokens));
        let twin = under_way.send(&backends[0], &plain(&tokens[..16]));
        assert_eq!(saved(&plain(&tokens)), [32.0, 20.0]);
        assert_eq!(saved(&plain(&tokens[..20])), [16.0, 20.0]);
        assert_eq!(saved(&plain(&[7; 40])), [5.0, 20.0]);
        assert_eq!(saved(&PromptBlocks::new(&tokens, Some("s"))), [5.0, 20.0]);
        drop(guard);
        assert_eq!(saved(&plain(&tokens)), [16.0, 20.0]);
        drop(twin);
        assert_eq!(saved(&plain(&tokens)), [5.0, 20.0]);
        assert!(under_way.shards.iter().all(|shard| shard.lock().is_empty()));
    }

    #[test]
    fn no_more_blocks_are_remembered_than_there_is_room_for() {
        let under_way = Arc::new(UnderWay::default());
        let (backend, blocks) = (backend("a"), plain(&[1; 16]));
        under_way.n_blocks.store(MAX_BLOCKS - 1, Ordering::Relaxed);
        let guard = under_way.send(&backend, &blocks);
        assert!(guard.is_some() && under_way.send(&backend, &blocks).is_none());
        drop(guard);
        assert!(under_way.send(&backend, &blocks).is_some());
    }

    #[test]
    fn what_a_prompt_costs_does_not_grow_with_the_prompts_under_way() {
        let under_way = Arc::new(UnderWay::default());
        let backends: Vec<_> = (0..8).map(|number| backend(&format!("w{number}"))).collect();
        // A system prompt of 8192 tokens that all share, and a question of each.
        let prompt = |number: u32| plain(&(0..8192).chain([number; 64]).collect::<Vec<_>>());
        let shared = prompt(0);
        let guards: Vec<_> = (1..=1024)
            .map(|number| under_way.send(&backends[number as usize % 8], &prompt(number)))
            .collect();
        assert!(guards.iter().all(Option::is_some));
        // The quickest of several: the machine may be busy with something else.
        let quickest = (0..50).map(|_| {
            let mut saved = vec![0.0; backends.len()];
            let start = Instant::now();
            under_way.raise(&shared, backends.iter(), &mut saved);
            let elapsed = start.elapsed();
            assert_eq!(saved, vec![8192.0; backends.len()]);
            elapsed
        });
        let quickest = quickest.min().unwrap();
        assert!(quickest < Duration::from_millis(1), "{quickest:?}");
    }
}
