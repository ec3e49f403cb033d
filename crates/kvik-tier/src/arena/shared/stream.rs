//! Copies into memory that this process does not read again.
//!
//! A plain copy reads every line of the target into the cache before it overwrites it. Stores that go past the cache save
//! that read, which is a third of the traffic of a copy between memories. While one part is stored the next one is
//! fetched, so that the two directions of the memory are busy at the same time.

use std::ptr;

use super::RunningChecksum;

/// Bytes that are copied and then summed up while they are in the processor's first cache.
const SUMMED_BYTES: usize = 16 << 10;

/// Bytes of a cache line: what is stored past the cache at a time.
const LINE_BYTES: usize = 64;

/// Copies `source` to `target` and adds it to a checksum. All bytes are visible to other processors when it returns.
///
/// # Safety
/// `target` must be valid for writes of as many bytes as `source` has, which must not overlap it, and no reference to
/// them may exist in this process.
pub(super) unsafe fn copy_summed(source: &[u8], target: *mut u8, sum: &mut RunningChecksum) {
    let mut offset = 0;
    for part in source.chunks(SUMMED_BYTES) {
        // Before the copy: it brings the part into the cache.
        sum.update(part);
        let next = &source[offset + part.len()..];
        // SAFETY: the part lies as far behind the start of the target as in `source`; the caller answers for the rest.
        unsafe { copy_past_cache(part, &next[..next.len().min(SUMMED_BYTES)], target.add(offset)) };
        offset += part.len();
    }
    finish_stores();
}

/// Copies `source` and fetches `next` into the cache meanwhile.
///
/// # Safety
/// As for [`copy_summed`].
#[cfg(target_arch = "x86_64")]
#[expect(clippy::cast_ptr_alignment, reason = "loads need no alignment, and the target is aligned to a line")]
unsafe fn copy_past_cache(source: &[u8], next: &[u8], target: *mut u8) {
    use std::arch::x86_64::{__m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_stream_si128};

    let n_before = target.align_offset(LINE_BYTES).min(source.len());
    let (before, rest) = source.split_at(n_before);
    let (lines, behind) = rest.as_chunks::<LINE_BYTES>();
    let mut next_lines = next.chunks(LINE_BYTES);
    // SAFETY: the caller answers for all bytes of the target. The lines begin at an aligned address, as a store past the
    // cache demands; loads need no alignment. These instructions belong to every x86-64 processor.
    unsafe {
        ptr::copy_nonoverlapping(before.as_ptr(), target, before.len());
        let mut line_target = target.add(n_before);
        for line in lines {
            if let Some(next_line) = next_lines.next() {
                _mm_prefetch::<_MM_HINT_T0>(next_line.as_ptr().cast());
            }
            for quarter in 0..LINE_BYTES / size_of::<__m128i>() {
                let value = _mm_loadu_si128(line.as_ptr().cast::<__m128i>().add(quarter));
                _mm_stream_si128(line_target.cast::<__m128i>().add(quarter), value);
            }
            line_target = line_target.add(LINE_BYTES);
        }
        ptr::copy_nonoverlapping(behind.as_ptr(), line_target, behind.len());
    }
}

/// Makes stores past the cache visible before everything that follows.
#[cfg(target_arch = "x86_64")]
fn finish_stores() {
    // SAFETY: a fence touches no memory, and belongs to every x86-64 processor.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

/// # Safety
/// As for [`copy_summed`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_past_cache(source: &[u8], _next: &[u8], target: *mut u8) {
    // SAFETY: the caller answers for the target.
    unsafe { ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
}

#[cfg(not(target_arch = "x86_64"))]
fn finish_stores() {}

#[cfg(test)]
mod tests {
    use super::super::checksum;
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied_and_nothing_beside_it() {
        let source: Vec<u8> = (0..SUMMED_BYTES * 2 + 200).map(|place| (place * 31 % 251) as u8).collect();
        let lengths = (0..200).chain([SUMMED_BYTES - 1, SUMMED_BYTES, SUMMED_BYTES + 1, source.len()]);
        for n_bytes in lengths {
            for start in [0, 1, 15, 16, 63, 64, 65] {
                let mut target = vec![0xEE; start + n_bytes + 70];
                let mut sum = RunningChecksum::default();
                // SAFETY: the target has room for the bytes behind `start`.
                unsafe { copy_summed(&source[..n_bytes], target.as_mut_ptr().add(start), &mut sum) };
                assert_eq!(sum.finish(), checksum(&source[..n_bytes]));
                assert!(target[start..start + n_bytes] == source[..n_bytes], "{n_bytes} at {start}");
                let beside = target[..start].iter().chain(&target[start + n_bytes..]);
                assert!(beside.copied().all(|byte| byte == 0xEE), "{n_bytes} at {start}");
            }
        }
    }
}
