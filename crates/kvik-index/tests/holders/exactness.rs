//! Holes, refills and strange orders: every block counts for itself.

use kvik_index::holders::{
    Batch, CostModel, CostQuery, Event, HolderIndex, IndexConfig, IndexError, LookupOptions, Matches,
    SourceSet, Tier, Verdict,
};

use crate::support::{Feed, keys, prefix_of, removed, stored};

fn one_source() -> Feed {
    Feed::new(IndexConfig::default(), 1)
}

#[test]
fn a_removed_block_in_the_middle_ends_the_prefix() {
    let mut feed = one_source();
    let prompt = keys(100..108);
    feed.send(0, stored(&prompt));
    feed.send(0, removed(&prompt[3..4]));
    assert_eq!(feed.prefix(0, &prompt), 3);
}

#[test]
fn a_refilled_hole_makes_the_prefix_whole_again() {
    let mut feed = one_source();
    let prompt = keys(100..108);
    feed.send(0, stored(&prompt));
    feed.send(0, removed(&prompt[3..4]));
    feed.send(0, stored(&prompt[3..4]));
    assert_eq!(feed.prefix(0, &prompt), 8);
}

#[test]
fn an_unknown_block_in_a_removal_does_not_stop_the_others() {
    let mut feed = one_source();
    let prompt = keys(100..108);
    feed.send(0, stored(&prompt));
    feed.send(0, removed(&keys([9999, 107])));
    assert_eq!(feed.prefix(0, &prompt), 7);
    assert_eq!(feed.index.counters().removals_unknown, 1);
}

#[test]
fn blocks_before_their_parents_count_once_the_parents_are_there() {
    let mut feed = one_source();
    let prompt = keys(100..108);
    feed.send(0, Event::Stored { tier: Tier::Gpu, parent: Some(prompt[3]), keys: &prompt[4..] });
    assert_eq!(feed.prefix(0, &prompt), 0);
    feed.send(0, stored(&prompt[..4]));
    assert_eq!(feed.prefix(0, &prompt), 8);
}

#[test]
fn a_hole_deep_in_a_long_prompt_is_found() {
    let mut feed = one_source();
    let prompt = keys(1000..1128);
    feed.send(0, stored(&prompt));
    feed.send(0, removed(&prompt[40..41]));
    assert_eq!(feed.prefix(0, &prompt), 40);
}

#[test]
fn a_block_stored_twice_outlives_one_removal() {
    let mut feed = one_source();
    let prompt = keys(0..4);
    feed.send(0, stored(&prompt));
    feed.send(0, stored(&prompt[1..2]));
    feed.send(0, removed(&prompt));
    assert_eq!(feed.prefix(0, &prompt[1..2]), 1);
    assert_eq!(feed.prefix(0, &prompt), 0);
    feed.send(0, removed(&prompt[1..2]));
    assert_eq!(feed.prefix(0, &prompt[1..2]), 0);
    assert_eq!(feed.index.stats().n_blocks, 0);
}

#[test]
fn a_block_stored_twice_outlives_one_removal_wherever_its_entry_moves() {
    let mut feed = Feed::new(IndexConfig::default(), 2);
    let prompt = keys(0..70_000);
    feed.send(0, stored(&prompt));
    feed.send(1, stored(&prompt[..100]));
    feed.send(0, stored(&prompt[20..30]));
    feed.send(1, stored(&prompt[25..27]));
    feed.send(1, stored(&prompt[25..26]));
    // Most of the first extent dies, and the rest moves.
    feed.send(0, removed(&prompt[100..30_000]));
    while feed.index.maintain(usize::MAX) {}
    assert!(feed.index.counters().entries_moved >= 100, "{:?}", feed.index.counters());
    feed.send(0, removed(&prompt[..100]));
    feed.send(1, removed(&prompt[..100]));
    for at in 0..100_usize {
        let held = [0, 1].map(|source| feed.prefix(source, &prompt[at..=at]) == 1);
        assert_eq!(held, [(20..30).contains(&at), (25..27).contains(&at)], "block {at}");
    }
    feed.send(1, removed(&prompt[25..27]));
    assert_eq!([25, 26].map(|at| feed.prefix(1, &prompt[at..=at])), [1, 0]);
}

