//! What a store knows after it was closed and opened again.

use std::sync::Arc;
use std::time::Duration;

use kvik_store::policy::PolicyKind;
use kvik_store::{Clear, Store};
use kvik_tier::conformance::MapTier;
use kvik_tier::{Checksummed, ChunkKey, NvmeOptions, NvmeTier, Tier, TierKind};
use kvik_types::BlockHash;

use crate::support::*;

/// Stores chains by their names and closes the store.
fn fill(nvme: &Arc<TestTier>, names: std::ops::Range<u32>, n_chunks: usize) {
    let store = Setup::new(256).local(nvme).open();
    for name in names {
        assert_eq!(store_chain(&store, &chain_of(&store, name, n_chunks)), n_chunks);
    }
}

#[test]
fn a_local_tier_is_warm_after_a_restart() {
    let nvme = TestTier::new(TierKind::Nvme);
    fill(&nvme, 0..4, 3);
    let store = Setup::new(256).local(&nvme).open();
    for name in 0..4 {
        let chain = chain_of(&store, name, 3);
        assert_eq!(store.lookup_local(&chain).tokens_in(TierKind::Nvme), 12);
        assert_eq!(retrieve_all(&store, &chain), 3);
    }
    assert_eq!(store.stats().n_entries, 12);
    // A namespace can be cleared before any of its chunks was asked for.
    drop(store);
    let store = Setup::new(256).local(&nvme).open();
    let cleared = store.clear(&Clear { namespace: Some(namespace("")), ..Clear::default() });
    assert_eq!(cleared.chunks[1], (TierKind::Nvme.into(), 12));
    assert_eq!(nvme.stat_chunks(), 0);
}

#[test]
fn a_tier_is_measured_before_its_first_prompt_and_leaves_memory_as_it_is() {
    let nvme = TestTier::new(TierKind::Nvme);
    let speed = |store: &Store| store.tier_states()[0].speed;
    // Nothing can be measured of an empty tier.
    let store = Setup::new(256).local(&nvme).open();
    store.measure_tiers(&space_of(&store, "", 1));
    assert_eq!(speed(&store), None);
    drop(store);
    fill(&nvme, 0..4, 3);

    let store = Setup::new(256).local(&nvme).open();
    store.measure_tiers(&space_of(&store, "", 1));
    // Of 1, 1, 2 and 4 chunks.
    until("the tier is measured", || speed(&store).is_some() && nvme.n_got() == 8);
    let chain = chain_of(&store, 0, 3);
    assert_eq!(store.lookup_local(&chain).tokens_in(TierKind::Ram), 0);
    until("the memory of the measurement is free", || store.arena().stat().used_bytes == 0);
    assert_eq!(retrieve_all(&store, &chain), 3);
    // A tier that was just read is not measured again.
    let n_got = nvme.n_got();
    store.measure_tiers(&space_of(&store, "", 1));
    flush(&store);
    assert_eq!(nvme.n_got(), n_got);
}

#[test]
fn a_measurement_that_fails_or_finds_no_memory_says_nothing() {
    let nvme = TestTier::new(TierKind::Nvme);
    fill(&nvme, 0..4, 3);
    nvme.set_failing(true);
    let store = Setup::new(256).local(&nvme).open();
    store.measure_tiers(&space_of(&store, "", 1));
    until("the tier was asked", || nvme.n_got() == 8);
    assert_eq!(store.tier_states()[0].speed, None);
    drop(store);

    nvme.set_failing(false);
    let store = Setup::new(3).local(&nvme).open();
    let held = store.retrieve(&chain_of(&store, 0, 3), 0);
    let speed = store.tier_states()[0].speed;
    store.measure_tiers(&space_of(&store, "", 1));
    assert_eq!(verify(&held, &chain_of(&store, 0, 3), 0), 3);
    assert_eq!(store.tier_states()[0].speed, speed);
}

#[test]
fn a_chain_can_go_on_where_it_ended_before_the_restart() {
    let nvme = TestTier::new(TierKind::Nvme);
    fill(&nvme, 1..2, 3);
    let store = Setup::new(256).local(&nvme).open();
    let chain = chain_of(&store, 1, 6);
    assert_eq!(retrieve_all(&store, &chain), 3);
    assert_eq!(store_chain(&store, &chain), 6);
    flush(&store);
    assert!((0..6).all(|chunk_idx| store.tiers_of(&chain, chunk_idx).contains(&TierKind::Nvme)));
}

/// Names its keys in the order in which they were put.
#[derive(Debug)]
struct Log {
    tier: Arc<TestTier>,
    order: Vec<ChunkKey>,
}

