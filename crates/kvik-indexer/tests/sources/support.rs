//! What the tests of sources share: feeds that write down what they are told.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, IndexConfig, LookupOptions, Matches, SourceId, Tier, Verdict,
    WorkerMatch,
};
use kvik_indexer::feed::{Feed, FeedBatch, FeedName, Feeds, Holding, Naming};
use kvik_indexer::{IndexerError, Result};
use kvik_proto::events::{EngineHash, KvEvent};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// No condition in these tests takes so long, on any machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// One call of a feed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Call {
    Applied(FeedBatch, Verdict),
    Replaced(Holding),
    Skipped(u64),
    Closed,
}

/// Takes what engines say in the engines' own hashes, and remembers every call.
#[derive(Debug, Default, Clone)]
pub(crate) struct Recorder {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    index: Mutex<HolderIndex>,
    calls: Mutex<HashMap<FeedName, Vec<Call>>>,
    /// Calls that fail from now on, as if the index were away.
    n_failures: Mutex<u32>,
    changed: Notify,
}

#[derive(Debug)]
struct RecordedFeed {
    shared: Arc<Shared>,
    name: FeedName,
    source: SourceId,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            index: Mutex::new(HolderIndex::new(IndexConfig::default())),
            calls: Mutex::default(),
            n_failures: Mutex::default(),
            changed: Notify::new(),
        }
    }
}

impl Recorder {
    pub(crate) fn feeds(&self) -> Arc<dyn Feeds> {
        Arc::new(self.clone())
    }

    /// The next calls fail.
    pub(crate) fn fail(&self, n_failures: u32) {
        *self.shared.n_failures.lock() = n_failures;
    }

    pub(crate) fn n_failures_left(&self) -> u32 {
        *self.shared.n_failures.lock()
    }

    pub(crate) fn calls(&self, name: &FeedName) -> Vec<Call> {
        self.shared.calls.lock().get(name).cloned().unwrap_or_default()
    }

    pub(crate) fn names(&self) -> Vec<FeedName> {
        self.shared.calls.lock().keys().cloned().collect()
    }

    /// The numbers that were applied, in order.
    pub(crate) fn applied(&self, name: &FeedName) -> Vec<u64> {
        let applied = |call: &Call| match call {
            Call::Applied(batch, Verdict::Applied | Verdict::Restarted) => Some(batch.sequence),
            _ => None,
        };
        self.calls(name).iter().filter_map(applied).collect()
    }

    pub(crate) fn skipped(&self, name: &FeedName) -> Vec<u64> {
        let skipped = |call: &Call| if let Call::Skipped(next) = call { Some(*next) } else { None };
        self.calls(name).iter().filter_map(skipped).collect()
    }

    /// Whether the worker has the block, and whether it is unsure.
    pub(crate) fn holds(&self, name: &FeedName, hash: u64) -> Option<bool> {
        let mut matches = Matches::default();
        let index = self.shared.index.lock();
        index.reader().lookup(&[BlockKey(hash)], LookupOptions::default(), &mut matches);
        let source = index.source(&key(name), name.rank)?;
        matches.rows().iter().find(|row| row.source() == source).map(WorkerMatch::is_unsure)
    }

    /// Waits until a condition holds.
    pub(crate) async fn until(&self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let wait = async {
            loop {
                let changed = self.shared.changed.notified();
                if condition(self) {
                    return;
                }
                // The condition may also be about counters, which send no notification.
                let _ = tokio::time::timeout(Duration::from_millis(5), changed).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, wait).await;
        assert!(waited.is_ok(), "waited in vain until {what}: {:#?}", self.shared.calls.lock());
    }

    pub(crate) async fn until_applied(&self, name: &FeedName, sequences: &[u64]) {
        self.until(&format!("{name:?} has {sequences:?}"), |recorder| recorder.applied(name) == sequences)
            .await;
    }
}

impl Shared {
    fn note(&self, name: &FeedName, call: Call) {
        self.calls.lock().entry(name.clone()).or_default().push(call);
        self.changed.notify_waiters();
    }

