//! Many items at a time.

use super::Subject;
use super::content::{assert_hit, content, content_key, put_content};
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome, PutItem};

pub(super) fn empty_batches_do_nothing(subject: &Subject<'_>) {
    let tier = subject.tier();
    put_content(&*tier, content_key(0), 100);
    tier.put(&mut []);
    tier.get(&mut []);
    tier.contains(&[], &mut []).expect("the tier can be asked");
    assert_eq!(tier.delete(&[]).expect("the tier can be asked"), 0);
    assert_hit(&*tier, content_key(0), 100);
}

pub(super) fn a_key_twice_in_a_batch_is_stored_once(subject: &Subject<'_>) {
    let tier = subject.tier();
    let keys = [content_key(0), content_key(1), content_key(0)];
    let chunks = keys.map(|key| content(key, 5000));
    let parts = chunks.each_ref().map(|chunk| [chunk.as_slice()]);
    let mut batch = [0, 1, 2].map(|item_idx| PutItem::new(keys[item_idx], &parts[item_idx]));
    tier.put(&mut batch);
    for item in &batch {
        assert!(item.outcome.is_present(), "put {}: {:?}", item.key, item.outcome);
    }
    let mut buffers = [[0; 5000]; 3];
    let mut batch: Vec<GetItem<'_>> =
        keys.iter().zip(&mut buffers).map(|(key, buffer)| GetItem::whole(*key, buffer)).collect();
    tier.get(&mut batch);
    for item in &batch {
        assert!(item.outcome.is_hit(), "get {}: {:?}", item.key, item.outcome);
    }
    assert!(buffers.iter().zip(&chunks).all(|(buffer, chunk)| buffer == chunk.as_slice()), "other bytes");
    let n_deleted = tier.delete(&keys).expect("the tier can be asked");
    assert!(n_deleted == 2 || !subject.traits.counts_deletes, "deleted {n_deleted}");
}

pub(super) fn a_hundred_chunks_go_in_and_out_in_one_batch(subject: &Subject<'_>) {
    let tier = subject.tier();
    let length_of = |chunk_idx: u64| 1 + 777 * chunk_idx as usize % 20_000;
    let keys: Vec<ChunkKey> = (0..100).map(content_key).collect();
    let chunks: Vec<Vec<u8>> = (0..100).map(|idx| content(content_key(idx), length_of(idx))).collect();
    let parts: Vec<[&[u8]; 1]> = chunks.iter().map(|chunk| [chunk.as_slice()]).collect();
    let mut batch: Vec<PutItem<'_>> =
        keys.iter().zip(&parts).map(|(key, parts)| PutItem::new(*key, parts)).collect();
    tier.put(&mut batch);
    for item in &batch {
        assert!(item.outcome.is_present(), "put {}: {:?}", item.key, item.outcome);
    }
    let mut buffers: Vec<Vec<u8>> = chunks.iter().map(|chunk| vec![0xee; chunk.len()]).collect();
    let mut batch: Vec<GetItem<'_>> =
        keys.iter().zip(&mut buffers).map(|(key, buffer)| GetItem::whole(*key, buffer)).collect();
    tier.get(&mut batch);
    for item in &batch {
        assert!(item.outcome.is_hit(), "get {}: {:?}", item.key, item.outcome);
    }
    assert!(buffers == chunks, "other bytes");
}

pub(super) fn a_batch_has_hits_and_misses_side_by_side(subject: &Subject<'_>) {
    let tier = subject.tier();
    for chunk_idx in (0..20).step_by(2) {
        put_content(&*tier, content_key(chunk_idx), 4096);
    }
    let mut buffers = vec![[0; 4096]; 20];
    let mut batch: Vec<GetItem<'_>> =
        buffers.iter_mut().zip(0..).map(|(buffer, idx)| GetItem::whole(content_key(idx), buffer)).collect();
    tier.get(&mut batch);
    let outcomes: Vec<GetOutcome> = batch.into_iter().map(|item| item.outcome).collect();
    for ((outcome, buffer), chunk_idx) in outcomes.iter().zip(&buffers).zip(0..) {
        if chunk_idx % 2 == 0 {
            assert!(outcome.is_hit(), "chunk {chunk_idx}: {outcome:?}");
            assert!(
                buffer == content(content_key(chunk_idx), 4096).as_slice(),
                "chunk {chunk_idx}: other bytes"
            );
        } else {
            assert!(matches!(outcome, GetOutcome::Miss), "chunk {chunk_idx}: {outcome:?}");
        }
    }
}

pub(super) fn contains_tells_holes(subject: &Subject<'_>) {
    let tier = subject.tier();
    let keys: Vec<ChunkKey> = (0..50).map(content_key).collect();
    for key in keys.iter().step_by(3) {
        put_content(&*tier, *key, 100);
    }
    for stale in [false, true] {
        let mut present = vec![stale; keys.len()];
        tier.contains(&keys, &mut present).expect("the tier can be asked");
        let expected: Vec<bool> = (0..keys.len()).map(|key_idx| key_idx % 3 == 0).collect();
        assert_eq!(present, expected);
    }
}
