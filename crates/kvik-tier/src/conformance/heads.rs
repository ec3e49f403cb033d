//! What stands before a chunk is stored with it and comes along with a range of it.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Subject;
use super::content::{assert_hit, content, content_key, put_content, put_sections};
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome, Heads, PutItem, PutOutcome, Tier, TierExt};

/// Lengths of heads: of a line, of an envelope, and around it.
const HEAD_BYTES: &[usize] = &[1, 64, 4095, 4096, 4097];

pub(super) fn a_head_comes_with_the_range_behind_it(subject: &Subject<'_>) {
    let tier = subject.tier();
    for (n_bytes, chunk_idx) in [5000, 8192, 12_289, 300_001].into_iter().zip(0..) {
        let key = content_key(chunk_idx);
        put_content(&*tier, key, n_bytes);
        for n_head_bytes in HEAD_BYTES {
            for n_range_bytes in [1, 500, n_bytes - n_head_bytes] {
                assert_hit_with_head(&*tier, key, n_bytes, *n_head_bytes, (*n_head_bytes, n_range_bytes));
            }
        }
    }
}

pub(super) fn a_head_comes_with_a_range_anywhere(subject: &Subject<'_>) {
    let tier = subject.tier();
    let (key, n_bytes) = (content_key(0), 5 * 4096 + 100);
    put_sections(&*tier, key, n_bytes, 4096);
    for n_head_bytes in HEAD_BYTES {
        for range in [(0, 4096), (0, n_bytes), (1, 10), (4096, 4096), (3 * 4096, 4096), (5 * 4096, 100)] {
            assert_hit_with_head(&*tier, key, n_bytes, *n_head_bytes, range);
        }
    }
}

pub(super) fn a_head_can_be_read_without_a_range(subject: &Subject<'_>) {
    let tier = subject.tier();
    let (key, n_bytes) = (content_key(0), 10_000);
    put_content(&*tier, key, n_bytes);
    for n_head_bytes in HEAD_BYTES.iter().chain(&[n_bytes]) {
        for offset in [0, *n_head_bytes, n_bytes] {
            assert_hit_with_head(&*tier, key, n_bytes, *n_head_bytes, (offset, 0));
        }
    }
}

pub(super) fn a_head_and_a_buffer_are_a_whole_chunk_or_no_hit(subject: &Subject<'_>) {
    let tier = subject.tier();
    let (key, n_bytes) = (content_key(0), 10_000);
    put_content(&*tier, key, n_bytes);
    let chunk = content(key, n_bytes);
    for n_head_bytes in HEAD_BYTES {
        for asked_bytes in [*n_head_bytes, n_bytes - 1, n_bytes, n_bytes + 1] {
            let (mut head, mut buffer) = (vec![0xee; *n_head_bytes], vec![0xee; asked_bytes - n_head_bytes]);
            let item = GetItem::with_head(key, &mut head, *n_head_bytes as u64, &mut buffer);
            let mut batch = [GetItem { is_whole: true, ..item }];
            tier.get(&mut batch);
            let [GetItem { outcome, .. }] = batch;
            assert_eq!(outcome.is_hit(), asked_bytes == n_bytes, "{asked_bytes} of {n_bytes}: {outcome:?}");
            assert!(!outcome.is_hit() || [head, buffer].concat() == chunk, "{n_head_bytes}: other bytes");
        }
    }
}

pub(super) fn a_chunk_too_short_for_a_head_or_its_range_is_neither_hit_nor_miss(subject: &Subject<'_>) {
    let tier = subject.tier();
    let (key, n_bytes) = (content_key(0), 10_000);
    put_sections(&*tier, key, n_bytes, 5000);
    let too_much = [
        (n_bytes + 1, (0, 0)),
        (n_bytes + 1, (0, 5000)),
        (n_bytes + 1, (n_bytes + 1, 1)),
        (4096, (4096, n_bytes - 4095)),
        (4096, (5000, 5001)),
        (4096, (n_bytes, 1)),
        (4096, (1 << 40, 1)),
    ];
    for (n_head_bytes, range) in too_much {
        let (outcome, ..) = get_with_head(&*tier, key, n_head_bytes, range);
        assert!(matches!(outcome, GetOutcome::Corrupt(_)), "{n_head_bytes} and {range:?}: {outcome:?}");
    }
}

pub(super) fn a_head_of_what_is_not_there_is_a_miss(subject: &Subject<'_>) {
    let tier = subject.tier();
    put_content(&*tier, content_key(0), 10_000);
    for range in [(0, 0), (0, 100), (4096, 100), (5000, 100)] {
        let (outcome, ..) = get_with_head(&*tier, content_key(1), 4096, range);
        assert!(matches!(outcome, GetOutcome::Miss), "{range:?}: {outcome:?}");
    }
}

