//! Rows of tokens as pages and back: bytes are moved, never looked at.

use crate::paged::Pages;
use crate::shape::BLOCK_TOKENS;

/// A section of keys and then values, each `[n_tokens, heads, elements]`, in the built-in engine's layout. A last block that
/// is not full has the last token in its other places.
pub(crate) fn rows_to_pages(pages: &Pages, n_tokens: usize, element_bytes: usize, rows: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; pages.n_elements() * element_bytes];
    let (keys, values) = rows.split_at(rows.len() / 2);
    for_each_element(pages, |token, row_element, key_place, value_place| {
        let token = token.min(n_tokens.saturating_sub(1));
        let from = (token * pages.n_key_rows() + row_element) * element_bytes;
        for (side, place) in [(keys, key_place), (values, value_place)] {
            packed[place * element_bytes..][..element_bytes].copy_from_slice(&side[from..][..element_bytes]);
        }
    });
    packed
}

/// The reverse of [`rows_to_pages`].
pub(crate) fn pages_to_rows(
    pages: &Pages,
    n_tokens: usize,
    element_bytes: usize,
    packed: &[u8],
    rows: &mut [u8],
) {
    let (keys, values) = rows.split_at_mut(rows.len() / 2);
    for_each_element(pages, |token, row_element, key_place, value_place| {
        if token >= n_tokens {
            return;
        }
        let to = (token * pages.n_key_rows() + row_element) * element_bytes;
        keys[to..][..element_bytes].copy_from_slice(&packed[key_place * element_bytes..][..element_bytes]);
        values[to..][..element_bytes]
            .copy_from_slice(&packed[value_place * element_bytes..][..element_bytes]);
    });
}

/// Calls `visit` for every token and every element of its row, with the places of key and value in the pages.
fn for_each_element(pages: &Pages, mut visit: impl FnMut(usize, usize, usize, usize)) {
    let head_dim = pages.head_dim;
    for (tile_idx, (block, head)) in pages.tiles().enumerate() {
        let tile = tile_idx * pages.tile_elements();
        for slot in 0..BLOCK_TOKENS {
            for dim in 0..head_dim {
                let key_place = tile + dim * BLOCK_TOKENS + slot;
                let value_place = tile + (BLOCK_TOKENS + slot) * head_dim + dim;
                visit(block * BLOCK_TOKENS + slot, head * head_dim + dim, key_place, value_place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_and_lie_where_the_engine_has_them() {
        let pages = Pages { n_blocks: 2, n_heads: 3, head_dim: 4 };
        let n_tokens = 21;
        let n_elements = 2 * n_tokens * 12;
        let rows: Vec<u8> = (0..n_elements as u16).flat_map(u16::to_le_bytes).collect();
        let packed = rows_to_pages(&pages, n_tokens, 2, &rows);
        let element = |bytes: &[u8], idx: usize| u16::from_le_bytes([bytes[2 * idx], bytes[2 * idx + 1]]);
        // Token 17 is the second of block 1; head 2, element 3.
        let tile = (3 + 2) * 2 * 16 * 4;
        let row_element = 17 * 12 + 2 * 4 + 3;
        assert_eq!(element(&packed, tile + 3 * 16 + 1), row_element as u16);
        assert_eq!(element(&packed, tile + 16 * 4 + 4 + 3), (n_tokens * 12 + row_element) as u16);
        let mut back = vec![0; rows.len()];
        pages_to_rows(&pages, n_tokens, 2, &packed, &mut back);
        assert_eq!(back, rows);
    }
}
