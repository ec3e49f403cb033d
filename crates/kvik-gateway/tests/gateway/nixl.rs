//! vLLM with `NixlConnector`: prompt first, then the answer with what the first engine said.

use std::sync::Arc;
use std::time::Instant;

use http_body_util::BodyExt as _;
use kvik_gateway::{BackendConfig, GatewayConfig, PdProtocol, Role};
use serde_json::{Value, json};

use crate::engine::{Engine, Fabric, Fault, Kind, text_after};
use crate::support::{TestGateway, Whole, until};

/// Engines for prompts and for answers behind a gateway.
pub(crate) struct Pair {
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) prefills: Vec<Engine>,
    pub(crate) decodes: Vec<Engine>,
    pub(crate) gateway: TestGateway,
}

impl Pair {
    /// So many of both, with one protocol.
    pub(crate) async fn start(
        (prefill, decode): (Kind, Kind),
        protocol: PdProtocol,
        (n_prefills, n_decodes): (usize, usize),
        change: impl FnOnce(&mut GatewayConfig),
    ) -> Self {
        let fabric = Arc::new(Fabric::default());
        let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
        let mut config = GatewayConfig::default();
        config.health.interval_ms = 100;
        config.breaker.consecutive_failures = 100;
        config.breaker.min_requests = 100;
        let mut add = |engine: &Engine, role| {
            config.backends.push(BackendConfig {
                url: engine.url(),
                role,
                pd: Some(protocol),
                ..BackendConfig::default()
            });
        };
        for _ in 0..n_prefills {
            prefills.push(Engine::start(prefill, &fabric).await);
            add(&prefills[prefills.len() - 1], Role::Prefill);
        }
        for _ in 0..n_decodes {
            decodes.push(Engine::start(decode, &fabric).await);
            add(&decodes[decodes.len() - 1], Role::Decode);
        }
        change(&mut config);
        let n_backends = config.backends.len();
        let gateway = TestGateway::start(config).await;
        gateway.wait_until_usable(n_backends).await;
        Self { fabric, prefills, decodes, gateway }
    }

    pub(crate) async fn nixl(n_prefills: usize, n_decodes: usize) -> Self {
        Self::start((Kind::Nixl, Kind::Nixl), PdProtocol::NixlPull, (n_prefills, n_decodes), |_| {}).await
    }

    /// Requests that the engines for prompts and those for answers have seen.
    pub(crate) fn n_seen(&self) -> (usize, usize) {
        let count = |engines: &[Engine]| engines.iter().map(Engine::n_seen).sum();
        (count(&self.prefills), count(&self.decodes))
    }

    /// All faults of engines for prompts, and those of engines for answers.
    pub(crate) fn fail(&self, prefill: &[Fault], decode: &[Fault]) {
        // Which one comes first is the ring's choice.
        for (engines, faults) in [(&self.prefills, prefill), (&self.decodes, decode)] {
            for engine in engines {
                engine.fail(faults);
            }
        }
    }

    /// Checks that nothing is left behind and that no wrong KV was used.
    pub(crate) async fn assert_clean(&self) {
        until("all load is back", async || self.gateway.outstanding_tokens() == 0).await;
        assert_eq!(*self.fabric.wrongs.lock(), Vec::<String>::new());
    }

    /// The text of a completion, which must be that of an engine alone.
    pub(crate) async fn assert_completes(&self, body: &Value) -> Whole {
        let answer = self.gateway.complete(&body.to_string()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let expected = text_after(&body["prompt"].to_string());
        if body["stream"] == true {
            assert_eq!(streamed_text(&answer.body), expected, "{answer:?}");
        } else {
            assert_eq!(answer.json()["choices"][0]["text"], expected, "{answer:?}");
        }
        self.assert_clean().await;
        answer
    }
}

/// The text of a stream of chunks that is complete.
pub(crate) fn streamed_text(body: &[u8]) -> String {
    let text = std::str::from_utf8(body).unwrap();
    let events: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(events.last(), Some(&"[DONE]"), "{text}");
    let chunks = events[..events.len() - 1].iter().map(|event| {
        let chunk: Value = serde_json::from_str(event).unwrap();
        chunk["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {event}")).to_owned()
    });
    chunks.collect()
}

/// A prompt of some thousand tokens; no two are the same.
pub(crate) fn long_prompt(number: u32) -> String {
    format!("{number} ").repeat(4000)
}

