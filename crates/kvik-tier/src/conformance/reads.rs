//! Bytes come back as they were stored, whole and in ranges.

use super::Subject;
use super::content::{assert_hit, content, content_key, get_content, get_range, put_content};
use crate::tier::{PutItem, Tier};

/// Around the borders of sectors, pages and single I/Os.
const SIZES: &[usize] = &[1, 511, 512, 513, 4095, 4096, 4097, 65_537, 1 << 20, (1 << 20) + 1, (3 << 20) + 1];

/// Lengths of chunks and their sections: aligned, odd, with a short end, and more than an envelope has room for.
const SECTIONED: &[(usize, usize)] =
    &[(5 * 4096, 4096), (3 * 4096 + 100, 4096), (2999, 1000), (600 * 512, 512)];

pub(super) fn a_chunk_comes_back_at_every_size(subject: &Subject<'_>) {
    let tier = subject.tier();
    let sizes = || SIZES.iter().filter(|n_bytes| **n_bytes <= subject.traits.max_chunk_bytes).zip(0..);
    for (n_bytes, chunk_idx) in sizes() {
        put_content(&*tier, content_key(chunk_idx), *n_bytes);
        assert_hit(&*tier, content_key(chunk_idx), *n_bytes);
    }
    for (n_bytes, chunk_idx) in sizes() {
        assert_hit(&*tier, content_key(chunk_idx), *n_bytes);
    }
}

pub(super) fn a_chunk_in_several_parts_comes_back_in_one(subject: &Subject<'_>) {
    let tier = subject.tier();
    let lengths: [&[usize]; 4] = [&[4096, 4096, 4096], &[1, 0, 4095, 8192, 7], &[10_000, 3], &[0, 5]];
    for (lengths, chunk_idx) in lengths.into_iter().zip(0..) {
        let key = content_key(chunk_idx);
        let n_bytes = lengths.iter().sum();
        let chunk = content(key, n_bytes);
        let mut rest = chunk.as_slice();
        let parts: Vec<&[u8]> = lengths
            .iter()
            .map(|length| {
                let (part, behind) = rest.split_at(*length);
                rest = behind;
                part
            })
            .collect();
        put_parts(&*tier, PutItem::new(key, &parts));
        assert_hit(&*tier, key, n_bytes);
    }
}

pub(super) fn every_section_can_be_read_alone(subject: &Subject<'_>) {
    let tier = subject.tier();
    for (&(n_bytes, section_bytes), chunk_idx) in SECTIONED.iter().zip(0..) {
        let key = content_key(chunk_idx);
        let chunk = content(key, n_bytes);
        put_parts(&*tier, PutItem::with_sections(key, &[&chunk], section_bytes));
        for (section, section_idx) in chunk.chunks(section_bytes).zip(0..) {
            let mut buffer = vec![0xee; section.len()];
            let outcome = get_range(&*tier, key, section_idx * section_bytes, &mut buffer);
            assert!(outcome.is_hit(), "section {section_idx} of {n_bytes} / {section_bytes}: {outcome:?}");
            assert!(buffer == section, "section {section_idx} of {n_bytes} / {section_bytes}: other bytes");
        }
        assert_hit(&*tier, key, n_bytes);
    }
}

pub(super) fn a_run_of_sections_can_be_read_at_once(subject: &Subject<'_>) {
    let tier = subject.tier();
    for (&(n_bytes, section_bytes), chunk_idx) in SECTIONED.iter().zip(0..) {
        let key = content_key(chunk_idx);
        let chunk = content(key, n_bytes);
        put_parts(&*tier, PutItem::with_sections(key, &[&chunk], section_bytes));
        for (offset, end) in [(0, 2 * section_bytes), (section_bytes, n_bytes), (0, n_bytes)] {
            let mut buffer = vec![0xee; end - offset];
            let outcome = get_range(&*tier, key, offset, &mut buffer);
            assert!(outcome.is_hit(), "{offset} to {end} of {n_bytes} / {section_bytes}: {outcome:?}");
            assert!(buffer == chunk[offset..end], "{offset} to {end} of {n_bytes}: other bytes");
        }
    }
}

pub(super) fn a_whole_read_of_another_length_is_no_hit(subject: &Subject<'_>) {
    let tier = subject.tier();
    for (n_bytes, chunk_idx) in [4096, 5000, 12_288].into_iter().zip(0..) {
        let key = content_key(chunk_idx);
        put_content(&*tier, key, n_bytes);
        for asked_bytes in [1, n_bytes - 1, n_bytes + 1, n_bytes + 4096, 2 * n_bytes] {
            let outcome = get_content(&*tier, key, asked_bytes);
            assert!(!outcome.is_hit(), "{asked_bytes} bytes asked for, {n_bytes} stored");
        }
        assert_hit(&*tier, key, n_bytes);
    }
}

pub(super) fn a_range_past_the_end_is_no_hit(subject: &Subject<'_>) {
    let tier = subject.tier();
    let key = content_key(0);
    let chunk = content(key, 8192);
    put_parts(&*tier, PutItem::with_sections(key, &[&chunk], 4096));
    for (offset, n_bytes) in [(4096, 4097), (8192, 1), (8191, 4096), (1 << 40, 10), (0, 8193)] {
        let mut buffer = vec![0; n_bytes];
        let outcome = get_range(&*tier, key, offset, &mut buffer);
        assert!(!outcome.is_hit(), "{n_bytes} bytes from {offset} on of 8192");
    }
}

pub(super) fn a_hit_writes_its_buffer_and_nothing_else(subject: &Subject<'_>) {
    let tier = subject.tier();
    for (n_bytes, chunk_idx) in [1, 100, 4096, 4097, 10_000].into_iter().zip(0..) {
        let key = content_key(chunk_idx);
        put_content(&*tier, key, n_bytes);
        for start in [0, 1, 512, 4095] {
            let mut memory = vec![0xa5; start + n_bytes + 5000];
            let outcome = get_range(&*tier, key, 0, &mut memory[start..start + n_bytes]);
            assert!(outcome.is_hit(), "{n_bytes} bytes: {outcome:?}");
            assert!(memory[start..start + n_bytes] == content(key, n_bytes), "{n_bytes} bytes: other bytes");
            let outside = memory[..start].iter().chain(&memory[start + n_bytes..]);
            assert!(outside.copied().all(|byte| byte == 0xa5), "{n_bytes} bytes: written outside");
        }
    }
}

fn put_parts(tier: &dyn Tier, item: PutItem<'_>) {
    let mut batch = [item];
    tier.put(&mut batch);
    let [PutItem { key, outcome, .. }] = batch;
    assert!(outcome.is_present(), "put {key}: {outcome:?}");
}
