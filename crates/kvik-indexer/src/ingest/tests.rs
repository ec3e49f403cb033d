//! Feeds over backends that fail now and then.

use std::sync::atomic::{AtomicU32, Ordering};

use kvik_index::holders::{IndexConfig as HolderConfig, Walk};
use kvik_proto::events::BlocksRemoved;

use super::*;
use crate::IndexerError;
use crate::backend::memory::MemoryBackend;
use crate::backend::{Backend, Row, SourceBlocks, SourceState};
use crate::book::Backends;

const BLOCK_TOKENS: usize = 4;

/// A book in memory whose next writes fail, a given number of them.
#[derive(Debug)]
struct Flaky {
    inner: MemoryBackend,
    failures: Arc<AtomicU32>,
}

#[derive(Debug, Default)]
struct FlakyStorage {
    failures: Arc<AtomicU32>,
}

impl Flaky {
    fn fail(&self) -> Result<()> {
        let left = self.failures.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        match left {
            Ok(_) => Err(IndexerError::Unavailable {
                operation: "write",
                reason: "it was told to fail".to_owned(),
            }),
            Err(_) => Ok(()),
        }
    }
}

impl Backend for Flaky {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn apply<'a>(&'a self, source: &'a SourceName, batch: KeyedBatch<'a>) -> BoxFuture<'a, Result<Verdict>> {
        Box::pin(async move {
            self.fail()?;
            self.inner.apply(source, batch).await
        })
    }

    fn replace<'a>(
        &'a self,
        source: &'a SourceName,
        holding: KeyedHolding<'a>,
    ) -> BoxFuture<'a, Result<bool>> {
        self.inner.replace(source, holding)
    }

    fn skip_gap<'a>(&'a self, source: &'a SourceName, next: u64) -> BoxFuture<'a, Result<()>> {
        self.inner.skip_gap(source, next)
    }

    fn state<'a>(&'a self, source: &'a SourceName) -> BoxFuture<'a, Result<Option<SourceState>>> {
        self.inner.state(source)
    }

    fn states(&self) -> BoxFuture<'_, Result<Vec<SourceState>>> {
        self.inner.states()
    }

    fn remove_source<'a>(&'a self, source: &'a SourceName) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            self.fail()?;
            self.inner.remove_source(source).await
        })
    }

    fn forget<'a>(&'a self, source: &'a SourceName, keys: &'a [BlockKey]) -> BoxFuture<'a, Result<()>> {
        self.inner.forget(source, keys)
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey], walk: Walk) -> BoxFuture<'a, Result<Vec<Row>>> {
        self.inner.lookup(keys, walk)
    }

    fn blocks_of<'a>(
        &'a self,
        source: &'a SourceName,
        from: Option<u64>,
        limit: usize,
    ) -> BoxFuture<'a, Result<SourceBlocks>> {
        self.inner.blocks_of(source, from, limit)
    }
}

impl Backends for FlakyStorage {
    fn open(&self, _: &str, _: &Keys) -> Result<Arc<dyn Backend>> {
        let inner = MemoryBackend::new(HolderConfig::default());
        Ok(Arc::new(Flaky { inner, failures: Arc::clone(&self.failures) }))
    }

    fn known<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<Keys>>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn announce<'a>(&'a self, _: &'a str, _: &'a Keys) -> BoxFuture<'a, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

fn feed() -> (ModelFeed, Arc<Books>, Arc<AtomicU32>) {
    let storage = FlakyStorage::default();
    let failures = Arc::clone(&storage.failures);
    let books = Arc::new(Books::new("m", Arc::new(storage)));
    let learning = Learning {
        seeds: Arc::new([]),
        own_block_tokens: BlockSize::try_new(BLOCK_TOKENS).unwrap(),
        bridge: BridgeConfig::default(),
    };
    let source = SourceName { worker: "a".into(), rank: 0 };
    (ModelFeed::new(Arc::clone(&books), source, Naming::Learned, learning), books, failures)
}

fn batch(sequence: u64, event: KvEvent) -> FeedBatch {
    FeedBatch { epoch: None, sequence, replayed: false, published_s: sequence as f64, events: vec![event] }
}

fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> KvEvent {
    KvEvent::Stored(BlocksStored {
        hashes: hashes.iter().map(|hash| EngineHash(*hash)).collect(),
        parent: parent.map(EngineHash),
        tokens: tokens.to_vec(),
        block_tokens: BLOCK_TOKENS as u32,
        ..BlocksStored::default()
    })
}

async fn n_matched(books: &Books, tokens: &[u32]) -> u32 {
    let found = books.lookup(tokens, None, Walk::Prefix).await.unwrap();
    found.iter().map(|found| found.row.prefix_in.iter().sum()).max().unwrap_or(0)
}

