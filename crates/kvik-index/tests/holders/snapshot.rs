//! Snapshots: what comes back is what was written, and bytes that are not one are refused.

use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, IndexConfig, IndexError, SourceId, Tier, Verdict,
};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use crate::support::{Feed, NaiveMap, Random, keys, stored};

fn filled(n_sources: usize, seed: u64) -> (Feed, NaiveMap) {
    let mut feed = Feed::new(IndexConfig::default(), n_sources);
    let mut model = NaiveMap::default();
    let mut random = Random(seed);
    for _ in 0..200 {
        let source = random.below(n_sources as u64) as usize;
        let (family, from, n_blocks) = (random.below(6), random.below(20), 1 + random.below(30));
        let keys = keys((from..from + n_blocks).map(|block| family << 16 | block));
        let tier = Tier::ALL[random.below(4) as usize];
        let event = match random.below(30) {
            0 => Event::Cleared { tier: None },
            1..8 => Event::Removed { tier, keys: &keys },
            _ => Event::Stored { tier, parent: None, keys: &keys },
        };
        feed.send(source, event);
        model.apply(feed.sources[source], &event);
    }
    (feed, model)
}

fn written(index: &mut HolderIndex) -> Vec<u8> {
    let mut bytes = Vec::new();
    index.write_snapshot(&mut bytes).unwrap();
    bytes
}

fn query(family: u64) -> Vec<BlockKey> {
    keys((0..60).map(|block| family << 16 | block))
}

#[test]
fn a_loaded_index_answers_and_goes_on_as_the_one_that_was_written() {
    for seed in 0..8 {
        let (mut feed, mut model) = filled(7, seed);
        feed.index.remove_source(feed.sources[2]);
        model.forget(feed.sources[2]);
        let bytes = written(&mut feed.index);
        let mut loaded =
            HolderIndex::from_snapshot(IndexConfig { hash_seed: 99, ..IndexConfig::default() }, &bytes)
                .unwrap();
        assert_eq!(loaded.stats().n_holdings, feed.index.stats().n_holdings);
        assert_eq!(loaded.stats().n_blocks, feed.index.stats().n_blocks);
        // Ids are given anew; sources are matched by name.
        let pairs: Vec<(SourceId, SourceId)> = (0..7_u32)
            .filter(|rank| *rank != 2)
            .map(|rank| (feed.sources[rank as usize], loaded.source("worker", rank).unwrap()))
            .collect();
        assert_eq!(loaded.source("worker", 2), None);
        let mut renamed = NaiveMap::default();
        std::mem::swap(&mut renamed, &mut model);
        let renamed = renamed.renamed(&pairs);
        let ids: Vec<SourceId> = pairs.iter().map(|(_, id)| *id).collect();
        for family in 0..6 {
            renamed.assert_same(&loaded, &ids, &query(family));
        }
        let mut after = renamed;
        for (old, new) in &pairs {
            assert_eq!(loaded.position(*new), feed.index.position(*old));
            let (epoch, due) = loaded.position(*new).unwrap();
            // Twice removed is what twice stored needs, so repetitions came along too.
            for _ in 0..2 {
                let keys = query(3);
                let event = Event::Removed { tier: Tier::Gpu, keys: &keys };
                after.apply(*new, &event);
                let sequence = loaded.position(*new).unwrap().1.unwrap();
                let batch = Batch { source: *new, epoch, sequence, replayed: false, events: &[event] };
                assert_eq!(loaded.apply(&batch), Verdict::Applied, "due was {due:?}");
                after.assert_same(&loaded, &ids, &keys);
            }
        }
        let again = written(&mut loaded);
        assert!(HolderIndex::from_snapshot(IndexConfig::default(), &again).is_ok());
    }
}

#[test]
fn an_empty_index_has_a_snapshot_too() {
    let mut index = HolderIndex::new(IndexConfig::default());
    let bytes = written(&mut index);
    assert_eq!(HolderIndex::from_snapshot(IndexConfig::default(), &bytes).unwrap().stats().n_blocks, 0);
}

#[test]
fn a_snapshot_of_other_keys_or_beyond_the_budget_is_refused() {
    let mut feed = Feed::new(IndexConfig::default(), 1);
    let many = keys(0..400_000);
    feed.send(0, stored(&many));
    let bytes = written(&mut feed.index);
    let other = IndexConfig { block_tokens: 64, ..IndexConfig::default() };
    assert!(matches!(HolderIndex::from_snapshot(other, &bytes), Err(IndexError::OtherKeys { .. })));
    let small = IndexConfig { budget_bytes: 0, ..IndexConfig::default() };
    assert!(matches!(HolderIndex::from_snapshot(small, &bytes), Err(IndexError::OverBudget { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn damaged_bytes_are_refused_by_the_checksum(seed in 0..4_u64, at in any::<usize>(), flip in 1..=255_u8) {
        let mut bytes = written(&mut filled(5, seed).0.index);
        let at = at % bytes.len();
        bytes[at] ^= flip;
        prop_assert!(HolderIndex::from_snapshot(IndexConfig::default(), &bytes).is_err());
    }

    /// With the checksum made right again, the checks of the content are all that stands between hostile
    /// bytes and the index: whatever is let in must be an index that works.
    #[test]
    fn hostile_bytes_never_panic_and_never_make_a_broken_index(
        seed in 0..4_u64,
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        cut in proptest::option::of(any::<usize>()),
    ) {
        let mut bytes = written(&mut filled(5, seed).0.index);
        bytes.truncate(bytes.len() - 8);
        for (at, value) in changes {
            // Half of the changes go to the header and the sources, where the counts are.
            let n_places = if value % 2 == 0 { bytes.len().min(200) } else { bytes.len() };
            bytes[at % n_places] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut % (bytes.len() + 1));
        }
        let checksum = xxh3_64(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        if let Ok(mut index) = HolderIndex::from_snapshot(IndexConfig::default(), &bytes) {
            let rank = (0..5).find_map(|rank| index.source("worker", rank));
            if let Some(source) = rank {
                for family in 0..6 {
                    index.replace(source, None, 0, [(Tier::Gpu, &query(family)[..])]);
                }
            }
            while index.maintain(1000) {}
            let again = written(&mut index);
            prop_assert!(HolderIndex::from_snapshot(IndexConfig::default(), &again).is_ok());
        }
    }
}
