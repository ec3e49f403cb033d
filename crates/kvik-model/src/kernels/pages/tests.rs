//! Blocks as bytes.

use super::*;

/// Pages whose every element, also those that pad, is another number.
fn filled_pages<E: KvElement>(shape: PageShape) -> KvPages<E> {
    let mut pages = KvPages::<E>::try_new(2, 3, shape).unwrap();
    for layer_idx in 0..2 {
        for block_idx in 0..3 {
            let first = block_idx * shape.vectors_per_block();
            let block = pages.block_mut(layer_idx, BlockId::new(block_idx as u32));
            for (idx, vector) in block.iter_mut().enumerate() {
                for (lane, element) in vector.0.iter_mut().enumerate() {
                    *element = E::from_f32((layer_idx * 1009 + (first + idx) * LANES + lane) as f32);
                }
            }
        }
    }
    pages
}

/// All keys and values of the blocks in `table`, without padding.
fn exported<E: KvElement>(pages: &KvPages<E>, table: &[BlockId]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let export = |layer_idx| {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        pages.export(layer_idx, table, table.len() * LANES, &mut keys, &mut values);
        (keys, values)
    };
    (0..pages.memory.layers.len()).map(export).collect()
}

fn check_blocks<E: KvElement>(n_kv_heads: usize, head_dim: usize) {
    let shape = PageShape { n_kv_heads, head_dim };
    let pages = filled_pages::<E>(shape);
    let table = [BlockId::new(2), BlockId::new(0)];
    let mut copy = KvPages::<E>::try_new(2, 3, shape).unwrap();
    for layer_idx in 0..2 {
        for (&from, to) in table.iter().zip([1, 2].map(BlockId::new)) {
            let mut bytes = vec![0; pages.packed_block_bytes()];
            pages.export_block(layer_idx, from, &mut bytes);
            copy.import_block(layer_idx, to, &bytes);
            let mut again = vec![0xff; bytes.len()];
            copy.export_block(layer_idx, to, &mut again);
            assert!(again == bytes, "{shape:?}");
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            pages.export(layer_idx, &[from], LANES, &mut keys, &mut values);
            let mut expected = [keys, values].concat();
            // The same elements in another order.
            expected.sort_unstable();
            bytes.sort_unstable();
            assert!(bytes == expected, "{shape:?}");
        }
    }
    assert!(exported(&copy, &[1, 2].map(BlockId::new)) == exported(&pages, &table), "{shape:?}");
    // The block that was not imported is as it was, and so is what pads the others.
    let zeros = KvPages::<E>::try_new(2, 3, shape).unwrap();
    let first = [BlockId::new(0)];
    assert!(exported(&copy, &first) == exported(&zeros, &first), "{shape:?}");
    for layer in &copy.memory.layers {
        for head in layer.chunks_exact(shape.vectors_per_head()) {
            for row in head[head_dim..].chunks_exact(shape.vectors_per_row()) {
                let padding = row.iter().flat_map(|vector| vector.0).skip(head_dim);
                let bytes = padding.fold(Vec::new(), |mut bytes, element| {
                    element.push_le(&mut bytes);
                    bytes
                });
                assert!(bytes.iter().all(|&byte| byte == 0), "{shape:?}");
            }
        }
    }
}

#[test]
fn a_block_of_any_shape_comes_back_from_its_bytes_and_leaves_its_padding_behind() {
    for n_kv_heads in [1, 3] {
        for head_dim in [1, 10, 16, 17, 24, 32, 40, 64] {
            check_blocks::<f32>(n_kv_heads, head_dim);
            check_blocks::<f16>(n_kv_heads, head_dim);
            check_blocks::<bf16>(n_kv_heads, head_dim);
        }
    }
}

#[test]
fn a_pinned_block_is_read_on_another_thread_while_others_are_written() {
    let shape = PageShape { n_kv_heads: 2, head_dim: 24 };
    let mut pages = filled_pages::<f32>(shape);
    let mut expected = vec![0; pages.packed_block_bytes()];
    pages.export_block(1, BlockId::new(2), &mut expected);
    let pinned = pages.pin(&[BlockId::new(0), BlockId::new(2)]);
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![0; expected.len()];
        for _ in 0..100 {
            pinned.export_block(1, 1, &mut bytes);
            assert_eq!(bytes, expected);
        }
    });
    let zeros = vec![0; pages.packed_block_bytes()];
    for _ in 0..100 {
        pages.import_block(1, BlockId::new(1), &zeros);
    }
    reader.join().unwrap();
    pages.import_block(1, BlockId::new(2), &zeros);
}

#[test]
#[should_panic(expected = "a pinned block is written")]
fn a_pinned_block_cannot_be_written() {
    let shape = PageShape { n_kv_heads: 1, head_dim: 16 };
    let mut pages = filled_pages::<f32>(shape);
    let _pinned = pages.pin(&[BlockId::new(1)]);
    pages.copy_block(BlockId::new(0), BlockId::new(1));
}
