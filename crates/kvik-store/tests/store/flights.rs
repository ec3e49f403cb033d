//! Reads that many wait for, that are given up, and that come too late.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvik_store::Store;
use kvik_tier::TierKind;

use crate::support::*;

/// A store whose nvme tier has a chain of `n_chunks` that memory has not.
fn with_cold_chain(setup: Setup, n_chunks: usize) -> (Store, Arc<TestTier>, kvik_store::Chain) {
    let nvme = TestTier::new(TierKind::Nvme);
    let chain = chain_of(&Setup::new(1).open(), 1, n_chunks);
    for chunk_idx in 0..n_chunks {
        plant(&nvme, &chain, chunk_idx);
    }
    let store = setup.local(&nvme).open();
    let chain = chain_of(&store, 1, n_chunks);
    (store, nvme, chain)
}

#[test]
fn one_read_serves_all_waiters() {
    let (store, nvme, chain) = with_cold_chain(Setup::new(64), 4);
    nvme.gets.close();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..8).map(|_| scope.spawn(|| retrieve_all(&store, &chain))).collect();
        until("all have joined", || {
            let stats = store.stats();
            stats.n_flights == 4 && stats.n_joined_flights == 28
        });
        nvme.gets.open();
        for reader in readers {
            assert_eq!(reader.join().unwrap(), 4);
        }
    });
    assert_eq!(nvme.n_got(), 4);
}

#[test]
fn what_does_not_stay_in_memory_is_still_shared_while_it_is_held() {
    // Half of the memory is to be kept free, so that there is never room to spare.
    let (store, nvme, chain) = with_cold_chain(Setup::new(8).with(|options| options.ram_free_share = 0.5), 2);
    let held = store.retrieve(&chain, 0);
    assert_eq!(verify(&held, &chain, 0), 2);
    assert_eq!(store.tiers_of(&chain, 0), [TierKind::Nvme], "there is no room to spare");
    // Its parent is not in memory, so it does not stay either.
    let found = store.prefetch(&chain, 1);
    assert!(found.is_done());
    assert_eq!(nvme.n_got(), 2, "the second one joined the first");
    drop((held, found));
    until("its memory goes with the last lease", || store.health()[0].1.used_bytes == Some(0));
}

#[test]
fn a_chunk_stays_in_memory_when_it_is_used_again() {
    let (store, _, chain) = with_cold_chain(Setup::new(8).with(|options| options.ram_free_share = 0.5), 2);
    assert_eq!(retrieve_all(&store, &chain), 2);
    assert_eq!(store.tiers_of(&chain, 1), [TierKind::Nvme]);
    assert_eq!(retrieve_all(&store, &chain), 2);
    until("it is kept", || store.tiers_of(&chain, 1) == [TierKind::Ram, TierKind::Nvme]);
    let n_flights = store.stats().n_flights;
    assert_eq!(retrieve_all(&store, &chain), 2);
    assert_eq!((store.stats().n_flights, store.stats().n_promoted), (n_flights, 2));
}

#[test]
fn a_chunk_that_two_hold_at_a_time_stays_in_memory() {
    let (store, nvme, chain) = with_cold_chain(Setup::new(8).with(|options| options.ram_free_share = 0.5), 2);
    let held = store.retrieve(&chain, 0);
    assert_eq!(retrieve_all(&store, &chain), 2);
    assert_eq!(store.tiers_of(&chain, 1), [TierKind::Ram, TierKind::Nvme]);
    assert_eq!((verify(&held, &chain, 0), nvme.n_got()), (2, 2));
}

#[test]
fn chunks_that_arrive_in_any_order_all_stay() {
    let (store, _, chain) = with_cold_chain(
        Setup::new(64).with(|options| {
            options.n_read_threads = 8;
            options.batch_bytes = 1;
        }),
        24,
    );
    assert_eq!(retrieve_all(&store, &chain), 24);
    until("all are kept", || store.lookup(&chain).tokens_in(TierKind::Ram) == 24 * CHUNK_TOKENS);
}

