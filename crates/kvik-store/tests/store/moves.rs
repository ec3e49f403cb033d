//! Pins, and chunks that change their tier on demand.

use std::time::Duration;

use kvik_store::Write;
use kvik_store::policy::PolicyKind;
use kvik_tier::TierKind::{Nvme, Ram, Redis};
use kvik_tier::conformance::MapTier;

use crate::support::*;

#[test]
fn a_pinned_chain_stays_until_its_last_pin_is_gone() {
    let store = Setup::new(6).open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store_chain(&store, &chain), 3);
    assert_eq!((store.pin(&chain), store.pin(&chain)), (12, 12));
    let churn = || {
        for name in 2..10 {
            store_chain(&store, &chain_of(&store, name, 3));
        }
    };
    churn();
    assert_eq!(retrieve_all(&store, &chain), 3);
    assert!(store.unpin(&chain));
    churn();
    assert_eq!(retrieve_all(&store, &chain), 3);
    assert!(store.unpin(&chain));
    assert!(!store.unpin(&chain));
    churn();
    assert_eq!(store.lookup(&chain).n_chunks, 0);
}

#[test]
fn a_pin_with_an_end_keeps_a_chain_until_then() {
    let store = Setup::new(6).open();
    let (over, kept) = (chain_of(&store, 1, 1), chain_of(&store, 2, 1));
    assert_eq!((store_chain(&store, &over), store_chain(&store, &kept)), (1, 1));
    assert_eq!((store.pin_for(&over, Duration::ZERO), store.pin_for(&kept, Duration::from_hours(1))), (4, 4));
    assert_eq!(store.n_pins(), 1);
    assert!(!store.unpin(&over), "it has ended");
    for name in 3..12 {
        store_chain(&store, &chain_of(&store, name, 3));
    }
    assert_eq!(store.lookup(&over).n_chunks, 0);
    assert_eq!(retrieve_all(&store, &kept), 1);
    assert!(store.unpin(&kept) && !store.unpin(&kept));
}

#[test]
fn pins_that_have_ended_give_room_to_a_writer() {
    let store = Setup::new(4).open();
    let chain = chain_of(&store, 1, 4);
    assert_eq!(store_chain(&store, &chain), 4);
    assert_eq!(store.pin_for(&chain, Duration::from_hours(1)), 16);
    assert!(matches!(store.begin_write(&chain_of(&store, 2, 1), 0, 0), Write::NoRoom));
    assert!(store.unpin(&chain));
    assert_eq!(store.pin_for(&chain, Duration::ZERO), 16);
    assert!(!matches!(store.begin_write(&chain_of(&store, 2, 1), 0, 0), Write::NoRoom));
}

#[test]
fn an_unpin_takes_the_pin_without_an_end_and_leaves_the_one_that_goes_by_itself() {
    let store = Setup::new(6).open();
    let chain = chain_of(&store, 1, 2);
    assert_eq!(store_chain(&store, &chain), 2);
    store.pin(&chain);
    store.pin_for(&chain, Duration::ZERO);
    store.pin_for(&chain, Duration::from_millis(u64::MAX));
    assert_eq!(store.n_pins(), 2, "the longest time is no end");
    assert!(store.unpin(&chain) && store.unpin(&chain) && !store.unpin(&chain));
    store.pin(&chain);
    store.pin_for(&chain, Duration::from_mins(10));
    assert!(store.unpin(&chain));
    for name in 3..12 {
        store_chain(&store, &chain_of(&store, name, 3));
    }
    assert_eq!(retrieve_all(&store, &chain), 2, "the pin with an end is still there");
}

#[test]
fn memory_full_of_pins_has_no_room() {
    let store = Setup::new(4).open();
    let chain = chain_of(&store, 1, 4);
    assert_eq!(store_chain(&store, &chain), 4);
    assert_eq!(store.pin(&chain), 16);
    assert!(matches!(store.begin_write(&chain_of(&store, 2, 1), 0, 0), Write::NoRoom));
}

