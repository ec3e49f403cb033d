//! Sequences that clients step, whose worker ends or dies between two steps.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{Client, Cluster, Settings, start_gateway};
use crate::http;
use crate::process::eventually;

/// Tokens of each step; they do not divide a block.
const STEPS: [u64; 6] = [1, 5, 30, 2, 17, 9];

/// Posts and expects `status`.
#[track_caller]
fn post(client: &Client, path: &str, body: &Value, status: u16) -> Value {
    let mut answer = http::send(&client.address, "POST", path, Some(body)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, status, "{path}: {text}");
    serde_json::from_str(&text).unwrap()
}

/// Begins a sequence with random choices, whose KV is its own.
#[track_caller]
fn init(client: &Client, seq_id: &str) -> Value {
    let prompt = "Once upon a time there was a little girl who had a red ball and a blue ball. ".repeat(3);
    let sampling = json!({"temperature": 0.9, "seed": 5, "max_tokens": 500, "ignore_eos": true, "repetition_penalty": 1.1});
    let body = json!({"seq_id": seq_id, "prompt": prompt, "cache_salt": seq_id, "sampling": sampling});
    post(client, "/inference/init", &body, 200)
}

#[track_caller]
fn step(client: &Client, seq_id: &str, n: u64) -> Value {
    let mut answer = post(client, "/inference/step", &json!({"seq_id": seq_id, "n": n}), 200);
    answer["seq_id"].take();
    answer
}

/// All steps of a sequence, with `disturb` behind the second one.
#[track_caller]
fn steps(client: &Client, seq_id: &str, disturb: impl FnOnce()) -> Vec<Value> {
    let mut first = init(client, seq_id);
    first["seq_id"].take();
    let mut answers = vec![first];
    let mut disturb = Some(disturb);
    for (number, n) in STEPS.into_iter().enumerate() {
        if number == 2
            && let Some(disturb) = disturb.take()
        {
            disturb();
        }
        answers.push(step(client, seq_id, n));
    }
    answers
}

/// What the steps of a sequence give that nothing disturbs.
#[track_caller]
fn undisturbed(client: &Client) -> Vec<Value> {
    let answers = steps(client, "undisturbed", || {});
    post(client, "/inference/finish", &json!({"seq_id": "undisturbed", "forget": true}), 200);
    answers
}

fn continued(gateway: &Client, outcome: &str) -> f64 {
    gateway.metric("kvik_gateway_continued_total", outcome).unwrap_or(0.0)
}

#[test]
fn a_worker_that_ends_gives_the_sequences_that_clients_step_away_with_their_kv() {
    let mut cluster = Cluster::start(Settings::default());
    let name = cluster.sequence_of("worker-1");
    let gateway = cluster.gateway.client.clone();
    let expected = undisturbed(&gateway);
    let leaving = &mut cluster.workers[0];
    let started = Instant::now();
    let answers = steps(&gateway, &name, || {
        leaving.process.signal("TERM");
        assert_eq!(leaving.process.ended().code(), Some(0));
    });
    assert_eq!(answers, expected);
    // It waited for no step.
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    assert!((continued(&gateway, "moved") - 1.0).abs() < 0.1 && continued(&gateway, "replayed") < 0.5);
    let ahead = cluster.workers[1].metric("kvik_worker_resumed_total", "ahead");
    assert!((ahead.unwrap_or(0.0) - 1.0).abs() < 0.1, "{ahead:?}");
    let finished = post(&gateway, "/inference/finish", &json!({"seq_id": name, "forget": true}), 200);
    assert_eq!(finished["resident_tokens"], 0);
    eventually("nothing runs", || {
        let stats = http::get_json(&cluster.workers[1].address, "/kv/stats")?;
        (stats["running_sequences"] == 0 && stats["waiting_sequences"] == 0).then_some(())
    });
}

#[test]
fn sequences_of_a_killed_worker_go_on_elsewhere_from_the_tokens_that_the_gateway_knows() {
    let mut cluster = Cluster::start(Settings::default());
    let name = cluster.sequence_of("worker-1");
    let gateway = cluster.gateway.client.clone();
    let expected = undisturbed(&gateway);
    let dying = &mut cluster.workers[0];
    let answers = steps(&gateway, &name, || dying.process.kill());
    assert_eq!(answers, expected);
    assert!((continued(&gateway, "replayed") - 1.0).abs() < 0.1);
    // A step that was made is answered again, wherever it was made.
    let mut again = post(&gateway, "/inference/step", &json!({"seq_id": name, "n": 5, "step_index": 2}), 200);
    again["seq_id"].take();
    assert_eq!(again, expected[2]);
    let ahead = json!({"seq_id": name, "step_index": 1000});
    let refused = post(&gateway, "/inference/step", &ahead, 409);
    assert!(refused["error"]["message"].as_str().unwrap().contains("allowed: 0 to"), "{refused}");
}

#[test]
fn a_gateway_that_did_not_begin_a_sequence_finds_it_and_tells_its_end_in_one_error() {
    let mut cluster = Cluster::start(Settings::default());
    let name = cluster.sequence_of("worker-1");
    let other = start_gateway("127.0.0.1:0", &[&cluster.coordinator.address], &[]);
    other.wait_for_backends(2);
    init(&cluster.gateway, &name);
    assert_eq!(step(&other, &name, 3)["step_index"], 1);
    // The one that began it asks for what it has not seen.
    assert_eq!(step(&cluster.gateway, &name, 4)["step_index"], 1);

    cluster.workers[0].process.kill();

    let refused = post(&other, "/inference/step", &json!({"seq_id": name}), 404);
    assert!(refused["error"]["message"].as_str().unwrap().contains("is not known here"), "{refused}");
    let finished = post(&cluster.gateway, "/inference/finish", &json!({"seq_id": name}), 200);
    assert_eq!(finished["resident_tokens"], 0);
}
