//! Nodes that find each other by a coordinator's list, and what a cluster of them keeps.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use kvik_memory::SocketAddress;
use kvik_node::{AttachOptions, DaemonConfig, NodeClient, PeerConfig, RunningDaemon, StoreDaemon};
use kvik_proto::coordinator::{DeregisterRequest, HeartbeatResponse, RegisterResponse, WorkerState};
use kvik_proto::index::{HoldersRequest, HoldersResponse};
use kvik_proto::stores::{RegisterStoreRequest, StoreHeartbeatRequest, StoreInfo, StoreList};
use kvik_runtime::shutdown::Shutdown;
use kvik_store::{Chain, ChunkFormat};
use kvik_tier::TierKind;
use kvik_tier::shared::checksum;
use kvik_types::{BlockSize, Dtype, Namespace};
use parking_lot::Mutex;
use tokio::runtime::Runtime;

const CHUNK_TOKENS: usize = 32;
const N_LAYERS: usize = 4;
const LAYER_BYTES: usize = CHUNK_TOKENS * 128;
const CHUNK_BYTES: usize = N_LAYERS * LAYER_BYTES;
const DOCUMENT_CHUNKS: usize = 4;
const PATIENCE: Duration = Duration::from_mins(1);

/// What stands in for a coordinator: it can be away, forget everything, and list what a test says.
#[derive(Debug, Default)]
struct Board {
    stores: BTreeMap<String, StoreInfo>,
    is_away: bool,
    workers: BTreeMap<String, String>,
    n_heartbeats: u64,
    index: Index,
}

/// What stands in for the global KV index.
#[derive(Debug, Default)]
struct Index {
    holders: BTreeMap<String, u64>,
    state: IndexState,
    n_questions: u64,
    keys: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum IndexState {
    #[default]
    Answers,
    Refuses,
    Hangs,
}

type SharedBoard = Arc<Mutex<Board>>;

struct Coordinator {
    board: SharedBoard,
    base: String,
    _runtime: Runtime,
}

impl Coordinator {
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let board = SharedBoard::default();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new()
            .route("/stores", get(list))
            .route("/stores/register", post(register))
            .route("/stores/heartbeat", post(heartbeat))
            .route("/stores/deregister", post(deregister))
            .route("/index/holders", post(holders))
            .with_state(Arc::clone(&board));
        runtime.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { board, base, _runtime: runtime }
    }

    fn listed(&self) -> Vec<String> {
        self.board.lock().stores.keys().cloned().collect()
    }
}

async fn list(State(board): State<SharedBoard>) -> Result<Json<StoreList>, StatusCode> {
    let board = board.lock();
    let stores = board.stores.values().cloned().collect();
    if board.is_away {
        Err(StatusCode::SERVICE_UNAVAILABLE)
    } else {
        Ok(Json(StoreList { term: 1, version: 1, stores, workers: board.workers.clone() }))
    }
}

