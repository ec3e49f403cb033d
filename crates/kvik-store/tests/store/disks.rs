//! Several tiers of one kind, under their names and in their order.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvik_store::{
    ChunkChange, ChunkObserver, Clear, LowerTier, Store, StoreError, StoreOptions, TierName, TierWrite,
    WriteBack,
};
use kvik_tier::conformance::MapTier;
use kvik_tier::{Arena, ArenaOptions, RamTier, TierKind};
use kvik_types::BlockHash;
use parking_lot::Mutex;

use crate::support::*;

fn name(name: &str) -> TierName {
    TierName::try_new(name).unwrap()
}

fn names_of(store: &Store, chain: &kvik_store::Chain, chunk_idx: usize) -> Vec<String> {
    store.tier_names_of(chain, chunk_idx).iter().map(ToString::to_string).collect()
}

fn small_disk(n_payloads: u64) -> Arc<TestTier> {
    TestTier::on(TierKind::Nvme, MapTier::with_capacity_bytes(n_payloads * PAYLOAD_BYTES as u64))
}

#[test]
fn chunks_go_to_every_disk_and_come_from_the_first_that_has_them() {
    let (fast, slow) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Nvme));
    let store = Setup::new(16).local(&fast).local(&slow).named(&["fast", "slow"]).open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store_chain(&store, &chain), 3);
    flush(&store);
    assert_eq!(names_of(&store, &chain, 2), ["ram", "fast", "slow"]);
    assert_eq!(store.tiers_of(&chain, 2), [TierKind::Ram, TierKind::Nvme], "a kind is named once");
    forget_memory(&store);
    assert_eq!(store.lookup(&chain).tokens_in(name("fast")), 3 * CHUNK_TOKENS);
    assert_eq!(retrieve_all(&store, &chain), 3);
    assert_eq!((fast.n_got(), slow.n_got()), (3, 0));
    let stats = store.stats();
    assert_eq!(stats.written, [(name("fast"), 3), (name("slow"), 3)]);
    assert_eq!(stats.hit_tokens[1..], [(name("fast"), 12), (name("slow"), 0)]);
}

#[test]
fn what_leaves_a_small_disk_stays_on_a_large_one_and_comes_back_when_it_is_used_again() {
    let (fast, slow) = (small_disk(4), TestTier::new(TierKind::Nvme));
    let store = Setup::new(4).local(&fast).local(&slow).named(&["fast", "slow"]).open();
    let chains: Vec<_> = (1..=4).map(|seed| chain_of(&store, seed, 2)).collect();
    for chain in &chains {
        store.note_request(chain, None);
        assert_eq!(store_chain(&store, chain), 2);
        flush(&store);
    }
    assert_eq!(
        names_of(&store, &chains[0], 1),
        ["slow"],
        "it was evicted from memory and from the small disk"
    );
    // The second use at the latest keeps it in memory, the third brings it to the disk that it had left.
    for _ in 0..3 {
        assert_eq!(retrieve_all(&store, &chains[0]), 2);
        store.note_request(&chains[0], None);
        flush(&store);
    }
    assert_eq!(names_of(&store, &chains[0], 1), ["ram", "fast", "slow"]);
    // Memory is reclaimed beside the reads: a chunk that finds room stays there at its first use.
    let (tier, n_tokens) = store.stats().hit_tokens[2].clone();
    assert_eq!(tier, name("slow"));
    assert!((1..=4).contains(&(n_tokens / CHUNK_TOKENS as u64)), "{n_tokens}");
}

#[test]
fn a_full_or_broken_disk_does_not_stop_the_others() {
    let (broken, full, good) = (TestTier::new(TierKind::Nvme), small_disk(1), TestTier::new(TierKind::Nvme));
    let setup = Setup::new(16).local(&broken).local(&full).local(&good);
    let store = setup.named(&["broken", "full", "good"]).open();
    broken.set_failing(true);
    let chain = chain_of(&store, 1, 4);
    assert_eq!(store_chain(&store, &chain), 4);
    flush(&store);
    assert!((0..4).all(|chunk_idx| good.has(&chain, chunk_idx)));
    forget_memory(&store);
    assert_eq!(retrieve_all(&store, &chain), 4);
    // One that breaks later is passed over by reads.
    broken.set_failing(false);
    let other = chain_of(&store, 2, 2);
    assert_eq!(store_chain(&store, &other), 2);
    flush(&store);
    assert_eq!(names_of(&store, &other, 0)[..2], ["ram", "broken"]);
    forget_memory(&store);
    broken.set_failing(true);
    assert_eq!(retrieve_all(&store, &other), 2);
}

