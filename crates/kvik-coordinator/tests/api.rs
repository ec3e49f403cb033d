//! The API of an embedded coordinator, over HTTP and through the real client.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

mod support;

use std::time::Duration;

use kvik_coordinator::{Coordinator, CoordinatorConfig, Running};
use kvik_proto::client::ClientError;
use kvik_proto::coordinator::{
    DeregisterRequest, RegisterRequest, RingHash, RingView, RouteResponse, Snapshot, WatchEvent, WorkerState,
};
use kvik_proto::stores::{RegisterStoreRequest, StoreHeartbeatRequest, StoreInfo};
use kvik_runtime::shutdown::Shutdown;
use serde_json::json;
use support::{beat, call, client, config, eventually, ids, registration};

const PATIENCE: Duration = Duration::from_secs(10);

async fn start(config: CoordinatorConfig) -> (Running, Shutdown) {
    let shutdown = Shutdown::new();
    let running = Coordinator::start(config, &shutdown).await.unwrap();
    (running, shutdown)
}

/// Fast enough to wait for, and slow enough for a machine that does other things too.
fn beating() -> CoordinatorConfig {
    CoordinatorConfig { heartbeat_interval_ms: 500, ..config() }
}

fn status(error: &ClientError) -> u16 {
    match error {
        ClientError::Refused { status, .. } => *status,
        other => panic!("{other}"),
    }
}

