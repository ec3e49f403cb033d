//! Room in memory, and the way down to the lower tiers.

use kvik_store::policy::PolicyKind;
use kvik_store::{Write, WriteBack};
use kvik_tier::TierKind;
use kvik_tier::conformance::MapTier;

use crate::support::*;

#[test]
fn stored_chunks_go_down_parents_first() {
    let (nvme, redis) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis));
    let store = Setup::new(32).local(&nvme).remote(&redis).open();
    let chain = chain_of(&store, 1, 8);
    nvme.puts.close();
    assert_eq!(store_chain(&store, &chain), 8);
    assert_eq!(store.tiers_of(&chain, 0).first(), Some(&TierKind::Ram));
    nvme.puts.open();
    flush(&store);
    for chunk_idx in 0..8 {
        assert_eq!(store.tiers_of(&chain, chunk_idx), [TierKind::Ram, TierKind::Nvme, TierKind::Redis]);
        assert!(nvme.has(&chain, chunk_idx) && redis.has(&chain, chunk_idx));
    }
    forget_memory(&store);
    assert_eq!(retrieve_all(&store, &chain), 8);
}

#[test]
fn what_is_written_on_reuse_is_not_written_before() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(32).with(|options| options.write_back = WriteBack::OnReuse).local(&nvme).open();
    let chain = chain_of(&store, 1, 4);
    assert_eq!(store_chain(&store, &chain), 4);
    flush(&store);
    assert_eq!(nvme.n_put(), 0);
    assert_eq!(retrieve_all(&store, &chain_of(&store, 1, 2)), 2);
    flush(&store);
    assert_eq!(nvme.n_put(), 2, "the two that were used");
    assert_eq!(retrieve_all(&store, &chain), 4);
    assert_eq!(retrieve_all(&store, &chain), 4);
    flush(&store);
    assert_eq!(nvme.n_put(), 4, "each once");
}

#[test]
fn a_queue_that_is_full_drops_writes_and_counts_them() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(64)
        .with(|options| options.write_queue_bytes = Some(4 * PAYLOAD_BYTES as u64))
        .local(&nvme)
        .open();
    nvme.puts.close();
    let chain = chain_of(&store, 1, 16);
    assert_eq!(store_chain(&store, &chain), 16, "no caller waits for the queue");
    assert_eq!(store.queues()[0].write_bytes, 4 * PAYLOAD_BYTES as u64);
    assert_eq!(store.stats().dropped_writes, [(TierKind::Nvme.into(), 12)]);
    nvme.puts.open();
    flush(&store);
    assert_eq!(store.stats().written, [(TierKind::Nvme.into(), 4)]);
    assert!(nvme.has(&chain, 3) && !nvme.has(&chain, 4));
    // Another use gives the others another chance.
    until("all are written", || {
        assert_eq!(retrieve_all(&store, &chain), 16);
        flush(&store);
        nvme.has(&chain, 15)
    });
}

#[test]
fn a_chunk_without_its_parent_is_not_written_to_a_local_tier() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(32).local(&nvme).open();
    nvme.set_failing(true);
    let chain = chain_of(&store, 1, 2);
    assert!(store_chunk(&store, &chain, 0));
    flush(&store);
    nvme.set_failing(false);
    assert!(store_chunk(&store, &chain, 1));
    flush(&store);
    assert!(!nvme.has(&chain, 0) && !nvme.has(&chain, 1));
    assert_eq!(store.stats().dropped_writes, [(TierKind::Nvme.into(), 2)]);
}

#[test]
fn memory_is_made_by_evicting_leaves() {
    for policy in PolicyKind::ALL {
        let store = Setup::new(8).with(|options| options.policy = policy).open();
        for name in 0..12 {
            let chain = chain_of(&store, name, 3);
            assert_eq!(store_chain(&store, &chain), 3, "{policy}");
            let n_found = store.lookup(&chain).n_chunks;
            for chunk_idx in n_found..3 {
                assert!(store.tiers_of(&chain, chunk_idx).is_empty(), "{policy}: a hole before {chunk_idx}");
            }
        }
        let stats = store.stats();
        assert!(stats.evicted_chunks[0].1 >= 28, "{policy}: {stats:?}");
    }
}

