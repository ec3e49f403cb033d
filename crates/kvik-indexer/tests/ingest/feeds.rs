//! How a feed learns the keys of its engine.

use kvik_index::holders::Verdict;
use kvik_indexer::IndexConfig;
use kvik_indexer::feed::{FeedBatch, Holding, Naming};
use kvik_proto::events::{BlocksStored, EngineHash, ExtraKey, KvEvent};
use kvik_types::hash::{HashChain as _, SglangChain, block_hashes};
use kvik_types::{BlockHash, BlockSize};

use crate::engine::{BLOCK_TOKENS, Engine, hashes, matched, open, prompt, removed, start, stored};

pub(crate) fn sglang_stored(tokens: &[u32], from_block: usize) -> KvEvent {
    let mut chain = SglangChain::new(BlockSize::try_new(BLOCK_TOKENS).unwrap());
    let names: Vec<EngineHash> =
        block_hashes(&mut chain, tokens).map(|hash| EngineHash(hash.event_id().cast_unsigned())).collect();
    chain.restart();
    KvEvent::Stored(BlocksStored {
        hashes: names[from_block..].to_vec(),
        parent: from_block.checked_sub(1).map(|parent| names[parent]),
        tokens: tokens[from_block * BLOCK_TOKENS..].to_vec(),
        block_tokens: BLOCK_TOKENS as u32,
        ..BlocksStored::default()
    })
}

#[tokio::test]
async fn an_engine_with_unknown_hashes_is_found_by_tokens_and_removed_by_its_own_names() {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let feed = open(&indexer, "a", Naming::Learned).await;
    let (mut engine, tokens) = (Engine::default(), prompt(1, 8));
    let first = engine.say(vec![stored(7, &tokens[..4 * BLOCK_TOKENS], 0)]);
    assert_eq!(engine.hear(&feed, first).await, Verdict::Applied);
    let second = engine.say(vec![stored(7, &tokens, 4)]);
    assert_eq!(engine.hear(&feed, second).await, Verdict::Applied);
    assert_eq!(matched(&indexer, "a", &tokens).await, 128);
    assert_eq!(matched(&indexer, "a", &prompt(2, 8)).await, 0);
    let third = engine.say(vec![removed(&hashes(7, &tokens)[3..4])]);
    engine.hear(&feed, third).await;
    assert_eq!(matched(&indexer, "a", &tokens).await, 48);
    let fourth = engine.say(vec![stored(7, &tokens[..4 * BLOCK_TOKENS], 3)]);
    engine.hear(&feed, fourth).await;
    assert_eq!(matched(&indexer, "a", &tokens).await, 128, "a refill closes the hole");
    let fifth = engine.say(vec![KvEvent::Cleared]);
    engine.hear(&feed, fifth).await;
    assert_eq!(matched(&indexer, "a", &tokens).await, 0);
}

#[tokio::test]
async fn what_was_said_before_the_keys_were_proven_is_replayed_under_the_right_ones() {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let feed = open(&indexer, "a", Naming::Learned).await;
    let (mut engine, tokens, other) = (Engine::default(), prompt(1, 8), prompt(2, 4));
    // The first thing heard proves nothing: it has a parent.
    let first = engine.say(vec![stored(7, &tokens, 4)]);
    engine.hear(&feed, first).await;
    let second = engine.say(vec![stored(7, &tokens[..4 * BLOCK_TOKENS], 0)]);
    engine.hear(&feed, second).await;
    let third = engine.say(vec![stored(7, &other, 0)]);
    engine.hear(&feed, third).await;
    assert_eq!(matched(&indexer, "a", &tokens).await, 128, "children before their parents");
    assert_eq!(matched(&indexer, "a", &other).await, 64);
    let stats = indexer.stats().await.unwrap();
    let n_sources: usize = stats[0].books.iter().map(|book| book.sources.len()).sum();
    assert_eq!(n_sources, 1, "the book of the wrong keys has forgotten the engine: {stats:?}");
}

#[tokio::test]
async fn an_engine_whose_hashes_follow_from_tokens_is_indexed_by_them() {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let feed = open(&indexer, "a", Naming::Learned).await;
    let (mut engine, tokens) = (Engine::default(), prompt(1, 8));
    let first = engine.say(vec![sglang_stored(&tokens[..64], 0)]);
    engine.hear(&feed, first).await;
    let second = engine.say(vec![sglang_stored(&tokens, 4)]);
    engine.hear(&feed, second).await;
    assert_eq!(matched(&indexer, "a", &tokens).await, 128);
    let stats = indexer.stats().await.unwrap();
    let book = stats[0].books.iter().find(|book| !book.sources.is_empty()).unwrap();
    assert_eq!(book.keys, "sglang:16");
}

#[tokio::test]
async fn engines_of_several_kinds_serve_one_model() {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let tokens = prompt(1, 8);
    let (own, sglang) =
        (open(&indexer, "a", Naming::Learned).await, open(&indexer, "b", Naming::Learned).await);
    let (mut first, mut second) = (Engine::default(), Engine::default());
    first.say(vec![stored(7, &tokens, 0)]);
    first.hear(&own, 0).await;
    second.say(vec![sglang_stored(&tokens[..64], 0)]);
    second.hear(&sglang, 0).await;
    assert_eq!((matched(&indexer, "a", &tokens).await, matched(&indexer, "b", &tokens).await), (128, 64));
}

