//! Clearing: what was removed is found by no later reader.

use kvik_store::{Clear, Commit, Write};
use kvik_tier::TierKind;

use crate::support::*;

fn everything() -> Clear {
    Clear::default()
}

#[test]
fn a_namespace_is_cleared_in_every_tier_and_others_are_not() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(32).local(&nvme).open();
    let ours = space_of(&store, "ours", 1).chain(&tokens_of(1, 12));
    let theirs = space_of(&store, "theirs", 1).chain(&tokens_of(1, 12));
    assert_eq!((store_chain(&store, &ours), store_chain(&store, &theirs)), (3, 3));
    flush(&store);
    let cleared = store.clear(&Clear { namespace: Some(namespace("ours")), ..Clear::default() });
    assert_eq!(cleared.chunks, [(TierKind::Ram.into(), 3), (TierKind::Nvme.into(), 3)]);
    assert_eq!(store.lookup(&ours).n_tokens, 0);
    assert!(!nvme.has(&ours, 0));
    assert_eq!(retrieve_all(&store, &theirs), 3);
    assert_eq!(store.stats().n_entries, 3);
    // The same content can be stored again.
    assert_eq!(store_chain(&store, &ours), 3);
    assert_eq!(retrieve_all(&store, &ours), 3);
    store.clear(&everything());
    assert_eq!(store.stats().n_entries, 0);
    assert_eq!(nvme.stat_chunks(), 0);
}

#[test]
fn a_chain_that_is_forgotten_leaves_every_tier_and_disturbs_no_other() {
    let (nvme, redis) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis));
    let store = Setup::new(32).local(&nvme).remote(&redis).open();
    let (gone, kept) = (chain_of(&store, 1, 3), chain_of(&store, 2, 3));
    assert_eq!(store_chain(&store, &gone), 3);
    let Write::Slot(under_way) = store.begin_write(&kept, 0, 0) else { panic!("no slot") };
    flush(&store);
    store.forget(&gone, std::time::Duration::from_mins(1));
    assert_eq!((nvme.stat_chunks(), redis.stat_chunks(), store.lookup(&gone).n_tokens), (0, 0, 0));
    assert_eq!(under_way.commit(), Commit::Stored, "a clear would have dropped it");
    assert_eq!(store_chain(&store, &gone), 3);
    // What waits to be written is removed after it was.
    store.forget(&gone, std::time::Duration::from_mins(1));
    flush(&store);
    assert_eq!((nvme.stat_chunks(), redis.stat_chunks(), store.lookup(&gone).n_tokens), (1, 1, 0));
}

#[test]
fn what_local_tiers_know_is_cleared_in_a_remote_tier_too() {
    let (nvme, redis) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis));
    let store = Setup::new(32).local(&nvme).remote(&redis).open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store_chain(&store, &chain), 3);
    flush(&store);
    assert_eq!(redis.stat_chunks(), 3);
    let cleared = store.clear(&everything());
    assert_eq!(
        cleared.chunks,
        [(TierKind::Ram.into(), 3), (TierKind::Nvme.into(), 3), (TierKind::Redis.into(), 3)]
    );
    assert_eq!((nvme.stat_chunks(), redis.stat_chunks()), (0, 0));
    assert_eq!(store.lookup(&chain).n_tokens, 0);
}

#[test]
fn one_tier_can_be_cleared_alone() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(32).local(&nvme).open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store_chain(&store, &chain), 3);
    flush(&store);
    store.clear(&Clear { tiers: Some(vec![TierKind::Nvme.into()]), ..Clear::default() });
    assert_eq!(store.tiers_of(&chain, 2), [TierKind::Ram]);
    assert_eq!(nvme.stat_chunks(), 0);
}

#[test]
fn clearing_a_chain_leaves_what_others_hang_on() {
    let redis = TestTier::new(TierKind::Redis);
    let store = Setup::new(32).remote(&redis).open();
    let space = space_of(&store, "", 1);
    let mut tokens = tokens_of(1, 16);
    let chain = space.chain(&tokens);
    tokens[9] += 1;
    let branch = space.chain(&tokens);
    assert_eq!((store_chain(&store, &chain), store_chain(&store, &branch)), (4, 4));
    flush(&store);
    let cleared = store.clear(&Clear {
        chain: Some(chain.clone()),
        tiers: Some(vec![TierKind::Ram.into()]),
        ..Clear::default()
    });
    assert_eq!(cleared.chunks, [(TierKind::Ram.into(), 2)]);
    assert_eq!(store.lookup_local(&chain).n_chunks, 2);
    assert_eq!(retrieve_all(&store, &branch), 4);
    // A remote tier knows no chains.
    store.clear(&Clear { chain: Some(chain.clone()), ..Clear::default() });
    assert_eq!(store.lookup(&chain).n_chunks, 2);
    assert!((0..4).all(|chunk_idx| !redis.has(&chain, chunk_idx)));
}

#[test]
fn leases_survive_a_clear_and_pins_do_not_stop_it() {
    let store = Setup::new(8).open();
    let chain = chain_of(&store, 1, 4);
    assert_eq!(store_chain(&store, &chain), 4);
    assert_eq!(store.pin(&chain), 16);
    let held = store.retrieve(&chain, 0);
    store.clear(&everything());
    assert_eq!(store.lookup(&chain).n_tokens, 0);
    assert_eq!(verify(&held, &chain, 0), 4);
    drop(held);
    assert!(store.unpin(&chain));
    // Nothing of it is left: all of the memory can be used.
    assert_eq!(store_chain(&store, &chain_of(&store, 2, 8)), 8);
}

#[test]
fn what_was_begun_before_a_clear_is_not_published() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(32).local(&nvme).open();
    let chain = chain_of(&store, 1, 2);
    let Write::Slot(writer) = store.begin_write(&chain, 0, 0) else { panic!("there is room") };
    store.clear(&everything());
    assert_eq!(writer.commit(), Commit::Cleared);
    assert_eq!(store.lookup(&chain).n_tokens, 0);

    // A read that has its bytes already.
    assert_eq!(store_chain(&store, &chain), 2);
    flush(&store);
    forget_memory(&store);
    nvme.after_gets.close();
    let prefetch = store.prefetch(&chain, 0);
    until("it is read", || nvme.after_gets.n_waiting() > 0);
    store.clear(&everything());
    nvme.after_gets.open();
    let retrieved = prefetch.wait(store.options().retrieve_timeout);
    assert_eq!(retrieved.n_tokens(), 0);
    assert_eq!(store.lookup(&chain).n_tokens, 0);
    assert_eq!(store.stats().n_entries, 0);

    // A write that waits.
    nvme.puts.close();
    assert_eq!(store_chain(&store, &chain), 2);
    until("the write has begun", || nvme.puts.n_waiting() > 0);
    std::thread::scope(|scope| {
        let clearing = scope.spawn(|| store.clear(&everything()));
        until("memory is cleared", || store.lookup(&chain).n_tokens == 0);
        nvme.puts.open();
        clearing.join().unwrap();
    });
    flush(&store);
    assert_eq!(store.lookup(&chain).n_tokens, 0);
    assert_eq!(nvme.stat_chunks(), 0);
    assert_eq!(store_chain(&store, &chain), 2);
}