async fn register(
    State(board): State<SharedBoard>,
    Json(request): Json<RegisterStoreRequest>,
) -> Result<Json<RegisterResponse>, StatusCode> {
    let mut board = board.lock();
    if board.is_away {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    board.stores.insert(request.store.id.clone(), request.store);
    Ok(Json(RegisterResponse { heartbeat_interval_ms: 20, term: 1 }))
}

async fn heartbeat(
    State(board): State<SharedBoard>,
    Json(request): Json<StoreHeartbeatRequest>,
) -> Result<Json<HeartbeatResponse>, StatusCode> {
    let mut board = board.lock();
    board.n_heartbeats += 1;
    match board.stores.get(&request.id) {
        _ if board.is_away => Err(StatusCode::SERVICE_UNAVAILABLE),
        Some(store) if store.epoch == request.epoch => {
            Ok(Json(HeartbeatResponse { state: WorkerState::Ready, term: 1 }))
        }
        _ => Err(StatusCode::NOT_FOUND),
    }
}

async fn deregister(State(board): State<SharedBoard>, Json(request): Json<DeregisterRequest>) -> StatusCode {
    board.lock().stores.retain(|id, store| *id != request.id || store.epoch != request.epoch);
    StatusCode::NO_CONTENT
}

async fn holders(
    State(board): State<SharedBoard>,
    Json(request): Json<HoldersRequest>,
) -> Result<Json<HoldersResponse>, StatusCode> {
    let state = {
        let index = &mut board.lock().index;
        index.n_questions += 1;
        index.keys.extend(request.keys);
        index.state
    };
    match state {
        IndexState::Answers => Ok(Json(HoldersResponse { holders: board.lock().index.holders.clone() })),
        IndexState::Refuses => Err(StatusCode::SERVICE_UNAVAILABLE),
        IndexState::Hangs => std::future::pending().await,
    }
}

/// A node's daemon, in a runtime of its own.
struct Node {
    daemon: Option<RunningDaemon>,
    socket: std::path::PathBuf,
    shutdown: Shutdown,
    runtime: Runtime,
}

impl Node {
    fn start(folder: &Path, name: &str, change: impl FnOnce(&mut DaemonConfig)) -> Self {
        let socket = folder.join(name).join("store.sock");
        let mut config = DaemonConfig {
            socket: socket.clone(),
            peer: PeerConfig {
                listen: Some("127.0.0.1:0".to_owned()),
                // A busy machine is no dead peer.
                lookup_timeout_ms: 5000,
                response_timeout_ms: 5000,
                ..PeerConfig::default()
            },
            ..DaemonConfig::default()
        };
        "1MiB".clone_into(&mut config.tiers.ram);
        config.tiers.chunk_tokens = CHUNK_TOKENS;
        change(&mut config);
        let runtime = Runtime::new().unwrap();
        let shutdown = Shutdown::new();
        let started = StoreDaemon::start(config, &shutdown);
        let daemon = Some(runtime.block_on(started).unwrap());
        Self { daemon, socket, shutdown, runtime }
    }

    fn running(&self) -> &RunningDaemon {
        self.daemon.as_ref().unwrap()
    }

    fn address(&self) -> String {
        self.running().peer_address().unwrap().to_string()
    }

    fn attach(&self) -> NodeClient {
        let namespace =
            Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: String::new() };
        let format = ChunkFormat {
            n_layers: N_LAYERS as u32,
            token_layer_bytes: (LAYER_BYTES / CHUNK_TOKENS) as u64,
            n_ranks: 1,
            block_tokens: BlockSize::try_new(16).unwrap(),
        };
        let socket = SocketAddress::Path(self.socket.clone());
        let options = AttachOptions {
            timeout: Duration::from_secs(30),
            ..AttachOptions::new(socket, namespace, format)
        };
        NodeClient::attach(&options).unwrap()
    }

    fn detail(&self, name: &str) -> u64 {
        let store = &self.running().server().tenants()[0].store;
        let (_, stat) = store.health().into_iter().find(|(tier, _)| tier.kind == TierKind::Peer).unwrap();
        stat.details.into_iter().find(|(other, _)| *other == name).unwrap().1
    }

    #[track_caller]
    fn wait_for_peers(&self, n_peers: u64) {
        eventually(&format!("{} has {n_peers} peers", self.socket.display()), || {
            self.detail("peers") == n_peers
        });
    }

    /// Ends as a process does that is told to.
    fn end(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            self.shutdown.drain();
            self.runtime.block_on(async {
                daemon.finish().await;
                self.shutdown.finish().await;
            });
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end();
    }
}

#[track_caller]
fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

fn chain(client: &NodeClient, document: u32, n_chunks: usize) -> Chain {
    let tokens: Vec<u32> =
        (0..(n_chunks * CHUNK_TOKENS) as u32).map(|place| place ^ document << 16).collect();
    client.space().chain(&tokens)
}

/// The bytes of a chunk, which no other has.
fn content(document: u32, chunk_idx: usize) -> Vec<u8> {
    let mut state = u64::from(document) << 32 | chunk_idx as u64 | 1;
    let byte = |_| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 56) as u8
    };
    (0..CHUNK_BYTES).map(byte).collect()
}

/// Reads a document and compares every byte, then stores what was missing; the tiers of the chunks that were there.
fn serve(client: &NodeClient, document: u32) -> Vec<TierKind> {
    let opened = client.open(&chain(client, document, DOCUMENT_CHUNKS)).unwrap();
    let lease = opened.retrieve(0).unwrap();
    let mut bytes = vec![0; CHUNK_BYTES];
    let mut tiers = Vec::new();
    for place in 0..lease.n_chunks() {
        lease.copy_out(place, 0, &mut bytes).unwrap();
        assert!(bytes == content(document, place), "chunk {place} of document {document} has other bytes");
        tiers.push(lease.tier(place));
    }
    let write = opened.write(0, DOCUMENT_CHUNKS).unwrap();
    for place in (0..write.n_chunks()).filter(|place| !write.is_present(*place)) {
        let bytes = content(document, place);
        write.copy_in(place, 0, &bytes).unwrap();
        write.commit(place, checksum(&bytes)).unwrap();
    }
    tiers
}

