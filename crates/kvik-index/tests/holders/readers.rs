//! Readers in threads while the writer works.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use kvik_index::holders::{BlockKey, Event, IndexConfig, LookupOptions, Matches, Tier, Walk};

use crate::support::{Feed, Random, keys, removed, stored};

#[test]
fn a_single_block_answer_is_true_at_some_moment_of_its_lookup() {
    // Block k is at the source exactly while its counter is odd. The writer counts up to odd+1 ("about to
    // change") before and to the next value after each change, so a reader knows what was possible.
    const N_BLOCKS: u64 = 64;
    let mut feed = Feed::new(IndexConfig::default(), 1);
    let source = feed.sources[0];
    let phases: Vec<AtomicU64> = (0..N_BLOCKS).map(|_| AtomicU64::new(0)).collect();
    let stop = AtomicBool::new(false);
    let reader = feed.index.reader();
    std::thread::scope(|scope| {
        let checkers: Vec<_> = (0..2)
            .map(|seed| {
                let (reader, phases, stop) = (reader.clone(), &phases, &stop);
                scope.spawn(move || {
                    let mut random = Random(seed);
                    let mut matches = Matches::default();
                    let mut n_sure = 0_u64;
                    while !stop.load(SeqCst) {
                        let block = random.below(N_BLOCKS);
                        let before = phases[block as usize].load(SeqCst);
                        reader.lookup(&[BlockKey(block)], LookupOptions::default(), &mut matches);
                        let after = phases[block as usize].load(SeqCst);
                        let is_there = matches.row(source).is_some();
                        // Phases: 0 absent, 1 storing, 2 present, 3 removing, 4 absent, ...
                        if before == after && before.is_multiple_of(2) {
                            assert_eq!(is_there, before % 4 == 2, "block {block} in phase {before}");
                            n_sure += 1;
                        }
                    }
                    n_sure
                })
            })
            .collect();
        let mut random = Random(99);
        for round in 0..12_000_u64 {
            let block = random.below(N_BLOCKS);
            let phase = phases[block as usize].fetch_add(1, SeqCst) + 1;
            let event_keys = [BlockKey(block)];
            feed.send(0, if phase % 4 == 1 { stored(&event_keys) } else { removed(&event_keys) });
            phases[block as usize].fetch_add(1, SeqCst);
            // Unrelated blocks come and go, so that pages split, extents fill and are cleaned.
            let others = keys((0..64).map(|at| 1 << 40 | (round % 2000) << 8 | at));
            feed.send(0, if round / 2000 % 2 == 0 { stored(&others) } else { removed(&others) });
            if round % 64 == 0 {
                feed.index.maintain(4096);
            }
        }
        stop.store(true, SeqCst);
        let n_sure: u64 = checkers.into_iter().map(|checker| checker.join().unwrap()).sum();
        assert!(n_sure > 100, "the readers have seen too little: {n_sure}");
    });
    assert!(feed.index.counters().entries_moved > 0, "entries moved under the readers");
}

#[test]
fn no_answer_names_a_block_for_a_source_that_never_had_it() {
    // Source s only ever holds chains whose number is s modulo the number of sources, or the shared ones,
    // and of chain c never more than c + 1 blocks. All sources restart, clear and evict all the time.
    const N_SOURCES: u64 = 6;
    let config = IndexConfig { budget_bytes: 10 << 20, ..IndexConfig::default() };
    let mut feed = Feed::new(config, N_SOURCES as usize + 1);
    let chain = |number: u64| keys((0..200).map(|block| (number + 1) << 16 | block));
    let stop = AtomicBool::new(false);
    let reader = feed.index.reader();
    let sources = feed.sources.clone();
    std::thread::scope(|scope| {
        let checkers: Vec<_> = (0..2)
            .map(|seed| {
                let (reader, stop, sources, chain) = (reader.clone(), &stop, &sources, &chain);
                scope.spawn(move || {
                    let mut random = Random(seed);
                    let mut matches = Matches::default();
                    let mut n_rows = 0;
                    while !stop.load(SeqCst) {
                        let number = random.below(180);
                        let walk = if random.below(2) == 0 { Walk::Prefix } else { Walk::All };
                        let options = LookupOptions { walk, ..LookupOptions::default() };
                        reader.lookup(&chain(number), options, &mut matches);
                        for row in matches.rows() {
                            let rank =
                                sources.iter().position(|source| *source == row.source()).unwrap() as u64;
                            assert!(
                                number.is_multiple_of(5) || number % N_SOURCES == rank,
                                "chain {number} at {rank}"
                            );
                            let n_blocks = row.prefix_blocks().max(row.highest_block());
                            assert!(u64::from(n_blocks) <= number + 1, "{n_blocks} blocks of chain {number}");
                            n_rows += 1;
                        }
                    }
                    n_rows
                })
            })
            .collect();
        let mut random = Random(5);
        for round in 0..6_000_u64 {
            let number = random.below(180);
            let at =
                if number.is_multiple_of(5) { random.below(N_SOURCES) } else { number % N_SOURCES } as usize;
            let keys = chain(number)[..=number as usize].to_vec();
            let tier = Tier::ALL[random.below(4) as usize];
            let event = match random.below(12) {
                0 => Event::Cleared { tier: None },
                1 => Event::Cleared { tier: Some(tier) },
                2..5 => Event::Removed { tier, keys: &keys },
                _ => Event::Stored { tier, parent: None, keys: &keys },
            };
            // Ballast of a source of its own brings the index to its budget.
            let ballast: Vec<BlockKey> =
                (0..100).map(|block| BlockKey(1 << 50 | round << 8 | block)).collect();
            let (first_half, second_half) = ballast.split_at(50);
            let group = [
                (N_SOURCES as usize, stored(first_half)),
                (at, event),
                (N_SOURCES as usize, stored(second_half)),
            ];
            if random.below(2) == 0 {
                feed.send_group(&group);
            } else {
                for (source, event) in group {
                    feed.send(source, event);
                }
            }
            if round % 32 == 0 {
                feed.index.maintain(8192);
            }
        }
        stop.store(true, SeqCst);
        let n_rows: u64 = checkers.into_iter().map(|checker| checker.join().unwrap()).sum();
        assert!(n_rows > 100, "the readers have seen too little: {n_rows}");
    });
    let counters = feed.index.counters();
    assert!(counters.blocks_evicted > 0 && counters.blocks_swept > 0, "{counters:?}");
}
