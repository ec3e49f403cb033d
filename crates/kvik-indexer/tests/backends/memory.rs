//! The book in memory.

use std::fs;
use std::task::Poll;

use kvik_index::holders::{BlockKey, Event, IndexConfig, Tier, Walk};
use kvik_indexer::IndexerError;
use kvik_indexer::backend::memory::MemoryBackend;
use kvik_indexer::backend::{Backend as _, KeyedBatch, KeyedHolding};

use crate::conformance::{self, rows};
use crate::model::name;

#[test]
fn memory_conforms() {
    let make = |first_sequence| -> Box<dyn kvik_indexer::backend::Backend> {
        Box::new(MemoryBackend::new(IndexConfig { first_sequence, ..IndexConfig::default() }))
    };
    conformance::run(&make, 64);
}

#[tokio::test]
async fn a_saved_book_is_loaded_and_goes_on_where_it_stood() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("book");
    let config = IndexConfig::default();
    assert!(MemoryBackend::load(config, &path).unwrap().is_none());
    let (source, keys) = (name("worker", 3), [1, 2, 3].map(BlockKey));
    let events = [Event::Stored { tier: Tier::Cpu, parent: None, keys: &keys }];
    let batch =
        KeyedBatch { epoch: Some(9), sequence: 0, replayed: false, published_s: 0.0, events: &events };
    let backend = MemoryBackend::new(config);
    backend.save(&path).unwrap();
    backend.apply(&source, batch).await.unwrap();
    backend.save(&path).unwrap();
    let loaded = MemoryBackend::load(config, &path).unwrap().unwrap();
    assert_eq!(rows(&loaded, &keys, Walk::All).await, rows(&backend, &keys, Walk::All).await);
    assert_eq!(loaded.states().await.unwrap(), backend.states().await.unwrap());
    assert_eq!(loaded.state(&source).await.unwrap().unwrap().due_sequence, Some(1));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn a_damaged_or_unreadable_snapshot_is_an_error_and_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("book");
    MemoryBackend::new(IndexConfig::default()).save(&path).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[20] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let error = MemoryBackend::load(IndexConfig::default(), &path).unwrap_err();
    assert!(matches!(error, IndexerError::Index(_)), "{error}");
    let error = MemoryBackend::load(IndexConfig::default(), folder.path()).unwrap_err();
    assert!(matches!(error, IndexerError::Unavailable { .. }), "{error}");
    let nowhere = folder.path().join("missing/book");
    let error = MemoryBackend::new(IndexConfig::default()).save(&nowhere).unwrap_err();
    assert!(matches!(error, IndexerError::Unavailable { operation: "write a snapshot", .. }), "{error}");
}

/// More blocks than a replacement stores in one step.
fn many_runs() -> Vec<(Tier, Vec<BlockKey>)> {
    let run = |number: u64| (0..150_000).map(|block| BlockKey(number << 32 | block)).collect();
    vec![(Tier::Gpu, run(1)), (Tier::Cpu, run(2))]
}

#[tokio::test]
async fn other_changes_go_on_while_a_large_holding_is_taken() {
    let backend = MemoryBackend::new(IndexConfig::default());
    let (large, small, keys) = (name("large", 0), name("small", 0), [7, 8, 9].map(BlockKey));
    let runs = many_runs();
    let replace = backend.replace(&large, KeyedHolding { epoch: Some(1), next_sequence: 4, runs: &runs });
    let events = [Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys }];
    let batch =
        KeyedBatch { epoch: Some(1), sequence: 0, replayed: false, published_s: 0.0, events: &events };
    let change = async {
        backend.apply(&small, batch).await.unwrap();
        assert_eq!(rows(&backend, &keys, Walk::Prefix).await.len(), 1);
        backend.state(&large).await.unwrap().unwrap().n_blocks
    };
    // The first is polled first: it has begun when the change is made.
    let (is_taken, n_blocks_meanwhile) = tokio::join!(biased; replace, change);
    assert!(is_taken.unwrap());
    assert_eq!(n_blocks_meanwhile, Some(0), "the change came between two steps");
    assert_eq!(backend.state(&large).await.unwrap().unwrap().n_blocks, Some(300_000));
}

#[tokio::test]
async fn a_replacement_that_is_dropped_changes_nothing_and_one_that_a_snapshot_meets_begins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("book");
    let backend = MemoryBackend::new(IndexConfig::default());
    let source = name("worker", 0);
    let old = [(Tier::Gpu, vec![BlockKey(1), BlockKey(2)])];
    let holding = |runs| KeyedHolding { epoch: Some(1), next_sequence: 4, runs };
    assert!(backend.replace(&source, holding(&old)).await.unwrap());
    let runs = many_runs();
    {
        let mut replace = backend.replace(&source, holding(&runs));
        assert_eq!(futures_util::poll!(&mut replace).map(Result::unwrap), Poll::Pending);
    }
    while backend.maintain(1 << 16) {}
    assert_eq!(backend.blocks_of(&source, None, 10).await.unwrap().blocks.len(), 2);

    let mut replace = backend.replace(&source, holding(&runs));
    assert_eq!(futures_util::poll!(&mut replace).map(Result::unwrap), Poll::Pending);
    backend.save(&path).unwrap();
    assert!(replace.await.unwrap());
    assert_eq!(backend.state(&source).await.unwrap().unwrap().n_blocks, Some(300_000));
    let saved = MemoryBackend::load(IndexConfig::default(), &path).unwrap().unwrap();
    assert_eq!(saved.state(&source).await.unwrap().unwrap().n_blocks, Some(2));
}
