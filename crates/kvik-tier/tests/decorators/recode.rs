//! Chunks on a disk get a stronger codec, and are there at any time.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use kvik_tier::conformance::{MapTier, content_key};
use kvik_tier::{
    Breaker, BreakerOptions, Checksummed, ChunkKey, Coded, Encrypted, EncryptionKeys, GetItem, Metered,
    NvmeOptions, NvmeTier, PutItem, Retry, RetryOptions, Rewritten, Throttled, ThrottledOptions, Tier,
};

use crate::coded::{N_LAYERS, SECTION_BYTES, chunk, coded, key};

/// As a store has it: a disk with checksums and a codec, guarded and measured.
fn disk(dir: &Path, codec: &str) -> Metered<Breaker<Coded<Throttled<Checksummed<NvmeTier>>>>> {
    let nvme = NvmeTier::open(&NvmeOptions::new(dir, 64 << 20)).unwrap();
    let tier = Throttled::new(Checksummed::new(nvme), ThrottledOptions::default());
    Metered::new(Breaker::new(coded(tier, codec, &["int8", "int4"]), BreakerOptions::default()))
}

fn key_of(idx: u64) -> ChunkKey {
    ChunkKey { chunk: content_key(idx).chunk, ..key() }
}

fn put(tier: &dyn Tier, key: ChunkKey) {
    let chunk = chunk();
    let parts = [&chunk[..]];
    let mut batch = [PutItem::with_sections(key, &parts, SECTION_BYTES)];
    tier.put(&mut batch);
    assert!(batch[0].outcome.is_present(), "{:?}", batch[0].outcome);
}

fn get(tier: &dyn Tier, key: ChunkKey) -> Option<Vec<u8>> {
    let mut buffer = vec![0; N_LAYERS * SECTION_BYTES];
    let mut batch = [GetItem::whole(key, &mut buffer)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    outcome.is_hit().then_some(buffer)
}

fn is_near(bytes: &[u8]) -> bool {
    let number = |bytes: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
    let expected = chunk();
    bytes.len() == expected.len()
        && bytes
            .chunks(2)
            .zip(expected.chunks(2))
            .all(|(one, other)| (number(one) - number(other)).abs() < 0.1)
}

#[test]
fn a_recoded_chunk_is_smaller_and_found_again_after_a_restart_and_its_old_room_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let used_before = {
        let tier = disk(dir.path(), "lossless");
        assert_eq!(tier.codec(), Some("lossless"));
        for idx in 0..4 {
            put(&tier, key_of(idx));
        }
        let used_before = tier.stat().used_bytes.unwrap();
        for idx in 0..3 {
            let rewritten = tier.recode(key_of(idx), "int4").unwrap();
            let Rewritten::Changed { n_before_bytes, n_after_bytes } = rewritten else {
                panic!("{rewritten:?}")
            };
            assert!(n_after_bytes < n_before_bytes);
        }
        // Losses do not add up, and the same codec changes nothing.
        for codec in ["int8", "int4", "lossless"] {
            assert_eq!(tier.recode(key_of(0), codec).unwrap(), Rewritten::Kept, "{codec}");
        }
        assert_eq!(tier.recode(key_of(3), "lossless").unwrap(), Rewritten::Kept);
        assert_eq!(tier.recode(key_of(9), "int8").unwrap(), Rewritten::Missing);
        let error = tier.recode(key_of(3), "cachegen").unwrap_err().to_string();
        assert_eq!(error, "`codec` is cachegen; allowed: none, lossless, int8, int4");
        let used_after = tier.stat().used_bytes.unwrap();
        assert!(used_after < used_before, "{used_after} instead of {used_before} bytes");
        used_before
    };
    let tier = disk(dir.path(), "lossless");
    for idx in 0..3 {
        assert!(is_near(&get(&tier, key_of(idx)).unwrap()));
    }
    assert_eq!(get(&tier, key_of(3)).unwrap(), chunk(), "what was not recoded is exact");
    assert!(tier.stat().used_bytes.unwrap() < used_before);
    assert_eq!(tier.delete(&[key_of(0), key_of(3)]).unwrap(), 2);
    drop(tier);
    let tier = disk(dir.path(), "lossless");
    assert!(
        get(&tier, key_of(0)).is_none() && get(&tier, key_of(1)).is_some(),
        "deletions count after it too"
    );
}

#[test]
fn a_process_that_dies_before_the_tier_is_closed_leaves_one_of_the_two() {
    let dir = tempfile::tempdir().unwrap();
    let tier = disk(dir.path(), "lossless");
    put(&tier, key_of(1));
    tier.flush().unwrap();
    let files = |to: &Path| {
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    files(before.path());
    assert!(matches!(tier.recode(key_of(1), "int8").unwrap(), Rewritten::Changed { .. }));
    files(after.path());
    assert_eq!(get(&disk(before.path(), "lossless"), key_of(1)).unwrap(), chunk());
    let recoded = get(&disk(after.path(), "lossless"), key_of(1)).unwrap();
    assert!(recoded != chunk() && is_near(&recoded));
}

/// Chunks that are recoded beside readers.
const N_CHUNKS: u64 = 40;

#[test]
fn readers_find_a_chunk_at_any_time_while_it_is_recoded_and_deleted_ones_stay_so() {
    let dir = tempfile::tempdir().unwrap();
    let tier = disk(dir.path(), "lossless");
    for idx in 0..N_CHUNKS {
        put(&tier, key_of(idx));
    }
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for idx in 0..N_CHUNKS {
                tier.recode(key_of(idx), "int8").unwrap();
            }
            is_done.store(true, Ordering::Release);
        });
        scope.spawn(|| {
            for idx in (0..N_CHUNKS).step_by(4) {
                tier.delete(&[key_of(idx)]).unwrap();
            }
        });
        let mut n_reads = 0_u64;
        while !is_done.load(Ordering::Acquire) || n_reads < N_CHUNKS {
            let idx = n_reads % N_CHUNKS;
            // A read is two calls: one between which the chunk changed is a miss, and the next is not.
            let read = (0..3).find_map(|_| get(&tier, key_of(idx)));
            assert!(idx.is_multiple_of(4) || read.is_some_and(|bytes| is_near(&bytes)), "chunk {idx}");
            n_reads += 1;
        }
    });
    drop(tier);
    let tier = disk(dir.path(), "lossless");
    for idx in 0..N_CHUNKS {
        assert_eq!(get(&tier, key_of(idx)).is_some(), !idx.is_multiple_of(4), "chunk {idx}");
    }
}

#[test]
fn tiers_that_cannot_do_it_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let key_file = dir.path().join("keys");
    std::fs::write(&key_file, format!("{}\n", "ab".repeat(32))).unwrap();
    std::fs::set_permissions(&key_file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let keys = std::sync::Arc::new(EncryptionKeys::open(&key_file).unwrap());
    let plain = Checksummed::new(MapTier::new());
    let sealed = coded(Encrypted::new(MapTier::new(), keys), "lossless", &[]);
    let remote =
        Retry::new(coded(Checksummed::new(MapTier::new()), "lossless", &[]), RetryOptions::default());
    for tier in [&plain as &dyn Tier, &sealed, &remote] {
        put(tier, key_of(1));
        let error = tier.recode(key_of(1), "lossless").unwrap_err().to_string();
        assert!(error.contains("`tier` is ") && error.contains("a disk"), "{error}");
        assert_eq!(get(tier, key_of(1)).unwrap(), chunk());
    }
}
