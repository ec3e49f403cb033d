//! Tiers that fail and lie: the answer gets shorter, and never wrong.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvik_store::{Store, StoreError, StoreOptions};
use kvik_tier::conformance::MapTier;
use kvik_tier::{Arena, ArenaOptions, Checksummed, FaultRates, Faulty, RamTier, Tier, TierKind};

use crate::support::*;

#[test]
fn a_tier_that_fails_in_the_middle_shortens_the_hit() {
    let (nvme, redis) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis));
    let chain = chain_of(&Setup::new(1).open(), 1, 6);
    for chunk_idx in 0..6 {
        plant(if chunk_idx < 3 { &nvme } else { &redis }, &chain, chunk_idx);
    }
    let store = Setup::new(32).local(&nvme).remote(&redis).open();
    let chain = chain_of(&store, 1, 6);
    assert_eq!(store.lookup(&chain).n_chunks, 6);
    redis.set_failing(true);
    assert_eq!(store.lookup(&chain).n_chunks, 3);
    assert_eq!(retrieve_all(&store, &chain), 3);
    forget_memory(&store);
    nvme.set_failing(true);
    assert_eq!(retrieve_all(&store, &chain), 0);
    assert_eq!(store.lookup(&chain).n_chunks, 3, "a failure says nothing about what is there");
    // A read that is joined shares its failure: let those of before end.
    until("nothing is being read", || store.queues().iter().all(|queues| queues.read_bytes == 0));
    nvme.set_failing(false);
    redis.set_failing(false);
    assert_eq!(retrieve_all(&store, &chain), 6);
}

#[test]
fn a_chunk_that_is_gone_is_forgotten_and_another_tier_is_asked() {
    let (nvme, redis) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis));
    let store = Setup::new(32).local(&nvme).remote(&redis).open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store_chain(&store, &chain), 3);
    flush(&store);
    forget_memory(&store);
    nvme.map.delete(&[chain.key(1, 0).unwrap()]).unwrap();
    let retrieved = store.retrieve(&chain, 0);
    assert_eq!(verify(&retrieved, &chain, 0), 3);
    assert_eq!(retrieved.chunks()[1].tier(), TierKind::Redis);
    assert!(!store.tiers_of(&chain, 1).contains(&TierKind::Nvme));
}

#[test]
fn bytes_that_do_not_prove_themselves_are_a_miss_and_go() {
    let map = Arc::new(MapTier::new());
    let nvme: Arc<dyn Tier> = Arc::new(Kind(TierKind::Nvme, Checksummed::new(Arc::clone(&map))));
    let store = Setup::new(32).local_dyn(nvme).open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store_chain(&store, &chain), 3);
    flush(&store);
    forget_memory(&store);
    let key = chain.key(1, 0).unwrap();
    let mut bytes = map.bytes_of(key).unwrap().to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    map.overwrite(key, &bytes);
    assert_eq!(retrieve_all(&store, &chain), 1);
    assert!(map.bytes_of(key).is_none());
    assert_eq!(store.lookup(&chain).n_chunks, 1);
    // The engine computes it again, and then all of the chain is there.
    assert_eq!(store_chain(&store, &chain), 3);
    flush(&store);
    forget_memory(&store);
    assert_eq!(retrieve_all(&store, &chain), 3);
}

#[test]
fn a_remote_tier_that_hangs_costs_a_lookup_its_time() {
    let redis = TestTier::new(TierKind::Redis);
    let store = Setup::new(32)
        .with(|options| {
            options.lookup_timeout = Duration::from_millis(20);
            options.retrieve_timeout = Duration::from_millis(20);
        })
        .remote(&redis)
        .open();
    let chain = chain_of(&store, 1, 4);
    assert_eq!(store_chain(&store, &chain_of(&store, 1, 2)), 2);
    redis.gets.close();
    let begin = Instant::now();
    assert_eq!(store.lookup(&chain).n_chunks, 2);
    assert_eq!(retrieve_all(&store, &chain), 2);
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert_eq!(store.lookup_local(&chain).n_chunks, 2);
    assert_eq!(redis.n_asked.load(Ordering::SeqCst), 0);
    redis.gets.open();
}

