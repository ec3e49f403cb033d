//! From what an engine says to what its book keeps.
//!
//! A feed starts with the keys that other engines of its model have proven to use, and moves to another book as
//! soon as an event proves otherwise. What it had said until then is forgotten with the old book, so its
//! number falls back to the start there and the source replays.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use kvik_index::holders::{
    BlockKey, Bridge, BridgeConfig, BridgeEvent, Event, OwnRun, SourceName, Tier, Verdict,
};
use kvik_proto::events::{Attention, BlocksStored, EngineHash, KvEvent, Medium};
use kvik_types::BlockSize;
use kvik_types::hash::VllmAlgorithm;
use parking_lot::Mutex;

use crate::backend::{KeyedBatch, KeyedHolding};
use crate::book::{Book, Books};
use crate::error::Result;
use crate::feed::{Feed, FeedBatch, Holding, Naming};
use crate::keys::{KeyKind, Keys, OwnKeys, recognize};

/// Tokens of a block where nothing has said otherwise yet: what engines have by default.
const USUAL_BLOCK_TOKENS: usize = 16;

/// How feeds of engines learn their keys.
#[derive(Debug, Clone)]
pub(crate) struct Learning {
    /// Values of `PYTHONHASHSEED` that engines may run with.
    pub(crate) seeds: Arc<[String]>,
    /// Tokens of a block of the chain that bridges use.
    pub(crate) own_block_tokens: BlockSize,
    /// Bounds of a bridge.
    pub(crate) bridge: BridgeConfig,
}

/// The feed of one worker and rank.
#[derive(Debug)]
pub(crate) struct ModelFeed {
    books: Arc<Books>,
    source: SourceName,
    naming: Naming,
    learning: Learning,
    /// Never held while a backend works; calls come one after the other.
    state: Mutex<FeedState>,
}

#[derive(Debug, Default)]
struct FeedState {
    /// `None` until something was said.
    book: Option<Arc<Book>>,
    /// Of a book in keys of kvik's own.
    bridge: Option<Bridge>,
    /// Epoch and due number as the backend had them last; a bridge translates only what will be applied.
    epoch: Option<u64>,
    due: Option<u64>,
    /// What a bridge made of a batch that the backend has not taken. It is handed in again, and a bridge counts.
    untaken: Option<(u64, Translated)>,
    /// The cache group whose blocks are kept; `None` until an event names one.
    group: Option<CacheGroup>,
    /// Whether the book still has blocks of a group that was kept before.
    has_left_group: bool,
}

/// One of an engine's cache groups. Hybrid models name the same prompt once for each, and only the blocks of one can be
/// counted: those with full attention where there are some, since a hit needs all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CacheGroup {
    idx: u32,
    is_full: bool,
}

/// Events in the keys of a book, owned.
#[derive(Debug, Default)]
struct Translated {
    runs: Vec<OwnRun>,
    /// The parents of `runs`, where the engine named them.
    parents: Vec<Option<BlockKey>>,
}

impl ModelFeed {
    pub(crate) fn new(books: Arc<Books>, source: SourceName, naming: Naming, learning: Learning) -> Self {
        Self { books, source, naming, learning, state: Mutex::default() }
    }

    /// Takes up where an earlier life of this process left the source.
    pub(crate) async fn resume(&self) -> Result<()> {
        let candidates = match self.naming {
            Naming::Kvik { .. } => {
                let keys = self.keys_for(&[])?;
                keys.map(|keys| self.books.open(&keys)).transpose()?.into_iter().collect()
            }
            Naming::Learned => self.books.all(),
            Naming::Bridged => self.books.all().into_iter().filter(|book| book.is_bridged()).collect(),
        };
        for book in candidates {
            if book.is_bridged() {
                // The bridge of the earlier life is gone, and with it the meaning of removals.
                book.backend.remove_source(&self.source).await?;
                continue;
            }
            let is_other = self.naming == Naming::Learned && matches!(book.keys.kind, KeyKind::Kvik { .. });
            if is_other {
                continue;
            }
            if let Some(state) = book.backend.state(&self.source).await? {
                book.enter(&self.source);
                let mut own = self.state.lock();
                (own.book, own.epoch, own.due) = (Some(book), state.epoch, state.due_sequence);
                return Ok(());
            }
        }
        Ok(())
    }

