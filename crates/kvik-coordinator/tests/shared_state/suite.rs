//! What holds of three coordinators on a state that they share, whatever that is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvik_coordinator::{Coordinator, CoordinatorConfig, Running};
use kvik_proto::client::ClientError;
use kvik_proto::coordinator::{DeregisterRequest, WorkerState};
use kvik_proto::stores::{RegisterStoreRequest, StoreHeartbeatRequest, StoreInfo};
use kvik_runtime::shutdown::Shutdown;
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use crate::support::{beat, call, client, eventually, ids, registration};
use crate::withheld::WithheldAnswers;

pub(crate) const PATIENCE: Duration = Duration::from_secs(40);
/// Time between two rounds of heartbeats: a thirtieth of what a member lives without one in that test.
const HEARTBEAT_PAUSE: Duration = Duration::from_millis(100);
const WORKERS: [&str; 8] = ["w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"];

/// A server that keeps the state, as a process of the test.
pub(crate) trait SharedState: Sized {
    /// Time within which a leader that was killed is replaced.
    const REPLACED_WITHIN: Duration;
    /// The path that a campaign posts to.
    const CAMPAIGN_PATH: &str;

    async fn start() -> Self;

    /// Its base address.
    fn url(&self) -> &str;

    /// A coordinator on this state.
    fn config(&self) -> CoordinatorConfig;

    /// One that reaches the state at another address, and whose lead lasts for a minute.
    fn config_at(&self, url: &str) -> CoordinatorConfig;

    /// The base address of the leader.
    async fn leader(&self) -> Option<String>;

    /// Takes the lead away from the leader.
    async fn remove_leader(&self);

    /// Ends the server as a kill does.
    fn kill(&mut self);

    /// Starts it again, with what it had written down.
    async fn restart(&mut self);
}

/// A coordinator on a runtime of its own, so that it can die without a word.
pub(crate) struct Node {
    runtime: Option<Runtime>,
    running: Running,
    pub(crate) shutdown: Shutdown,
}

impl Node {
    pub(crate) async fn start(config: CoordinatorConfig) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let shutdown = Shutdown::new();
        let starting = {
            let shutdown = shutdown.clone();
            runtime.spawn(async move { Coordinator::start(config, &shutdown).await })
        };
        let running = starting.await.unwrap().unwrap();
        Self { runtime: Some(runtime), running, shutdown }
    }

    /// Ends the coordinator as a kill does: nothing is released, connections break.
    fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    pub(crate) fn base(&self) -> &str {
        &self.running.base
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end();
    }
}

pub(crate) async fn three(config: CoordinatorConfig) -> Vec<Node> {
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(Node::start(config.clone()).await);
    }
    for node in &nodes {
        eventually(PATIENCE, "every coordinator can be asked", async || {
            client(node.base()).workers().await.ok()
        })
        .await;
    }
    nodes
}

/// Takes the leader out of the nodes.
async fn take_leader(state: &impl SharedState, nodes: &mut Vec<Node>) -> Node {
    let leader = state.leader().await.unwrap();
    let place = nodes.iter().position(|node| node.base() == leader).unwrap();
    nodes.swap_remove(place)
}

/// Registers all workers through the nodes in turn and waits until every node knows all of them.
pub(crate) async fn register_all(nodes: &[Node]) {
    for (id, node) in WORKERS.iter().zip(nodes.iter().cycle()) {
        client(node.base()).register(&registration(id, 1)).await.unwrap();
    }
    everybody_knows_all(nodes).await;
}

pub(crate) async fn everybody_knows_all(nodes: &[Node]) {
    for node in nodes {
        eventually(PATIENCE, "every coordinator knows every worker", async || {
            let snapshot = client(node.base()).workers().await.ok()?;
            (ids(&snapshot) == WORKERS).then_some(())
        })
        .await;
    }
}

/// What workers do: heartbeats to any coordinator that answers. Collects refusals and counts rounds.
fn heartbeats(
    bases: Vec<String>,
    refusals: Arc<Mutex<Vec<String>>>,
    n_rounds: Arc<AtomicU64>,
) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let clients: Vec<_> = bases.iter().map(|base| client(base)).collect();
        let mut beat_interval = tokio::time::interval(HEARTBEAT_PAUSE);
        loop {
            beat_interval.tick().await;
            for id in WORKERS {
                for client in &clients {
                    match client.heartbeat(&beat(id, 1, 0)).await {
                        Ok(_) => break,
                        Err(ClientError::Refused { status, message, .. }) if status != 503 => {
                            refusals.lock().push(format!("{id}: {status} {message}"));
                        }
                        Err(_) => {}
                    }
                }
            }
            n_rounds.fetch_add(1, Ordering::SeqCst);
        }
    })
}

