//! What a snapshot folder is worth after a restart.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvik_index::holders::{BlockKey, Tier};
use kvik_indexer::feed::{Feed, FeedName, Feeds as _, Holding, Naming};
use kvik_indexer::{IndexConfig, Indexer};
use kvik_types::BlockHash;
use serde_json::{Value as Json, json};

use crate::engine::{matched, open, prompt, start};

const ROOT: BlockHash = BlockHash([9; 16]);
const MODELS: [&str; 2] = ["one", "two"];
const NAMING: Naming = Naming::Kvik { root: ROOT, block_tokens: 16 };

fn keeping_in(folder: &Path) -> IndexConfig {
    IndexConfig { snapshot_folder: Some(folder.to_owned()), ..IndexConfig::default() }
}

/// All that a worker has: one prompt.
fn holding(tokens: &[u32]) -> Holding {
    let keys: kvik_indexer::keys::Keys = format!("kvik:{ROOT}:16").parse().unwrap();
    let mut blocks: Vec<BlockKey> = Vec::new();
    keys.extend(tokens, &mut blocks);
    Holding { epoch: Some(1), next_sequence: 1, runs: vec![(Tier::Gpu, blocks)] }
}

async fn tell(indexer: &Indexer, worker: &str, tokens: &[u32]) -> Arc<dyn Feed> {
    let feed = open(indexer, worker, NAMING).await;
    assert!(feed.replace(holding(tokens)).await.unwrap());
    feed
}

async fn n_sources(indexer: &Indexer) -> usize {
    let stats = indexer.stats().await.unwrap();
    stats.iter().flat_map(|model| &model.books).map(|book| book.sources.len()).sum()
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_left_while_the_index_was_down_is_forgotten_after_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let config = keeping_in(folder.path());
    let tokens = prompt(1, 8);
    let (indexer, shutdown) = start(&config).await;
    for worker in ["stays", "left"] {
        tell(&indexer, worker, &tokens).await;
    }
    shutdown.finish().await;

    let (indexer, shutdown) = start(&config).await;
    assert_eq!(matched(&indexer, "left", &tokens).await, 128, "it may come back");
    let feed = open(&indexer, "stays", NAMING).await;
    assert_eq!(feed.position().await.unwrap(), (Some(1), Some(1)), "it goes on");
    tokio::time::sleep(Duration::from_mins(9)).await;
    assert_eq!(matched(&indexer, "left", &tokens).await, 128);
    tokio::time::sleep(Duration::from_mins(2)).await;
    assert_eq!(matched(&indexer, "left", &tokens).await, 0);
    assert_eq!(matched(&indexer, "stays", &tokens).await, 128, "it is listened to");
    assert_eq!(n_sources(&indexer).await, 1);
    // It is as new when it comes after all.
    let late = open(&indexer, "left", NAMING).await;
    assert_eq!(late.position().await.unwrap(), (None, Some(0)));
    assert!(late.replace(holding(&tokens)).await.unwrap());
    tokio::time::sleep(Duration::from_mins(30)).await;
    assert_eq!(matched(&indexer, "left", &tokens).await, 128);
    shutdown.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_book_whose_workers_have_all_left_is_used_again_by_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let config = keeping_in(folder.path());
    let tokens = prompt(1, 8);
    let (indexer, shutdown) = start(&config).await;
    tell(&indexer, "left", &tokens).await;
    shutdown.finish().await;

    let (indexer, shutdown) = start(&config).await;
    tokio::time::sleep(Duration::from_mins(11)).await;
    assert_eq!(n_sources(&indexer).await, 0);
    tell(&indexer, "new", &tokens).await;
    assert_eq!(matched(&indexer, "new", &tokens).await, 128);
    shutdown.finish().await;
}

/// A folder that keeps what two workers hold, each with a model and so with a book of its own.
async fn kept_folder() -> (tempfile::TempDir, Vec<u32>) {
    let folder = tempfile::tempdir().unwrap();
    let tokens = prompt(1, 8);
    let (indexer, shutdown) = start(&keeping_in(folder.path())).await;
    for model in MODELS {
        let feed = open_model(&indexer, model).await;
        assert!(feed.replace(holding(&tokens)).await.unwrap());
    }
    shutdown.finish().await;
    (folder, tokens)
}