    /// The keys that these events are in; `None` if they do not say and nothing was known.
    fn keys_for(&self, events: &[KvEvent]) -> Result<Option<Keys>> {
        if let Naming::Kvik { root, block_tokens } = self.naming {
            let block_tokens = BlockSize::try_new(block_tokens as usize).map_err(|_| {
                crate::IndexerError::invalid("block_tokens", block_tokens, "1 or more tokens of a block")
            })?;
            return Ok(Some(Keys { kind: KeyKind::Kvik { root }, block_tokens }));
        }
        let own = Keys { kind: KeyKind::Own, block_tokens: self.learning.own_block_tokens };
        if self.naming == Naming::Bridged {
            return Ok(Some(own));
        }
        let stored = || {
            events.iter().filter_map(|event| match event {
                KvEvent::Stored(stored) => Some(stored),
                KvEvent::Removed(_) | KvEvent::Cleared => None,
            })
        };
        if let Some(proof) = stored().find_map(|stored| recognize(stored, &self.learning.seeds)) {
            let keys = proof.unwrap_or(own);
            self.books.prove(&keys);
            return Ok(Some(keys));
        }
        if self.state.lock().book.is_some() {
            return Ok(None);
        }
        let with_tokens = stored().find(|stored| !stored.tokens.is_empty());
        let block_tokens = with_tokens.map_or(USUAL_BLOCK_TOKENS, |stored| stored.block_tokens as usize);
        Ok(self.books.proven().or_else(|| usual_keys(block_tokens)))
    }

    /// Goes to the book of a batch. The old one forgets the source first: where that fails the feed is still
    /// in it, and the batch is handed in again.
    async fn enter_book(&self, events: &[KvEvent]) -> Result<Option<Arc<Book>>> {
        let keys = self.keys_for(events)?;
        let current = self.book();
        let keys = keys.filter(|keys| current.as_ref().is_none_or(|book| book.keys != *keys));
        let Some(keys) = keys else { return Ok(current) };
        let book = self.books.open(&keys)?;
        if let Some(left) = current {
            left.backend.remove_source(&self.source).await?;
            left.leave(&self.source);
        }
        self.books.announce(&book).await?;
        let bridge = book.is_bridged().then(|| Bridge::new(self.learning.bridge));
        book.enter(&self.source);
        *self.state.lock() =
            FeedState { book: Some(Arc::clone(&book)), bridge, due: Some(0), ..FeedState::default() };
        Ok(Some(book))
    }

    /// The events of a batch in the keys of the book, as far as the batch will be applied.
    fn translate(&self, batch: &FeedBatch, book: &Book) -> Translated {
        let mut translated = Translated::default();
        let mut state = self.state.lock();
        let is_restart = !batch.replayed && state.due.is_none_or(|due| batch.sequence < due);
        if is_restart {
            state.group = None;
        }
        if state.bridge.is_none() {
            let block_tokens = book.keys.block_tokens.get() as u32;
            state.has_left_group |= CacheGroup::choose(&mut state.group, &batch.events);
            let events = batch.events.iter().filter(|event| CacheGroup::has(state.group, event));
            let forgotten = state.has_left_group.then_some(&KvEvent::Cleared);
            for (run, parent) in
                forgotten.into_iter().chain(events).filter_map(|event| direct(event, block_tokens))
            {
                translated.runs.push(run);
                translated.parents.push(parent);
            }
            return translated;
        }
        if let Some((sequence, untaken)) = state.untaken.take()
            && sequence == batch.sequence
        {
            return untaken;
        }
        let is_due = state.due == Some(batch.sequence) && state.epoch == batch.epoch;
        let own_block_tokens = self.learning.own_block_tokens;
        let FeedState { bridge: Some(bridge), group, .. } = &mut *state else { return translated };
        if is_restart {
            bridge.reset();
        }
        if !is_due && !is_restart {
            return translated;
        }
        if CacheGroup::choose(group, &batch.events) {
            bridged(bridge, &KvEvent::Cleared, own_block_tokens, &mut translated.runs);
        }
        for event in batch.events.iter().filter(|event| CacheGroup::has(*group, event)) {
            bridged(bridge, event, own_block_tokens, &mut translated.runs);
        }
        translated.parents.resize(translated.runs.len(), None);
        translated
    }

