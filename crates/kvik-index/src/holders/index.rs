//! The writer of the index: events in, entries and sets out.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use arc_swap::ArcSwap;

use super::arena::{Arena, EntryIndex};
use super::bulk::Bulk;
use super::hash_key::HashKey;
use super::lookup::{HolderReader, Shared};
use super::ordering::{Gap, Ordering, Verdict};
use super::reclaim::{Freed, Reclaimer, Root};
use super::replacements::Replacements;
use super::sets::{SetRef, Sets};
use super::sources::{SourceName, Sources};
use super::sweep::Sweep;
use super::table::{Probe, Table};
use super::types::{self, Batch, Event, IndexConfig, IndexError, SourceId, Tier};

/// The most threads that store blocks: a few keep the memory busy.
const MAX_THREADS: usize = 16;

/// The writer of the global KV index.
///
/// All changes go through it, one at a time; [`Self::reader`] gives out readers, which are never
/// blocked by it. The caller calls [`Self::maintain`] when it has time.
#[derive(Debug)]
pub struct HolderIndex {
    pub(super) config: IndexConfig,
    pub(super) hash_key: HashKey,
    pub(super) shared: Arc<Shared>,
    pub(super) reclaimer: Reclaimer,
    pub(super) table: Table,
    pub(super) arena: Arena,
    pub(super) sets: Sets,
    pub(super) sources: Sources,
    pub(super) sweep: Option<Sweep>,
    pub(super) bulk: Bulk,
    pub(super) replacements: Replacements,
    /// Sources that are gone and whose holders are not swept yet.
    pub(super) gone_sources: Vec<u32>,
    /// The page of the table to look at next, and how many in a row were found tight.
    pub(super) shrink_at: usize,
    pub(super) n_tight_pages: usize,
    /// What the budget was last compared for.
    size_mark: u64,
    pub(super) counters: Counters,
}

/// What happened to batches and blocks since the index was built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Batches whose events were applied.
    pub batches_applied: u64,
    /// Batches dropped because they had been applied before.
    pub batches_duplicate: u64,
    /// Batches handed back because others are missing before them.
    pub batches_early: u64,
    /// Batches dropped because their epoch is over.
    pub batches_old_epoch: u64,
    /// Batches dropped because their source is unknown.
    pub batches_unknown_source: u64,
    /// Restarts, seen by an epoch or by a sequence that fell back.
    pub restarts: u64,
    /// Gaps that were given up.
    pub gaps_skipped: u64,
    /// Blocks that a holder got.
    pub blocks_stored: u64,
    /// Blocks that a holder stored although it had them.
    pub blocks_repeated: u64,
    /// Blocks dropped because a source was over its bound or there was no holder number.
    pub blocks_refused: u64,
    /// Blocks that a holder lost.
    pub blocks_removed: u64,
    /// Removals of blocks that the holder did not have.
    pub removals_unknown: u64,
    /// Blocks of holders dropped because the index was over its budget.
    pub blocks_evicted: u64,
    /// Blocks swept away after a restart, a clear or a removal of their source.
    pub blocks_swept: u64,
    /// Entries that cleaning copied to another place.
    pub entries_moved: u64,
}

/// How large the index is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderStats {
    /// All bytes that the index has allocated, without what readers still hold of replaced arrays.
    pub bytes: u64,
    /// Distinct blocks.
    pub n_blocks: u64,
    /// Pairs of block and holder.
    pub n_holdings: u64,
    /// Places of dead entries that are not cleaned yet.
    pub n_dead_entries: u64,
    /// Sets of three and more holders.
    pub n_interned_sets: usize,
    /// Sources.
    pub n_sources: usize,
    /// Holders whose bits are not swept yet.
    pub n_retired_holders: usize,
    /// Numbers that wait until readers are done.
    pub n_waiting: usize,
}

impl HolderIndex {
    /// The longest name of a worker.
    pub const MAX_NAME_BYTES: usize = types::MAX_NAME_BYTES;
    /// The most sources there can be: each may have a holder in every tier.
    pub const MAX_SOURCES: usize = types::MAX_SOURCES;
    /// The smallest budget: a few extents and the fixed tables.
    pub const MIN_BUDGET_BYTES: u64 = 8 << 20;

