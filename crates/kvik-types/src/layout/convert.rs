//! Conversion between any two layouts.
//!
//! The tokens are cut into segments that are evenly spaced on both sides. Inside a segment both
//! buffers are plain strided arrays over four axes; axes that follow each other without a gap on
//! both sides are folded into longer runs, and what remains is a loop over `memcpy`.

use super::frame::{self, BinaryFrame};
use super::strides::Strides;
use super::{BINARY_HEADER_BYTES, KvLayout, KvPlacement, KvShape};
use crate::error::{Result, TypesError};

/// One axis of a strided copy.
#[derive(Clone, Copy, Debug)]
struct CopyAxis {
    length: usize,
    source_stride: usize,
    dest_stride: usize,
}

/// Copies the KV of `shape` from `source`, laid out as `source_placement` says, into `dest`, laid out
/// as `dest_placement` says.
///
/// Bytes are moved, never interpreted. Only the slots that the block table of `dest_placement` maps
/// are written; the rest of a pool keeps its bytes. A binary frame is verified before it is read and
/// complete, with header and checksum, after it was written.
///
/// Fails before the first byte is written when a buffer does not have exactly the length that its
/// placement asks for, when one side holds MLA latents and the other does not, when the shape is
/// invalid, or when a frame is corrupt or holds another shape.
pub fn convert(
    shape: &KvShape,
    source_placement: &KvPlacement<'_>,
    source: &[u8],
    dest_placement: &KvPlacement<'_>,
    dest: &mut [u8],
) -> Result<()> {
    let (source_layout, dest_layout) = (source_placement.layout(), dest_placement.layout());
    let frame = if source_layout == KvLayout::Binary { Some(BinaryFrame::decode(source)?) } else { None };
    let source_is_mla = match &frame {
        Some(frame) => Some(frame.is_mla()),
        None => source_layout.is_mla(),
    };
    let is_mla = source_is_mla.or(dest_layout.is_mla()).unwrap_or(false);
    if dest_layout.is_mla().is_some_and(|dest_is_mla| dest_is_mla != is_mla) {
        return Err(TypesError::IncompatibleLayouts {
            source_layout: source_layout.to_string(),
            dest_layout: dest_layout.to_string(),
            reason: "one holds K and V, the other one MLA latent a token",
        });
    }
    let source_strides = Strides::of(source_placement, shape, is_mla)?;
    let dest_strides = Strides::of(dest_placement, shape, is_mla)?;
    if let Some(found) = frame.as_ref().map(BinaryFrame::shape).filter(|found| *found != shape) {
        return Err(TypesError::invalid("source frame", &format!("{found:?}"), format!("{shape:?}")));
    }
    let source_bytes = frame.as_ref().map_or(source, BinaryFrame::payload);
    check_length("source", source_bytes.len(), source_strides.n_bytes)?;
    if dest_layout == KvLayout::Binary {
        check_length("dest", dest.len(), dest_strides.n_bytes.saturating_add(BINARY_HEADER_BYTES))?;
        let (header, payload) = dest.split_at_mut(BINARY_HEADER_BYTES);
        copy_segments(
            shape,
            (source_placement, &source_strides, source_bytes),
            (dest_placement, &dest_strides, payload),
        );
        header.copy_from_slice(&frame::encode_header(shape, is_mla, payload));
    } else {
        check_length("dest", dest.len(), dest_strides.n_bytes)?;
        copy_segments(
            shape,
            (source_placement, &source_strides, source_bytes),
            (dest_placement, &dest_strides, dest),
        );
    }
    Ok(())
}

fn check_length(field: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(TypesError::BufferSize { field, found, expected }) }
}

