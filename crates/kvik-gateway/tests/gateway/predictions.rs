//! What the index says of a prompt, and what an answer's report may take out of it.

use std::sync::Arc;

use bytes::Bytes;
use kvik_indexer::feed::{Feed, FeedBatch, FeedName, Feeds as _, Naming};
use kvik_indexer::keys::Keys;
use kvik_proto::events::{BlocksRemoved, BlocksStored, EngineHash, ExtraKey, KvEvent, Medium};
use serde_json::{Value, json};

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, until};

const BLOCK_TOKENS: u32 = 16;

/// Two engines behind a gateway that knows the KV of both.
struct Engines {
    workers: [MockWorker; 2],
    gateway: TestGateway,
    feeds: [Arc<dyn Feed>; 2],
    n_said: [u64; 2],
}

impl Engines {
    async fn start() -> Self {
        Self::start_with("longest_prefix").await
    }

    async fn start_with(scorer: &str) -> Self {
        let workers = [MockWorker::start("m").await, MockWorker::start("m").await];
        let set = |config: &mut kvik_gateway::GatewayConfig| scorer.clone_into(&mut config.index.scorer);
        let gateway = TestGateway::before(&[&workers[0], &workers[1]], set).await;
        let catalog = Arc::clone(gateway.gateway().indexer().unwrap().catalog());
        let open = async |worker: &MockWorker| {
            let name = FeedName { model: "m".to_owned(), worker: worker.url(), rank: 0 };
            catalog.open(name, Naming::Learned).await.unwrap()
        };
        let feeds = [open(&workers[0]).await, open(&workers[1]).await];
        Self { workers, gateway, feeds, n_said: [0; 2] }
    }

    /// An engine stores all blocks of a prompt, as vLLM names them.
    async fn store(&mut self, engine: usize, tokens: &[u32], salt: Option<&str>) {
        let keys: Keys = format!("vllm:sha256:{BLOCK_TOKENS}").parse().unwrap();
        let mut hashes = Vec::new();
        keys.extend_salted(tokens, salt, &mut hashes);
        let text = |text: &str| ExtraKey::Text(text.to_owned());
        let extra = salt.map(|salt| vec![ExtraKey::List(vec![text("cache_salt"), text(salt)])]);
        let stored = BlocksStored {
            extra_keys: extra
                .into_iter()
                .chain(hashes.iter().map(|_| Vec::new()))
                .take(hashes.len())
                .collect(),
            hashes: hashes.iter().map(|key| EngineHash(key.0)).collect(),
            tokens: tokens.to_vec(),
            block_tokens: BLOCK_TOKENS,
            ..BlocksStored::default()
        };
        self.say(engine, KvEvent::Stored(stored)).await;
    }

    /// An engine evicts the first block of a prompt.
    async fn remove_first(&mut self, engine: usize, tokens: &[u32]) {
        let keys: Keys = format!("vllm:sha256:{BLOCK_TOKENS}").parse().unwrap();
        let mut hashes = Vec::new();
        keys.extend(&tokens[..BLOCK_TOKENS as usize], &mut hashes);
        let hashes = hashes.iter().map(|key| EngineHash(key.0)).collect();
        self.say(engine, KvEvent::Removed(BlocksRemoved { hashes, medium: Medium::Gpu, group_idx: None }))
            .await;
    }

    async fn say(&mut self, engine: usize, event: KvEvent) {
        let sequence = self.n_said[engine];
        self.n_said[engine] += 1;
        let events = vec![event];
        let batch = FeedBatch { epoch: None, sequence, replayed: false, published_s: 0.0, events };
        self.feeds[engine].apply(batch).await.unwrap();
    }

    /// Sends a request of which the engine then reports this usage; returns the engine that got it.
    async fn complete(&self, body: &Value, prompt_tokens: usize, cached_tokens: u64) -> usize {
        let details = json!({"cached_tokens": cached_tokens});
        let usage = json!({"prompt_tokens": prompt_tokens, "prompt_tokens_details": details});
        let body_bytes = Bytes::from(json!({"choices": [], "usage": usage}).to_string());
        for worker in &self.workers {
            worker.behave(Behavior::Answer { status: 200, headers: Vec::new(), body: body_bytes.clone() });
        }
        let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
        let answer = self.gateway.post(path, &[], &body.to_string()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        self.workers.iter().position(|worker| worker.url() == answer.worker()).unwrap()
    }

    /// Tokens that an engine has of a prompt, as `/v1/score` says.
    async fn matched(&self, engine: usize, tokens: &[u32], salt: Option<&str>) -> u64 {
        let pod = self.workers[engine].url();
        let mut body = json!({"model": "m", "token_ids": tokens, "pods": [pod]});
        if let Some(salt) = salt {
            body["cache_salt"] = json!(salt);
        }
        let answer = self.gateway.post("/v1/score", &[], &body.to_string()).await;
        answer.json()["matched_tokens"][&pod].as_u64().unwrap()
    }

    async fn counter(&self, name: &str) -> u64 {
        self.gateway.get("/index/stats").await.json()["counters"][name].as_u64().unwrap()
    }
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..8 * BLOCK_TOKENS).map(|place| seed * 1000 + place).collect()
}

