//! Bytes, floods and churn: the index stays within its bounds and says what it dropped.

use kvik_index::holders::{BlockKey, Event, HolderIndex, IndexConfig, LookupOptions, Matches, Tier};

use crate::support::{Feed, Random, keys, removed, stored};

const BUDGET_BYTES: u64 = 12 << 20;

fn run(number: u64, n_blocks: u64) -> Vec<BlockKey> {
    keys((0..n_blocks).map(|block| number << 20 | block))
}

#[test]
fn the_budget_holds_and_what_is_evicted_is_a_miss() {
    let mut feed = Feed::new(IndexConfig { budget_bytes: BUDGET_BYTES, ..IndexConfig::default() }, 2);
    for number in 0..6_000 {
        feed.send(number as usize % 2, stored(&run(number, 100)));
        assert!(feed.index.stats().bytes <= BUDGET_BYTES);
    }
    let stats = feed.index.stats();
    assert!(stats.n_blocks > 150_000, "the budget is used: {stats:?}");
    let counters = feed.index.counters();
    assert_eq!(counters.blocks_evicted + stats.n_holdings, 600_000);
    // The newest is there, the oldest is not.
    assert_eq!(feed.prefix(1, &run(5_999, 100)), 100);
    assert_eq!(feed.prefix(0, &run(0, 100)), 0);
}

#[test]
fn prompts_that_are_asked_for_stay_and_lose_only_what_no_lookup_reached() {
    let mut feed = Feed::new(IndexConfig { budget_bytes: BUDGET_BYTES, ..IndexConfig::default() }, 1);
    let hot = run(1 << 30, 100);
    feed.send(0, stored(&hot));
    for number in 0..6_000 {
        feed.send(0, stored(&run(number, 100)));
        if number % 50 == 0 {
            // Readers only come as far as block 60.
            assert!(feed.prefix(0, &hot[..60]) == 60, "evicted at {number}");
        }
    }
    assert_eq!(feed.prefix(0, &hot), 60);
    assert!(feed.index.counters().blocks_evicted > 0);
}

#[test]
fn a_hundredfold_churn_does_not_grow_the_index() {
    let mut feed = Feed::new(IndexConfig::default(), 4);
    let mut random = Random(3);
    let (n_runs, n_blocks) = (150_u64, 100_u64);
    for number in 0..n_runs {
        feed.send(number as usize % 4, stored(&run(number, n_blocks)));
    }
    let mut oldest = 0;
    let mut highest_bytes = 0;
    for number in n_runs..n_runs * 101 {
        feed.send(number as usize % 4, stored(&run(number, n_blocks)));
        let mut gone = run(oldest, n_blocks);
        if random.below(2) == 0 {
            gone.reverse();
        }
        feed.send(oldest as usize % 4, removed(&gone));
        oldest += 1;
        if number == n_runs * 3 {
            highest_bytes = feed.index.stats().bytes;
        }
    }
    // After three rounds every array has its size; 98 more add no more than one step of each.
    let bytes = feed.index.stats().bytes;
    assert!(bytes <= highest_bytes * 3 / 2, "{bytes} bytes after churn, {highest_bytes} before");
    assert_eq!(feed.index.stats().n_blocks, n_runs * n_blocks);
    for number in oldest..oldest + n_runs {
        feed.send(number as usize % 4, removed(&run(number, n_blocks)));
    }
    while feed.index.maintain(1 << 16) {}
    assert!(feed.index.stats().bytes < HolderIndex::MIN_BUDGET_BYTES / 4, "{:?}", feed.index.stats());
}

#[test]
fn restarts_without_end_are_swept_as_they_come() {
    let mut feed = Feed::new(IndexConfig::default(), 1);
    let source = feed.sources[0];
    let mut highest_bytes = 0;
    for epoch in 2..70_000 {
        assert!(feed.index.start_epoch(source, epoch));
        assert!(feed.index.replace(source, Some(epoch), 0, [(Tier::Gpu, &run(epoch, 3)[..])]));
        if epoch == 36_000 {
            highest_bytes = feed.index.stats().bytes;
        }
    }
    assert!(feed.index.stats().bytes <= highest_bytes * 3 / 2);
    assert_eq!(feed.index.counters().blocks_refused, 0);
    assert_eq!(feed.prefix(0, &run(69_999, 3)), 3);
    assert_eq!(feed.prefix(0, &run(69_998, 3)), 0);
}

#[test]
fn a_flood_of_one_source_is_cut_at_its_bound_and_leaves_the_others_alone() {
    let mut feed = Feed::new(IndexConfig { max_blocks_per_source: 1000, ..IndexConfig::default() }, 2);
    let calm = run(1 << 30, 50);
    feed.send(0, stored(&calm));
    for number in 0..100 {
        feed.send(1, stored(&run(number, 100)));
    }
    assert_eq!(feed.index.n_blocks_of(feed.sources[1]), Some(1000));
    assert_eq!(feed.index.counters().blocks_refused, 9000);
    assert_eq!(feed.prefix(0, &calm), 50);
    feed.send(1, removed(&run(0, 100)));
    feed.send(1, stored(&run(99, 100)));
    assert_eq!(feed.prefix(1, &run(99, 100)), 100);
}

#[test]
fn a_flood_of_repeated_stores_stays_within_the_budget() {
    let mut feed = Feed::new(IndexConfig { budget_bytes: BUDGET_BYTES, ..IndexConfig::default() }, 8);
    for source in 0..8 {
        for tier in Tier::ALL {
            for number in 0..300 {
                let keys = run(number, 100);
                feed.send(source, Event::Stored { tier, parent: None, keys: &keys });
                feed.send(source, Event::Stored { tier, parent: None, keys: &keys });
                assert!(feed.index.stats().bytes <= BUDGET_BYTES, "{:?}", feed.index.stats());
            }
        }
    }
}

#[test]
fn a_lookup_uses_the_memory_of_the_one_before() {
    let mut feed = Feed::new(IndexConfig::default(), 8);
    let prompt = run(1, 64);
    for source in 0..8 {
        feed.send(source, stored(&prompt[..8 * (source + 1)]));
    }
    let reader = feed.index.reader();
    let mut matches = Matches::default();
    reader.lookup(&prompt, LookupOptions::default(), &mut matches);
    let rows = matches.rows().as_ptr();
    for _ in 0..100 {
        reader.lookup(&prompt, LookupOptions::default(), &mut matches);
        assert_eq!(matches.rows().len(), 8);
        assert_eq!(matches.rows().as_ptr(), rows);
    }
}