pub(crate) fn body(number: u32) -> Value {
    json!({"model": "m", "prompt": long_prompt(number), "max_tokens": 8})
}

pub(crate) fn stream_body(number: u32) -> Value {
    let options = json!({"include_usage": true});
    json!({"model": "m", "prompt": long_prompt(number), "max_tokens": 8, "stream": true, "stream_options": options})
}

#[tokio::test]
async fn a_long_prompt_is_computed_by_one_engine_and_answered_by_the_other() {
    let pair = Pair::nixl(1, 1).await;
    let mut sent = body(1);
    sent["min_tokens"] = json!(5);
    sent["temperature"] = json!(0.25);
    let answer = pair.assert_completes(&sent).await;
    assert_eq!(answer.worker(), pair.decodes[0].url());
    assert_eq!(pair.n_seen(), (1, 1));
    let asked = pair.prefills[0].body(0);
    assert_eq!((&asked["max_tokens"], &asked["stream"]), (&json!(1), &json!(false)));
    assert!(
        asked.get("min_tokens").is_none()
            && asked["temperature"] == 0.25
            && asked["prompt"] == sent["prompt"]
    );
    let mut asked = pair.decodes[0].body(0);
    assert!(asked.as_object_mut().unwrap().remove("kv_transfer_params").is_some());
    assert_eq!(asked, sent);
    pair.assert_completes(&stream_body(2)).await;
    assert_eq!(pair.n_seen(), (2, 2));
    let metrics = pair.gateway.get("/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    for line in [
        "kvik_gateway_disaggregation_total{protocol=\"nixl_pull\",outcome=\"disaggregated\"}",
        "kvik_gateway_prefill_seconds_count{protocol=\"nixl_pull\"}",
        "kvik_gateway_hand_over_seconds_count{protocol=\"nixl_pull\"}",
    ] {
        assert!(metrics.contains(line), "{line}");
    }
}

#[tokio::test]
async fn conversations_and_generate_are_parted_too() {
    let pair = Pair::nixl(1, 1).await;
    let messages = json!([{"role": "user", "content": long_prompt(3)}]);
    let chat = json!({"model": "m", "messages": messages, "max_completion_tokens": 9});
    let answer = pair.gateway.post("/v1/chat/completions", &[], &chat.to_string()).await;
    assert_eq!(answer.json()["choices"][0]["message"]["content"], text_after(&messages.to_string()));
    assert_eq!(pair.n_seen(), (1, 1));
    assert!(pair.prefills[0].body(0).get("max_completion_tokens").is_none());
    let generate = json!({"model": "m", "prompt": long_prompt(4), "sampling": {"max_tokens": 9}});
    let answer = pair.gateway.post("/generate", &[], &generate.to_string()).await;
    assert!(answer.body.ends_with(b"data: [DONE]\n\n"), "{answer:?}");
    assert_eq!(pair.n_seen(), (2, 2));
    pair.assert_clean().await;
}

