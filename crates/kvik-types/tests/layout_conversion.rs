//! Conversion between layouts, against an element by element reference that shares nothing with it.

use kvik_types::layout::{
    BINARY_HEADER_BYTES, BinaryFrame, KvLayout, KvPlacement, KvShape, Paging, VllmPagedOrder, convert,
};
use kvik_types::{BlockSize, Dtype, TypesError};
use proptest::prelude::*;

const SPLIT_LAYOUTS: [KvLayout; 10] = [
    KvLayout::Kv2Ltd,
    KvLayout::KvT2d,
    KvLayout::Kv2Td,
    KvLayout::Binary,
    KvLayout::VllmPaged(VllmPagedOrder::KvFirstNhd),
    KvLayout::VllmPaged(VllmPagedOrder::KvFirstHnd),
    KvLayout::VllmPaged(VllmPagedOrder::BlockFirstNhd),
    KvLayout::VllmPaged(VllmPagedOrder::BlockFirstHnd),
    KvLayout::VllmPaged(VllmPagedOrder::PackedHeads),
    KvLayout::TrtllmBlockMajor,
];
const MLA_LAYOUTS: [KvLayout; 3] =
    [KvLayout::KvMlaFmt, KvLayout::Binary, KvLayout::VllmPaged(VllmPagedOrder::Latent)];

/// A layout and, for a paged one, where the tokens lie.
#[derive(Clone, Debug)]
struct Side {
    layout: KvLayout,
    block_size: usize,
    n_pool_blocks: usize,
    block_table: Vec<u32>,
}

impl Side {
    fn placement(&self) -> KvPlacement<'_> {
        if !self.layout.is_paged() {
            return dense(self.layout);
        }
        let block_size = BlockSize::try_new(self.block_size).expect("generated sizes are at least 1");
        let paging = Paging::try_new(block_size, self.n_pool_blocks, &self.block_table)
            .expect("generated tables name blocks of the pool once");
        KvPlacement::paged(self.layout, paging).expect("the layout is paged")
    }

    /// Index of one element, written out for each layout.
    fn element(&self, shape: &KvShape, [kv, layer, token, head, idx]: [usize; 5]) -> usize {
        let KvShape { n_layers, n_tokens, n_kv_heads, head_dim, .. } = *shape;
        let inside_token = head * head_dim + idx;
        let token_width = n_kv_heads * head_dim;
        let dense = |outer: usize| (outer * n_tokens + token) * token_width + inside_token;
        let pool = self.n_pool_blocks;
        let size = self.block_size;
        let slot = token % size;
        let block = self.block_table.get(token / size).map_or(0, |block| *block as usize);
        let nhd = |outer: usize| ((outer * size + slot) * n_kv_heads + head) * head_dim + idx;
        let hnd = |outer: usize| ((outer * n_kv_heads + head) * size + slot) * head_dim + idx;
        match self.layout {
            KvLayout::Kv2Ltd | KvLayout::KvMlaFmt | KvLayout::Binary => dense(kv * n_layers + layer),
            KvLayout::KvT2d => ((layer * n_tokens + token) * 2 + kv) * token_width + inside_token,
            KvLayout::Kv2Td => dense(layer * 2 + kv),
            KvLayout::VllmPaged(VllmPagedOrder::KvFirstNhd) => nhd((layer * 2 + kv) * pool + block),
            KvLayout::VllmPaged(VllmPagedOrder::KvFirstHnd) => hnd((layer * 2 + kv) * pool + block),
            KvLayout::VllmPaged(VllmPagedOrder::BlockFirstNhd) => nhd((layer * pool + block) * 2 + kv),
            KvLayout::VllmPaged(VllmPagedOrder::BlockFirstHnd) => hnd((layer * pool + block) * 2 + kv),
            KvLayout::VllmPaged(VllmPagedOrder::PackedHeads) => {
                (((layer * pool + block) * n_kv_heads + head) * size + slot) * 2 * head_dim
                    + kv * head_dim
                    + idx
            }
            KvLayout::VllmPaged(VllmPagedOrder::Latent) => {
                ((layer * pool + block) * size + slot) * head_dim + idx
            }
            KvLayout::TrtllmBlockMajor => hnd((block * n_layers + layer) * 2 + kv),
            other => panic!("no reference for {other}"),
        }
    }

    fn n_header_bytes(&self) -> usize {
        if self.layout == KvLayout::Binary { BINARY_HEADER_BYTES } else { 0 }
    }
}

