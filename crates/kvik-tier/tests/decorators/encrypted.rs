//! What is stored cannot be read, changed, moved or swapped without the key.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvik_tier::conformance::{ManualClock, MapTier, content, content_key};
use kvik_tier::{
    Checksummed, ChunkKey, Encrypted, EncryptionKeys, GetItem, GetOutcome, KeyRing, Metered, PutItem,
    PutOutcome, SEALED_HEAD_BYTES, SealedHead, Tier, TierExt, TokenDigest,
};
use proptest::prelude::*;

use crate::{asked, get, get_batch, put, put_batch};

const CHUNK_BYTES: usize = 300;
const SECTION_BYTES: usize = 100;

const OLD: &str = "00000000000000000000000000000000000000000000000000000000000000aa";
const NEW: &str = "00000000000000000000000000000000000000000000000000000000000000bb";

const MINE: TokenDigest = TokenDigest([1; 32]);
const THEIRS: TokenDigest = TokenDigest([2; 32]);

/// A file of keys, and the clock by which it is looked at.
pub(crate) struct KeyFile {
    path: PathBuf,
    clock: Arc<ManualClock>,
    _folder: tempfile::TempDir,
}

impl KeyFile {
    pub(crate) fn new(keys: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file =
            Self { path: folder.path().join("keys"), clock: Arc::new(ManualClock::new()), _folder: folder };
        file.write(keys);
        file
    }

    fn write(&self, keys: &[&str]) {
        std::fs::write(&self.path, keys.join("\n")).unwrap();
        set_mode(&self.path, 0o600);
    }

    /// Other keys, and the time for them to be noticed.
    fn change(&self, keys: &[&str]) {
        self.write(keys);
        self.clock.advance(Duration::from_secs(1));
    }

