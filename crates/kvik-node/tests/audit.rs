//! What a daemon writes down of its clients.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_node::{
    AttachOptions, ClientToken, NodeClient, NodeManager, NodeOptions, NodeServer, NodeWatch, Tenant,
};
use kvik_store::{Chain, ChunkChange, ChunkFormat, ChunkObserver, Commit, Store, StoreOptions};
use kvik_tier::shared::{Checksum, checksum};
use kvik_tier::{Arena, ArenaOptions, RamTier, TierKind};
use kvik_types::{BlockSize, Dtype, Namespace};
use serde_json::{Value, json};

const CHUNK_TOKENS: usize = 32;
const CHUNK_BYTES: usize = CHUNK_TOKENS * 4 * 256;

/// A daemon of one tenant with a token and an audit log.
struct Daemon {
    server: NodeServer,
    socket: SocketAddress,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

fn token(text: &str) -> ClientToken {
    ClientToken::try_new(text).unwrap()
}

fn open_store() -> Store {
    let chunk_tokens = BlockSize::try_new(CHUNK_TOKENS).unwrap();
    let ram = RamTier::new(Arena::new(ArenaOptions::new(16 << 20)).unwrap());
    Store::builder(StoreOptions { chunk_tokens, ..StoreOptions::default() }, ram).open().unwrap()
}

fn node_options(folder: &Path, log: &Path) -> NodeOptions {
    let socket = SocketAddress::Path(folder.join("private/node.sock"));
    let tenant =
        Tenant { name: "acme".into(), token: Some(token("a token of acme, long")), store: open_store() };
    NodeOptions {
        tenants: vec![tenant],
        audit_log: Some(log.to_owned()),
        ..NodeOptions::new(socket, open_store())
    }
}

impl Daemon {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("audit.jsonl");
        let options = node_options(folder.path(), &log);
        let socket = options.socket.clone();
        Self { server: NodeServer::start(options).unwrap(), socket, log, _folder: folder }
    }

    fn options(&self, token_text: &str) -> AttachOptions {
        let namespace = Namespace {
            model: "a model".into(),
            dtype: Dtype::BF16,
            layout: "l".into(),
            tenant: String::new(),
        };
        let format = ChunkFormat {
            n_layers: 4,
            token_layer_bytes: 256,
            n_ranks: 1,
            block_tokens: BlockSize::try_new(16).unwrap(),
        };
        let options = AttachOptions::new(self.socket.clone(), namespace, format);
        AttachOptions { token: Some(token(token_text)), ..options }
    }

    fn attach(&self) -> NodeClient {
        NodeClient::attach(&self.options("a token of acme, long")).unwrap()
    }

    /// Ends the daemon; returns the lines of its log.
    fn lines(&self) -> Vec<Value> {
        self.server.end();
        read(&self.log)
    }
}

