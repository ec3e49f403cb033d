//! Feeds that write down what they are told, and a worker that says what the test wants.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use kvik_index::holders::{Tier, Verdict};
use kvik_indexer::Result;
use kvik_indexer::feed::{Feed, FeedBatch, FeedName, Feeds, Holding, Naming};
use kvik_indexer::sources::worker::{FollowedWorker, follow_worker};
use kvik_proto::client::{TlsClientConfig, WorkerClient, http_client};
use kvik_proto::events::{KvEvent, Medium};
use kvik_proto::kv_stream::{BlockGroup, Frame, Hello};
use kvik_types::BlockHash;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::poll::poll;

/// Longer than any wait takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// Opens feeds that write down what they are told.
#[derive(Debug, Default)]
pub(crate) struct RecordingFeeds {
    opened: Mutex<Vec<Arc<RecordingFeed>>>,
}

/// What one feed was told.
#[derive(Debug)]
pub(crate) struct RecordingFeed {
    pub(crate) name: FeedName,
    pub(crate) naming: Naming,
    state: Mutex<Recorded>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Recorded {
    pub(crate) epoch: Option<u64>,
    pub(crate) due: Option<u64>,
    pub(crate) held: BTreeSet<(Tier, u64)>,
    pub(crate) n_replaced: usize,
    pub(crate) n_batches: usize,
    pub(crate) n_empty_batches: usize,
    pub(crate) is_closed: bool,
}

impl RecordingFeeds {
    /// The feeds that are open, by the tokens of their blocks.
    pub(crate) fn open_feeds(&self) -> BTreeMap<u32, Arc<RecordingFeed>> {
        let opened = self.opened.lock();
        let open = opened.iter().filter(|feed| !feed.state.lock().is_closed);
        open.map(|feed| (feed.block_tokens(), Arc::clone(feed))).collect()
    }

    /// The state of the open feed of blocks of so many tokens.
    pub(crate) fn recorded(&self, block_tokens: u32) -> Option<Recorded> {
        self.open_feeds().get(&block_tokens).map(|feed| feed.recorded())
    }

    pub(crate) fn n_opened(&self) -> usize {
        self.opened.lock().len()
    }

    /// Waits for what the feed of token blocks was told.
    pub(crate) async fn until(&self, fits: impl Fn(&Recorded) -> bool) -> Recorded {
        until(|| self.recorded(16).filter(&fits)).await
    }
}

/// Waits until there is something.
pub(crate) async fn until<T>(look: impl Fn() -> Option<T>) -> T {
    poll(PATIENCE, "what is looked for", async || look()).await
}

impl Feeds for RecordingFeeds {
    fn open(&self, name: FeedName, naming: Naming) -> BoxFuture<'_, Result<Arc<dyn Feed>>> {
        let feed = Arc::new(RecordingFeed { name, naming, state: Mutex::default() });
        self.opened.lock().push(Arc::clone(&feed));
        async move { Ok(feed as Arc<dyn Feed>) }.boxed()
    }
}

impl RecordingFeed {
    pub(crate) fn recorded(&self) -> Recorded {
        self.state.lock().clone()
    }

    pub(crate) fn set_epoch(&self, epoch: u64) {
        self.state.lock().epoch = Some(epoch);
    }

    fn block_tokens(&self) -> u32 {
        match self.naming {
            Naming::Kvik { block_tokens, .. } => block_tokens,
            Naming::Learned | Naming::Bridged => panic!("a worker of kvik names its blocks"),
        }
    }
}

impl Feed for RecordingFeed {
    fn apply(&self, batch: FeedBatch) -> BoxFuture<'_, Result<Verdict>> {
        let mut state = self.state.lock();
        let verdict = state.judge(&batch);
        if verdict == Verdict::Applied {
            state.due = Some(batch.sequence + 1);
            state.n_batches += 1;
            state.n_empty_batches += usize::from(batch.events.is_empty());
            for event in batch.events {
                state.apply(event);
            }
        }
        async move { Ok(verdict) }.boxed()
    }

    fn replace(&self, holding: Holding) -> BoxFuture<'_, Result<bool>> {
        let mut state = self.state.lock();
        let is_new = state.epoch <= holding.epoch;
        if is_new {
            state.epoch = holding.epoch;
            state.due = Some(holding.next_sequence);
            let blocks = |(tier, keys): (Tier, Vec<_>)| {
                keys.into_iter().map(move |key: kvik_index::holders::BlockKey| (tier, key.0))
            };
            state.held = holding.runs.into_iter().flat_map(blocks).collect();
            state.n_replaced += 1;
        }
        async move { Ok(is_new) }.boxed()
    }

    fn skip_gap(&self, _next: u64) -> BoxFuture<'_, Result<()>> {
        panic!("a worker of kvik is asked for a snapshot")
    }

    fn position(&self) -> BoxFuture<'_, Result<(Option<u64>, Option<u64>)>> {
        let state = self.state.lock();
        let position = (state.epoch, state.due);
        async move { Ok(position) }.boxed()
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        self.state.lock().is_closed = true;
        async { Ok(()) }.boxed()
    }
}