    pub(crate) fn open(&self) -> Arc<EncryptionKeys> {
        Arc::new(EncryptionKeys::open_with_clock(&self.path, self.clock.clone()).unwrap())
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Around a map, with a key that nothing else needs to know.
pub(crate) fn encrypted<T: Tier>(inner: T) -> Encrypted<T> {
    Encrypted::new(inner, KeyFile::new(&[OLD]).open())
}

fn put_sections(tier: &dyn Tier, chunk_idx: u64) {
    let chunk = content(content_key(chunk_idx), CHUNK_BYTES);
    let parts = [chunk.as_slice()];
    let mut batch = [PutItem::with_sections(content_key(chunk_idx), &parts, SECTION_BYTES)];
    tier.put(&mut batch);
    assert!(batch[0].outcome.is_present(), "{:?}", batch[0].outcome);
}

fn tier_with_chunk() -> Encrypted<MapTier> {
    let tier = encrypted(MapTier::new());
    put_sections(&tier, 0);
    tier
}

fn get_range(tier: &dyn Tier, offset: usize, n_bytes: usize) -> (GetOutcome, Vec<u8>) {
    get_range_of(tier, content_key(0), TokenDigest::NONE, offset, n_bytes)
}

fn get_range_of(
    tier: &dyn Tier,
    key: ChunkKey,
    digest: TokenDigest,
    offset: usize,
    n_bytes: usize,
) -> (GetOutcome, Vec<u8>) {
    let mut buffer = vec![0; n_bytes];
    let mut batch = [GetItem::range(key, offset as u64, &mut buffer).for_tokens(digest)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    (outcome, buffer)
}

fn detail(tier: &dyn Tier, wanted: &str) -> u64 {
    tier.stat().details.iter().find(|(name, _)| *name == wanted).unwrap().1
}

#[test]
fn every_flipped_bit_is_found() {
    let tier = tier_with_chunk();
    let stored = tier.inner().bytes_of(content_key(0)).unwrap();
    assert_eq!(stored.len(), SEALED_HEAD_BYTES + CHUNK_BYTES);
    // The name of the key: with another one it is a chunk that cannot be opened.
    let key_id = 64..80;
    for changed in 0..stored.len() {
        let mut bytes = stored.to_vec();
        bytes[changed] ^= 1 << (changed % 8);
        tier.inner().overwrite(content_key(0), &bytes);
        let outcome = get(&tier, 0, CHUNK_BYTES);
        if key_id.contains(&changed) {
            assert!(matches!(outcome, GetOutcome::Miss), "byte {changed}: {outcome:?}");
        } else {
            assert!(matches!(outcome, GetOutcome::Corrupt(_)), "byte {changed}: {outcome:?}");
        }
    }
    assert_eq!(detail(&tier, "unknown_key_reads"), 16);
    assert_eq!(detail(&tier, "corrupt_reads"), stored.len() as u64 - 16);
    tier.inner().overwrite(content_key(0), &stored);
    assert!(get(&tier, 0, CHUNK_BYTES).is_hit());
}

#[test]
fn a_damaged_section_leaves_the_others_readable_and_a_damaged_head_none() {
    let tier = tier_with_chunk();
    let stored = tier.inner().bytes_of(content_key(0)).unwrap();
    let mut bytes = stored.to_vec();
    bytes[SEALED_HEAD_BYTES + SECTION_BYTES] ^= 1;
    tier.inner().overwrite(content_key(0), &bytes);
    let chunk = content(content_key(0), CHUNK_BYTES);
    for (section_idx, is_damaged) in [(0, false), (1, true), (2, false)] {
        let offset = section_idx * SECTION_BYTES;
        let (outcome, buffer) = get_range(&tier, offset, SECTION_BYTES);
        assert_eq!(outcome.is_hit(), !is_damaged, "section {section_idx}: {outcome:?}");
        assert!(is_damaged || buffer == chunk[offset..][..SECTION_BYTES]);
    }
    // The tag of one section is part of the head of all, also where nothing is read.
    let mut bytes = stored.to_vec();
    bytes[112] ^= 1;
    tier.inner().overwrite(content_key(0), &bytes);
    for (offset, n_bytes) in [(SECTION_BYTES, SECTION_BYTES), (0, 0), (150, 10)] {
        let (outcome, _) = get_range(&tier, offset, n_bytes);
        assert!(matches!(outcome, GetOutcome::Corrupt("sealed head tag")), "{outcome:?}");
    }
}

#[test]
fn every_lost_end_is_found() {
    let tier = tier_with_chunk();
    let stored = tier.inner().bytes_of(content_key(0)).unwrap();
    for n_kept in 0..stored.len() {
        tier.inner().overwrite(content_key(0), &stored[..n_kept]);
        for (offset, n_bytes) in [(0, CHUNK_BYTES), (200, 100), (210, 5)] {
            let (outcome, _) = get_range(&tier, offset, n_bytes);
            assert!(matches!(outcome, GetOutcome::Corrupt(_)), "{n_kept} bytes kept: {outcome:?}");
        }
    }
}

#[test]
fn swapped_sections_are_found_with_their_tags_and_without() {
    let tier = tier_with_chunk();
    let stored = tier.inner().bytes_of(content_key(0)).unwrap();
    let swap = |bytes: &mut [u8], first: usize, second: usize, n_bytes: usize| {
        let (before, behind) = bytes.split_at_mut(second);
        before[first..][..n_bytes].swap_with_slice(&mut behind[..n_bytes]);
    };
    let mut bytes = stored.to_vec();
    swap(&mut bytes, SEALED_HEAD_BYTES, SEALED_HEAD_BYTES + SECTION_BYTES, SECTION_BYTES);
    for with_tags in [false, true] {
        if with_tags {
            swap(&mut bytes, 112, 128, 16);
        }
        tier.inner().overwrite(content_key(0), &bytes);
        for (offset, n_bytes) in [(0, CHUNK_BYTES), (0, SECTION_BYTES), (SECTION_BYTES, SECTION_BYTES)] {
            let (outcome, _) = get_range(&tier, offset, n_bytes);
            assert!(matches!(outcome, GetOutcome::Corrupt(_)), "{with_tags}: {outcome:?}");
        }
    }
}

#[test]
fn a_section_of_another_put_of_the_same_chunk_is_found() {
    let tier = tier_with_chunk();
    let first = tier.inner().bytes_of(content_key(0)).unwrap();
    tier.delete(&[content_key(0)]).unwrap();
    put_sections(&tier, 0);
    let second = tier.inner().bytes_of(content_key(0)).unwrap();
    assert_ne!(first, second, "a chunk is never sealed twice with one key and nonce");
    let behind_head = SEALED_HEAD_BYTES;
    assert!(first[behind_head..].iter().zip(&second[behind_head..]).filter(|(a, b)| a == b).count() < 20);
    for mixed in [
        [&first[..behind_head], &second[behind_head..]].concat(),
        [&first[..behind_head + SECTION_BYTES], &second[behind_head + SECTION_BYTES..]].concat(),
    ] {
        tier.inner().overwrite(content_key(0), &mixed);
        let outcome = get(&tier, 0, CHUNK_BYTES);
        assert!(matches!(outcome, GetOutcome::Corrupt("section tag")), "{outcome:?}");
    }
}

#[test]
fn a_chunk_under_the_name_of_another_is_found() {
    let tier = tier_with_chunk();
    put_sections(&tier, 1);
    let other = tier.inner().bytes_of(content_key(1)).unwrap();
    tier.inner().overwrite(content_key(0), &other);
    assert!(matches!(get(&tier, 0, CHUNK_BYTES), GetOutcome::Corrupt("key")));
    // With the name put right, the head does not hold.
    let mut renamed = other.to_vec();
    renamed[32..48].copy_from_slice(&content_key(0).chunk.0);
    tier.inner().overwrite(content_key(0), &renamed);
    assert!(matches!(get(&tier, 0, CHUNK_BYTES), GetOutcome::Corrupt("sealed head tag")));
}

#[test]
fn a_chunk_of_other_tokens_is_a_mismatch_whole_in_sections_and_cut() {
    let tier = encrypted(MapTier::new());
    let chunk = content(content_key(0), CHUNK_BYTES);
    let parts = [chunk.as_slice()];
    tier.put(&mut [PutItem::with_sections(content_key(0), &parts, SECTION_BYTES).for_tokens(MINE)]);
    for (offset, n_bytes) in [(0, CHUNK_BYTES), (SECTION_BYTES, SECTION_BYTES), (150, 20), (0, 0)] {
        let (outcome, buffer) = get_range_of(&tier, content_key(0), MINE, offset, n_bytes);
        assert!(outcome.is_hit() && buffer == chunk[offset..][..n_bytes], "{outcome:?}");
        for other in [THEIRS, TokenDigest::NONE] {
            let (outcome, _) = get_range_of(&tier, content_key(0), other, offset, n_bytes);
            assert!(matches!(outcome, GetOutcome::TokenMismatch), "{offset}, {n_bytes}: {outcome:?}");
        }
    }
    assert_eq!((detail(&tier, "token_mismatches"), detail(&tier, "corrupt_reads")), (8, 0));
}

#[test]
fn nothing_of_a_chunk_or_its_digest_is_in_the_medium() {
    let tier = encrypted(MapTier::new());
    let chunk = content(content_key(0), 20_000);
    let digest = TokenDigest(chunk[..32].try_into().unwrap());
    let parts = [chunk.as_slice()];
    tier.put(&mut [PutItem::with_sections(content_key(0), &parts, 4096).for_tokens(digest)]);
    let stored = tier.inner().bytes_of(content_key(0)).unwrap();
    let windows: std::collections::HashSet<&[u8]> = stored.windows(8).collect();
    // Eight bytes are in the medium by chance once in 10^11 times.
    assert!(!chunk.windows(8).any(|window| windows.contains(window)), "the medium has the chunk");
    // A chunk of one byte again and again has no pattern either.
    let parts = [&[7; 10_000][..]];
    tier.put(&mut [PutItem::with_sections(content_key(1), &parts, 1000)]);
    let stored = tier.inner().bytes_of(content_key(1)).unwrap();
    let pieces: std::collections::HashSet<&[u8]> = stored[SEALED_HEAD_BYTES..].chunks(8).collect();
    assert_eq!(pieces.len(), 1250);
}

#[test]
fn a_chunk_that_is_not_sealed_is_never_a_hit() {
    let plain = Checksummed::new(MapTier::new());
    put(&plain, 0, CHUNK_BYTES);
    let tier = encrypted(MapTier::new());
    tier.inner().overwrite(content_key(0), &plain.inner().bytes_of(content_key(0)).unwrap());
    assert!(matches!(get(&tier, 0, CHUNK_BYTES), GetOutcome::Corrupt("sealed head magic")));
    // Nor the other way round.
    let sealed = tier_with_chunk();
    plain.inner().overwrite(content_key(0), &sealed.inner().bytes_of(content_key(0)).unwrap());
    assert!(matches!(get(&plain, 0, CHUNK_BYTES), GetOutcome::Corrupt(_)));
}

#[test]
fn after_a_rotation_old_chunks_are_read_and_new_ones_have_the_new_key() {
    let (old, new) = (KeyRing::parse(OLD).unwrap(), KeyRing::parse(NEW).unwrap());
    let file = KeyFile::new(&[OLD]);
    let tier = Encrypted::new(MapTier::new(), file.open());
    put_sections(&tier, 0);
    file.write(&[NEW, OLD]);
    put_sections(&tier, 1);
    file.clock.advance(Duration::from_secs(1));
    put_sections(&tier, 2);
    let sealed_with = |chunk_idx| {
        let stored = tier.inner().bytes_of(content_key(chunk_idx)).unwrap();
        SealedHead::decode(&stored[..SEALED_HEAD_BYTES]).unwrap().key_id()
    };
    assert_eq!(sealed_with(0), old.sealing().id());
    assert_eq!(sealed_with(1), old.sealing().id(), "the file is looked at once a second");
    assert_eq!(sealed_with(2), new.sealing().id());
    for chunk_idx in 0..3 {
        assert!(get(&tier, chunk_idx, CHUNK_BYTES).is_hit());
    }
    file.change(&[NEW]);
    for (chunk_idx, is_hit) in [(0, false), (1, false), (2, true)] {
        let outcome = get(&tier, chunk_idx, CHUNK_BYTES);
        assert_eq!(outcome.is_hit(), is_hit, "chunk {chunk_idx}: {outcome:?}");
        assert!(is_hit || matches!(outcome, GetOutcome::Miss), "chunk {chunk_idx}: {outcome:?}");
    }
    assert_eq!((detail(&tier, "unknown_key_reads"), detail(&tier, "corrupt_reads")), (2, 0));
    // Another node may still have the key: nothing was deleted.
    file.change(&[NEW, OLD]);
    assert!(get(&tier, 0, CHUNK_BYTES).is_hit());
}

#[test]
fn a_chunk_that_cannot_be_opened_makes_way_for_the_next_put_of_its_name() {
    let file = KeyFile::new(&[OLD]);
    let tier = Encrypted::new(MapTier::new(), file.open());
    put_sections(&tier, 0);
    file.change(&[NEW]);
    put_sections(&tier, 1);
    // One from before there were keys, one with a damaged head, one without.
    let plain = Checksummed::new(MapTier::new());
    put(&plain, 2, CHUNK_BYTES);
    tier.inner().overwrite(content_key(2), &plain.inner().bytes_of(content_key(2)).unwrap());
    put_sections(&tier, 3);
    let mut bytes = tier.inner().bytes_of(content_key(3)).unwrap().to_vec();
    bytes[200] ^= 1;
    tier.inner().overwrite(content_key(3), &bytes);
    tier.inner().overwrite(content_key(4), &[1; 100]);
    assert!(matches!(get(&tier, 0, CHUNK_BYTES), GetOutcome::Miss));
    let outcomes = put_batch(&tier, 0..6, CHUNK_BYTES);
    let are_stored: Vec<bool> =
        outcomes.iter().map(|outcome| matches!(outcome, PutOutcome::Stored)).collect();
    assert_eq!(are_stored, [true, false, true, true, true, true], "{outcomes:?}");
    assert!(get_batch(&tier, 0..6, CHUNK_BYTES).iter().all(GetOutcome::is_hit));
    let outcomes = put_batch(&tier, 0..6, CHUNK_BYTES);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Present)), "{outcomes:?}");
}

