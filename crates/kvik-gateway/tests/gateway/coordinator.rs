//! Workers that come from a coordinator, and a coordinator that goes away.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use kvik_gateway::GatewayConfig;
use kvik_proto::coordinator::{
    Member, RingConfig, Snapshot, WatchEvent, WorkerInfo, WorkerLoad, WorkerState,
};
use kvik_runtime::http::{ListenLimits, listen, serve};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::trust::TOKEN_HEADER;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, config_for, until};

const BODY: &str = r#"{"model":"m","prompt":"hi","seq_id":"s"}"#;

/// Publishes snapshots.
pub(crate) struct MockCoordinator {
    pub(crate) address: SocketAddr,
    snapshots: watch::Sender<Snapshot>,
    /// The tokens that its watchers showed.
    tokens: Arc<Mutex<Vec<Option<HeaderValue>>>>,
    shutdown: Shutdown,
}

impl MockCoordinator {
    pub(crate) async fn start(address: &str, snapshot: Snapshot) -> Self {
        let listener = listen(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (snapshots, receiver) = watch::channel(snapshot);
        let shutdown = Shutdown::new();
        let tokens = Arc::<Mutex<Vec<_>>>::default();
        let shown = Arc::clone(&tokens);
        let events = move |headers: HeaderMap| {
            shown.lock().push(headers.get(TOKEN_HEADER).cloned());
            let mut receiver = receiver.clone();
            receiver.mark_changed();
            async move { http::Response::new(axum::body::Body::new(body(receiver))) }
        };
        let router = Router::new().route("/watch", get(events));
        let serving = shutdown.clone();
        shutdown.spawn(async move {
            serve(listener, router, None, &ListenLimits::default(), serving.stopping(), &serving).await;
        });
        Self { address, snapshots, tokens, shutdown }
    }

    fn publish(&self, snapshot: Snapshot) {
        self.snapshots.send(snapshot).unwrap();
    }

    pub(crate) async fn stop(self) {
        self.shutdown.finish().await;
    }
}

fn body(
    mut receiver: watch::Receiver<Snapshot>,
) -> impl http_body::Body<Data = Bytes, Error = std::io::Error> + Send + 'static {
    let (sender, frames) = tokio::sync::mpsc::channel::<Bytes>(1);
    tokio::spawn(async move {
        while receiver.changed().await.is_ok() {
            let snapshot = receiver.borrow_and_update().clone();
            let event = serde_json::to_string(&WatchEvent::Snapshot(snapshot)).unwrap();
            if sender.send(Bytes::from(format!("data: {event}\n\n"))).await.is_err() {
                return;
            }
        }
    });
    Frames(frames).boxed_frames()
}

struct Frames(tokio::sync::mpsc::Receiver<Bytes>);

impl Frames {
    fn boxed_frames(self) -> impl http_body::Body<Data = Bytes, Error = std::io::Error> + Send + 'static {
        let mut frames = self.0;
        StreamBody::new(futures_stream(move |context| {
            frames.poll_recv(context).map(|frame| frame.map(|bytes| Ok(Frame::data(bytes))))
        }))
        .boxed_unsync()
    }
}

