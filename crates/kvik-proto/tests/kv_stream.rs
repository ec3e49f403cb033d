//! Frames of the KV stream: what is written is read back, and what is not a frame is refused.

use kvik_proto::kv_stream::{
    BlockGroup, Frame, FrameDecoder, Hello, KvBatch, KvChange, KvKey, KvTier, MAX_FRAME_BYTES,
    MAX_FRAME_KEYS, SnapshotPart, StreamError,
};
use kvik_types::BlockHash;
use proptest::prelude::*;

fn any_tier() -> impl Strategy<Value = KvTier> {
    prop::sample::select(KvTier::ALL.to_vec())
}

fn any_keys() -> impl Strategy<Value = Vec<KvKey>> {
    prop::collection::vec(any::<u64>().prop_map(KvKey), 0..70)
}

fn any_change() -> impl Strategy<Value = KvChange> {
    prop_oneof![
        (any::<u32>(), any_tier(), any::<Option<u64>>(), any_keys()).prop_map(
            |(group, tier, parent, keys)| KvChange::Stored { group, tier, parent: parent.map(KvKey), keys }
        ),
        (any::<u32>(), any_tier(), any_keys()).prop_map(|(group, tier, keys)| KvChange::Removed {
            group,
            tier,
            keys
        }),
        prop::option::of(any_tier()).prop_map(|tier| KvChange::Cleared { tier }),
    ]
}

fn any_group() -> impl Strategy<Value = BlockGroup> {
    (any::<u32>(), 1..=u32::MAX, any::<[u8; 16]>()).prop_map(|(number, block_tokens, root)| BlockGroup {
        number,
        block_tokens,
        root: BlockHash(root),
    })
}

fn any_frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        (".{0,40}", any::<u64>(), ".{0,40}", prop::collection::vec(any_group(), 0..20), any::<Option<u64>>())
            .prop_map(|(worker, epoch, model, groups, resumes_at)| {
                Frame::Hello(Hello { worker, epoch, model, groups, resumes_at })
            }),
        (any::<u32>(), any_tier(), any_keys())
            .prop_map(|(group, tier, keys)| Frame::SnapshotPart(SnapshotPart { group, tier, keys })),
        any::<u64>().prop_map(|next_sequence| Frame::SnapshotEnd { next_sequence }),
        (any::<u64>(), -1e12..1e12_f64, prop::collection::vec(any_change(), 0..20)).prop_map(
            |(sequence, published_s, changes)| Frame::Batch(KvBatch { sequence, published_s, changes })
        ),
        any::<u64>().prop_map(|next_sequence| Frame::Alive { next_sequence }),
    ]
}

fn encoded(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for frame in frames {
        frame.encode(&mut bytes);
    }
    bytes
}

/// All frames of a stream that comes in pieces.
fn decoded<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<Frame>, StreamError> {
    let mut decoder = FrameDecoder::default();
    let mut frames = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        while let Some(frame) = decoder.next_frame()? {
            frames.push(frame);
        }
    }
    Ok(frames)
}

fn framed(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32 + 1).to_be_bytes().to_vec();
    bytes.push(kind);
    bytes.extend_from_slice(body);
    bytes
}

proptest! {
    #[test]
    fn frames_come_back_as_they_were_however_the_stream_is_cut(
        frames in prop::collection::vec(any_frame(), 1..8),
        piece_bytes in 1..200_usize,
    ) {
        let bytes = encoded(&frames);
        prop_assert_eq!(decoded(bytes.chunks(piece_bytes)).unwrap(), frames);
    }

    #[test]
    fn a_frame_that_is_cut_short_is_refused_and_one_that_has_not_come_is_waited_for(
        frame in any_frame(),
        share in 0.0..1.0_f64,
    ) {
        let bytes = encoded(&[frame]);
        let n_kept = (bytes.len() as f64 * share) as usize;
        prop_assert_eq!(decoded([&bytes[..n_kept]]), Ok(Vec::new()));
        let body = &bytes[5..];
        let cut = &body[..(body.len() as f64 * share) as usize];
        prop_assert!(decoded([&framed(bytes[4], cut)[..]]).is_err());
    }

    #[test]
    fn hostile_bytes_are_read_or_refused_and_never_bring_more_than_they_carry(
        bytes in prop::collection::vec(any::<u8>(), 0..400),
        kind in 0..7_u8,
    ) {
        let _ = decoded([&bytes[..]]);
        if let Ok(frames) = decoded([&framed(kind, &bytes)[..]]) {
            let n_keys: usize = frames.iter().map(n_keys).sum();
            prop_assert!(8 * n_keys <= bytes.len());
        }
    }

    #[test]
    fn a_flipped_byte_is_read_or_refused(frame in any_frame(), at in any::<usize>(), with in 1..=255_u8) {
        let mut bytes = encoded(&[frame]);
        let at = 4 + at % (bytes.len() - 4);
        bytes[at] ^= with;
        let _ = decoded([&bytes[..]]);
    }
}

