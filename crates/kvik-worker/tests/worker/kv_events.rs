//! What a worker says it holds, against what it holds.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::TcpStream;

use http::StatusCode;
use kvik_proto::client::{ClientError, KvStream, TlsClientConfig, WorkerClient, http_client};
use kvik_proto::kv_stream::{BlockGroup, Frame, Hello, KvChange, KvKey, KvTier};
use kvik_types::hash::{KvikChain, block_hashes};
use kvik_types::{BlockSize, CacheSalt};
use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::json;

use crate::support::{TestWorker, config, start, start_with};

/// Blocks for one prompt of 600 tokens and its output, but not for two.
const KV_BLOCKS: usize = 39;

type Held = BTreeSet<(u32, KvTier, KvKey)>;

/// A stream and what it says is held.
struct Replica {
    stream: KvStream,
    hello: Hello,
    held: Held,
    next_sequence: Option<u64>,
}

impl Replica {
    async fn open(client: &WorkerClient) -> Self {
        let replica = Self::resume(client, None, Held::new()).await;
        assert_eq!(replica.hello.resumes_at, None);
        replica
    }

    async fn resume(client: &WorkerClient, resume: Option<(u64, u64)>, held: Held) -> Self {
        let mut stream = client.kv_events(resume).await.unwrap();
        let Some(Frame::Hello(hello)) = stream.next().await.unwrap() else { panic!("no hello") };
        let next_sequence = hello.resumes_at;
        let mut replica = Self { stream, hello, held, next_sequence };
        if replica.next_sequence.is_none() {
            replica.held.clear();
            while replica.next_sequence.is_none() {
                replica.advance().await;
            }
        }
        replica
    }

    /// Takes a frame; none may say what was so before.
    async fn advance(&mut self) {
        match self.stream.next().await.unwrap().expect("the stream goes on") {
            Frame::Hello(_) => panic!("a second hello"),
            Frame::SnapshotPart(part) => {
                assert_eq!(self.next_sequence, None);
                for key in part.keys {
                    assert!(self.held.insert((part.group, part.tier, key)));
                }
            }
            Frame::SnapshotEnd { next_sequence } => self.next_sequence = Some(next_sequence),
            Frame::Batch(batch) => {
                assert_eq!(self.next_sequence, Some(batch.sequence));
                self.next_sequence = Some(batch.sequence + 1);
                for change in batch.changes {
                    self.apply(change);
                }
            }
            Frame::Alive { next_sequence } => assert_eq!(self.next_sequence, Some(next_sequence)),
        }
    }

    fn apply(&mut self, change: KvChange) {
        match change {
            KvChange::Stored { group, tier, keys, .. } => {
                for key in keys {
                    assert!(self.held.insert((group, tier, key)), "{key} was stored twice");
                }
            }
            KvChange::Removed { group, tier, keys } => {
                for key in keys {
                    assert!(self.held.remove(&(group, tier, key)), "{key} was removed twice");
                }
            }
            KvChange::Cleared { .. } => panic!("there was no clear"),
        }
    }

    async fn follow(&mut self, next_sequence: u64) {
        while self.next_sequence.unwrap() < next_sequence {
            self.advance().await;
        }
        assert_eq!(self.next_sequence, Some(next_sequence));
    }

    fn group(&self, number: u32) -> BlockGroup {
        *self.hello.groups.iter().find(|group| group.number == number).unwrap()
    }
}

fn client_of(worker: &TestWorker) -> WorkerClient {
    let http = http_client(&TlsClientConfig::default()).unwrap();
    WorkerClient::new(http, &format!("http://{}", worker.running.address()))
}

fn with_store(store: StoreConfig) -> WorkerConfig {
    WorkerConfig { kv_blocks: KV_BLOCKS, store, ..config() }
}

/// Memory, and lower tiers whose chunks are all loaded: how many the planner would compute instead depends on the machine's load.
fn ram() -> StoreConfig {
    StoreConfig { ram: "64MiB".to_owned(), planner: "load_all".to_owned(), ..StoreConfig::default() }
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..600).map(|place| 10 + (place * 31 + seed * 977 + place * place % 97) % 2000).collect()
}

async fn complete(worker: &TestWorker, prompt: &[u32]) {
    worker.client.ask("/v1/completions", &json!({"prompt": prompt, "max_tokens": 4})).await;
    worker.client.wait_for_copies().await;
}

