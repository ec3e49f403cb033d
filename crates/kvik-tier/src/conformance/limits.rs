//! How much is there, and how much may be.

use std::thread;
use std::time::{Duration, Instant};

use super::Subject;
use super::content::{assert_hit, content, content_key, put_content};
use crate::key::ChunkKey;
use crate::tier::{PutOutcome, TierExt};

/// How long a tier may take to give room back.
const MAX_WAIT: Duration = Duration::from_secs(20);

pub(super) fn counts_follow_what_is_stored(subject: &Subject<'_>) {
    let tier = subject.tier();
    let counts = || {
        let stat = tier.stat();
        (stat.n_chunks.unwrap_or_default(), stat.used_bytes.unwrap_or_default())
    };
    if !subject.traits.knows_counts {
        return;
    }
    let (_, empty_bytes) = counts();
    for chunk_idx in 0..10 {
        put_content(&*tier, content_key(chunk_idx), 5000);
        put_content(&*tier, content_key(chunk_idx), 5000);
    }
    let (n_chunks, used_bytes) = counts();
    assert_eq!(n_chunks, 10);
    assert!(used_bytes >= empty_bytes + 50_000, "{used_bytes} bytes used by 50000");
    if let Some(capacity_bytes) = tier.stat().capacity_bytes {
        assert!(used_bytes <= capacity_bytes, "{used_bytes} bytes used of {capacity_bytes}");
    }
    tier.delete(&[content_key(3), content_key(4), content_key(99)]).expect("the tier can be asked");
    assert_eq!(counts().0, 8);
}

pub(super) fn a_full_tier_says_so_and_has_room_again_after_deleting(subject: &Subject<'_>) {
    let Some(capacity_bytes) = subject.traits.capacity_bytes else {
        return;
    };
    let tier = subject.tier();
    let chunk_bytes = (capacity_bytes as usize / 32).clamp(1, subject.traits.max_chunk_bytes);
    let n_most = 2 + capacity_bytes / chunk_bytes as u64;
    let put = |key: ChunkKey| tier.put_one(key, &content(key, chunk_bytes));
    let mut stored = Vec::new();
    loop {
        let key = content_key(stored.len() as u64);
        match put(key) {
            PutOutcome::NoRoom => break,
            outcome => assert!(outcome.is_present(), "put {key}: {outcome:?}"),
        }
        stored.push(key);
        assert!((stored.len() as u64) < n_most, "{} chunks of {chunk_bytes} bytes fit", stored.len());
    }
    assert!(!stored.is_empty(), "a chunk of {chunk_bytes} bytes does not fit into {capacity_bytes}");
    for key in &stored {
        assert_hit(&*tier, *key, chunk_bytes);
    }
    let (deleted, kept) = stored.split_at(stored.len() / 2 + 1);
    tier.delete(deleted).expect("the tier can be asked");
    let begin = Instant::now();
    let key = content_key(u64::MAX);
    while !put(key).is_present() {
        assert!(begin.elapsed() < MAX_WAIT, "no room after deleting {} of {}", deleted.len(), stored.len());
        thread::park_timeout(Duration::from_millis(1));
    }
    assert_hit(&*tier, key, chunk_bytes);
    for key in kept {
        assert_hit(&*tier, *key, chunk_bytes);
    }
}