    fn may_fail(&self) -> Result<()> {
        let mut n_failures = self.n_failures.lock();
        if *n_failures == 0 {
            return Ok(());
        }
        *n_failures -= 1;
        Err(IndexerError::Unavailable { operation: "ask", reason: "the test says so".to_owned() })
    }
}

fn key(name: &FeedName) -> String {
    format!("{}@{}", name.worker, name.model)
}

impl Feeds for Recorder {
    fn open(&self, name: FeedName, naming: Naming) -> BoxFuture<'_, Result<Arc<dyn Feed>>> {
        async move {
            self.shared.may_fail()?;
            assert_eq!(naming, Naming::Learned);
            let source = self.shared.index.lock().add_source(&key(&name), name.rank)?;
            self.shared.calls.lock().entry(name.clone()).or_default();
            let feed: Arc<dyn Feed> =
                Arc::new(RecordedFeed { shared: Arc::clone(&self.shared), name, source });
            Ok(feed)
        }
        .boxed()
    }
}

impl Feed for RecordedFeed {
    fn apply(&self, batch: FeedBatch) -> BoxFuture<'_, Result<Verdict>> {
        async move {
            self.shared.may_fail()?;
            let keys = |hashes: &[EngineHash]| hashes.iter().map(|hash| BlockKey(hash.0)).collect::<Vec<_>>();
            let runs: Vec<Vec<BlockKey>> = batch
                .events
                .iter()
                .map(|event| match event {
                    KvEvent::Stored(stored) => keys(&stored.hashes),
                    KvEvent::Removed(removed) => keys(&removed.hashes),
                    KvEvent::Cleared => Vec::new(),
                })
                .collect();
            let events: Vec<Event<'_>> = batch
                .events
                .iter()
                .zip(&runs)
                .map(|(event, keys)| match event {
                    KvEvent::Stored(_) => Event::Stored { tier: Tier::Gpu, parent: None, keys },
                    KvEvent::Removed(_) => Event::Removed { tier: Tier::Gpu, keys },
                    KvEvent::Cleared => Event::Cleared { tier: None },
                })
                .collect();
            let verdict = self.shared.index.lock().apply(&Batch {
                source: self.source,
                epoch: batch.epoch,
                sequence: batch.sequence,
                replayed: batch.replayed,
                events: &events,
            });
            self.shared.note(&self.name, Call::Applied(batch, verdict));
            Ok(verdict)
        }
        .boxed()
    }

    fn replace(&self, holding: Holding) -> BoxFuture<'_, Result<bool>> {
        async move {
            self.shared.may_fail()?;
            let runs = holding.runs.iter().map(|(tier, keys)| (*tier, keys.as_slice()));
            let mut index = self.shared.index.lock();
            let is_taken = index.replace(self.source, holding.epoch, holding.next_sequence, runs);
            drop(index);
            self.shared.note(&self.name, Call::Replaced(holding));
            Ok(is_taken)
        }
        .boxed()
    }

    fn skip_gap(&self, next: u64) -> BoxFuture<'_, Result<()>> {
        async move {
            self.shared.may_fail()?;
            self.shared.index.lock().skip_gap(self.source, next);
            self.shared.note(&self.name, Call::Skipped(next));
            Ok(())
        }
        .boxed()
    }

    fn position(&self) -> BoxFuture<'_, Result<(Option<u64>, Option<u64>)>> {
        async move {
            self.shared.may_fail()?;
            Ok(self.shared.index.lock().position(self.source).unwrap())
        }
        .boxed()
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        async move {
            self.shared.may_fail()?;
            self.shared.index.lock().remove_source(self.source);
            self.shared.note(&self.name, Call::Closed);
            Ok(())
        }
        .boxed()
    }
}
