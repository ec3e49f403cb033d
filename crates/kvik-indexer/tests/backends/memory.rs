//! The book in memory.

use std::fs;

use kvik_index::holders::{BlockKey, Event, IndexConfig, Tier, Walk};
use kvik_indexer::IndexerError;
use kvik_indexer::backend::memory::MemoryBackend;
use kvik_indexer::backend::{Backend as _, KeyedBatch};

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
