//! Following a worker: what the feeds are told is what the worker holds, whatever happens to the connection.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

#[path = "../../../../tests/support/poll.rs"]
mod poll;
mod support;

use std::collections::BTreeSet;

use kvik_index::holders::Tier;
use kvik_indexer::feed::Naming;
use kvik_proto::client::{TlsClientConfig, WorkerClient, http_client};
use kvik_proto::kv_stream::{Frame, KvBatch, KvChange, KvKey, KvTier, SnapshotPart};
use kvik_runtime::shutdown::Shutdown;
use kvik_worker::{Running, StoreConfig, Worker, WorkerConfig};
use poll::poll;
use support::{FakeWorker, Following, PATIENCE, Recorded, group, hello, until};

async fn start(folder: &std::path::Path, listen: &str) -> (Running, Shutdown) {
    let nvme = Some(format!("{}:256MiB", folder.display()));
    let config = WorkerConfig {
        listen: listen.to_owned(),
        id: Some("w".to_owned()),
        threads: 1,
        kv_blocks: 39,
        store: StoreConfig { ram: "64MiB".to_owned(), nvme, ..StoreConfig::default() },
        ..WorkerConfig::default()
    };
    let shutdown = Shutdown::new();
    let running = Worker::start(config, &shutdown).await.unwrap();
    (running, shutdown)
}

/// Runs a prompt of 600 tokens.
async fn complete(running: &Running, seed: u32) {
    let prompt: Vec<u32> = (0..600).map(|place| 10 + (place * 31 + seed * 977) % 2000).collect();
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 4}).to_string();
    let request = http::Request::post(format!("http://{}/v1/completions", running.address()))
        .body(http_body_util::Full::new(bytes::Bytes::from(body)))
        .unwrap();
    let answer = http_client(&TlsClientConfig::default()).unwrap().request(request).await.unwrap();
    assert_eq!(answer.status(), 200);
    // The whole answer, so that the engine is done with the request.
    http_body_util::BodyExt::collect(answer.into_body()).await.unwrap();
}

/// What the worker itself finds, by the tokens of the blocks.
async fn truth(running: &Running, group: u32) -> BTreeSet<(Tier, u64)> {
    let http = http_client(&TlsClientConfig::default()).unwrap();
    let client = WorkerClient::new(http, &format!("http://{}", running.address()));
    let page = client.kv_blocks(group, None, 1000).await.unwrap();
    assert!(!page.has_more);
    let tiers = |block: kvik_proto::worker::HeldBlock| {
        block.tiers.into_iter().map(move |tier| (Tier::ALL[tier.as_index()], block.key.0))
    };
    page.blocks.into_iter().flat_map(tiers).collect()
}

/// Waits until the feeds say what the worker holds.
async fn settle(running: &Running, following: &Following) -> [Recorded; 2] {
    poll(PATIENCE, "feeds that hold what the worker holds", async || {
        let expected = [truth(running, 0).await, truth(running, 1).await];
        let told = [16, 256].map(|block_tokens| following.feeds.recorded(block_tokens).unwrap_or_default());
        let is_settled = [&told[0].held, &told[1].held] == [&expected[0], &expected[1]]
            && !expected[1].is_empty()
            && told[0].due == told[1].due;
        is_settled.then_some(told)
    })
    .await
}

fn stored(sequence: u64, keys: &[u64]) -> Frame {
    let keys = keys.iter().copied().map(KvKey).collect();
    let change = KvChange::Stored { group: 0, tier: KvTier::Gpu, parent: None, keys };
    Frame::Batch(KvBatch { sequence, published_s: 1.0, changes: vec![change] })
}

fn part(group: u32, tier: KvTier, keys: &[u64]) -> Frame {
    Frame::SnapshotPart(SnapshotPart { group, tier, keys: keys.iter().copied().map(KvKey).collect() })
}

