//! Losses of power at every kind of moment.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::recorder::{Loss, Recorder};
use super::{device_image, get, length_of, open, options, put, temporary_directory};
use crate::conformance::content_key;
use crate::decorator::Checksummed;
use crate::nvme::{NvmeOptions, NvmeTier, SyncMode};
use crate::random::SplitMix64;
use crate::tier::{PutOutcome, Tier};

const N_KEYS: u64 = 60;
const N_OPERATIONS: usize = 400;
const N_IMAGES_OF_A_HISTORY: usize = 120;

/// What a tier lies on.
#[derive(Clone, Copy, Debug)]
enum Medium {
    Folder,
    /// The image of a device that was formatted.
    Device,
}

impl Medium {
    fn place(self, dir: &Path) -> PathBuf {
        match self {
            Self::Folder => dir.to_owned(),
            Self::Device => {
                let path = device_image(dir);
                drop(open(&path));
                path
            }
        }
    }
}

/// What a tier was told, and when.
struct History {
    recorder: Arc<Recorder>,
    flushes: Vec<Flush>,
    changes: Vec<Change>,
}

/// A chunk that was stored or deleted.
struct Change {
    chunk_idx: u64,
    n_events_before: usize,
    n_events_after: usize,
    is_there_after: bool,
}

/// What was there when a flush returned.
struct Flush {
    n_events: usize,
    present: HashSet<u64>,
}

/// Stores, deletes and flushes at random until segments have been used several times.
fn make_history(seed: u64, sync: SyncMode, medium: Medium) -> History {
    let dir = temporary_directory();
    let place = medium.place(dir.path());
    let recorder = Arc::new(Recorder::default());
    let options = NvmeOptions { sync, ..options(&place) };
    let tier = Checksummed::new(NvmeTier::open_with(&options, Arc::clone(&recorder) as _).unwrap());
    let mut random = SplitMix64::new(seed);
    let mut present = HashSet::new();
    let mut history = History { recorder, flushes: Vec::new(), changes: Vec::new() };
    for _ in 0..N_OPERATIONS {
        let chunk_idx = random.below(N_KEYS);
        let n_events = history.recorder.n_events();
        match random.below(20) {
            0 => {
                tier.flush().unwrap();
                let n_events = history.recorder.n_events();
                history.flushes.push(Flush { n_events, present: present.clone() });
            }
            choice => {
                if choice < 8 {
                    tier.delete(&[content_key(chunk_idx)]).unwrap();
                    present.remove(&chunk_idx);
                } else {
                    let outcome = put(&tier, chunk_idx);
                    assert!(!matches!(outcome, PutOutcome::Failed(_)), "{outcome:?}");
                    present.extend(outcome.is_present().then_some(chunk_idx));
                }
                history.changes.push(Change {
                    chunk_idx,
                    n_events_before: n_events,
                    n_events_after: history.recorder.n_events(),
                    is_there_after: present.contains(&chunk_idx),
                });
            }
        }
    }
    let reclaimed = tier.stat().details.iter().find(|(name, _)| *name == "reclaimed_segments").unwrap().1;
    assert!(reclaimed > 5, "seed {seed}: only {reclaimed} segments were used again");
    history
}

impl History {
    /// What no later change concerns is as it was at the last flush.
    fn check_flushed(&self, n_events: usize, hits: &HashSet<u64>, context: &str) {
        let Some(flush) = self.flushes.iter().rfind(|flush| flush.n_events <= n_events) else {
            return;
        };
        let since = flush.n_events..=n_events;
        let changes = self.changes.iter().filter(|change| since.contains(&change.n_events_before));
        let changed: HashSet<u64> = changes.map(|change| change.chunk_idx).collect();
        for chunk_idx in (0..N_KEYS).filter(|chunk_idx| !changed.contains(chunk_idx)) {
            let was_there = flush.present.contains(&chunk_idx);
            assert_eq!(hits.contains(&chunk_idx), was_there, "{context}: chunk {chunk_idx} after a flush");
        }
    }

