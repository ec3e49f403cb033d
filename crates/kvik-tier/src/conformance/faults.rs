//! What holds whatever fails.

use std::collections::HashSet;
use std::thread;

use super::content::{content, content_key, get_content};
use crate::key::ChunkKey;
use crate::random::SplitMix64;
use crate::tier::{GetItem, PutItem, Tier, TierExt};

const N_KEYS: u64 = 12;
const N_OPERATIONS: usize = 400;
const N_THREADS: u64 = 3;

/// Runs random operations of each seed on a tier that fails: a hit is the right bytes of a chunk that may be there.
///
/// A chunk may be there if a put of it was tried after the last delete of it that succeeded. `make` gets the
/// seed, so that the faults too are those of the seed. After that several threads do the same at a time, and
/// only the bytes are judged. Returns how many reads hit, for the caller to insist that some did.
///
/// # Panics
/// If a hit has other bytes or a chunk that cannot be there, with the seed.
pub fn run_under_faults(make: &dyn Fn(u64) -> Box<dyn Tier>, seeds: impl IntoIterator<Item = u64>) -> usize {
    let mut n_hits = 0;
    for seed in seeds {
        let mut run = Run { tier: make(seed), seed, may_be_there: HashSet::new() };
        n_hits += run.one_by_one();
        run.at_a_time();
    }
    n_hits
}

struct Run {
    tier: Box<dyn Tier>,
    seed: u64,
    may_be_there: HashSet<ChunkKey>,
}

impl Run {
    fn one_by_one(&mut self) -> usize {
        let mut random = SplitMix64::new(self.seed);
        let mut n_hits = 0;
        for _ in 0..N_OPERATIONS {
            let n_items = 1 + random.below(4);
            let keys: Vec<ChunkKey> = (0..n_items).map(|_| content_key(random.below(N_KEYS))).collect();
            match random.below(10) {
                0..4 => self.put(&keys),
                4..8 => n_hits += self.get(&keys, &mut random),
                8 => self.delete(&keys),
                _ => self.ask(&keys),
            }
        }
        n_hits
    }

    fn at_a_time(&self) {
        thread::scope(|scope| {
            for thread_idx in 0..N_THREADS {
                let mut random = SplitMix64::new(self.seed ^ thread_idx.rotate_right(8));
                scope.spawn(move || {
                    for _ in 0..N_OPERATIONS / 4 {
                        let key = content_key(random.below(N_KEYS));
                        match random.below(5) {
                            0..2 => drop(self.tier.put_one(key, &content(key, length_of(key)))),
                            2..4 => drop(get_content(&*self.tier, key, length_of(key))),
                            _ => drop(self.tier.delete(&[key])),
                        }
                    }
                });
            }
        });
    }

    fn put(&mut self, keys: &[ChunkKey]) {
        let chunks: Vec<Vec<u8>> = keys.iter().map(|key| content(*key, length_of(*key))).collect();
        let parts: Vec<[&[u8]; 2]> =
            chunks.iter().map(|chunk| chunk.split_at(chunk.len() / 3).into()).collect();
        let mut batch: Vec<PutItem<'_>> =
            keys.iter().zip(&parts).map(|(key, parts)| PutItem::with_sections(*key, parts, 1024)).collect();
        self.tier.put(&mut batch);
        self.may_be_there.extend(keys);
    }

    fn get(&mut self, keys: &[ChunkKey], random: &mut SplitMix64) -> usize {
        let mut n_hits = 0;
        let ranges: Vec<(usize, usize)> = keys
            .iter()
            .map(|key| match random.below(3) {
                0 => (1024, length_of(*key).min(2048)),
                _ => (0, length_of(*key)),
            })
            .collect();
        let mut buffers: Vec<Vec<u8>> = ranges.iter().map(|(start, end)| vec![0; end - start]).collect();
        let mut batch: Vec<GetItem<'_>> = keys
            .iter()
            .zip(&ranges)
            .zip(&mut buffers)
            .map(|((key, (start, end)), buffer)| match (*start, *end) {
                (0, end) if end == length_of(*key) => GetItem::whole(*key, buffer),
                (start, _) => GetItem::range(*key, start as u64, buffer),
            })
            .collect();
        self.tier.get(&mut batch);
        let are_hits: Vec<bool> = batch.iter().map(|item| item.outcome.is_hit()).collect();
        for (((key, (start, end)), buffer), is_hit) in keys.iter().zip(&ranges).zip(&buffers).zip(are_hits) {
            if is_hit {
                let seed = self.seed;
                assert!(self.may_be_there.contains(key), "seed {seed}: a hit of {key}, which is not there");
                let chunk = content(*key, length_of(*key));
                assert!(*buffer == chunk[*start..*end], "seed {seed}: a hit of {key} with other bytes");
                n_hits += 1;
            }
        }
        n_hits
    }

    fn delete(&mut self, keys: &[ChunkKey]) {
        if self.tier.delete(keys).is_ok() {
            self.may_be_there.retain(|key| !keys.contains(key));
        }
    }

    fn ask(&mut self, keys: &[ChunkKey]) {
        let mut present = vec![false; keys.len()];
        if self.tier.contains(keys, &mut present).is_ok() {
            for (key, is_present) in keys.iter().zip(present) {
                let is_right = !is_present || self.may_be_there.contains(key);
                assert!(is_right, "seed {}: {key} is said to be there and is not", self.seed);
            }
        }
    }
}

/// More than a section, and another length for each key.
fn length_of(key: ChunkKey) -> usize {
    1100 + 700 * usize::from(key.chunk.0[0])
}
