use std::ptr;

use proptest::prelude::*;

use super::*;
use crate::status::last_message;

const PAGED: [u32; 6] = [
    KVIK_LAYOUT_KV_FIRST_NHD,
    KVIK_LAYOUT_KV_FIRST_HND,
    KVIK_LAYOUT_BLOCK_FIRST_NHD,
    KVIK_LAYOUT_BLOCK_FIRST_HND,
    KVIK_LAYOUT_PACKED_HEADS,
    KVIK_LAYOUT_TRTLLM,
];
const DENSE: [u32; 3] = [KVIK_LAYOUT_2LTD, KVIK_LAYOUT_LT2D, KVIK_LAYOUT_L2TD];

/// Makes a good buffer bad.
type Spoil = fn(&mut kvik_kv_buffer);

/// A buffer with its bytes and its table.
#[derive(Debug, Clone)]
struct Side {
    layout: u32,
    block_tokens: usize,
    n_pool_blocks: usize,
    table: Vec<u32>,
    bytes: Vec<u8>,
}

impl Side {
    fn buffer(&mut self) -> kvik_kv_buffer {
        let is_paged = PAGED.contains(&self.layout);
        kvik_kv_buffer {
            size: size_of::<kvik_kv_buffer>(),
            layout: self.layout,
            block_tokens: if is_paged { self.block_tokens as u32 } else { 0 },
            bytes: self.bytes.as_mut_ptr().cast(),
            n_bytes: self.bytes.len() as u64,
            n_pool_blocks: if is_paged { self.n_pool_blocks as u64 } else { 0 },
            block_table: if is_paged { self.table.as_ptr() } else { ptr::null() },
            n_table_blocks: if is_paged { self.table.len() as u64 } else { 0 },
        }
    }

    /// The position of an element, axis by axis from the outside in.
    fn element(&self, shape: &kvik_kv_shape, [kv, layer, token, head, idx]: [usize; 5]) -> usize {
        let (n_layers, n_tokens) = (shape.n_layers as usize, shape.n_tokens as usize);
        let (n_heads, dim) = (shape.n_kv_heads as usize, shape.head_dim as usize);
        let (pool, size) = (self.n_pool_blocks, self.block_tokens);
        let (block, slot) = (self.table[token / size] as usize, token % size);
        let axes: &[(usize, usize)] = match self.layout {
            KVIK_LAYOUT_2LTD => &[(kv, 2), (layer, n_layers), (token, n_tokens), (head, n_heads)],
            KVIK_LAYOUT_LT2D => &[(layer, n_layers), (token, n_tokens), (kv, 2), (head, n_heads)],
            KVIK_LAYOUT_L2TD => &[(layer, n_layers), (kv, 2), (token, n_tokens), (head, n_heads)],
            KVIK_LAYOUT_KV_FIRST_NHD => {
                &[(layer, n_layers), (kv, 2), (block, pool), (slot, size), (head, n_heads)]
            }
            KVIK_LAYOUT_KV_FIRST_HND => {
                &[(layer, n_layers), (kv, 2), (block, pool), (head, n_heads), (slot, size)]
            }
            KVIK_LAYOUT_BLOCK_FIRST_NHD => {
                &[(layer, n_layers), (block, pool), (kv, 2), (slot, size), (head, n_heads)]
            }
            KVIK_LAYOUT_BLOCK_FIRST_HND => {
                &[(layer, n_layers), (block, pool), (kv, 2), (head, n_heads), (slot, size)]
            }
            KVIK_LAYOUT_PACKED_HEADS => {
                &[(layer, n_layers), (block, pool), (head, n_heads), (slot, size), (kv, 2)]
            }
            KVIK_LAYOUT_TRTLLM => &[(block, pool), (layer, n_layers), (kv, 2), (head, n_heads), (slot, size)],
            other => panic!("no reference for {other}"),
        };
        axes.iter().chain([&(idx, dim)]).fold(0, |position, (index, length)| position * length + index)
    }
}

fn shape_of(
    n_layers: u32,
    n_tokens: u32,
    n_kv_heads: u32,
    head_dim: u32,
    element_bytes: u32,
) -> kvik_kv_shape {
    let size = size_of::<kvik_kv_shape>();
    kvik_kv_shape { size, n_layers, n_tokens, n_kv_heads, head_dim, element_bytes, reserved: 0 }
}

/// A side for `shape` whose bytes are `filler`s.
fn side(shape: &kvik_kv_shape, layout: u32, block_tokens: usize, n_unused: usize, filler: u8) -> Side {
    let n_blocks = (shape.n_tokens as usize).div_ceil(block_tokens);
    let n_pool_blocks = n_blocks + n_unused;
    // From the back, with a gap: neighbors of the sequence are no neighbors in the pool.
    let table = (0..n_blocks as u32).map(|block| n_pool_blocks as u32 - 1 - block).collect();
    let mut side = Side { layout, block_tokens, n_pool_blocks, table, bytes: Vec::new() };
    let mut n_bytes = 0;
    // SAFETY: all of it is alive, and of its full size.
    let status = unsafe { kvik_kv_bytes(shape, &side.buffer(), &raw mut n_bytes) };
    assert_eq!(status, kvik_status::KVIK_OK, "{}", last_message());
    side.bytes = vec![filler; n_bytes as usize];
    side
}

fn convert_sides(shape: &kvik_kv_shape, source: &mut Side, dest: &mut Side) -> kvik_status {
    // SAFETY: both sides are alive, and of their full size.
    unsafe { kvik_convert_kv(shape, &source.buffer(), &dest.buffer()) }
}

