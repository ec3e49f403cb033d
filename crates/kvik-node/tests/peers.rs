//! Nodes that read chunks of each other, each with a daemon and engines of its own.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::path::Path;
use std::time::Duration;

use kvik_memory::SocketAddress;
use kvik_node::{
    AttachOptions, ClientToken, DaemonConfig, NodeClient, PeerConfig, RunningDaemon, StoreDaemon,
    TenantConfig,
};
use kvik_runtime::shutdown::Shutdown;
use kvik_store::{Chain, ChunkFormat};
use kvik_tier::TierKind;
use kvik_tier::shared::checksum;
use kvik_types::{BlockSize, Dtype, Namespace};
use tokio::runtime::Runtime;

const CHUNK_TOKENS: usize = 32;
const N_LAYERS: usize = 4;
const LAYER_BYTES: usize = CHUNK_TOKENS * 1024;
const CHUNK_BYTES: usize = N_LAYERS * LAYER_BYTES;

/// A node's daemon, in a runtime of its own.
struct Node {
    daemon: Option<RunningDaemon>,
    config: DaemonConfig,
    shutdown: Shutdown,
    runtime: Runtime,
}

impl Node {
    /// Starts a daemon that listens for peers and reads from `others`.
    fn start(folder: &Path, name: &str, others: &[&Self], change: impl FnOnce(&mut DaemonConfig)) -> Self {
        let mut config = DaemonConfig {
            socket: folder.join(name).join("store.sock"),
            peer: PeerConfig {
                listen: Some("127.0.0.1:0".to_owned()),
                nodes: others.iter().map(|other| other.peer_address()).collect(),
                // A busy machine is no dead peer.
                lookup_timeout_ms: 5000,
                response_timeout_ms: 5000,
                ..PeerConfig::default()
            },
            ..DaemonConfig::default()
        };
        "16MiB".clone_into(&mut config.tiers.ram);
        config.tiers.chunk_tokens = CHUNK_TOKENS;
        change(&mut config);
        let runtime = Runtime::new().unwrap();
        let shutdown = Shutdown::new();
        let started = StoreDaemon::start(config.clone(), &shutdown);
        let daemon = Some(runtime.block_on(started).unwrap());
        Self { daemon, config, shutdown, runtime }
    }

    fn peer_address(&self) -> String {
        self.daemon.as_ref().unwrap().peer_address().unwrap().to_string()
    }

    fn attach(&self) -> NodeClient {
        self.attach_with(None)
    }

    fn attach_with(&self, token: Option<ClientToken>) -> NodeClient {
        let namespace =
            Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: String::new() };
        let format = ChunkFormat {
            n_layers: N_LAYERS as u32,
            token_layer_bytes: (LAYER_BYTES / CHUNK_TOKENS) as u64,
            n_ranks: 1,
            block_tokens: BlockSize::try_new(16).unwrap(),
        };
        let socket = SocketAddress::Path(self.config.socket.clone());
        let timeout = Duration::from_secs(30);
        NodeClient::attach(&AttachOptions { token, timeout, ..AttachOptions::new(socket, namespace, format) })
            .unwrap()
    }

    fn detail(&self, name: &str) -> u64 {
        let store = &self.daemon.as_ref().unwrap().server().tenants()[0].store;
        let (_, stat) = store.health().into_iter().find(|(tier, _)| tier.kind == TierKind::Peer).unwrap();
        stat.details.into_iter().find(|(other, _)| *other == name).unwrap().1
    }

    fn end(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            self.shutdown.drain();
            self.runtime.block_on(daemon.finish());
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end();
    }
}

fn chain(client: &NodeClient, seed: u32, n_chunks: usize) -> Chain {
    let tokens: Vec<u32> = (0..(n_chunks * CHUNK_TOKENS) as u32).map(|place| place ^ seed << 16).collect();
    client.space().chain(&tokens)
}

/// The bytes of a chunk, which no other has.
fn content(seed: u32, chunk_idx: usize) -> Vec<u8> {
    let mut state = u64::from(seed) << 32 | chunk_idx as u64 | 1;
    let byte = |_| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 56) as u8
    };
    (0..CHUNK_BYTES).map(byte).collect()
}

/// Stores a chain.
fn store(client: &NodeClient, seed: u32, n_chunks: usize) {
    let opened = client.open(&chain(client, seed, n_chunks)).unwrap();
    let write = opened.write(0, n_chunks).unwrap();
    for place in (0..write.n_chunks()).filter(|place| !write.is_present(*place)) {
        let bytes = content(seed, place);
        write.copy_in(place, 0, &bytes).unwrap();
        write.commit(place, checksum(&bytes)).unwrap();
    }
}