#[tokio::test]
async fn what_does_not_pay_or_cannot_be_parted_stays_on_one_engine() {
    let pair = Pair::nixl(1, 1).await;
    let with = |field: &str, value: Value| {
        let mut body = body(5);
        body[field] = value;
        body
    };
    let bodies = [
        with("prompt", json!("short")),
        with("n", json!(2)),
        with("echo", json!(true)),
        with("prompt_logprobs", json!(1)),
        with("max_tokens", json!(1)),
        with("best_of", json!(2)),
        with("prompt", json!([long_prompt(1), long_prompt(2)])),
    ];
    for (number, body) in bodies.iter().enumerate() {
        let answer = pair.gateway.complete(&body.to_string()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(pair.n_seen(), (0, number + 1), "{number}");
        assert_eq!(pair.decodes[0].body(number), *body);
    }
    pair.assert_clean().await;
}

#[tokio::test]
async fn parts_can_be_switched_off() {
    let kinds = (Kind::Nixl, Kind::Nixl);
    let pair =
        Pair::start(kinds, PdProtocol::NixlPull, (1, 1), |config| config.disaggregation.enabled = false)
            .await;
    pair.assert_completes(&body(1)).await;
    assert_eq!(pair.n_seen(), (0, 1));
}

#[tokio::test]
async fn an_engine_for_prompts_that_fails_is_replaced_once_and_then_done_without() {
    for fault in [Fault::Die, Fault::Refuse(500), Fault::Refuse(503), Fault::Refuse(429), Fault::Refuse(404)]
    {
        let pair = Pair::nixl(3, 1).await;
        // The first of them fails.
        let first = {
            pair.assert_completes(&body(1)).await;
            pair.prefills.iter().position(|engine| engine.n_seen() == 1).unwrap()
        };
        pair.prefills[first].fail(&[fault]);
        pair.assert_completes(&body(1)).await;
        assert_eq!(pair.n_seen(), (3, 2), "{fault:?}");
        assert!(pair.decodes[0].body(1).get("kv_transfer_params").is_some());
        // All of them do: two are asked, no more.
        pair.fail(&[fault], &[]);
        pair.assert_completes(&stream_body(1)).await;
        assert_eq!(pair.n_seen(), (5, 3), "{fault:?}");
        assert_eq!(pair.decodes[0].body(2), stream_body(1));
    }
}

#[tokio::test]
async fn an_engine_for_prompts_that_is_gone_or_silent_costs_time_only() {
    let kinds = (Kind::Nixl, Kind::Nixl);
    let mut pair = Pair::start(kinds, PdProtocol::NixlPull, (1, 1), |config| {
        config.disaggregation.prefill_timeout_ms = 100;
    })
    .await;
    pair.fail(&[Fault::Hang], &[]);
    pair.assert_completes(&stream_body(1)).await;
    until("the silent engine is let go", async || pair.prefills[0].n_cancelled() == 1).await;
    assert_eq!(pair.n_seen(), (1, 1));
    drop(pair.prefills.pop());
    pair.assert_completes(&stream_body(2)).await;
    assert_eq!(pair.decodes[0].body(1), stream_body(2));
}

#[tokio::test]
async fn a_request_that_the_first_engine_finds_wrong_is_refused_by_it() {
    let pair = Pair::nixl(1, 1).await;
    pair.fail(&[Fault::Refuse(422)], &[]);
    let answer = pair.gateway.complete(&body(1).to_string()).await;
    assert_eq!((answer.status.as_u16(), answer.worker()), (422, pair.prefills[0].url()));
    assert_eq!(pair.n_seen(), (1, 0));
    pair.assert_clean().await;
}

#[tokio::test]
async fn an_engine_that_hands_nothing_over_is_done_without() {
    let pair = Pair::nixl(1, 1).await;
    pair.fail(&[Fault::HandOverNothing], &[]);
    pair.assert_completes(&body(1)).await;
    assert_eq!(pair.n_seen(), (1, 1));
    assert_eq!(pair.decodes[0].body(0), body(1));
}

#[tokio::test]
async fn kv_that_no_engine_has_seen_is_offered_to_another_one() {
    for is_gone in [false, true] {
        let mut pair = Pair::nixl(1, 2).await;
        let first = pair.assert_completes(&body(1)).await.worker();
        let first = pair.decodes.iter().position(|engine| engine.url() == first).unwrap();
        if is_gone {
            drop(pair.decodes.remove(first));
        } else {
            pair.decodes[first].fail(&[Fault::Refuse(503)]);
        }
        pair.assert_completes(&body(1)).await;
        assert_eq!(pair.prefills[0].n_seen(), 2, "the prompt is computed once for both");
        let other = if is_gone { &pair.decodes[0] } else { &pair.decodes[1 - first] };
        assert!(other.body(0).get("kv_transfer_params").is_some());
    }
}

#[tokio::test]
async fn kv_that_an_engine_may_have_read_is_computed_again() {
    for (fault, body) in
        [(Fault::Die, body(1)), (Fault::Refuse(502), body(1)), (Fault::DieAfterHead, stream_body(1))]
    {
        let pair = Pair::nixl(1, 2).await;
        let first = pair.assert_completes(&body).await.worker();
        let first = pair.decodes.iter().position(|engine| engine.url() == first).unwrap();
        pair.decodes[first].fail(&[fault]);
        pair.assert_completes(&body).await;
        assert_eq!(pair.prefills[0].n_seen(), 3, "{fault:?}");
        assert!(pair.decodes[1 - first].body(0).get("kv_transfer_params").is_some());
    }
}

#[tokio::test]
async fn kv_is_not_offered_when_its_lease_may_be_over() {
    let kinds = (Kind::Nixl, Kind::Nixl);
    let pair =
        Pair::start(kinds, PdProtocol::NixlPull, (1, 2), |config| config.disaggregation.lease_ms = 1).await;
    let first = pair.assert_completes(&body(1)).await.worker();
    let first = pair.decodes.iter().position(|engine| engine.url() == first).unwrap();
    let n_before = pair.decodes[first].n_seen();
    pair.decodes[first].fail(&[Fault::RefuseLater(503)]);
    let sent = body(1);
    let (_, ()) = tokio::join!(pair.assert_completes(&sent), async {
        until("the first one has it", async || pair.decodes[first].n_seen() == n_before + 1).await;
        let start = Instant::now();
        until("some time has passed", async || 5 < start.elapsed().as_millis()).await;
        pair.decodes[first].state.go_on.notify_one();
    });
    assert_eq!(pair.decodes[1 - first].body(0), body(1));
}

#[tokio::test]
async fn an_engine_that_cannot_load_kv_computes_the_prompt_itself() {
    for body in [body(1), stream_body(1)] {
        let pair = Pair::nixl(1, 1).await;
        pair.fail(&[], &[Fault::FailToLoad]);
        pair.assert_completes(&body).await;
        assert_eq!(pair.n_seen(), (1, 2));
        assert_eq!(pair.decodes[0].body(1), body);
    }
}

#[tokio::test]
async fn without_a_budget_for_retries_an_error_is_passed_on_whole() {
    let kinds = (Kind::Nixl, Kind::Nixl);
    let pair = Pair::start(kinds, PdProtocol::NixlPull, (1, 1), |config| {
        config.retry.budget_burst = 0;
        config.retry.budget_ratio = 0.0;
    })
    .await;
    pair.fail(&[], &[Fault::FailToLoad; 2]);
    let answer = pair.gateway.complete(&body(1).to_string()).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["message"]), (500, &json!("told to fail")));
    let answer = pair.gateway.complete(&stream_body(1).to_string()).await;
    assert_eq!(&answer.body[..], b"data: {\"error\":{\"message\":\"told to fail\"}}\n\n");
    assert_eq!(pair.n_seen(), (2, 2));
    pair.assert_clean().await;
}

