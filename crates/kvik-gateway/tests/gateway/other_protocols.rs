//! The P2P tier of vLLM, and a store that engines share.

use kvik_gateway::PdProtocol;
use kvik_indexer::feed::{FeedBatch, FeedName, Feeds as _, Naming};
use kvik_indexer::keys::Keys;
use kvik_proto::events::{BlocksStored, EngineHash, KvEvent};
use serde_json::json;

use crate::engine::{Engine, Fault, Kind};
use crate::nixl::{Pair, body, stream_body};

const BLOCK_TOKENS: u32 = 16;

async fn p2p(n_prefills: usize, n_decodes: usize) -> Pair {
    Pair::start((Kind::P2p, Kind::P2p), PdProtocol::P2p, (n_prefills, n_decodes), |config| {
        for (number, backend) in config.backends.iter_mut().enumerate() {
            backend.pd_port = Some(6000 + number as u16);
        }
    })
    .await
}

/// The index learns that an engine has a prompt.
async fn store(pair: &Pair, engine: &Engine, tokens: &[u32]) {
    let catalog = pair.gateway.gateway().indexer().unwrap().catalog();
    let name = FeedName { model: "m".to_owned(), worker: engine.url(), rank: 0 };
    let feed = catalog.open(name, Naming::Learned).await.unwrap();
    let keys: Keys = format!("vllm:sha256:{BLOCK_TOKENS}").parse().unwrap();
    let mut hashes = Vec::new();
    keys.extend(tokens, &mut hashes);
    let stored = BlocksStored {
        extra_keys: hashes.iter().map(|_| Vec::new()).collect(),
        hashes: hashes.iter().map(|key| EngineHash(key.0)).collect(),
        tokens: tokens.to_vec(),
        block_tokens: BLOCK_TOKENS,
        ..BlocksStored::default()
    };
    let events = vec![KvEvent::Stored(stored)];
    feed.apply(FeedBatch { epoch: None, sequence: 0, replayed: false, published_s: 0.0, events })
        .await
        .unwrap();
}

#[tokio::test]
async fn a_prompt_is_computed_for_the_one_that_asks_by_its_id() {
    let pair = p2p(1, 1).await;
    pair.assert_completes(&body(1)).await;
    pair.assert_completes(&stream_body(2)).await;
    assert_eq!(pair.n_seen(), (2, 2));
    let source = &pair.decodes[0].body(0)["kv_transfer_params"]["remote_prefiller"];
    assert_eq!((&source["remote_host"], &source["remote_port"]), (&json!("127.0.0.1"), &json!(6000)));
    let id = &pair.prefills[0].body(0)["kv_transfer_params"]["remote_decoder"]["kv_request_id"];
    assert_eq!(*id, source["kv_request_id"]);
    assert_ne!(*id, pair.prefills[0].body(1)["kv_transfer_params"]["remote_decoder"]["kv_request_id"]);
}

#[tokio::test]
async fn an_engine_pulls_from_the_holder_that_the_index_names() {
    let pair = p2p(1, 2).await;
    let tokens: Vec<u32> = (0..2048).collect();
    store(&pair, &pair.prefills[0], &tokens).await;
    let sent = json!({"model": "m", "prompt": tokens, "max_tokens": 8});
    pair.assert_completes(&sent).await;
    assert_eq!(pair.n_seen(), (0, 1), "the holder computes nothing");
    let decode = pair.decodes.iter().find(|engine| engine.n_seen() == 1).unwrap();
    let source = &decode.body(0)["kv_transfer_params"]["remote_kv_source"];
    assert_eq!((&source["remote_host"], &source["remote_port"]), (&json!("127.0.0.1"), &json!(6000)));
    assert!(source["kv_request_id"].is_string());
    let explained = pair.gateway.post("/route/explain", &[], &sent.to_string()).await.json();
    assert_eq!((&explained["is_exact"], &explained["prompt_tokens"]), (&json!(true), &json!(2048)));
    assert_eq!(explained["disaggregation"]["decision"], "pull");
    assert_eq!(explained["disaggregation"]["partner"], pair.prefills[0].url());
}

#[tokio::test]
async fn an_engine_that_has_the_prompt_itself_is_told_nothing() {
    let pair = p2p(1, 1).await;
    let tokens: Vec<u32> = (0..2048).collect();
    store(&pair, &pair.prefills[0], &tokens).await;
    store(&pair, &pair.decodes[0], &tokens).await;
    let sent = json!({"model": "m", "prompt": tokens, "max_tokens": 8});
    pair.assert_completes(&sent).await;
    assert_eq!((pair.n_seen(), pair.decodes[0].body(0)), ((0, 1), sent));
}

#[tokio::test]
async fn a_pull_that_fails_is_done_without() {
    let pair = p2p(1, 1).await;
    let tokens: Vec<u32> = (0..2048).collect();
    store(&pair, &pair.prefills[0], &tokens).await;
    pair.fail(&[], &[Fault::FailToLoad]);
    let sent = json!({"model": "m", "prompt": tokens, "max_tokens": 8});
    pair.assert_completes(&sent).await;
    assert_eq!((pair.n_seen(), pair.decodes[0].body(1)), ((0, 2), sent));
}

#[tokio::test]
async fn engines_that_share_a_store_are_told_nothing() {
    let pair = Pair::start((Kind::Shared, Kind::Shared), PdProtocol::Shared, (1, 1), |_| {}).await;
    let sent = stream_body(1);
    pair.assert_completes(&sent).await;
    assert_eq!(pair.n_seen(), (1, 1));
    let first = pair.prefills[0].body(0);
    assert_eq!((&first["max_tokens"], &first["stream"]), (&json!(1), &json!(false)));
    assert_eq!(*pair.decodes[0].state.seen.lock()[0], *sent.to_string().as_bytes(), "byte for byte");
    pair.fail(&[Fault::Die], &[]);
    pair.assert_completes(&body(2)).await;
    assert_eq!(pair.decodes[0].body(1), body(2));
}