/// The answer of a coordinator while one leads: on a machine that stands still a leader loses its session, and another
/// is elected.
async fn while_led<T>(ask: impl AsyncFn() -> Result<T, ClientError>) -> Result<T, ClientError> {
    eventually(PATIENCE, "a coordinator leads", async || match ask().await {
        Err(ClientError::Refused { status: 503, .. }) => None,
        answer => Some(answer),
    })
    .await
    .0
}

pub(crate) async fn any_coordinator_can_be_asked<S: SharedState>() {
    let state = S::start().await;
    let nodes = three(state.config()).await;
    register_all(&nodes).await;
    for node in &nodes {
        let client = client(node.base());
        let answer = while_led(async || client.heartbeat(&beat("w0", 1, 0)).await).await;
        assert_eq!(answer.unwrap().state, WorkerState::Ready);
        let error = while_led(async || client.heartbeat(&beat("unknown", 1, 0)).await).await.unwrap_err();
        assert!(
            matches!(&error, ClientError::Refused { status: 404, message, .. } if message.contains("unknown"))
        );
        let routed = call("GET", &format!("{}/route?seq_id=seq-1", node.base()), "").await.unwrap().1;
        let first = call("GET", &format!("{}/route?seq_id=seq-1", nodes[0].base()), "").await.unwrap().1;
        assert_eq!(routed, first, "all coordinators place a key alike");
    }
    for (id, node) in WORKERS.iter().zip(&nodes) {
        let client = client(node.base());
        while_led(async || client.drain(id).await).await.unwrap();
        let request = DeregisterRequest { id: (*id).to_owned(), epoch: 1 };
        while_led(async || client.deregister(&request).await).await.unwrap();
    }
    for node in &nodes {
        eventually(PATIENCE, "the workers that left are gone everywhere", async || {
            let snapshot = client(node.base()).workers().await.ok()?;
            (ids(&snapshot) == WORKERS[3..]).then_some(())
        })
        .await;
    }
}

pub(crate) async fn a_killed_leader_is_replaced_in_time_and_no_registration_is_lost<S: SharedState>() {
    let state = S::start().await;
    let mut nodes = three(CoordinatorConfig { heartbeat_interval_ms: 1000, ..state.config() }).await;
    register_all(&nodes).await;
    let refusals = Arc::new(Mutex::new(Vec::new()));
    let n_rounds = Arc::new(AtomicU64::new(0));
    let bases = nodes.iter().map(|node| node.base().to_owned()).collect();
    let beating = heartbeats(bases, Arc::clone(&refusals), Arc::clone(&n_rounds));
    let before = client(nodes[0].base()).workers().await.unwrap();

    let leader = take_leader(&state, &mut nodes).await;
    leader.kill();
    let began = Instant::now();
    for node in &nodes {
        let client = client(node.base());
        assert_eq!(ids(&client.workers().await.unwrap()), WORKERS, "reads go on without a leader");
        eventually(PATIENCE, "a new leader answers", async || {
            let answer = client.heartbeat(&beat("w0", 1, 0)).await.ok()?;
            (answer.term > before.term).then_some(())
        })
        .await;
    }
    let took = began.elapsed();
    assert!(took < S::REPLACED_WITHIN, "{took:?}");

    everybody_knows_all(&nodes).await;
    // Rounds of heartbeats for longer than members would live if these did not reach the new leader.
    let last_round = n_rounds.load(Ordering::SeqCst) + 40;
    eventually(PATIENCE, "more rounds of heartbeats", async || {
        let snapshot = client(nodes[0].base()).workers().await.unwrap();
        assert_eq!(ids(&snapshot), WORKERS);
        (last_round <= n_rounds.load(Ordering::SeqCst)).then_some(())
    })
    .await;
    beating.abort();
    assert_eq!(*refusals.lock(), Vec::<String>::new());
}

pub(crate) async fn a_leader_that_ends_in_order_is_replaced_at_once<S: SharedState>() {
    let state = S::start().await;
    let mut nodes = three(state.config()).await;
    register_all(&nodes).await;
    let before = client(nodes[0].base()).workers().await.unwrap();
    let leader = take_leader(&state, &mut nodes).await;
    leader.shutdown.finish().await;
    let ((), took) = eventually(PATIENCE, "a new leader answers", async || {
        let answer = client(nodes[0].base()).heartbeat(&beat("w0", 1, 0)).await.ok()?;
        (answer.term > before.term).then_some(())
    })
    .await;
    assert!(took < Duration::from_secs(2), "less than the lease: {took:?}");
    everybody_knows_all(&nodes).await;
}

