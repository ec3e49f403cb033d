//! Workers with roles: one computes prompts, another one generates.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::cluster::{Role, start, start_coordinator, start_gateway, start_worker};
use crate::http;
use crate::process::{self, Process, eventually};
use crate::streams::{by_output, normalized, open};

/// A worker for prompts, one for answers, and a gateway that parts prompts of a few dozen tokens.
struct Pair {
    coordinator: Role,
    prefill: Role,
    decode: Role,
    gateway: Role,
}

fn start_role(coordinator: &Role, id: &str, role: &str, settings: &[&str]) -> Role {
    let base = format!("http://{}", coordinator.address);
    let role = format!("role={role}");
    let mut all = vec![role.as_str()];
    all.extend(settings);
    start("worker", "127.0.0.1:0", &["--id", id, "--threads", "1", "--coordinator", &base], &all)
}

impl Pair {
    fn start(decode_settings: &[&str]) -> Self {
        let coordinator = start_coordinator("127.0.0.1:0", &[]);
        // Long prompts take several steps, so that blocks leave before the last is computed.
        let prefill = start_role(&coordinator, "prefill", "prefill", &["max_batched_tokens=64"]);
        let decode = start_role(&coordinator, "decode", "decode", decode_settings);
        let settings = ["disaggregation.min_uncached_tokens=64", "disaggregation.overhead_ms=0"];
        let gateway = start_gateway("127.0.0.1:0", &[&coordinator.address], &settings);
        gateway.wait_for_backends(2);
        Self { coordinator, prefill, decode, gateway }
    }

    fn counted(&self, name: &str, outcome: &str) -> u64 {
        self.gateway.metric(name, &format!("\"{outcome}\"")).unwrap_or(0.0) as u64
    }

    fn disaggregated(&self, outcome: &str) -> u64 {
        self.counted("kvik_gateway_disaggregation_total", outcome)
    }

    fn continued(&self, outcome: &str) -> u64 {
        self.counted("kvik_gateway_continued_total", outcome)
    }

    /// Where a request would go.
    fn explain(&self, body: &Value) -> Value {
        let mut answer = http::send(&self.gateway.address, "POST", "/route/explain", Some(body)).unwrap();
        serde_json::from_str(&answer.text().unwrap()).unwrap()
    }

    /// Waits until nothing runs anywhere and no load is counted.
    #[track_caller]
    fn wait_for_rest(&self, workers: &[&Role]) {
        eventually("all loads and places are given back", || {
            let idle = |role: &Role, name: &str| role.metric(name, "").unwrap_or(0.0) < 0.5;
            let is_idle = idle(&self.gateway, "kvik_gateway_outstanding_tokens")
                && idle(&self.gateway, "kvik_gateway_outstanding_requests")
                && workers.iter().all(|worker| {
                    idle(worker, "vllm:num_requests_running") && idle(worker, "vllm:num_requests_waiting")
                });
            is_idle.then_some(())
        });
    }
}

/// Streams with long prompts, greedy and sampled, of both APIs.
fn long_requests() -> Vec<(&'static str, Value)> {
    let story = "Once upon a time there was a little girl who had a red ball and a blue ball. ".repeat(24);
    let greedy = json!({
        "model": "kvik-tiny", "prompt": story, "max_tokens": 200, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true}, "logprobs": 2,
    });
    let chat = json!({
        "model": "kvik-tiny", "messages": [{"role": "user", "content": story}], "max_tokens": 200,
        "temperature": 1.1, "seed": 3, "ignore_eos": true, "stop": ["zebra zebra"], "stream": true,
        "return_token_ids": true, "repetition_penalty": 1.2, "stream_options": {"include_usage": true},
    });
    vec![("/v1/completions", greedy), ("/v1/chat/completions", chat)]
}

/// What one worker alone answers.
fn alone(requests: &[(&str, Value)]) -> Vec<Vec<(Value, Value)>> {
    let worker = start_worker("127.0.0.1:0", "alone", &[]);
    let events = |request: &(&str, Value)| {
        by_output(normalized(open(&worker, request, None, "salt").events().unwrap()))
    };
    requests.iter().map(events).collect()
}

#[test]
fn a_long_prompt_is_computed_by_one_worker_and_answered_by_the_other_to_the_same_tokens() {
    let pair = Pair::start(&[]);
    let requests = long_requests();
    let expected = alone(&requests);
    for (request, expected) in requests.iter().zip(&expected) {
        let mut stream = open(&pair.gateway, request, None, "salt");
        assert_eq!(stream.worker(), "prefill");
        assert_eq!(&by_output(normalized(stream.events().unwrap())), expected);
    }
    assert_eq!((pair.disaggregated("disaggregated"), pair.continued("moved")), (2, 2));
    assert_eq!(pair.decode.metric("kvik_worker_resumed_total", "ahead"), Some(2.0));
    // It counts a move when the request is over there, which may be after the answer.
    eventually("both moves are counted", || {
        (pair.prefill.metric("kvik_worker_moves_total", "moved") == Some(2.0)).then_some(())
    });

    // The worker that generates has computed no prompt: nothing was measured of its speed.
    let explained = pair.explain(&requests[0].1);
    assert_eq!(explained["disaggregation"]["decode_tokens_per_s"], 10_000.0, "{explained}");

    // In one piece as well.
    let (path, mut body) = requests[0].clone();
    body["stream"] = false.into();
    body["cache_salt"] = "whole".into();
    body.as_object_mut().unwrap().remove("stream_options");
    let ask = |address: &str| {
        let mut answer = http::send(address, "POST", path, Some(&body)).unwrap();
        let text = answer.text().unwrap();
        assert_eq!(answer.status, 200, "{text}");
        let mut value: Value = serde_json::from_str(&text).unwrap();
        (value["choices"].take(), value["usage"].take())
    };
    let worker = start_worker("127.0.0.1:0", "alone", &[]);
    assert_eq!(ask(&pair.gateway.address), ask(&worker.address));
    assert_eq!((pair.disaggregated("disaggregated"), pair.continued("moved")), (3, 3));
    pair.wait_for_rest(&[&pair.prefill, &pair.decode]);
}

