//! The tier from the inside: its blocks, damaged files, failing devices and losses of power.

mod blocks;
mod damage;
mod deletions;
mod device;
mod failures;
mod file_writes;
mod files;
mod power_loss;
mod recorder;

use std::path::{Path, PathBuf};

use super::{NvmeOptions, NvmeTier};
use crate::conformance::{content, content_key};
use crate::decorator::Checksummed;
use crate::tier::{GetOutcome, PutOutcome, Tier, TierExt};

/// The smallest segment, and eight of them.
const SEGMENT_BYTES: u64 = 16 * 4096;
const CAPACITY_BYTES: u64 = 8 * SEGMENT_BYTES;

fn options(dir: &Path) -> NvmeOptions {
    NvmeOptions { formats_device: true, ..NvmeOptions::new(dir, CAPACITY_BYTES) }
}

/// The image of an empty device that has room for the capacity.
fn device_image(dir: &Path) -> PathBuf {
    let path = dir.join("device");
    std::fs::File::create(&path).unwrap().set_len(device_offset(8)).unwrap();
    path
}

/// Where a segment begins on a device.
fn device_offset(number: u32) -> u64 {
    (1 << 20) + u64::from(number) * SEGMENT_BYTES
}

/// In memory where there is such a file system: a test opens thousands of tiers.
fn temporary_directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn open(dir: &Path) -> Checksummed<NvmeTier> {
    Checksummed::new(NvmeTier::open(&options(dir)).unwrap())
}

/// Another length for each chunk, of one to four blocks with the envelope.
fn length_of(chunk_idx: u64) -> usize {
    1 + (chunk_idx as usize * 5347) % 12_000
}

fn put(tier: &dyn Tier, chunk_idx: u64) -> PutOutcome {
    let key = content_key(chunk_idx);
    tier.put_one(key, &content(key, length_of(chunk_idx)))
}

/// Reads a chunk and insists that a hit has its bytes.
fn get(tier: &dyn Tier, chunk_idx: u64, context: &str) -> GetOutcome {
    let key = content_key(chunk_idx);
    let mut buffer = vec![0; length_of(chunk_idx)];
    let outcome = tier.get_one(key, &mut buffer);
    let is_right = !outcome.is_hit() || buffer == content(key, buffer.len());
    assert!(is_right, "{context}: chunk {chunk_idx} hits with other bytes");
    assert!(!matches!(outcome, GetOutcome::Failed(_)), "{context}: chunk {chunk_idx}: {outcome:?}");
    outcome
}

fn segment_path(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("segment-{number:08}.kvik"))
}
