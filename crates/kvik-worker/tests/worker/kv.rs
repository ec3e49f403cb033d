//! `/kv/*`.

use http::{Method, StatusCode};
use kvik_proto::worker::KvPutResponse;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::json;

use crate::support::{Answer, PROMPT, TestClient, start, start_with, tokens_of};

const N_LAYERS: usize = 8;

/// Computes a named sequence; returns its next prompt.
async fn compute(client: &TestClient, seq_id: &str) -> Vec<u32> {
    let body = json!({"prompt": tokens_of(PROMPT), "seq_id": seq_id, "max_tokens": 6, "temperature": 0,
                      "return_token_ids": true});
    let answer = client.ask("/v1/completions", &body).await;
    let output: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap();
    [tokens_of(PROMPT), output].concat()
}

async fn put(client: &TestClient, query: &str, body: &[u8]) -> Answer {
    client.send(Method::POST, &format!("/kv/put?{query}"), body.to_vec()).await
}

async fn get(client: &TestClient, seq_id: &str, layer: usize) -> Vec<u8> {
    let answer = client.get(&format!("/kv/get?seq_id={seq_id}&layer={layer}")).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.body.to_vec()
}

/// The same layer, of the tokens in `range` only.
fn cut(body: &[u8], range: std::ops::Range<usize>) -> Vec<u8> {
    let tensors = SafeTensors::deserialize(body).unwrap();
    let slice = |name: &str| {
        let view = tensors.tensor(name).unwrap();
        let width = view.data().len() / view.shape()[0];
        let mut shape = view.shape().to_vec();
        shape[0] = range.len();
        (view.dtype(), shape, view.data()[range.start * width..range.end * width].to_vec())
    };
    let parts = ["k", "v", "token_ids"].map(|name| (name, slice(name)));
    serialize(
        parts.iter().map(|(name, (dtype, shape, data))| {
            (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        }),
        None,
    )
    .unwrap()
}

#[tokio::test]
async fn kv_moved_to_another_worker_continues_to_the_same_tokens() {
    let (source, destination) = (start().await, start().await);
    let next = compute(&source.client, "a").await;
    let n_resident = next.len() - 1;
    for layer in 0..N_LAYERS {
        let body = get(&source.client, "a", layer).await;
        let tensors = SafeTensors::deserialize(&body).unwrap();
        assert_eq!(tensors.tensor("k").unwrap().shape(), [n_resident, 4, 32]);
        // In two parts: the first replaces, the second is appended.
        let query = format!("seq_id=a&layer={layer}");
        let answer = put(&destination.client, &format!("{query}&mode=replace"), &cut(&body, 0..10)).await;
        let half: KvPutResponse = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((half.seq_len, half.is_complete), (10, false));
        let rest = cut(&body, 10..n_resident);
        let answer = put(&destination.client, &format!("{query}&mode=append"), &rest).await;
        let whole: KvPutResponse = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((whole.seq_len, whole.is_complete), (n_resident, layer == N_LAYERS - 1));
    }
    assert_eq!(destination.client.kv_stats().await.resident_sequences, 1);
    let body = json!({"prompt": next, "seq_id": "a", "max_tokens": 30, "temperature": 0});
    let moved = destination.client.ask("/v1/completions", &body).await;
    let stayed = source.client.ask("/v1/completions", &body).await;
    assert_eq!(moved["usage"]["prompt_tokens_details"]["cached_tokens"], n_resident);
    assert_eq!(moved["choices"][0]["text"], stayed["choices"][0]["text"]);
    for layer in [0, N_LAYERS - 1] {
        assert_eq!(get(&destination.client, "a", layer).await, get(&source.client, "a", layer).await);
    }
    source.end().await;
    destination.end().await;
}

#[tokio::test]
async fn appending_to_a_resident_continues_it() {
    let worker = start().await;
    let client = &worker.client;
    compute(client, "long").await;
    let n_all =
        SafeTensors::deserialize(&get(client, "long", 0).await).unwrap().tensor("k").unwrap().shape()[0];
    let mut layers = Vec::new();
    for layer in 0..N_LAYERS {
        layers.push(get(client, "long", layer).await);
    }
    for (layer, body) in layers.iter().enumerate() {
        put(client, &format!("seq_id=short&layer={layer}&mode=replace"), &cut(body, 0..7)).await;
    }
    assert_eq!(client.kv_stats().await.resident_sequences, 2);
    for (layer, body) in layers.iter().enumerate() {
        let answer =
            put(client, &format!("seq_id=short&layer={layer}&mode=append"), &cut(body, 7..n_all)).await;
        let put: KvPutResponse = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((put.seq_len, put.is_complete), (n_all, layer == N_LAYERS - 1), "{}", answer.text());
    }
    for (layer, body) in layers.iter().enumerate() {
        assert_eq!(&get(client, "short", layer).await, body);
    }
    worker.end().await;
}

#[tokio::test]
async fn kv_that_does_not_fit_is_refused_with_the_field() {
    let worker = start().await;
    let client = &worker.client;
    let f32s = |n: usize| vec![0_u8; n * 4];
    let body = |k: (Dtype, Vec<usize>, usize), ids: (Dtype, Vec<usize>, Vec<u8>)| {
        let (keys, values) = (vec![0; k.2], f32s(2 * 4 * 32));
        serialize(
            [
                ("k", TensorView::new(k.0, k.1, &keys).unwrap()),
                ("v", TensorView::new(Dtype::F32, vec![2, 4, 32], &values).unwrap()),
                ("token_ids", TensorView::new(ids.0, ids.1, &ids.2).unwrap()),
            ],
            None,
        )
        .unwrap()
    };
    let good_k = || (Dtype::F32, vec![2, 4, 32], 2 * 4 * 32 * 4);
    let good_ids = || (Dtype::U32, vec![2], [70_u32.to_le_bytes(), 71_u32.to_le_bytes()].concat());
    let good = body(good_k(), good_ids());
    for (query, body, field, shown) in [
        (
            "seq_id=a&layer=0",
            body((Dtype::F32, vec![3, 4, 32], 3 * 4 * 32 * 4), good_ids()),
            "k",
            "[3, 4, 32]",
        ),
        (
            "seq_id=a&layer=0",
            body((Dtype::F32, vec![2, 2, 64], 2 * 4 * 32 * 4), good_ids()),
            "k",
            "[2, 4, 32]",
        ),
        ("seq_id=a&layer=0", body((Dtype::BF16, vec![2, 4, 32], 2 * 4 * 32 * 2), good_ids()), "k", "F32"),
        ("seq_id=a&layer=0", body(good_k(), (Dtype::F32, vec![2], f32s(2))), "token_ids", "F32"),
        ("seq_id=a&layer=0", body(good_k(), (Dtype::I32, vec![1, 2], f32s(2))), "token_ids", "[1, 2]"),
        ("seq_id=a&layer=0", body(good_k(), (Dtype::I32, vec![0], vec![])), "token_ids", "[0]"),
        ("seq_id=a&layer=0", body(good_k(), (Dtype::I32, vec![2], vec![255; 8])), "token_ids", "-1"),
        (
            "seq_id=a&layer=0",
            body(good_k(), (Dtype::I64, vec![2], [4096_i64.to_le_bytes(), 1_i64.to_le_bytes()].concat())),
            "token_ids",
            "below 4096",
        ),
        ("seq_id=a&layer=8", good.clone(), "layer", "0 to 7"),
        ("seq_id=a&layer=x", good.clone(), "layer", "0 to 7"),
        ("seq_id=a", good.clone(), "layer", "missing"),
        ("layer=0", good.clone(), "seq_id", "bytes"),
        ("seq_id=a&layer=0&mode=prepend", good.clone(), "mode", "append, replace"),
    ] {
        let answer = put(client, query, &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{query} {}", answer.text());
        let (message, param, _) = answer.error();
        assert_eq!(param, field, "{message}");
        assert!(message.contains(shown), "{message}");
    }
    for body in [&b""[..], b"not safetensors", &good[..good.len() - 1]] {
        assert_eq!(put(client, "seq_id=a&layer=0", body).await.status, StatusCode::BAD_REQUEST);
    }
    assert_eq!(client.get("/kv/get?seq_id=a&layer=0").await.status, StatusCode::NOT_FOUND);
    assert_eq!(put(client, "seq_id=a&layer=0", &good).await.status, StatusCode::OK);
    let stats = client.kv_stats().await;
    assert_eq!((stats.resident_sequences, stats.free_blocks), (0, stats.blocks));
    worker.end().await;
}

#[tokio::test]
async fn kv_that_waits_is_bounded() {
    let mut config = crate::support::config();
    config.kv_staging_bytes = 100_000;
    let worker = start_with(config).await;
    let client = &worker.client;
    compute(client, "a").await;
    let layer = get(client, "a", 0).await;
    let n_fit = 100_000 / layer.len();
    let mut statuses = Vec::new();
    for idx in 0..n_fit + 2 {
        statuses.push(put(client, &format!("seq_id=b{idx}&layer=0"), &layer).await.status);
    }
    assert_eq!(statuses.first(), Some(&StatusCode::OK));
    assert_eq!(statuses.last(), Some(&StatusCode::TOO_MANY_REQUESTS));
    worker.end().await;
}

#[tokio::test]
async fn kv_for_which_running_sequences_leave_no_room_may_come_again() {
    let mut config = crate::support::config();
    config.kv_blocks = 8;
    let worker = start_with(config).await;
    let client = &worker.client;
    compute(client, "a").await;
    let mut layers = Vec::new();
    for layer in 0..N_LAYERS {
        layers.push(get(client, "a", layer).await);
    }
    let running: Vec<u32> = (100..200).collect();
    client.ask("/inference/init", &json!({"seq_id": "running", "token_ids": running})).await;
    let put_all = async || {
        let mut last = None;
        for (layer, body) in layers.iter().enumerate() {
            last = Some(put(client, &format!("seq_id=b&layer={layer}"), body).await);
        }
        last.unwrap()
    };
    let refused = put_all().await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{}", refused.text());
    assert_eq!(refused.headers["retry-after"], "1");
    client.ask("/inference/finish", &json!({"seq_id": "running", "forget": true})).await;
    assert_eq!(put_all().await.status, StatusCode::OK);
    assert_eq!(get(client, "b", 3).await, layers[3]);
    worker.end().await;
}