#[tokio::test]
async fn a_batch_that_was_not_taken_counts_once_when_it_is_handed_in_again() {
    let (feed, books, failures) = feed();
    let tokens: Vec<u32> = (0..8).collect();
    failures.store(2, Ordering::Relaxed);
    let event = batch(0, stored(&[1, 2], None, &tokens));
    assert!(feed.apply(event.clone()).await.is_err());
    assert!(feed.apply(event.clone()).await.is_err());
    assert_eq!(feed.apply(event).await.unwrap(), Verdict::Applied);
    assert_eq!(n_matched(&books, &tokens).await, 2);
    let gone = BlocksRemoved { hashes: vec![EngineHash(2)], ..BlocksRemoved::default() };
    assert_eq!(feed.apply(batch(1, KvEvent::Removed(gone))).await.unwrap(), Verdict::Applied);
    assert_eq!(n_matched(&books, &tokens).await, 1, "one removal undoes what was stored once");
}

#[tokio::test]
async fn a_feed_leaves_no_trace_in_a_book_that_it_could_not_leave_at_first() {
    let (feed, books, failures) = feed();
    let tokens: Vec<u32> = (0..8).collect();
    // Nothing is proven by a block with a parent: it goes to the book of the usual keys.
    assert_eq!(feed.apply(batch(0, stored(&[2], Some(1), &tokens[4..]))).await.unwrap(), Verdict::Applied);
    failures.store(1, Ordering::Relaxed);
    let proof = batch(1, stored(&[1], None, &tokens[..4]));
    assert!(feed.apply(proof.clone()).await.is_err());
    assert_eq!(feed.apply(proof).await.unwrap(), Verdict::Gap { expected: 0, got: 1 });
    let mut n_sources = 0;
    for book in books.all() {
        n_sources += book.backend.states().await.unwrap().len();
    }
    assert_eq!(n_sources, 1);
}

fn of_group(event: KvEvent, idx: u32, attention: Attention) -> KvEvent {
    match event {
        KvEvent::Stored(stored) => {
            KvEvent::Stored(BlocksStored { group_idx: Some(idx), attention, ..stored })
        }
        KvEvent::Removed(removed) => KvEvent::Removed(BlocksRemoved { group_idx: Some(idx), ..removed }),
        KvEvent::Cleared => KvEvent::Cleared,
    }
}

fn removed(hashes: &[u64]) -> KvEvent {
    let hashes = hashes.iter().map(|hash| EngineHash(*hash)).collect();
    KvEvent::Removed(BlocksRemoved { hashes, ..BlocksRemoved::default() })
}

/// Hashes that are those of a chain, and others, which are bridged.
fn namings(tokens: &[u32]) -> [Vec<u64>; 2] {
    let keys = usual_keys(BLOCK_TOKENS).unwrap();
    let mut known = Vec::new();
    keys.extend(tokens, &mut known);
    [known.iter().map(|key| key.0).collect(), vec![1, 2]]
}

#[tokio::test]
async fn of_a_hybrid_model_the_blocks_with_full_attention_count() {
    let tokens: Vec<u32> = (0..8).collect();
    for hashes in namings(&tokens) {
        let (feed, books, _) = feed();
        let blocks = stored(&hashes, None, &tokens);
        let window = of_group(blocks.clone(), 0, Attention::Partial);
        let full = of_group(blocks, 1, Attention::Full);
        feed.apply(FeedBatch { events: vec![window, full], ..batch(0, KvEvent::Cleared) }).await.unwrap();
        assert_eq!(n_matched(&books, &tokens).await, 2);
        feed.apply(batch(1, of_group(removed(&hashes[..1]), 0, Attention::Unknown))).await.unwrap();
        assert_eq!(n_matched(&books, &tokens).await, 2);
        feed.apply(batch(2, of_group(removed(&hashes[1..]), 1, Attention::Unknown))).await.unwrap();
        assert_eq!(n_matched(&books, &tokens).await, 1);
    }
}

#[tokio::test]
async fn a_group_with_full_attention_that_shows_late_replaces_the_one_before() {
    let tokens: Vec<u32> = (0..8).collect();
    for hashes in namings(&tokens) {
        let (feed, books, _) = feed();
        let window = of_group(stored(&hashes, None, &tokens), 0, Attention::Partial);
        feed.apply(batch(0, window)).await.unwrap();
        assert_eq!(n_matched(&books, &tokens).await, 2);
        let full = of_group(stored(&hashes[..1], None, &tokens[..BLOCK_TOKENS]), 1, Attention::Full);
        // A gap: nothing of it counts yet.
        feed.apply(batch(2, full.clone())).await.unwrap();
        feed.skip_gap(2).await.unwrap();
        feed.apply(batch(2, full)).await.unwrap();
        assert_eq!(n_matched(&books, &tokens).await, 1);
        feed.apply(batch(3, of_group(removed(&hashes[..1]), 1, Attention::Unknown))).await.unwrap();
        assert_eq!(n_matched(&books, &tokens).await, 0);
    }
}