/// Writes `source` into `dest` one element at a time.
fn reference_copy(shape: &KvShape, is_mla: bool, from: &Side, source: &[u8], to: &Side, dest: &mut [u8]) {
    let size = shape.dtype.size_bytes();
    for kv in 0..if is_mla { 1 } else { 2 } {
        for layer in 0..shape.n_layers {
            for token in 0..shape.n_tokens {
                for head in 0..shape.n_kv_heads {
                    for idx in 0..shape.head_dim {
                        let position = [kv, layer, token, head, idx];
                        let read = from.n_header_bytes() + from.element(shape, position) * size;
                        let write = to.n_header_bytes() + to.element(shape, position) * size;
                        dest[write..write + size].copy_from_slice(&source[read..read + size]);
                    }
                }
            }
        }
    }
}

fn arbitrary_side(layouts: &'static [KvLayout], n_tokens: usize) -> impl Strategy<Value = Side> {
    (prop::sample::select(layouts), 1usize..7, 0usize..4).prop_flat_map(
        move |(layout, block_size, n_unused)| {
            let n_blocks = n_tokens.div_ceil(block_size);
            let n_pool_blocks = n_blocks + n_unused;
            let ids: Vec<u32> = (0..n_pool_blocks as u32).collect();
            // Unshuffled tables have neighboring blocks, which the conversion joins.
            prop_oneof![Just(ids.clone()), Just(ids).prop_shuffle()].prop_map(move |mut block_table| {
                block_table.truncate(n_blocks);
                Side { layout, block_size, n_pool_blocks, block_table }
            })
        },
    )
}

fn arbitrary_shape() -> impl Strategy<Value = (KvShape, bool)> {
    let dtype = prop::sample::select(&Dtype::ALL[..]);
    (1usize..4, 1usize..20, 1usize..4, 1usize..6, dtype, any::<bool>()).prop_map(
        |(n_layers, n_tokens, n_kv_heads, head_dim, dtype, is_mla)| {
            let n_kv_heads = if is_mla { 1 } else { n_kv_heads };
            (KvShape { n_layers, n_tokens, n_kv_heads, head_dim, dtype }, is_mla)
        },
    )
}

fn arbitrary_case() -> impl Strategy<Value = (KvShape, bool, Side, Side, u64)> {
    arbitrary_shape().prop_flat_map(|(shape, is_mla)| {
        let layouts = if is_mla { &MLA_LAYOUTS[..] } else { &SPLIT_LAYOUTS[..] };
        let side = || arbitrary_side(layouts, shape.n_tokens);
        (Just(shape), Just(is_mla), side(), side(), any::<u64>())
    })
}

/// Bytes that look random and differ by seed.
fn noise(n_bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(n_bytes).collect()
}

