//! Clients that go away, and a gateway that goes away from its clients.

use std::thread;

use crate::cluster::{Cluster, Ending, Settings};
use crate::process::eventually;

#[test]
fn a_thousand_clients_that_disconnect_leave_no_load_behind() {
    let cluster = Cluster::start(Settings::default());
    let gateway = &cluster.gateway.client;
    thread::scope(|scope| {
        for client in 0..4 {
            scope.spawn(move || {
                for number in 0..250 {
                    drop(gateway.open_stream(&format!("client-{client}-{number}"), 1000));
                }
            });
        }
    });
    for name in ["kvik_gateway_outstanding_requests", "kvik_gateway_outstanding_tokens"] {
        eventually("the gateway has nothing outstanding", || (gateway.metric(name, "")? < 0.5).then_some(()));
    }
    for worker in &cluster.workers {
        for name in
            ["vllm:num_requests_running", "vllm:num_requests_waiting", "kvik_worker_outstanding_tokens"]
        {
            eventually("the worker has stopped", || (worker.metric(name, "")? < 0.5).then_some(()));
        }
    }
    let n_ended = gateway.metric("kvik_gateway_requests_total", "/v1/completions").unwrap();
    assert!(1000.0 <= n_ended, "{n_ended}");
    assert_eq!(cluster.gateway.usable_backends(), 2);
    // No worker was counted as failed because of its clients.
    let breakers = cluster.gateway.metric("kvik_gateway_breaker_state", "").unwrap_or(0.0);
    assert!(breakers < 0.5, "{breakers}");
}

#[test]
fn a_gateway_that_drains_finishes_its_streams() {
    let mut cluster = Cluster::start(Settings::default());
    let mut stream = cluster.gateway.open_stream("stream", 200);
    cluster.gateway.process.signal("TERM");
    let ending = Ending::of(&mut stream);
    assert!(ending.is_complete(), "{ending:?}");
    assert_eq!(cluster.gateway.process.ended().code(), Some(0));
}