#[tokio::test]
async fn a_report_on_other_kv_than_the_prompts_own_takes_nothing_out_of_the_index() {
    let mut engines = Engines::start().await;
    let tokens = prompt(1);
    engines.store(0, &tokens, None).await;
    let others = [
        json!({"prompt": tokens, "cache_salt": "tenant"}),
        json!({"prompt": tokens, "truncate_prompt_tokens": 32}),
        json!({"prompt": tokens, "prompt_logprobs": 1}),
        json!({"prompt": tokens, "echo": true, "logprobs": 1}),
        json!({"prompt": tokens, "lora_path": "adapter"}),
        json!({"prompt": [tokens, tokens]}),
    ];
    for body in &others {
        let n_reported =
            if body.get("prompt").unwrap()[0].is_array() { 2 * tokens.len() } else { tokens.len() };
        engines.complete(body, n_reported, 0).await;
    }
    // A text that the engine cuts short: the report is about another prompt, whatever the request says.
    engines.complete(&json!({"prompt": tokens}), 32, 0).await;
    let engine = engines.complete(&json!({"prompt": tokens}), tokens.len(), 112).await;
    assert_eq!(engine, 0);
    until("the plain request is settled", async || engines.counter("predictions_kept").await == 1).await;
    assert_eq!(engines.counter("predictions_short").await, 0);
    assert_eq!(engines.matched(0, &tokens, None).await, 128);
    // What the report is about is corrected as before.
    engines.complete(&json!({"prompt": tokens}), tokens.len(), 48).await;
    until("the index is corrected", async || engines.matched(0, &tokens, None).await == 48).await;
}

#[tokio::test]
async fn a_salted_prompt_finds_the_holder_of_its_salt_and_no_other() {
    let mut engines = Engines::start().await;
    for seed in 1..=4 {
        let tokens = prompt(seed);
        let (plain, salted) = ((seed % 2) as usize, (seed + 1) as usize % 2);
        engines.store(plain, &tokens, None).await;
        engines.store(salted, &tokens, Some("tenant")).await;
        for (salt, expected) in [(None, plain), (Some("tenant"), salted)] {
            let body = json!({"prompt": tokens, "cache_salt": salt});
            assert_eq!(engines.complete(&body, tokens.len(), 112).await, expected);
            assert_eq!(engines.matched(expected, &tokens, salt).await, 128);
            assert_eq!(engines.matched(1 - expected, &tokens, salt).await, 0);
        }
        assert_eq!(engines.matched(0, &tokens, Some("other")).await, 0);
        assert_eq!(engines.matched(1, &tokens, Some("other")).await, 0);
        // A report on the salted prompt corrects the salted blocks alone.
        engines.complete(&json!({"prompt": tokens, "cache_salt": "tenant"}), tokens.len(), 0).await;
        until("the index is corrected", async || engines.matched(salted, &tokens, Some("tenant")).await == 0)
            .await;
        assert_eq!(engines.matched(plain, &tokens, None).await, 128);
    }
}

#[tokio::test]
async fn an_index_alone_is_ready_without_backends_and_answers_scores_only() {
    let shutdown = kvik_runtime::shutdown::Shutdown::new();
    let config = kvik_gateway::GatewayConfig { listen: "127.0.0.1:0".to_owned(), ..Default::default() };
    let running = kvik_gateway::Gateway::start_index(config.clone(), &shutdown).await.unwrap();
    let http = kvik_proto::client::http_client(&kvik_proto::client::TlsClientConfig::default()).unwrap();
    let gateway = TestGateway { running, shutdown, http };
    assert_eq!(gateway.get("/ready").await.status, 200);
    let answer = gateway.post("/v1/score", &[], r#"{"model":"m","token_ids":[1]}"#).await;
    assert_eq!((answer.status.as_u16(), answer.json()["best"].is_null()), (200, true));
    assert_eq!(gateway.get("/index/stats").await.json()["backend"], "memory");
    assert_eq!(gateway.get("/metrics").await.status, 200);
    gateway.complete(r#"{"model":"m","prompt":"x"}"#).await.assert_error(404, None);
    let mut disabled = config;
    disabled.index.enabled = false;
    let refused = kvik_gateway::Gateway::start_index(disabled, &gateway.shutdown).await.unwrap_err();
    assert!(refused.to_string().contains("`index.enabled` is false"), "{refused}");
}

#[tokio::test]
async fn the_configured_scorer_decides_routing_and_answers_without_a_scorer() {
    for (scorer, expected) in [("longest_prefix", 0), ("coverage", 1)] {
        let mut engines = Engines::start_with(scorer).await;
        let tokens = prompt(1);
        // The first engine has two blocks from the start on, the second all but the first.
        engines.store(0, &tokens[..32], None).await;
        engines.store(1, &tokens, None).await;
        engines.remove_first(1, &tokens).await;
        assert_eq!(
            engines.complete(&json!({"prompt": tokens}), tokens.len(), 32).await,
            expected,
            "{scorer}"
        );
        let body = json!({"model": "m", "token_ids": tokens});
        let answer = engines.gateway.post("/v1/score", &[], &body.to_string()).await.json();
        assert_eq!(answer["scorer"], scorer);
        assert_eq!(answer["best"], engines.workers[expected].url());
    }
}