/// A stream of what `poll` gives.
fn futures_stream<T>(
    poll: impl FnMut(&mut std::task::Context<'_>) -> std::task::Poll<Option<T>> + Unpin,
) -> impl futures_util::Stream<Item = T> {
    futures_util::stream::poll_fn(poll)
}

pub(crate) fn snapshot(term: u64, version: u64, workers: &[&MockWorker]) -> Snapshot {
    let mut members: Vec<Member> = workers
        .iter()
        .map(|worker| Member {
            worker: WorkerInfo {
                id: format!("worker-{}", worker.address.port()),
                epoch: 1,
                address: worker.url(),
                model: "m".to_owned(),
                capacity_tokens: 1000,
                weight: 1.0,
                role: kvik_proto::coordinator::WorkerRole::default(),
                store: None,
            },
            state: WorkerState::Ready,
            load: WorkerLoad::default(),
            ring_weight: 1.0,
        })
        .collect();
    members.sort_by(|left, right| left.worker.id.cmp(&right.worker.id));
    Snapshot { incarnation: 0, term, version, ring: RingConfig::default(), members, stores: Vec::new() }
}

fn config(coordinator: &MockCoordinator) -> GatewayConfig {
    let mut config = config_for(&[]);
    config.coordinators.push(format!("http://{}", coordinator.address));
    config
}

fn n_workers(gateway: &TestGateway) -> usize {
    gateway.gateway().workers().len()
}

#[tokio::test]
async fn members_come_and_go_with_the_snapshots() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let coordinator = MockCoordinator::start("127.0.0.1:0", snapshot(1, 1, &[&left])).await;
    let gateway = TestGateway::start(config(&coordinator)).await;
    gateway.wait_until_usable(1).await;
    assert!(gateway.complete(BODY).await.worker().starts_with("worker-"));
    coordinator.publish(snapshot(1, 2, &[&left, &right]));
    gateway.wait_until_usable(2).await;
    let mut draining = snapshot(1, 3, &[&left, &right]);
    let drained = draining.members[0].worker.id.clone();
    draining.members[0].state = WorkerState::Draining;
    coordinator.publish(draining);
    gateway.wait_until_usable(1).await;
    for number in 0..20 {
        let body = format!(r#"{{"model":"m","prompt":"x","seq_id":"{number}"}}"#);
        assert_ne!(gateway.complete(&body).await.worker(), drained);
    }
    coordinator.publish(snapshot(1, 4, &[&right]));
    until("the member is gone", async || n_workers(&gateway) == 1).await;
}

#[tokio::test]
async fn the_clusters_token_goes_to_workers_and_coordinators_and_to_no_other_engine() {
    const TOKEN: &str = "cluster-token-0123456789";
    let (worker, engine) = (MockWorker::start("m").await, MockWorker::start("e").await);
    let coordinator = MockCoordinator::start("127.0.0.1:0", snapshot(1, 1, &[&worker])).await;
    let mut config = config_for(&[&engine]);
    config.coordinators.push(format!("http://{}", coordinator.address));
    config.cluster_token = Some(TOKEN.into());
    let gateway = TestGateway::start(config).await;
    gateway.wait_until_usable(2).await;
    // A client's own token goes nowhere.
    for (body, token) in
        [(BODY, TOKEN), (r#"{"model":"e","prompt":"hi"}"#, TOKEN), (BODY, "a-clients-own-token")]
    {
        let shown = [("x-kvik-cluster-token", token)];
        assert_eq!(gateway.post("/v1/completions", &shown, body).await.status, 200);
        assert_eq!(gateway.post("/generate", &shown, body).await.status, 200);
    }
    until("the worker's events are asked for", async || {
        let questions = worker.state.questions.lock();
        questions.iter().any(|seen| seen.path == "/kv/events" && seen.headers[TOKEN_HEADER] == TOKEN)
    })
    .await;
    let tokens = |seen: &Mutex<Vec<crate::mock::Seen>>| -> Vec<Option<HeaderValue>> {
        seen.lock().iter().map(|seen| seen.headers.get(TOKEN_HEADER).cloned()).collect()
    };
    let token = Some(HeaderValue::from_static(TOKEN));
    assert_eq!(tokens(&worker.state.seen), vec![token.clone(); 4]);
    assert_eq!(tokens(&engine.state.seen), [None, None]);
    assert!(tokens(&engine.state.questions).iter().all(Option::is_none));
    assert_eq!(coordinator.tokens.lock().first(), Some(&token));
}

#[tokio::test]
async fn generate_goes_to_a_workers_own_route_and_ends_with_done() {
    let worker = MockWorker::start("m").await;
    let coordinator = MockCoordinator::start("127.0.0.1:0", snapshot(1, 1, &[&worker])).await;
    let gateway = TestGateway::start(config(&coordinator)).await;
    gateway.wait_until_usable(1).await;
    let event = "data: {\"type\":\"token\",\"choice\":0,\"token\":5,\"text\":\"a\"}\n\n";
    worker.behave(Behavior::Stream(Behavior::stream(&[event])));
    let answer = gateway.post("/generate", &[], r#"{"prompt":"hi","seq_id":"s","x":1}"#).await;
    assert_eq!(answer.body, format!("{event}data: [DONE]\n\n"));
    let seen = worker.state.seen.lock()[0].clone();
    assert_eq!(
        (seen.path.as_str(), &seen.body[..]),
        ("/inference/generate", &br#"{"prompt":"hi","seq_id":"s","x":1}"#[..])
    );
    worker.behave(Behavior::StreamAndDie(Behavior::stream(&[event])));
    let answer = gateway.post("/generate", &[], r#"{"prompt":"hi"}"#).await;
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    assert!(text.contains(r#""type":"error""#) && !text.contains("[DONE]"), "{text}");
}

#[tokio::test]
async fn routing_goes_on_without_a_coordinator_and_follows_it_when_it_is_back() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let coordinator = MockCoordinator::start("127.0.0.1:0", snapshot(1, 7, &[&left, &right])).await;
    let gateway = TestGateway::start(config(&coordinator)).await;
    gateway.wait_until_usable(2).await;
    let owner = gateway.complete(BODY).await.worker();
    let address = coordinator.address.to_string();
    coordinator.stop().await;
    for _ in 0..10 {
        assert_eq!(gateway.complete(BODY).await.worker(), owner);
    }
    // It comes back without its members, and they register again one by one.
    let coordinator = MockCoordinator::start(&address, snapshot(2, 1, &[])).await;
    let is_heard = || coordinator.snapshots.receiver_count() > 1;
    until("the gateway is back", async || is_heard()).await;
    assert_eq!(gateway.complete(BODY).await.worker(), owner, "a coordinator that forgot moves no key");
    coordinator.publish(snapshot(2, 2, &[&left]));
    assert_eq!(gateway.complete(BODY).await.worker(), owner);
    let mut draining = snapshot(2, 3, &[&left, &right]);
    draining.members[0].state = WorkerState::Draining;
    coordinator.publish(draining);
    gateway.wait_until_usable(1).await;
    coordinator.publish(snapshot(2, 4, &[&left]));
    until("a member that leaves is dropped", async || n_workers(&gateway) == 1).await;
    coordinator.stop().await;
}

#[tokio::test]
async fn a_member_that_a_new_coordinator_does_not_know_is_dropped_when_it_is_not_ready() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let coordinator = MockCoordinator::start("127.0.0.1:0", snapshot(1, 1, &[&left, &right])).await;
    let gateway = TestGateway::start({
        let mut config = config(&coordinator);
        config.health.timeout_ms = 1500;
        config
    })
    .await;
    gateway.wait_until_usable(2).await;
    right.state.is_ready.store(false, Ordering::SeqCst);
    coordinator.publish(snapshot(2, 1, &[]));
    until("only the ready one stays", async || n_workers(&gateway) == 1).await;
    assert_eq!(gateway.complete(BODY).await.status, 200);
    assert_eq!(left.n_seen(), 1);
}

#[tokio::test]
async fn stale_snapshots_of_an_old_leader_are_ignored() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let coordinator = MockCoordinator::start("127.0.0.1:0", snapshot(5, 5, &[&left])).await;
    let gateway = TestGateway::start(config(&coordinator)).await;
    gateway.wait_until_usable(1).await;
    coordinator.publish(snapshot(4, 9, &[&left, &right]));
    coordinator.publish(snapshot(5, 4, &[&left, &right]));
    let worker = MockWorker::start("other").await;
    let mut newest = snapshot(5, 6, &[&left, &worker]);
    newest.members.iter_mut().for_each(|member| member.worker.model = "n".to_owned());
    coordinator.publish(newest);
    until("the newest counts", async || {
        gateway.complete(r#"{"model":"n","prompt":"x"}"#).await.status == 200
    })
    .await;
    assert_eq!(right.n_seen(), 0);
}

#[tokio::test]
async fn a_coordinator_that_restarts_after_its_clock_stepped_back_is_followed() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let held = Snapshot { incarnation: 11, ..snapshot(1_700_000_000_000, 9, &[&left]) };
    let coordinator = MockCoordinator::start("127.0.0.1:0", held).await;
    let gateway = TestGateway::start(config(&coordinator)).await;
    gateway.wait_until_usable(1).await;
    let address = coordinator.address.to_string();
    coordinator.stop().await;
    let restarted = Snapshot { incarnation: 12, ..snapshot(1_600_000_000_000, 1, &[&left, &right]) };
    let coordinator = MockCoordinator::start(&address, restarted).await;
    gateway.wait_until_usable(2).await;
    coordinator.stop().await;
}