#[test]
fn tiers_that_were_given_no_name_have_that_of_their_kind_and_a_number() {
    let tiers = [TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Nvme)];
    let (near, far) = (TestTier::new(TierKind::Redis), TestTier::new(TierKind::Redis));
    let setup = Setup::new(4).local(&tiers[0]).local(&tiers[1]).remote(&near).remote(&far);
    let store = setup.open();
    let names: Vec<&str> = store.tiers().iter().map(|label| label.name.as_str()).collect();
    assert_eq!(names, ["ram", "nvme", "nvme-2", "redis", "redis-2"]);
}

#[test]
fn two_tiers_with_one_name_are_refused() {
    for names in [["a", "a"], ["ram", "b"]] {
        let ram = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        let mut builder = Store::builder(StoreOptions::default(), ram);
        for tier_name in names {
            builder = builder.tier(LowerTier::local(TestTier::new(TierKind::Nvme)).named(name(tier_name)));
        }
        let refused = builder.open().map(|_| ()).unwrap_err();
        assert!(matches!(refused, StoreError::Invalid { field: "tier", .. }), "{refused}");
    }
}

#[test]
fn a_remote_tier_may_lie_between_two_disks() {
    let (fast, slow) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Nvme));
    let far = TestTier::new(TierKind::Redis);
    let open = || {
        let options = Setup::new(1).options;
        let ram = RamTier::new(Arena::new(ArenaOptions::new(8 * SLOT_BYTES)).unwrap());
        Store::builder(options, ram)
            .local(fast.clone())
            .remote(far.clone())
            .local(slow.clone())
            .open()
            .unwrap()
    };
    let store = open();
    let chain = chain_of(&store, 1, 2);
    assert_eq!(store_chain(&store, &chain), 2);
    flush(&store);
    // Only the last tier has it.
    let clear = Clear { tiers: Some(vec![name("ram"), name("nvme"), name("redis")]), ..Clear::default() };
    store.clear(&clear);
    assert_eq!(names_of(&store, &chain, 0), ["nvme-2"]);
    assert_eq!(retrieve_all(&store, &chain), 2);
    assert_eq!((fast.n_got(), far.n_got(), slow.n_got()), (0, 0, 2));
    store.close();
    drop(store);
    let store = open();
    let chain = chain_of(&store, 1, 2);
    assert_eq!(names_of(&store, &chain, 1), ["nvme-2"], "what is there is known after a start");
}

#[test]
fn one_tier_alone_is_read() {
    let (fast, slow) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Nvme));
    let far = TestTier::new(TierKind::Redis);
    let store = Setup::new(16).local(&fast).local(&slow).named(&["fast", "slow"]).remote(&far).open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store_chain(&store, &chain), 3);
    flush(&store);
    let of = |tier: &str| {
        let retrieved = store.retrieve_from(&chain, 0, &name(tier)).unwrap();
        (retrieved.chunks().len(), retrieved.slowest_tier().map(ToString::to_string))
    };
    for tier in ["ram", "fast", "slow", "redis"] {
        assert_eq!(of(tier), (3, Some(tier.to_owned())));
    }
    assert_eq!((fast.n_got(), slow.n_got(), far.n_got()), (3, 3, 3));
    assert!(store.retrieve_from(&chain, 0, &name("tape")).is_none());
    // What others have does not count.
    store.clear(&Clear { tiers: Some(vec![name("slow"), name("redis")]), ..Clear::default() });
    for tier in ["slow", "redis"] {
        assert_eq!(of(tier), (0, None), "{tier}");
    }
    assert_eq!(of("fast").0, 3);
}