    /// Builds an empty index.
    pub fn new(mut config: IndexConfig) -> Self {
        config.budget_bytes = config.budget_bytes.max(Self::MIN_BUDGET_BYTES);
        config.max_sources = config.max_sources.min(Self::MAX_SOURCES);
        config.n_threads = config.n_threads.clamp(1, MAX_THREADS);
        let hash_key = HashKey::new(config.hash_seed);
        let (table, arena, mut sets) = (Table::new(), Arena::new(), Sets::new(hash_key));
        let sources = Sources::new(config.max_sources);
        let root = Root {
            directory: Arc::new(table.published()),
            extents: Arc::new(arena.published()),
            sets: Arc::new(sets.published()),
        };
        let reclaimer = Reclaimer::new(root);
        let shared = Arc::new(Shared {
            root: ArcSwap::new(Arc::clone(reclaimer.current())),
            roll: Arc::clone(&sources.roll),
            names: ArcSwap::from_pointee(Vec::new()),
            hash_key,
            wants_marks: AtomicBool::new(false),
        });
        Self {
            config,
            hash_key,
            shared,
            reclaimer,
            table,
            arena,
            sets,
            sources,
            sweep: None,
            bulk: Bulk::new(hash_key),
            replacements: Replacements::default(),
            gone_sources: Vec::new(),
            shrink_at: 0,
            n_tight_pages: 0,
            size_mark: 0,
            counters: Counters::default(),
        }
    }