    async fn take(&self, batch: FeedBatch) -> Result<Verdict> {
        let Some(book) = self.enter_book(&batch.events).await? else { return Ok(Verdict::UnknownSource) };
        let translated = self.translate(&batch, &book);
        let events: Vec<Event<'_>> = translated
            .runs
            .iter()
            .zip(&translated.parents)
            .map(|(run, parent)| match run.as_event() {
                Event::Stored { tier, keys, .. } => Event::Stored { tier, parent: *parent, keys },
                event => event,
            })
            .collect();
        let FeedBatch { epoch, sequence, replayed, published_s, .. } = batch;
        let keyed = KeyedBatch { epoch, sequence, replayed, published_s, events: &events };
        let outcome = book.backend.apply(&self.source, keyed).await;
        let mut state = self.state.lock();
        let verdict = match outcome {
            Ok(verdict) => verdict,
            Err(error) => {
                state.untaken = state.bridge.is_some().then_some((sequence, translated));
                return Err(error);
            }
        };
        match verdict {
            Verdict::Applied | Verdict::Restarted | Verdict::Duplicate => {
                state.has_left_group &= verdict == Verdict::Duplicate;
                let next = sequence.checked_add(1);
                let is_new = verdict != Verdict::Duplicate || state.due.is_some_and(|due| due <= sequence);
                if is_new {
                    (state.epoch, state.due) = (epoch, next);
                }
            }
            Verdict::Gap { expected, .. } => {
                if state.due != Some(expected)
                    && let Some(bridge) = &mut state.bridge
                {
                    bridge.reset();
                }
                (state.epoch, state.due) = (epoch, Some(expected));
            }
            Verdict::OldEpoch | Verdict::UnknownSource => {}
        }
        Ok(verdict)
    }

    /// Whether what it receives is translated.
    pub(crate) fn is_bridged(&self) -> bool {
        self.book().is_some_and(|book| book.is_bridged())
    }

    fn book(&self) -> Option<Arc<Book>> {
        self.state.lock().book.clone()
    }
}

impl Feed for ModelFeed {
    fn apply(&self, batch: FeedBatch) -> BoxFuture<'_, Result<Verdict>> {
        Box::pin(self.take(batch))
    }

    fn replace(&self, holding: Holding) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let Some(book) = self.enter_book(&[]).await? else { return Ok(false) };
            let Holding { epoch, next_sequence, runs } = holding;
            let keyed = KeyedHolding { epoch, next_sequence, runs: &runs };
            let is_taken = book.backend.replace(&self.source, keyed).await?;
            if is_taken {
                let mut state = self.state.lock();
                if let Some(bridge) = &mut state.bridge {
                    bridge.reset();
                }
                (state.epoch, state.due) = (epoch, Some(next_sequence));
                (state.group, state.has_left_group) = (None, false);
            }
            Ok(is_taken)
        })
    }

    fn skip_gap(&self, next: u64) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if let Some(book) = self.book() {
                book.backend.skip_gap(&self.source, next).await?;
                self.state.lock().due = Some(next);
            }
            Ok(())
        })
    }

    fn position(&self) -> BoxFuture<'_, Result<(Option<u64>, Option<u64>)>> {
        Box::pin(async move {
            let Some(book) = self.book() else { return Ok((None, Some(0))) };
            let state = book.backend.state(&self.source).await?;
            Ok(state.map_or((None, Some(0)), |state| (state.epoch, state.due_sequence)))
        })
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if let Some(book) = self.book() {
                book.backend.remove_source(&self.source).await?;
                book.leave(&self.source);
            }
            *self.state.lock() = FeedState::default();
            Ok(())
        })
    }
}