/// The next snapshot that differs from the one before in more than loads.
async fn next_change(watch: &mut kvik_proto::client::Watch, after: &Snapshot) -> Snapshot {
    loop {
        match watch.next().await.unwrap().expect("the coordinator runs") {
            WatchEvent::Snapshot(snapshot) if snapshot.version != after.version => return snapshot,
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_worker_is_a_member_from_registration_to_the_third_missed_heartbeat() {
    let (running, shutdown) = start(beating()).await;
    let client = client(&running.base);
    assert_eq!(status(&client.heartbeat(&beat("a", 1, 0)).await.unwrap_err()), 404);

    let answer = client.register(&registration("a", 1)).await.unwrap();
    assert_eq!(answer.heartbeat_interval_ms, 500);
    let heartbeat = client.heartbeat(&beat("a", 1, 7)).await.unwrap();
    assert_eq!((heartbeat.state, heartbeat.term), (WorkerState::Ready, answer.term));
    assert_eq!(ids(&client.workers().await.unwrap()), ["a"]);

    let (gone, _) = eventually(PATIENCE, "the member expires", async || {
        let snapshot = client.workers().await.unwrap();
        snapshot.members.is_empty().then_some(snapshot)
    })
    .await;
    assert!(gone.version > 1);
    assert_eq!(status(&client.heartbeat(&beat("a", 1, 0)).await.unwrap_err()), 404);
    shutdown.finish().await;
}

#[tokio::test]
async fn a_watcher_sees_the_state_first_and_then_every_change() {
    let (running, shutdown) = start(config()).await;
    let client = client(&running.base);
    let mut watch = client.watch().await.unwrap();
    let Some(WatchEvent::Snapshot(first)) = watch.next().await.unwrap() else {
        panic!("a snapshot comes first")
    };
    assert!(first.members.is_empty());

    client.register(&registration("a", 1)).await.unwrap();
    let joined = next_change(&mut watch, &first).await;
    assert_eq!((ids(&joined), joined.term), (vec!["a"], first.term));
    assert!(joined.version > first.version);

    let (code, _) = call("POST", &format!("{}/workers/a/drain", running.base), "").await.unwrap();
    assert_eq!(code, 204);
    let drained = next_change(&mut watch, &joined).await;
    assert_eq!(drained.members[0].state, WorkerState::Draining);
    assert_eq!(client.heartbeat(&beat("a", 1, 0)).await.unwrap().state, WorkerState::Draining);

    client.deregister(&DeregisterRequest { id: "a".to_owned(), epoch: 1 }).await.unwrap();
    let left = next_change(&mut watch, &drained).await;
    assert!(left.members.is_empty());

    shutdown.drain();
    while watch.next().await.unwrap().is_some() {}
    shutdown.finish().await;
}

#[tokio::test]
async fn loads_reach_watchers_under_the_same_version() {
    let (running, shutdown) = start(beating()).await;
    let client = client(&running.base);
    client.register(&registration("a", 1)).await.unwrap();
    let registered = client.workers().await.unwrap();
    client.heartbeat(&beat("a", 1, 77)).await.unwrap();
    let mut watch = client.watch().await.unwrap();
    loop {
        let event = watch.next().await.unwrap();
        let Some(WatchEvent::Snapshot(snapshot)) = event else { panic!("{event:?}") };
        assert_eq!((snapshot.term, snapshot.version), (registered.term, registered.version));
        if snapshot.members[0].load.outstanding_tokens == 77 {
            break;
        }
    }
    shutdown.finish().await;
}

#[tokio::test]
async fn a_route_explains_itself() {
    let (running, shutdown) = start(config()).await;
    let client = client(&running.base);
    let route = format!("{}/route?seq_id=seq-1", running.base);
    let (code, body) = call("GET", &route, "").await.unwrap();
    assert_eq!((code, &body["error"]["code"]), (503, &json!("no_worker")));

    for id in ["a", "b", "c"] {
        client.register(&registration(id, 1)).await.unwrap();
    }
    let (_, plain) = call("GET", &route, "").await.unwrap();
    let plain: RouteResponse = serde_json::from_value(plain).unwrap();
    assert_eq!(plain.explain, None);
    let (_, explained) = call("GET", &format!("{route}&explain=true"), "").await.unwrap();
    let explained: RouteResponse = serde_json::from_value(explained).unwrap();
    assert_eq!((&explained.worker_id, &explained.address), (&plain.worker_id, &plain.address));
    let why = explained.explain.unwrap();
    assert_eq!((why.reason.as_str(), why.candidates.len()), ("owner", 3));
    assert_eq!(why.candidates[0].worker_id, plain.worker_id);

    // A worker that drains gives its keys to the next one on the ring.
    call("POST", &format!("{}/workers/{}/drain", running.base, plain.worker_id), "").await.unwrap();
    let (_, moved) = call("GET", &format!("{route}&explain=true"), "").await.unwrap();
    let moved: RouteResponse = serde_json::from_value(moved).unwrap();
    assert_eq!(moved.worker_id, why.candidates[1].worker_id);
    let why = moved.explain.unwrap();
    assert_eq!((why.reason.as_str(), why.candidates[0].skipped.as_deref()), ("unusable", Some("unusable")));

    let (_, ring) = call("GET", &format!("{}/ring", running.base), "").await.unwrap();
    let ring: RingView = serde_json::from_value(ring).unwrap();
    let total: f64 = ring.members.iter().map(|member| member.share).sum();
    assert!((total - 1.0).abs() < 1e-9 && ring.members.iter().all(|member| member.virtual_nodes == 160));
    assert_eq!(ring.ring.hash, RingHash::Xxh3);
    shutdown.finish().await;
}

#[tokio::test]
async fn a_bad_request_is_refused_with_its_field() {
    let (running, shutdown) = start(config()).await;
    let good = serde_json::to_value(registration("a", 1)).unwrap();
    let with = |pointer: &str, value: serde_json::Value| {
        let mut body = good.clone();
        *body.pointer_mut(pointer).unwrap() = value;
        body.to_string()
    };
    let cases = [
        ("/register", with("/worker/epoch", json!("one")), "worker.epoch"),
        ("/register", with("/worker/id", json!("a/b")), "worker.id"),
        ("/register", with("/worker/id", json!("")), "worker.id"),
        ("/register", with("/worker/address", json!("host:1")), "worker.address"),
        ("/register", with("/worker/weight", json!(-1)), "worker.weight"),
        ("/register", with("/worker/weight", json!(1e9)), "worker.weight"),
        ("/heartbeat", json!({"id": "a", "epoch": 1, "load": {"running": -1}}).to_string(), "load.running"),
        ("/register", json!({"worker": {"id": "a"}}).to_string(), "worker"),
        ("/workers/a%20b/drain", String::new(), "id"),
    ];
    for (path, body, field) in cases {
        let (code, answer) = call("POST", &format!("{}{path}", running.base), &body).await.unwrap();
        assert_eq!((code, &answer["error"]["param"]), (400, &json!(field)), "{path}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(field), "{answer}");
    }
    let base = &running.base;
    let answers = [
        (call("POST", &format!("{base}/deregister"), "{").await.unwrap(), 400),
        (call("POST", &format!("{base}/register"), &format!("{good} {good}")).await.unwrap(), 400),
        (call("POST", &format!("{base}/register"), &" ".repeat(100_000)).await.unwrap(), 413),
        (call("GET", &format!("{base}/route?seq_id=a&seq_id=b"), "").await.unwrap(), 400),
        (call("GET", &format!("{base}/route"), "").await.unwrap(), 400),
        (call("GET", &format!("{base}/route?seq_id=a&explain=maybe"), "").await.unwrap(), 400),
        (call("POST", &format!("{base}/workers/unknown/drain"), "").await.unwrap(), 404),
        (call("GET", &format!("{base}/nothing"), "").await.unwrap(), 404),
        (call("GET", &format!("{base}/register"), "").await.unwrap(), 405),
    ];
    for ((code, answer), expected) in answers {
        assert_eq!(code, expected, "{answer}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
    shutdown.finish().await;
}

#[tokio::test]
async fn an_earlier_life_and_a_second_process_are_refused() {
    let (running, shutdown) = start(config()).await;
    let client = client(&running.base);
    client.register(&registration("a", 2)).await.unwrap();
    assert_eq!(status(&client.register(&registration("a", 1)).await.unwrap_err()), 409);
    let mut other = registration("a", 2);
    other.worker.address = "http://other.test:1".to_owned();
    assert_eq!(status(&client.register(&other).await.unwrap_err()), 409);
    assert_eq!(status(&client.heartbeat(&beat("a", 1, 0)).await.unwrap_err()), 409);
    client.register(&registration("a", 3)).await.unwrap();
    shutdown.finish().await;
}

#[tokio::test]
async fn a_restarted_coordinator_asks_for_registration_under_a_later_term() {
    let (running, shutdown) = start(config()).await;
    let before = client(&running.base).register(&registration("a", 1)).await.unwrap();
    shutdown.finish().await;

    let config = CoordinatorConfig { listen: running.address.to_string(), ..config() };
    let (running, shutdown) = start(config).await;
    let client = client(&running.base);
    assert_eq!(status(&client.heartbeat(&beat("a", 1, 0)).await.unwrap_err()), 404);
    let after = client.register(&registration("a", 1)).await.unwrap();
    assert!(after.term > before.term);
    shutdown.finish().await;
}

#[tokio::test]
async fn a_worker_that_drains_comes_back_draining_to_a_restarted_coordinator() {
    let (running, shutdown) = start(config()).await;
    let draining = RegisterRequest { state: WorkerState::Draining, ..registration("a", 1) };
    let client = client(&running.base);
    client.register(&draining).await.unwrap();
    assert_eq!(client.workers().await.unwrap().members[0].state, WorkerState::Draining);
    assert_eq!(client.heartbeat(&beat("a", 1, 0)).await.unwrap().state, WorkerState::Draining);
    assert_eq!(status(&client.route("seq-1", false).await.unwrap_err()), 503, "no worker takes requests");

    // A worker of an earlier version says nothing of its state and is ready.
    let mut silent = serde_json::to_value(registration("b", 1)).unwrap();
    silent.as_object_mut().unwrap().remove("state");
    call("POST", &format!("{}/register", running.base), &silent.to_string()).await.unwrap();
    assert_eq!(client.route("seq-1", false).await.unwrap().worker_id, "b");
    shutdown.finish().await;
}

#[tokio::test]
async fn the_client_has_every_call_of_an_operator() {
    let (running, shutdown) = start(config()).await;
    let client = client(&running.base);
    assert_eq!(status(&client.drain("a").await.unwrap_err()), 404);
    assert_eq!(status(&client.drain("a/../b").await.unwrap_err()), 400);
    for id in ["a", "b"] {
        client.register(&registration(id, 1)).await.unwrap();
    }
    let ring = client.ring().await.unwrap();
    assert_eq!(ring.members.iter().map(|member| member.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    // An id with characters that mean something in an address is a key like any other.
    let key = "a&explain=maybe %/?";
    let explained = client.route(key, true).await.unwrap();
    let why = explained.explain.unwrap();
    assert_eq!((why.reason.as_str(), &why.candidates[0].worker_id), ("owner", &explained.worker_id));
    assert_eq!(client.route(key, false).await.unwrap().explain, None);
    client.drain(&explained.worker_id).await.unwrap();
    let moved = client.route(key, true).await.unwrap();
    assert_ne!(moved.worker_id, explained.worker_id);
    assert_eq!(moved.explain.unwrap().reason, "unusable");
    shutdown.finish().await;
}

#[tokio::test]
async fn health_readiness_and_metrics_are_served() {
    kvik_runtime::telemetry::start_metrics().unwrap();
    let (running, shutdown) = start(config()).await;
    let base = &running.base;
    client(base).register(&registration("a", 1)).await.unwrap();
    assert_eq!(call("GET", &format!("{base}/health"), "").await.unwrap().0, 200);
    assert_eq!(call("GET", &format!("{base}/ready"), "").await.unwrap().0, 200);
    let (_, metrics) = call("GET", &format!("{base}/metrics"), "").await.unwrap();
    let metrics = metrics.as_str().unwrap();
    for name in
        ["kvik_coordinator_workers{state=\"ready\"}", "kvik_coordinator_term", "kvik_coordinator_is_leader"]
    {
        assert!(metrics.contains(name), "{name} is missing in\n{metrics}");
    }
    shutdown.finish().await;
}

#[tokio::test]
async fn clients_that_send_half_a_head_or_half_a_body_are_let_go() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut config = config();
    config.limits.header_ms = 200;
    config.limits.body_ms = 200;
    let (running, shutdown) = start(config).await;
    for (sent, answered) in [
        ("POST /regis", ""),
        ("POST /register HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\n{", "HTTP/1.1 408 "),
    ] {
        let mut client = tokio::net::TcpStream::connect(running.address).await.unwrap();
        client.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(PATIENCE, client.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with(answered), "{answer}");
        assert_eq!(answer.is_empty(), answered.is_empty(), "{answer}");
    }
    shutdown.finish().await;
}

#[tokio::test]
async fn store_daemons_are_listed_apart_from_workers_by_the_same_rules() {
    let (running, shutdown) = start(beating()).await;
    let client = client(&running.base);
    let store = |id: &str, epoch, address: &str| RegisterStoreRequest {
        store: StoreInfo { id: id.to_owned(), epoch, address: address.to_owned(), memory_bytes: 7 },
    };
    let beat = |id: &str, epoch| StoreHeartbeatRequest { id: id.to_owned(), epoch };
    assert_eq!(status(&client.store_heartbeat(&beat("a", 1)).await.unwrap_err()), 404);
    // A worker and a daemon may have one name.
    client.register(&registration("a", 1)).await.unwrap();
    let answer = client.register_store(&store("a", 2, "node-1:9106")).await.unwrap();
    assert_eq!(answer.heartbeat_interval_ms, 500);
    assert_eq!(client.store_heartbeat(&beat("a", 2)).await.unwrap().term, answer.term);
    assert_eq!(status(&client.store_heartbeat(&beat("a", 1)).await.unwrap_err()), 409);
    assert_eq!(status(&client.register_store(&store("a", 1, "node-1:9106")).await.unwrap_err()), 409);
    assert_eq!(status(&client.register_store(&store("a", 2, "node-2:9106")).await.unwrap_err()), 409);

    let snapshot = client.workers().await.unwrap();
    assert_eq!(ids(&snapshot), ["a"], "gateways see no daemon");
    assert_eq!(snapshot.stores, client.stores().await.unwrap().stores);
    assert_eq!(snapshot.stores[0].address, "node-1:9106");
    let ring = client.ring().await.unwrap();
    assert_eq!(ring.members.len(), 1);
    let (code, _) = call("POST", &format!("{}/workers/b/drain", running.base), "").await.unwrap();
    assert_eq!(code, 404);

    for (id, address, field) in [
        ("a/b", "node-1:9106", "store.id"),
        ("b", "node-1", "store.address"),
        ("b", ":9106", "store.address"),
        ("b", "http://node-1:9106", "store.address"),
        ("b", "node-1:0", "store.address"),
    ] {
        let body = serde_json::to_string(&store(id, 1, address)).unwrap();
        let (code, body) = call("POST", &format!("{}/stores/register", running.base), &body).await.unwrap();
        assert_eq!((code, &body["error"]["param"]), (400, &json!(field)), "{id} {address}");
    }

    client.register_store(&store("c", 1, "node-3:9106")).await.unwrap();
    client.deregister_store(&DeregisterRequest { id: "c".to_owned(), epoch: 1 }).await.unwrap();
    assert_eq!(client.stores().await.unwrap().stores.len(), 1);
    eventually(PATIENCE, "the daemon expires", async || {
        client.stores().await.unwrap().stores.is_empty().then_some(())
    })
    .await;
    shutdown.finish().await;
}