impl Recorded {
    fn judge(&self, batch: &FeedBatch) -> Verdict {
        assert!(!self.is_closed, "a batch for a closed feed");
        let expected = self.due.unwrap_or(0);
        match batch.epoch.cmp(&self.epoch) {
            std::cmp::Ordering::Less => Verdict::OldEpoch,
            std::cmp::Ordering::Greater => Verdict::Gap { expected: 0, got: batch.sequence },
            std::cmp::Ordering::Equal if batch.sequence < expected => Verdict::Duplicate,
            std::cmp::Ordering::Equal if expected < batch.sequence => {
                Verdict::Gap { expected, got: batch.sequence }
            }
            std::cmp::Ordering::Equal => Verdict::Applied,
        }
    }

    /// No event may say what was so before.
    fn apply(&mut self, event: KvEvent) {
        match event {
            KvEvent::Stored(stored) => {
                assert!(stored.tokens.is_empty());
                for hash in stored.hashes {
                    assert!(self.held.insert((tier_of(stored.medium), hash.0)));
                }
            }
            KvEvent::Removed(removed) => {
                for hash in removed.hashes {
                    assert!(self.held.remove(&(tier_of(removed.medium), hash.0)));
                }
            }
            KvEvent::Cleared => self.held.clear(),
        }
    }
}

fn tier_of(medium: Medium) -> Tier {
    match medium {
        Medium::Gpu => Tier::Gpu,
        Medium::Cpu => Tier::Cpu,
        Medium::Disk => Tier::Disk,
        Medium::Remote => Tier::Remote,
    }
}

/// A task that follows a worker.
pub(crate) struct Following {
    pub(crate) feeds: Arc<RecordingFeeds>,
    left: CancellationToken,
    task: JoinHandle<()>,
}

impl Following {
    pub(crate) fn start(address: &str, worker: &str, model: &str) -> Self {
        Self::start_with(address, worker, model, None)
    }

    /// Follows the store daemon of a worker, which knows the model by another name.
    pub(crate) fn start_with(address: &str, worker: &str, model: &str, store_model: Option<&str>) -> Self {
        let feeds = Arc::new(RecordingFeeds::default());
        let left = CancellationToken::new();
        let followed = FollowedWorker {
            address: address.to_owned(),
            worker: worker.to_owned(),
            model: model.to_owned(),
            store_model: store_model.map(str::to_owned),
        };
        let client = WorkerClient::new(http_client(&TlsClientConfig::default()).unwrap(), address);
        let task = tokio::spawn(follow_worker(client, followed, Arc::clone(&feeds) as _, left.clone()));
        Self { feeds, left, task }
    }

    /// Says that the worker has left and waits for the end.
    pub(crate) async fn end(self) -> Arc<RecordingFeeds> {
        self.left.cancel();
        self.task.await.unwrap();
        self.feeds
    }
}

/// A server that answers every request with the frames that the test gives.
pub(crate) struct FakeWorker {
    listener: TcpListener,
    pub(crate) address: String,
}

/// A listener that the fake has.
pub(crate) struct FakeStream {
    socket: TcpStream,
    /// The path and query that was asked for.
    pub(crate) target: String,
}

impl FakeWorker {
    pub(crate) async fn start() -> Self {
        Self::start_at("127.0.0.1:0").await
    }

    pub(crate) async fn start_at(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        Self { listener, address }
    }

    /// Waits for the next listener.
    pub(crate) async fn accept(&self) -> FakeStream {
        let (mut socket, _) = self.listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        let target = head.split(' ').nth(1).unwrap().to_owned();
        socket.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n").await.unwrap();
        FakeStream { socket, target }
    }
}

impl FakeStream {
    pub(crate) async fn send(&mut self, frames: &[Frame]) {
        let mut bytes = Vec::new();
        for frame in frames {
            frame.encode(&mut bytes);
        }
        self.send_bytes(&bytes).await;
    }

    pub(crate) async fn send_bytes(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).await.unwrap();
    }

    /// Waits until the listener has gone.
    pub(crate) async fn gone(&mut self) {
        let _ = self.socket.read_u8().await;
    }
}

pub(crate) fn group(number: u32, block_tokens: u32) -> BlockGroup {
    BlockGroup { number, block_tokens, root: BlockHash([number as u8; 16]) }
}

pub(crate) fn hello(epoch: u64, resumes_at: Option<u64>) -> Frame {
    Frame::Hello(Hello {
        worker: "w".to_owned(),
        epoch,
        model: "m".to_owned(),
        groups: vec![group(0, 16), group(1, 256)],
        resumes_at,
    })
}
