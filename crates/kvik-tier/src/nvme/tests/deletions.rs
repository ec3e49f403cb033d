//! Deletions that no chunk takes along.

use super::{SEGMENT_BYTES, get, put, temporary_directory};
use crate::conformance::content_key;
use crate::decorator::Checksummed;
use crate::key::ChunkKey;
use crate::nvme::{NvmeOptions, NvmeTier};
use crate::tier::Tier;

#[test]
fn more_deletions_than_a_segment_has_room_for_are_written_down() {
    const N_CHUNKS: u64 = 1500;
    let dir = temporary_directory();
    let options =
        NvmeOptions { segment_bytes: SEGMENT_BYTES, ..NvmeOptions::new(dir.path(), 1024 * SEGMENT_BYTES) };
    let open = || Checksummed::new(NvmeTier::open(&options).unwrap());
    let tier = open();
    for chunk_idx in 0..N_CHUNKS {
        assert!(put(&tier, chunk_idx).is_present());
    }
    let keys: Vec<ChunkKey> = (1..N_CHUNKS).map(content_key).collect();
    assert_eq!(tier.delete(&keys).unwrap(), keys.len());
    tier.flush().unwrap();
    let copy = temporary_directory();
    for entry in std::fs::read_dir(dir.path()).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let options = NvmeOptions { dir: copy.path().to_owned(), ..options.clone() };
    let after_death = Checksummed::new(NvmeTier::open(&options).unwrap());
    assert_eq!(after_death.stat().n_chunks, Some(1));
    assert!(get(&after_death, 0, "kept").is_hit());
}