/// Copies segment by segment; lengths and block tables have been checked against the strides.
fn copy_segments(
    shape: &KvShape,
    (source_placement, source_strides, source): (&KvPlacement<'_>, &Strides, &[u8]),
    (dest_placement, dest_strides, dest): (&KvPlacement<'_>, &Strides, &mut [u8]),
) {
    let source_table = source_placement.paging().map(super::Paging::block_table);
    let dest_table = dest_placement.paging().map(super::Paging::block_table);
    let mut token = 0;
    while token < shape.n_tokens {
        let n_tokens_left = shape.n_tokens - token;
        let (source_start, n_source_tokens) = source_strides.token_run(source_table, token, n_tokens_left);
        let (dest_start, n_dest_tokens) = dest_strides.token_run(dest_table, token, n_tokens_left);
        let n_tokens = n_source_tokens.min(n_dest_tokens);
        let axis = |length, source_stride, dest_stride| CopyAxis { length, source_stride, dest_stride };
        let mut axes = [
            axis(source_strides.n_kv, source_strides.kv, dest_strides.kv),
            axis(shape.n_layers, source_strides.layer, dest_strides.layer),
            axis(n_tokens, source_strides.slot, dest_strides.slot),
            axis(shape.n_kv_heads, source_strides.head, dest_strides.head),
        ];
        let (n_axes, run_bytes) = fold_axes(&mut axes, shape.head_bytes());
        copy_axes(&axes[..n_axes], run_bytes, (source, source_start), (dest, dest_start));
        token += n_tokens;
    }
}

/// Folds axes that follow each other without a gap, going outward from the head runs in the order in
/// which `dest` is written.
///
/// Returns the number of axes left at the front of `axes`, outermost first, and the length of the
/// runs to copy.
fn fold_axes(axes: &mut [CopyAxis; 4], head_bytes: usize) -> (usize, usize) {
    axes.sort_unstable_by_key(|axis| axis.dest_stride);
    let mut run_bytes = head_bytes;
    let mut n_kept = 0usize;
    for idx in 0..axes.len() {
        let axis = axes[idx];
        if axis.length == 1 {
            continue;
        }
        if n_kept == 0 && axis.source_stride == run_bytes && axis.dest_stride == run_bytes {
            run_bytes *= axis.length;
            continue;
        }
        if let Some(inner) = n_kept.checked_sub(1).map(|last| &mut axes[last]) {
            let follows = |inner_stride: usize, stride: usize| inner_stride * inner.length == stride;
            if follows(inner.source_stride, axis.source_stride)
                && follows(inner.dest_stride, axis.dest_stride)
            {
                inner.length *= axis.length;
                continue;
            }
        }
        axes[n_kept] = axis;
        n_kept += 1;
    }
    axes[..n_kept].reverse();
    (n_kept, run_bytes)
}

fn copy_axes(
    axes: &[CopyAxis],
    run_bytes: usize,
    (source, source_start): (&[u8], usize),
    (dest, dest_start): (&mut [u8], usize),
) {
    let Some((axis, inner_axes)) = axes.split_first() else {
        dest[dest_start..dest_start + run_bytes]
            .copy_from_slice(&source[source_start..source_start + run_bytes]);
        return;
    };
    for idx in 0..axis.length {
        let source_start = source_start + idx * axis.source_stride;
        let dest_start = dest_start + idx * axis.dest_stride;
        copy_axes(inner_axes, run_bytes, (source, source_start), (&mut *dest, dest_start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::layout::{Paging, VllmPagedOrder};
    use crate::token::BlockSize;

    #[test]
    fn equal_dense_layouts_fold_into_one_copy() {
        let shape = KvShape { n_layers: 3, n_tokens: 5, n_kv_heads: 2, head_dim: 4, dtype: Dtype::F16 };
        let placement = KvPlacement::dense(KvLayout::Kv2Ltd).unwrap();
        let strides = Strides::of(&placement, &shape, false).unwrap();
        let axis = |length, stride| CopyAxis { length, source_stride: stride, dest_stride: stride };
        let mut axes =
            [axis(2, strides.kv), axis(3, strides.layer), axis(5, strides.slot), axis(2, strides.head)];
        assert_eq!(fold_axes(&mut axes, shape.head_bytes()), (0, strides.n_bytes));
    }

    #[test]
    fn neighboring_blocks_without_a_gap_are_one_segment() {
        let shape = KvShape { n_layers: 1, n_tokens: 10, n_kv_heads: 1, head_dim: 1, dtype: Dtype::U8 };
        let table = [4, 5, 1];
        let paging = Paging::try_new(BlockSize::try_new(4).unwrap(), 6, &table).unwrap();
        let strides_of = |order| {
            let placement = KvPlacement::paged(KvLayout::VllmPaged(order), paging).unwrap();
            Strides::of(&placement, &shape, false).unwrap()
        };
        let without_gap = strides_of(VllmPagedOrder::KvFirstNhd);
        assert_eq!(without_gap.token_run(Some(&table), 1, 9), (17, 7));
        assert_eq!(without_gap.token_run(Some(&table), 8, 2), (4, 2));
        let with_gap = strides_of(VllmPagedOrder::BlockFirstNhd);
        assert_eq!(with_gap.token_run(Some(&table), 1, 9), (33, 3));
    }
}
