//! The choice beside what the index says.

use std::sync::Arc;

use http_body_util::{BodyExt as _, Full};
use kvik_gateway::GatewayConfig;
use kvik_indexer::Indexer;
use kvik_indexer::feed::{Feed, FeedBatch, FeedName, Feeds as _, Naming};
use kvik_proto::client::{TlsClientConfig, http_client};
use kvik_proto::events::{BlocksStored, EngineHash, KvEvent};
use kvik_proto::index::ScoreRequest;

use crate::engine::{Engine, MODEL};
use crate::poll::poll;
use crate::support::{Numbers, PATIENCE, TestEpp};

const N_PROMPTS: usize = 1000;
const BLOCK_TOKENS: usize = 16;

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

/// The KV events of the index: which engine has which tokens.
struct Holdings {
    indexer: Arc<Indexer>,
    /// A feed for each engine, with the number of its next batch.
    feeds: Vec<(Arc<dyn Feed>, u64)>,
}

impl Holdings {
    async fn of(epp: &TestEpp, engines: &[Engine]) -> Self {
        let indexer = Arc::clone(epp.epp.gateway().gateway().indexer().unwrap());
        let mut feeds = Vec::new();
        for engine in engines {
            let name = FeedName { model: MODEL.to_owned(), worker: engine.url(), rank: 0 };
            feeds.push((indexer.catalog().open(name, Naming::Bridged).await.unwrap(), 0));
        }
        Self { indexer, feeds }
    }

    /// An engine has these tokens.
    async fn store(&mut self, place: usize, tokens: &[u32]) {
        let (feed, sequence) = &mut self.feeds[place];
        let events = vec![stored(tokens)];
        let batch = FeedBatch { epoch: None, sequence: *sequence, replayed: false, published_s: 0.0, events };
        feed.apply(batch).await.unwrap();
        *sequence += 1;
    }

    /// The engine that the index names for a prompt.
    async fn best(&self, tokens: &[u32]) -> Option<String> {
        let request = ScoreRequest {
            model: MODEL.to_owned(),
            token_ids: Some(tokens.to_vec()),
            ..ScoreRequest::default()
        };
        self.indexer.score(request, &|_| 0).await.unwrap().best
    }
}

fn body(tokens: &[u32]) -> String {
    serde_json::json!({"model": MODEL, "prompt": tokens, "max_tokens": 1}).to_string()
}

fn patient(gateway: &mut GatewayConfig) {
    // A busy machine must not make the ring decide.
    gateway.routing.max_lookup_ms = 30_000;
}

#[tokio::test]
async fn the_holder_that_the_index_names_is_picked_for_a_thousand_random_prompts() {
    let engines = Engine::start_many(8).await;
    let epp = TestEpp::before(&engines, |_, gateway| patient(gateway)).await;
    let mut holdings = Holdings::of(&epp, &engines).await;
    let mut numbers = Numbers(42);
    let mut prompts = Vec::new();
    for _ in 0..N_PROMPTS {
        let n_tokens = 2 * BLOCK_TOKENS as u64 + numbers.below(400);
        let tokens: Vec<u32> = (0..n_tokens).map(|_| numbers.below(30_000) as u32).collect();
        // One engine has it all, another one a beginning of it.
        let (holder, other) = (numbers.below(8) as usize, numbers.below(8) as usize);
        let n_beginning = numbers.below(n_tokens / BLOCK_TOKENS as u64) as usize * BLOCK_TOKENS;
        if other != holder && 0 < n_beginning {
            holdings.store(other, &tokens[..n_beginning]).await;
        }
        holdings.store(holder, &tokens).await;
        prompts.push(tokens);
    }
    for tokens in prompts {
        let best = holdings.best(&tokens).await.expect("every prompt has a holder");
        let (mut exchange, outcome) = epp.data_plane.complete(body(&tokens).as_bytes()).await;
        assert_eq!(format!("http://{}", outcome.sent().endpoints[0]), best);
        exchange.answer(200, None, &[b"{}"]).await;
        epp.idle().await;
    }
}

#[tokio::test]
async fn what_would_be_chosen_is_what_is_chosen_beside_other_requests() {
    let engines = Engine::start_many(3).await;
    let epp = TestEpp::before(&engines, |_, gateway| patient(gateway)).await;
    let mut holdings = Holdings::of(&epp, &engines).await;
    let http = http_client(&TlsClientConfig::default()).unwrap();
    let url = format!("http://{}/route/explain", epp.epp.gateway().address());
    let (mut numbers, mut open) = (Numbers(7), Vec::new());
    for turn in 0..40 {
        let tokens: Vec<u32> = (0..16 + numbers.below(300)).map(|_| numbers.below(30_000) as u32).collect();
        if turn % 2 == 0 {
            holdings.store(numbers.below(3) as usize, &tokens).await;
        }
        let request = http::Request::post(&url).body(Full::from(body(&tokens))).unwrap();
        let answer = http.request(request).await.unwrap().into_body().collect().await.unwrap().to_bytes();
        let explained: serde_json::Value = serde_json::from_slice(&answer).unwrap();
        let (exchange, outcome) = epp.data_plane.complete(body(&tokens).as_bytes()).await;
        assert_eq!(explained["worker"], format!("http://{}", outcome.sent().endpoints[0]), "{explained}");
        // Loads differ from turn to turn.
        open.push(exchange);
    }
    drop(open);
    epp.idle().await;
}

#[tokio::test]
async fn an_engine_that_reports_less_than_was_predicted_corrects_the_index() {
    let engines = Engine::start_many(2).await;
    let epp = TestEpp::before(&engines, |_, gateway| patient(gateway)).await;
    let mut holdings = Holdings::of(&epp, &engines).await;
    let tokens: Vec<u32> = (0..64).collect();
    holdings.store(1, &tokens).await;
    assert_eq!(holdings.best(&tokens).await, Some(engines[1].url()));
    let (mut exchange, outcome) = epp.data_plane.complete(body(&tokens).as_bytes()).await;
    assert_eq!(outcome.sent().endpoints[0], engines[1].endpoint());
    let usage = br#"{"usage":{"prompt_tokens":64,"prompt_tokens_details":{"cached_tokens":0}}}"#;
    exchange.answer(200, None, &[usage]).await;
    poll(PATIENCE, "the index has forgotten the prompt", async || {
        holdings.best(&tokens).await.is_none().then_some(())
    })
    .await;
}
