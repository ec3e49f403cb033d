//! A snapshot of the global index is loaded or refused, whatever its bytes; what is loaded is written as the same.

#![no_main]

use kvik_index::holders::{BlockKey, HolderIndex, IndexConfig, LookupOptions, Matches, SourceId};
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_64;

fuzz_target!(|bytes: &[u8]| {
    let config = IndexConfig { n_threads: 1, ..IndexConfig::default() };
    // With what every snapshot of this kind begins and ends with, which bytes by chance would never have.
    let mut snapshot = b"KVIKHIDX".to_vec();
    for word in [1, config.block_tokens, config.key_mode] {
        snapshot.extend_from_slice(&word.to_le_bytes());
    }
    snapshot.extend_from_slice(bytes);
    let checksum = xxh3_64(&snapshot);
    snapshot.extend_from_slice(&checksum.to_le_bytes());

    let Ok(mut index) = HolderIndex::from_snapshot(config, &snapshot) else { return };
    // No more than the bytes could carry.
    assert!(12 * index.stats().n_blocks <= bytes.len() as u64);
    let mut again = Vec::new();
    index.write_snapshot(&mut again).expect("memory takes all bytes");
    let second = HolderIndex::from_snapshot(config, &again).expect("what was written can be loaded");
    let counts =
        |index: &HolderIndex| (index.stats().n_blocks, index.stats().n_holdings, index.stats().n_sources);
    assert_eq!(counts(&index), counts(&second));
    for status in index.statuses() {
        let blocks = all_blocks(&index, status.id);
        let source = second.source(&status.name.worker, status.name.rank).expect("sources are the same");
        assert_eq!(blocks, all_blocks(&second, source));
        let mut matches = Matches::default();
        let keys: Vec<BlockKey> = blocks.iter().take(8).map(|(key, _)| *key).collect();
        index.reader().lookup(&keys, LookupOptions::default(), &mut matches);
        assert!(keys.is_empty() || matches.row(status.id).is_some());
    }
});

/// The blocks of a source in the order of their keys.
fn all_blocks(index: &HolderIndex, source: SourceId) -> Vec<(BlockKey, u8)> {
    let (mut blocks, mut from) = (Vec::new(), None);
    loop {
        let page = index.reader().blocks_of(source, from, usize::MAX);
        blocks.extend(page.blocks);
        from = page.next;
        if from.is_none() {
            blocks.sort_unstable();
            return blocks;
        }
    }
}