#[test]
fn a_chunk_of_other_tokens_keeps_its_name() {
    let tier = encrypted(MapTier::new());
    let parts = [&[1; CHUNK_BYTES][..]];
    tier.put(&mut [PutItem::new(content_key(0), &parts).for_tokens(MINE)]);
    let mut batch = [PutItem::new(content_key(0), &parts).for_tokens(THEIRS)];
    tier.put(&mut batch);
    assert!(matches!(batch[0].outcome, PutOutcome::Present), "{:?}", batch[0].outcome);
    assert!(get_range_of(&tier, content_key(0), MINE, 0, CHUNK_BYTES).0.is_hit());
}

#[test]
fn a_key_file_that_is_gone_wrong_or_open_to_others_changes_nothing() {
    let file = KeyFile::new(&[OLD]);
    let tier = Encrypted::new(MapTier::new(), file.open());
    put_sections(&tier, 0);
    let still_works = || {
        file.clock.advance(Duration::from_secs(1));
        assert!(get(&tier, 0, CHUNK_BYTES).is_hit());
        tier.delete(&[content_key(1)]).unwrap();
        put_sections(&tier, 1);
        assert!(get(&tier, 1, CHUNK_BYTES).is_hit());
    };
    std::fs::remove_file(&file.path).unwrap();
    still_works();
    file.write(&["no key"]);
    still_works();
    file.write(&[NEW]);
    set_mode(&file.path, 0o644);
    still_works();
    set_mode(&file.path, 0o640);
    file.clock.advance(Duration::from_secs(1));
    assert!(matches!(get(&tier, 0, CHUNK_BYTES), GetOutcome::Miss), "the mode is a change too");
}

