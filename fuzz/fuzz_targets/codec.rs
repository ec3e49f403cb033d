//! A coded layer of every codec, as it comes from a disk or a network, a whole coded chunk, and numbers to be coded.
//!
//! All instruction sets must say the same of any bytes. What a codec wrote it must read, a lossless one to the same bytes.

#![no_main]

use kvik_codec::{ChunkLayout, ChunkShape, CodedHead, Isa, NAMES, by_name_on, decode_layer, encode, round_trip};
use kvik_types::Dtype;
use libfuzzer_sys::fuzz_target;

/// The largest section that is tried: larger ones take the fuzzer's time, not its paths.
const MAX_SECTION_BYTES: usize = 1 << 16;

fuzz_target!(|input: &[u8]| {
    check_chunk(input);
    let Some((&[kinds, n_blocks, n_heads, half_dim], bytes)) = input.split_first_chunk() else {
        return;
    };
    let kinds = usize::from(kinds);
    let name = NAMES[kinds % NAMES.len()];
    let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][kinds / NAMES.len() % 3];
    let n_kv_heads = usize::from(n_heads % 3) + 1;
    let head_dim = 2 * (usize::from(half_dim % 40) + 1);
    let layout = match kinds / NAMES.len() / 3 % 3 {
        0 => ChunkLayout::KvikPaged { n_kv_heads, head_dim },
        1 => ChunkLayout::KeysThenValues { n_kv_heads, head_dim },
        _ => ChunkLayout::Opaque { token_elements: head_dim },
    };
    let shape = ChunkShape { n_layers: 1, n_tokens: 16 * (usize::from(n_blocks % 4) + 1), dtype, layout };
    check_layer(name, &shape, bytes);
    check_numbers(name, &shape, bytes);
});

/// A coded layer that may be anything.
fn check_layer(name: &str, shape: &ChunkShape, bytes: &[u8]) {
    let decoded = |isa: Isa| {
        let mut section = vec![0; shape.section_bytes()];
        let codec = by_name_on(name, isa).expect("a name of the list");
        codec.decode_layer(shape, 0, bytes, &mut section).map(|()| section)
    };
    let expected = decoded(Isa::Scalar);
    for isa in Isa::available() {
        assert_eq!(decoded(isa), expected, "{name} {isa} {shape:?}");
    }
}

/// A section that may have any numbers.
fn check_numbers(name: &str, shape: &ChunkShape, bytes: &[u8]) {
    let codec = by_name_on(name, Isa::detect()).expect("a name of the list");
    if codec.check(shape).is_err() {
        return;
    }
    let raw: Vec<u8> = bytes.iter().copied().chain(std::iter::repeat(0)).take(shape.chunk_bytes()).collect();
    let back = round_trip(&*codec, shape, &raw).expect("a codec reads what it wrote");
    assert!(!codec.is_lossless() || back == raw, "{name} {shape:?}");
    let coded = |isa: Isa| {
        let codec = by_name_on(name, isa).expect("a name of the list");
        let mut coded = Vec::new();
        encode(&*codec, shape, &raw, &mut coded).expect("the shape was checked");
        coded
    };
    assert_eq!(coded(Isa::detect()), coded(Isa::Scalar), "{name} {shape:?}");
}

/// A coded chunk that may be anything.
fn check_chunk(bytes: &[u8]) {
    let Ok(head) = CodedHead::decode(bytes) else {
        return;
    };
    if head.shape.section_bytes() <= MAX_SECTION_BYTES {
        let mut section = vec![0; head.shape.section_bytes()];
        let _ = decode_layer(bytes, head.shape.n_layers - 1, &mut section);
    }
    assert_eq!(head.layer_range(0..head.shape.n_layers).end, head.coded_bytes());
}