#[test]
fn after_a_restart_the_oldest_unused_chunks_leave_first() {
    let nvme = TestTier::on(TierKind::Nvme, MapTier::with_capacity_bytes(12 * PAYLOAD_BYTES as u64));
    fill(&nvme, 0..4, 3);
    let plain = Setup::new(1).open();
    let order = (0..4).flat_map(|name| {
        let chain = chain_of(&plain, name, 3);
        (0..3).map(move |chunk_idx| chain.key(chunk_idx, 0).unwrap())
    });
    let log = Log { order: order.collect(), tier: Arc::clone(&nvme) };
    let store = Setup::new(256).local_dyn(Arc::new(log)).open();
    // The oldest of all is used, and so is the youngest.
    for name in [0, 3] {
        let chain = chain_of(&store, name, 3);
        assert_eq!(retrieve_all(&store, &chain), 3);
        store.note_request(&chain, None);
    }
    assert_eq!(store_chain(&store, &chain_of(&store, 7, 3)), 3);
    flush(&store);
    let on_disk = |name| {
        let chain = chain_of(&store, name, 3);
        (0..3).filter(|chunk_idx| nvme.has(&chain, *chunk_idx)).count()
    };
    assert_eq!([0, 1, 2, 3, 7].map(on_disk), [3, 0, 3, 3, 3]);
    assert_eq!(store_chain(&store, &chain_of(&store, 8, 3)), 3);
    flush(&store);
    assert_eq!([0, 2, 3, 7, 8].map(on_disk), [3, 0, 3, 3, 3]);
    // Then the policy decides, among all.
    assert_eq!(store_chain(&store, &chain_of(&store, 9, 3)), 3);
    flush(&store);
    assert_eq!([0, 3, 7, 8, 9].map(on_disk).iter().sum::<usize>(), 12);
    assert_eq!(on_disk(9), 3);
}

#[test]
fn every_policy_takes_over_a_warm_disk() {
    for policy in PolicyKind::ALL {
        let nvme = TestTier::on(TierKind::Nvme, MapTier::with_capacity_bytes(12 * PAYLOAD_BYTES as u64));
        fill(&nvme, 0..4, 3);
        let store: Store = Setup::new(64).with(|options| options.policy = policy).local(&nvme).open();
        for name in [2, 5, 6, 7, 8, 9, 2, 1] {
            let chain = chain_of(&store, name, 3);
            retrieve_all(&store, &chain);
            assert_eq!(store_chain(&store, &chain), 3, "{policy}");
            flush(&store);
        }
        assert!(nvme.stat_chunks() >= 10, "{policy}: {}", nvme.stat_chunks());
        let stats = store.stats();
        assert_eq!(stats.failed_loads, [(TierKind::Nvme.into(), 0)], "{policy}: the directory is exact");
    }
}

#[test]
fn a_disk_is_warm_after_a_restart_and_stays_within_its_capacity() {
    let folder = tempfile::tempdir().unwrap();
    let open_disk = || -> Arc<dyn Tier> {
        let options = NvmeOptions::new(folder.path(), 4 << 20);
        Arc::new(Checksummed::new(NvmeTier::open(&options).unwrap()))
    };
    {
        let store = Setup::new(256).local_dyn(open_disk()).open();
        for name in 0..10 {
            assert_eq!(store_chain(&store, &chain_of(&store, name, 6)), 6);
        }
        flush(&store);
    }
    let store = Setup::new(256).local_dyn(open_disk()).open();
    for name in 0..10 {
        let chain = chain_of(&store, name, 6);
        assert_eq!(store.lookup_local(&chain).tokens_in(TierKind::Nvme), 24);
        let mut reader = store.retrieve_layers(&chain, 0);
        let mut n_layers = 0;
        while let Some(layer) = reader.next_layer() {
            let payload = content(chain.key(5, 0).unwrap(), PAYLOAD_BYTES);
            let start = layer.idx() * SECTION_BYTES;
            assert!(layer.section(5, 0) == &payload[start..start + SECTION_BYTES]);
            n_layers += 1;
        }
        assert_eq!(n_layers, N_LAYERS);
        assert_eq!(retrieve_all(&store, &chain), 6);
    }
    for name in 10..120 {
        assert_eq!(store_chain(&store, &chain_of(&store, name, 6)), 6);
        flush(&store);
    }
    let stats = store.stats();
    assert!(stats.evicted_chunks[1].1 > 100, "{stats:?}");
    assert_eq!(stats.dropped_writes, [(TierKind::Nvme.into(), 0)]);
    forget_memory(&store);
    let n_found: usize = (0..120).map(|name| retrieve_all(&store, &chain_of(&store, name, 6))).sum();
    assert!(n_found > 100, "{n_found}");
    assert_eq!(store.stats().failed_loads, [(TierKind::Nvme.into(), 0)], "the directory is exact");
}