/// Copies element by element.
fn naive(shape: &kvik_kv_shape, source: &Side, dest: &Side) -> Vec<u8> {
    let mut bytes = dest.bytes.clone();
    let width = shape.element_bytes as usize;
    for kv in 0..2 {
        for layer in 0..shape.n_layers as usize {
            for token in 0..shape.n_tokens as usize {
                for head in 0..shape.n_kv_heads as usize {
                    for idx in 0..shape.head_dim as usize {
                        let at = [kv, layer, token, head, idx];
                        let (read, write) =
                            (source.element(shape, at) * width, dest.element(shape, at) * width);
                        bytes[write..write + width].copy_from_slice(&source.bytes[read..read + width]);
                    }
                }
            }
        }
    }
    bytes
}

fn any_layout() -> impl Strategy<Value = u32> {
    prop_oneof![
        3 => Just(KVIK_LAYOUT_TRTLLM),
        3 => prop::sample::select(&PAGED[..]),
        2 => prop::sample::select(&DENSE[..]),
    ]
}

proptest! {
    #[test]
    fn a_conversion_is_the_copy_element_by_element(
        (n_layers, n_tokens, n_heads, dim) in (1u32..4, 1u32..24, 1u32..4, 1u32..6),
        element_bytes in prop::sample::select(&[1u32, 2, 4][..]),
        (from, from_tokens, from_unused) in (any_layout(), 1usize..9, 0usize..3),
        (to, to_tokens, to_unused) in (any_layout(), 1usize..9, 0usize..3),
    ) {
        let shape = shape_of(n_layers, n_tokens, n_heads, dim, element_bytes);
        let mut source = side(&shape, from, from_tokens, from_unused, 0);
        for (place, byte) in source.bytes.iter_mut().enumerate() {
            *byte = (place * 31 % 251) as u8;
        }
        let mut dest = side(&shape, to, to_tokens, to_unused, 0xee);
        let expected = naive(&shape, &source, &dest);
        prop_assert_eq!(convert_sides(&shape, &mut source, &mut dest), kvik_status::KVIK_OK);
        prop_assert_eq!(&dest.bytes, &expected);
        // And back: what the tokens do not cover keeps its bytes.
        let before = source.bytes.clone();
        prop_assert_eq!(convert_sides(&shape, &mut dest, &mut source), kvik_status::KVIK_OK);
        prop_assert_eq!(&source.bytes, &before);
    }
}

#[test]
fn latents_convert_and_do_not_become_k_and_v() {
    let shape = shape_of(2, 5, 1, 3, 2);
    let mut latent = side(&shape, KVIK_LAYOUT_LATENT, 5, 0, 7);
    let mut other = latent.clone();
    assert_eq!(convert_sides(&shape, &mut latent, &mut other), kvik_status::KVIK_OK);
    let mut split = side(&shape, KVIK_LAYOUT_TRTLLM, 4, 0, 1);
    assert_eq!(convert_sides(&shape, &mut latent, &mut split), kvik_status::KVIK_ERROR_INVALID);
    assert!(last_message().contains("MLA"), "{}", last_message());
}

#[test]
fn what_cannot_be_converted_is_refused_with_its_field() {
    let shape = shape_of(2, 8, 2, 4, 2);
    let good = side(&shape, KVIK_LAYOUT_TRTLLM, 4, 1, 1);
    let mut source = side(&shape, KVIK_LAYOUT_2LTD, 8, 0, 2);
    let refusals: [(&str, Spoil); 9] = [
        ("`dest.size` is 8", |buffer| buffer.size = 8),
        ("`dest.layout` is 99", |buffer| buffer.layout = 99),
        ("`dest.bytes` is NULL", |buffer| buffer.bytes = ptr::null_mut()),
        ("allowed: exactly", |buffer| buffer.n_bytes -= 1),
        ("`dest.n_bytes` is 18446744073709551615", |buffer| buffer.n_bytes = u64::MAX),
        ("`block_table` is NULL", |buffer| buffer.block_table = ptr::null()),
        ("exactly 2 entries", |buffer| buffer.n_table_blocks = 1),
        ("block ids below 1", |buffer| buffer.n_pool_blocks = 1),
        ("has blocks", |buffer| buffer.layout = KVIK_LAYOUT_2LTD),
    ];
    for (words, spoil) in refusals {
        let mut dest = good.clone();
        let mut buffer = dest.buffer();
        spoil(&mut buffer);
        // SAFETY: sizes that are too large for what is there are refused before they are used.
        let status = unsafe { kvik_convert_kv(&raw const shape, &source.buffer(), &raw const buffer) };
        assert_eq!(status, kvik_status::KVIK_ERROR_INVALID, "{words}");
        assert!(last_message().contains(words), "{words}: {}", last_message());
        assert_eq!(dest.bytes, good.bytes);
    }
    let odd = kvik_kv_shape { element_bytes: 3, ..shape };
    assert_eq!(convert_sides(&odd, &mut source, &mut good.clone()), kvik_status::KVIK_ERROR_INVALID);
    assert!(last_message().contains("`shape.element_bytes` is 3"), "{}", last_message());
}

#[test]
fn a_buffer_is_not_converted_into_itself() {
    let shape = shape_of(1, 4, 1, 4, 2);
    let mut source = side(&shape, KVIK_LAYOUT_2LTD, 4, 0, 1);
    let buffer = source.buffer();
    // SAFETY: the overlap is refused before anything is touched.
    let status = unsafe { kvik_convert_kv(&raw const shape, &raw const buffer, &raw const buffer) };
    assert_eq!(status, kvik_status::KVIK_ERROR_INVALID);
    assert!(last_message().contains("overlaps"), "{}", last_message());
}
