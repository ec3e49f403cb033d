//! Chunks that are stored coded come back, whole and layer by layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvik_tier::conformance::{MapTier, content_key};
use kvik_tier::{
    Checksummed, ChunkKey, Coded, CodedSpaces, GetItem, GetOutcome, NamespaceId, PutItem, Tier, TierExt,
};
use kvik_types::{Dtype, Namespace};
use parking_lot::Mutex;

pub(crate) const N_LAYERS: usize = 3;
pub(crate) const N_TOKENS: usize = 64;
pub(crate) const TOKEN_LAYER_BYTES: usize = 2 * 2 * 16 * 2;
pub(crate) const SECTION_BYTES: usize = N_TOKENS * TOKEN_LAYER_BYTES;

pub(crate) fn namespace() -> Namespace {
    let layout = "kvik_paged_1/layers=3/heads=2/head_dim=16/block=16/bf16_le/keys=head,dim,token\
                  /values=head,token,dim";
    Namespace { model: "m".to_owned(), dtype: Dtype::BF16, layout: layout.to_owned(), tenant: String::new() }
}

pub(crate) fn key() -> ChunkKey {
    ChunkKey { namespace: NamespaceId::from(&namespace()), ..content_key(0) }
}

/// Numbers around 1, as bf16.
pub(crate) fn chunk() -> Vec<u8> {
    let number = |idx: usize| 1.0 + ((idx * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.7;
    let bf16 = |idx: usize| ((number(idx).to_bits() >> 16) as u16).to_le_bytes();
    (0..N_LAYERS * SECTION_BYTES / 2).flat_map(bf16).collect()
}

pub(crate) fn coded<T: Tier>(inner: T, codec: &str, allowed_lossy: &[&str]) -> Coded<T> {
    let spaces = Arc::new(CodedSpaces::default());
    spaces.learn(&namespace(), TOKEN_LAYER_BYTES as u64);
    let allowed: Vec<String> = allowed_lossy.iter().map(|name| (*name).to_owned()).collect();
    Coded::try_new(inner, codec, &allowed, spaces).unwrap()
}

pub(crate) fn put_chunk(tier: &dyn Tier) {
    let chunk = chunk();
    let parts = [&chunk[..100], &chunk[100..]];
    let mut batch = [PutItem::with_sections(key(), &parts, SECTION_BYTES)];
    tier.put(&mut batch);
    assert!(batch[0].outcome.is_present(), "{:?}", batch[0].outcome);
}

pub(crate) fn get_range(tier: &dyn Tier, offset: usize, n_bytes: usize) -> Result<Vec<u8>, GetOutcome> {
    let mut buffer = vec![0xee; n_bytes];
    let mut batch = [GetItem::range(key(), offset as u64, &mut buffer)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    if outcome.is_hit() { Ok(buffer) } else { Err(outcome) }
}

#[test]
fn a_chunk_takes_less_room_and_comes_back_whole_by_layers_and_cut() {
    let plain = Checksummed::new(MapTier::new());
    put_chunk(&plain);
    for codec in ["none", "lossless"] {
        let tier = coded(Checksummed::new(MapTier::new()), codec, &[]);
        put_chunk(&tier);
        let used = |tier: &dyn Tier| tier.stat().used_bytes.unwrap();
        assert_eq!(used(&tier) < used(&plain), codec == "lossless");
        let mut buffer = vec![0; chunk().len()];
        assert!(tier.get_one(key(), &mut buffer).is_hit());
        assert_eq!(buffer, chunk());
        for offset in [0, 1, SECTION_BYTES - 1, SECTION_BYTES, SECTION_BYTES + 5, 2 * SECTION_BYTES] {
            for n_bytes in [1, 100, SECTION_BYTES, chunk().len() - offset] {
                if offset + n_bytes <= chunk().len() {
                    let bytes = get_range(&tier, offset, n_bytes).unwrap();
                    assert_eq!(bytes, &chunk()[offset..][..n_bytes], "{n_bytes} from {offset}");
                }
            }
        }
        assert!(get_range(&tier, 0, chunk().len() + 1).is_err());
        assert!(!tier.get_one(key(), &mut vec![0; chunk().len() - 1]).is_hit());
    }
}

#[test]
fn a_lossy_codec_is_refused_unless_it_is_allowed_by_name() {
    let spaces = Arc::new(CodedSpaces::default());
    let open = |codec: &str, allowed: &[String]| {
        Coded::try_new(MapTier::new(), codec, allowed, Arc::clone(&spaces)).map(|_| ())
    };
    let message = open("int8", &[]).unwrap_err().to_string();
    assert!(message.starts_with("`codec` is int8; allowed: a lossless codec"), "{message}");
    assert!(open("int8", &["int4".to_owned()]).is_err());
    open("int8", &["int8".to_owned()]).unwrap();
    let message = open("zip", &[]).unwrap_err().to_string();
    assert_eq!(message, "`codec` is `zip`; allowed: none, lossless, fp8, int8, int4, cachegen");
}

#[test]
fn a_chunk_is_decoded_by_the_codec_it_was_coded_with_if_that_is_allowed() {
    let map = Arc::new(MapTier::new());
    let int8 = coded(Checksummed::new(Arc::clone(&map)), "int8", &["int8"]);
    put_chunk(&int8);
    let near = get_range(&int8, 0, chunk().len()).unwrap();
    assert_ne!(near, chunk());
    let number = |bytes: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
    let pairs = near.chunks_exact(2).zip(chunk().chunks_exact(2).map(number).collect::<Vec<_>>());
    assert!(pairs.into_iter().all(|(near, exact)| (number(near) - exact).abs() < 0.02));
    let lossless = coded(Checksummed::new(Arc::clone(&map)), "lossless", &["int8"]);
    assert_eq!(get_range(&lossless, 0, chunk().len()).unwrap(), near);
    let exact = coded(Checksummed::new(map), "lossless", &[]);
    let outcome = get_range(&exact, 0, chunk().len()).unwrap_err();
    assert!(matches!(outcome, GetOutcome::Corrupt("codec")), "{outcome:?}");
    assert!(exact.stat().details.contains(&("codec_not_allowed_reads", 1)));
}

#[test]
fn coded_chunks_and_others_are_never_found_by_each_other() {
    let map = Arc::new(MapTier::new());
    let plain = Checksummed::new(Arc::clone(&map));
    let coded = coded(Checksummed::new(map), "lossless", &[]);
    put_chunk(&coded);
    assert!(matches!(get_range(&plain, 0, SECTION_BYTES), Err(GetOutcome::Miss)));
    put_chunk(&plain);
    assert_eq!(coded.delete(&[key()]).unwrap(), 1);
    assert!(matches!(get_range(&coded, 0, SECTION_BYTES), Err(GetOutcome::Miss)));
    assert_eq!(get_range(&plain, 0, chunk().len()).unwrap(), chunk());
}

#[test]
fn a_layout_that_a_lossy_codec_does_not_know_is_coded_without_loss() {
    let tier = coded(Checksummed::new(MapTier::new()), "cachegen", &["cachegen"]);
    let (other, chunk) = (content_key(7), chunk());
    tier.put(&mut [PutItem::with_sections(other, &[&chunk], SECTION_BYTES)]);
    let mut buffer = vec![0; chunk.len()];
    assert!(tier.get_one(other, &mut buffer).is_hit());
    assert_eq!(buffer, chunk);
}

/// A map that does something else after each read.
struct Hooked<F> {
    map: MapTier,
    after_get: F,
}

impl<F> std::fmt::Debug for Hooked<F> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.map.fmt(formatter)
    }
}

impl<F: Fn(&MapTier, &mut [GetItem<'_>]) + Send + Sync> Tier for Hooked<F> {
    fn kind(&self) -> kvik_tier::TierKind {
        self.map.kind()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        self.map.put(batch);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        self.map.get(batch);
        (self.after_get)(&self.map, batch);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> kvik_tier::Result<()> {
        self.map.contains(keys, present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> kvik_tier::Result<usize> {
        self.map.delete(keys)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.map.visit_keys(visit);
    }

    fn flush(&self) -> kvik_tier::Result<()> {
        self.map.flush()
    }

    fn stat(&self) -> kvik_tier::TierStat {
        self.map.stat()
    }
}

/// Puts the chunk so that it is kept as it is: its sections are not equal.
fn put_as_it_is(tier: &dyn Tier) {
    tier.put(&mut [PutItem::with_sections(key(), &[&chunk()], 1000)]);
}

#[test]
fn bytes_that_were_changed_below_are_no_hit_also_without_checksums() {
    for put in [put_chunk, put_as_it_is] {
        let place = Arc::new(AtomicUsize::new(usize::MAX));
        let flipped = Arc::clone(&place);
        let after_get = move |_: &MapTier, batch: &mut [GetItem<'_>]| {
            let place = flipped.load(Ordering::Relaxed);
            for item in batch {
                if let Some(byte) = item.head.get_mut(place) {
                    *byte ^= 0x10;
                }
                let in_buffer = place.checked_sub(item.offset as usize);
                if let Some(byte) = in_buffer.and_then(|place| item.buffer.get_mut(place)) {
                    *byte ^= 0x10;
                }
            }
        };
        let tier = coded(Hooked { map: MapTier::new(), after_get }, "lossless", &[]);
        put(&tier);
        assert_eq!(get_range(&tier, 0, chunk().len()).unwrap(), chunk());
        // The rest of the page is zeros that say nothing.
        let said = 24 + N_LAYERS * 12;
        for flipped in (0..said).chain((4096..16_000).step_by(97)) {
            place.store(flipped, Ordering::Relaxed);
            let outcome = get_range(&tier, 0, chunk().len());
            assert!(
                outcome.as_ref().is_err() || outcome.as_ref().is_ok_and(|bytes| *bytes == chunk()),
                "{flipped}"
            );
        }
    }
}

#[test]
fn a_chunk_that_is_put_again_in_another_form_between_two_calls_is_read_right() {
    let stored_by = |put: fn(&dyn Tier)| {
        let tier = coded(MapTier::new(), "lossless", &[]);
        put(&tier);
        let mut stored = None;
        tier.inner().visit_keys(&mut |key, _| stored = Some((key, tier.inner().bytes_of(key).unwrap())));
        stored.unwrap()
    };
    let n_bytes = chunk().len();
    for (before, after) in
        [(put_as_it_is as fn(&dyn Tier), put_chunk as fn(&dyn Tier)), (put_chunk, put_as_it_is)]
    {
        for range in [0..n_bytes, 0..1, 5000..9000, n_bytes - 10..n_bytes] {
            let replacement = Mutex::new(Some(stored_by(after)));
            let after_get = move |map: &MapTier, _: &mut [GetItem<'_>]| {
                if let Some((key, bytes)) = replacement.lock().take() {
                    map.overwrite(key, &bytes);
                }
            };
            let tier = coded(Hooked { map: MapTier::new(), after_get }, "lossless", &[]);
            before(&tier);
            let read = get_range(&tier, range.start, range.len());
            assert_eq!(read.unwrap(), chunk()[range]);
        }
    }
}
