use kvik_types::BlockHash;

use super::*;
use crate::arena::ArenaOptions;
use crate::arena::tests::content;
use crate::key::NamespaceId;
use crate::tier::TierExt;

fn key(number: u64) -> ChunkKey {
    // Odd multiples of a large number differ in all bytes, as hashes do.
    let bits = u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    ChunkKey { namespace: NamespaceId(BlockHash([1; 16])), chunk: BlockHash(bits.to_be_bytes()), rank: 0 }
}

fn tier(capacity_bytes: u64) -> RamTier {
    RamTier::new(Arena::new(ArenaOptions::new(capacity_bytes)).unwrap())
}

#[test]
fn an_earlier_chunk_wins_over_a_later_one() {
    let tier = tier(1 << 20);
    let first = tier.publish(key(1), TokenDigest::NONE, tier.reserve(100).unwrap().freeze()).unwrap();
    let second = tier.reserve(100).unwrap().freeze();
    assert_ne!(first.offset(), second.offset());
    assert_eq!(tier.publish(key(1), TokenDigest::NONE, second).unwrap().offset(), first.offset());
    assert_eq!(tier.lease(&key(1), TokenDigest::NONE).unwrap().offset(), first.offset());
    assert_eq!(tier.stat().used_bytes, Some(4096));
}

#[test]
fn a_chunk_of_other_tokens_under_the_same_name_is_a_miss() {
    let (mine, theirs) = (TokenDigest([1; 32]), TokenDigest([2; 32]));
    let tier = tier(1 << 20);
    let lease = || tier.reserve(100).unwrap().freeze();
    assert_eq!(tier.is_for(&key(1), mine), None);
    assert!(tier.publish(key(1), mine, lease()).is_some());
    assert!(tier.publish(key(1), theirs, lease()).is_none());
    assert!(tier.lease(&key(1), theirs).is_none());
    assert_eq!(tier.n_token_mismatches(), 1);
    assert_eq!((tier.is_for(&key(1), mine), tier.is_for(&key(1), theirs)), (Some(true), Some(false)));
    let mut buffer = [0; 100];
    let mut batch = [GetItem::whole(key(1), &mut buffer).for_tokens(theirs)];
    tier.get(&mut batch);
    assert!(matches!(batch[0].outcome, GetOutcome::TokenMismatch));
    assert!(tier.lease(&key(1), mine).is_some());
}

#[test]
fn a_lease_outlives_the_delete_of_its_chunk_and_the_tier() {
    let tier = tier(1 << 20);
    assert!(tier.put_one(key(1), &[5; 5000]).is_present());
    let lease = tier.lease(&key(1), TokenDigest::NONE).unwrap();
    assert_eq!(tier.delete(&[key(1), key(2)]).unwrap(), 1);
    assert!(tier.lease(&key(1), TokenDigest::NONE).is_none());
    assert_eq!(tier.stat().used_bytes, Some(8192));
    // Whatever is written from now on lies elsewhere.
    while let Some(mut slot) = tier.reserve(4096) {
        slot.fill(9);
        let number = 10 + tier.index.len() as u64;
        tier.publish(key(number), TokenDigest::NONE, slot.freeze());
    }
    let arena = tier.arena().clone();
    drop(tier);
    assert_eq!(arena.stat().used_bytes, 8192);
    assert_eq!(*lease, [5; 5000]);
    drop(lease);
    assert_eq!(arena.stat().used_bytes, 0);
}

#[test]
fn a_read_of_another_length_is_a_miss() {
    let tier = tier(1 << 20);
    assert!(tier.put_one(key(1), &[5; 100]).is_present());
    assert!(matches!(tier.get_one(key(1), &mut [0; 99]), GetOutcome::Miss));
    let mut buffer = [0; 10];
    let mut batch = [GetItem::range(key(1), 91, &mut buffer)];
    tier.get(&mut batch);
    assert!(matches!(batch[0].outcome, GetOutcome::Miss));
    batch[0].offset = 90;
    tier.get(&mut batch);
    assert!(batch[0].outcome.is_hit());
}

