//! What is found, and where.

use kvik_store::{Commit, StoreError, Write};
use kvik_tier::TierKind::{self, Nvme, Object, Ram, Redis};
use kvik_types::{BlockSize, CacheSalt};

use crate::support::*;

#[test]
fn what_was_stored_is_retrieved_byte_for_byte() {
    let store = Setup::new(16).open();
    let chain = chain_of(&store, 1, 5);
    assert_eq!(store.lookup(&chain).n_tokens, 0);
    assert_eq!(store_chain(&store, &chain), 5);
    let lookup = store.lookup(&chain);
    assert_eq!((lookup.n_tokens, lookup.n_chunks), (20, 5));
    assert_eq!(lookup.tokens_in(TierKind::Ram), 20);
    assert_eq!(retrieve_all(&store, &chain), 5);

    let retrieved = store.retrieve(&chain, 3);
    assert_eq!(verify(&retrieved, &chain, 3), 2);
    assert_eq!(retrieved.n_tokens(), 8);
    let key = chain.key(3, 0).unwrap();
    let chunk = &retrieved.chunks()[0];
    assert_eq!(chunk.layer(0, 1), &content(key, PAYLOAD_BYTES)[SECTION_BYTES..2 * SECTION_BYTES]);
    assert!(chunk.layer(0, 3).is_empty() && chunk.payload(1).is_empty());
    assert_eq!(store.retrieve(&chain, 99).n_tokens(), 0);
}

#[test]
fn chains_of_different_salts_share_no_chunk() {
    let store = Setup::new(16).open();
    let space = space_of(&store, "", 1);
    let tokens = tokens_of(1, 20);
    let salts = ["a", "b"].map(|salt| CacheSalt::try_new(salt).unwrap());
    let chains = [None, Some(&salts[0]), Some(&salts[1])].map(|salt| space.salted_chain(&tokens, salt));
    for (idx, chain) in chains.iter().enumerate() {
        assert_eq!(store.lookup(chain).n_tokens, 0, "{idx}");
        assert_eq!(store_chain(&store, chain), 5);
        assert_eq!(
            retrieve_all(&store, &space.salted_chain(&tokens, [None, Some(&salts[0]), Some(&salts[1])][idx])),
            5
        );
    }
    assert_eq!(chains[0].key(0, 0), space.chain(&tokens).key(0, 0));
}

#[test]
fn an_extended_chain_is_the_chain_of_the_longer_sequence() {
    let store = Setup::new(16).open();
    let space = space_of(&store, "", 1);
    let tokens = tokens_of(1, 40);
    let salt = CacheSalt::try_new("a").unwrap();
    for salt in [None, Some(&salt)] {
        for n_prompt in [0, 3, 4, 13, 40] {
            let extended = space.salted_chain(&tokens[..n_prompt], salt).extended(&tokens);
            let whole = space.salted_chain(&tokens, salt);
            assert_eq!((extended.n_chunks(), extended.n_tokens()), (whole.n_chunks(), whole.n_tokens()));
            for chunk_idx in 0..whole.n_chunks() {
                assert_eq!(extended.key(chunk_idx, 0), whole.key(chunk_idx, 0), "{n_prompt}");
            }
        }
    }
}

#[test]
fn a_longer_sequence_finds_the_chunks_it_shares() {
    let store = Setup::new(16).open();
    let tokens = tokens_of(1, 40);
    let space = space_of(&store, "", 1);
    assert_eq!(store_chain(&store, &space.chain(&tokens[..13])), 3);
    assert_eq!(store.lookup(&space.chain(&tokens)).n_chunks, 3);
    let mut other = tokens.clone();
    other[5] += 1;
    assert_eq!(store.lookup(&space.chain(&other)).n_chunks, 1);
}

#[test]
fn another_tenant_and_another_format_find_nothing() {
    let store = Setup::new(16).open();
    assert_eq!(store_chain(&store, &chain_of(&store, 1, 3)), 3);
    let tokens = tokens_of(1, 12);
    assert_eq!(store.lookup(&space_of(&store, "other", 1).chain(&tokens)).n_tokens, 0);
    assert_eq!(store.lookup(&space_of(&store, "", 2).chain(&tokens)).n_tokens, 0);
}

