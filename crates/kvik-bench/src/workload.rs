//! A synthetic fleet to measure an index with: the same events and queries for every index that is compared.
//!
//! 16 workers have sequences of one depth. The first quarter of a sequence comes from one of 100 shared prompts,
//! the rest is its own, and one in ten is on a second worker too. A sequence is one event for its prompt
//! and four events of one block for what is generated. Half of the queries are whole sequences, a quarter
//! parts from one at half of the depth and a quarter at a quarter of it.

use kvik_index::holders::BlockKey;

/// Workers of the fleet.
pub const N_WORKERS: usize = 16;
/// Queries of a workload.
pub const N_QUERIES: usize = 4096;

const N_PROMPTS: u64 = 100;
const N_GENERATED_BLOCKS: usize = 4;

/// Sequences on workers.
#[derive(Debug, Clone)]
pub struct Workload {
    depth: usize,
    keys: Vec<BlockKey>,
    /// Worker, and where its keys begin.
    sequences: Vec<(usize, usize)>,
}

/// A run of blocks that a worker has stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredRun<'a> {
    /// The worker, below [`N_WORKERS`].
    pub worker: usize,
    /// The blocks of the sequence before the run.
    pub before: &'a [BlockKey],
    /// The run.
    pub keys: &'a [BlockKey],
}

impl Workload {
    /// Makes so many sequences of `depth` blocks, at least eight, for each worker.
    pub fn new(depth: usize, n_per_worker: usize) -> Self {
        let depth = depth.max(2 * N_GENERATED_BLOCKS);
        let n_sequences = N_WORKERS * n_per_worker;
        let mut keys = Vec::with_capacity(n_sequences * depth);
        let mut sequences = Vec::with_capacity(n_sequences + n_sequences / 10);
        for sequence in 0..n_sequences {
            let prompt = mix(sequence as u64) % N_PROMPTS;
            let first = keys.len();
            keys.extend((0..depth).map(|block| {
                let is_shared = block < depth / 4;
                let word = if is_shared { prompt << 32 } else { (sequence as u64 + 1) << 40 };
                BlockKey(mix(word | block as u64))
            }));
            let worker = sequence % N_WORKERS;
            sequences.push((worker, first));
            if sequence % 10 == 0 {
                sequences.push(((worker + 1 + sequence / 10 % (N_WORKERS - 1)) % N_WORKERS, first));
            }
        }
        Self { depth, keys, sequences }
    }

    /// Blocks of a sequence.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Pairs of block and worker that the events name.
    pub fn n_blocks(&self) -> usize {
        self.sequences.len() * self.depth
    }

    /// The sequences: a worker and its blocks.
    pub fn sequences(&self) -> impl Iterator<Item = (usize, &[BlockKey])> {
        self.sequences.iter().map(|&(worker, first)| (worker, &self.keys[first..first + self.depth]))
    }

    /// The events, in the order in which they come.
    pub fn stored_runs(&self) -> impl Iterator<Item = StoredRun<'_>> {
        let n_prompt_blocks = self.depth - N_GENERATED_BLOCKS;
        self.sequences().flat_map(move |(worker, keys)| {
            let ends = std::iter::once(n_prompt_blocks).chain(n_prompt_blocks + 1..=keys.len());
            ends.map(move |end| {
                let start = if end == n_prompt_blocks { 0 } else { end - 1 };
                StoredRun { worker, before: &keys[..start], keys: &keys[start..end] }
            })
        })
    }

    /// The events in groups of about so many blocks, as for an index that is behind.
    pub fn stored_groups(&self, n_blocks: usize) -> impl Iterator<Item = Vec<StoredRun<'_>>> {
        let mut runs = self.stored_runs();
        std::iter::from_fn(move || {
            let mut n_taken = 0;
            let group: Vec<_> = std::iter::from_fn(|| {
                let run = if n_taken < n_blocks { runs.next() } else { None };
                n_taken += run.map_or(0, |run| run.keys.len());
                run
            })
            .collect();
            (!group.is_empty()).then_some(group)
        })
    }

    /// The queries.
    pub fn queries(&self) -> Vec<Vec<BlockKey>> {
        let query = |number: usize| {
            let (_, first) = self.sequences[mix(number as u64 ^ 0xabcd) as usize % self.sequences.len()];
            let mut keys = self.keys[first..first + self.depth].to_vec();
            let parts_at = match number % 4 {
                0 | 1 => self.depth,
                2 => self.depth / 2,
                _ => self.depth / 4,
            };
            for (at, key) in keys.iter_mut().enumerate().skip(parts_at) {
                *key = BlockKey(mix(1 << 60 | (number as u64) << 20 | at as u64));
            }
            keys
        };
        (0..N_QUERIES).map(query).collect()
    }

    /// Blocks that no sequence has, another run for each number: for a writer beside readers.
    pub fn passing_run(number: u64, n_blocks: usize) -> Vec<BlockKey> {
        (0..n_blocks as u64).map(|at| BlockKey(mix(1 << 61 | number << 8 | at))).collect()
    }
}

/// A mixture of the bits of a word that maps no two words to one (splitmix64).
fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_events_of_a_sequence_are_the_sequence() {
        let work = Workload::new(16, 10);
        let n_blocks: usize = work.stored_runs().map(|run| run.keys.len()).sum();
        assert_eq!((n_blocks, work.sequences.len()), (work.n_blocks(), 176));
        let runs: Vec<_> = work.stored_runs().take(5).collect();
        let joined: Vec<BlockKey> = runs.iter().flat_map(|run| run.keys.iter().copied()).collect();
        assert_eq!(Some((runs[0].worker, joined.as_slice())), work.sequences().next());
        assert_eq!(runs[4].before, &joined[..15]);
    }

    #[test]
    fn groups_of_events_are_all_events_in_their_order() {
        let work = Workload::new(16, 10);
        let groups: Vec<Vec<StoredRun<'_>>> = work.stored_groups(100).collect();
        assert!(
            groups.len() > 10
                && groups.iter().all(|group| group.len() > 20 || group == groups.last().unwrap())
        );
        assert!(groups.concat().into_iter().eq(work.stored_runs()));
    }

    #[test]
    fn half_of_the_queries_are_whole_sequences() {
        let work = Workload::new(16, 10);
        let is_whole = |query: &&Vec<BlockKey>| work.sequences().any(|(_, keys)| keys == query.as_slice());
        assert_eq!(work.queries().iter().filter(is_whole).count(), N_QUERIES / 2);
    }
}
