//! What is there under which key.

use std::collections::BTreeMap;

use kvik_types::BlockHash;

use super::Subject;
use super::content::{assert_hit, assert_miss, content, content_key, has_key, put_content};
use crate::key::{ChunkKey, NamespaceId};
use crate::tier::{PutOutcome, TierExt};

pub(super) fn what_was_never_stored_is_a_miss(subject: &Subject<'_>) {
    let tier = subject.tier();
    assert_miss(&*tier, content_key(0), 4096);
    put_content(&*tier, content_key(1), 4096);
    assert_miss(&*tier, content_key(0), 4096);
    assert!(!has_key(&*tier, content_key(0)));
}

pub(super) fn what_is_present_stays(subject: &Subject<'_>) {
    let tier = subject.tier();
    let key = content_key(0);
    let outcome = tier.put_one(key, &content(key, 5000));
    assert!(matches!(outcome, PutOutcome::Stored), "{outcome:?}");
    for n_bytes in [5000, 3000] {
        let outcome = tier.put_one(key, &vec![0; n_bytes]);
        assert!(matches!(outcome, PutOutcome::Present), "{outcome:?}");
        assert_hit(&*tier, key, 5000);
    }
}

pub(super) fn a_deleted_chunk_is_a_miss_and_can_be_stored_again(subject: &Subject<'_>) {
    let tier = subject.tier();
    let key = content_key(0);
    put_content(&*tier, content_key(1), 5000);
    for _ in 0..3 {
        put_content(&*tier, key, 5000);
        assert_hit(&*tier, key, 5000);
        let n_deleted = tier.delete(&[key]).expect("the tier can be asked");
        assert!(n_deleted == 1 || !subject.traits.counts_deletes, "deleted {n_deleted}");
        assert_miss(&*tier, key, 5000);
        assert!(!has_key(&*tier, key));
    }
    assert_hit(&*tier, content_key(1), 5000);
}

pub(super) fn deleting_twice_deletes_once(subject: &Subject<'_>) {
    let tier = subject.tier();
    let keys = [content_key(0), content_key(1), content_key(2)];
    put_content(&*tier, keys[0], 100);
    put_content(&*tier, keys[2], 100);
    for expected in [2, 0] {
        let n_deleted = tier.delete(&keys).expect("the tier can be asked");
        assert!(n_deleted == expected || !subject.traits.counts_deletes, "deleted {n_deleted}");
    }
    put_content(&*tier, keys[1], 100);
    let n_deleted = tier.delete(&[keys[1], keys[1]]).expect("the tier can be asked");
    assert!(n_deleted == 1 || !subject.traits.counts_deletes, "deleted {n_deleted}");
    for key in keys {
        assert_miss(&*tier, key, 100);
    }
}

pub(super) fn other_ranks_and_namespaces_are_other_chunks(subject: &Subject<'_>) {
    let tier = subject.tier();
    let key = content_key(0);
    let others = [
        ChunkKey { rank: 1, ..key },
        ChunkKey { rank: 0x100, ..key },
        ChunkKey { rank: u16::MAX, ..key },
        ChunkKey { namespace: NamespaceId(BlockHash([0x5b; 16])), ..key },
        ChunkKey { namespace: NamespaceId(key.chunk), chunk: key.namespace.0, rank: 0 },
    ];
    put_content(&*tier, key, 4096);
    for other in others {
        assert_miss(&*tier, other, 4096);
        put_content(&*tier, other, 4096);
    }
    tier.delete(&[key]).expect("the tier can be asked");
    assert_miss(&*tier, key, 4096);
    for other in others {
        assert_hit(&*tier, other, 4096);
    }
}

pub(super) fn the_longest_prefix_ends_at_the_first_hole(subject: &Subject<'_>) {
    let tier = subject.tier();
    let keys: Vec<ChunkKey> = (0..10).map(content_key).collect();
    let longest_prefix = || {
        let mut present = vec![false; keys.len()];
        tier.contains(&keys, &mut present).expect("the tier can be asked");
        present.iter().take_while(|is_present| **is_present).count()
    };
    assert_eq!(longest_prefix(), 0);
    for key in keys.iter().skip(1) {
        put_content(&*tier, *key, 100);
    }
    assert_eq!(longest_prefix(), 0);
    put_content(&*tier, keys[0], 100);
    assert_eq!(longest_prefix(), 10);
    tier.delete(&keys[6..7]).expect("the tier can be asked");
    assert_eq!(longest_prefix(), 6);
    tier.contains(&[], &mut []).expect("the tier can be asked");
}

pub(super) fn visited_keys_are_those_that_are_there(subject: &Subject<'_>) {
    let tier = subject.tier();
    let visited = || {
        let mut visited = BTreeMap::new();
        tier.visit_keys(&mut |key, n_bytes| {
            assert_eq!(visited.insert(key, n_bytes), None, "{key} is visited twice");
        });
        visited
    };
    assert!(visited().is_empty());
    let mut expected = BTreeMap::new();
    for (n_bytes, chunk_idx) in [1, 4096, 5000, 100_000].into_iter().zip(0..) {
        put_content(&*tier, content_key(chunk_idx), n_bytes);
        expected.insert(content_key(chunk_idx), n_bytes as u64);
    }
    tier.delete(&[content_key(1)]).expect("the tier can be asked");
    expected.remove(&content_key(1));
    if subject.traits.knows_keys && !subject.traits.knows_lengths {
        assert!(visited().keys().eq(expected.keys()), "other keys are visited than are there");
    } else if subject.traits.knows_keys {
        assert_eq!(visited(), expected);
    } else {
        assert!(visited().is_empty(), "a tier that does not know its keys visits none");
    }
}

pub(super) fn a_flushed_chunk_is_still_there(subject: &Subject<'_>) {
    let tier = subject.tier();
    tier.flush().expect("nothing can be flushed");
    put_content(&*tier, content_key(0), 10_000);
    tier.flush().expect("the tier can be flushed");
    assert_hit(&*tier, content_key(0), 10_000);
}