#[tokio::test]
async fn an_engine_that_restarts_has_only_what_it_said_since() {
    for salt in [7, 9] {
        let (indexer, _shutdown) = start(&IndexConfig::default()).await;
        let feed = open(&indexer, "a", Naming::Learned).await;
        let (mut engine, tokens, other) = (Engine::default(), prompt(1, 8), prompt(2, 8));
        for _ in 0..3 {
            let sequence = engine.say(vec![stored(salt, &tokens, 0)]);
            engine.hear(&feed, sequence).await;
        }
        let mut reborn = Engine::default();
        reborn.say(vec![stored(salt + 1, &other, 0)]);
        assert_eq!(reborn.hear(&feed, 0).await, Verdict::Restarted);
        assert_eq!(matched(&indexer, "a", &tokens).await, 0);
        assert_eq!(matched(&indexer, "a", &other).await, 128);
        let next = reborn.say(vec![removed(&hashes(salt + 1, &other)[7..])]);
        assert_eq!(reborn.hear(&feed, next).await, Verdict::Applied);
        assert_eq!(matched(&indexer, "a", &other).await, 112);
    }
}

#[tokio::test]
async fn blocks_of_an_adapter_or_with_a_salt_match_no_plain_prompt() {
    for salt in [EngineHash(1), EngineHash(2)] {
        let (indexer, _shutdown) = start(&IndexConfig::default()).await;
        let feed = open(&indexer, "a", Naming::Learned).await;
        let (mut engine, plain, tokens) = (Engine::default(), prompt(1, 2), prompt(2, 2));
        let KvEvent::Stored(blocks) = stored(salt.0, &tokens, 0) else { unreachable!() };
        let adapter = BlocksStored { lora_name: Some("l".to_owned()), ..blocks.clone() };
        let salted = BlocksStored {
            hashes: hashes(99, &tokens),
            extra_keys: vec![vec![ExtraKey::Text("s".to_owned())], Vec::new()],
            ..blocks
        };
        let first = engine.say(vec![stored(salt.0, &plain, 0)]);
        engine.hear(&feed, first).await;
        let second = engine.say(vec![KvEvent::Stored(adapter), KvEvent::Stored(salted)]);
        engine.hear(&feed, second).await;
        assert_eq!(matched(&indexer, "a", &plain).await, 32);
        assert_eq!(matched(&indexer, "a", &tokens).await, 0);
    }
}

#[tokio::test]
async fn a_worker_of_kvik_is_found_by_the_chain_that_it_names_and_leaves_at_once() {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let root = BlockHash([5; 16]);
    let feed = open(&indexer, "w", Naming::Kvik { root, block_tokens: 16 }).await;
    let tokens = prompt(1, 4);
    let keys: kvik_indexer::keys::Keys = format!("kvik:{root}:16").parse().unwrap();
    let mut blocks = Vec::new();
    keys.extend(&tokens, &mut blocks);
    let holding = Holding {
        epoch: Some(3),
        next_sequence: 10,
        runs: vec![(kvik_index::holders::Tier::Gpu, blocks[..3].to_vec())],
    };
    assert!(feed.replace(holding.clone()).await.unwrap());
    assert_eq!(matched(&indexer, "w", &tokens).await, 48);
    assert_eq!(feed.position().await.unwrap(), (Some(3), Some(10)));
    assert!(!feed.replace(Holding { epoch: Some(2), ..holding }).await.unwrap(), "an earlier life");
    let event = KvEvent::Stored(BlocksStored {
        hashes: vec![EngineHash(blocks[3].0)],
        parent: Some(EngineHash(blocks[2].0)),
        ..BlocksStored::default()
    });
    let batch =
        FeedBatch { epoch: Some(3), sequence: 10, replayed: false, published_s: 1.0, events: vec![event] };
    assert_eq!(feed.apply(batch).await.unwrap(), Verdict::Applied);
    assert_eq!(matched(&indexer, "w", &tokens).await, 64);
    feed.close().await.unwrap();
    assert_eq!(matched(&indexer, "w", &tokens).await, 0);
}

#[tokio::test]
async fn invalid_names_are_refused_and_change_nothing() {
    use kvik_indexer::feed::{FeedName, Feeds as _};
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let long = "x".repeat(1 << 20);
    for (model, worker) in [("m", long.as_str()), ("m", ""), (long.as_str(), "a"), ("", "a")] {
        let name = FeedName { model: model.to_owned(), worker: worker.to_owned(), rank: 0 };
        let error = indexer.catalog().open(name, Naming::Learned).await.unwrap_err().to_string();
        assert!(error.len() < 400 && error.contains("allowed"), "{error}");
    }
    assert!(indexer.catalog().all().iter().all(|books| !books.has_books()));
}