    /// A reader of this index, to be cloned at will.
    pub fn reader(&self) -> HolderReader {
        HolderReader { shared: Arc::clone(&self.shared) }
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// How large the index is; bytes are counted exactly.
    pub fn stats(&self) -> HolderStats {
        HolderStats {
            bytes: self.bytes(),
            n_blocks: self.arena.n_live,
            n_holdings: self.sources.list.iter().flatten().map(|source| source.n_blocks).sum(),
            n_dead_entries: self.arena.n_used - self.arena.n_live,
            n_interned_sets: self.sets.n_interned(),
            n_sources: self.sources.by_name.len(),
            n_retired_holders: self.n_retired(),
            n_waiting: self.reclaimer.n_waiting(),
        }
    }

    /// How many blocks a source holds, each tier counted.
    pub fn n_blocks_of(&self, source: SourceId) -> Option<u64> {
        Some(self.sources.get(source)?.n_blocks)
    }

    /// The epoch of a source and the sequence number that is due from it.
    pub fn position(&self, source: SourceId) -> Option<(Option<u64>, Option<u64>)> {
        let ordering = self.sources.get(source)?.ordering;
        Some((ordering.epoch, ordering.due))
    }

    /// Enters a worker's rank.
    pub fn add_source(&mut self, worker: &str, rank: u32) -> Result<SourceId, IndexError> {
        if worker.is_empty() || worker.len() > Self::MAX_NAME_BYTES {
            return Err(IndexError::BadName { n_bytes: worker.len() });
        }
        let name = SourceName { worker: worker.into(), rank };
        if self.sources.by_name.contains_key(&name) {
            return Err(IndexError::SourceExists { name: worker.into(), rank });
        }
        let ordering = Ordering::new(self.config.first_sequence);
        let mut added = self.sources.add(name.clone(), ordering);
        if added.is_none() {
            self.sweep_all();
            added = self.sources.add(name, ordering);
        }
        let source = added.ok_or(IndexError::TooManySources { max_sources: self.config.max_sources })?;
        self.publish_names();
        Ok(source)
    }

    /// The id of a worker's rank.
    pub fn source(&self, worker: &str, rank: u32) -> Option<SourceId> {
        let name = SourceName { worker: worker.into(), rank };
        self.sources.by_name.get(&name).copied().map(SourceId)
    }

    /// Takes a source out with all it holds, in constant time; false if there is no such source.
    ///
    /// Batches of it that are still under way are dropped and counted.
    pub fn remove_source(&mut self, source: SourceId) -> bool {
        self.abandon_replacements(|replacement| replacement.source == source);
        if self.sources.remove(source).is_none() {
            return false;
        }
        self.gone_sources.push(source.0);
        self.publish_names();
        true
    }

    /// Starts an epoch of a source before its first batch has come, in constant time; false if the
    /// epoch is not newer than what is known.
    pub fn start_epoch(&mut self, source: SourceId, epoch: u64) -> bool {
        let first_sequence = self.config.first_sequence;
        let Some(entry) = self.sources.get_mut(source) else { return false };
        if entry.ordering.epoch.is_some_and(|current| epoch <= current) {
            return false;
        }
        entry.ordering = Ordering { epoch: Some(epoch), ..Ordering::new(first_sequence) };
        self.sources.forget(source);
        self.counters.restarts += 1;
        true
    }

    /// Applies a batch if it is the one that is due.
    #[must_use = "a gap is the caller's to close"]
    pub fn apply(&mut self, batch: &Batch<'_>) -> Verdict {
        let verdict = if Self::is_bulk(batch.events) {
            self.in_bulk(|index| index.apply_one(batch))
        } else {
            self.apply_one(batch)
        };
        if matches!(verdict, Verdict::Applied | Verdict::Restarted) {
            self.settle();
        }
        verdict
    }

    /// Applies a batch if it is the one that is due; the caller settles.
    pub(super) fn apply_one(&mut self, batch: &Batch<'_>) -> Verdict {
        let first_sequence = self.config.first_sequence;
        let Some(entry) = self.sources.get_mut(batch.source) else {
            self.counters.batches_unknown_source += 1;
            return Verdict::UnknownSource;
        };
        let gap = entry.ordering.gap;
        let judgment = entry.ordering.judge(batch.epoch, batch.sequence, batch.replayed, first_sequence);
        let changed_gap = entry.ordering.gap != gap;
        if judgment.forget {
            self.counters.restarts += 1;
            self.end_bulk();
            self.sources.forget(batch.source);
        } else if changed_gap && judgment.verdict != Verdict::Applied {
            self.sources.show(batch.source);
        }
        match judgment.verdict {
            Verdict::Applied | Verdict::Restarted => {
                self.counters.batches_applied += 1;
                if batch.events.len() > 1 {
                    self.prefetch_events(batch.events);
                }
                for event in batch.events {
                    self.apply_event(batch.source, event);
                }
                if changed_gap {
                    self.end_bulk();
                    self.sources.show(batch.source);
                }
            }
            Verdict::Duplicate => self.counters.batches_duplicate += 1,
            Verdict::Gap { .. } => self.counters.batches_early += 1,
            Verdict::OldEpoch => self.counters.batches_old_epoch += 1,
            Verdict::UnknownSource => {}
        }
        judgment.verdict
    }

    /// Gives up on missing batches: `next` is due from now on. The source stays unsure until it
    /// restarts or is replaced. False if there is no gap before `next`.
    pub fn skip_gap(&mut self, source: SourceId, next: u64) -> bool {
        let Some(entry) = self.sources.get_mut(source) else { return false };
        if entry.ordering.due.is_none_or(|due| next <= due) {
            return false;
        }
        entry.ordering.due = Some(next);
        entry.ordering.gap = Gap::Skipped;
        self.sources.show(source);
        self.counters.gaps_skipped += 1;
        true
    }

    fn apply_event(&mut self, source: SourceId, event: &Event<'_>) {
        match *event {
            Event::Stored { tier, parent, keys } => match self.holder(source, tier) {
                Some(holder) => self.store(source, holder, parent, keys),
                None => self.counters.blocks_refused += keys.len() as u64,
            },
            Event::Removed { tier, keys } => {
                let holder = self.sources.get(source).and_then(|entry| entry.holders[tier.as_index()]);
                match holder {
                    Some(holder) => self.remove(holder, keys),
                    None => self.counters.removals_unknown += keys.len() as u64,
                }
            }
            Event::Cleared { tier } => {
                self.end_bulk();
                match tier {
                    None => self.sources.forget(source),
                    Some(tier) => self.clear_tier(source, tier),
                }
            }
        }
    }

    fn clear_tier(&mut self, source: SourceId, tier: Tier) {
        let Some(entry) = self.sources.get_mut(source) else { return };
        let Some(holder) = entry.holders[tier.as_index()].take() else { return };
        let n_blocks = self.sources.n_blocks_of(holder);
        self.sources.count(holder, -(n_blocks as i64));
        self.sources.retire(holder);
    }

    /// The holder of a source in a tier, made when it is first needed.
    fn holder(&mut self, source: SourceId, tier: Tier) -> Option<u16> {
        let entry = self.sources.get(source)?;
        if let Some(holder) = entry.holders[tier.as_index()] {
            return Some(holder);
        }
        let generation = entry.generation;
        let holder = self.open_holder(source, tier)?;
        self.sources.show_holder(holder, generation);
        self.sources.get_mut(source)?.holders[tier.as_index()] = Some(holder);
        Some(holder)
    }

    /// A holder that no reader sees yet.
    pub(super) fn open_holder(&mut self, source: SourceId, tier: Tier) -> Option<u16> {
        let opened = self.sources.open_holder(source, tier, self.hash_key);
        if opened.is_some() {
            return opened;
        }
        // All numbers are in use or wait for a sweep: do that now.
        self.end_bulk();
        self.sweep_all();
        self.sources.open_holder(source, tier, self.hash_key)
    }

    /// Gives an entry another set, and takes it out of the table if that is empty.
    pub(super) fn put_entry_set(&mut self, index: EntryIndex, key: u64, old: SetRef, new: SetRef) {
        self.sets.retain(new, 1);
        self.arena.put_set(index, new);
        self.sets.release(old, 1);
        if !new.is_live() {
            self.table.delete(self.hash_key.tag(key), index);
        }
    }

    /// The entry of a key and its set.
    #[inline]
    pub(super) fn find_entry(&self, key: u64) -> Option<(EntryIndex, SetRef)> {
        let Probe::Found { index, .. } = self.probe(self.hash_key.tag(key), key) else { return None };
        Some((index, self.arena.entry(index)?.1))
    }

    #[inline]
    pub(super) fn probe(&self, tag: u32, key: u64) -> Probe {
        self.table.probe(tag, |index| self.arena.has_key(index, key))
    }

    /// Ends a call that changed something: what was freed waits for readers, and the budget holds.
    pub(super) fn settle(&mut self) {
        if self.sets.unreferenced.len() >= 64 {
            self.collect_freed();
        }
        let size_mark = self.sources.repeat_bytes + self.sets.size_mark() + self.table.size_mark();
        if size_mark != self.size_mark {
            self.size_mark = size_mark;
            self.keep_budget();
        }
    }

    pub(super) fn collect_freed(&mut self) {
        for set in self.sets.unreferenced.drain(..) {
            self.reclaimer.free(Freed::Set(set));
        }
        self.reclaimer.advance(&self.shared.root);
        while let Some(freed) = self.reclaimer.reclaim() {
            match freed {
                Freed::Set(set) => self.sets.recycle(set),
                Freed::Holder(holder) => self.sources.free_holders.push(holder),
                Freed::Source(source) => self.sources.free_numbers.push(source),
                Freed::Extent(slot) => self.arena.free_slots.push(slot),
            }
        }
    }

    pub(super) fn publish_directory(&mut self) {
        let root = Root::clone(self.reclaimer.current());
        self.publish(Root { directory: Arc::new(self.table.published()), ..root });
    }

    pub(super) fn publish_extents(&mut self) {
        let root = Root::clone(self.reclaimer.current());
        self.publish(Root { extents: Arc::new(self.arena.published()), ..root });
    }

    pub(super) fn publish_grown_sets(&mut self) {
        if self.sets.grown {
            let root = Root::clone(self.reclaimer.current());
            let sets = Arc::new(self.sets.published());
            self.publish(Root { sets, ..root });
        }
    }

    fn publish(&mut self, root: Root) {
        self.reclaimer.publish(&self.shared.root, root);
    }

    pub(super) fn publish_names(&self) {
        let names =
            self.sources.list.iter().map(|source| source.as_ref().map(|source| Arc::clone(&source.name)));
        self.shared.names.store(Arc::new(names.collect()));
    }
}