pub(crate) async fn members_outlive_all_coordinators<S: SharedState>() {
    let state = S::start().await;
    let nodes = three(state.config()).await;
    register_all(&nodes).await;
    let (code, _) = call("POST", &format!("{}/workers/w3/drain", nodes[0].base()), "").await.unwrap();
    assert_eq!(code, 204);
    let before = client(nodes[0].base()).workers().await.unwrap();
    for node in nodes {
        node.kill();
    }
    let node = Node::start(state.config()).await;
    let (after, _) =
        eventually(PATIENCE, "the new coordinator leads", async || client(node.base()).workers().await.ok())
            .await;
    assert!(after.term > before.term);
    assert_eq!(ids(&after), WORKERS);
    assert_eq!(after.members[3].state, WorkerState::Draining);
}

pub(crate) async fn a_leader_that_lost_its_lead_does_not_write_under_its_old_term<S: SharedState>() {
    let state = S::start().await;
    let nodes = three(state.config()).await;
    register_all(&nodes).await;
    let before = client(nodes[0].base()).workers().await.unwrap();
    state.remove_leader().await;
    // The first write after the loss is accepted by a later leader or by none.
    let (answer, _) = eventually(PATIENCE, "a leader takes a registration", async || {
        client(nodes[0].base()).register(&registration("late", 1)).await.ok()
    })
    .await;
    assert!(answer.term > before.term);
    for node in &nodes {
        eventually(PATIENCE, "every coordinator has the new term", async || {
            let snapshot = client(node.base()).workers().await.ok()?;
            (snapshot.term >= answer.term && ids(&snapshot).contains(&"late")).then_some(())
        })
        .await;
    }
}

pub(crate) async fn without_the_server_reads_go_on_and_writes_wait_for_it<S: SharedState>() {
    let mut state = S::start().await;
    let nodes = three(state.config()).await;
    register_all(&nodes).await;
    state.kill();
    let error = client(nodes[0].base()).register(&registration("late", 1)).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    for node in &nodes {
        assert_eq!(client(node.base()).workers().await.unwrap().members.len(), WORKERS.len());
    }
    state.restart().await;
    eventually(PATIENCE, "the registration is taken", async || {
        client(nodes[0].base()).register(&registration("late", 1)).await.ok()
    })
    .await;
}

pub(crate) async fn a_coordinator_that_drains_during_its_campaign_leaves_no_leader_behind<S: SharedState>() {
    let state = S::start().await;
    let proxy = WithheldAnswers::start(state.url(), S::CAMPAIGN_PATH, usize::MAX).await;
    // Far longer than the test waits: the key must not go away by itself.
    let node = Node::start(state.config_at(&proxy.url)).await;
    eventually(PATIENCE, "the server knows a leader", async || state.leader().await).await;
    node.shutdown.finish().await;
    eventually(PATIENCE, "the server knows none", async || state.leader().await.is_none().then_some(()))
        .await;
}

pub(crate) async fn a_campaign_whose_answer_is_lost_does_not_stand_in_the_way_of_the_next_one<
    S: SharedState,
>() {
    let state = S::start().await;
    let proxy = WithheldAnswers::start(state.url(), S::CAMPAIGN_PATH, 1).await;
    let node = Node::start(state.config_at(&proxy.url)).await;
    eventually(PATIENCE, "the coordinator leads", async || {
        client(node.base()).register(&registration("w0", 1)).await.ok()
    })
    .await;
    assert_eq!(state.leader().await.as_deref(), Some(node.base()));
}

pub(crate) async fn a_later_leader_knows_the_store_daemons_and_takes_none_for_a_worker<S: SharedState>() {
    let state = S::start().await;
    let mut nodes = three(state.config()).await;
    register_all(&nodes).await;
    let store = |id: &str| StoreInfo {
        id: id.to_owned(),
        epoch: 1,
        address: format!("{id}.test:9106"),
        memory_bytes: 1 << 30,
    };
    // One has the name of a worker.
    for (id, node) in ["s0", "w0"].iter().zip(&nodes) {
        let (client, request) = (client(node.base()), RegisterStoreRequest { store: store(id) });
        while_led(async || client.register_store(&request).await).await.unwrap();
    }
    drop(take_leader(&state, &mut nodes).await);
    for node in &nodes {
        let client = client(node.base());
        let beat = StoreHeartbeatRequest { id: "s0".to_owned(), epoch: 1 };
        eventually(PATIENCE, "another coordinator leads, and knows the daemon", async || {
            client.store_heartbeat(&beat).await.ok()
        })
        .await;
        eventually(PATIENCE, "every coordinator lists both kinds", async || {
            let snapshot = client.workers().await.ok()?;
            (snapshot.stores == [store("s0"), store("w0")] && ids(&snapshot) == WORKERS).then_some(())
        })
        .await;
    }
}