#[test]
fn nodes_find_each_other_by_the_list_of_a_coordinator() {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = Coordinator::start();
    let listed = |config: &mut DaemonConfig| config.peer.coordinators = vec![coordinator.base.clone()];
    let mut first = Node::start(folder.path(), "first", listed);
    let second = Node::start(folder.path(), "second", listed);
    first.wait_for_peers(1);
    second.wait_for_peers(1);
    let info = coordinator.board.lock().stores[&first.address()].clone();
    assert_eq!((info.address, info.memory_bytes), (first.address(), 1 << 20));
    assert_eq!(serve(&first.attach(), 1), []);
    assert_eq!(serve(&second.attach(), 1), [TierKind::Peer; DOCUMENT_CHUNKS]);

    // A node that only reads is on no list.
    let reader = Node::start(folder.path(), "reader", |config| {
        listed(config);
        config.peer.listen = None;
        config.peer.nodes = vec![first.address(), "127.0.0.1:1".to_owned()];
    });
    reader.wait_for_peers(3);
    assert_eq!(coordinator.listed().len(), 2, "names and the list add up, and what is in both counts once");

    let address = first.address();
    first.end();
    assert!(!coordinator.listed().contains(&address), "a node that ends takes itself off the list");
    second.wait_for_peers(0);
    reader.wait_for_peers(3);
}

#[test]
fn nodes_stay_peers_while_the_coordinator_is_away_or_has_forgotten_them() {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = Coordinator::start();
    let listed = |config: &mut DaemonConfig| config.peer.coordinators = vec![coordinator.base.clone()];
    coordinator.board.lock().is_away = true;
    let first = Node::start(folder.path(), "first", listed);
    let second = Node::start(folder.path(), "second", listed);
    assert_eq!(serve(&first.attach(), 1), [], "a node starts and serves without a coordinator");
    coordinator.board.lock().is_away = false;
    first.wait_for_peers(1);
    second.wait_for_peers(1);

    coordinator.board.lock().is_away = true;
    let before = coordinator.board.lock().n_heartbeats;
    eventually("nodes ask", || coordinator.board.lock().n_heartbeats > before + 4);
    assert_eq!((first.detail("peers"), second.detail("peers")), (1, 1));
    assert_eq!(serve(&second.attach(), 1), [TierKind::Peer; DOCUMENT_CHUNKS]);

    // It comes back without its list, and with a node that nothing is known of but its address.
    let stranger = StoreInfo { id: "x".into(), epoch: 1, address: "127.0.0.1:1".into(), memory_bytes: 0 };
    let broken = StoreInfo { id: "y".into(), address: "nowhere".into(), ..stranger.clone() };
    {
        let mut board = coordinator.board.lock();
        board.stores = [stranger, broken].map(|store| (store.id.clone(), store)).into();
        board.is_away = false;
    }
    eventually("both are listed again", || coordinator.listed().len() == 4);
    first.wait_for_peers(2);
    second.wait_for_peers(2);
    assert_eq!(serve(&second.attach(), 2), [], "a node that does not answer costs no more than a miss");
    assert_eq!(serve(&first.attach(), 2), [TierKind::Peer; DOCUMENT_CHUNKS]);
}

#[test]
fn a_node_that_others_could_not_reach_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = DaemonConfig { socket: folder.path().join("x/store.sock"), ..DaemonConfig::default() };
    config.tiers.ram = "1MiB".to_owned();
    config.peer.listen = Some("0.0.0.0:0".to_owned());
    config.peer.insecure = true;
    config.peer.coordinators = vec!["http://127.0.0.1:1".to_owned()];
    let shutdown = Shutdown::new();
    let started = StoreDaemon::start(config, &shutdown);
    let error = Runtime::new().unwrap().block_on(started).unwrap_err().to_string();
    assert!(error.contains("`peer.advertise` is not set"), "{error}");
}