    /// A chunk whose last change was that it was stored is there.
    fn check_stored(&self, n_events: usize, hits: &HashSet<u64>, context: &str) {
        for chunk_idx in 0..N_KEYS {
            let of_chunk =
                |change: &&Change| change.chunk_idx == chunk_idx && change.n_events_before <= n_events;
            let last = self.changes.iter().rfind(of_chunk);
            if last.is_some_and(|last| last.is_there_after && last.n_events_after <= n_events) {
                assert!(hits.contains(&chunk_idx), "{context}: chunk {chunk_idx} after its put");
            }
        }
    }
}

/// Opens what is left after a loss and compares it with what was promised.
fn check_image(
    history: &History,
    n_events: usize,
    loss: Loss,
    seed: u64,
    (sync, medium): (SyncMode, Medium),
) -> usize {
    let dir = temporary_directory();
    let place = medium.place(dir.path());
    let mut random = SplitMix64::new(seed);
    history.recorder.leave_image(&place, n_events, loss, &mut random);
    let tier = open(&place);
    let context = format!("seed {seed}, {n_events} events, {loss:?}");
    let hits: HashSet<u64> =
        (0..N_KEYS).filter(|chunk_idx| get(&tier, *chunk_idx, &context).is_hit()).collect();
    match sync {
        SyncMode::Never => {}
        SyncMode::AtSeal => history.check_flushed(n_events, &hits, &context),
        SyncMode::EveryBatch => {
            history.check_flushed(n_events, &hits, &context);
            history.check_stored(n_events, &hits, &context);
        }
    }
    // It works on: what it has can be read beside what is new.
    for chunk_idx in N_KEYS..N_KEYS + 8 {
        let outcome = put(&tier, chunk_idx);
        assert!(!matches!(outcome, PutOutcome::Failed(_)), "{context}: {outcome:?}");
        assert!(!outcome.is_present() || get(&tier, chunk_idx, &context).is_hit(), "{context}");
    }
    drop(tier);
    let tier = open(&place);
    for chunk_idx in hits.iter().copied() {
        assert!(get(&tier, chunk_idx, &context).is_hit(), "{context}: chunk {chunk_idx} after another start");
    }
    hits.len()
}

fn check_history(seed: u64, sync: SyncMode, medium: Medium) {
    let history = make_history(seed, sync, medium);
    let mut random = SplitMix64::new(seed ^ 0xdead);
    let mut n_hits = 0;
    for image_idx in 0..N_IMAGES_OF_A_HISTORY {
        let n_events = random.below(1 + history.recorder.n_events() as u64) as usize;
        let losses = [Loss::Nothing, Loss::Everything, Loss::SomeWrites, Loss::SomeSectors, Loss::LastTorn];
        let loss = losses[image_idx % losses.len()];
        n_hits += check_image(&history, n_events, loss, random.next_u64(), (sync, medium));
    }
    assert!(n_hits > N_IMAGES_OF_A_HISTORY, "only {n_hits} hits: nothing survives");
}

#[test]
fn lengths_are_of_every_kind() {
    assert!((0..N_KEYS).any(|chunk_idx| length_of(chunk_idx) < 4096));
    assert!((0..N_KEYS).any(|chunk_idx| length_of(chunk_idx) > 8192));
}

#[test]
fn no_loss_of_power_makes_a_chunk_wrong_or_loses_what_was_flushed() {
    for seed in 0..10 {
        check_history(seed, SyncMode::AtSeal, Medium::Folder);
    }
}

#[test]
fn no_loss_of_power_makes_a_chunk_wrong_where_nothing_is_synced() {
    for seed in 100..105 {
        check_history(seed, SyncMode::Never, Medium::Folder);
    }
}

#[test]
fn no_loss_of_power_loses_a_chunk_whose_batch_was_synced() {
    for seed in 200..203 {
        check_history(seed, SyncMode::EveryBatch, Medium::Folder);
    }
}

#[test]
fn no_loss_of_power_on_a_device_makes_a_chunk_wrong_or_loses_what_was_flushed() {
    for seed in 300..306 {
        check_history(seed, SyncMode::AtSeal, Medium::Device);
    }
    for seed in 306..308 {
        check_history(seed, SyncMode::Never, Medium::Device);
    }
    for seed in 308..310 {
        check_history(seed, SyncMode::EveryBatch, Medium::Device);
    }
}