#[test]
fn a_dropped_prefetch_gives_up_what_has_not_begun() {
    let (store, nvme, chain) = with_cold_chain(
        Setup::new(64).with(|options| {
            options.n_read_threads = 1;
            options.batch_bytes = 1;
        }),
        6,
    );
    nvme.gets.close();
    let prefetch = store.prefetch(&chain, 0);
    until("the first read has begun", || nvme.gets.n_waiting() == 1);
    assert!(!prefetch.is_done());
    drop(prefetch);
    nvme.gets.open();
    until("the queue is empty", || store.queues()[0].read_bytes == 0);
    assert_eq!(nvme.n_got(), 1);
    assert_eq!(retrieve_all(&store, &chain), 6, "the next one reads the rest");
}

#[test]
fn a_prefetch_calls_back_once_when_it_is_done() {
    let (store, nvme, chain) = with_cold_chain(Setup::new(64), 3);
    nvme.gets.close();
    let prefetch = store.prefetch(&chain, 0);
    let n_calls = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&n_calls);
    prefetch.on_done(move || {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(n_calls.load(Ordering::SeqCst), 0);
    nvme.gets.open();
    until("it is called", || n_calls.load(Ordering::SeqCst) == 1);
    assert!(prefetch.is_done());
    let counted = Arc::clone(&n_calls);
    prefetch.on_done(move || {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(n_calls.load(Ordering::SeqCst), 2, "at once, since it is done");
    assert_eq!(verify(&prefetch.wait(Duration::ZERO), &chain, 0), 3);
}

#[test]
fn a_tier_that_hangs_costs_the_wait_and_no_more() {
    let (store, nvme, chain) = with_cold_chain(Setup::new(64), 3);
    assert_eq!(retrieve_all(&store, &chain), 3);
    let longer = chain_of(&store, 1, 5);
    plant(&nvme, &longer, 3);
    forget_memory(&store);
    nvme.gets.close();
    let retrieved = store.prefetch(&chain, 0).wait(Duration::from_millis(20));
    assert_eq!(retrieved.n_tokens(), 0);
    assert!(retrieved.is_truncated());
    assert_eq!(store.stats().n_timeouts, 1);
    drop(retrieved);
    // The read that was left behind ends some time, and its chunk is of use to others.
    nvme.gets.open();
    assert_eq!(retrieve_all(&store, &chain), 3);
}

#[test]
fn what_arrived_before_the_wait_ended_is_given() {
    let (store, nvme, chain) = with_cold_chain(Setup::new(64), 4);
    assert_eq!(verify(&store.retrieve(&chain, 0), &chain, 0), 4);
    store.clear(&kvik_store::Clear {
        chain: Some(chain.clone()),
        tiers: Some(vec![TierKind::Ram.into()]),
        ..Default::default()
    });
    let short = chain_of(&store, 1, 2);
    assert_eq!(retrieve_all(&store, &short), 2);
    nvme.gets.close();
    let retrieved = store.prefetch(&chain, 0).wait(Duration::from_millis(20));
    assert_eq!(verify(&retrieved, &chain, 0), 2);
    nvme.gets.open();
}

#[test]
fn the_last_handle_may_be_dropped_on_a_thread_of_the_store() {
    let (store, nvme, chain) = with_cold_chain(Setup::new(64), 1);
    nvme.gets.close();
    let prefetch = store.prefetch(&chain, 0);
    let is_dropped = Arc::new(AtomicU64::new(0));
    let dropped = Arc::clone(&is_dropped);
    prefetch.on_done(move || {
        drop(store);
        dropped.store(1, Ordering::SeqCst);
    });
    nvme.gets.open();
    until("the store is closed", || is_dropped.load(Ordering::SeqCst) == 1);
    assert_eq!(verify(&prefetch.wait(Duration::from_secs(30)), &chain, 0), 1);
}