#[test]
fn a_reader_of_all_tiers_that_joins_one_of_a_single_tier_gets_more_than_that_has() {
    let (fast, slow) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Nvme));
    let store = Setup::new(16).local(&fast).local(&slow).named(&["fast", "slow"]).open();
    let chain = chain_of(&store, 1, 1);
    assert_eq!(store_chain(&store, &chain), 1);
    flush(&store);
    forget_memory(&store);
    fast.set_failing(true);
    fast.gets.close();
    let alone = store.prefetch_from(&chain, 0, &name("fast")).unwrap();
    let joined = store.prefetch(&chain, 0);
    fast.gets.open();
    assert_eq!(joined.wait(Duration::from_secs(30)).chunks().len(), 1, "the other disk gave it");
    drop(alone);
}

#[test]
fn one_tier_alone_is_written() {
    let (fast, slow) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Nvme));
    let store = Setup::new(16).local(&fast).local(&slow).named(&["fast", "slow"]).open();
    let chain = chain_of(&store, 1, 3);
    let write = |chunk_idx: usize, tier: &str| {
        let fill = |payload: &mut [u8]| {
            let key = chain.key(chunk_idx, 0).unwrap();
            payload.copy_from_slice(&content(key, payload.len()));
        };
        store.write_to(&chain, chunk_idx, 0, &name(tier), fill)
    };
    assert_eq!(write(1, "slow"), TierWrite::Refused, "a chunk does not lie behind a hole");
    assert_eq!(
        [write(0, "slow"), write(1, "slow"), write(1, "slow")],
        [TierWrite::Stored, TierWrite::Stored, TierWrite::Present]
    );
    assert_eq!(names_of(&store, &chain, 1), ["slow"]);
    assert_eq!(write(0, "ram"), TierWrite::Stored);
    flush(&store);
    assert_eq!(names_of(&store, &chain, 0), ["ram", "slow"], "the other disk was not asked");
    assert_eq!(fast.n_put(), 0);
    assert_eq!(write(0, "tape"), TierWrite::Refused);
    assert_eq!(retrieve_all(&store, &chain), 2);
    slow.set_failing(true);
    assert_eq!(write(2, "slow"), TierWrite::Refused);
    assert_eq!(store.health()[0].1.n_chunks, Some(store.lookup(&chain).n_chunks as u64), "no memory is lost");
}

#[test]
fn chains_move_between_named_disks() {
    let (fast, slow) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Nvme));
    let store = Setup::new(16)
        .with(|options| options.write_back = WriteBack::OnReuse)
        .local(&fast)
        .local(&slow)
        .named(&["fast", "slow"])
        .open();
    let chain = chain_of(&store, 1, 2);
    assert_eq!(store_chain(&store, &chain), 2);
    assert_eq!(store.relocate(&chain, name("ram"), name("slow"), false), 2);
    assert_eq!(names_of(&store, &chain, 1), ["slow"]);
    assert_eq!(store.relocate(&chain, name("slow"), name("fast"), true), 2);
    assert!(names_of(&store, &chain, 1).ends_with(&["fast".to_owned(), "slow".to_owned()]));
    assert_eq!(store.relocate(&chain, name("slow"), name("tape"), false), 0);
}

/// What is held by kind.
#[derive(Debug, Default)]
struct Held(Mutex<BTreeSet<(BlockHash, TierKind)>>);

impl ChunkObserver for Held {
    fn changed(&self, changes: &[ChunkChange]) {
        let mut held = self.0.lock();
        for ChunkChange { hash, tier, is_held, .. } in changes {
            let is_news = if *is_held { held.insert((*hash, *tier)) } else { held.remove(&(*hash, *tier)) };
            assert!(is_news, "each change differs from the state before it");
        }
    }
}

#[test]
fn observers_see_the_disks_as_one() {
    let (fast, slow) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Nvme));
    let store = Setup::new(16).local(&fast).local(&slow).named(&["fast", "slow"]).open();
    let held = Arc::new(Held::default());
    let _observation = store.observe(&space_of(&store, "", 1), held.clone());
    let chain = chain_of(&store, 1, 1);
    let is_held = || held.0.lock().contains(&(chain.key(0, 0).unwrap().chunk, TierKind::Nvme));
    assert_eq!(store_chain(&store, &chain), 1);
    flush(&store);
    assert!(is_held());
    for (tier, is_left) in [("fast", true), ("slow", false)] {
        store.clear(&Clear { tiers: Some(vec![name(tier)]), ..Clear::default() });
        assert_eq!(is_held(), is_left, "{tier} was cleared");
    }
}