#[test]
fn a_key_file_that_others_can_use_is_refused() {
    let file = KeyFile::new(&[OLD]);
    for (mode, is_refused) in [
        (0o644, true),
        (0o604, true),
        (0o602, true),
        (0o660, true),
        (0o640, false),
        (0o440, false),
        (0o400, false),
        (0o600, false),
    ] {
        set_mode(&file.path, mode);
        let opened = EncryptionKeys::open(&file.path);
        assert_eq!(opened.is_err(), is_refused, "{mode:o}: {opened:?}");
        if let Err(error) = opened {
            assert!(error.to_string().contains("allowed: 0400, 0600"), "{error}");
        }
    }
    let missing = EncryptionKeys::open("/nowhere/keys").unwrap_err();
    assert!(missing.to_string().contains("/nowhere/keys"), "{missing}");
    set_mode(&file.path, 0o600);
    std::fs::write(&file.path, vec![b'#'; 70_000]).unwrap();
    assert!(EncryptionKeys::open(&file.path).unwrap_err().to_string().contains("at most 65536 bytes"));
}

#[test]
fn a_section_is_one_range_of_the_medium_and_a_cut_one_is_read_again() {
    let tier = encrypted(Metered::new(MapTier::new()));
    put_batch(&tier, 0..5, 10_000);
    assert_eq!(asked(tier.inner(), "put"), (1, 5));
    assert!(get_batch(&tier, 0..5, 10_000).iter().all(GetOutcome::is_hit));
    assert_eq!(asked(tier.inner(), "get"), (1, 5));
    let tier = encrypted(Metered::new(MapTier::new()));
    put_sections(&tier, 0);
    assert!(get_range(&tier, SECTION_BYTES, SECTION_BYTES).0.is_hit());
    assert_eq!(asked(tier.inner(), "get"), (1, 1));
    assert_eq!(tier.inner().snapshot().operation("get").unwrap().n_bytes, 4096 + SECTION_BYTES as u64);
    assert!(get_range(&tier, SECTION_BYTES + 1, SECTION_BYTES).0.is_hit());
    assert_eq!(asked(tier.inner(), "get"), (3, 3));
}