fn assert_content(tier: &RamTier, number: u64, n_bytes: usize) {
    let lease = tier.lease(&key(number), TokenDigest::NONE).unwrap();
    assert!(*lease == *content(number, n_bytes), "chunk {number} of {n_bytes} bytes");
}

#[test]
fn chunks_are_moved_together_when_what_is_free_lies_in_pieces() {
    let tier = tier(100 * 4096);
    for number in 0..50 {
        assert!(tier.put_one(key(number), &content(number, 8192)).is_present());
    }
    assert!(tier.reserve(1).is_none());
    let odd: Vec<ChunkKey> = (0..50).filter(|number| number % 2 == 1).map(key).collect();
    assert_eq!(tier.delete(&odd).unwrap(), 25);
    assert!(tier.arena().allocate(6 * 4096).is_none(), "no hole has more than two units");
    let mut slot = tier.reserve(30 * 4096).unwrap();
    slot.fill(0xff);
    for number in (0..50).filter(|number| number % 2 == 0) {
        assert_content(&tier, number, 8192);
    }
    assert!(tier.arena().stat().n_moved_chunks > 0);
}

#[test]
fn a_leased_chunk_is_not_moved() {
    let tier = tier(100 * 4096);
    for number in 0..50 {
        assert!(tier.put_one(key(number), &content(number, 8192)).is_present());
    }
    let leases: Vec<Lease> =
        (0..50).step_by(2).map(|number| tier.lease(&key(number), TokenDigest::NONE).unwrap()).collect();
    let offsets: Vec<u64> = leases.iter().map(Lease::offset).collect();
    let odd: Vec<ChunkKey> = (1..50).step_by(2).map(key).collect();
    assert_eq!(tier.delete(&odd).unwrap(), 25);
    assert!(tier.reserve(3 * 4096).is_none(), "a leased chunk lies between any two holes");
    assert_eq!(tier.arena().stat().n_moved_chunks, 0);
    // What is leased no more makes room; the others stay where they are.
    let mut leases = leases;
    let released = leases.split_off(20);
    drop(released);
    assert!(tier.reserve(8 * 4096).is_some());
    assert!(tier.arena().stat().n_moved_chunks > 0);
    for (lease, (offset, number)) in leases.iter().zip(offsets.iter().zip((0..50).step_by(2))) {
        assert_eq!(lease.offset(), *offset);
        assert!(**lease == *content(number, 8192));
    }
}

#[test]
fn a_chunk_of_another_arena_stays_where_it_is() {
    let (tier, other) = (tier(100 * 4096), tier(100 * 4096));
    for number in 0..50 {
        assert!(tier.put_one(key(number), &content(number, 8192)).is_present());
        let mut slot = other.reserve(8192).unwrap();
        slot.copy_from_slice(&content(100 + number, 8192));
        tier.publish(key(100 + number), TokenDigest::NONE, slot.freeze());
    }
    let odd: Vec<ChunkKey> = (1..50).step_by(2).map(key).collect();
    assert_eq!(tier.delete(&odd).unwrap(), 25);
    let offset = tier.lease(&key(101), TokenDigest::NONE).unwrap().offset();
    tier.reserve(30 * 4096).unwrap().fill(0xff);
    assert!(tier.arena().stat().n_moved_chunks > 0);
    assert_eq!(tier.lease(&key(101), TokenDigest::NONE).unwrap().offset(), offset);
    for number in (0..50).step_by(2).chain(100..150) {
        assert_content(&tier, number, 8192);
    }
}

#[test]
fn too_much_is_not_moved_for_too_little() {
    let tier = tier(3 * 128 * 4096);
    let mut gaps = Vec::new();
    for number in 0..3 {
        assert!(tier.put_one(key(number), &content(number, 127 * 4096)).is_present());
        gaps.push(tier.reserve(4096).unwrap());
    }
    drop(gaps);
    assert_eq!(tier.stat().used_bytes, Some(3 * 127 * 4096));
    assert!(tier.reserve(2 * 4096).is_none());
    assert_eq!(tier.arena().stat().n_moved_chunks, 0);
}