/// Reads a chain and compares every byte; the tiers of the chunks that were there.
fn read(client: &NodeClient, seed: u32, n_chunks: usize) -> Vec<TierKind> {
    let opened = client.open(&chain(client, seed, n_chunks)).unwrap();
    let lease = opened.retrieve(0).unwrap();
    let mut bytes = vec![0; CHUNK_BYTES];
    let tiers = (0..lease.n_chunks()).map(|place| {
        lease.copy_out(place, 0, &mut bytes).unwrap();
        assert!(bytes == content(seed, place), "chunk {place} of sequence {seed} has other bytes");
        lease.tier(place)
    });
    tiers.collect()
}

#[test]
fn what_one_node_computed_is_read_by_others_and_then_is_theirs() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = Node::start(folder.path(), "first", &[], |_| {});
    let second = Node::start(folder.path(), "second", &[&first], |_| {});
    let third = Node::start(folder.path(), "third", &[&first, &second], |_| {});
    store(&first.attach(), 1, 8);
    assert_eq!(read(&second.attach(), 1, 8), [TierKind::Peer; 8]);
    assert_eq!(read(&second.attach(), 1, 8), [TierKind::Ram; 8], "it was kept");
    assert_eq!(read(&second.attach(), 2, 8), []);
    first.end();
    assert_eq!(read(&third.attach(), 1, 8), [TierKind::Peer; 8], "the copy is found as well");
    assert_eq!(third.detail("corrupt"), 0);
}

#[test]
fn layers_of_another_node_are_read_one_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let first = Node::start(folder.path(), "first", &[], |_| {});
    let second = Node::start(folder.path(), "second", &[&first], |_| {});
    store(&first.attach(), 1, 5);
    let client = second.attach();
    let opened = client.open(&chain(&client, 1, 5)).unwrap();
    let mut layers = opened.retrieve_layers(0).unwrap();
    let mut section = vec![0; LAYER_BYTES];
    for layer_idx in 0..N_LAYERS {
        assert_eq!((layers.next_layer().unwrap(), layers.n_chunks()), (Some(layer_idx), 5));
        for chunk_idx in 0..5 {
            layers.copy_out(chunk_idx, &mut section).unwrap();
            assert!(section == content(1, chunk_idx)[layer_idx * LAYER_BYTES..][..LAYER_BYTES]);
        }
    }
    drop(layers);
    assert_eq!(read(&client, 1, 5), [TierKind::Ram; 5]);
}

#[test]
fn what_left_the_memory_of_a_node_is_read_from_its_disk() {
    let folder = tempfile::tempdir().unwrap();
    let disk = format!("{}:64MiB", folder.path().join("disk").display());
    let first = Node::start(folder.path(), "first", &[], |config| {
        config.tiers.ram = "2MiB".to_owned();
        config.tiers.nvme = Some(disk);
    });
    let second = Node::start(folder.path(), "second", &[&first], |_| {});
    let client = first.attach();
    for seed in 1..=8 {
        store(&client, seed, 4);
        assert!(first.daemon.as_ref().unwrap().server().tenants()[0].store.flush(Duration::from_secs(30)));
    }
    for seed in 1..=8 {
        assert_eq!(read(&second.attach(), seed, 4), [TierKind::Peer; 4], "sequence {seed}");
    }
}

#[test]
fn a_node_that_is_gone_costs_hits_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = Node::start(folder.path(), "first", &[], |_| {});
    let address = first.peer_address();
    let second = Node::start(folder.path(), "second", &[&first], |_| {});
    store(&first.attach(), 1, 4);
    first.end();
    let client = second.attach();
    assert_eq!(read(&client, 1, 4), []);
    store(&client, 1, 4);
    assert_eq!(read(&client, 1, 4), [TierKind::Ram; 4], "it works alone");
    assert!(second.detail("failures") >= 1);
    let again = Node::start(folder.path(), "again", &[], |config| config.peer.listen = Some(address));
    store(&again.attach(), 7, 4);
    // It is left alone for a second after failures.
    let deadline = std::time::Instant::now() + Duration::from_mins(1);
    while read(&client, 7, 4).is_empty() {
        assert!(std::time::Instant::now() < deadline, "the node was not asked again");
        std::thread::yield_now();
    }
}