#[test]
fn a_batch_of_more_than_fits_is_stored_in_groups() {
    let tier = encrypted(Metered::new(MapTier::new()));
    let chunk_bytes = 30 << 20;
    assert!(put_batch(&tier, 0..5, chunk_bytes).iter().all(PutOutcome::is_present));
    assert_eq!(asked(tier.inner(), "put"), (3, 5));
    for chunk_idx in 0..5 {
        assert!(get(&tier, chunk_idx, chunk_bytes).is_hit());
    }
}

#[test]
fn lengths_of_keys_are_those_of_chunks() {
    let tier = tier_with_chunk();
    let mut visited = Vec::new();
    tier.visit_keys(&mut |key, n_bytes| visited.push((key, n_bytes)));
    assert_eq!(visited, [(content_key(0), CHUNK_BYTES as u64)]);
}

#[test]
fn a_chunk_replaced_between_two_reads_is_no_damage() {
    // The tier is interrupted in the second read of a range that cuts through a section.
    let map = Arc::new(MapTier::new());
    let keys = KeyFile::new(&[OLD]).open();
    let writer = Encrypted::new(Arc::clone(&map), Arc::clone(&keys));
    put_sections(&writer, 0);
    let n_reads = std::sync::atomic::AtomicUsize::new(0);
    let reader = Encrypted::new(
        crate::interrupted(map, move || {
            if n_reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 1 {
                writer.delete(&[content_key(0)]).unwrap();
                let chunk = content(content_key(0), CHUNK_BYTES);
                // In other sections.
                assert!(writer.put_one(content_key(0), &chunk).is_present());
            }
        }),
        keys,
    );
    let (outcome, _) = get_range(&reader, 110, 50);
    assert!(matches!(outcome, GetOutcome::Miss), "{outcome:?}");
    let (outcome, buffer) = get_range(&reader, 110, 50);
    assert!(outcome.is_hit() && buffer == content(content_key(0), CHUNK_BYTES)[110..160], "{outcome:?}");
}

