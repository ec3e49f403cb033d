//! Chunks that an engine has keys for: each is found by its key, whatever it is asked for with.

use kvik_store::policy::PolicyKind;
use kvik_store::{Chain, Clear, Store};
use kvik_tier::{ChunkKey, TierKind};

use crate::support::*;

fn chain_of_pages(store: &Store, pages: impl IntoIterator<Item = u64>) -> Chain {
    let keys: Vec<String> = pages.into_iter().map(|page| format!("page-{page}")).collect();
    space_of(store, "", 2).chain_of_keys(keys.iter().map(String::as_bytes)).unwrap()
}

fn names(chain: &Chain) -> Vec<(Option<ChunkKey>, [u8; 32])> {
    (0..chain.n_chunks()).map(|idx| (chain.key(idx, 0), chain.digest(idx).unwrap().0)).collect()
}

#[test]
fn a_key_names_the_same_chunk_wherever_it_stands_and_no_other() {
    let store = Setup::new(4).open();
    let chain = chain_of_pages(&store, 0..6);
    assert_eq!((chain.n_chunks(), chain.n_tokens()), (6, 6 * CHUNK_TOKENS));
    assert_eq!(names(&chain_of_pages(&store, 2..5)), names(&chain)[2..5]);
    let mut all = names(&chain);
    all.extend(names(&space_of(&store, "", 2).chain(&tokens_of(0, 24))));
    all.extend(names(&space_of(&store, "other", 2).chain_of_keys([b"page-0".as_slice(), b""]).unwrap()));
    for (idx, (key, digest)) in all.iter().enumerate() {
        assert!(all[idx + 1..].iter().all(|(other, other_digest)| other != key && other_digest != digest));
    }
    let twice = [b"a".as_slice(), b"b", b"a"];
    assert!(space_of(&store, "", 2).chain_of_keys(twice).is_none());
}

#[test]
fn pages_are_found_from_the_first_of_any_question_on() {
    let nvme = TestTier::new(TierKind::Nvme);
    let store = Setup::new(32).local(&nvme).open();
    assert_eq!(store_chain(&store, &chain_of_pages(&store, 0..3)), 3);
    assert_eq!(store_chain(&store, &chain_of_pages(&store, 3..6)), 3);
    flush(&store);
    for begin in 0..6 {
        assert_eq!(retrieve_all(&store, &chain_of_pages(&store, begin..8)), 6 - begin as usize);
        assert_eq!(store.lookup(&chain_of_pages(&store, begin..8)).n_chunks, 6 - begin as usize);
    }
    assert_eq!(store.lookup(&chain_of_pages(&store, [6, 0, 1])).n_chunks, 0);
    // Also from the tier below, with what memory has of it gone.
    forget_memory(&store);
    assert_eq!(retrieve_all(&store, &chain_of_pages(&store, 2..6)), 4);
    assert_eq!(retrieve_all(&store, &chain_of_pages(&store, 0..6)), 6);
}

#[test]
fn pages_that_hang_on_others_in_another_order_can_be_cleared_and_stored_again() {
    for policy in [PolicyKind::Lru, PolicyKind::Kvik] {
        let store = Setup::new(32).with(|options| options.policy = policy).open();
        // The second question makes a parent deeper than its child.
        assert_eq!(store_chain(&store, &chain_of_pages(&store, [3, 4])), 2);
        assert_eq!(store_chain(&store, &chain_of_pages(&store, [0, 1, 2, 3])), 4);
        assert_eq!(retrieve_all(&store, &chain_of_pages(&store, 0..5)), 5);
        store.clear(&Clear::default());
        assert_eq!(store.lookup(&chain_of_pages(&store, 0..5)).n_chunks, 0);
        assert_eq!(store_chain(&store, &chain_of_pages(&store, 0..5)), 5);
        assert_eq!(retrieve_all(&store, &chain_of_pages(&store, 0..5)), 5);
    }
}

#[test]
fn windows_of_pages_that_overlap_stay_right_in_a_memory_for_a_few() {
    for policy in [PolicyKind::Lru, PolicyKind::Kvik] {
        let nvme = TestTier::new(TierKind::Nvme);
        let store = Setup::new(24).with(|options| options.policy = policy).local(&nvme).open();
        let mut state = 7_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let (mut n_stored, mut n_hits) = (0, 0);
        for _ in 0..2000 {
            let begin = draw(60);
            let chain = chain_of_pages(&store, begin..begin + 1 + draw(8));
            match draw(10) {
                0..5 => n_stored += store_chain(&store, &chain),
                5..9 => n_hits += retrieve_all(&store, &chain),
                _ if draw(20) == 0 => drop(store.clear(&Clear::default())),
                _ => drop(store.prefetch(&chain, 0)),
            }
        }
        // How many depends on how fast the tier takes what leaves memory.
        assert!(n_stored > 50 && n_hits > 50, "{n_stored} chunks were stored, {n_hits} found");
    }
}