fn canonical_side(is_mla: bool) -> Side {
    let layout = if is_mla { KvLayout::KvMlaFmt } else { KvLayout::Kv2Ltd };
    Side { layout, block_size: 1, n_pool_blocks: 0, block_table: Vec::new() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_two_layouts_round_trip_and_only_mapped_slots_are_written(
        (shape, is_mla, first, second, seed) in arbitrary_case(),
    ) {
        let canonical = canonical_side(is_mla);
        let bytes_of = |side: &Side| side.placement().buffer_bytes(&shape, is_mla).unwrap();
        let original = noise(bytes_of(&canonical), seed);

        let mut first_bytes = noise(bytes_of(&first), seed ^ 2);
        let mut expected = first_bytes.clone();
        convert(&shape, &canonical.placement(), &original, &first.placement(), &mut first_bytes).unwrap();
        reference_copy(&shape, is_mla, &canonical, &original, &first, &mut expected);
        prop_assert_eq!(&first_bytes[first.n_header_bytes()..], &expected[first.n_header_bytes()..]);

        let mut second_bytes = noise(bytes_of(&second), seed ^ 4);
        let mut expected = second_bytes.clone();
        convert(&shape, &first.placement(), &first_bytes, &second.placement(), &mut second_bytes).unwrap();
        reference_copy(&shape, is_mla, &first, &first_bytes, &second, &mut expected);
        prop_assert_eq!(&second_bytes[second.n_header_bytes()..], &expected[second.n_header_bytes()..]);

        let mut back = vec![0; original.len()];
        convert(&shape, &second.placement(), &second_bytes, &canonical.placement(), &mut back).unwrap();
        prop_assert_eq!(back, original);
    }

    #[test]
    fn decoding_a_frame_takes_any_bytes(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        looks_right in any::<bool>(),
    ) {
        if looks_right && bytes.len() >= 8 {
            bytes[..8].copy_from_slice(b"KVBF\x01\0\0\x02");
        }
        let is_refused = matches!(BinaryFrame::decode(&bytes), Err(TypesError::Corrupt { .. }));
        prop_assert!(is_refused);
    }
}

fn small_shape() -> KvShape {
    KvShape { n_layers: 2, n_tokens: 3, n_kv_heads: 1, head_dim: 2, dtype: Dtype::BF16 }
}

fn dense(layout: KvLayout) -> KvPlacement<'static> {
    KvPlacement::dense(layout).expect("the tests ask for dense layouts")
}

fn small_frame() -> Vec<u8> {
    let mut frame = vec![0; BINARY_HEADER_BYTES + 48];
    convert(&small_shape(), &dense(KvLayout::Kv2Ltd), &noise(48, 1), &dense(KvLayout::Binary), &mut frame)
        .expect("both buffers have the right length");
    frame
}

#[test]
fn a_frame_gives_back_shape_and_payload() {
    let frame = small_frame();
    let decoded = BinaryFrame::decode(&frame).unwrap();
    assert_eq!(*decoded.shape(), small_shape());
    assert!(!decoded.is_mla());
    assert_eq!(decoded.payload(), noise(48, 1));
}

/// These bytes are stored: a change needs another version.
#[test]
fn the_header_of_a_frame_is_pinned() {
    let frame = small_frame();
    let expected = b"KVBF\x01\0\0\x03\x02\0\0\0\x03\0\0\0\x01\0\0\0\x02\0\0\0\x30\0\0\0\0\0\0\0";
    assert_eq!(frame[..32], expected[..]);
}

#[test]
fn every_changed_or_missing_byte_of_a_frame_is_seen() {
    let frame = small_frame();
    for idx in 0..frame.len() {
        for bit in 0..8 {
            let mut damaged = frame.clone();
            damaged[idx] ^= 1 << bit;
            assert!(
                matches!(BinaryFrame::decode(&damaged), Err(TypesError::Corrupt { .. })),
                "byte {idx} bit {bit}"
            );
        }
        assert!(BinaryFrame::decode(&frame[..idx]).is_err());
    }
    assert!(BinaryFrame::decode(&[&frame[..], &[0]].concat()).is_err());
}

#[test]
fn a_frame_of_another_shape_is_refused_before_anything_is_written() {
    let asked = KvShape { n_layers: 3, n_tokens: 2, ..small_shape() };
    let mut dest = [7; 48];
    let result =
        convert(&asked, &dense(KvLayout::Binary), &small_frame(), &dense(KvLayout::Kv2Ltd), &mut dest);
    assert!(result.unwrap_err().to_string().starts_with("`source frame` is KvShape { n_layers: 2"));
    assert_eq!(dest, [7; 48]);
}

#[test]
fn mla_latents_never_become_keys_and_values() {
    let shape = small_shape();
    let mut frame = vec![0; BINARY_HEADER_BYTES + 24];
    convert(&shape, &dense(KvLayout::KvMlaFmt), &[1; 24], &dense(KvLayout::Binary), &mut frame).unwrap();
    assert!(BinaryFrame::decode(&frame).unwrap().is_mla());
    for (from, source, to, n_dest_bytes) in [
        (KvLayout::KvMlaFmt, &[1; 24][..], KvLayout::Kv2Ltd, 48),
        (KvLayout::Kv2Ltd, &[1; 48], KvLayout::KvMlaFmt, 24),
        (KvLayout::Binary, &frame, KvLayout::Kv2Td, 48),
    ] {
        let mut dest = vec![7; n_dest_bytes];
        let error = convert(&shape, &dense(from), source, &dense(to), &mut dest).unwrap_err();
        assert!(matches!(error, TypesError::IncompatibleLayouts { .. }), "{error}");
        assert_eq!(dest, vec![7; n_dest_bytes]);
    }
}