#[test]
fn a_chunk_is_visible_after_its_commit_and_not_before() {
    let store = Setup::new(16).open();
    let chain = chain_of(&store, 1, 1);
    let Write::Slot(mut writer) = store.begin_write(&chain, 0, 0) else { panic!("there is room") };
    writer.payload_mut().copy_from_slice(&content(chain.key(0, 0).unwrap(), PAYLOAD_BYTES));
    assert_eq!(store.lookup(&chain).n_tokens, 0);
    assert_eq!(store.retrieve(&chain, 0).n_tokens(), 0);
    assert_eq!(writer.commit(), Commit::Stored);
    assert_eq!(retrieve_all(&store, &chain), 1);
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let store = Setup::new(16).open();
    let chain = chain_of(&store, 1, 2);
    let Write::Slot(writer) = store.begin_write(&chain, 0, 0) else { panic!("there is room") };
    drop(writer);
    assert_eq!(store.lookup(&chain).n_tokens, 0);
    assert!(matches!(store.begin_write(&chain, 1, 0), Write::NoParent), "it was never there");
    assert_eq!(store.stats().n_entries, 0);
    assert_eq!(store.health()[0].1.used_bytes, Some(0));
}

#[test]
fn the_second_writer_of_a_chunk_is_dropped() {
    let store = Setup::new(16).open();
    let chain = chain_of(&store, 1, 1);
    let Write::Slot(mut first) = store.begin_write(&chain, 0, 0) else { panic!("there is room") };
    let Write::Slot(mut second) = store.begin_write(&chain, 0, 0) else { panic!("there is room") };
    first.payload_mut().copy_from_slice(&content(chain.key(0, 0).unwrap(), PAYLOAD_BYTES));
    second.payload_mut().fill(0);
    assert_eq!(first.commit(), Commit::Stored);
    assert_eq!(second.commit(), Commit::Present);
    assert_eq!(retrieve_all(&store, &chain), 1);
    assert!(matches!(store.begin_write(&chain, 0, 0), Write::Present));
    assert_eq!(store.health()[0].1.used_bytes, Some(SLOT_BYTES));
}

#[test]
fn nothing_is_stored_behind_a_hole() {
    let store = Setup::new(16).open();
    let chain = chain_of(&store, 1, 4);
    assert!(store_chunk(&store, &chain, 0));
    assert!(matches!(store.begin_write(&chain, 2, 0), Write::NoParent));
    assert!(matches!(store.begin_write(&chain, 4, 0), Write::NoParent), "there is no such chunk");
    assert!(matches!(store.begin_write(&chain, 1, 1), Write::NoParent), "there is no such rank");
    // Slots of a chain can be taken ahead, and are committed in its order.
    let Write::Slot(chunk_1) = store.begin_write(&chain, 1, 0) else { panic!("there is room") };
    let Write::Slot(chunk_2) = store.begin_write(&chain, 2, 0) else { panic!("there is room") };
    assert_eq!(chunk_2.commit(), Commit::NoParent);
    assert_eq!(chunk_1.commit(), Commit::Stored);
    assert_eq!(store.lookup(&chain).n_chunks, 2);
}

#[test]
fn a_chunk_that_misses_one_rank_is_a_miss() {
    let store = Setup::new(16).open();
    let chain = space_of(&store, "", 2).chain(&tokens_of(1, 8));
    assert!(store_chunk(&store, &chain, 0));
    let Write::Slot(mut writer) = store.begin_write(&chain, 1, 0) else { panic!("there is room") };
    writer.payload_mut().copy_from_slice(&content(chain.key(1, 0).unwrap(), PAYLOAD_BYTES));
    assert_eq!(writer.commit(), Commit::Stored);
    assert_eq!(store.lookup(&chain).n_chunks, 1);
    assert_eq!(retrieve_all(&store, &chain), 1);
    assert!(store_chunk(&store, &chain, 1));
    assert_eq!(retrieve_all(&store, &chain), 2);
}

#[test]
fn ranks_of_one_chunk_may_come_from_different_tiers() {
    let (nvme, redis) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis));
    let plan = Setup::new(16).open();
    let chain = space_of(&plan, "", 3).chain(&tokens_of(1, 4));
    for (tier, rank) in [(&nvme, 0), (&redis, 1), (&redis, 2)] {
        let key = chain.key(0, rank).unwrap();
        tier.map.overwrite(key, &content(key, PAYLOAD_BYTES));
    }
    let store = Setup::new(16).local(&nvme).remote(&redis).open();
    let chain = space_of(&store, "", 3).chain(&tokens_of(1, 4));
    assert_eq!(store.lookup(&chain).tokens_by_tier, [(TierKind::Redis.into(), 4)]);
    assert_eq!(store.lookup_local(&chain).n_tokens, 0);
    assert_eq!(retrieve_all(&store, &chain), 1);
}