/// The keys of a prompt, computed from the group alone.
fn keys_of(group: BlockGroup, tokens: &[u32]) -> Vec<KvKey> {
    let block_size = BlockSize::try_new(group.block_tokens as usize).unwrap();
    let mut chain = KvikChain::after(group.root, block_size);
    block_hashes(&mut chain, tokens).map(KvKey::from).collect()
}

/// What the worker itself finds in its engine and store, read page by page.
async fn truth(client: &WorkerClient, groups: &[BlockGroup]) -> Held {
    let mut held = Held::new();
    for group in groups {
        let mut after = None;
        loop {
            let page = client.kv_blocks(group.number, after, 7).await.unwrap();
            assert!(page.blocks.is_sorted_by_key(|block| block.key));
            for block in &page.blocks {
                held.extend(block.tiers.iter().map(|tier| (group.number, *tier, block.key)));
            }
            if !page.has_more {
                break;
            }
            after = page.blocks.last().map(|block| block.key);
        }
    }
    held
}

/// Follows until the replica is what the worker has. Disks are written in the background.
async fn settle(client: &WorkerClient, replica: &mut Replica) {
    loop {
        let fresh = Replica::open(client).await;
        replica.follow(fresh.next_sequence.unwrap()).await;
        assert_eq!(replica.held, fresh.held, "a stream and a snapshot differ at the same number");
        if truth(client, &replica.hello.groups).await == replica.held {
            return;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_replayed_stream_is_what_the_worker_holds() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = Some(format!("{}:256MiB", folder.path().display()));
    let worker = start_with(with_store(StoreConfig { nvme, ..ram() })).await;
    let client = client_of(&worker);
    let mut replica = Replica::open(&client).await;
    assert_eq!((replica.held.len(), replica.next_sequence), (0, Some(0)));
    assert_eq!(replica.hello.worker, worker.running.id());
    assert_eq!(replica.hello.model, worker.running.model_name());
    assert_eq!(replica.hello.groups.iter().map(|group| group.block_tokens).collect::<Vec<_>>(), [16, 256]);

    complete(&worker, &prompt(1)).await;
    // What is left of it is in the log.
    let fresh = Replica::open(&client).await;
    for key in keys_of(replica.group(0), &prompt(1)) {
        assert!(fresh.held.contains(&(0, KvTier::Gpu, key)));
    }
    for key in keys_of(replica.group(1), &prompt(1)) {
        assert!(fresh.held.contains(&(1, KvTier::Cpu, key)));
    }
    settle(&client, &mut replica).await;
    for seed in [2, 3, 1, 4, 2] {
        complete(&worker, &prompt(seed)).await;
        settle(&client, &mut replica).await;
    }
    // The first prompt left the engine and is in both tiers of the store.
    for key in keys_of(replica.group(1), &prompt(1)) {
        assert!(
            replica.held.contains(&(1, KvTier::Cpu, key)) && replica.held.contains(&(1, KvTier::Disk, key))
        );
    }
    let n_gpu = replica.held.iter().filter(|(group, ..)| *group == 0).count();
    assert_eq!(n_gpu, worker.client.kv_stats().await.registered_blocks);

    worker.client.ask("/cache/clear", &json!({"tiers": ["ram"]})).await;
    settle(&client, &mut replica).await;
    assert!(!replica.held.iter().any(|(_, tier, _)| *tier == KvTier::Cpu));
    worker.client.ask("/cache/clear", &json!({})).await;
    settle(&client, &mut replica).await;
    assert!(replica.held.iter().all(|(group, ..)| *group == 0));
    worker.end().await;
}

#[tokio::test]
async fn salted_blocks_are_told_under_the_keys_of_their_salt() {
    let worker = start_with(with_store(ram())).await;
    let client = client_of(&worker);
    let mut replica = Replica::open(&client).await;
    let salted = json!({"prompt": prompt(1), "max_tokens": 4, "cache_salt": "tenant-a"});
    worker.client.ask("/v1/completions", &salted).await;
    worker.client.wait_for_copies().await;
    settle(&client, &mut replica).await;
    let salt = CacheSalt::try_new("tenant-a").unwrap();
    for (number, tier) in [(0, KvTier::Gpu), (1, KvTier::Cpu)] {
        let group = replica.group(number);
        for key in keys_of(group, &prompt(1)) {
            assert!(!replica.held.contains(&(number, tier, key)), "an unsalted prompt matches");
        }
        let root = group.root.salted(Some(&salt));
        let keys = keys_of(BlockGroup { root, ..group }, &prompt(1));
        assert!(!keys.is_empty());
        for key in keys {
            assert!(replica.held.contains(&(number, tier, key)), "a prompt of the same salt misses");
        }
    }
    worker.end().await;
}

#[tokio::test]
async fn a_listener_that_comes_back_goes_on_where_it_was() {
    let worker = start_with(with_store(ram())).await;
    let client = client_of(&worker);
    complete(&worker, &prompt(1)).await;
    let Replica { hello, held, next_sequence, .. } = Replica::open(&client).await;
    let next_sequence = next_sequence.unwrap();
    complete(&worker, &prompt(2)).await;

    let mut replica = Replica::resume(&client, Some((hello.epoch, next_sequence)), held).await;
    assert_eq!(replica.hello.resumes_at, Some(next_sequence));
    settle(&client, &mut replica).await;
    assert!(next_sequence < replica.next_sequence.unwrap());

    // A number that was never given out and an epoch that is not the worker's.
    for resume in [(hello.epoch, u64::MAX), (hello.epoch - 1, 0)] {
        let replica = Replica::resume(&client, Some(resume), Held::new()).await;
        assert_eq!(replica.hello.resumes_at, None);
        assert!(!replica.held.is_empty());
    }
    worker.end().await;
}

#[tokio::test]
async fn a_restarted_worker_begins_an_epoch_with_what_its_disk_kept() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = Some(format!("{}:256MiB", folder.path().display()));
    let store = StoreConfig { nvme, ..ram() };
    let worker = start_with(with_store(store.clone())).await;
    complete(&worker, &prompt(1)).await;
    let before = Replica::open(&client_of(&worker)).await;
    worker.end().await;

    let worker = start_with(with_store(store)).await;
    let client = client_of(&worker);
    let resume = Some((before.hello.epoch, before.next_sequence.unwrap()));
    let mut after = Replica::resume(&client, resume, before.held).await;
    assert!(before.hello.epoch < after.hello.epoch);
    assert_eq!(after.hello.groups, before.hello.groups);
    assert_eq!(after.hello.resumes_at, None);
    let chunks = keys_of(after.group(1), &prompt(1));
    assert_eq!(after.held, chunks.into_iter().map(|key| (1, KvTier::Disk, key)).collect());
    settle(&client, &mut after).await;
    worker.end().await;
}

#[tokio::test]
async fn a_listener_that_does_not_read_blocks_no_other() {
    let worker = start_with(with_store(ram())).await;
    let mut silent = Vec::new();
    for _ in 0..3 {
        let mut socket = TcpStream::connect(worker.running.address()).unwrap();
        socket.write_all(b"GET /kv/events HTTP/1.1\r\nHost: w\r\n\r\n").unwrap();
        silent.push(socket);
    }
    let client = client_of(&worker);
    let mut replica = Replica::open(&client).await;
    for seed in 0..6 {
        complete(&worker, &prompt(seed)).await;
    }
    settle(&client, &mut replica).await;
    worker.end().await;
    drop(silent);
}

#[tokio::test]
async fn the_stream_ends_when_the_worker_drains() {
    let worker = start().await;
    let client = client_of(&worker);
    let mut replica = Replica::open(&client).await;
    assert_eq!(replica.hello.groups.len(), 1, "without a store there are no chunks");
    worker.running.drain();
    while replica.stream.next().await.unwrap().is_some() {}
    worker.running.closed().await;
    worker.end().await;
}

#[tokio::test]
async fn bad_questions_are_refused_with_their_field() {
    let worker = start().await;
    for (path, status, field) in [
        ("/kv/events?epoch=1", StatusCode::BAD_REQUEST, "from"),
        ("/kv/events?from=1", StatusCode::BAD_REQUEST, "epoch"),
        ("/kv/events?epoch=x&from=1", StatusCode::BAD_REQUEST, ""),
        ("/kv/blocks?limit=0", StatusCode::BAD_REQUEST, "limit"),
        ("/kv/blocks?limit=65537", StatusCode::BAD_REQUEST, "limit"),
        ("/kv/blocks?after=xyz", StatusCode::BAD_REQUEST, ""),
        ("/kv/blocks?group=1", StatusCode::NOT_FOUND, "group"),
    ] {
        let answer = worker.client.get(path).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
        let expected = if field.is_empty() { serde_json::Value::Null } else { json!(field) };
        assert_eq!(answer.error().1, expected, "{path}");
    }
    let refused = client_of(&worker).kv_blocks(1, None, 1).await.unwrap_err();
    assert!(matches!(refused, ClientError::Refused { status: 404, .. }), "{refused}");
    worker.end().await;
}
