//! Blocks of a source, page by page.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use kvik_index::holders::{BlockKey, IndexConfig};

use crate::support::{Feed, keys, list, removed, stored};

#[test]
fn blocks_that_stay_are_listed_exactly_once_while_others_come_and_go() {
    let mut feed = Feed::new(IndexConfig { hash_seed: 7, ..IndexConfig::default() }, 2);
    let source = feed.sources[0];
    let staying = keys((0..3_000).map(|block| 1 << 40 | block));
    // Every second one is stored among blocks that leave, so that it moves when its extent is cleaned.
    for (number, pair) in staying.chunks(2).enumerate() {
        feed.send(0, stored(pair));
        feed.send(1, stored(&keys((0..30).map(|block| 2 << 40 | (number as u64) << 8 | block))));
    }
    let reader = feed.index.reader();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lister = scope.spawn(|| {
            let mut n_listings = 0;
            while !stop.load(SeqCst) {
                let listed = list(&reader, source, 100);
                let kept = listed.iter().filter(|(key, _)| key.0 >> 40 == 1);
                assert!(kept.map(|(key, _)| key).eq(&staying), "a block that stays is missing");
                n_listings += 1;
            }
            n_listings
        });
        for number in 0..1_500 {
            feed.send(1, removed(&keys((0..30).map(|block| 2 << 40 | number << 8 | block))));
            let others = keys((0..200).map(|block| 3 << 40 | number << 8 | block));
            feed.send(0, stored(&others));
            if number % 2 == 0 {
                feed.send(0, removed(&others));
            }
            feed.index.maintain(1 << 14);
        }
        stop.store(true, SeqCst);
        assert!(lister.join().unwrap() > 2, "too few listings");
    });
    assert!(feed.index.counters().entries_moved > 1_000, "entries moved under the listing");
    assert_eq!(list(&reader, feed.sources[1], 100), []);
}

#[test]
fn a_page_costs_a_bounded_number_of_steps_and_a_listing_is_linear() {
    const N_BLOCKS: u64 = 400_000;
    let mut feed = Feed::new(IndexConfig::default(), 2);
    let all = keys(0..N_BLOCKS);
    feed.send(0, stored(&all));
    let rare = [BlockKey(17)];
    feed.send(1, stored(&rare));
    let reader = feed.index.reader();
    let n_lines = |source: usize, limit: usize| {
        let mut counts = Vec::new();
        let mut from = None;
        loop {
            let page = reader.blocks_of(feed.sources[source], from, limit);
            counts.push(page.n_lines);
            from = page.next;
            if from.is_none() {
                return counts;
            }
        }
    };
    // A line has up to eight blocks, so a page of 100 needs a few dozen of them wherever it begins.
    let dense = n_lines(0, 100);
    assert!(dense.len() >= 4_000 && dense.iter().all(|n_lines| *n_lines < 200), "{:?}", dense.iter().max());
    // Pages of a source with hardly any block end too, and all pages together see the table about once.
    let sparse = n_lines(1, 100);
    assert!(sparse.len() > 1 && sparse.iter().all(|n_lines| *n_lines <= (1 << 16) + 64), "{sparse:?}");
    let (n_dense, n_sparse): (usize, usize) = (dense.iter().sum(), sparse.iter().sum());
    assert!(n_dense < 2 * n_sparse, "{n_dense} lines in small pages, {n_sparse} in large ones");
    assert_eq!(list(&reader, feed.sources[1], 100), [(BlockKey(17), 1)]);
    assert_eq!(list(&reader, feed.sources[0], usize::MAX).len() as u64, N_BLOCKS);
}
