//! A source replaced in steps, with other changes between them.

use kvik_index::holders::{BlockKey, Event, IndexConfig, Tier};

use crate::support::{Feed, keys, list, stored};

/// A feed whose first source holds `old`, and a replacement of it by `new` that waits for its end.
fn begun(old: &[BlockKey], new: &[BlockKey]) -> (Feed, kvik_index::holders::ReplacementId) {
    let mut feed = Feed::new(IndexConfig::default(), 2);
    feed.send(0, stored(old));
    let replacement = feed.index.begin_replace(feed.sources[0], Some(1), 9).unwrap();
    assert!(feed.index.replace_some(replacement, [(Tier::Gpu, None, new)]));
    (feed, replacement)
}

#[test]
fn readers_see_the_old_blocks_until_the_last_step_and_then_only_the_new_ones() {
    let (old, new) = (keys(0..50), keys(100..180));
    let (mut feed, replacement) = begun(&old, &new);
    assert_eq!((feed.prefix(0, &old), feed.prefix(0, &new)), (50, 0));
    assert_eq!(feed.index.n_blocks_of(feed.sources[0]), Some(50));
    // Another source has the same blocks, and a clear starts another generation.
    feed.send(1, stored(&new));
    feed.send(0, Event::Cleared { tier: None });
    assert_eq!((feed.prefix(0, &old), feed.prefix(0, &new), feed.prefix(1, &new)), (0, 0, 80));
    assert_eq!(feed.index.finish_replace(replacement), Some(true));
    assert_eq!((feed.prefix(0, &old), feed.prefix(0, &new), feed.prefix(1, &new)), (0, 80, 80));
    assert_eq!(feed.index.n_blocks_of(feed.sources[0]), Some(80));
    assert_eq!(feed.index.position(feed.sources[0]), Some((Some(1), Some(9))));
    assert_eq!(feed.index.finish_replace(replacement), None, "it is over");
}

#[test]
fn a_replacement_of_an_epoch_that_has_ended_is_refused_at_its_last_step() {
    let (old, new) = (keys(0..50), keys(100..180));
    let (mut feed, replacement) = begun(&old, &new);
    assert!(feed.index.start_epoch(feed.sources[0], 2));
    assert_eq!(feed.index.finish_replace(replacement), Some(false));
    while feed.index.maintain(1 << 12) {}
    assert_eq!(feed.prefix(0, &new), 0);
    assert_eq!(feed.index.stats().n_blocks, 0);
}

#[test]
fn an_abandoned_replacement_leaves_nothing_behind() {
    let (old, new) = (keys(0..50), keys(100..180));
    for how in 0..3 {
        let (mut feed, replacement) = begun(&old, &new);
        match how {
            0 => feed.index.abandon_replace(replacement),
            1 => assert!(feed.index.remove_source(feed.sources[0])),
            _ => feed.index.write_snapshot(&mut Vec::new()).unwrap(),
        }
        assert!(!feed.index.replace_some(replacement, [(Tier::Gpu, None, &old[..])]));
        assert_eq!(feed.index.finish_replace(replacement), None);
        while feed.index.maintain(1 << 12) {}
        let n_left = if how == 1 { 0 } else { 50 };
        assert_eq!(feed.index.stats().n_blocks, n_left, "{how}");
        assert_eq!(list(&feed.index.reader(), feed.sources[0], 10).len() as u64, n_left, "{how}");
    }
}

#[test]
fn the_bound_of_a_source_counts_the_replacement_alone() {
    let mut feed = Feed::new(IndexConfig { max_blocks_per_source: 100, ..IndexConfig::default() }, 1);
    let source = feed.sources[0];
    feed.send(0, stored(&keys(0..90)));
    let new = keys(1000..1130);
    let replacement = feed.index.begin_replace(source, Some(1), 9).unwrap();
    assert!(feed.index.replace_some(replacement, [(Tier::Gpu, None, &new[..80])]));
    assert!(feed.index.replace_some(replacement, [(Tier::Cpu, None, &new[80..])]));
    assert_eq!(feed.index.finish_replace(replacement), Some(true));
    assert_eq!(feed.index.n_blocks_of(source), Some(100));
    assert_eq!(feed.prefix(0, &new), 100);
}