pub(super) fn every_item_arrives_once_with_its_outcome(subject: &Subject<'_>) {
    let tier = subject.tier();
    let n_bytes = 100_000;
    for chunk_idx in (0..60).step_by(2) {
        put_content(&*tier, content_key(chunk_idx), n_bytes);
    }
    let (mut heads, mut buffers) = (vec![[0; 4096]; 60], vec![vec![0; 90_000]; 60]);
    let mut batch: Vec<GetItem<'_>> = heads
        .iter_mut()
        .zip(&mut buffers)
        .zip(0..)
        .map(|((head, buffer), idx)| match idx % 3 {
            0 => GetItem::with_head(content_key(idx), head, 4096, buffer),
            1 => GetItem::with_head(content_key(idx), head, 9000, buffer),
            // Too short, and there or not.
            _ => GetItem::with_head(content_key(idx), head, 20_000, buffer),
        })
        .collect();
    get_each_once(&*tier, &mut batch);
    for (item, idx) in batch.iter().zip(0..) {
        match &item.outcome {
            GetOutcome::Hit => assert!(idx % 2 == 0 && idx % 3 != 2, "a hit of item {idx}"),
            GetOutcome::Miss => assert!(idx % 2 == 1, "a miss of item {idx}"),
            outcome => assert!(idx % 2 == 0 && idx % 3 == 2, "item {idx}: {outcome:?}"),
        }
    }
    get_each_once(&*tier, &mut []);
}

pub(super) fn a_head_is_stored_before_its_chunk(subject: &Subject<'_>) {
    let tier = subject.tier();
    let (keys, chunk_bytes) = ([content_key(0), content_key(1), content_key(2)], 70_000);
    put_content(&*tier, keys[1], chunk_bytes);
    let chunks = keys.map(|key| content(key, chunk_bytes));
    let parts = chunks.each_ref().map(|chunk| [chunk.as_slice()]);
    let heads = Numbers([vec![0; 4096], vec![1; 4096], vec![2; 4096]]);
    let mut batch = [0, 1, 2].map(|idx| PutItem::with_sections(keys[idx], &parts[idx], 4096));
    tier.put_each(&mut batch, &heads);
    let [first, present, last] = batch.map(|item| item.outcome);
    assert!(matches!(first, PutOutcome::Stored) && matches!(last, PutOutcome::Stored), "{first:?}, {last:?}");
    assert!(matches!(present, PutOutcome::Present), "{present:?}");
    assert_hit(&*tier, keys[1], chunk_bytes);
    for idx in [0, 2] {
        let mut buffer = vec![0xee; 4096 + chunk_bytes];
        let outcome = tier.get_one(keys[idx], &mut buffer);
        assert!(outcome.is_hit(), "{outcome:?}");
        assert!(buffer == [heads.head_of(idx), &chunks[idx]].concat(), "other bytes");
    }
}

/// Heads that are told apart.
struct Numbers([Vec<u8>; 3]);

impl Heads for Numbers {
    fn n_bytes(&self) -> usize {
        4096
    }

    fn head_of(&self, item_idx: usize) -> &[u8] {
        &self.0[item_idx]
    }
}

/// Reads a batch and insists that every item arrives exactly once, with the outcome and the bytes that it has
/// in the end.
///
/// # Panics
/// If one does not.
pub fn get_each_once(tier: &dyn Tier, batch: &mut [GetItem<'_>]) {
    let arrivals: Vec<AtomicUsize> = batch.iter().map(|_| AtomicUsize::new(0)).collect();
    let seen = parking_lot::Mutex::new(vec![None; batch.len()]);
    let keys: Vec<ChunkKey> = batch.iter().map(|item| item.key).collect();
    tier.get_each(batch, &|item_idx, item| {
        arrivals[item_idx].fetch_add(1, Ordering::Relaxed);
        assert_eq!(item.key, keys[item_idx], "item {item_idx} arrives under another index");
        assert!(!matches!(item.outcome, GetOutcome::Pending), "item {item_idx} arrives without an outcome");
        let bytes = item.outcome.is_hit().then(|| [&*item.head, &*item.buffer].concat());
        seen.lock()[item_idx] = Some((format!("{:?}", item.outcome), bytes));
    });
    for (item_idx, (arrival, (item, seen))) in
        arrivals.into_iter().zip(batch.iter().zip(seen.into_inner())).enumerate()
    {
        assert_eq!(arrival.into_inner(), 1, "arrivals of item {item_idx}");
        let bytes = item.outcome.is_hit().then(|| [&*item.head, &*item.buffer].concat());
        let is_the_same = seen == Some((format!("{:?}", item.outcome), bytes));
        assert!(is_the_same, "item {item_idx} changed after it arrived");
    }
}

fn get_with_head(
    tier: &dyn Tier,
    key: ChunkKey,
    n_head_bytes: usize,
    (offset, n_range_bytes): (usize, usize),
) -> (GetOutcome, Vec<u8>, Vec<u8>) {
    let (mut head, mut buffer) = (vec![0xee; n_head_bytes], vec![0xee; n_range_bytes]);
    let mut batch = [GetItem::with_head(key, &mut head, offset as u64, &mut buffer)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    (outcome, head, buffer)
}

/// Insists that a chunk of [`content`] gives a head and a range of it.
fn assert_hit_with_head(
    tier: &dyn Tier,
    key: ChunkKey,
    n_bytes: usize,
    n_head_bytes: usize,
    (offset, n_range_bytes): (usize, usize),
) {
    let (outcome, head, buffer) = get_with_head(tier, key, n_head_bytes, (offset, n_range_bytes));
    let what = format!("{n_head_bytes} bytes and {n_range_bytes} from {offset} on of {n_bytes}");
    assert!(outcome.is_hit(), "{what}: {outcome:?}");
    let chunk = content(key, n_bytes);
    assert!(head == chunk[..n_head_bytes], "{what}: another head");
    assert!(buffer == chunk[offset..][..n_range_bytes], "{what}: other bytes");
}