/// The keys of an engine that runs as it comes.
fn usual_keys(block_tokens: usize) -> Option<Keys> {
    let block_tokens = BlockSize::try_new(block_tokens).ok()?;
    Some(Keys { kind: KeyKind::Vllm { algorithm: VllmAlgorithm::Sha256, seed: None }, block_tokens })
}

impl CacheGroup {
    /// Takes the first group that these events name, or a better one than before; whether another was kept until now,
    /// whose blocks must be forgotten.
    fn choose(kept: &mut Option<Self>, events: &[KvEvent]) -> bool {
        if kept.is_some_and(|kept| kept.is_full) {
            return false;
        }
        let named = || {
            events.iter().filter_map(|event| match event {
                KvEvent::Stored(stored) => {
                    Some(Self { idx: stored.group_idx?, is_full: stored.attention == Attention::Full })
                }
                KvEvent::Removed(_) | KvEvent::Cleared => None,
            })
        };
        let chosen = named().find(|group| group.is_full).or(*kept).or_else(|| named().next());
        let before = std::mem::replace(kept, chosen);
        before.is_some_and(|before| kept.is_some_and(|kept| kept.idx != before.idx))
    }

    /// Whether an event is about the group that is kept.
    fn has(kept: Option<Self>, event: &KvEvent) -> bool {
        let idx = match event {
            KvEvent::Stored(stored) => stored.group_idx,
            KvEvent::Removed(removed) => removed.group_idx,
            KvEvent::Cleared => None,
        };
        idx.is_none_or(|idx| kept.is_none_or(|kept| kept.idx == idx))
    }
}

/// An event whose hashes are the keys.
fn direct(event: &KvEvent, block_tokens: u32) -> Option<(OwnRun, Option<BlockKey>)> {
    match event {
        // Blocks of another length are not of this chain. Without tokens it is known blocks in another tier.
        KvEvent::Stored(stored) if !stored.tokens.is_empty() && stored.block_tokens != block_tokens => None,
        KvEvent::Stored(stored) => {
            let run = OwnRun::Stored { tier: tier(stored.medium), keys: keys_of(&stored.hashes) };
            Some((run, stored.parent.map(|parent| BlockKey(parent.0))))
        }
        KvEvent::Removed(removed) => {
            Some((OwnRun::Removed { tier: tier(removed.medium), keys: keys_of(&removed.hashes) }, None))
        }
        KvEvent::Cleared => Some((OwnRun::Cleared { tier: None }, None)),
    }
}

fn bridged(bridge: &mut Bridge, event: &KvEvent, own_block_tokens: BlockSize, runs: &mut Vec<OwnRun>) {
    let plain = OwnKeys::new(own_block_tokens);
    match event {
        KvEvent::Stored(stored) => {
            let BlocksStored { hashes, parent, tokens, block_tokens, medium, .. } = stored;
            // Of pairs the last token is of no block.
            let n_tokens = tokens.len() - usize::from(stored.is_paired && !tokens.is_empty());
            let event = BridgeEvent::Stored {
                tier: tier(*medium),
                parent: parent.map(|parent| BlockKey(parent.0)),
                keys: &keys_of(hashes),
                tokens: &tokens[..n_tokens],
                block_tokens: *block_tokens as usize,
            };
            bridge.translate(&event, &OwnKeys::of_event(own_block_tokens, stored), runs);
        }
        KvEvent::Removed(removed) => {
            let event = BridgeEvent::Removed { tier: tier(removed.medium), keys: &keys_of(&removed.hashes) };
            bridge.translate(&event, &plain, runs);
        }
        KvEvent::Cleared => bridge.translate(&BridgeEvent::Cleared { tier: None }, &plain, runs),
    }
}

fn keys_of(hashes: &[EngineHash]) -> Vec<BlockKey> {
    hashes.iter().map(|hash| BlockKey(hash.0)).collect()
}

fn tier(medium: Medium) -> Tier {
    match medium {
        Medium::Gpu => Tier::Gpu,
        Medium::Cpu => Tier::Cpu,
        Medium::Disk => Tier::Disk,
        Medium::Remote => Tier::Remote,
    }
}

#[cfg(test)]
mod tests;