/// Numbers that look random and are the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Fills the tier with chunks of a size until it is full; returns their numbers.
fn fill(tier: &RamTier, next_number: &mut u64, n_bytes: usize) -> Vec<(u64, usize)> {
    let mut chunks = Vec::new();
    while matches!(tier.put_one(key(*next_number), &content(*next_number, n_bytes)), PutOutcome::Stored) {
        chunks.push((*next_number, n_bytes));
        *next_number += 1;
    }
    chunks
}

#[test]
fn any_size_gets_the_memory_that_other_sizes_gave_back() {
    const CAPACITY_BYTES: u64 = 16 << 20;
    for seed in 0..6 {
        let mut random = Random(seed);
        let tier = tier(CAPACITY_BYTES);
        let mut next_number = 0;
        let mut chunks: Vec<(u64, usize)> = Vec::new();
        // Three models in turns: the first fills everything, each next one takes what was deleted. Half of
        // the sizes get slabs, the other half is too large for them.
        for turn in 0..9 {
            let n_bytes = match turn % 3 {
                0 => 4096 * (1 + random.below(16)) as usize,
                1 => 4096 * (20 + random.below(40)) as usize + 100,
                _ => 4096 * (60 + random.below(100)) as usize,
            };
            chunks.extend(fill(&tier, &mut next_number, n_bytes));
            let used_bytes = tier.arena().stat().used_bytes;
            assert!(
                used_bytes * 100 >= CAPACITY_BYTES * 85,
                "seed {seed}, turn {turn}: {used_bytes} bytes are used by chunks of up to {n_bytes}"
            );
            for (number, n_bytes) in &chunks {
                assert_content(&tier, *number, *n_bytes);
            }
            // The store deletes a third, here and there.
            let mut wanted_bytes = CAPACITY_BYTES as usize / 3;
            while wanted_bytes > 0 && !chunks.is_empty() {
                let (number, n_bytes) = chunks.swap_remove(random.below(chunks.len() as u64) as usize);
                assert_eq!(tier.delete(&[key(number)]).unwrap(), 1);
                wanted_bytes = wanted_bytes.saturating_sub(n_bytes);
            }
        }
        for (number, _) in chunks {
            tier.delete(&[key(number)]).unwrap();
        }
        assert_eq!(tier.arena().stat().used_bytes, 0);
        assert!(tier.arena().allocate(CAPACITY_BYTES as usize).is_some());
    }
}

#[test]
fn readers_see_whole_chunks_while_others_write_delete_and_move() {
    let tier = tier(4 << 20);
    let n_hits = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread_number in 0..4_u64 {
            let (tier, n_hits) = (&tier, &n_hits);
            scope.spawn(move || {
                let mut random = Random(thread_number);
                let mut buffer = vec![0; 1 << 18];
                for _ in 0..4000 {
                    let number = random.below(200);
                    let n_bytes = 1000 + (number as usize % 7) * 9000;
                    match random.below(4) {
                        0 => drop(tier.put_one(key(number), &content(number, n_bytes))),
                        1 => drop(tier.delete(&[key(number)])),
                        2 => {
                            let buffer = &mut buffer[..n_bytes];
                            if tier.get_one(key(number), buffer).is_hit() {
                                assert!(*buffer == *content(number, n_bytes));
                                n_hits.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                            }
                        }
                        _ => {
                            // Takes a run that is longer than most holes, so that chunks are moved.
                            let slot = tier.reserve(200_000 + random.below(200_000) as usize);
                            if let (Some(mut slot), Some(lease)) =
                                (slot, tier.lease(&key(number), TokenDigest::NONE))
                            {
                                slot.fill(0xaa);
                                assert!(*lease == *content(number, n_bytes));
                            }
                        }
                    }
                }
            });
        }
    });
    assert!(n_hits.into_inner() > 0);
    assert!(tier.arena().stat().n_moved_chunks > 0, "{:?}", tier.arena());
    let mut keys = Vec::new();
    tier.visit_keys(&mut |key, _| keys.push(key));
    assert_eq!(tier.delete(&keys).unwrap(), keys.len());
    assert_eq!(tier.arena().stat().used_bytes, 0);
}
