//! Indexes that listen to a daemon.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_node::{AttachOptions, DaemonConfig, NodeClient, RunningDaemon, StoreDaemon};
use kvik_proto::client::{ClientError, KvStream, TlsClientConfig, WorkerClient, http_client};
use kvik_proto::kv_stream::{BlockGroup, Frame, KvChange, KvKey, KvTier};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::trust::TOKEN_HEADER;
use kvik_types::Namespace;
use support::{CHUNK_BYTES, CHUNK_TOKENS, attach_options, chain, complete};
use tokio::runtime::Runtime;

const TOKEN: &str = "a-token-of-the-cluster";

/// A daemon that serves HTTP.
struct Node {
    runtime: Runtime,
    shutdown: Shutdown,
    daemon: Option<RunningDaemon>,
    options: AttachOptions,
    client: WorkerClient,
}

impl Node {
    fn start(folder: &Path, change: impl FnOnce(&mut DaemonConfig)) -> Self {
        let runtime = Runtime::new().unwrap();
        let shutdown = Shutdown::new();
        let mut config = DaemonConfig { socket: folder.join("x/store.sock"), ..DaemonConfig::default() };
        config.metrics = Some("127.0.0.1:0".to_owned());
        config.tiers.ram = format!("{}", 64 * CHUNK_BYTES);
        config.tiers.chunk_tokens = CHUNK_TOKENS;
        change(&mut config);
        let options = attach_options(SocketAddress::Path(config.socket.clone()));
        let daemon = runtime.block_on(StoreDaemon::start(config, &shutdown)).unwrap();
        let base = format!("http://{}", daemon.metrics_address().unwrap());
        let client = WorkerClient::new(http_client(&TlsClientConfig::default()).unwrap(), &base);
        Self { runtime, shutdown, daemon: Some(daemon), options, client }
    }

    fn attach_as(&self, model: &str) -> NodeClient {
        let mut options = self.options.clone();
        model.clone_into(&mut options.namespace.model);
        NodeClient::attach(&options).unwrap()
    }

    fn listen(&self, model: &str, resume: Option<(u64, u64)>) -> Follower<'_> {
        let stream = self.runtime.block_on(self.client.store_events(model, resume)).unwrap();
        let mut follower =
            Follower { node: self, stream, epoch: 0, groups: Vec::new(), held: BTreeSet::new(), due: None };
        let Some(Frame::Hello(hello)) = follower.next_frame() else { panic!("no hello") };
        (follower.epoch, follower.groups, follower.due) = (hello.epoch, hello.groups, hello.resumes_at);
        assert_eq!(hello.worker, "store");
        follower
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shutdown.drain();
        if let Some(daemon) = self.daemon.take() {
            self.runtime.block_on(daemon.finish());
        }
    }
}

/// What an index would know.
struct Follower<'a> {
    node: &'a Node,
    stream: KvStream,
    epoch: u64,
    groups: Vec<BlockGroup>,
    held: BTreeSet<(u32, KvTier, KvKey)>,
    due: Option<u64>,
}

impl Follower<'_> {
    fn next_frame(&mut self) -> Option<Frame> {
        let stream = &mut self.stream;
        let next = async { tokio::time::timeout(Duration::from_secs(30), stream.next()).await };
        self.node.runtime.block_on(next).expect("the stream is silent").unwrap()
    }

    /// Reads until exactly these chunks are held.
    fn until_held(&mut self, expected: &BTreeSet<(u32, KvTier, KvKey)>) {
        self.until(|held| held == expected);
    }

    fn until(&mut self, is_enough: impl Fn(&BTreeSet<(u32, KvTier, KvKey)>) -> bool) {
        let deadline = Instant::now() + Duration::from_mins(1);
        while self.due.is_none() || !is_enough(&self.held) {
            assert!(Instant::now() < deadline, "{:?}", self.held);
            match self.next_frame().expect("the stream ended") {
                Frame::SnapshotPart(part) => {
                    self.held.extend(part.keys.into_iter().map(|key| (part.group, part.tier, key)));
                }
                Frame::SnapshotEnd { next_sequence } => self.due = Some(next_sequence),
                Frame::Batch(batch) => {
                    assert_eq!(Some(batch.sequence), self.due);
                    self.due = Some(batch.sequence + 1);
                    for change in batch.changes {
                        self.apply(change);
                    }
                }
                Frame::Alive { next_sequence } => assert_eq!(Some(next_sequence), self.due),
                Frame::Hello(_) => panic!("a second hello"),
            }
        }
    }

    fn apply(&mut self, change: KvChange) {
        match change {
            KvChange::Stored { group, tier, keys, .. } => {
                for key in keys {
                    assert!(self.held.insert((group, tier, key)));
                }
            }
            KvChange::Removed { group, tier, keys } => {
                for key in keys {
                    assert!(self.held.remove(&(group, tier, key)));
                }
            }
            KvChange::Cleared { .. } => panic!("the log does not clear"),
        }
    }
}

fn keys(client: &NodeClient, group: u32, seed: u32, n_chunks: usize) -> BTreeSet<(u32, KvTier, KvKey)> {
    let names = chain(client, seed, n_chunks).names().to_vec();
    names.into_iter().map(|name| (group, KvTier::Cpu, KvKey::from(name))).collect()
}

