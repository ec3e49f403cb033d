//! Layer by layer.

use std::sync::Arc;
use std::time::Duration;

use kvik_store::{Chain, Commit, LayerReader, LayerWrite, Store};
use kvik_tier::{Tier, TierKind};

use crate::support::*;

/// Reads and verifies the next layer; returns its number of chunks.
fn verify_layer(reader: &mut LayerReader, chain: &Chain, first_chunk: usize, layer_idx: usize) -> usize {
    let layer = reader.next_layer().unwrap();
    assert_eq!(layer.idx(), layer_idx);
    for place in 0..layer.n_chunks() {
        for rank in 0..chain.space().format().n_ranks {
            let payload = content(chain.key(first_chunk + place, rank).unwrap(), PAYLOAD_BYTES);
            let expected = &payload[layer_idx * SECTION_BYTES..(layer_idx + 1) * SECTION_BYTES];
            assert!(
                layer.section(place, rank) == expected,
                "layer {layer_idx} of chunk {place}, rank {rank}"
            );
        }
    }
    assert!(layer.section(layer.n_chunks(), 0).is_empty());
    layer.n_chunks()
}

/// Chunk 0 in memory, 1 and 2 on disk, 3 remote, for two ranks.
fn mixed(setup: Setup) -> (Store, Arc<TestTier>, Arc<TestTier>, Chain) {
    let (nvme, redis) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis));
    let plain = Setup::new(1).open();
    let chain = space_of(&plain, "", 2).chain(&tokens_of(1, 16));
    plant(&nvme, &chain, 1);
    plant(&nvme, &chain, 2);
    plant(&redis, &chain, 3);
    let store = setup.local(&nvme).remote(&redis).open();
    let chain = space_of(&store, "", 2).chain(&tokens_of(1, 16));
    assert!(store_chunk(&store, &chain, 0));
    flush(&store);
    (store, nvme, redis, chain)
}

#[test]
fn all_layers_come_in_order_for_all_chunks_of_all_tiers() {
    let (store, _, _, chain) = mixed(Setup::new(64));
    let mut reader = store.retrieve_layers(&chain, 0);
    assert_eq!((reader.n_chunks(), reader.n_tokens()), (4, 16));
    for layer_idx in 0..3 {
        assert_eq!(verify_layer(&mut reader, &chain, 0, layer_idx), 4);
    }
    assert!(reader.next_layer().is_none());
    assert_eq!(reader.n_tokens(), 16);
    let mut reader = store.retrieve_layers(&chain, 2);
    assert_eq!(verify_layer(&mut reader, &chain, 2, 0), 2);
    assert!(store.retrieve_layers(&chain, 9).next_layer().is_none());
}

#[test]
fn a_layer_is_handed_out_before_the_next_one_is_read() {
    let (store, nvme, redis, chain) = mixed(Setup::new(64));
    for tier in [&nvme, &redis] {
        tier.gets.close_from(SECTION_BYTES as u64);
    }
    let mut reader = store.retrieve_layers(&chain, 0);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 0), 4, "while layer 1 is at the gate");
    until("layer 1 is being read", || nvme.gets.n_waiting() > 0 && redis.gets.n_waiting() > 0);
    for tier in [&nvme, &redis] {
        tier.gets.close_from(2 * SECTION_BYTES as u64);
    }
    assert_eq!(verify_layer(&mut reader, &chain, 0, 1), 4, "while layer 2 is at the gate");
    for tier in [&nvme, &redis] {
        tier.gets.open();
    }
    assert_eq!(verify_layer(&mut reader, &chain, 0, 2), 4);
}

#[test]
fn no_more_layers_are_read_ahead_than_allowed() {
    let (store, nvme, _, _) = mixed(Setup::new(64).with(|options| options.read_ahead_layers = 0));
    let chain = space_of(&store, "", 2).chain(&tokens_of(1, 12));
    let before = nvme.n_got();
    let mut reader = store.retrieve_layers(&chain, 0);
    until("layer 0 is read", || nvme.n_got() == before + 4);
    flush(&store);
    assert_eq!(nvme.n_got(), before + 4, "and no other");
    assert_eq!(verify_layer(&mut reader, &chain, 0, 0), 3);
}

#[test]
fn a_chunk_that_fails_at_a_later_layer_ends_the_hit_before_it() {
    let (store, nvme, redis, chain) = mixed(Setup::new(64).with(|options| options.read_ahead_layers = 0));
    let mut reader = store.retrieve_layers(&chain, 0);
    until("layer 0 is read", || nvme.n_got() == 4 && redis.n_got() == 2);
    redis.set_failing(true);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 0), 4);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 1), 3);
    assert_eq!(reader.n_tokens(), 12);
    nvme.map.delete(&[chain.key(1, 1).unwrap()]).unwrap();
    let layer_2 = reader.next_layer().unwrap();
    // The layer may have been asked for before the chunk went.
    assert!(layer_2.n_chunks() == 1 || layer_2.n_chunks() == 3);
    assert!(reader.next_layer().is_none());
}

