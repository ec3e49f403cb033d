//! Running requests that the coordinator spreads over its workers.

use std::thread;

use serde_json::{Value, json};

use crate::cluster::{Cluster, Role, Settings};
use crate::http::Answer;
use crate::process::eventually;
use crate::streams::{by_output, normalized, open, undisturbed};

const REBALANCING: &[&str] =
    &["rebalance.enabled=true", "rebalance.max_moves_per_s=20", "rebalance.min_stay_s=600"];

/// The gateway itself spreads nothing that has a name.
const NAMED_STAY: &[&str] = &["routing.named_floor_tokens=1000000"];

/// Streams, half of them with random choices, that run long enough to be moved.
fn requests() -> Vec<(&'static str, Value)> {
    let request = |number: u64| {
        let temperature = if number.is_multiple_of(2) { 0.0 } else { 0.9 };
        let body = json!({
            "model": "kvik-tiny", "prompt": format!("Story {number}: once upon a time there was a"), "max_tokens": 300,
            "temperature": temperature, "seed": number, "ignore_eos": true, "stream": true,
            "stream_options": {"include_usage": true},
        });
        ("/v1/completions", body)
    };
    (0..6).map(request).collect()
}

#[test]
fn requests_of_a_full_worker_are_spread_and_their_texts_stay_the_same() {
    let cluster = Cluster::start(Settings { coordinator: REBALANCING, gateway: NAMED_STAY });
    let Cluster { coordinator, workers, gateway } = &cluster;
    // Before anything runs: the coordinator says where a sequence would go beside the loads of now.
    let sequence = cluster.sequence_of("worker-1");
    let requests = requests();
    let expected = undisturbed(gateway, &requests, None);
    let moves = || coordinator.metric("kvik_coordinator_rebalanced_total", "moved").unwrap_or(0.0);
    assert!(moves() < 0.5, "one request alone is no reason to move it");

    let answers: Vec<_> = thread::scope(|scope| {
        let open = |(number, request): (usize, &(&str, Value))| {
            open(gateway, request, Some(&sequence), &format!("spread-{number}"))
        };
        let streams: Vec<Answer> = requests.iter().enumerate().map(open).collect();
        assert!(streams.iter().all(|stream| stream.worker() == "worker-1"));
        let read = |mut stream: Answer| scope.spawn(move || by_output(normalized(stream.events().unwrap())));
        let reading: Vec<_> = streams.into_iter().map(read).collect();
        reading.into_iter().map(|reading| reading.join().unwrap()).collect()
    });

    assert_eq!(answers, expected);
    // Streams that end elsewhere make room for more; the last one is never above its worker's share.
    let n_moves = moves();
    assert!((1.0..=5.0).contains(&n_moves), "{n_moves} moves");
    let resumed = |worker: &Role| worker.metric("kvik_worker_resumed_total", "").unwrap_or(0.0);
    assert_eq!((resumed(&workers[0]), resumed(&workers[1])), (0.0, n_moves), "none goes back");
    let continued = |outcome: &str| gateway.metric("kvik_gateway_continued_total", outcome).unwrap_or(0.0);
    assert_eq!((continued("moved"), continued("replayed"), continued("failed")), (n_moves, 0.0, 0.0));
    eventually("no load is counted", || {
        let outstanding = gateway.metric("kvik_gateway_outstanding_requests", "").unwrap_or(0.0);
        (outstanding < 0.5).then_some(())
    });
}
