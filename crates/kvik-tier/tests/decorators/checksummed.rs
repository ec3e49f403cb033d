//! What does not prove itself is not served.

use kvik_tier::conformance::{MapTier, content, content_key};
use kvik_tier::{
    Breaker, BreakerOptions, Checksummed, ChunkKey, ENVELOPE_BYTES, Envelope, FaultRates, Faulty, GetItem,
    GetOutcome, Metered, PutItem, Result, Retry, RetryOptions, Throttled, ThrottledOptions, Tier, TierKind,
    TierStat, TokenDigest,
};
use proptest::prelude::*;

use crate::{asked, get, get_batch, put, put_batch};

const CHUNK_BYTES: usize = 300;
const SECTION_BYTES: usize = 100;

fn tier_with_chunk() -> Checksummed<MapTier> {
    let tier = Checksummed::new(MapTier::new());
    let chunk = content(content_key(0), CHUNK_BYTES);
    tier.put(&mut [PutItem::with_sections(content_key(0), &[&chunk], SECTION_BYTES)]);
    tier
}

const MINE: TokenDigest = TokenDigest([1; 32]);
const THEIRS: TokenDigest = TokenDigest([2; 32]);

/// Reads a range, cut through sections or not, for the tokens of `digest`.
fn get_for(tier: &dyn Tier, digest: TokenDigest, offset: usize, n_bytes: usize) -> GetOutcome {
    let mut buffer = vec![0; n_bytes];
    let mut batch = [GetItem::range(content_key(0), offset as u64, &mut buffer).for_tokens(digest)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    if outcome.is_hit() {
        assert_eq!(buffer, content(content_key(0), CHUNK_BYTES)[offset..][..n_bytes]);
    }
    outcome
}

#[test]
fn a_chunk_of_other_tokens_is_a_mismatch_whole_in_sections_and_cut() {
    let tier = Checksummed::new(MapTier::new());
    let chunk = content(content_key(0), CHUNK_BYTES);
    let parts = [&chunk[..]];
    let item = || PutItem::with_sections(content_key(0), &parts, SECTION_BYTES);
    tier.put(&mut [item().for_tokens(MINE)]);
    for (offset, n_bytes) in [(0, CHUNK_BYTES), (SECTION_BYTES, SECTION_BYTES), (150, 20), (0, 0)] {
        assert!(get_for(&tier, MINE, offset, n_bytes).is_hit());
        for other in [THEIRS, TokenDigest::NONE] {
            let outcome = get_for(&tier, other, offset, n_bytes);
            assert!(matches!(outcome, GetOutcome::TokenMismatch), "{offset}, {n_bytes}: {outcome:?}");
        }
    }
    assert!(tier.stat().details.contains(&("token_mismatches", 8)));
    assert!(tier.stat().details.contains(&("corrupt_reads", 0)));
}

#[test]
fn the_second_of_two_writers_of_one_name_gets_a_mismatch_and_the_first_its_chunk() {
    let tier = Checksummed::new(MapTier::new());
    let chunk = content(content_key(0), CHUNK_BYTES);
    let (parts, others) = ([&chunk[..]], [&[9; CHUNK_BYTES][..]]);
    tier.put(&mut [PutItem::new(content_key(0), &parts).for_tokens(MINE)]);
    tier.put(&mut [PutItem::new(content_key(0), &others).for_tokens(THEIRS)]);
    assert!(matches!(get_for(&tier, THEIRS, 0, CHUNK_BYTES), GetOutcome::TokenMismatch));
    assert!(get_for(&tier, MINE, 0, CHUNK_BYTES).is_hit());
}

#[test]
fn digests_pass_through_every_decorator() {
    let faults = FaultRates { duplicate: 1000, ..FaultRates::default() };
    let tier = Faulty::new(Checksummed::new(MapTier::new()), faults, 1);
    let tier = Throttled::new(Retry::new(tier, RetryOptions::default()), ThrottledOptions::default());
    let tier = Metered::new(Breaker::new(tier, BreakerOptions::default()));
    let chunk = content(content_key(0), CHUNK_BYTES);
    let parts = [&chunk[..]];
    tier.put(&mut [PutItem::new(content_key(0), &parts).for_tokens(MINE)]);
    assert!(get_for(&tier, MINE, 0, CHUNK_BYTES).is_hit());
    assert!(matches!(get_for(&tier, THEIRS, 0, CHUNK_BYTES), GetOutcome::TokenMismatch));
    let snapshot = tier.snapshot();
    assert_eq!(snapshot.operation("get").unwrap().n_outcomes("token_mismatch"), 1);
}

fn get_range(tier: &dyn Tier, offset: usize, n_bytes: usize) -> (GetOutcome, Vec<u8>) {
    let mut buffer = vec![0; n_bytes];
    let mut batch = [GetItem::range(content_key(0), offset as u64, &mut buffer)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    (outcome, buffer)
}

#[test]
fn every_changed_byte_is_found() {
    let tier = tier_with_chunk();
    let stored = tier.inner().bytes_of(content_key(0)).unwrap();
    assert_eq!(stored.len(), ENVELOPE_BYTES + CHUNK_BYTES);
    for changed in 0..stored.len() {
        let mut bytes = stored.to_vec();
        bytes[changed] ^= 0x10;
        tier.inner().overwrite(content_key(0), &bytes);
        let outcome = get(&tier, 0, CHUNK_BYTES);
        assert!(matches!(outcome, GetOutcome::Corrupt(_)), "byte {changed}: {outcome:?}");
    }
    let corrupt_reads = tier.stat().details.iter().find(|(name, _)| *name == "corrupt_reads").unwrap().1;
    assert_eq!(corrupt_reads, stored.len() as u64);
}

#[test]
fn a_damaged_section_leaves_the_others_readable() {
    let tier = tier_with_chunk();
    let mut bytes = tier.inner().bytes_of(content_key(0)).unwrap().to_vec();
    bytes[ENVELOPE_BYTES + SECTION_BYTES] ^= 1;
    tier.inner().overwrite(content_key(0), &bytes);
    let chunk = content(content_key(0), CHUNK_BYTES);
    for (section_idx, is_damaged) in [(0, false), (1, true), (2, false)] {
        let offset = section_idx * SECTION_BYTES;
        let (outcome, buffer) = get_range(&tier, offset, SECTION_BYTES);
        assert_eq!(outcome.is_hit(), !is_damaged, "section {section_idx}: {outcome:?}");
        assert!(is_damaged || buffer == chunk[offset..][..SECTION_BYTES]);
    }
}

#[test]
fn every_lost_end_is_found() {
    let tier = tier_with_chunk();
    let stored = tier.inner().bytes_of(content_key(0)).unwrap();
    for n_kept in 0..stored.len() {
        tier.inner().overwrite(content_key(0), &stored[..n_kept]);
        let outcome = get(&tier, 0, CHUNK_BYTES);
        assert!(matches!(outcome, GetOutcome::Corrupt(_)), "{n_kept} bytes kept: {outcome:?}");
    }
}

#[test]
fn a_lost_end_is_found_where_it_looks_like_a_miss() {
    let tier = Checksummed::new(NothingPastTheEnd(MapTier::new()));
    let chunk = content(content_key(0), CHUNK_BYTES);
    tier.put(&mut [PutItem::with_sections(content_key(0), &[&chunk], SECTION_BYTES)]);
    let stored = tier.inner().0.bytes_of(content_key(0)).unwrap();
    tier.inner().0.overwrite(content_key(0), &stored[..ENVELOPE_BYTES]);
    assert!(matches!(get(&tier, 0, CHUNK_BYTES), GetOutcome::Corrupt("length")));
    assert!(matches!(get_range(&tier, 0, 10).0, GetOutcome::Corrupt("length")));
    // The range is there, and the rest of its section is not.
    tier.inner().0.overwrite(content_key(0), &stored[..ENVELOPE_BYTES + 10]);
    assert!(matches!(get_range(&tier, 0, 10).0, GetOutcome::Corrupt("length")));
    tier.delete(&[content_key(0)]).unwrap();
    assert!(matches!(get(&tier, 0, CHUNK_BYTES), GetOutcome::Miss));
}

#[test]
fn bytes_behind_a_chunk_are_not_part_of_it() {
    let tier = tier_with_chunk();
    let stored = tier.inner().bytes_of(content_key(0)).unwrap();
    tier.inner().overwrite(content_key(0), &[&stored, [7; 100].as_slice()].concat());
    assert!(get(&tier, 0, CHUNK_BYTES).is_hit());
    assert!(matches!(get(&tier, 0, CHUNK_BYTES + 100), GetOutcome::Corrupt("length")));
}

#[test]
fn a_chunk_under_the_key_of_another_is_found() {
    let tier = tier_with_chunk();
    put(&tier, 1, CHUNK_BYTES);
    let other = tier.inner().bytes_of(content_key(1)).unwrap();
    tier.inner().overwrite(content_key(0), &other);
    assert!(matches!(get(&tier, 0, CHUNK_BYTES), GetOutcome::Corrupt("key")));
}

#[test]
fn another_length_than_asked_for_is_corrupt() {
    let tier = tier_with_chunk();
    for n_bytes in [0, 1, SECTION_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES + 1] {
        assert!(matches!(get(&tier, 0, n_bytes), GetOutcome::Corrupt("length")), "{n_bytes} bytes");
    }
    assert!(matches!(get_range(&tier, usize::MAX, 10).0, GetOutcome::Corrupt("length")));
}

#[test]
fn a_forged_length_takes_no_memory() {
    let tier = tier_with_chunk();
    let mut bytes = tier.inner().bytes_of(content_key(0)).unwrap().to_vec();
    let forged_bytes = 1_u64 << 60;
    bytes[14..16].copy_from_slice(&1_u16.to_le_bytes());
    bytes[48..56].copy_from_slice(&forged_bytes.to_le_bytes());
    bytes[56..64].copy_from_slice(&forged_bytes.to_le_bytes());
    // One section has one checksum.
    bytes[104..ENVELOPE_BYTES].fill(0);
    let covered_bytes = ENVELOPE_BYTES - 8;
    let own_checksum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &bytes[..covered_bytes]);
    bytes[covered_bytes..ENVELOPE_BYTES].copy_from_slice(&own_checksum.to_le_bytes());
    assert_eq!(Envelope::decode(&bytes[..ENVELOPE_BYTES]).unwrap().chunk_bytes(), forged_bytes);
    tier.inner().overwrite(content_key(0), &bytes);
    let (outcome, _) = get_range(&tier, 0, SECTION_BYTES);
    assert!(matches!(outcome, GetOutcome::Corrupt(_)), "{outcome:?}");
}

#[test]
fn sections_too_long_to_be_trusted_can_be_cut_through() {
    let tier = Checksummed::new(MapTier::new());
    let chunk = content(content_key(0), 17 << 20);
    tier.put(&mut [PutItem::new(content_key(0), &[&chunk])]);
    let (outcome, buffer) = get_range(&tier, 1 << 20, 100);
    assert!(outcome.is_hit() && buffer == chunk[1 << 20..][..100], "{outcome:?}");
}

#[test]
fn a_read_is_one_batch_of_the_tier_inside() {
    let tier = Checksummed::new(Metered::new(MapTier::new()));
    put_batch(&tier, 0..5, 10_000);
    assert_eq!(asked(tier.inner(), "put"), (1, 5));
    assert!(get_batch(&tier, 0..5, 10_000).iter().all(GetOutcome::is_hit));
    assert_eq!(asked(tier.inner(), "get"), (1, 5));
}

#[test]
fn a_range_that_cuts_through_a_section_costs_another_batch() {
    let tier = Checksummed::new(Metered::new(MapTier::new()));
    let chunk = content(content_key(0), CHUNK_BYTES);
    tier.put(&mut [PutItem::with_sections(content_key(0), &[&chunk], SECTION_BYTES)]);
    assert!(get_range(&tier, SECTION_BYTES, SECTION_BYTES).0.is_hit());
    assert_eq!(asked(tier.inner(), "get"), (1, 1));
    assert!(get_range(&tier, SECTION_BYTES + 1, SECTION_BYTES).0.is_hit());
    assert_eq!(asked(tier.inner(), "get"), (3, 3));
}

#[test]
fn lengths_of_keys_are_those_of_chunks() {
    let tier = tier_with_chunk();
    let mut visited = Vec::new();
    tier.visit_keys(&mut |key, n_bytes| visited.push((key, n_bytes)));
    assert_eq!(visited, [(content_key(0), CHUNK_BYTES as u64)]);
}

proptest! {
    #[test]
    fn any_range_is_served_or_is_outside(
        n_bytes in 1_usize..5000,
        section_bytes in 0_usize..6000,
        offset in 0_usize..6000,
        asked_bytes in 0_usize..6000,
    ) {
        let tier = Checksummed::new(MapTier::new());
        let chunk = content(content_key(0), n_bytes);
        tier.put(&mut [PutItem::with_sections(content_key(0), &[&chunk], section_bytes)]);
        let (outcome, buffer) = get_range(&tier, offset, asked_bytes);
        match chunk.get(offset..offset + asked_bytes) {
            Some(expected) => prop_assert!(outcome.is_hit() && buffer == expected, "{:?}", outcome),
            None => prop_assert!(matches!(outcome, GetOutcome::Corrupt("length")), "{:?}", outcome),
        }
    }
}

/// A tier that answers ranges past the end as if the chunk were not there, unless it is asked for the head too.
#[derive(Debug)]
struct NothingPastTheEnd(MapTier);

impl Tier for NothingPastTheEnd {
    fn kind(&self) -> TierKind {
        self.0.kind()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        self.0.put(batch);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        self.0.get(batch);
        for item in batch {
            if item.head.is_empty() && matches!(item.outcome, GetOutcome::Corrupt(_)) {
                item.outcome = GetOutcome::Miss;
            }
        }
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.0.contains(keys, present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.0.delete(keys)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.0.visit_keys(visit);
    }

    fn flush(&self) -> Result<()> {
        self.0.flush()
    }

    fn stat(&self) -> TierStat {
        self.0.stat()
    }
}