fn read(log: &Path) -> Vec<Value> {
    std::fs::read_to_string(log).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn chain(client: &NodeClient, n_chunks: usize) -> Chain {
    let tokens: Vec<u32> = (0..(n_chunks * CHUNK_TOKENS) as u32).map(|place| 77_000 + place).collect();
    client.space().chain(&tokens)
}

/// The lines of an operation, without what differs from run to run.
fn of(lines: &[Value], operation: &str) -> Vec<Value> {
    let mut found: Vec<Value> = lines.iter().filter(|line| line["operation"] == operation).cloned().collect();
    for line in &mut found {
        let fields = line.as_object_mut().unwrap();
        let time = fields.remove("time").unwrap();
        let time = time.as_str().unwrap();
        assert!(time.len() == 24 && time.starts_with("20") && time.ends_with('Z'), "{time}");
        assert_eq!(fields.remove("pid").unwrap(), std::process::id());
        assert_eq!(fields.remove("uid").unwrap(), rustix::process::getuid().as_raw());
        fields.remove("operation");
    }
    found
}

#[test]
fn attaching_storing_reading_and_leaving_are_written_down() {
    let daemon = Daemon::start();
    let client = daemon.attach();
    let names = chain(&client, 3);
    let bytes = vec![9; CHUNK_BYTES];
    let opened = client.open(&names).unwrap();
    assert_eq!(opened.retrieve(0).unwrap().n_chunks(), 0);
    let write = opened.write(0, 3).unwrap();
    for place in 0..3 {
        write.copy_in(place, 0, &bytes).unwrap();
        assert_eq!(write.commit(place, checksum(&bytes)).unwrap(), Commit::Stored);
    }
    drop(write);
    assert_eq!(client.open(&names).unwrap().retrieve(1).unwrap().n_chunks(), 2);
    drop(opened.write(0, 3).unwrap());
    drop((opened, client));
    let lines = daemon.lines();
    let namespace = names.space().namespace_id().to_string();
    let identity = json!({"tenant": "acme", "model": "a model", "namespace": namespace});
    let with = |more: Value| {
        let mut line = identity.clone();
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        line
    };
    assert_eq!(of(&lines, "attach"), [with(json!({"outcome": "done"}))]);
    assert_eq!(of(&lines, "detach"), [with(json!({"outcome": "done"}))]);
    let name = |chunk_idx: usize| names.names()[chunk_idx].to_string();
    assert_eq!(
        of(&lines, "read"),
        [
            with(json!({"chunks": 0, "tokens": 0, "bytes": 0, "outcome": "miss"})),
            with(json!({
                "chunks": 2, "tokens": 64, "bytes": 2 * CHUNK_BYTES, "tier": "ram",
                "first_chunk": name(1), "last_chunk": name(2), "outcome": "done",
            })),
        ]
    );
    let stored = json!({"first_chunk": name(0), "last_chunk": name(2)});
    let mut first = with(stored.clone());
    first.as_object_mut().unwrap().extend(
        json!({"chunks": 3, "tokens": 96, "bytes": 3 * CHUNK_BYTES, "outcome": "done"})
            .as_object()
            .unwrap()
            .clone(),
    );
    let mut second = with(stored);
    second.as_object_mut().unwrap().extend(
        json!({"chunks": 0, "tokens": 0, "bytes": 0, "outcome": "present"}).as_object().unwrap().clone(),
    );
    assert_eq!(of(&lines, "store"), [first, second]);
    assert_eq!(lines.len(), 6);
    // In the order in which they happened.
    assert_eq!(lines[0]["operation"], "attach");
    assert_eq!(lines[5]["operation"], "detach");
}

#[test]
fn writes_that_end_otherwise_say_how() {
    let daemon = Daemon::start();
    let client = daemon.attach();
    let names = chain(&client, 2);
    let opened = client.open(&names).unwrap();
    let write = opened.write(0, 2).unwrap();
    let bytes = vec![9; CHUNK_BYTES];
    write.copy_in(0, 0, &bytes).unwrap();
    assert!(write.commit(0, Checksum(checksum(&bytes).0 ^ 1)).is_err());
    drop(write);
    let write = opened.write(0, 2).unwrap();
    write.copy_in(0, 0, &bytes).unwrap();
    assert_eq!(write.commit(0, checksum(&bytes)).unwrap(), Commit::Stored);
    drop((write, opened, client));
    let stores = of(&daemon.lines(), "store");
    let ends: Vec<(&Value, &Value)> = stores.iter().map(|line| (&line["outcome"], &line["chunks"])).collect();
    assert_eq!(ends, [(&json!("corrupt"), &json!(0)), (&json!("unfinished"), &json!(1))]);
}

#[test]
fn a_read_by_layers_says_what_was_handed_over() {
    let daemon = Daemon::start();
    let client = daemon.attach();
    let names = chain(&client, 2);
    let opened = client.open(&names).unwrap();
    let mut write = opened.write(0, 2).unwrap();
    write.write_chunk(0, &vec![1; CHUNK_BYTES]).unwrap();
    write.write_chunk(1, &vec![2; CHUNK_BYTES]).unwrap();
    drop(write);
    let mut layers = client.open(&names).unwrap().retrieve_layers(0).unwrap();
    let mut n_layers = 0;
    while n_layers < 3 && layers.next_layer().unwrap().is_some() {
        n_layers += 1;
    }
    assert_eq!(n_layers, 3);
    drop((layers, opened, client));
    let reads = of(&daemon.lines(), "read");
    assert_eq!(reads.len(), 1);
    assert_eq!((&reads[0]["chunks"], &reads[0]["tokens"]), (&json!(2), &json!(64)));
    // Three of four layers.
    assert_eq!(reads[0]["bytes"], 2 * CHUNK_BYTES * 3 / 4);
}

#[test]
fn a_client_with_a_wrong_token_is_written_down_without_a_tenant() {
    let daemon = Daemon::start();
    let wrong = "the token of another tenant";
    assert!(NodeClient::attach(&daemon.options(wrong)).is_err());
    let log = &daemon.log;
    let lines = daemon.lines();
    let refused = of(&lines, "refused");
    assert_eq!(refused, [json!({"outcome": "`token` is another; allowed: that of a tenant"})]);
    assert_eq!(lines.len(), 1);
    // Neither tokens nor anything of a prompt.
    let text = std::fs::read_to_string(log).unwrap();
    assert!(!text.contains(wrong) && !text.contains("a token of acme"), "{text}");
    assert_eq!(std::fs::metadata(log).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_client_that_watches_is_written_down_too() {
    /// Hears and does nothing.
    #[derive(Debug)]
    struct Deaf;
    impl ChunkObserver for Deaf {
        fn changed(&self, _changes: &[ChunkChange]) {}
    }
    let daemon = Daemon::start();
    let client = daemon.attach();
    let options = daemon.options("a token of acme, long");
    let watch = NodeWatch::start(options, client.space().clone(), Arc::new(Deaf)).unwrap();
    let begin = Instant::now();
    while !std::fs::read_to_string(&daemon.log).unwrap().contains("\"outcome\":\"watch\"") {
        assert!(begin.elapsed() < Duration::from_secs(30), "no line of the watch");
        std::thread::yield_now();
    }
    drop((watch, client));
    let lines = daemon.lines();
    assert_eq!((of(&lines, "attach").len(), of(&lines, "detach").len()), (2, 2));
}

#[test]
fn a_log_that_cannot_be_written_is_refused_at_the_start_by_its_setting() {
    let folder = tempfile::tempdir().unwrap();
    let options = node_options(folder.path(), &folder.path().join("missing/audit.jsonl"));
    let error = NodeServer::start(options).unwrap_err().to_string();
    assert!(error.contains("`audit_log` is") && error.contains("missing/audit.jsonl"), "{error}");
}

#[test]
fn what_a_managing_client_does_is_written_down() {
    let daemon = Daemon::start();
    let client = daemon.attach();
    let names = chain(&client, 3);
    let opened = client.open(&names).unwrap();
    let mut write = opened.write(0, 2).unwrap();
    write.write_chunk(0, &vec![1; CHUNK_BYTES]).unwrap();
    write.write_chunk(1, &vec![2; CHUNK_BYTES]).unwrap();
    drop((write, opened, client));
    let manager = NodeManager::new(daemon.options("a token of acme, long"));
    manager.lookup(&names, false).unwrap();
    manager.prefetch(&names, None).unwrap();
    assert_eq!(manager.pin(&names).unwrap(), 64);
    assert!(manager.unpin(&names).unwrap() && !manager.unpin(&names).unwrap());
    manager.relocate(&names, TierKind::Ram, TierKind::Nvme, true).unwrap();
    manager.clear(Some(&names), None).unwrap();
    manager.clear(None, None).unwrap();
    drop(manager);
    let lines = daemon.lines();
    assert_eq!(of(&lines, "attach").last().unwrap()["outcome"], "manage");
    let (first, second) = (names.names()[0].to_string(), names.names()[1].to_string());
    let said = |operation: &str| -> Vec<Value> {
        of(&lines, operation)
            .iter()
            .map(|line| json!([line["chunks"], line["tokens"], line["outcome"]]))
            .collect()
    };
    assert_eq!(said("prefetch"), [json!([3, 96, "begun"])]);
    assert_eq!(said("pin"), [json!([2, 64, "truncated"])]);
    assert_eq!(said("unpin"), [json!([3, 96, "done"]), json!([0, 0, "not_pinned"])]);
    assert_eq!(said("move"), [json!([0, 0, "copied from ram to nvme"])]);
    assert_eq!(said("clear"), [json!([2, 64, "done"]), json!([0, 0, "done"])]);
    let pin = &of(&lines, "pin")[0];
    assert_eq!(
        (&pin["tenant"], &pin["first_chunk"], &pin["last_chunk"]),
        (&json!("acme"), &json!(first), &json!(second))
    );
    assert!(of(&lines, "lookup").is_empty(), "a look changes nothing");
}