proptest! {
    #[test]
    fn any_range_is_served_or_is_outside(
        n_bytes in 0_usize..5000,
        section_bytes in 0_usize..6000,
        offset in 0_usize..6000,
        asked_bytes in 0_usize..6000,
        cut in 0_usize..5000,
    ) {
        let tier = encrypted(MapTier::new());
        let chunk = content(content_key(0), n_bytes);
        let parts: [&[u8]; 2] = chunk.split_at(cut.min(n_bytes)).into();
        tier.put(&mut [PutItem::with_sections(content_key(0), &parts, section_bytes)]);
        let (outcome, buffer) = get_range(&tier, offset, asked_bytes);
        match chunk.get(offset..offset + asked_bytes) {
            Some(expected) => prop_assert!(outcome.is_hit() && buffer == expected, "{:?}", outcome),
            None => prop_assert!(matches!(outcome, GetOutcome::Corrupt("length")), "{:?}", outcome),
        }
    }

    #[test]
    fn no_damage_is_ever_a_hit_with_other_bytes(
        n_bytes in 1_usize..3000,
        section_bytes in 0_usize..1000,
        damages in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        n_kept in any::<prop::sample::Index>(),
        is_cut: bool,
        offset in 0_usize..3000,
    ) {
        let tier = encrypted(MapTier::new());
        let chunk = content(content_key(0), n_bytes);
        tier.put(&mut [PutItem::with_sections(content_key(0), &[&chunk], section_bytes)]);
        let stored = tier.inner().bytes_of(content_key(0)).unwrap();
        let mut bytes = stored.to_vec();
        for (place, value) in damages {
            *place.get_mut(&mut bytes) = value;
        }
        if is_cut {
            bytes.truncate(n_kept.index(bytes.len()));
        }
        let is_damaged = bytes != *stored;
        tier.inner().overwrite(content_key(0), &bytes);
        prop_assert!(!is_damaged || !get(&tier, 0, n_bytes).is_hit());
        let offset = offset.min(n_bytes);
        let (outcome, buffer) = get_range(&tier, offset, n_bytes - offset);
        prop_assert!(!outcome.is_hit() || buffer == chunk[offset..]);
    }
}