#[test]
fn short_prompts_go_straight_to_the_worker_that_generates_and_the_gateway_explains_why() {
    let pair = Pair::start(&[]);
    let mut short = pair.gateway.complete("short", 4, true).unwrap();
    assert_eq!((short.status, short.worker()), (200, "decode".to_owned()));
    short.events().unwrap();
    assert_eq!(pair.disaggregated("short"), 1);

    let (_, body) = &long_requests()[0];
    let explained = pair.explain(body);
    assert_eq!(explained["worker"], "decode", "{explained}");
    let parts = &explained["disaggregation"];
    assert_eq!(
        (&parts["protocol"], &parts["decision"]),
        (&json!("kvik"), &json!("disaggregate")),
        "{explained}"
    );
    assert_eq!(parts["partner"], "prefill", "{explained}");
    let roles = |explained: &Value| -> Vec<Value> {
        explained["candidates"].as_array().unwrap().iter().map(|seat| seat["role"].clone()).collect()
    };
    assert_eq!(roles(&explained), ["decode", "prefill"]);
    // The coordinator tells of the roles.
    let members = http::get_json(&pair.coordinator.address, "/workers").unwrap();
    assert_eq!(members["members"][1]["worker"]["role"], "prefill", "{members}");
}

#[test]
fn answers_survive_the_worker_that_computes_their_prompt() {
    let mut pair = Pair::start(&[]);
    let requests = &long_requests()[..1];
    let expected = alone(requests);
    let mut stream = open(&pair.gateway, &requests[0], None, "salt");
    assert_eq!(stream.worker(), "prefill");
    pair.prefill.process.kill();
    assert_eq!(by_output(normalized(stream.events().unwrap())), expected[0]);
    // Without it the other one does all of a request.
    pair.gateway.wait_for_backends(1);
    let mut stream = open(&pair.gateway, &requests[0], None, "again");
    assert_eq!(stream.worker(), "decode");
    assert_eq!(by_output(normalized(stream.events().unwrap())), expected[0]);
    assert!(1 <= pair.disaggregated("no_prefill"));
    pair.wait_for_rest(&[&pair.decode]);
}

#[test]
fn answers_survive_the_worker_that_generates_them() {
    let mut pair = Pair::start(&[]);
    let mut requests = long_requests().split_off(1);
    // Long enough to be there when the other worker is gone.
    requests[0].1["max_tokens"] = 800.into();
    let expected = alone(&requests);
    let mut stream = open(&pair.gateway, &requests[0], None, "salt");
    assert_eq!(stream.worker(), "prefill");
    eventually("the answer goes on at the other worker", || (pair.continued("moved") == 1).then_some(()));
    pair.decode.process.kill();
    assert_eq!(by_output(normalized(stream.events().unwrap())), expected[0]);
    assert_eq!(pair.continued("replayed"), 1);
    // Without it the worker for prompts does all of a request.
    pair.gateway.wait_for_backends(1);
    let mut stream = open(&pair.gateway, &requests[0], None, "again");
    assert_eq!(stream.worker(), "prefill");
    assert_eq!(by_output(normalized(stream.events().unwrap())), expected[0]);
    pair.wait_for_rest(&[&pair.prefill]);
}

#[test]
fn an_answer_that_the_other_worker_does_not_take_stays_where_its_prompt_was_computed() {
    // KV of another type does not mix.
    let pair = Pair::start(&["kv_dtype=f16"]);
    let requests = &long_requests()[..1];
    let expected = alone(requests);
    let mut stream = open(&pair.gateway, &requests[0], None, "salt");
    assert_eq!(stream.worker(), "prefill");
    assert_eq!(by_output(normalized(stream.events().unwrap())), expected[0]);
    assert_eq!(pair.prefill.metric("kvik_worker_moves_total", "stayed"), Some(1.0));
    assert_eq!((pair.disaggregated("disaggregated"), pair.continued("moved")), (1, 0));
    pair.wait_for_rest(&[&pair.prefill, &pair.decode]);
}

#[test]
fn up_starts_workers_by_role() {
    let arguments = ["up", "--port", "0", "--roles", "prefill=1,decode=1"];
    let mut process = Process::start(process::kvik().args(arguments).stdout(Stdio::piped()));
    let mut lines = BufReader::new(process.stdout()).lines().map(Result::unwrap);
    let gateway =
        lines.find_map(|line| Some(line.trim().strip_prefix("gateway")?.trim().to_owned())).unwrap();
    let gateway = gateway.strip_prefix("http://").unwrap().to_owned();
    let body = json!({"model": "kvik-tiny", "prompt": "Once"});
    let roles = eventually("the gateway knows both workers", || {
        let mut answer = http::send(&gateway, "POST", "/route/explain", Some(&body)).ok()?;
        let explained: Value = serde_json::from_str(&answer.text().ok()?).ok()?;
        let roles = explained["candidates"].as_array()?.iter().map(|seat| seat["role"].clone());
        Some(roles.collect::<Vec<Value>>()).filter(|roles| roles.len() == 2)
    });
    assert_eq!(roles, ["prefill", "decode"]);
    process.signal("INT");
    lines.for_each(drop);
    assert_eq!(process.ended().code(), Some(0));
}