#[tokio::test]
async fn engines_for_both_parts_help_each_other_only_when_one_is_busy() {
    let kinds = (Kind::Nixl, Kind::Nixl);
    let pair = Pair::start(kinds, PdProtocol::NixlPull, (1, 1), |config| {
        for backend in &mut config.backends {
            backend.role = Role::Both;
        }
    })
    .await;
    pair.assert_completes(&body(1)).await;
    let (left, right) = pair.n_seen();
    assert_eq!(left + right, 1, "an idle engine does it alone");
    let explained = pair.gateway.post("/route/explain", &[], &body(1).to_string()).await.json();
    assert_eq!(explained["disaggregation"]["decision"], "decode_idle");
    // A stream of the same key keeps its engine busy.
    let (busy, idle) =
        if left == 1 { (&pair.prefills[0], &pair.decodes[0]) } else { (&pair.decodes[0], &pair.prefills[0]) };
    busy.fail(&[Fault::HoldEnd]);
    let short = json!({"model": "m", "prompt": "short", "max_tokens": 2000, "stream": true, "user": "a"});
    let mut n_streams = Vec::new();
    while busy.n_seen() < 2 {
        // Users differ until one is the busy engine's.
        let mut short = short.clone();
        short["user"] = json!(n_streams.len().to_string());
        n_streams.push(pair.gateway.open("/v1/completions", &[], &short.to_string()).await);
    }
    let n_before = (busy.n_seen(), idle.n_seen());
    let answer = pair.gateway.complete(&body(1).to_string()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let n_more = (busy.n_seen() - n_before.0, idle.n_seen() - n_before.1);
    let expected = if answer.worker() == busy.url() { (1, 1) } else { (0, 1) };
    assert_eq!(n_more, expected, "answered by {}", answer.worker());
    drop(n_streams);
    pair.assert_clean().await;
}

#[tokio::test]
async fn a_stream_that_breaks_later_ends_with_an_error() {
    let pair = Pair::nixl(1, 1).await;
    pair.fail(&[], &[Fault::DieInStream]);
    let answer = pair.gateway.complete(&stream_body(1).to_string()).await;
    assert!(answer.body.ends_with(b"\n\n") && !answer.body.ends_with(b"[DONE]\n\n"));
    assert!(String::from_utf8_lossy(&answer.body).contains("the worker broke off"), "{answer:?}");
    assert_eq!(pair.n_seen(), (1, 1));
    pair.assert_clean().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_the_leg_that_runs() {
    let pair = Pair::nixl(1, 1).await;
    pair.fail(&[Fault::Hang], &[]);
    let sent = body(1).to_string();
    tokio::select! {
        _ = pair.gateway.complete(&sent) => unreachable!("the engine does not answer"),
        () = until("the engine has the prompt", async || pair.n_seen() == (1, 0)) => {}
    }
    until("it is let go", async || pair.prefills[0].n_cancelled() == 1).await;
    pair.assert_clean().await;
    pair.fail(&[], &[Fault::HoldEnd]);
    let mut response = pair.gateway.open("/v1/completions", &[], &stream_body(1).to_string()).await;
    response.body_mut().frame().await.unwrap().unwrap();
    drop(response);
    until("the other one is let go", async || pair.decodes[0].n_cancelled() == 1).await;
    assert_eq!(pair.n_seen(), (2, 1));
    pair.assert_clean().await;
}

#[tokio::test]
async fn the_deadline_counts_for_both_legs() {
    let pair = Pair::nixl(2, 1).await;
    pair.fail(&[Fault::Hang], &[Fault::Hang]);
    let headers = [("x-request-timeout-ms", "100")];
    let answer = pair.gateway.post("/v1/completions", &headers, &body(1).to_string()).await;
    answer.assert_error(504, None);
    assert_eq!(pair.n_seen(), (1, 0));
    pair.fail(&[], &[Fault::Hang]);
    let answer = pair.gateway.post("/v1/completions", &headers, &body(1).to_string()).await;
    answer.assert_error(504, None);
    pair.assert_clean().await;
}

#[tokio::test]
async fn a_client_may_not_say_itself_where_kv_is() {
    let own =
        json!({"remote_kv_source": {"kv_request_id": "x", "remote_host": "10.0.0.1", "remote_port": 1}});
    let mut body = body(1);
    body["kv_transfer_params"] = own;
    let pair = Pair::nixl(1, 1).await;
    let error = pair.gateway.complete(&body.to_string()).await.assert_error(400, None);
    assert_eq!(error["param"], "kv_transfer_params");
    assert_eq!(pair.n_seen(), (0, 0));
    pair.assert_clean().await;
    let pair = Pair::start((Kind::P2p, Kind::P2p), PdProtocol::P2p, (1, 1), |config| {
        config.disaggregation.allow_client_params = true;
    })
    .await;
    assert_eq!(pair.gateway.complete(&body.to_string()).await.status, 200);
    assert_eq!((pair.n_seen(), pair.decodes[0].body(0)), ((0, 1), body));
}

#[tokio::test]
async fn an_engine_for_prompts_answers_only_when_no_other_can() {
    let mut pair = Pair::nixl(1, 1).await;
    let short = json!({"model": "m", "prompt": "short", "max_tokens": 2});
    pair.assert_completes(&short).await;
    assert_eq!(pair.n_seen(), (0, 1));
    drop(pair.decodes.pop());
    let answer = pair.assert_completes(&short).await;
    assert_eq!(answer.worker(), pair.prefills[0].url());
}

#[tokio::test]
async fn a_route_is_explained_with_its_figures() {
    let pair = Pair::nixl(1, 1).await;
    let explain = async |body: &Value| {
        let answer = pair.gateway.post("/route/explain", &[], &body.to_string()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    };
    let explained = explain(&body(1)).await;
    assert_eq!(explained["worker"], pair.decodes[0].url());
    assert_eq!(explained["candidates"].as_array().unwrap().len(), 2);
    let parts = &explained["disaggregation"];
    assert_eq!((&parts["protocol"], &parts["decision"]), (&json!("nixl_pull"), &json!("disaggregate")));
    assert_eq!(parts["partner"], pair.prefills[0].url());
    assert_eq!((&parts["threshold_tokens"], &parts["prefill_queue_tokens"]), (&json!(512), &json!(0)));
    let short = json!({"model": "m", "prompt": "short"});
    assert_eq!(explain(&short).await["disaggregation"]["decision"], "short");
    let mut several = body(1);
    several["n"] = json!(2);
    let explained = explain(&several).await;
    assert_eq!(explained["disaggregation"]["decision"], "unsuited");
    assert_eq!(explained["disaggregation"]["obstacle"], "n");
    assert_eq!(pair.n_seen(), (0, 0));
    assert_eq!(pair.gateway.outstanding_tokens(), 0);
}
