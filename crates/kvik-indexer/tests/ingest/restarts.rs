//! What a snapshot folder is worth after a restart.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvik_index::holders::{BlockKey, Tier};
use kvik_indexer::feed::{Feed, Holding, Naming};
use kvik_indexer::{IndexConfig, Indexer};
use kvik_types::BlockHash;

use crate::engine::{matched, open, prompt, start};

const ROOT: BlockHash = BlockHash([9; 16]);
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
async fn a_worker_that_left_while_nobody_listened_is_forgotten_after_a_while() {
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
