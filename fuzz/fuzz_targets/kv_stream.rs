//! A stream of a worker is read or refused, whatever its bytes and however it is cut.

#![no_main]

use kvik_proto::kv_stream::{Frame, FrameDecoder, KvChange};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // As a stream, and as the body of one frame, whose length is then right.
    read(bytes, 1 + bytes.len() / 3);
    let mut framed = (bytes.len() as u32).to_be_bytes().to_vec();
    framed.extend_from_slice(bytes);
    read(&framed, framed.len());
});

fn read(bytes: &[u8], piece_bytes: usize) {
    let mut decoder = FrameDecoder::default();
    let mut n_keys = 0;
    for piece in bytes.chunks(piece_bytes) {
        decoder.push(piece);
        while let Ok(Some(frame)) = decoder.next_frame() {
            n_keys += match &frame {
                Frame::SnapshotPart(part) => part.keys.len(),
                Frame::Batch(batch) => batch.changes.iter().map(KvChange::keys).map(<[_]>::len).sum(),
                _ => 0,
            };
            // What was read can be written, and is read again as the same.
            let mut again = Vec::new();
            frame.encode(&mut again);
            if let Ok(Some(second)) = Frame::decode(&again[4..]) {
                // A time that is no number differs from itself.
                assert_eq!(format!("{frame:?}"), format!("{second:?}"));
            }
        }
    }
    // No more than the bytes could carry.
    assert!(8 * n_keys <= bytes.len());
}