impl Tier for Log {
    fn kind(&self) -> TierKind {
        TierKind::Nvme
    }

    fn put(&self, batch: &mut [kvik_tier::PutItem<'_>]) {
        self.tier.put(batch);
    }

    fn get(&self, batch: &mut [kvik_tier::GetItem<'_>]) {
        self.tier.get(batch);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> kvik_tier::Result<()> {
        self.tier.contains(keys, present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> kvik_tier::Result<usize> {
        self.tier.delete(keys)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        for key in &self.order {
            visit(*key, PAYLOAD_BYTES as u64);
        }
    }

    fn flush(&self) -> kvik_tier::Result<()> {
        self.tier.flush()
    }

    fn stat(&self) -> kvik_tier::TierStat {
        self.tier.stat()
    }
}

#[test]
fn a_store_goes_on_with_the_memory_of_another_and_the_lower_tiers_are_free_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = || -> Arc<dyn Tier> {
        let tier = NvmeTier::open(&NvmeOptions::new(folder.path(), 64 << 20)).unwrap();
        Arc::new(Checksummed::new(tier))
    };
    let first = Setup::new(64).local_dyn(nvme()).open();
    for name in 0..5 {
        assert_eq!(store_chain(&first, &chain_of(&first, name, 4)), 4);
    }
    let options = first.options().clone();
    let memory = first.take_apart().unwrap();
    assert_eq!(memory.chunks.len(), 20);
    // The first store has let go of the folder, or this would fail.
    let second = Store::builder_on(options, memory).local(nvme()).open().unwrap();
    assert_eq!(second.stats().n_entries, 20);
    for name in 0..5 {
        let chain = chain_of(&second, name, 4);
        assert_eq!(second.lookup_local(&chain).tokens_in(TierKind::Ram), 16);
        assert_eq!(retrieve_all(&second, &chain), 4);
        assert!(second.tiers_of(&chain, 3).contains(&TierKind::Nvme), "what waited was written");
        // The chain goes on without a word to the policies before.
        let longer = chain_of(&second, name, 6);
        assert!((0..6).all(|chunk_idx| store_chunk(&second, &longer, chunk_idx)));
        assert_eq!(retrieve_all(&second, &longer), 6);
    }
    // Ranks and depths are known too: nothing is left after a clear.
    second.clear(&Clear::default());
    assert_eq!(second.arena().stat().used_bytes, 0);
    assert_eq!(second.stats().n_entries, 0);
}

#[test]
fn kept_chunks_leave_in_the_order_of_the_policy_before_them_and_children_first() {
    let first = Setup::new(8).open();
    for name in 0..2 {
        assert_eq!(store_chain(&first, &chain_of(&first, name, 4)), 4);
    }
    // The older chain was used again.
    first.note_request(&chain_of(&first, 0, 4), None);
    let options = first.options().clone();
    let memory = first.take_apart().unwrap();
    let depths: Vec<u32> = memory.chunks.iter().map(|chunk| chunk.depth).collect();
    assert_eq!(depths, [3, 2, 1, 0, 3, 2, 1, 0]);
    let second = Store::builder_on(options, memory).open().unwrap();
    // Three of the unused chain leave, the last ones first.
    assert_eq!(store_chain(&second, &chain_of(&second, 7, 3)), 3);
    assert_eq!(retrieve_all(&second, &chain_of(&second, 0, 4)), 4);
    assert_eq!(retrieve_all(&second, &chain_of(&second, 1, 4)), 1);
}

#[test]
fn pins_are_kept_with_the_memory_until_they_are_taken_away() {
    for policy in PolicyKind::ALL {
        let first = Setup::new(8).with(|options| options.policy = policy).open();
        let (twice, part) = (chain_of(&first, 1, 3), chain_of(&first, 1, 2));
        let cleared = chain_of(&first, 2, 1);
        assert_eq!(store_chain(&first, &twice), 3);
        assert_eq!(store_chain(&first, &cleared), 1);
        assert_eq!((first.pin(&twice), first.pin(&twice), first.pin(&part)), (12, 12, 8));
        assert_eq!((first.pin(&cleared), first.pin(&chain_of(&first, 3, 2))), (4, 0));
        first.clear(&Clear { chain: Some(cleared.clone()), ..Clear::default() });
        let options = first.options().clone();
        let mut store = first;
        for _ in 0..2 {
            let memory = store.take_apart().unwrap();
            store = Store::builder_on(options.clone(), memory).open().unwrap();
            assert_eq!(store.n_pins(), 5);
        }
        let churn = || {
            for name in 10..20 {
                store_chain(&store, &chain_of(&store, name, 3));
            }
        };
        // Each has as many pins as before, and what a pin does not keep leaves.
        let twice = chain_of(&store, 1, 3);
        churn();
        assert_eq!(store.lookup(&twice).n_chunks, 3, "{policy}");
        assert!(store.unpin(&twice));
        churn();
        assert_eq!(store.lookup(&twice).n_chunks, 3, "{policy}");
        assert!(store.unpin(&twice) && !store.unpin(&twice));
        churn();
        assert_eq!(store.lookup(&twice).n_chunks, 2, "{policy}");
        assert!(store.unpin(&chain_of(&store, 1, 2)));
        churn();
        assert_eq!(store.lookup(&twice).n_chunks, 0, "{policy}");
        // Pins that keep nothing have their unpin too.
        assert!(store.unpin(&chain_of(&store, 2, 1)) && store.unpin(&chain_of(&store, 3, 2)));
        assert_eq!(store.n_pins(), 0);
    }
}

#[test]
fn a_pin_with_an_end_is_kept_for_the_time_that_is_left_of_it() {
    let first = Setup::new(8).open();
    let (over, kept) = (chain_of(&first, 1, 1), chain_of(&first, 2, 1));
    assert_eq!((store_chain(&first, &over), store_chain(&first, &kept)), (1, 1));
    first.pin_for(&over, Duration::ZERO);
    first.pin_for(&kept, Duration::from_hours(1));
    let options = first.options().clone();
    let memory = first.take_apart().unwrap();
    let left_ms: Vec<Option<u64>> = memory.pins.pins.iter().map(|pin| pin.left_ms).collect();
    assert!(left_ms.iter().flatten().any(|left_ms| (3_000_000..=3_600_000).contains(left_ms)), "{left_ms:?}");
    let second = Store::builder_on(options, memory).open().unwrap();
    assert_eq!(second.n_pins(), 1);
    for name in 3..12 {
        store_chain(&second, &chain_of(&second, name, 3));
    }
    assert_eq!(second.lookup(&chain_of(&second, 1, 1)).n_chunks, 0);
    assert_eq!(second.lookup(&chain_of(&second, 2, 1)).n_chunks, 1);
}

#[test]
fn pins_of_chunks_that_are_not_there_or_not_in_their_place_keep_nothing() {
    let first = Setup::new(8).open();
    let chain = chain_of(&first, 1, 3);
    assert_eq!(store_chain(&first, &chain), 3);
    assert_eq!(first.pin(&chain), 12);
    let options = first.options().clone();
    let mut memory = first.take_apart().unwrap();
    let [name, ..] = *chain.names() else { unreachable!() };
    // A circle, and a parent that is not there.
    for parent in &mut memory.pins.parents {
        parent.parent = if parent.parent == name { BlockHash([9; 16]) } else { parent.chunk };
    }
    let second = Store::builder_on(options, memory).open().unwrap();
    for other in 10..20 {
        store_chain(&second, &chain_of(&second, other, 3));
    }
    let chain = chain_of(&second, 1, 3);
    assert_eq!(second.lookup(&chain).n_chunks, 0);
    assert!(second.unpin(&chain) && !second.unpin(&chain));
}

#[test]
fn a_store_with_another_user_is_not_taken_apart() {
    let store = Setup::new(64).open();
    let chain = chain_of(&store, 1, 2);
    assert_eq!(store_chain(&store, &chain), 2);
    let other = store.clone();
    assert!(store.is_shared());
    let store = store.take_apart().unwrap_err();
    drop(other);
    assert!(!store.is_shared());
    let retrieved = store.retrieve(&chain, 0);
    let store = store.take_apart().unwrap_err();
    assert_eq!(verify(&retrieved, &chain, 0), 2, "a lease keeps the memory");
    drop(retrieved);
    let longer = chain_of(&store, 1, 3);
    let write = store.begin_write(&longer, 2, 0);
    let store = store.take_apart().unwrap_err();
    drop(write);
    assert_eq!(store.take_apart().unwrap().chunks.len(), 2);
}

#[test]
fn memory_without_a_list_of_its_chunks_is_emptied() {
    let first = Setup::new(64).open();
    assert_eq!(store_chain(&first, &chain_of(&first, 1, 2)), 2);
    let options = first.options().clone();
    let memory = first.take_apart().unwrap();
    let second = Store::builder(options, memory.ram).open().unwrap();
    assert_eq!(second.arena().stat().used_bytes, 0);
    assert_eq!(retrieve_all(&second, &chain_of(&second, 1, 2)), 0);
}