#[test]
fn tiers_are_told_apart_and_one_can_be_cleared() {
    let mut feed = one_source();
    let prompt = keys(0..6);
    feed.send(0, stored(&prompt[..4]));
    feed.send(0, Event::Stored { tier: Tier::Cpu, parent: None, keys: &prompt });
    let reader = feed.index.reader();
    let mut matches = Matches::default();
    reader.lookup(&prompt, LookupOptions::default(), &mut matches);
    let row = &matches.rows()[0];
    assert_eq!((row.tier_run(Tier::Gpu), row.tier_run(Tier::Cpu), row.prefix_blocks()), (4, 6, 6));
    assert_eq!((row.prefix_in(Tier::Gpu), row.prefix_in(Tier::Cpu)), (4, 2));
    feed.send(0, Event::Cleared { tier: Some(Tier::Gpu) });
    reader.lookup(&prompt, LookupOptions::default(), &mut matches);
    assert_eq!((matches.rows()[0].tier_run(Tier::Gpu), matches.rows()[0].tier_run(Tier::Cpu)), (0, 6));
    assert_eq!(feed.index.n_blocks_of(feed.sources[0]), Some(6));
}

#[test]
fn a_filter_leaves_the_other_sources_out() {
    let mut feed = Feed::new(IndexConfig::default(), 5);
    let prompt = keys(0..6);
    for source in 0..5 {
        feed.send(source, stored(&prompt[..=source]));
    }
    let only: SourceSet = [feed.sources[1], feed.sources[4]].into_iter().collect();
    let mut matches = Matches::default();
    feed.index.reader().lookup(&prompt, LookupOptions::default().only(&only), &mut matches);
    let mut found: Vec<_> = matches.rows().iter().map(|row| (row.source(), row.prefix_blocks())).collect();
    found.sort_unstable();
    assert_eq!(found, [(feed.sources[1], 2), (feed.sources[4], 5)]);
}

#[test]
fn a_restart_forgets_at_once_without_touching_the_entries() {
    let mut feed = one_source();
    let prompt = keys(0..100_000);
    feed.send(0, stored(&prompt));
    let source = feed.sources[0];
    assert!(feed.index.start_epoch(source, 2));
    // Constant time: not one entry was visited, the blocks lie where they were, and none is reported.
    assert_eq!(feed.index.stats().n_blocks, 100_000);
    assert_eq!(feed.index.counters().blocks_swept, 0);
    assert_eq!(feed.prefix(0, &prompt), 0);
    assert_eq!(feed.index.n_blocks_of(source), Some(0));
    let old = Batch { source, epoch: Some(1), sequence: 1, replayed: false, events: &[stored(&prompt)] };
    assert_eq!(feed.index.apply(&old), Verdict::OldEpoch);
    let new = Batch { source, epoch: Some(2), sequence: 0, replayed: false, events: &[stored(&prompt[..7])] };
    assert_eq!(feed.index.apply(&new), Verdict::Applied);
    assert_eq!(feed.prefix(0, &prompt), 7);
    while feed.index.maintain(1000) {}
    assert_eq!(feed.index.stats().n_blocks, 7);
    assert_eq!(feed.index.stats().n_retired_holders, 0);
    assert_eq!(feed.prefix(0, &prompt), 7);
}

#[test]
fn a_gap_makes_a_source_unsure_until_it_is_replayed() {
    let mut feed = one_source();
    let prompt = keys(0..8);
    feed.send(0, stored(&prompt[..2]));
    let source = feed.sources[0];
    let events = [stored(&prompt[4..])];
    let early = Batch { source, epoch: Some(1), sequence: 2, replayed: false, events: &events };
    assert_eq!(feed.index.apply(&early), Verdict::Gap { expected: 1, got: 2 });
    let mut matches = Matches::default();
    let reader = feed.index.reader();
    reader.lookup(&prompt, LookupOptions::default(), &mut matches);
    assert!(matches.rows()[0].is_unsure());
    assert_eq!(matches.rows()[0].prefix_blocks(), 2);
    feed.send(0, stored(&prompt[2..4]));
    feed.send(0, stored(&prompt[4..]));
    reader.lookup(&prompt, LookupOptions::default(), &mut matches);
    assert!(!matches.rows()[0].is_unsure());
    assert_eq!(matches.rows()[0].prefix_blocks(), 8);
}

