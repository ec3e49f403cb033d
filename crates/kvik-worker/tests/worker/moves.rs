//! `/sequences/...`: what comes from other workers and from gateways is checked, and what is refused holds nothing.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use kvik_proto::moves::{KV_CHECKSUM, Offer};
use kvik_tier::shared::checksum;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::support::{
    Answer, OpenStream, PROMPT, TestClient, TestWorker, config, start, start_with, tokens_of,
};

const TICKET: &str = "0123456789abcdef0123456789abcdef";
const TOKEN: &str = "cluster-token-0123456789";

/// A stream of more tokens than are read.
fn request() -> Value {
    let prompt = PROMPT.repeat(3);
    json!({"prompt": prompt, "max_tokens": 900, "temperature": 0, "ignore_eos": true, "stream": true})
}

fn request_bytes() -> Vec<u8> {
    request().to_string().into_bytes()
}

/// Listens like a worker that refuses whatever it is offered; what it was offered.
async fn refuse_one(listener: TcpListener) -> Offer {
    let (mut socket, _) = listener.accept().await.unwrap();
    let mut bytes = Vec::new();
    let offer = loop {
        assert_ne!(socket.read_buf(&mut bytes).await.unwrap(), 0);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((line, _)) = text.split_once("\r\n\r\n").and_then(|(_, body)| body.split_once('\n')) {
            break serde_json::from_str(line).unwrap();
        }
    };
    socket.write_all(b"HTTP/1.1 507 Full\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    offer
}

/// The offer that a worker of this build makes.
async fn offer_of(client: &TestClient) -> Offer {
    let mut stream = client.stream_with("/v1/completions", &[("x-kvik-journal", "1")], &request()).await;
    stream.next().await.unwrap();
    let running = client.get("/sequences").await.json();
    let id = running["sequences"][0]["id"].as_str().unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = format!("http://{}", listener.local_addr().unwrap());
    let moving = json!({"to": to});
    let path = format!("/sequences/{id}/move");
    let (offer, answer) = tokio::join!(refuse_one(listener), client.post(&path, &moving));
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{}", answer.text());
    // It runs on.
    stream.next().await.unwrap();
    assert_eq!(client.get("/sequences").await.json()["sequences"][0]["is_moving"], false);
    Offer { ticket: TICKET.to_owned(), ..offer }
}

fn framed(head: &impl serde::Serialize, body: &[u8]) -> Vec<u8> {
    [&serde_json::to_vec(head).unwrap(), b"\n".as_slice(), body].concat()
}

async fn offer(client: &TestClient, offer: &Offer) -> Answer {
    client.send(Method::POST, "/sequences/moves", framed(offer, &request_bytes())).await
}

/// The bytes of blocks: their tokens, and KV of the right length.
fn blocks(tokens: &[u32], n_bytes: usize) -> Vec<u8> {
    let mut body = (tokens.len() as u32).to_le_bytes().to_vec();
    body.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    body.resize(body.len() + n_bytes, 0);
    body
}

async fn put(client: &TestClient, ticket: &str, query: &str, body: Vec<u8>) -> Answer {
    let sum = format!("{:016x}", checksum(&body).0);
    let path = format!("/sequences/moves/{ticket}/kv?{query}");
    client.send_with(Method::PUT, &path, &[(KV_CHECKSUM, &sum)], body).await
}

async fn resume(client: &TestClient, head: &Value, body: &[u8]) -> Answer {
    client.send(Method::POST, "/sequences/resume", framed(head, body)).await
}

fn resume_head(progress: &str) -> Value {
    let head = json!({"sequence": "seq-1", "id": "cmpl-1", "created": 7, "seeds": [1]});
    json!({"path": "/v1/completions", "head": head, "progress": progress})
}

#[track_caller]
fn assert_refused(answer: &Answer, status: StatusCode, words: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    assert!(answer.error().0.contains(words), "{:?} in {}", words, answer.text());
}

/// Waits until no block is held and nothing runs.
async fn wait_for_rest(worker: &TestWorker) {
    worker
        .client
        .wait_for_stats(|stats| {
            (stats.running_sequences, stats.waiting_sequences, stats.free_blocks) == (0, 0, stats.blocks)
        })
        .await;
}

#[tokio::test]
async fn an_offer_that_does_not_fit_is_refused_and_holds_nothing() {
    let worker = start().await;
    let client = &worker.client;
    let good = offer_of(client).await;
    wait_for_rest(&worker).await;
    for ticket in ["", "short", &"x".repeat(32), &"0".repeat(33)] {
        let answer = offer(client, &Offer { ticket: ticket.to_owned(), ..good.clone() }).await;
        assert_refused(&answer, StatusCode::BAD_REQUEST, "`ticket` is `");
    }
    for wrong in [
        Offer { root: "00".to_owned(), ..good.clone() },
        Offer { layout: "other".to_owned(), ..good.clone() },
        Offer { block_layer_bytes: good.block_layer_bytes + 1, ..good.clone() },
    ] {
        assert_refused(&offer(client, &wrong).await, StatusCode::CONFLICT, "model, dtype or layout");
    }
    let unknown = Offer { path: "/v1/embeddings".to_owned(), ..good.clone() };
    assert_eq!(offer(client, &unknown).await.status, StatusCode::BAD_REQUEST);
    for body in
        [b"".to_vec(), b"{}".to_vec(), b"{}\n{}".to_vec(), framed(&good, b"{}"), framed(&good, b"\xff")]
    {
        let answer = client.send(Method::POST, "/sequences/moves", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text());
    }
    assert_eq!(offer(client, &good).await.status, StatusCode::OK);
    assert_refused(&offer(client, &good).await, StatusCode::CONFLICT, "`ticket` is known already");
    let forgotten = client.send(Method::DELETE, &format!("/sequences/moves/{TICKET}"), Vec::new()).await;
    assert_eq!(forgotten.json()["forgotten"], true);
    wait_for_rest(&worker).await;
    worker.end().await;
}

#[tokio::test]
async fn blocks_that_do_not_fit_are_refused_and_hold_nothing() {
    // The worker that is offered the request has nothing of it.
    let (source, worker) = tokio::join!(start(), start());
    let client = &worker.client;
    let good = offer_of(&source.client).await;
    source.end().await;
    let prompt = tokens_of(&PROMPT.repeat(3));
    let first = &prompt[..16];
    let n_layers = kvik_model::Model::bundled().unwrap().config().n_layers;
    let n_bytes = n_layers * good.block_layer_bytes;
    let right = blocks(first, n_bytes);
    let at = |first_block: &str| format!("part=0&choice=0&first_block={first_block}");
    assert_refused(
        &put(client, TICKET, &at("0"), right.clone()).await,
        StatusCode::NOT_FOUND,
        "is not known",
    );
    assert_eq!(offer(client, &good).await.status, StatusCode::OK);

    let path = format!("/sequences/moves/{TICKET}/kv?{}", at("0"));
    for sum in ["", "x", "0000000000000000", "00000000000000000"] {
        let answer = client.send_with(Method::PUT, &path, &[(KV_CHECKSUM, sum)], right.clone()).await;
        assert_refused(&answer, StatusCode::BAD_REQUEST, "CRC-64/NVME");
    }
    let without = client.send(Method::PUT, &path, right.clone()).await;
    assert_refused(&without, StatusCode::BAD_REQUEST, "CRC-64/NVME");
    let too_far = at(&usize::MAX.to_string());
    for (query, body, words) in [
        ("part=0&choice=0".to_owned(), right.clone(), "first_block"),
        ("part=1&choice=0&first_block=0".to_owned(), right.clone(), "`part`"),
        ("part=0&choice=1&first_block=0".to_owned(), right.clone(), "`part`"),
        (at("-1"), right.clone(), "query"),
        (too_far, right.clone(), "`first_block`"),
        (at("9999999"), right.clone(), "`first_block`"),
        (at("0"), Vec::new(), "shorter"),
        (at("0"), u32::MAX.to_le_bytes().to_vec(), "shorter"),
        (at("0"), blocks(first, n_bytes - 1), "`kv`"),
        (at("0"), blocks(&first[..15], n_bytes), "`kv`"),
        // Behind the prompt, where tokens are not known: they must at least be tokens.
        (at("9"), blocks(&[u32::MAX; 16], n_bytes), "`tokens`"),
    ] {
        assert_refused(&put(client, TICKET, &query, body).await, StatusCode::BAD_REQUEST, words);
    }
    let mut foreign = first.to_vec();
    foreign[15] ^= 1;
    let answer = put(client, TICKET, &at("0"), blocks(&foreign, n_bytes)).await;
    assert_refused(&answer, StatusCode::CONFLICT, "the tokens are not those of the request");
    // A gap is no error: it is said what is there.
    let gap = put(client, TICKET, &at("1"), blocks(&prompt[16..32], n_bytes)).await;
    assert_eq!((gap.status, &gap.json()["have_blocks"]), (StatusCode::OK, &json!(0)), "{}", gap.text());
    client.send(Method::DELETE, &format!("/sequences/moves/{TICKET}"), Vec::new()).await;
    wait_for_rest(&worker).await;
    worker.end().await;
}

#[tokio::test]
async fn a_journal_that_does_not_fit_is_refused_and_holds_nothing() {
    let worker = start().await;
    let client = &worker.client;
    let body = request_bytes();
    let huge = usize::MAX;
    let too_long = "7 ".repeat(900);
    for (progress, words) in [
        ("x", "the item `x`"),
        ("1 0! 2", "the item `2`"),
        ("1:5", "outputs 0 to 0"),
        ("4294967295:5", "the item"),
        ("4294967295", "token ids below"),
        (too_long.as_str(), "`max_tokens`, 900"),
        (&format!("{too_long}7 0!"), "`max_tokens`, 900"),
        ("1@4,4,0,0,0,0,0", "prompts of the request"),
        (&format!("0@{huge},0,0,0,0,0,0"), "prompts of the request"),
        (&format!("0@1,1,0,0,0,0,{huge}"), "prompts of the request"),
        ("0@1,1", "the item"),
    ] {
        let answer = resume(client, &resume_head(progress), &body).await;
        assert_refused(&answer, StatusCode::BAD_REQUEST, words);
    }
    for seeds in [json!([]), json!([1, 2])] {
        let mut head = resume_head("7");
        head["head"]["seeds"] = seeds;
        assert_refused(&resume(client, &head, &body).await, StatusCode::BAD_REQUEST, "`seeds`");
    }
    let mut whole = request();
    whole["stream"] = false.into();
    let whole = whole.to_string().into_bytes();
    let answer = resume(client, &resume_head("7"), &whole).await;
    assert_refused(&answer, StatusCode::BAD_REQUEST, "`partial` is missing");
    for partial in [json!(7), json!([]), json!([{}])] {
        let mut head = resume_head("7");
        head["partial"] = partial;
        assert_refused(&resume(client, &head, &whole).await, StatusCode::BAD_REQUEST, "`partial`");
    }
    let mut head = resume_head("7");
    head["path"] = "/v1/embeddings".into();
    assert_eq!(resume(client, &head, &body).await.status, StatusCode::BAD_REQUEST);
    for frame in [b"".as_slice(), b"{}", b"{}\n", b"null\nnull", b"\xff\n{}"] {
        let answer = client.send(Method::POST, "/sequences/resume", frame.to_vec()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text());
    }
    wait_for_rest(&worker).await;
    worker.end().await;
}

#[tokio::test]
async fn a_ticket_of_another_request_changes_no_token() {
    let worker = start().await;
    let client = &worker.client;
    let good = offer_of(client).await;
    wait_for_rest(&worker).await;
    let body =
        json!({"prompt": "The sun", "max_tokens": 12, "temperature": 0, "stream": true, "ignore_eos": true});
    let expected = client.events("/v1/completions", &body).await;
    let texts = |events: &[String]| -> String {
        let event = |event: &String| serde_json::from_str::<Value>(event).ok();
        let text = |event: Value| event["choices"][0]["text"].as_str().map(str::to_owned);
        events.iter().filter_map(event).filter_map(text).collect()
    };
    assert_eq!(offer(client, &good).await.status, StatusCode::OK);
    for ticket in [TICKET, "unknown", "", &"9".repeat(1 << 16)] {
        let mut head = resume_head("");
        head["ticket"] = ticket.into();
        let answer = resume(client, &head, body.to_string().as_bytes()).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        let events: Vec<String> =
            answer.text().lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect();
        assert_eq!(texts(&events), texts(&expected));
    }
    wait_for_rest(&worker).await;
    worker.end().await;
}

#[tokio::test]
async fn a_request_is_moved_only_to_another_worker_and_only_if_it_is_there() {
    let worker = start().await;
    let client = &worker.client;
    for path in ["/sequences/seq-none/move", "/sequences/seq-none/thaw"] {
        let answer = client.post(path, &json!({"to": "http://127.0.0.1:1"})).await;
        assert_refused(&answer, StatusCode::NOT_FOUND, "`seq-none` is not known here");
    }
    let mut stream = client.stream("/v1/completions", &request()).await;
    stream.next().await.unwrap();
    let id = client.get("/sequences").await.json()["sequences"][0]["id"].as_str().unwrap().to_owned();
    let path = format!("/sequences/{id}/move");
    let answer = client.post(&path, &json!({"to": "http://127.0.0.1:1"})).await;
    assert_refused(&answer, StatusCode::CONFLICT, "did not come through a gateway");
    drop(stream);
    wait_for_rest(&worker).await;

    let mut stream = client.stream_with("/v1/completions", &[("x-kvik-journal", "1")], &request()).await;
    stream.next().await.unwrap();
    let id = client.get("/sequences").await.json()["sequences"][0]["id"].as_str().unwrap().to_owned();
    let path = format!("/sequences/{id}/move");
    let own = format!("http://{}/", worker.running.address());
    assert_refused(&client.post(&path, &json!({"to": own})).await, StatusCode::BAD_REQUEST, "`to` is");
    for to in ["", "nowhere", "http://", "ftp://127.0.0.1/", "http://127.0.0.1:1"] {
        let answer = client.post(&path, &json!({"to": to})).await;
        assert!(answer.status.is_client_error() || answer.status == StatusCode::SERVICE_UNAVAILABLE, "{to}");
    }
    // After all that it runs as before.
    stream.next().await.unwrap();
    drop(stream);
    wait_for_rest(&worker).await;
    worker.end().await;
}

#[tokio::test]
async fn calls_of_moves_need_the_clusters_token() {
    let mut config = config();
    config.cluster_token = Some(TOKEN.to_owned().into());
    let worker = start_with(config).await;
    let client = &worker.client;
    let calls = [
        (Method::GET, "/sequences"),
        (Method::POST, "/sequences/resume"),
        (Method::POST, "/sequences/moves"),
        (Method::DELETE, "/sequences/moves/0"),
        (Method::PUT, "/sequences/moves/0/kv?part=0&choice=0&first_block=0"),
        (Method::POST, "/sequences/seq-1/move"),
        (Method::POST, "/sequences/seq-1/thaw"),
    ];
    for (method, path) in calls {
        for headers in [&[][..], &[("x-kvik-cluster-token", "wrong-token-0123456789")]] {
            let answer = client.send_with(method.clone(), path, headers, b"{}\n".to_vec()).await;
            assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{method} {path}: {}", answer.text());
        }
        let answer = client
            .send_with(method.clone(), path, &[("x-kvik-cluster-token", TOKEN)], Bytes::new().to_vec())
            .await;
        assert_ne!(answer.status, StatusCode::UNAUTHORIZED, "{method} {path}");
    }
    worker.end().await;
}

/// Begins a request as a gateway does and moves it to `destination`; the stream stays open, and the request's id.
async fn begin_and_move(source: &TestWorker, destination: &TestWorker) -> (OpenStream, String) {
    let client = &source.client;
    let mut stream = client.stream_with("/v1/completions", &[("x-kvik-journal", "1")], &request()).await;
    stream.next().await.unwrap();
    let id = client.get("/sequences").await.json()["sequences"][0]["id"].as_str().unwrap().to_owned();
    let to = format!("http://{}", destination.running.address());
    let answer = client.post(&format!("/sequences/{id}/move"), &json!({"to": to})).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let stats = destination.client.kv_stats().await;
    assert!(stats.free_blocks < stats.blocks, "its KV is there");
    (stream, id)
}

#[tokio::test]
async fn a_ticket_is_forgotten_as_soon_as_the_gateway_of_its_request_is_gone() {
    let (source, destination) = tokio::join!(start(), start());
    let (stream, _) = begin_and_move(&source, &destination).await;
    drop(stream);
    // Far less than the time after which a ticket is given up that nothing is heard of.
    let resting = async { tokio::join!(wait_for_rest(&source), wait_for_rest(&destination)) };
    tokio::time::timeout(Duration::from_secs(15), resting).await.expect("the other worker was told");
    source.end().await;
    destination.end().await;
}

#[tokio::test]
async fn a_ticket_is_forgotten_when_its_request_goes_on_where_it_was() {
    let (source, destination) = tokio::join!(start(), start());
    let expected = source.client.events("/v1/completions", &request()).await.len();
    let (mut stream, id) = begin_and_move(&source, &destination).await;
    let answer = source.client.post(&format!("/sequences/{id}/thaw"), &json!({})).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let resting = wait_for_rest(&destination);
    tokio::time::timeout(Duration::from_secs(15), resting).await.expect("the other worker was told");
    let mut n_events = 1;
    while stream.next().await.is_some() {
        n_events += 1;
    }
    assert_eq!(n_events, expected);
    source.end().await;
    destination.end().await;
}

#[tokio::test]
async fn a_request_whose_next_worker_is_not_there_goes_on_where_its_prompt_was_computed() {
    let worker = start().await;
    let client = &worker.client;
    let texts = |events: &[String]| -> Vec<Value> {
        let event = |event: &String| serde_json::from_str::<Value>(event).unwrap_or_default();
        events.iter().map(|text| event(text)["choices"].clone()).collect()
    };
    let expected = client.events("/v1/completions", &request()).await;
    let own = format!("http://{}", worker.running.address());
    for to in ["http://127.0.0.1:1", "nowhere", "", own.as_str()] {
        let headers = [("x-kvik-journal", "1"), ("x-kvik-decode-at", to)];
        let mut stream = client.stream_with("/v1/completions", &headers, &request()).await;
        let mut events = Vec::new();
        while let Some(event) = stream.next().await {
            events.push(event);
        }
        assert_eq!(texts(&events), texts(&expected), "{to}");
    }
    wait_for_rest(&worker).await;
    worker.end().await;
}
