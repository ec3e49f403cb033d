//! Workers that die, stop and leave.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::cluster::{Cluster, Ending, Settings};
use crate::process::eventually;

/// Answers end with their workers.
const ENDS_WITH_WORKER: Settings = Settings { coordinator: &[], gateway: &["retry.max_continuations=0"] };

#[test]
fn a_worker_killed_within_a_stream_ends_only_its_own_streams() {
    let mut cluster = Cluster::start(ENDS_WITH_WORKER);
    let (first, second) = (cluster.sequence_of("worker-1"), cluster.sequence_of("worker-2"));
    let mut doomed = cluster.gateway.open_stream(&first, 1000);
    let mut spared = cluster.gateway.open_stream(&second, 300);
    assert_eq!((doomed.worker(), spared.worker()), ("worker-1".to_owned(), "worker-2".to_owned()));

    cluster.workers[0].process.kill();

    let doomed = Ending::of(&mut doomed);
    let error = doomed.error.as_ref().unwrap();
    assert!(error["message"].as_str().unwrap().contains("broke off"), "{doomed:?}");
    assert_eq!(doomed.finish_reason, None);
    assert_eq!(cluster.gateway.served_by(&first), "worker-2");
    assert!(Ending::of(&mut spared).is_complete());
    assert_eq!(cluster.gateway.served_by(&second), "worker-2");
}

#[test]
fn a_stopped_worker_opens_its_breaker_and_closes_it_when_it_goes_on() {
    // Neither heartbeats nor questions for health tell the gateway: only requests do.
    let cluster = Cluster::start(Settings {
        coordinator: &["heartbeat_interval_ms=60000"],
        gateway: &["health.interval_ms=60000", "timeouts.response_header_ms=300", "breaker.open_ms=200"],
    });
    let sequence = cluster.sequence_of("worker-1");
    assert_eq!(cluster.gateway.served_by(&sequence), "worker-1");
    let breaker = || cluster.gateway.metric("kvik_gateway_breaker_state", "worker-1").unwrap_or(0.0);

    cluster.workers[0].process.signal("STOP");

    let mut n_requests = 0;
    while breaker() < 1.0 {
        let mut stream = cluster.gateway.open_stream(&sequence, 8);
        assert_eq!(stream.worker(), "worker-2");
        assert!(Ending::of(&mut stream).is_complete());
        n_requests += 1;
        assert!(n_requests <= 3, "the breaker is still closed");
    }
    // No time is lost on the stopped worker any more.
    assert_eq!(cluster.gateway.served_by(&sequence), "worker-2");

    cluster.workers[0].process.signal("CONT");

    eventually("the worker serves again", || {
        (cluster.gateway.served_by(&sequence) == "worker-1").then_some(())
    });
    eventually("the breaker is closed", || (breaker() < 0.5).then_some(()));
}

#[test]
fn a_worker_stopped_within_a_stream_ends_it_long_before_the_silence_would() {
    // With heartbeats the worker leaves before its health is missed; without, it stays a member.
    let heartbeats: [&'static [&'static str]; 2] = [&[], &["heartbeat_interval_ms=60000"]];
    for coordinator in heartbeats {
        let cluster = Cluster::start(Settings { coordinator, ..ENDS_WITH_WORKER });
        let (first, second) = (cluster.sequence_of("worker-1"), cluster.sequence_of("worker-2"));
        let mut doomed = cluster.gateway.open_stream(&first, 3000);
        let mut spared = cluster.gateway.open_stream(&second, 300);
        assert_eq!((doomed.worker(), spared.worker()), ("worker-1".to_owned(), "worker-2".to_owned()));

        cluster.workers[0].process.signal("STOP");

        // Reading gives up after a quarter of the time that a stream may be silent.
        let doomed = Ending::of(&mut doomed);
        let error = doomed.error.as_ref().unwrap();
        assert!(error["message"].as_str().unwrap().contains("fell silent"), "{doomed:?}");
        assert_eq!(doomed.finish_reason, None);
        assert!(Ending::of(&mut spared).is_complete());
        assert_eq!(cluster.gateway.served_by(&first), "worker-2");

        cluster.workers[0].process.signal("CONT");
        eventually("the worker serves again", || {
            (cluster.gateway.served_by(&first) == "worker-1").then_some(())
        });
    }
}

#[test]
fn a_stopped_worker_is_missed_and_found_again() {
    let cluster = Cluster::start(Settings::default());
    let sequence = cluster.sequence_of("worker-2");

    cluster.workers[1].process.signal("STOP");
    cluster.gateway.wait_for_backends(1);
    assert_eq!(cluster.gateway.served_by(&sequence), "worker-1");

    cluster.workers[1].process.signal("CONT");
    cluster.gateway.wait_for_backends(2);
    assert_eq!(cluster.gateway.served_by(&sequence), "worker-2");
}

#[test]
fn a_worker_that_drains_under_load_fails_no_request() {
    let mut cluster = Cluster::start(Settings::default());
    let sequence = cluster.sequence_of("worker-1");
    let is_over = AtomicBool::new(false);
    let n_served = AtomicUsize::new(0);
    let gateway = &cluster.gateway.client;
    let leaving = &mut cluster.workers[0];
    let mut long = gateway.open_stream(&sequence, 300);
    assert_eq!(long.worker(), "worker-1");

    thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|client| {
                let (is_over, n_served) = (&is_over, &n_served);
                scope.spawn(move || {
                    let mut number = 0;
                    // Relaxed: one more round does no harm, and the counts are looked at again.
                    while !is_over.load(Ordering::Relaxed) {
                        let mut stream = gateway.open_stream(&format!("client-{client}-{number}"), 24);
                        let ending = Ending::of(&mut stream);
                        assert!(ending.is_complete(), "{ending:?}");
                        n_served.fetch_add(1, Ordering::Relaxed);
                        number += 1;
                    }
                })
            })
            .collect();
        let more_served = |n_more: usize| {
            let target = n_served.load(Ordering::Relaxed) + n_more;
            eventually("requests are served", || {
                let is_lost = clients.iter().any(thread::ScopedJoinHandle::is_finished);
                (is_lost || target <= n_served.load(Ordering::Relaxed)).then_some(())
            });
        };
        more_served(8);
        assert!(1.0 <= leaving.metric("vllm:num_requests_running", "").unwrap());

        leaving.process.signal("TERM");

        let ending = Ending::of(&mut long);
        let status = leaving.process.ended();
        more_served(8);
        is_over.store(true, Ordering::Relaxed);
        assert!(ending.is_complete(), "{ending:?}");
        assert_eq!(status.code(), Some(0));
        for client in clients {
            client.join().unwrap();
        }
    });
    assert_eq!(cluster.gateway.served_by(&sequence), "worker-2");
}
