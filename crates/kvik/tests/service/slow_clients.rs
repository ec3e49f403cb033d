//! A client that asks for much and reads nothing.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::cluster::{Role, start, start_coordinator, start_gateway};
use crate::http;
use crate::process::eventually;

const N_CHOICES: u64 = 8;
const N_TOKENS: u64 = 3500;
/// The worker's pool for keys and values is touched as it fills: 16 384 tokens of four kilobytes.
const KV_BYTES: u64 = 64 << 20;
/// Below a third of the answer, of which every token takes more than a kilobyte of log
/// probabilities, and above what a process varies by.
const MAX_GROWTH_BYTES: u64 = 12 << 20;
/// Time without a new token that shows that the engine waits.
const STANDSTILL: Duration = Duration::from_secs(2);
/// Time between two looks at the engine, so that the looks do not slow it down.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Time in which a busy machine fills the buffers between three processes, some megabytes.
const FILLING: Duration = Duration::from_mins(3);

fn n_generated(worker: &Role) -> f64 {
    worker.metric("vllm:generation_tokens_total", "").unwrap()
}

#[test]
fn a_client_that_does_not_read_costs_no_memory_and_blocks_no_other() {
    let coordinator = start_coordinator("127.0.0.1:0", &[]);
    let base = format!("http://{}", coordinator.address);
    let worker = start(
        "worker",
        "127.0.0.1:0",
        &["--id", "worker-1", "--threads", "1", "--coordinator", &base],
        &["kv_dtype=bf16", "kv_blocks=1024"],
    );
    let gateway = start_gateway("127.0.0.1:0", &[&coordinator.address], &[]);
    gateway.wait_for_backends(1);
    gateway.served_by("warm up");
    let before = [&worker, &gateway].map(|role| role.process.resident_bytes());

    let body = json!({
        "model": "kvik-tiny", "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": N_TOKENS, "n": N_CHOICES, "temperature": 0,
        "logprobs": true, "top_logprobs": 20, "ignore_eos": true, "stream": true,
    });
    let slow = http::open(&gateway.address, "POST", "/v1/chat/completions", &[], Some(&body)).unwrap();

    // The engine stands still because the client does not read.
    let start = Instant::now();
    let (mut seen, mut since) = (0.0, start);
    while since.elapsed() < STANDSTILL {
        assert!(start.elapsed() < FILLING, "{seen} tokens are not enough to fill the buffers");
        let generated = n_generated(&worker);
        if seen < generated || generated < N_CHOICES as f64 {
            (seen, since) = (generated, Instant::now());
        }
        thread::park_timeout(LOOK_INTERVAL);
    }
    assert!(seen < (N_CHOICES * N_TOKENS) as f64, "the whole answer fits in buffers");
    let held = gateway.metric("kvik_gateway_outstanding_requests", "").unwrap();
    assert!((held - 1.0).abs() < 0.5, "{held}");
    assert_eq!(gateway.served_by("reader"), "worker-1");
    let allowed = [KV_BYTES + MAX_GROWTH_BYTES, MAX_GROWTH_BYTES];
    for ((role, before), allowed) in [&worker, &gateway].into_iter().zip(before).zip(allowed) {
        let growth = role.process.resident_bytes().saturating_sub(before);
        assert!(growth < allowed, "{} grew by {growth} bytes after {seen} tokens", role.address);
    }

    drop(slow);
    eventually("the worker is free", || {
        (worker.metric("vllm:num_requests_running", "")? < 0.5).then_some(())
    });
    eventually("the gateway has nothing outstanding", || {
        (gateway.metric("kvik_gateway_outstanding_requests", "")? < 0.5).then_some(())
    });
}