fn gpu(keys: &[u64]) -> BTreeSet<(Tier, u64)> {
    keys.iter().map(|key| (Tier::Gpu, *key)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_feeds_of_a_worker_know_what_it_holds_also_after_its_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (running, shutdown) = start(folder.path(), "127.0.0.1:0").await;
    let address = running.address();
    let following = Following::start(&format!("http://{address}"), "w", running.model_name());
    for seed in [1, 2, 1] {
        complete(&running, seed).await;
        settle(&running, &following).await;
    }
    let before = settle(&running, &following).await;
    assert!(0 < before[0].n_empty_batches && 0 < before[1].n_empty_batches, "both count every batch");
    assert_eq!((before[0].n_replaced, before[1].n_replaced), (1, 1));
    let feeds = following.feeds.open_feeds();
    assert_eq!(feeds[&16].name, feeds[&256].name);
    assert_eq!((feeds[&16].name.worker.as_str(), feeds[&16].name.rank), ("w", 0));
    assert_ne!(feeds[&16].naming, feeds[&256].naming);
    shutdown.finish().await;
    running.closed().await;

    let (running, shutdown) = start(folder.path(), &address.to_string()).await;
    let after = settle(&running, &following).await;
    assert!(before[0].epoch < after[0].epoch);
    assert_eq!(after[0].held, BTreeSet::new(), "the engine of a new epoch has nothing");
    assert!(after[1].held.iter().all(|(tier, _)| *tier == Tier::Disk));
    assert_eq!(following.feeds.n_opened(), 2, "the same feeds go on");
    complete(&running, 3).await;
    settle(&running, &following).await;

    let feeds = following.end().await;
    assert!(feeds.open_feeds().is_empty(), "a worker that has left is forgotten");
    shutdown.finish().await;
}

#[tokio::test]
async fn a_broken_connection_goes_on_from_what_is_due() {
    let fake = FakeWorker::start().await;
    let following = Following::start(&fake.address, "w", "m");
    let mut stream = fake.accept().await;
    assert_eq!(stream.target, "/kv/events");
    let snapshot = [part(0, KvTier::Gpu, &[1, 2]), part(1, KvTier::Disk, &[7])];
    stream.send(&[hello(5, None)]).await;
    stream.send(&snapshot).await;
    stream.send(&[Frame::SnapshotEnd { next_sequence: 3 }, stored(3, &[4])]).await;
    let recorded = following.feeds.until(|recorded| recorded.due == Some(4)).await;
    assert_eq!((recorded.epoch, recorded.held), (Some(5), gpu(&[1, 2, 4])));
    let chunks = following.feeds.recorded(256).unwrap();
    assert_eq!((chunks.held, chunks.due), (BTreeSet::from([(Tier::Disk, 7)]), Some(4)));
    assert_eq!(
        following.feeds.open_feeds()[&16].naming,
        Naming::Kvik { root: group(0, 16).root, block_tokens: 16 }
    );
    drop(stream);

    let mut stream = fake.accept().await;
    assert_eq!(stream.target, "/kv/events?epoch=5&from=4");
    // What comes twice counts once.
    stream.send(&[hello(5, Some(4)), stored(3, &[4]), stored(4, &[5])]).await;
    let recorded = following.feeds.until(|recorded| recorded.due == Some(5)).await;
    assert_eq!((recorded.held, recorded.n_replaced), (gpu(&[1, 2, 4, 5]), 1));

    // In the middle of a stream, to one that was too slow.
    stream.send(&[part(0, KvTier::Gpu, &[9]), Frame::SnapshotEnd { next_sequence: 70 }]).await;
    let recorded = following.feeds.until(|recorded| recorded.due == Some(70)).await;
    assert_eq!((recorded.held, recorded.n_replaced), (gpu(&[9]), 2));
    following.end().await;
    stream.gone().await;
}

#[tokio::test]
async fn a_gap_and_what_no_event_can_say_are_answered_with_a_snapshot() {
    let fake = FakeWorker::start().await;
    let following = Following::start(&fake.address, "w", "m");
    let clear_one = KvChange::Cleared { tier: Some(KvTier::Gpu) };
    let odd = Frame::Batch(KvBatch { sequence: 1, published_s: 1.0, changes: vec![clear_one] });
    for (round, bad) in [stored(9, &[4]), odd, hello(5, None), part(0, KvTier::Gpu, &[3])].iter().enumerate()
    {
        let mut stream = fake.accept().await;
        assert_eq!(stream.target, "/kv/events", "{bad:?}");
        let end = Frame::SnapshotEnd { next_sequence: 1 };
        stream.send(&[hello(5, None), part(0, KvTier::Gpu, &[1]), end, bad.clone()]).await;
        if let Frame::SnapshotPart(_) = bad {
            // A batch where the rest of a snapshot should be.
            stream.send(&[stored(1, &[8])]).await;
        }
        stream.gone().await;
        let recorded = following.feeds.recorded(16).unwrap();
        assert_eq!((recorded.held, recorded.n_replaced), (gpu(&[1]), round + 1), "{bad:?}");
    }
    let clear_all = KvChange::Cleared { tier: None };
    let clear = Frame::Batch(KvBatch { sequence: 1, published_s: 1.0, changes: vec![clear_all] });
    let mut stream = fake.accept().await;
    stream.send(&[hello(5, None), part(1, KvTier::Cpu, &[1]), Frame::SnapshotEnd { next_sequence: 1 }]).await;
    stream.send(&[clear]).await;
    following.feeds.until(|recorded| recorded.due == Some(2)).await;
    until(|| following.feeds.recorded(256).filter(|chunks| chunks.held.is_empty() && chunks.due == Some(2)))
        .await;
    following.end().await;
}

#[tokio::test]
async fn bytes_that_are_no_frames_another_worker_and_a_greedy_one_change_nothing() {
    let fake = FakeWorker::start().await;
    let following = Following::start(&fake.address, "other", "m");
    let mut stream = fake.accept().await;
    stream.send(&[hello(5, None), Frame::SnapshotEnd { next_sequence: 1 }]).await;
    stream.gone().await;
    let mut stream = fake.accept().await;
    stream.send_bytes(b"\xff\xff\xff\xff what?").await;
    stream.gone().await;
    let mut stream = fake.accept().await;
    let Frame::Hello(mut greedy) = hello(5, None) else { unreachable!() };
    greedy.worker = "other".to_owned();
    greedy.groups = (0..9).map(|number| group(number, 16)).collect();
    stream.send(&[Frame::Hello(greedy)]).await;
    stream.gone().await;
    // It asks again.
    let _stream = fake.accept().await;
    assert_eq!(following.feeds.n_opened(), 0);
    following.end().await;
}

#[tokio::test]
async fn a_worker_whose_clock_was_set_back_is_known_anew_and_so_is_one_with_other_keys() {
    let fake = FakeWorker::start().await;
    let following = Following::start(&fake.address, "w", "m");
    let snapshot = |epoch| [hello(epoch, None), Frame::SnapshotEnd { next_sequence: 0 }];
    let mut stream = fake.accept().await;
    stream.send(&snapshot(5)).await;
    following.feeds.until(|recorded| recorded.epoch == Some(5)).await;
    following.feeds.open_feeds()[&16].set_epoch(9);
    drop(stream);
    for _ in 0..2 {
        let mut stream = fake.accept().await;
        stream.send(&snapshot(6)).await;
        stream.gone().await;
    }
    let mut stream = fake.accept().await;
    stream.send(&snapshot(6)).await;
    following.feeds.until(|recorded| recorded.epoch == Some(6)).await;
    assert_eq!(following.feeds.n_opened(), 4);
    drop(stream);

    let mut stream = fake.accept().await;
    let Frame::Hello(mut other) = hello(7, None) else { unreachable!() };
    other.groups = vec![group(3, 16)];
    stream.send(&[Frame::Hello(other), Frame::SnapshotEnd { next_sequence: 0 }]).await;
    following.feeds.until(|recorded| recorded.epoch == Some(7)).await;
    assert_eq!(following.feeds.open_feeds().len(), 1);
    following.end().await;
}

/// What is counted of a worker's source.
fn counted(worker: &str, name: &str) -> Option<String> {
    let metrics = kvik_runtime::telemetry::render_metrics();
    let series = metrics.lines().filter(|line| line.starts_with(&format!("kvik_index_source_{name}{{")));
    let mut series = series.filter(|line| line.contains(&format!("source=\"{worker}\"")));
    series.next().and_then(|line| line.rsplit(' ').next().map(str::to_owned))
}

#[tokio::test]
async fn what_comes_from_a_worker_is_counted() {
    kvik_runtime::telemetry::start_metrics().unwrap();
    let until_counted = async |expected: [(&str, u64); 6]| {
        let is_so = |(name, count): &(&str, u64)| counted("counted", name) == Some(count.to_string());
        until(|| expected.iter().all(is_so).then_some(())).await;
    };
    let hello = |epoch, resumes_at| {
        let Frame::Hello(hello) = hello(epoch, resumes_at) else { unreachable!() };
        Frame::Hello(kvik_proto::kv_stream::Hello { worker: "counted".to_owned(), ..hello })
    };
    let end = |next_sequence| Frame::SnapshotEnd { next_sequence };
    let fake = FakeWorker::start().await;
    let following = Following::start(&fake.address, "counted", "m");
    let mut stream = fake.accept().await;
    stream.send(&[hello(5, None), end(1), stored(1, &[4]), stored(2, &[5])]).await;
    let name = [
        "connected",
        "connections_total",
        "batches_total",
        "snapshots_total",
        "gaps_total",
        "restarts_total",
    ];
    let counts = |counts: [u64; 6]| std::array::from_fn(|place| (name[place], counts[place]));
    until_counted(counts([1, 1, 2, 1, 0, 0])).await;
    // A batch is missing: it asks for everything again.
    stream.send(&[stored(9, &[6])]).await;
    stream.gone().await;
    until_counted(counts([0, 1, 3, 1, 1, 0])).await;
    let mut stream = fake.accept().await;
    stream.send(&[hello(5, None), end(10)]).await;
    until_counted(counts([1, 2, 3, 2, 1, 0])).await;
    drop(stream);
    let mut stream = fake.accept().await;
    stream.send(&[hello(6, None), end(0)]).await;
    until_counted(counts([1, 3, 3, 3, 1, 1])).await;
    following.end().await;
    assert_eq!(counted("counted", "connected"), None, "the series of a source end with it");
}

#[tokio::test]
async fn the_store_of_a_worker_is_told_under_its_name_and_forgotten_when_it_is_away() {
    let store = FakeWorker::start().await;
    let following = Following::start_with(&store.address, "http://engine:8000", "llama", Some("my model"));
    let mut stream = store.accept().await;
    assert_eq!(stream.target, "/kv/events?model=my%20model");
    let end = Frame::SnapshotEnd { next_sequence: 7 };
    stream.send(&[hello(3, None), part(0, KvTier::Gpu, &[1, 2]), end.clone()]).await;
    let told = following.feeds.until(|recorded| recorded.due == Some(7)).await;
    assert_eq!(told.held, gpu(&[1, 2]));
    for feed in following.feeds.open_feeds().values() {
        assert_eq!((feed.name.worker.as_str(), feed.name.model.as_str()), ("http://engine:8000", "llama"));
    }
    // A stream that ends is asked for what is due.
    drop(stream);
    let mut stream = store.accept().await;
    assert_eq!(stream.target, "/kv/events?model=my%20model&epoch=3&from=7");
    stream.send(&[hello(3, Some(7)), stored(7, &[3])]).await;
    assert_eq!(following.feeds.until(|recorded| recorded.due == Some(8)).await.held, gpu(&[1, 2, 3]));
    let address = store.address.trim_start_matches("http://").to_owned();
    drop((stream, store));
    until(|| following.feeds.open_feeds().is_empty().then_some(())).await;
    let store = FakeWorker::start_at(&address).await;
    let mut stream = store.accept().await;
    assert_eq!(stream.target, "/kv/events?model=my%20model", "all of it is asked for");
    stream.send(&[hello(4, None), end]).await;
    assert!(following.feeds.until(|recorded| recorded.due == Some(7)).await.held.is_empty());
    following.end().await;
}
