//! What every codec promises, on every instruction set of this machine.

use kvik_codec::{
    ChunkLayout, ChunkShape, Codec, CodedHead, Isa, NAMES, by_name, by_name_on, decode, decode_layer, encode,
    round_trip,
};
use kvik_types::Dtype;
use proptest::prelude::*;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

const LOSSY: [&str; 4] = ["fp8", "int8", "int4", "cachegen"];

fn paged(dtype: Dtype, n_layers: usize, n_tokens: usize, n_kv_heads: usize, head_dim: usize) -> ChunkShape {
    ChunkShape { n_layers, n_tokens, dtype, layout: ChunkLayout::KvikPaged { n_kv_heads, head_dim } }
}

/// Numbers that look like KV: every element of a row has a center of its own.
fn numbers(shape: &ChunkShape, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
    };
    let n_elements = shape.chunk_bytes() / shape.dtype.size_bytes();
    (0..n_elements).map(|idx| next() + next() + next() * next() + (idx / 16 % 7) as f32 * 0.3).collect()
}

fn bytes_of(dtype: Dtype, numbers: &[f32]) -> Vec<u8> {
    let wide: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    let mut bytes = vec![0; numbers.len() * dtype.size_bytes()];
    kvik_types::layout::convert_dtype(&wide, Dtype::F32, &mut bytes, dtype).expect("floats convert");
    bytes
}

