//! A message of an engine is read or refused, whatever its bytes.

#![no_main]

use kvik_proto::events::{EventBatch, KvEvent, Topic, parse_sequence};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = Topic::parse(bytes);
    let _ = parse_sequence(bytes);
    if let Ok(batch) = EventBatch::decode(bytes) {
        for event in &batch.events {
            // No more than the bytes could carry.
            if let KvEvent::Stored(stored) = event {
                assert!(stored.hashes.len() + stored.tokens.len() <= bytes.len());
            }
        }
    }
});