async fn open_model(indexer: &Indexer, model: &str) -> Arc<dyn Feed> {
    let name = FeedName { model: model.to_owned(), worker: "w".to_owned(), rank: 0 };
    indexer.catalog().open(name, NAMING).await.unwrap()
}

/// Starts with the folder and gives the tokens that are found of each model, and the books that were loaded and lost.
async fn restart(folder: &Path, tokens: &[u32]) -> ([u64; 2], [u64; 2]) {
    // Never finished, so that the folder stays as it is.
    let (indexer, _shutdown) = start(&keeping_in(folder)).await;
    let mut found = [0; 2];
    for (found, model) in found.iter_mut().zip(MODELS) {
        let scores = indexer.find(model, tokens, None).await.unwrap();
        *found = scores.get("w").map_or(0, |score| score.matched_tokens);
    }
    let counters = indexer.counters();
    (found, ["kept_books_loaded", "kept_books_lost"].map(|name| counters[name]))
}

/// The file of the book of a model.
fn book_of(folder: &Path, model: &str) -> PathBuf {
    let title = format!("{model}\0kvik:{ROOT}:16");
    folder.join(format!("{:016x}.book", xxhash_rust::xxh3::xxh3_64(title.as_bytes())))
}

#[tokio::test]
async fn a_folder_with_foreign_files_is_taken_up_as_a_whole() {
    let (folder, tokens) = kept_folder().await;
    fs::write(folder.path().join("notes.txt"), "not a book").unwrap();
    fs::write(folder.path().join("0123456789abcdef.book"), "not a book either").unwrap();
    fs::create_dir(folder.path().join("books.json.new")).unwrap();
    assert_eq!(restart(folder.path(), &tokens).await, ([128, 128], [2, 0]));
}

#[tokio::test]
async fn a_book_whose_file_is_missing_costs_that_book() {
    let (folder, tokens) = kept_folder().await;
    fs::remove_file(book_of(folder.path(), MODELS[0])).unwrap();
    assert_eq!(restart(folder.path(), &tokens).await, ([0, 128], [1, 1]));
}

#[tokio::test]
async fn a_book_whose_file_is_damaged_costs_that_book() {
    let (folder, tokens) = kept_folder().await;
    let path = book_of(folder.path(), MODELS[1]);
    let good = fs::read(&path).unwrap();
    let mut turned = good.clone();
    turned[good.len() / 2] ^= 1;
    for bad in [&turned, &good[..good.len() - 1], &[]] {
        fs::write(&path, bad).unwrap();
        assert_eq!(restart(folder.path(), &tokens).await, ([128, 0], [1, 1]), "{} bytes", bad.len());
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(restart(folder.path(), &tokens).await, ([128, 0], [1, 1]), "a folder");
}

#[tokio::test]
async fn a_list_that_was_edited_costs_the_entries_that_cannot_be_used() {
    let (folder, tokens) = kept_folder().await;
    let path = folder.path().join("books.json");
    let mut list: Vec<Json> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(list.len(), 2);
    let endless = "m".repeat(5000);
    list.insert(0, json!({"model": "m", "keys": "of nobody"}));
    list.insert(1, json!({"model": endless, "keys": format!("kvik:{ROOT}:16")}));
    list.insert(2, json!(7));
    fs::write(book_of(folder.path(), &endless), "found, and not wanted").unwrap();
    fs::write(&path, serde_json::to_vec(&list).unwrap()).unwrap();
    assert_eq!(restart(folder.path(), &tokens).await, ([128, 128], [2, 3]));
}

#[tokio::test]
async fn without_its_list_a_book_is_taken_up_when_its_worker_is_heard() {
    let (folder, tokens) = kept_folder().await;
    let path = folder.path().join("books.json");
    for damaged in ["", "[{", "{}", "\u{0}"] {
        fs::write(&path, damaged).unwrap();
        assert_eq!(restart(folder.path(), &tokens).await, ([0, 0], [0, 1]), "{damaged:?}");
    }
    let (indexer, _shutdown) = start(&keeping_in(folder.path())).await;
    let feed = open_model(&indexer, MODELS[0]).await;
    assert_eq!(feed.position().await.unwrap(), (Some(1), Some(1)));
    let found = indexer.find(MODELS[0], &tokens, None).await.unwrap();
    assert_eq!(found["w"].matched_tokens, 128);
}