#[test]
fn holes_of_one_tier_are_filled_by_others() {
    let (nvme, redis, object) =
        (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis), TestTier::new(TierKind::Object));
    let chain = chain_of(&Setup::new(16).open(), 1, 6);
    for (tier, chunk_idx) in [(&nvme, 1), (&redis, 2), (&nvme, 3), (&object, 4), (&redis, 5)] {
        plant(tier, &chain, chunk_idx);
    }
    let store = Setup::new(16).local(&nvme).remote(&redis).remote(&object).open();
    let chain = chain_of(&store, 1, 6);
    assert!(store_chunk(&store, &chain, 0));
    let lookup = store.lookup(&chain);
    assert_eq!(lookup.n_chunks, 6);
    assert_eq!(lookup.tokens_in(TierKind::Redis), 8);
    let retrieved = store.retrieve(&chain, 0);
    assert_eq!(verify(&retrieved, &chain, 0), 6);
    let tiers: Vec<TierKind> = retrieved.chunks().iter().map(kvik_store::RetrievedChunk::tier).collect();
    assert_eq!(tiers, [Ram, Nvme, Redis, Nvme, Object, Redis]);
    // By the lookup and by the retrieve, each in three groups: chunk 2, chunk 4 and chunk 5.
    assert_eq!(redis.asked(), (6, 6));
    assert_eq!(object.asked(), (2, 2));
}

#[test]
fn tails_are_kept_where_that_is_wanted() {
    let tokens = tokens_of(1, 11);
    let without = Setup::new(16).open();
    let chain = space_of(&without, "", 1).chain(&tokens);
    assert_eq!((chain.n_chunks(), chain.n_tokens()), (2, 8));

    let store = Setup::new(16).with(|options| options.stores_tails = true).open();
    let space = space_of(&store, "", 1);
    let chain = space.chain(&tokens);
    assert_eq!((chain.n_chunks(), chain.n_tokens()), (3, 10), "a whole number of token blocks");
    assert_eq!(chain.tokens_of(2), 8..10);
    assert_eq!(store_chain(&store, &chain), 3);
    assert_eq!(retrieve_all(&store, &chain), 3);
    assert_eq!(store.retrieve(&chain, 0).n_tokens(), 10);
    // The same tokens in a longer sequence are a part of another chunk.
    assert_eq!(store.lookup(&space.chain(&tokens_of(1, 12))).n_tokens, 8);
}

#[test]
fn formats_that_cannot_be_are_refused() {
    let store = Setup::new(16).open();
    let good = *space_of(&store, "", 1).format();
    for (field, bad) in [
        ("n_layers", kvik_store::ChunkFormat { n_layers: 0, ..good }),
        ("n_ranks", kvik_store::ChunkFormat { n_ranks: 65, ..good }),
        ("token_layer_bytes", kvik_store::ChunkFormat { token_layer_bytes: 0, ..good }),
        ("token_layer_bytes", kvik_store::ChunkFormat { token_layer_bytes: u64::MAX, ..good }),
        ("block_tokens", kvik_store::ChunkFormat { block_tokens: BlockSize::try_new(3).unwrap(), ..good }),
    ] {
        let error = store.space(&namespace(""), bad).unwrap_err();
        assert!(matches!(&error, StoreError::Invalid { field: named, .. } if *named == field), "{error}");
    }
    assert!(store.space(&namespace(""), kvik_store::ChunkFormat { n_ranks: 64, ..good }).is_ok());
}

#[test]
fn the_directory_takes_little_memory_for_a_chunk() {
    let n_chunks = 4096;
    let store = Setup::new(2 * n_chunks).open();
    let chain = chain_of(&store, 1, n_chunks as usize);
    assert_eq!(store_chain(&store, &chain), n_chunks as usize);
    assert_eq!(store.lookup(&chain).n_chunks, n_chunks as usize);
    let stats = store.stats();
    let chunk_bytes = stats.directory_bytes / stats.n_entries;
    assert!(chunk_bytes < 200, "{chunk_bytes} bytes");
}

#[test]
fn a_chain_of_another_store_is_empty_here() {
    let (ours, theirs) = (Setup::new(16).open(), Setup::new(16).open());
    space_of(&theirs, "first", 1);
    let chain = chain_of(&theirs, 1, 2);
    assert_eq!(store_chain(&theirs, &chain), 2);
    assert!(matches!(ours.begin_write(&chain, 0, 0), Write::NoParent));
    ours.note_request(&chain, None);
    assert_eq!((ours.lookup(&chain).n_tokens, ours.retrieve(&chain, 0).n_tokens()), (0, 0));
    assert_eq!((ours.pin(&chain), ours.unpin(&chain)), (0, false));
    assert_eq!(ours.relocate(&chain, Ram, Nvme, true), 0);
    assert!(ours.retrieve_layers(&chain, 0).next_layer().is_none());
    ours.clear(&kvik_store::Clear { chain: Some(chain.clone()), ..Default::default() });
    assert_eq!(retrieve_all(&theirs, &chain), 2);
}