#[test]
fn a_chunk_that_waits_to_be_written_is_no_victim() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(4).local(&nvme).open();
    nvme.puts.close();
    let chain = chain_of(&store, 1, 4);
    assert_eq!(store_chain(&store, &chain), 4);
    let other = chain_of(&store, 2, 1);
    assert!(matches!(store.begin_write(&other, 0, 0), Write::NoRoom));
    assert_eq!(store.stats().n_refused, 1);
    assert_eq!(store.lookup_local(&chain).tokens_in(TierKind::Ram), 4 * CHUNK_TOKENS);
    nvme.puts.open();
    flush(&store);
    assert!(store_chunk(&store, &other, 0));
    assert_eq!(store.lookup_local(&chain).n_chunks, 4, "what left memory is on disk");
}

#[test]
fn memory_full_of_leases_refuses_stores_and_shortens_loads() {
    let nvme = TestTier::new(TierKind::Nvme);
    let cold = chain_of(&Setup::new(1).open(), 2, 2);
    plant(&nvme, &cold, 0);
    plant(&nvme, &cold, 1);
    let store = Setup::new(4).local(&nvme).open();
    let (chain, cold) = (chain_of(&store, 1, 4), chain_of(&store, 2, 2));
    assert_eq!(store_chain(&store, &chain), 4);
    flush(&store);
    let held = store.retrieve(&chain, 0);
    assert!(matches!(store.begin_write(&chain_of(&store, 3, 1), 0, 0), Write::NoRoom));
    let refused = store.retrieve(&cold, 0);
    assert_eq!(refused.n_tokens(), 0);
    assert!(refused.is_truncated());
    drop(refused);
    assert_eq!(verify(&held, &chain, 0), 4, "nothing was taken from under the reader");
    drop(held);
    assert_eq!(retrieve_all(&store, &cold), 2);
}

#[test]
fn a_lease_survives_the_eviction_of_its_chunk() {
    let store = Setup::new(4).open();
    let chain = chain_of(&store, 1, 2);
    assert_eq!(store_chain(&store, &chain), 2);
    let held = store.retrieve(&chain, 0);
    forget_memory(&store);
    assert_eq!(store.lookup(&chain).n_tokens, 0);
    for name in 2..20 {
        store_chain(&store, &chain_of(&store, name, 2));
    }
    assert_eq!(verify(&held, &chain, 0), 2);
    drop(held);
    for name in 20..24 {
        assert_eq!(store_chain(&store, &chain_of(&store, name, 4)), 4, "its memory came back");
    }
}

#[test]
fn a_share_of_the_memory_is_kept_free() {
    let store = Setup::new(64).with(|options| options.ram_free_share = 0.25).open();
    for name in 0..40 {
        assert_eq!(store_chain(&store, &chain_of(&store, name, 2)), 2);
    }
    until("a quarter is free", || store.health()[0].1.used_bytes.unwrap() <= 48 * SLOT_BYTES);
    assert!(store.health()[0].1.n_chunks.unwrap() >= 40, "and not much more");
}

#[test]
fn a_full_disk_makes_room_for_what_is_new() {
    let nvme = TestTier::on(TierKind::Nvme, MapTier::with_capacity_bytes(6 * PAYLOAD_BYTES as u64));
    let store = Setup::new(32).local(&nvme).open();
    for name in 0..8 {
        assert_eq!(store_chain(&store, &chain_of(&store, name, 3)), 3);
        flush(&store);
    }
    let last = chain_of(&store, 7, 3);
    assert!((0..3).all(|chunk_idx| nvme.has(&last, chunk_idx)));
    for name in 0..8 {
        let chain = chain_of(&store, name, 3);
        let is_there: Vec<bool> = (0..3).map(|chunk_idx| nvme.has(&chain, chunk_idx)).collect();
        assert!(is_there.is_sorted_by(|before, after| before >= after), "leaves first: {is_there:?}");
    }
    let stats = store.stats();
    assert_eq!(stats.evicted_chunks[1], (TierKind::Nvme.into(), 18));
    assert_eq!(stats.dropped_writes, [(TierKind::Nvme.into(), 0)]);
}

#[test]
fn closing_writes_down_what_waits() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(32).local(&nvme).open();
    let chain = chain_of(&store, 1, 8);
    assert_eq!(store_chain(&store, &chain), 8);
    drop(store);
    assert!(nvme.has(&chain, 7));
}

#[test]
fn closing_does_not_wait_for_a_tier_that_hangs() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(32)
        .with(|options| options.close_timeout = std::time::Duration::from_millis(50))
        .local(&nvme)
        .open();
    nvme.puts.close();
    let chain = chain_of(&store, 1, 8);
    assert_eq!(store_chain(&store, &chain), 8);
    store.close();
    assert_eq!(retrieve_all(&store, &chain), 8, "memory goes on");
    assert!(!store.flush(std::time::Duration::ZERO));
    nvme.puts.open();
}