#[test]
fn wrong_sizes_are_refused_with_the_right_ones() {
    let shape = small_shape();
    let (canonical, layered) = (dense(KvLayout::Kv2Ltd), dense(KvLayout::KvT2d));
    let error = convert(&shape, &canonical, &[0; 47], &layered, &mut [0; 48]).unwrap_err();
    assert_eq!(error.to_string(), "`source` has 47 bytes; allowed: exactly 48");
    let error = convert(&shape, &canonical, &[0; 48], &layered, &mut [0; 49]).unwrap_err();
    assert_eq!(error.to_string(), "`dest` has 49 bytes; allowed: exactly 48");
    let error = convert(&KvShape { n_tokens: 0, ..shape }, &canonical, &[], &layered, &mut []).unwrap_err();
    assert_eq!(error.to_string(), "`n_tokens` is 0; allowed: 1 to 4294967295");
    let huge = KvShape { n_layers: 1 << 31, n_tokens: 1 << 31, ..shape };
    assert!(canonical.buffer_bytes(&huge, false).unwrap_err().to_string().contains("at most"));
    let error = canonical.buffer_bytes(&shape, true).unwrap_err();
    assert_eq!(error.to_string(), "`is_mla` is true; allowed: false for kv_2ltd");
    let heads = KvShape { n_kv_heads: 2, ..shape };
    let error = dense(KvLayout::KvMlaFmt).buffer_bytes(&heads, true).unwrap_err();
    assert_eq!(error.to_string(), "`n_kv_heads` is 2; allowed: 1, as MLA has one latent a token");
}

#[test]
fn a_block_table_that_does_not_fit_is_refused() {
    let size = BlockSize::try_new(2).unwrap();
    let outside = Paging::try_new(size, 4, &[0, 4]).unwrap_err().to_string();
    assert_eq!(
        outside,
        "`block_table` is naming block 4; allowed: block ids below 4, the blocks of the pool"
    );
    let twice = Paging::try_new(size, 4, &[3, 1, 3]).unwrap_err().to_string();
    assert_eq!(twice, "`block_table` is naming block 3 twice; allowed: each block id once");
    let paging = Paging::try_new(size, 4, &[0]).unwrap();
    let short = KvPlacement::paged(KvLayout::TrtllmBlockMajor, paging).unwrap();
    let message = short.buffer_bytes(&small_shape(), false).unwrap_err().to_string();
    assert_eq!(
        message,
        "`block_table` is 1 entries long; allowed: exactly 2 entries, for 3 tokens in blocks of 2"
    );
    assert!(KvPlacement::paged(KvLayout::Kv2Ltd, paging).is_err());
    assert!(KvPlacement::dense(KvLayout::TrtllmBlockMajor).is_err());
}

#[test]
fn fingerprints_tell_layouts_and_geometries_apart() {
    let shape = small_shape();
    let size = BlockSize::try_new(2).unwrap();
    let paging = Paging::try_new(size, 4, &[3, 1]).unwrap();
    let paged = KvPlacement::paged(KvLayout::VllmPaged(VllmPagedOrder::PackedHeads), paging).unwrap();
    assert_eq!(paged.fingerprint(&shape), "vllm_packed_heads/layers=2/heads=1/head_dim=2/block=2");
    assert_eq!(dense(KvLayout::Kv2Ltd).fingerprint(&shape), "kv_2ltd/layers=2/heads=1/head_dim=2");
    let longer = KvShape { n_tokens: 100, ..shape };
    assert_eq!(dense(KvLayout::Kv2Ltd).fingerprint(&shape), dense(KvLayout::Kv2Ltd).fingerprint(&longer));
}