#[test]
fn an_index_hears_of_the_chunks_of_its_model_as_they_come_and_go() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), |_| {});
    let (engine, other) = (node.attach_as("/models/tiny|None|digest"), node.attach_as("other"));
    complete(&engine, 1, 3).unwrap();
    complete(&other, 1, 2).unwrap();
    let mut follower = node.listen("org/tiny", None);
    assert_eq!(follower.groups.len(), 1, "that of the other model is not among them");
    assert_eq!(follower.groups[0].root, engine.space().root());
    assert_eq!(follower.groups[0].block_tokens as usize, CHUNK_TOKENS);
    follower.until_held(&keys(&engine, 0, 1, 3));
    complete(&engine, 2, 2).unwrap();
    let both = keys(&engine, 0, 1, 3).union(&keys(&engine, 0, 2, 2)).copied().collect();
    follower.until_held(&both);
    // It goes on where it was.
    let (epoch, due) = (follower.epoch, follower.due.unwrap());
    drop(follower);
    complete(&engine, 3, 1).unwrap();
    let mut resumed = node.listen("tiny", Some((epoch, due)));
    assert_eq!((resumed.epoch, resumed.due), (epoch, Some(due)));
    resumed.held.clone_from(&both);
    resumed.until_held(&both.union(&keys(&engine, 0, 3, 1)).copied().collect());
    // More than there is room for: what was evicted is told too.
    for seed in 10..40 {
        complete(&engine, seed, 4).unwrap();
    }
    let daemon = node.daemon.as_ref().unwrap();
    let store = daemon.server().tenants()[0].store.clone();
    let namespace = Namespace { model: "/models/tiny|None|digest".into(), ..node.options.namespace.clone() };
    let space = store.space(&namespace, node.options.format).unwrap();
    // Asked again with each frame: memory is reclaimed in the background.
    resumed.until(|held| {
        let mut there = BTreeSet::new();
        store.visit_chunks(&space, |hash, _| {
            there.insert((0, KvTier::Cpu, KvKey::from(hash)));
        });
        there.len() <= 64 && *held == there
    });
}

#[test]
fn a_space_that_comes_later_ends_the_stream_and_the_next_one_has_both() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), |_| {});
    let mut before = node.listen("tiny", None);
    assert_eq!(before.groups, [], "no engine has attached");
    let first = node.attach_as("tiny|bf16");
    complete(&first, 1, 2).unwrap();
    while before.next_frame().is_some() {}
    let mut one = node.listen("tiny", None);
    one.until_held(&keys(&first, 0, 1, 2));
    let second = node.attach_as("tiny|f32");
    assert_ne!(first.space().root(), second.space().root());
    complete(&second, 1, 1).unwrap();
    while one.next_frame().is_some() {}
    let mut both = node.listen("tiny", Some((one.epoch, one.due.unwrap())));
    assert!(both.epoch > one.epoch && both.due.is_none(), "it begins anew");
    assert_eq!(both.groups.len(), 2);
    both.until_held(&keys(&first, 0, 1, 2).union(&keys(&second, 1, 1, 1)).copied().collect());
    // The same space again changes nothing.
    let _again = node.attach_as("tiny|f32");
    complete(&second, 2, 1).unwrap();
    let expected = [keys(&first, 0, 1, 2), keys(&second, 1, 1, 1), keys(&second, 1, 2, 1)];
    both.until_held(&expected.into_iter().flatten().collect());
}

#[test]
fn an_index_hears_of_no_segment() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), |_| {});
    let mut options = AttachOptions { is_for_segments: true, ..node.options.clone() };
    "tiny".clone_into(&mut options.namespace.model);
    options.namespace.layout.push_str("+segment");
    let segments = NodeClient::attach(&options).unwrap();
    complete(&segments, 1, 2).unwrap();
    let mut before = node.listen("tiny", None);
    assert_eq!(before.groups, [], "segments are no group");
    let engine = node.attach_as("tiny");
    complete(&engine, 1, 1).unwrap();
    while before.next_frame().is_some() {}
    let mut follower = node.listen("tiny", None);
    complete(&segments, 2, 2).unwrap();
    complete(&engine, 2, 1).unwrap();
    follower.until_held(&keys(&engine, 0, 1, 1).union(&keys(&engine, 0, 2, 1)).copied().collect());
    assert_eq!(follower.groups.len(), 1);
}

#[test]
fn a_model_without_a_name_or_with_an_endless_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), |_| {});
    for model in ["", &"x".repeat(1025)] {
        let refused = node.runtime.block_on(node.client.store_events(model, None)).map(|_| ());
        assert!(matches!(refused, Err(ClientError::Refused { status: 400, .. })), "{refused:?}");
    }
}

#[test]
fn a_daemon_with_a_token_tells_only_callers_that_show_it() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), |config| config.cluster_token = Some(TOKEN.into()));
    let refused = node.runtime.block_on(node.client.store_events("tiny", None)).map(|_| ());
    assert!(matches!(refused, Err(ClientError::Refused { status: 401, .. })), "{refused:?}");
    let shown = node.client.clone().with_header(Some((TOKEN_HEADER, TOKEN.parse().unwrap())));
    assert!(node.runtime.block_on(shown.store_events("tiny", None)).is_ok());
}
