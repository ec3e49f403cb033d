//! The choice beside what the index says.

use kvik_gateway::GatewayConfig;
use kvik_indexer::feed::{FeedBatch, FeedName, Feeds as _, Naming};
use kvik_proto::events::{BlocksStored, EngineHash, KvEvent};
use kvik_proto::index::ScoreRequest;

use crate::engine::{Engine, MODEL};
use crate::support::TestEpp;

const N_PROMPTS: usize = 1000;
const BLOCK_TOKENS: usize = 16;

/// Pseudo random numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// The blocks of a prompt as an engine tells them, under names of its own.
fn stored(tokens: &[u32]) -> KvEvent {
    let mut hash = 7_u64;
    let hashes = tokens.chunks_exact(BLOCK_TOKENS).map(|block| {
        for token in block {
            hash = (hash ^ u64::from(*token)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        }
        EngineHash(hash)
    });
    KvEvent::Stored(BlocksStored {
        hashes: hashes.collect(),
        tokens: tokens[..tokens.len() / BLOCK_TOKENS * BLOCK_TOKENS].to_vec(),
        block_tokens: BLOCK_TOKENS as u32,
        ..BlocksStored::default()
    })
}

#[tokio::test]
async fn the_holder_that_the_index_names_is_picked_for_a_thousand_random_prompts() {
    let engines = Engine::start_many(8).await;
    let epp = TestEpp::before(&engines, |_, gateway: &mut GatewayConfig| {
        // A busy machine must not make the ring decide.
        gateway.routing.max_lookup_ms = 30_000;
    })
    .await;
    let indexer = epp.epp.gateway().gateway().indexer().unwrap().clone();
    let mut numbers = Numbers(42);
    let mut prompts = Vec::new();
    let mut feeds = Vec::new();
    for engine in &engines {
        let name = FeedName { model: MODEL.to_owned(), worker: engine.url(), rank: 0 };
        feeds.push((indexer.catalog().open(name, Naming::Bridged).await.unwrap(), 0));
    }
    for _ in 0..N_PROMPTS {
        let n_tokens = 2 * BLOCK_TOKENS as u64 + numbers.below(400);
        let tokens: Vec<u32> = (0..n_tokens).map(|_| numbers.below(30_000) as u32).collect();
        // One engine has it all, another one a beginning of it.
        let (holder, other) = (numbers.below(8) as usize, numbers.below(8) as usize);
        let n_beginning = numbers.below(n_tokens / BLOCK_TOKENS as u64) as usize * BLOCK_TOKENS;
        let beginning = Some((other, &tokens[..n_beginning]));
        let beginning = beginning.filter(|(other, held)| *other != holder && !held.is_empty());
        for (place, held) in beginning.into_iter().chain([(holder, &tokens[..])]) {
            let (feed, sequence) = &mut feeds[place];
            let events = vec![stored(held)];
            let batch =
                FeedBatch { epoch: None, sequence: *sequence, replayed: false, published_s: 0.0, events };
            feed.apply(batch).await.unwrap();
            *sequence += 1;
        }
        prompts.push(tokens);
    }
    for tokens in prompts {
        let request = ScoreRequest {
            model: MODEL.to_owned(),
            token_ids: Some(tokens.clone()),
            ..ScoreRequest::default()
        };
        let score = indexer.score(request, &|_| 0).await.unwrap();
        let best = score.best.expect("every prompt has a holder");
        let body = serde_json::json!({"model": MODEL, "prompt": tokens, "max_tokens": 1}).to_string();
        let (mut exchange, outcome) = epp.data_plane.complete(body.as_bytes()).await;
        assert_eq!(format!("http://{}", outcome.sent().endpoints[0]), best);
        exchange.answer(200, None, &[b"{}"]).await;
        epp.idle().await;
    }
}