fn n_keys(frame: &Frame) -> usize {
    match frame {
        Frame::SnapshotPart(part) => part.keys.len(),
        Frame::Batch(batch) => batch.changes.iter().map(|change| change.keys().len()).sum(),
        _ => 0,
    }
}

#[test]
fn the_bytes_of_a_batch_are_pinned() {
    let changes = vec![
        KvChange::Stored { group: 0, tier: KvTier::Gpu, parent: None, keys: vec![KvKey(1), KvKey(2)] },
        KvChange::Stored { group: 1, tier: KvTier::Cpu, parent: Some(KvKey(5)), keys: vec![KvKey(6)] },
        KvChange::Removed { group: 1, tier: KvTier::Disk, keys: vec![KvKey(u64::MAX)] },
        KvChange::Cleared { tier: None },
        KvChange::Cleared { tier: Some(KvTier::Remote) },
    ];
    let bytes = encoded(&[Frame::Batch(KvBatch { sequence: 7, published_s: 1.5, changes })]);
    let expected = b"\0\0\0\x47\x04\
        \x93\x07\xcb\x3f\xf8\0\0\0\0\0\0\x95\
        \x95\x01\0\0\xc0\xc4\x10\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\
        \x95\x01\x01\x01\x05\xc4\x08\0\0\0\0\0\0\0\x06\
        \x94\x02\x01\x02\xc4\x08\xff\xff\xff\xff\xff\xff\xff\xff\
        \x92\x03\xc0\
        \x92\x03\x03";
    assert_eq!(bytes, expected);
}

#[test]
fn a_length_that_no_frame_has_is_refused_before_its_bytes_come() {
    for n_bytes in [0, MAX_FRAME_BYTES as u32 + 1, u32::MAX] {
        let refused = decoded([&n_bytes.to_be_bytes()[..]]);
        assert_eq!(refused, Err(StreamError::BadLength { n_bytes: n_bytes as usize }));
    }
}

#[test]
fn the_largest_batch_that_a_writer_makes_fits_a_frame() {
    let lone = |key| KvChange::Stored {
        group: u32::MAX,
        tier: KvTier::Gpu,
        parent: Some(KvKey(u64::MAX)),
        keys: vec![KvKey(key)],
    };
    let changes = (0..MAX_FRAME_KEYS as u64).map(lone).collect();
    let frame = Frame::Batch(KvBatch { sequence: u64::MAX, published_s: 0.1, changes });
    let bytes = encoded(std::slice::from_ref(&frame));
    assert!(bytes.len() <= MAX_FRAME_BYTES / 4 + 4, "{}", bytes.len());
    assert_eq!(decoded([&bytes[..]]).unwrap(), [frame]);
}

#[test]
fn unknown_frames_and_added_fields_are_passed_over_and_unknown_changes_are_not() {
    let alive = encoded(&[Frame::Alive { next_sequence: 3 }]);
    let unknown = framed(99, b"whatever");
    let with_field = framed(5, b"\x92\x03\xa1x");
    let expected = Ok(vec![Frame::Alive { next_sequence: 3 }, Frame::Alive { next_sequence: 3 }]);
    assert_eq!(decoded([&unknown[..], &alive[..], &with_field[..]]), expected);

    // A batch with a change of kind 9, a tier 4, a key of 7 bytes, and bytes behind its end.
    for body in [
        &b"\x93\x00\x00\x91\x91\x09"[..],
        b"\x93\x00\x00\x91\x94\x02\x00\x04\xc4\x00",
        b"\x93\x00\x00\x91\x94\x02\x00\x00\xc4\x07\0\0\0\0\0\0\0",
        b"\x93\x00\x00\x90\x00",
        b"\x93\x00\x00\x91\x90",
        b"\x92\x00\x00",
    ] {
        assert!(decoded([&framed(4, body)[..]]).is_err(), "{body:?}");
    }
}

#[test]
fn a_key_reads_back_what_it_prints() {
    let key = KvKey::from(BlockHash([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]));
    assert_eq!(key.to_string(), "0001020304050607");
    assert_eq!(key.to_string().parse(), Ok(key));
    assert_eq!("1f".parse(), Ok(KvKey(31)));
    for text in ["", "+1", "-1", "0x1", "g", "00000000000000001", "1 "] {
        assert!(text.parse::<KvKey>().is_err(), "{text}");
    }
}
