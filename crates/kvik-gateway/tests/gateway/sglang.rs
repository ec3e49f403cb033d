//! `SGLang`: both engines at once, and an answer that waits for both.

use http_body_util::BodyExt as _;
use kvik_gateway::{BackendConfig, PdProtocol};
use serde_json::{Value, json};

use crate::engine::{Engine, Fabric, Fault, Kind};
use crate::mock::{Behavior, MockWorker};
use crate::nixl::{Pair, body, long_prompt, stream_body, streamed_text};
use crate::support::until;

async fn sglang(n_prefills: usize, n_decodes: usize) -> Pair {
    Pair::start((Kind::Sglang, Kind::Sglang), PdProtocol::Sglang, (n_prefills, n_decodes), |_| {}).await
}

/// The body without where the engines meet.
fn without_room(mut body: Value) -> Value {
    for field in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
        assert!(body.as_object_mut().unwrap().remove(field).is_some(), "{field}");
    }
    body
}

#[tokio::test]
async fn both_engines_get_the_same_request_with_one_room() {
    let pair = sglang(1, 1).await;
    let short = json!({"model": "m", "prompt": "short", "max_tokens": 4});
    for (number, sent) in [body(1), stream_body(2), short].iter().enumerate() {
        let answer = pair.assert_completes(sent).await;
        assert_eq!(answer.worker(), pair.decodes[0].url());
        let (prefill, decode) = (pair.prefills[0].body(number), pair.decodes[0].body(number));
        assert_eq!(prefill, decode);
        assert_eq!(
            (&prefill["bootstrap_host"], &prefill["bootstrap_port"]),
            (&json!("127.0.0.1"), &json!(8998))
        );
        assert_eq!(without_room(prefill), *sent);
    }
    assert_ne!(pair.decodes[0].body(0)["bootstrap_room"], pair.decodes[0].body(1)["bootstrap_room"]);
}

#[tokio::test]
async fn several_prompts_and_outputs_have_a_room_each() {
    let pair = sglang(1, 1).await;
    let batch = json!({"model": "m", "prompt": ["a", "b", "c"], "max_tokens": 2});
    assert_eq!(pair.gateway.complete(&batch.to_string()).await.status, 200);
    assert_eq!(pair.decodes[0].body(0)["bootstrap_room"].as_array().unwrap().len(), 3);
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2});
    assert_eq!(pair.gateway.post("/v1/chat/completions", &[], &chat.to_string()).await.status, 200);
    assert_eq!(pair.decodes[0].body(1)["bootstrap_host"], json!(["127.0.0.1", "127.0.0.1"]));
    pair.assert_clean().await;
}

#[tokio::test]
async fn an_answer_waits_until_the_other_engine_has_accepted() {
    let fabric = std::sync::Arc::new(Fabric::default());
    let prefill = Engine::start(Kind::Sglang, &fabric).await;
    let decode = MockWorker::start("m").await;
    decode.behave(Behavior::Stream(Behavior::stream(&[
        "data: {\"choices\":[{\"text\":\"a\"}]}\n\n",
        "data: [DONE]\n\n",
    ])));
    prefill.fail(&[Fault::RefuseLater(200)]);
    let mut config = crate::support::config_for(&[]);
    let backend =
        |url, role| BackendConfig { url, role, pd: Some(PdProtocol::Sglang), ..BackendConfig::default() };
    config.backends = vec![
        backend(prefill.url(), kvik_gateway::Role::Prefill),
        backend(decode.url(), kvik_gateway::Role::Decode),
    ];
    let gateway = crate::support::TestGateway::start(config).await;
    gateway.wait_until_usable(2).await;
    let sent = stream_body(1).to_string();
    let mut asking = std::pin::pin!(gateway.complete(&sent));
    let started = std::time::Instant::now();
    tokio::select! {
        answer = &mut asking => panic!("answered before the other engine: {answer:?}"),
        () = until("both have it for a while", async || {
            decode.n_seen() == 1 && prefill.n_seen() == 1 && 50 < started.elapsed().as_millis()
        }) => {}
    }
    prefill.state.go_on.notify_one();
    assert_eq!(streamed_text(&asking.await.body), "a");
    until("all load is back", async || gateway.outstanding_tokens() == 0).await;
}

#[tokio::test]
async fn an_engine_for_prompts_that_fails_is_replaced_and_the_other_leg_begins_anew() {
    for fault in [Fault::Die, Fault::Refuse(500), Fault::Refuse(503)] {
        let pair = sglang(2, 1).await;
        let first = {
            pair.assert_completes(&body(1)).await;
            pair.prefills.iter().position(|engine| engine.n_seen() == 1).unwrap()
        };
        pair.prefills[first].fail(&[fault]);
        pair.assert_completes(&body(1)).await;
        assert_eq!(pair.n_seen(), (3, 3), "{fault:?}");
        until("the first leg is let go", async || pair.decodes[0].n_cancelled() == 1).await;
        let rooms: Vec<Value> =
            (0..3).map(|number| pair.decodes[0].body(number)["bootstrap_room"].clone()).collect();
        assert!(rooms[1] != rooms[2], "{rooms:?}");
        // None of them works: the request cannot be done, and no breaker of the decoding engine hears of it.
        pair.fail(&[fault], &[]);
        pair.gateway.complete(&body(1).to_string()).await.assert_error(503, None);
        pair.assert_clean().await;
    }
}