#[test]
fn whatever_faults_a_disk_has_hits_are_right() {
    for seed in 0..4 {
        let rates = FaultRates {
            fail: 60,
            fail_late: 60,
            lose: 60,
            tear: 60,
            shorten: 60,
            duplicate: 60,
            flip: 60,
            mix: 60,
            ..FaultRates::default()
        };
        let faulty = Faulty::new(MapTier::new(), rates, seed);
        let nvme: Arc<dyn Tier> = Arc::new(Kind(TierKind::Nvme, Checksummed::new(faulty)));
        let store = Setup::new(8).local_dyn(nvme).open();
        let mut n_hits = 0;
        for round in 0..30 {
            let chain = chain_of(&store, round % 7, 4);
            n_hits += retrieve_all(&store, &chain);
            store_chain(&store, &chain);
            flush_under_faults(&store);
        }
        assert!(n_hits > 5, "seed {seed}: {n_hits} hits");
    }
}

fn flush_under_faults(store: &Store) {
    // The flush itself may be told to fail: what matters is that the queue was worked on.
    let _ = store.flush(Duration::from_secs(30));
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let open = |options: StoreOptions, kinds: &[TierKind]| {
        let ram = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        let mut builder = Store::builder(options, ram);
        for kind in kinds {
            builder = builder.remote(TestTier::new(*kind) as Arc<dyn Tier>);
        }
        builder.open().map(|_| ())
    };
    let field = |result: Result<(), StoreError>| match result {
        Err(StoreError::Invalid { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    let options = StoreOptions::default;
    assert_eq!(field(open(StoreOptions { ram_free_share: 0.9, ..options() }, &[])), "ram_free_share");
    assert_eq!(field(open(StoreOptions { n_read_threads: 0, ..options() }, &[])), "n_read_threads");
    assert_eq!(
        field(open(StoreOptions { prefill_tokens_per_s: 0.0, ..options() }, &[])),
        "prefill_tokens_per_s"
    );
    assert_eq!(field(open(options(), &[TierKind::Redis; 8])), "tiers");
    assert_eq!(field(open(options(), &[TierKind::Ram])), "tier");
    open(options(), &[TierKind::Nvme, TierKind::Redis, TierKind::Object]).unwrap();
}

/// A tier with a defect.
#[derive(Debug)]
struct Panicking(Arc<TestTier>);

#[test]
fn a_tier_that_panics_is_off_and_the_rest_goes_on() {
    let nvme = TestTier::new(TierKind::Nvme);
    let chain = chain_of(&Setup::new(1).open(), 1, 3);
    (0..3).for_each(|chunk_idx| plant(&nvme, &chain, chunk_idx));
    let store = Setup::new(16).local_dyn(Arc::new(Panicking(nvme))).open();
    let chain = chain_of(&store, 1, 3);
    for _ in 0..3 {
        assert_eq!(retrieve_all(&store, &chain), 0);
    }
    let other = chain_of(&store, 2, 3);
    assert_eq!(store_chain(&store, &other), 3);
    assert_eq!(retrieve_all(&store, &other), 3);
    assert_eq!(store.stats().n_timeouts, 0, "no caller waited in vain");
}

impl Tier for Panicking {
    fn kind(&self) -> TierKind {
        TierKind::Nvme
    }

    fn put(&self, _: &mut [kvik_tier::PutItem<'_>]) {
        panic!("a defect in put");
    }

    fn get(&self, _: &mut [kvik_tier::GetItem<'_>]) {
        panic!("a defect in get");
    }

    fn contains(&self, _: &[kvik_tier::ChunkKey], _: &mut [bool]) -> kvik_tier::Result<()> {
        panic!("a defect in contains");
    }

    fn delete(&self, _: &[kvik_tier::ChunkKey]) -> kvik_tier::Result<usize> {
        panic!("a defect in delete");
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(kvik_tier::ChunkKey, u64)) {
        self.0.visit_keys(visit);
    }

    fn flush(&self) -> kvik_tier::Result<()> {
        Ok(())
    }

    fn stat(&self) -> kvik_tier::TierStat {
        self.0.stat()
    }
}
