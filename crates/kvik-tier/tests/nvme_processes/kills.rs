//! Processes that are killed while they store, delete and flush.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use kvik_tier::conformance::{content, content_key};
use kvik_tier::{Checksummed, NvmeOptions, NvmeTier, Tier, TierExt};

/// The role of the process that is killed.
pub(crate) const WRITER: &str = "writer";

const CAPACITY_BYTES: u64 = 16 << 20;
const N_THREADS: u64 = 3;

/// So many chunks of each thread stay.
const N_KEPT: u64 = 12;

/// Numbers of chunks that one life of the writer uses.
const N_OF_A_LIFE: u64 = 1_000_000;

/// Kills a writer so many times: every chunk whose `put` has returned and whose deletion has not begun is there.
///
/// What is found is right, and a start never fails. Writers have several batches under way at a time, so that a
/// death leaves batches that are whole behind some that are not.
pub(crate) fn kill_writers(n_kills: u64) {
    let dir = tempfile::tempdir().unwrap();
    let mut random = 0x9e37_79b9_u64;
    let (mut n_walked, mut n_expected) = (0, 0);
    for life in 0..n_kills {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let n_lines = 1 + (random >> 33) % 200;
        let expected = run_and_kill(dir.path(), life * N_OF_A_LIFE, n_lines);
        let tier = open(dir.path());
        let details = tier.stat().details;
        n_walked += details.iter().find(|(name, _)| *name == "walked_segments").unwrap().1;
        n_expected += expected.len();
        for chunk_idx in &expected {
            assert!(is_hit(&tier, *chunk_idx), "life {life}: chunk {chunk_idx} is lost");
        }
        // The rest may be there: deleted and not written down, or stored and not told.
        let mut found = Vec::new();
        tier.visit_keys(&mut |key, _| found.push(key));
        for key in &found {
            let chunk_idx = u64::from_le_bytes(*key.chunk.0.first_chunk().unwrap());
            is_hit(&tier, chunk_idx);
        }
        tier.delete(&found).unwrap();
    }
    assert!(n_walked >= n_kills / 2, "only {n_walked} of {n_kills} deaths left an open segment");
    assert!(n_expected as u64 > n_kills * 5, "only {n_expected} chunks were to be found");
    println!("{n_kills} kills: {n_expected} chunks found, {n_walked} segments walked");
}

/// The process that is killed.
pub(crate) fn write_until_killed(dir: &Path, first: u64) {
    let tier = open(dir);
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..N_THREADS {
            scope.spawn(|| {
                let mut own = Vec::new();
                loop {
                    let chunk_idx = first + next.fetch_add(1, Ordering::Relaxed);
                    let bytes = content(content_key(chunk_idx), length_of(chunk_idx));
                    let outcome = tier.put_one(content_key(chunk_idx), &bytes);
                    assert!(outcome.is_present(), "chunk {chunk_idx}: {outcome:?}");
                    say(&format!("stored {chunk_idx}"));
                    own.push(chunk_idx);
                    if own.len() as u64 > N_KEPT {
                        let oldest = own.remove(0);
                        say(&format!("deleting {oldest}"));
                        tier.delete(&[content_key(oldest)]).unwrap();
                    }
                    if chunk_idx.is_multiple_of(17) {
                        tier.flush().unwrap();
                    }
                }
            });
        }
    });
}

/// Starts a writer and kills it after so many lines; returns the chunks that must be there.
fn run_and_kill(dir: &Path, first: u64, n_lines: u64) -> HashSet<u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([WRITER, dir.to_str().unwrap(), &first.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut stored = HashSet::new();
    let mut deleted = HashSet::new();
    let mut n_read = 0;
    for line in &mut lines {
        let line = line.unwrap();
        // Lines of threads do not mix, and the last may be torn by the death.
        if let Some(chunk_idx) = line.strip_prefix("stored ").and_then(|text| text.strip_suffix('.')) {
            stored.insert(chunk_idx.parse().unwrap());
        } else if let Some(chunk_idx) = line.strip_prefix("deleting ").and_then(|text| text.strip_suffix('.'))
        {
            deleted.insert(chunk_idx.parse().unwrap());
        }
        n_read += 1;
        if n_read == n_lines {
            child.kill().unwrap();
        }
    }
    let status = child.wait().unwrap();
    assert!(n_read >= n_lines && !status.success(), "the writer ended by itself: {status}");
    &stored - &deleted
}

/// One system call a line, so that a death loses lines as a whole.
fn say(words: &str) {
    std::io::stdout().write_all(format!("{words}.\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

fn length_of(chunk_idx: u64) -> usize {
    1 + (chunk_idx as usize * 7919) % 90_000
}

fn open(dir: &Path) -> Checksummed<NvmeTier> {
    Checksummed::new(NvmeTier::open(&NvmeOptions::new(dir, CAPACITY_BYTES)).unwrap())
}

fn is_hit(tier: &dyn Tier, chunk_idx: u64) -> bool {
    let key = content_key(chunk_idx);
    let mut buffer = vec![0; length_of(chunk_idx)];
    let is_hit = tier.get_one(key, &mut buffer).is_hit();
    assert!(!is_hit || buffer == content(key, buffer.len()), "chunk {chunk_idx} hits with other bytes");
    is_hit
}