fn numbers_of(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let mut wide = vec![0; bytes.len() / dtype.size_bytes() * 4];
    kvik_types::layout::convert_dtype(bytes, dtype, &mut wide, Dtype::F32).expect("floats convert");
    wide.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn coded(codec: &dyn Codec, shape: &ChunkShape, raw: &[u8]) -> Vec<u8> {
    let mut coded = Vec::new();
    encode(codec, shape, raw, &mut coded).expect("the codec takes the shape");
    coded
}

/// Shapes of all layouts, with heads that fill no vector and tails of chunks.
fn shapes() -> Vec<ChunkShape> {
    let mut shapes = Vec::new();
    for dtype in DTYPES {
        for (n_tokens, n_kv_heads, head_dim) in
            [(16, 1, 2), (48, 2, 24), (64, 4, 32), (256, 2, 64), (32, 1, 80)]
        {
            shapes.push(paged(dtype, 3, n_tokens, n_kv_heads, head_dim));
            let layout = ChunkLayout::KeysThenValues { n_kv_heads, head_dim };
            shapes.push(ChunkShape { n_tokens: n_tokens - 5, layout, ..paged(dtype, 2, 16, 1, 2) });
        }
    }
    shapes
}

#[test]
fn coded_and_decoded_bytes_are_the_same_on_every_instruction_set() {
    for (shape_idx, shape) in shapes().into_iter().enumerate() {
        let raw = bytes_of(shape.dtype, &numbers(&shape, shape_idx as u64));
        for name in NAMES {
            let reference = by_name_on(name, Isa::Scalar).unwrap();
            let coded_reference = coded(&*reference, &shape, &raw);
            let back = round_trip(&*reference, &shape, &raw).unwrap();
            assert_eq!(decode(&shape, &coded_reference).unwrap(), back);
            for isa in Isa::available() {
                let codec = by_name_on(name, isa).unwrap();
                assert_eq!(coded(&*codec, &shape, &raw), coded_reference, "{name} {isa} {shape:?}");
                assert_eq!(round_trip(&*codec, &shape, &raw).unwrap(), back, "{name} {isa} {shape:?}");
            }
        }
    }
}

/// Chunks that were written stay readable: what decodes a coded chunk of today must give the same bytes for ever. A change
/// here needs a new version in the head.
#[test]
fn the_bytes_of_every_codec_are_those_of_version_1() {
    let shape = paged(Dtype::BF16, 3, 48, 2, 24);
    let raw = bytes_of(shape.dtype, &numbers(&shape, 9));
    let sum_of = |bytes: &[u8]| {
        bytes
            .iter()
            .fold(0_u64, |sum, byte| sum.wrapping_mul(0x0100_0000_01b3).wrapping_add(u64::from(*byte) + 1))
    };
    let sums = NAMES.map(|name| {
        let codec = by_name(name).unwrap();
        let coded = coded(&*codec, &shape, &raw);
        (name, coded.len(), sum_of(&coded), sum_of(&decode(&shape, &coded).unwrap()))
    });
    let expected = [
        ("none", 27_684, 3_149_786_710_699_751_029, 10_713_163_115_065_849_674),
        ("lossless", 18_590, 10_736_921_049_379_483_357, 10_713_163_115_065_849_674),
        ("fp8", 13_911, 5_353_824_730_650_012_775, 10_684_734_637_911_517_575),
        ("int8", 14_727, 14_999_170_214_167_626_308, 14_630_472_371_029_359_580),
        ("int4", 10_407, 6_746_598_739_195_479_468, 14_521_620_911_584_752_940),
        ("cachegen", 10_029, 6_552_594_367_193_635_489, 16_676_187_392_592_192_753),
    ];
    assert_eq!(sums, expected);
}

#[test]
fn a_layer_is_decoded_on_its_own_and_the_head_says_where_it_lies() {
    let shape = paged(Dtype::BF16, 5, 64, 2, 32);
    let raw = bytes_of(shape.dtype, &numbers(&shape, 1));
    for name in NAMES {
        let codec = by_name(name).unwrap();
        let coded = coded(&*codec, &shape, &raw);
        let back = round_trip(&*codec, &shape, &raw).unwrap();
        let head = CodedHead::decode(&coded).unwrap();
        assert_eq!((head.shape, head.codec_id), (shape, codec.id()));
        assert_eq!(head.coded_bytes(), coded.len() as u64);
        for layer in 0..5 {
            let expected = &back[layer * shape.section_bytes()..][..shape.section_bytes()];
            let mut section = vec![1; shape.section_bytes()];
            decode_layer(&coded, layer, &mut section).unwrap();
            assert_eq!(section, expected, "{name}");
            let range = head.layer_range(layer..layer + 1);
            let bytes = &coded[range.start as usize..range.end as usize];
            section.fill(1);
            codec.decode_layer(&shape, layer, bytes, &mut section).unwrap();
            assert_eq!(section, expected, "{name}");
        }
        assert!(decode_layer(&coded, 5, &mut vec![0; shape.section_bytes()]).is_err());
    }
}

#[test]
fn int8_keys_are_within_half_a_step_of_their_row_and_values_of_their_token() {
    let shape = paged(Dtype::F32, 1, 64, 2, 32);
    let numbers = numbers(&shape, 2);
    let back = round_trip(&*by_name("int8").unwrap(), &shape, &bytes_of(Dtype::F32, &numbers)).unwrap();
    let back = numbers_of(Dtype::F32, &back);
    let key = |token: usize, row: usize| {
        let (block, slot, head, dim) = (token / 16, token % 16, row / 32, row % 32);
        (block * 2 + head) * 1024 + dim * 16 + slot
    };
    let value = |token: usize, row: usize| {
        let (block, slot, head, dim) = (token / 16, token % 16, row / 32, row % 32);
        (block * 2 + head) * 1024 + 512 + slot * 32 + dim
    };
    for row in 0..64 {
        let places: Vec<usize> = (0..64).map(|token| key(token, row)).collect();
        let of = |place: &usize| numbers[*place];
        let low = places.iter().map(of).fold(f32::INFINITY, f32::min);
        let high = places.iter().map(of).fold(f32::NEG_INFINITY, f32::max);
        // Center and step are rounded to eight bits.
        let bound = ((high - low) / 254.0 + high.abs().max(low.abs()) / 256.0 / 127.0) * 1.01 / 2.0 + 1e-6;
        assert!(places.iter().all(|place| (numbers[*place] - back[*place]).abs() <= bound), "row {row}");
    }
    for token in 0..64 {
        let places: Vec<usize> = (0..64).map(|row| value(token, row)).collect();
        let largest = places.iter().map(|place| numbers[*place].abs()).fold(0.0, f32::max);
        let bound = largest / 127.0 * 1.01 / 2.0;
        assert!(places.iter().all(|place| (numbers[*place] - back[*place]).abs() <= bound), "token {token}");
    }
}

#[test]
fn errors_of_lossy_codecs_are_as_large_as_they_say() {
    let shape = paged(Dtype::BF16, 6, 256, 4, 64);
    let raw = bytes_of(shape.dtype, &numbers(&shape, 3));
    let exact = numbers_of(shape.dtype, &raw);
    let power: f64 = exact.iter().map(|number| f64::from(*number).powi(2)).sum();
    for (name, most, least_ratio) in
        [("fp8", 0.03, 1.95), ("int8", 0.006, 1.9), ("int4", 0.06, 3.15), ("cachegen", 0.09, 3.0)]
    {
        let codec = by_name(name).unwrap();
        let back = numbers_of(shape.dtype, &round_trip(&*codec, &shape, &raw).unwrap());
        let error: f64 = exact.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let relative = (error / power).sqrt();
        assert!(relative < most, "{name}: {relative}");
        let ratio = raw.len() as f64 / coded(&*codec, &shape, &raw).len() as f64;
        assert!(ratio > least_ratio, "{name}: {ratio}");
    }
}

#[test]
fn a_layer_with_numbers_that_have_no_scale_comes_back_as_it_was() {
    for dtype in DTYPES {
        let shape = paged(dtype, 3, 32, 2, 16);
        let mut numbers = numbers(&shape, 4);
        let layer_elements = numbers.len() / 3;
        numbers[5] = f32::NAN;
        numbers[layer_elements + 7] = f32::NEG_INFINITY;
        let raw = bytes_of(dtype, &numbers);
        for name in LOSSY {
            let back = round_trip(&*by_name(name).unwrap(), &shape, &raw).unwrap();
            let (kept, coded) = back.split_at(2 * shape.section_bytes());
            assert_eq!(kept, &raw[..2 * shape.section_bytes()], "{name} {dtype}");
            assert!(numbers_of(dtype, coded).iter().all(|number| number.is_finite()), "{name} {dtype}");
            assert_ne!(coded, &raw[2 * shape.section_bytes()..], "{name} {dtype}");
        }
    }
}

#[test]
fn what_is_finite_stays_finite_at_the_ends_of_the_types() {
    for dtype in DTYPES {
        let largest = if dtype == Dtype::F16 { 65504.0 } else { 1.2e30 };
        let shape = paged(dtype, 1, 32, 1, 16);
        for pattern in [
            [largest, -largest, largest, largest],
            [0.0, -0.0, 0.0, -0.0],
            [f32::from_bits(1), -f32::from_bits(9), 1e-40, -1e-39],
            [6e-8, -1.2e-7, 0.0, 3e-5],
            [largest, 1e-30, -1e-30, 0.0],
        ] {
            let n_elements = shape.chunk_bytes() / dtype.size_bytes();
            let numbers: Vec<f32> = pattern.iter().cycle().take(n_elements).copied().collect();
            let raw = bytes_of(dtype, &numbers);
            for name in LOSSY {
                let back = round_trip(&*by_name(name).unwrap(), &shape, &raw)
                    .unwrap_or_else(|error| panic!("{name} {dtype} {pattern:?}: {error}"));
                let back = numbers_of(dtype, &back);
                let worst = back.iter().zip(&numbers).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let allowed =
                    pattern.iter().fold(0.0_f32, |most, number| most.max(number.abs())) * 0.51 + 1e-18;
                assert!(worst <= allowed, "{name} {dtype} {pattern:?}: {worst}");
            }
        }
    }
}

#[test]
fn what_a_codec_does_not_know_is_refused_by_name() {
    let shape =
        ChunkShape { layout: ChunkLayout::Opaque { token_elements: 96 }, ..paged(Dtype::BF16, 2, 16, 1, 2) };
    let raw = vec![7; shape.chunk_bytes()];
    for name in LOSSY {
        let codec = by_name(name).unwrap();
        let mut out = vec![1, 2];
        let message = encode(&*codec, &shape, &raw, &mut out).unwrap_err().to_string();
        assert_eq!(
            message,
            format!("`layout` is opaque; allowed: kvik_paged or kv_2td for the codec `{name}`")
        );
        assert_eq!(out, [1, 2]);
        let odd = codec.check(&paged(Dtype::BF16, 2, 16, 2, 7)).unwrap_err().to_string();
        assert_eq!(odd, format!("`head_dim` is 7; allowed: even, 2 to 512, for the codec `{name}`"));
    }
    let lossless = by_name("lossless").unwrap();
    assert_eq!(round_trip(&*lossless, &shape, &raw).unwrap(), raw);
    for name in NAMES {
        let codec = by_name(name).unwrap();
        let shape = paged(Dtype::BF16, 2, 16, 1, 2);
        assert!(encode(&*codec, &shape, &raw, &mut Vec::new()).is_err());
        assert!(codec.check(&ChunkShape { dtype: Dtype::U8, ..shape }).is_err());
        assert!(codec.encode_layer(&shape, 0, &[0; 3], &mut Vec::new()).is_err());
        assert!(codec.decode_layer(&shape, 0, &[0; 3], &mut [0; 3]).is_err());
    }
}

/// Any layout and any type, small.
fn any_shape() -> impl Strategy<Value = ChunkShape> {
    let layout = (0..3_usize, 1..4_usize, 1..20_usize).prop_map(|(kind, n_kv_heads, half_dim)| match kind {
        0 => ChunkLayout::KvikPaged { n_kv_heads, head_dim: 2 * half_dim },
        1 => ChunkLayout::KeysThenValues { n_kv_heads, head_dim: 2 * half_dim },
        _ => ChunkLayout::Opaque { token_elements: half_dim },
    });
    (layout, 1..3_usize, 1..5_usize, 0..3_usize).prop_map(|(layout, n_layers, n_blocks, dtype)| ChunkShape {
        n_layers,
        n_tokens: 16 * n_blocks,
        dtype: DTYPES[dtype],
        layout,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn lossless_gives_back_any_bits(shape in any_shape(), seed in any::<u64>(), mask in any::<u32>()) {
        let mut state = seed;
        let raw: Vec<u8> = (0..shape.chunk_bytes())
            .map(|idx| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8 & mask.to_le_bytes()[idx % 4]
            })
            .collect();
        for isa in Isa::available() {
            let codec = by_name_on("lossless", isa).unwrap();
            prop_assert_eq!(&round_trip(&*codec, &shape, &raw).unwrap(), &raw);
        }
    }

    #[test]
    fn any_bits_are_coded_by_every_codec_that_takes_the_shape(shape in any_shape(), seed in any::<u64>()) {
        let mut state = seed;
        let raw: Vec<u8> = (0..shape.chunk_bytes())
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        for name in NAMES {
            let codec = by_name(name).unwrap();
            if codec.check(&shape).is_ok() {
                prop_assert_eq!(round_trip(&*codec, &shape, &raw).unwrap().len(), raw.len());
            }
        }
    }

    #[test]
    fn changed_and_cut_bytes_are_decoded_alike_or_refused(
        shape in any_shape(),
        seed in any::<u64>(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), 1..=u8::MAX), 0..6),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let raw = bytes_of(shape.dtype, &numbers(&shape, seed));
        for name in NAMES {
            let codec = by_name(name).unwrap();
            if codec.check(&shape).is_err() {
                continue;
            }
            let mut layer = Vec::new();
            codec.encode_layer(&shape, 0, &raw[..shape.section_bytes()], &mut layer).unwrap();
            for (place, flip) in &flips {
                let place = place.index(layer.len());
                layer[place] ^= flip;
            }
            if let Some(cut) = &cut {
                layer.truncate(cut.index(layer.len()));
            }
            let results: Vec<_> = Isa::available()
                .into_iter()
                .map(|isa| {
                    let mut section = vec![0; shape.section_bytes()];
                    let codec = by_name_on(name, isa).unwrap();
                    codec.decode_layer(&shape, 0, &layer, &mut section).map(|()| section)
                })
                .collect();
            prop_assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{}", name);
        }
    }

    #[test]
    fn any_bytes_are_a_chunk_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400), layer in 0..4_usize) {
        let mut bytes = bytes;
        let start = [b'K', b'V', b'K', b'C', 1];
        let n_start = start.len().min(bytes.len());
        bytes[..n_start].copy_from_slice(&start[..n_start]);
        if let Ok(head) = CodedHead::decode(&bytes) && head.shape.section_bytes() < 1 << 20 {
            let _ = decode_layer(&bytes, layer, &mut vec![0; head.shape.section_bytes()]);
        }
    }
}