#[test]
fn a_pin_brings_a_chain_to_memory_although_it_is_used_for_the_first_time() {
    let nvme = TestTier::new(Nvme);
    let chain = chain_of(&Setup::new(1).open(), 1, 2);
    plant(&nvme, &chain, 0);
    plant(&nvme, &chain, 1);
    let store = Setup::new(8).with(|options| options.ram_free_share = 0.5).local(&nvme).open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store.pin(&chain), 8, "as much as there is");
    assert_eq!(store.tiers_of(&chain, 1), [Ram, Nvme]);
    assert!(store.unpin(&chain));
    let absent = chain_of(&store, 9, 2);
    assert_eq!(store.pin(&absent), 0);
    assert!(store.unpin(&absent), "every pin has its unpin");
}

#[test]
fn chains_move_between_tiers() {
    let (nvme, redis) = (TestTier::new(Nvme), TestTier::new(Redis));
    let store = Setup::new(32)
        .with(|options| options.write_back = kvik_store::WriteBack::OnReuse)
        .local(&nvme)
        .remote(&redis)
        .open();
    let chain = chain_of(&store, 1, 3);
    assert_eq!(store_chain(&store, &chain), 3);
    assert_eq!(store.relocate(&chain, Nvme, Ram, true), 0, "it is not there");
    assert_eq!(store.relocate(&chain, Ram, Ram, true), 0);
    assert_eq!(store.relocate(&chain, Ram, Nvme, false), 3);
    flush(&store);
    assert_eq!(store.lookup_local(&chain).tokens_in(Nvme), 12);
    assert_eq!(store.relocate(&chain, Nvme, Redis, true), 3);
    assert!(redis.has(&chain, 2) && nvme.has(&chain, 2));
    assert_eq!(store.relocate(&chain, Nvme, Ram, false), 3);
    assert!(!nvme.has(&chain, 0));
    assert_eq!(store.tiers_of(&chain, 2)[0], Ram);
    assert_eq!(retrieve_all(&store, &chain), 3);
}

#[test]
fn what_is_moved_to_a_full_disk_pushes_out_what_is_worth_more() {
    let disk = TestTier::on(Nvme, MapTier::with_capacity_bytes(6 * PAYLOAD_BYTES as u64));
    let store = Setup::new(32).with(|options| options.policy = PolicyKind::Kvik).local(&disk).open();
    let used: Vec<_> = (1..=3).map(|name| chain_of(&store, name, 2)).collect();
    let churn = |chain| {
        store.note_request(chain, None);
        store_chain(&store, chain);
        flush(&store);
        for _ in 0..5 {
            store.note_request(chain, None);
            retrieve_all(&store, chain);
        }
    };
    used.iter().for_each(churn);
    // One is refused beside those that are used, so that it is known what they are worth.
    for name in 10..20 {
        let other = chain_of(&store, name, 2);
        store.note_request(&other, None);
        store_chain(&store, &other);
        flush(&store);
    }
    let chain = chain_of(&store, 30, 3);
    store.note_request(&chain, None);
    assert_eq!(store_chain(&store, &chain), 3);
    flush(&store);
    assert!(!disk.has(&chain, 2), "by itself it does not come to the disk");
    assert_eq!(store.relocate(&chain, Ram, Nvme, false), 3);
    assert_eq!(store.lookup_local(&chain).tokens_in(Nvme), 3 * CHUNK_TOKENS);
    assert_eq!(retrieve_all(&store, &chain), 3);
}

#[test]
fn a_shared_prefix_is_copied_and_not_taken_away() {
    let nvme = TestTier::new(Nvme);
    let store = Setup::new(32).local(&nvme).open();
    let space = space_of(&store, "", 1);
    let mut tokens = tokens_of(1, 12);
    let chain = space.chain(&tokens);
    tokens[11] += 1;
    let branch = space.chain(&tokens);
    assert_eq!((store_chain(&store, &chain), store_chain(&store, &branch)), (3, 3));
    flush(&store);
    assert_eq!(store.relocate(&chain, Ram, Nvme, false), 3);
    assert_eq!(store.tiers_of(&chain, 2), [Nvme]);
    assert_eq!(store.lookup(&branch).tokens_in(Ram), 12);
}
