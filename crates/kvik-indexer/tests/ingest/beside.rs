//! An engine that tells of a cache beside its own, as one with LMCache does.

use kvik_index::holders::Verdict;
use kvik_indexer::IndexConfig;
use kvik_indexer::feed::Naming;
use kvik_proto::events::{BlocksRemoved, BlocksStored, EngineHash, KvEvent, Medium};

use crate::engine::{BLOCK_TOKENS, Engine, hashes, matched, open, prompt, removed, start};
use crate::feeds::sglang_stored;

const CHUNK_BLOCKS: usize = 4;

/// The names of a prompt's chunks: those of their last blocks, in a naming that follows from nothing.
fn chunk_names(tokens: &[u32]) -> Vec<EngineHash> {
    hashes(77, tokens).chunks_exact(CHUNK_BLOCKS).filter_map(|chunk| chunk.last().copied()).collect()
}

/// All chunks of a prompt from one on, in the memory of the host.
fn chunks_stored(tokens: &[u32], from_chunk: usize) -> KvEvent {
    let names = chunk_names(tokens);
    let chunk_tokens = CHUNK_BLOCKS * BLOCK_TOKENS;
    KvEvent::Stored(BlocksStored {
        hashes: names[from_chunk..].to_vec(),
        parent: from_chunk.checked_sub(1).map(|parent| names[parent]),
        tokens: tokens[from_chunk * chunk_tokens..names.len() * chunk_tokens].to_vec(),
        block_tokens: chunk_tokens as u32,
        medium: Medium::Cpu,
        ..BlocksStored::default()
    })
}

fn chunks_removed(hashes: &[EngineHash]) -> KvEvent {
    KvEvent::Removed(BlocksRemoved { hashes: hashes.to_vec(), medium: Medium::Cpu, group_idx: None })
}

#[tokio::test]
async fn a_prompt_that_only_the_cache_beside_has_is_found_and_the_engines_own_blocks_stay() {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let feed = open(&indexer, "a", Naming::Learned).await;
    let (mut engine, tokens, other) = (Engine::default(), prompt(1, 9), prompt(2, 8));
    let first = engine.say(vec![sglang_stored(&tokens, 0)]);
    assert_eq!(engine.hear(&feed, first).await, Verdict::Applied);
    let second = engine.say(vec![sglang_stored(&other, 0), chunks_stored(&tokens, 0)]);
    assert_eq!(engine.hear(&feed, second).await, Verdict::Applied, "the engine's keys are still known");
    assert_eq!((matched(&indexer, "a", &tokens).await, matched(&indexer, "a", &other).await), (144, 128));
    // The engine evicts its own; what is beside it stays, whole chunks of it.
    let third = engine.say(vec![KvEvent::Cleared]);
    engine.hear(&feed, third).await;
    assert_eq!((matched(&indexer, "a", &tokens).await, matched(&indexer, "a", &other).await), (128, 0));
    let fourth = engine.say(vec![chunks_removed(&chunk_names(&tokens)[1..])]);
    engine.hear(&feed, fourth).await;
    assert_eq!(matched(&indexer, "a", &tokens).await, 64);
    let fifth = engine.say(vec![chunks_stored(&tokens, 1), sglang_stored(&other, 0)]);
    engine.hear(&feed, fifth).await;
    assert_eq!((matched(&indexer, "a", &tokens).await, matched(&indexer, "a", &other).await), (128, 128));
}

#[tokio::test]
async fn a_restart_a_gap_and_the_end_of_the_engine_are_those_of_the_cache_beside_it_too() {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let feed = open(&indexer, "a", Naming::Learned).await;
    let (mut engine, tokens, other) = (Engine::default(), prompt(1, 8), prompt(2, 8));
    engine.say(vec![sglang_stored(&tokens, 0)]);
    engine.say(vec![chunks_stored(&tokens, 0)]);
    engine.say(vec![chunks_stored(&other, 0)]);
    engine.hear(&feed, 0).await;
    engine.hear(&feed, 1).await;
    // A batch is missing: it is replayed.
    engine.say(vec![chunks_removed(&chunk_names(&other)[1..])]);
    assert_eq!(engine.hear(&feed, 3).await, Verdict::Applied);
    assert_eq!(matched(&indexer, "a", &other).await, 64);
    assert_eq!(engine.deliver(&feed, 2, true).await, Verdict::Duplicate);
    assert_eq!(matched(&indexer, "a", &other).await, 64, "a batch that comes again changes nothing");
    let mut reborn = Engine::default();
    reborn.say(vec![sglang_stored(&tokens[..64], 0)]);
    assert_eq!(reborn.hear(&feed, 0).await, Verdict::Restarted);
    assert_eq!((matched(&indexer, "a", &tokens).await, matched(&indexer, "a", &other).await), (64, 0));
    let next = reborn.say(vec![chunks_stored(&other, 0), removed(&[EngineHash(5)])]);
    reborn.hear(&feed, next).await;
    assert_eq!(matched(&indexer, "a", &other).await, 128);
    feed.close().await.unwrap();
    assert_eq!((matched(&indexer, "a", &tokens).await, matched(&indexer, "a", &other).await), (0, 0));
}