#[tokio::test]
async fn a_server_for_whole_requests_takes_what_a_pair_cannot() {
    let plain = MockWorker::start("m").await;
    let pair = Pair::start((Kind::Sglang, Kind::Sglang), PdProtocol::Sglang, (1, 1), |config| {
        config.backends.push(BackendConfig { url: plain.url(), ..BackendConfig::default() });
    })
    .await;
    pair.fail(&[Fault::Die; 9], &[]);
    for number in 0..8 {
        assert_eq!(pair.gateway.complete(&body(number).to_string()).await.status, 200);
    }
    assert_eq!(plain.n_seen(), 8);
    pair.assert_clean().await;
}

#[tokio::test]
async fn a_request_that_one_of_them_finds_wrong_is_refused_by_it() {
    let pair = sglang(1, 1).await;
    pair.fail(&[Fault::Refuse(422)], &[]);
    let answer = pair.gateway.complete(&body(1).to_string()).await;
    assert_eq!((answer.status.as_u16(), answer.worker()), (422, pair.prefills[0].url()));
    until("the other leg is let go", async || pair.decodes[0].n_cancelled() == 1).await;
    pair.assert_clean().await;
    pair.fail(&[], &[Fault::Refuse(400)]);
    let answer = pair.gateway.complete(&body(1).to_string()).await;
    assert_eq!((answer.status.as_u16(), answer.worker()), (400, pair.decodes[0].url()));
    until("the leg that waits for it is let go", async || pair.prefills[0].n_cancelled() == 1).await;
    pair.assert_clean().await;
}

#[tokio::test]
async fn a_decoding_engine_that_fails_is_replaced_with_a_pair_of_new_legs() {
    for (fault, sent) in [
        (Fault::Die, body(1)),
        (Fault::Refuse(503), body(1)),
        (Fault::FailToLoad, body(1)),
        (Fault::FailToLoad, stream_body(1)),
    ] {
        let pair = sglang(1, 2).await;
        let first = pair.assert_completes(&sent).await.worker();
        let first = pair.decodes.iter().position(|engine| engine.url() == first).unwrap();
        pair.decodes[first].fail(&[fault]);
        // An engine that fails to load does not come to the room; neither does the other leg then end.
        let answer =
            tokio::time::timeout(std::time::Duration::from_secs(20), pair.assert_completes(&sent)).await;
        assert_eq!(answer.unwrap().worker(), pair.decodes[1 - first].url());
        assert_eq!(pair.prefills[0].n_seen(), 3, "{fault:?}");
    }
}

#[tokio::test]
async fn the_end_of_an_answer_does_not_cancel_the_other_leg() {
    let pair = sglang(1, 1).await;
    pair.fail(&[Fault::HoldEnd], &[]);
    let answer = pair.gateway.complete(&stream_body(1).to_string()).await;
    streamed_text(&answer.body);
    // The engine for prompts still has its load and its connection.
    let load = || pair.gateway.outstanding_tokens();
    assert!(0 < load());
    let again = json!({"model": "m", "prompt": "short", "max_tokens": 4});
    assert_eq!(pair.gateway.complete(&again.to_string()).await.status, 200);
    assert!(0 < load());
    assert_eq!(pair.prefills[0].n_cancelled(), 0);
    pair.prefills[0].state.go_on.notify_one();
    pair.assert_clean().await;
    assert_eq!(pair.prefills[0].n_cancelled(), 0);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_both_legs() {
    let pair = sglang(1, 1).await;
    pair.fail(&[Fault::Hang], &[]);
    let sent = body(1).to_string();
    tokio::select! {
        _ = pair.gateway.complete(&sent) => unreachable!("the engine does not answer"),
        () = until("both have it", async || pair.n_seen() == (1, 1)) => {}
    }
    until("both are let go", async || {
        (pair.prefills[0].n_cancelled(), pair.decodes[0].n_cancelled()) == (1, 1)
    })
    .await;
    pair.assert_clean().await;
    // The same in the middle of the stream.
    pair.fail(&[Fault::HoldEnd], &[Fault::HoldEnd]);
    let mut response = pair.gateway.open("/v1/completions", &[], &stream_body(1).to_string()).await;
    response.body_mut().frame().await.unwrap().unwrap();
    drop(response);
    until("both are let go", async || {
        (pair.prefills[0].n_cancelled(), pair.decodes[0].n_cancelled()) == (2, 2)
    })
    .await;
    pair.assert_clean().await;
}

#[tokio::test]
async fn without_an_engine_for_prompts_no_request_is_taken() {
    let mut pair = sglang(1, 1).await;
    drop(pair.prefills.pop());
    let answer = pair.gateway.complete(&json!({"model": "m", "prompt": long_prompt(1)}).to_string()).await;
    answer.assert_error(503, None);
    until("the gateway has seen that it is gone", async || {
        let workers = pair.gateway.gateway().workers();
        workers.iter().any(|worker| !worker.is_usable)
    })
    .await;
    let n_seen = pair.decodes[0].n_seen();
    pair.gateway.complete(&body(1).to_string()).await.assert_error(503, None);
    assert_eq!(pair.decodes[0].n_seen(), n_seen);
    pair.assert_clean().await;
}