#[test]
fn a_skipped_gap_stays_unsure_until_the_source_is_replaced() {
    let mut feed = one_source();
    let prompt = keys(0..8);
    let source = feed.sources[0];
    feed.send(0, stored(&prompt));
    assert!(feed.index.skip_gap(source, 10));
    let mut matches = Matches::default();
    feed.index.reader().lookup(&prompt, LookupOptions::default(), &mut matches);
    assert!(matches.rows()[0].is_unsure());
    assert!(feed.index.replace(source, Some(1), 20, [(Tier::Gpu, &prompt[..3]), (Tier::Cpu, &prompt[..5])]));
    feed.index.reader().lookup(&prompt, LookupOptions::default(), &mut matches);
    assert!(!matches.rows()[0].is_unsure());
    assert_eq!(matches.rows()[0].tier_run(Tier::Gpu), 3);
    assert_eq!(matches.rows()[0].prefix_blocks(), 5);
    assert_eq!(feed.index.position(source), Some((Some(1), Some(20))));
    assert_eq!(feed.index.n_blocks_of(source), Some(8));
    assert!(!feed.index.replace(source, Some(0), 0, []), "an older epoch replaces nothing");
}

#[test]
fn a_removed_source_is_gone_and_its_late_events_are_dropped() {
    let mut feed = Feed::new(IndexConfig::default(), 2);
    let prompt = keys(0..8);
    feed.send(0, stored(&prompt));
    feed.send(1, stored(&prompt));
    let source = feed.sources[0];
    assert!(feed.index.remove_source(source));
    assert!(!feed.index.remove_source(source));
    assert_eq!(feed.prefix(0, &prompt), 0);
    assert_eq!(feed.prefix(1, &prompt), 8);
    let late = Batch { source, epoch: Some(1), sequence: 1, replayed: false, events: &[stored(&prompt)] };
    assert_eq!(feed.index.apply(&late), Verdict::UnknownSource);
    assert_eq!(feed.prefix(0, &prompt), 0);
    while feed.index.maintain(1000) {}
    let again = feed.index.add_source("worker", 0).unwrap();
    assert_eq!(prefix_of(&feed.index.reader(), again, &prompt), 0);
    assert_eq!(&*feed.index.reader().name(again).unwrap().worker, "worker");
}

#[test]
fn names_and_sources_are_bounded() {
    let mut index = HolderIndex::new(IndexConfig { max_sources: 2, ..IndexConfig::default() });
    let long = "x".repeat(1 << 20);
    assert!(matches!(index.add_source(&long, 0), Err(IndexError::BadName { .. })));
    assert!(matches!(index.add_source("", 0), Err(IndexError::BadName { .. })));
    index.add_source("a", 0).unwrap();
    assert!(matches!(index.add_source("a", 0), Err(IndexError::SourceExists { .. })));
    let second = index.add_source("a", 1).unwrap();
    assert!(matches!(index.add_source("b", 0), Err(IndexError::TooManySources { .. })));
    index.remove_source(second);
    assert!(index.add_source("b", 0).is_ok(), "a removed source makes room");
}

#[test]
fn the_cost_is_what_is_left_of_the_prompt_and_the_queue_and_what_must_move() {
    let mut feed = one_source();
    let prompt = keys(0..10);
    feed.send(0, stored(&prompt[..4]));
    feed.send(0, Event::Stored { tier: Tier::Disk, parent: None, keys: &prompt[..6] });
    let mut matches = Matches::default();
    feed.index.reader().lookup(&prompt, LookupOptions::default(), &mut matches);
    let model = CostModel {
        prefill_token_s: 2.0,
        queued_token_s: 1.0,
        move_byte_s: [0.0, 0.125, 0.25, 1.0],
        unsure_credit: 0.5,
    };
    let query = CostQuery { prompt_tokens: 160, block_tokens: 16, block_bytes: 8, queued_tokens: 5 };
    // 64 tokens left, five queued, two blocks of eight bytes from the disk.
    let expected_s = 64.0 * 2.0 + 5.0 + 2.0 * 8.0 * 0.25;
    assert!((model.cost_s(Some(&matches.rows()[0]), &query) - expected_s).abs() < 1e-9);
    assert!((model.cost_s(None, &query) - (160.0 * 2.0 + 5.0)).abs() < 1e-9);
}
