//! Many callers at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::Subject;
use super::content::{assert_hit, content, content_key, get_content};
use crate::tier::{PutOutcome, Tier, TierExt};

const N_KEYS: u64 = 24;
const CHUNK_BYTES: usize = 70_000;

pub(super) fn readers_beside_writers_see_whole_chunks_only(subject: &Subject<'_>) {
    let tier = subject.tier();
    beside_readers(&*tier, 2, &|_| {
        for chunk_idx in 0..N_KEYS {
            put_chunk(&*tier, chunk_idx);
        }
    });
    for chunk_idx in 0..N_KEYS {
        assert_hit(&*tier, content_key(chunk_idx), CHUNK_BYTES);
    }
}

pub(super) fn readers_beside_deleters_see_the_chunk_or_nothing(subject: &Subject<'_>) {
    let tier = subject.tier();
    beside_readers(&*tier, 2, &|writer_idx| {
        for round in 0..20 {
            let chunk_idx = (round + writer_idx) % 3;
            put_chunk(&*tier, chunk_idx);
            tier.delete(&[content_key(chunk_idx)]).expect("the tier can be asked");
        }
    });
}

pub(super) fn writers_of_one_key_all_find_it_present(subject: &Subject<'_>) {
    let tier = subject.tier();
    for chunk_idx in 0..8 {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| put_chunk(&*tier, chunk_idx));
            }
        });
        assert_hit(&*tier, content_key(chunk_idx), CHUNK_BYTES);
    }
}

/// Runs `write` on several threads, and readers of all keys until it is done.
fn beside_readers(tier: &dyn Tier, n_writers: u64, write: &(dyn Fn(u64) + Sync)) {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                // Relaxed: nothing but the end of the loop follows from it.
                while !is_done.load(Ordering::Relaxed) {
                    for chunk_idx in 0..N_KEYS {
                        get_content(tier, content_key(chunk_idx), CHUNK_BYTES);
                    }
                }
            });
        }
        let writers: Vec<_> =
            (0..n_writers).map(|writer_idx| scope.spawn(move || write(writer_idx))).collect();
        let n_panics = writers.into_iter().map(thread::ScopedJoinHandle::join).filter(Result::is_err).count();
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(n_panics, 0, "writers failed");
    });
}

/// Stores a chunk; a tier that gives room back late may have none for a while.
fn put_chunk(tier: &dyn Tier, chunk_idx: u64) {
    let key = content_key(chunk_idx);
    let outcome = tier.put_one(key, &content(key, CHUNK_BYTES));
    assert!(outcome.is_present() || matches!(outcome, PutOutcome::NoRoom), "put {key}: {outcome:?}");
}