#[test]
fn nodes_of_other_tokens_and_other_tenants_share_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("the token of node {name}")).unwrap();
        path
    };
    let (ours, theirs) = (write("ours"), write("theirs"));
    let tenants: Vec<TenantConfig> = ["a", "b"]
        .map(|name| TenantConfig {
            name: name.to_owned(),
            token_file: write(name),
            ram: "8MiB".to_owned(),
            nvme: None,
            tiers: Vec::new(),
            share: 1,
            digest_key_file: None,
            encryption_key_file: None,
        })
        .into();
    let token = |name: &str| Some(ClientToken::try_new(format!("the token of node {name}")).unwrap());
    let with = |token_file: &Path| {
        let (token_file, tenants) = (Some(token_file.to_owned()), tenants.clone());
        move |config: &mut DaemonConfig| {
            config.peer.token_file = token_file;
            config.tenants = tenants;
        }
    };
    let first = Node::start(folder.path(), "first", &[], with(&ours));
    let second = Node::start(folder.path(), "second", &[&first], with(&ours));
    let stranger = Node::start(folder.path(), "stranger", &[&first], with(&theirs));
    store(&first.attach_with(token("a")), 1, 4);
    assert_eq!(read(&stranger.attach_with(token("a")), 1, 4), []);
    assert_eq!(read(&second.attach_with(token("b")), 1, 4), []);
    assert_eq!(read(&second.attach_with(token("a")), 1, 4), [TierKind::Peer; 4]);
}

#[test]
fn a_daemon_that_takes_over_serves_the_peers_of_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = Node::start(folder.path(), "first", &[], |_| {});
    let second = Node::start(folder.path(), "second", &[&first], |_| {});
    store(&first.attach(), 1, 4);
    // Connections of peers, and what is leased for them, are no obstacle.
    assert_eq!(read(&second.attach(), 1, 4), [TierKind::Peer; 4]);
    store(&first.attach(), 2, 4);
    let address = first.peer_address();
    let mut config = first.config.clone();
    config.peer.listen = Some(address);
    let runtime = Runtime::new().unwrap();
    let shutdown = Shutdown::new();
    let taking_over = StoreDaemon::take_over(config.clone(), &shutdown);
    let ended = std::thread::scope(|scope| {
        // The old daemon ends when it is told that the other one serves, and gives its addresses back.
        let ending = scope.spawn(|| {
            let (draining, daemon) = (first.shutdown.clone(), first.daemon.take().unwrap());
            first.runtime.block_on(async {
                draining.draining().await;
                daemon.finish().await;
            });
        });
        let daemon = runtime.block_on(taking_over).unwrap();
        ending.join().unwrap();
        daemon
    });
    let successor = Node { daemon: Some(ended), config, shutdown, runtime };
    let deadline = std::time::Instant::now() + Duration::from_mins(1);
    let client = second.attach();
    while read(&client, 2, 4) != [TierKind::Peer; 4] {
        assert!(
            std::time::Instant::now() < deadline,
            "the peer did not find the chunks of the daemon that took over"
        );
        std::thread::yield_now();
    }
    assert_eq!(read(&successor.attach(), 1, 4), [TierKind::Ram; 4]);
}

#[test]
fn settings_of_peers_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short");
    std::fs::write(&short, "short").unwrap();
    let refused = |peer: PeerConfig| {
        let mut config =
            DaemonConfig { socket: folder.path().join("x/store.sock"), peer, ..DaemonConfig::default() };
        config.tiers.ram = "16MiB".to_owned();
        let shutdown = Shutdown::new();
        let started = StoreDaemon::start(config, &shutdown);
        Runtime::new().unwrap().block_on(started).unwrap_err().to_string()
    };
    let default = PeerConfig::default;
    for (peer, named) in [
        (PeerConfig { listen: Some("0.0.0.0:0".to_owned()), ..default() }, "peer.token_file"),
        (PeerConfig { listen: Some("nowhere".to_owned()), ..default() }, "peer.listen"),
        (PeerConfig { nodes: vec!["node-2".to_owned()], ..default() }, "peer.nodes"),
        (PeerConfig { connections: 0, ..default() }, "peer.connections"),
        (PeerConfig { lookup_timeout_ms: 0, ..default() }, "peer.lookup_timeout_ms"),
        (PeerConfig { bytes_per_s: "much".to_owned(), ..default() }, "peer.bytes_per_s"),
        (
            PeerConfig { nodes: vec!["a:1".to_owned()], token_file: Some(short), ..default() },
            "peer.token_file",
        ),
    ] {
        let error = refused(peer);
        assert!(error.contains(named), "{named}: {error}");
    }
}