#[test]
fn a_tier_that_hangs_at_a_layer_ends_the_hit_before_its_chunks() {
    let (store, _, redis, chain) =
        mixed(Setup::new(64).with(|options| options.retrieve_timeout = Duration::from_secs(2)));
    redis.gets.close_from(SECTION_BYTES as u64);
    let mut reader = store.retrieve_layers(&chain, 0);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 0), 4);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 1), 3);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 2), 3);
    redis.gets.open();
}

#[test]
fn a_chunk_written_layer_by_layer_is_visible_after_the_last() {
    let store = Setup::new(16).open();
    let chain = chain_of(&store, 1, 1);
    let payload = content(chain.key(0, 0).unwrap(), PAYLOAD_BYTES);
    let LayerWrite::Slot(mut writer) = store.begin_layer_write(&chain, 0, 0) else { panic!("there is room") };
    let mut write = |layer_idx: usize| {
        writer.write_layer(layer_idx, |section| {
            section.copy_from_slice(&payload[layer_idx * SECTION_BYTES..(layer_idx + 1) * SECTION_BYTES]);
        })
    };
    assert_eq!(write(2), None);
    assert_eq!(write(0), None);
    assert_eq!(write(0), None, "the same one again");
    assert_eq!(store.lookup(&chain).n_tokens, 0);
    assert_eq!(write(1), Some(Commit::Stored));
    assert_eq!(write(1), None);
    assert_eq!(retrieve_all(&store, &chain), 1);
    assert!(matches!(store.begin_layer_write(&chain, 0, 0), LayerWrite::Present));
}

#[test]
fn a_queue_that_takes_one_layer_at_a_time_is_enough() {
    let (store, _, _, chain) =
        mixed(Setup::new(64).with(|options| options.load_in_flight_bytes = Some(4 * SECTION_BYTES as u64)));
    let mut reader = store.retrieve_layers(&chain, 0);
    for layer_idx in 0..3 {
        until("the queue is empty", || store.queues().iter().all(|queues| queues.read_bytes == 0));
        assert_eq!(verify_layer(&mut reader, &chain, 0, layer_idx), 4);
    }
}

#[test]
fn a_chunk_that_was_read_by_layers_stays_in_memory() {
    let (store, nvme, redis, chain) = mixed(Setup::new(64));
    let mut reader = store.retrieve_layers(&chain, 0);
    for layer_idx in 0..3 {
        assert_eq!(verify_layer(&mut reader, &chain, 0, layer_idx), 4);
    }
    drop(reader);
    assert_eq!(store.stats().n_promoted, 6, "three chunks of two ranks, before the last layer is given out");
    let n_got = (nvme.n_got(), redis.n_got());
    let retrieved = store.retrieve(&chain, 0);
    assert_eq!(verify(&retrieved, &chain, 0), 4);
    assert!(retrieved.chunks().iter().all(|chunk| chunk.tier() == TierKind::Ram));
    assert_eq!((nvme.n_got(), redis.n_got()), n_got);
}

#[test]
fn a_chunk_of_which_a_layer_did_not_come_does_not_stay() {
    let (store, nvme, redis, chain) = mixed(Setup::new(64).with(|options| options.read_ahead_layers = 0));
    let mut reader = store.retrieve_layers(&chain, 0);
    until("layer 0 is read", || nvme.n_got() == 4 && redis.n_got() == 2);
    redis.set_failing(true);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 0), 4);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 1), 3);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 2), 3);
    assert_eq!(store.tiers_of(&chain, 2), [TierKind::Ram, TierKind::Nvme]);
    assert!(!store.tiers_of(&chain, 3).contains(&TierKind::Ram));
    redis.set_failing(false);
    assert_eq!(retrieve_all(&store, &chain), 4);
}

#[test]
fn memory_for_staying_is_given_to_the_reader_that_needs_it() {
    // Chunk 0 takes two slots, staying six more, and two layers at a time twelve.
    let (store, _, _, chain) = mixed(Setup::new(16).with(|options| options.read_ahead_layers = 0));
    let mut reader = store.retrieve_layers(&chain, 0);
    for layer_idx in 0..3 {
        assert_eq!(verify_layer(&mut reader, &chain, 0, layer_idx), 4);
    }
}

#[test]
fn a_clear_while_layers_are_read_leaves_nothing_in_memory() {
    let (store, nvme, _, chain) = mixed(Setup::new(64).with(|options| options.read_ahead_layers = 0));
    let mut reader = store.retrieve_layers(&chain, 0);
    assert_eq!(verify_layer(&mut reader, &chain, 0, 0), 4);
    nvme.gets.close();
    store.clear(&kvik_store::Clear::default());
    nvme.gets.open();
    while reader.next_layer().is_some() {}
    assert_eq!(store.stats().n_promoted, 0);
    assert_eq!(store.lookup_local(&chain).n_chunks, 0);
}
