//! An engine that names blocks in a way of its own and numbers what it says.

use std::sync::Arc;

use kvik_index::holders::Verdict;
use kvik_indexer::feed::{Feed, FeedBatch, FeedName, Feeds as _, Naming};
use kvik_indexer::{IndexConfig, Indexer};
use kvik_proto::events::{BlocksRemoved, BlocksStored, EngineHash, KvEvent, Medium};
use kvik_proto::index::ScoreRequest;
use kvik_runtime::shutdown::Shutdown;

pub(crate) const MODEL: &str = "m";
pub(crate) const BLOCK_TOKENS: usize = 16;

/// What the engine says so far, to be heard again.
#[derive(Default)]
pub(crate) struct Engine {
    pub(crate) batches: Vec<Vec<KvEvent>>,
}

/// The name that the engine gives to the blocks of a prompt: any function of the prefix.
pub(crate) fn hashes(salt: u64, tokens: &[u32]) -> Vec<EngineHash> {
    (1..=tokens.len() / BLOCK_TOKENS)
        .map(|n_blocks| {
            let mut hash = salt;
            for token in &tokens[..n_blocks * BLOCK_TOKENS] {
                hash = (hash ^ u64::from(*token)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
            }
            EngineHash(hash)
        })
        .collect()
}

pub(crate) fn stored(salt: u64, tokens: &[u32], from_block: usize) -> KvEvent {
    let names = hashes(salt, tokens);
    KvEvent::Stored(BlocksStored {
        hashes: names[from_block..].to_vec(),
        parent: from_block.checked_sub(1).map(|parent| names[parent]),
        tokens: tokens[from_block * BLOCK_TOKENS..names.len() * BLOCK_TOKENS].to_vec(),
        block_tokens: BLOCK_TOKENS as u32,
        ..BlocksStored::default()
    })
}

pub(crate) fn removed(hashes: &[EngineHash]) -> KvEvent {
    KvEvent::Removed(BlocksRemoved { hashes: hashes.to_vec(), medium: Medium::Gpu, group_idx: None })
}

impl Engine {
    /// Says something new; returns its number.
    pub(crate) fn say(&mut self, events: Vec<KvEvent>) -> u64 {
        self.batches.push(events);
        self.batches.len() as u64 - 1
    }

    /// Delivers one batch.
    pub(crate) async fn deliver(&self, feed: &Arc<dyn Feed>, sequence: u64, replayed: bool) -> Verdict {
        let events = self.batches[sequence as usize].clone();
        let published_s = 1e9 + sequence as f64;
        let batch = FeedBatch { epoch: None, sequence, replayed, published_s, events };
        feed.apply(batch).await.unwrap()
    }

    /// Delivers a batch as a listener does: what is missing is replayed first.
    pub(crate) async fn hear(&self, feed: &Arc<dyn Feed>, sequence: u64) -> Verdict {
        let verdict = self.deliver(feed, sequence, false).await;
        let Verdict::Gap { expected, got } = verdict else { return verdict };
        for sequence in expected..got {
            assert_eq!(self.deliver(feed, sequence, true).await, Verdict::Applied);
        }
        self.deliver(feed, got, true).await
    }
}

pub(crate) async fn start(config: &IndexConfig) -> (Arc<Indexer>, Shutdown) {
    let shutdown = Shutdown::new();
    (Indexer::start(config, &shutdown).await.unwrap(), shutdown)
}

pub(crate) async fn open(indexer: &Indexer, worker: &str, naming: Naming) -> Arc<dyn Feed> {
    let name = FeedName { model: MODEL.to_owned(), worker: worker.to_owned(), rank: 0 };
    indexer.catalog().open(name, naming).await.unwrap()
}

/// Tokens of a prompt that a worker has.
pub(crate) async fn matched(indexer: &Indexer, worker: &str, tokens: &[u32]) -> u64 {
    let request = ScoreRequest {
        model: MODEL.to_owned(),
        token_ids: Some(tokens.to_vec()),
        pods: vec![worker.to_owned()],
        ..ScoreRequest::default()
    };
    indexer.score(request, &|_| 0).await.unwrap().matched_tokens[worker]
}

pub(crate) fn prompt(seed: u32, n_blocks: usize) -> Vec<u32> {
    (0..(n_blocks * BLOCK_TOKENS) as u32).map(|place| seed * 100_000 + place).collect()
}
