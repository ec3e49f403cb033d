//! The feed of an engine that may tell of two caches: its own, and one beside it.
//!
//! A connector such as LMCache's publishes what it keeps in the stream of its engine, in chunks of another length and under
//! names of its own. Taken for blocks of the engine, they would show that the engine's hashes cannot be computed. So they
//! go to a feed of their own, which translates them; it has the engine's name and numbers.
//!
//! Blocks are of the cache beside if they are not in the device's memory, have tokens, and are of another length than the
//! engine's. A removal is, if one of its names is.

use std::collections::HashSet;

use futures_util::future::BoxFuture;
use kvik_index::holders::Verdict;
use kvik_proto::events::{BlocksRemoved, EngineHash, KvEvent, Medium};
use parking_lot::Mutex;

use crate::error::Result;
use crate::feed::{Feed, FeedBatch, Holding};
use crate::ingest::ModelFeed;

/// Names of the cache beside that are known at a time, 16 MiB of them; with more it is begun anew.
const MAX_BESIDE: usize = 1 << 20;

/// Takes the events of one engine and rank.
#[derive(Debug)]
pub(crate) struct EngineFeed {
    own: ModelFeed,
    beside: ModelFeed,
    /// Never held while a feed works; calls come one after the other.
    state: Mutex<BesideState>,
}

#[derive(Debug, Default)]
struct BesideState {
    /// Tokens of the engine's own blocks.
    own_block_tokens: Option<u32>,
    /// Whether the cache beside has reported anything; until then its feed is not opened.
    is_used: bool,
    hashes: HashSet<EngineHash>,
}

impl EngineFeed {
    /// `own` learns how the engine names its blocks; `beside` translates.
    pub(crate) fn new(own: ModelFeed, beside: ModelFeed) -> Self {
        Self { own, beside, state: Mutex::default() }
    }

    /// The events of the engine's own cache, and those of the one beside it. Nothing is kept apart while the own feed
    /// translates too: a bridge takes blocks of any length.
    fn split(&self, events: Vec<KvEvent>) -> (Vec<KvEvent>, Vec<KvEvent>) {
        if self.own.is_bridged() {
            return (events, Vec::new());
        }
        let mut state = self.state.lock();
        let (mut own, mut beside) = (Vec::with_capacity(events.len()), Vec::new());
        // Those that this batch names first; the others are noted when it was taken.
        let mut named = HashSet::new();
        for event in events {
            match event {
                KvEvent::Stored(stored)
                    if state.is_beside(stored.medium, stored.block_tokens, &stored.tokens) =>
                {
                    named.extend(stored.hashes.iter().copied());
                    beside.push(KvEvent::Stored(stored));
                }
                KvEvent::Removed(removed) if removed.medium != Medium::Gpu => {
                    let BlocksRemoved { hashes, medium, group_idx } = removed;
                    let is_beside = |hash: &EngineHash| state.hashes.contains(hash) || named.contains(hash);
                    let (of_beside, of_own): (Vec<_>, Vec<_>) = hashes.into_iter().partition(is_beside);
                    for (events, hashes) in [(&mut own, of_own), (&mut beside, of_beside)] {
                        if !hashes.is_empty() {
                            events.push(KvEvent::Removed(BlocksRemoved { hashes, medium, group_idx }));
                        }
                    }
                }
                // What clears the engine's memory leaves the cache beside it as it is.
                event => own.push(event),
            }
        }
        (own, beside)
    }

    async fn take(&self, batch: FeedBatch) -> Result<Verdict> {
        let FeedBatch { epoch, sequence, replayed, published_s, events } = batch;
        let (own, beside) = self.split(events);
        let batch_of = |events| FeedBatch { epoch, sequence, replayed, published_s, events };
        let verdict = self.own.apply(batch_of(own)).await?;
        let is_used = self.state.lock().is_used;
        let is_taken = matches!(verdict, Verdict::Applied | Verdict::Restarted | Verdict::Duplicate);
        if !is_taken || !is_used && beside.is_empty() {
            return Ok(verdict);
        }
        if !is_used || self.state.lock().hashes.len() > MAX_BESIDE {
            self.begin_beside(epoch, sequence).await?;
        }
        let batch = batch_of(beside);
        match self.beside.apply(batch.clone()).await? {
            Verdict::Applied | Verdict::Restarted | Verdict::Duplicate => {}
            Verdict::Gap { .. } | Verdict::OldEpoch | Verdict::UnknownSource => {
                self.begin_beside(epoch, sequence).await?;
                self.beside.apply(batch.clone()).await?;
            }
        }
        // Only now: a batch that was not taken is handed in again.
        self.state.lock().note(&batch.events);
        Ok(verdict)
    }

    /// The cache beside has nothing; the batch of this number is due.
    async fn begin_beside(&self, epoch: Option<u64>, sequence: u64) -> Result<()> {
        self.beside.replace(Holding { epoch, next_sequence: sequence, runs: Vec::new() }).await?;
        let mut state = self.state.lock();
        state.hashes.clear();
        state.is_used = true;
        Ok(())
    }
}

impl BesideState {
    /// Whether stored blocks are of the cache beside; learns the length of the engine's own.
    fn is_beside(&mut self, medium: Medium, block_tokens: u32, tokens: &[u32]) -> bool {
        if tokens.is_empty() {
            return false;
        }
        if medium == Medium::Gpu {
            self.own_block_tokens = Some(block_tokens);
            return false;
        }
        self.own_block_tokens.is_some_and(|own| own != block_tokens)
    }

    /// Notes the names of the cache beside after its events.
    fn note(&mut self, events: &[KvEvent]) {
        for event in events {
            match event {
                KvEvent::Stored(stored) => self.hashes.extend(&stored.hashes),
                KvEvent::Removed(removed) => removed.hashes.iter().for_each(|hash| {
                    self.hashes.remove(hash);
                }),
                KvEvent::Cleared => self.hashes.clear(),
            }
        }
    }
}

impl Feed for EngineFeed {
    fn apply(&self, batch: FeedBatch) -> BoxFuture<'_, Result<Verdict>> {
        Box::pin(self.take(batch))
    }

    fn replace(&self, holding: Holding) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let (epoch, next_sequence) = (holding.epoch, holding.next_sequence);
            if self.state.lock().is_used {
                self.begin_beside(epoch, next_sequence).await?;
            }
            self.own.replace(holding).await
        })
    }

    fn skip_gap(&self, next: u64) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if self.state.lock().is_used {
                self.beside.skip_gap(next).await?;
            }
            self.own.skip_gap(next).await
        })
    }

    fn position(&self) -> BoxFuture<'_, Result<(Option<u64>, Option<u64>)>> {
        self.own.position()
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if self.state.lock().is_used {
                self.beside.close().await?;
            }
            *self.state.lock() = BesideState::default();
            self.own.close().await
        })
    }
}