#[test]
fn the_index_is_asked_first_and_believed_only_as_far_as_nodes_confirm_it() {
    const ALL: [TierKind; DOCUMENT_CHUNKS] = [TierKind::Peer; DOCUMENT_CHUNKS];
    let folder = tempfile::tempdir().unwrap();
    let coordinator = Coordinator::start();
    let listed = |config: &mut DaemonConfig| config.peer.coordinators = vec![coordinator.base.clone()];
    let first = Node::start(folder.path(), "first", listed);
    let second = Node::start(folder.path(), "second", listed);
    let reader = Node::start(folder.path(), "reader", |config| {
        listed(config);
        config.peer.index = Some(coordinator.base.clone());
        // A node that is gone: to ask it is a failure.
        config.peer.nodes = vec!["127.0.0.1:1".to_owned()];
    });
    reader.wait_for_peers(3);
    let (stored, client) = (first.attach(), reader.attach());
    let say = |holders: &[(&str, u64)], state| {
        let mut board = coordinator.board.lock();
        board.index.holders = holders.iter().map(|(worker, n)| ((*worker).to_owned(), *n)).collect();
        board.index.state = state;
        board.index.n_questions
    };
    let hints = || ["right_hints", "wrong_hints"].map(|name| reader.detail(name));
    let next_document = Cell::new(0);
    // Reads a document that only the first node has.
    let read_new = || {
        next_document.set(next_document.get() + 1);
        assert_eq!(serve(&stored, next_document.get()), []);
        serve(&client, next_document.get())
    };
    assert_eq!(read_new(), ALL, "before it is known which worker is where, all nodes are asked");
    assert_eq!((hints(), coordinator.board.lock().index.n_questions), ([0, 0], 0));
    assert!(reader.detail("failures") > 0, "the node that is gone, too");

    let nodes = [("w1", first.address()), ("w2", second.address())];
    coordinator.board.lock().workers = nodes.map(|(worker, node)| (worker.to_owned(), node)).into();
    say(&[("w1", 4)], IndexState::Answers);
    eventually("the reader has the list, and asks the index", || {
        assert_eq!(read_new(), ALL);
        reader.detail("right_hints") > 0
    });
    // The list may have come between two groups of the last document; all groups of this one are asked about.
    assert_eq!(read_new(), ALL);
    let names: Vec<String> = chain(&client, next_document.get(), DOCUMENT_CHUNKS)
        .names()
        .iter()
        .map(|name| name.to_string()[..16].to_owned())
        .collect();
    // Chunks are looked up in groups, from the first on.
    assert!(coordinator.board.lock().index.keys.ends_with(&names));

    let [right, wrong] = hints();
    say(&[("w2", 9)], IndexState::Answers);
    assert_eq!(read_new(), ALL, "a hint that is wrong costs a question");
    assert!(hints()[1] > wrong && hints()[0] == right);

    let before = hints();
    let n_questions = say(&[("w9", 4)], IndexState::Answers);
    assert_eq!(read_new(), ALL, "a worker of no known node is no hint");
    assert!(coordinator.board.lock().index.n_questions > n_questions);
    say(&[], IndexState::Refuses);
    assert_eq!(read_new(), ALL, "an index that is away");
    say(&[("w1", 4)], IndexState::Hangs);
    assert_eq!(read_new(), ALL, "an index that does not answer");
    assert_eq!(hints(), before);
}

/// What a cluster of three nodes has after requests that ask for documents of very different popularity.
#[derive(Debug, Clone, Copy)]
struct Outcome {
    /// Distinct chunks that some node has, on average over the second half.
    n_distinct: f64,
    /// Chunks that had to be computed in the second half, because no node had them.
    n_computed: usize,
}

fn run_cluster(policy: &str, spare_last_copy: bool) -> Outcome {
    const N_DOCUMENTS: u32 = 60;
    const N_REQUESTS: usize = 1200;
    let folder = tempfile::tempdir().unwrap();
    let coordinator = Coordinator::start();
    let nodes = ["a", "b", "c"].map(|name| {
        Node::start(folder.path(), name, |config| {
            config.peer.coordinators = vec![coordinator.base.clone()];
            policy.clone_into(&mut config.tiers.policy);
            config.tiers.spare_last_copy = spare_last_copy;
        })
    });
    let clients = [0, 1, 2].map(|place: usize| nodes[place].attach());
    for node in &nodes {
        node.wait_for_peers(2);
    }
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut draw = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) as f64 / (1_u64 << 53) as f64
    };
    let n_distinct = || {
        let has = |key| nodes.iter().any(|node| node.running().server().tenants()[0].store.has_local(&key));
        let of = |document| {
            let chain = chain(&clients[0], document, DOCUMENT_CHUNKS);
            (0..DOCUMENT_CHUNKS).filter(|chunk_idx| has(chain.key(*chunk_idx, 0).unwrap())).count()
        };
        (0..N_DOCUMENTS).map(of).sum::<usize>()
    };
    let (mut n_computed, mut n_seen, mut n_looks) = (0, 0, 0);
    for request in 0..N_REQUESTS {
        let client = &clients[(draw() * 3.0) as usize];
        // The square makes the first documents the ones that most requests are about.
        let document = (draw() * draw() * f64::from(N_DOCUMENTS)) as u32;
        let n_found = serve(client, document).len();
        if request >= N_REQUESTS / 2 {
            n_computed += DOCUMENT_CHUNKS - n_found;
            if request % 50 == 0 {
                n_seen += n_distinct();
                n_looks += 1;
            }
        }
    }
    Outcome { n_distinct: n_seen as f64 / f64::from(n_looks), n_computed }
}

#[test]
fn a_cluster_under_pressure_keeps_more_distinct_chunks_if_last_copies_are_spared() {
    for policy in ["kvik", "lru"] {
        let [with, without] = [true, false].map(|spares| run_cluster(policy, spares));
        println!("{policy}: {with:?} spared, {without:?} not; 3 nodes with room for about 63 chunks each");
        assert!(with.n_distinct > 1.05 * without.n_distinct, "{policy}: {with:?} {without:?}");
        assert!(with.n_computed < without.n_computed, "{policy}: {with:?} {without:?}");
    }
}
