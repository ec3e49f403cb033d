//! What a lookup and a retrieve ask of remote tiers.

use std::time::Duration;

use kvik_tier::TierKind;
use proptest::prelude::*;

use crate::support::*;

const N_CHUNKS: usize = 128;

#[test]
fn a_prompt_that_no_tier_has_costs_one_question_for_one_chunk() {
    let redis = TestTier::new(TierKind::Redis);
    let store = Setup::new(16).remote(&redis).open();
    let chain = chain_of(&store, 1, N_CHUNKS);
    assert_eq!(store.lookup(&chain).n_chunks, 0);
    assert_eq!(redis.asked(), (1, 1));
    assert_eq!(retrieve_all(&store, &chain), 0);
    assert_eq!(redis.asked(), (2, 2));
}

#[test]
fn a_prompt_that_a_tier_has_costs_a_few_questions() {
    let redis = TestTier::new(TierKind::Redis);
    let store = Setup::new(2 * N_CHUNKS as u64).remote(&redis).open();
    let chain = chain_of(&store, 1, N_CHUNKS);
    (0..N_CHUNKS).for_each(|chunk_idx| plant(&redis, &chain, chunk_idx));
    assert_eq!(store.lookup(&chain).n_chunks, N_CHUNKS);
    // Of 1, 2, 4, 8, 16, 32, 64 chunks and of the last one.
    assert_eq!(redis.asked(), (8, N_CHUNKS as u64));
    assert_eq!(retrieve_all(&store, &chain), N_CHUNKS);
    assert_eq!(redis.asked(), (16, 2 * N_CHUNKS as u64));
}

#[test]
fn the_questions_after_a_hole_are_not_asked() {
    let redis = TestTier::new(TierKind::Redis);
    let store = Setup::new(16).remote(&redis).open();
    let chain = chain_of(&store, 1, N_CHUNKS);
    (0..N_CHUNKS).filter(|chunk_idx| *chunk_idx != 4).for_each(|chunk_idx| plant(&redis, &chain, chunk_idx));
    assert_eq!(store.lookup(&chain).n_chunks, 4);
    assert_eq!(redis.asked(), (3, 7));
}

#[test]
fn the_first_chunks_are_read_before_the_last_are_asked_for() {
    let redis = TestTier::new(TierKind::Redis);
    let store = Setup::new(64).remote(&redis).open();
    let chain = chain_of(&store, 1, 8);
    (0..8).for_each(|chunk_idx| plant(&redis, &chain, chunk_idx));
    redis.asks.close_from(2);
    let prefetch = store.prefetch(&chain, 0);
    until("three chunks are read", || redis.n_got() == 3);
    redis.asks.open();
    assert_eq!(verify(&prefetch.wait(Duration::from_secs(30)), &chain, 0), 8);
}

#[test]
fn a_lookup_that_runs_out_of_time_says_what_was_found_by_then() {
    let redis = TestTier::new(TierKind::Redis);
    let store = Setup::new(16)
        .with(|options| options.lookup_timeout = Duration::from_millis(200))
        .remote(&redis)
        .open();
    let chain = chain_of(&store, 1, 8);
    (0..8).for_each(|chunk_idx| plant(&redis, &chain, chunk_idx));
    redis.asks.close_from(2);
    assert_eq!(store.lookup(&chain).n_chunks, 3);
    redis.asks.open();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn groups_give_the_answer_that_asking_for_everything_gives(
        held in proptest::collection::vec((0_u8..16, prop::bool::weighted(0.9)), 1..N_CHUNKS),
    ) {
        let (nvme, redis, object) =
            (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis), TestTier::new(TierKind::Object));
        let plain = Setup::new(1).open();
        let chain = space_of(&plain, "", 2).chain(&tokens_of(1, held.len() * CHUNK_TOKENS));
        // Which rank is where, a bit each; most chunks are whole in one of the tiers.
        let ranks = |chunk_idx: usize| -> [(&TestTier, u16, bool); 4] {
            let (bits, is_whole) = held[chunk_idx];
            let bits = if is_whole { [0b0011, 0b1100, 0b1001, 0b0110][usize::from(bits % 4)] } else { bits };
            let is_set = |bit: u8| bits & (1 << bit) != 0;
            [(&redis, 0, is_set(0)), (&redis, 1, is_set(1)), (&object, 0, is_set(2)), (&object, 1, is_set(3))]
        };
        for chunk_idx in 0..held.len() {
            for (tier, rank, _) in ranks(chunk_idx).into_iter().filter(|(_, _, is_held)| *is_held) {
                let key = chain.key(chunk_idx, rank).unwrap();
                tier.map.overwrite(key, &content(key, chain.payload_bytes(chunk_idx)));
            }
            if chunk_idx % 11 == 5 {
                plant(&nvme, &chain, chunk_idx);
            }
        }
        let store = Setup::new(4 * N_CHUNKS as u64).local(&nvme).remote(&redis).remote(&object).open();
        let chain = space_of(&store, "", 2).chain(&tokens_of(1, held.len() * CHUNK_TOKENS));
        let is_whole = |chunk_idx: &usize| {
            let is_somewhere = |wanted| ranks(*chunk_idx).iter().any(|(_, rank, is_held)| *rank == wanted && *is_held);
            chunk_idx % 11 == 5 || (is_somewhere(0) && is_somewhere(1))
        };
        let expected = (0..held.len()).take_while(is_whole).count();
        prop_assert_eq!(store.lookup(&chain).n_chunks, expected);
        prop_assert_eq!(retrieve_all(&store, &chain), expected);
    }
}
