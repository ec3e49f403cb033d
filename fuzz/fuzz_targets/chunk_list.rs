//! What one store daemon sends to another that takes over from it: its terms, its frames and the list of chunks.
//!
//! What is accepted means the same when it is written and read again, and places that an arena takes do not overlap.

#![no_main]

use kvik_node::{ChunkList, TakeOver, TakeOverFrame};
use kvik_tier::shared::checksum;
use kvik_tier::{Arena, ArenaOptions, RamTier};
use libfuzzer_sys::fuzz_target;

const ARENA_BYTES: u64 = 1 << 20;

fuzz_target!(|input: &[u8]| {
    check(input);
    // Random bytes rarely begin right; these do, so that the checks behind are reached.
    check(&[b"KVIKND04", input].concat());
    let list = [b"KVIKCL03", input].concat();
    check(&[&list[..], &checksum(&list).0.to_le_bytes()].concat());
});

fn check(input: &[u8]) {
    if let Ok(take_over) = TakeOver::decode(input) {
        // Terms that fit into a frame; others are never sent.
        if let Ok(frame) = take_over.encode() {
            assert_eq!(TakeOver::decode(&frame).ok(), Some(take_over));
        }
    }
    if let Ok(frame) = TakeOverFrame::decode(input) {
        assert_eq!(TakeOverFrame::decode(&frame.encode()).ok(), Some(frame));
    }
    if let Ok(list) = ChunkList::decode(input) {
        assert_eq!(list.encode(), input);
        adopt(&list);
    }
}

fn adopt(list: &ChunkList) {
    let Ok(arena) = Arena::new(ArenaOptions::new(ARENA_BYTES)) else { return };
    let Ok(file) = arena.as_fd().try_clone_to_owned() else { return };
    let placed: Vec<_> = list.chunks.iter().map(|chunk| chunk.placed).collect();
    if let Ok(ram) = RamTier::adopt(file, &placed) {
        let used_bytes: u64 = placed.iter().map(|chunk| chunk.place.n_bytes.div_ceil(4096).max(1) * 4096).sum();
        assert_eq!(ram.arena().stat().used_bytes, used_bytes);
        assert!(used_bytes <= ARENA_BYTES);
    }
}
