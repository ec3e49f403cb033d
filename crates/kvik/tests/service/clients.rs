//! Clients that go away, and a gateway that goes away from its clients.

use crate::cluster::{Cluster, Ending, Settings};
use crate::process::eventually;

#[test]
fn two_hundred_clients_that_disconnect_leave_no_load_behind() {
    let cluster = Cluster::start(Settings::default());
    for number in 0..200 {
        drop(cluster.gateway.open_stream(&format!("client-{number}"), 1000));
    }
    eventually("the gateway has nothing outstanding", || {
        (cluster.gateway.metric("kvik_gateway_outstanding_requests", "")? < 0.5).then_some(())
    });
    for worker in &cluster.workers {
        eventually("the worker has stopped", || {
            (worker.metric("vllm:num_requests_running", "")? < 0.5).then_some(())
        });
    }
    assert_eq!(cluster.gateway.usable_backends(), 2);
    // Nobody was counted as failed because of its clients.
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
