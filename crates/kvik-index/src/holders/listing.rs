//! Administration: the state of each source, its blocks page by page, and blocks that are taken away by hand.

use std::sync::Arc;

use super::arena::EntryIndex;
use super::index::HolderIndex;
use super::lookup::HolderReader;
use super::ordering::Gap;
use super::reclaim::Root;
use super::sets::{SetRef, for_each_interned};
use super::sources::SourceName;
use super::types::{BlockKey, SourceId};

/// Lines of the table that a page looks at before it ends: about 300 000 entries, some ten milliseconds.
const MAX_PAGE_LINES: usize = 1 << 16;
/// Lines after which the arrays are loaded anew, so that a long page does not hold back freed numbers.
const LINES_PER_ROOT: usize = 256;

/// Some blocks of a source, in an order that does not change while the index lives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockPage {
    /// Blocks, each with a set of tiers (bit `i` is [`Tier::ALL`](super::Tier::ALL)`[i]`).
    pub blocks: Vec<(BlockKey, u8)>,
    /// Where the next page begins; `None` after the last one.
    pub next: Option<u64>,
    /// Lines of the table that were looked at: what the page cost.
    pub n_lines: usize,
}

/// A block of a line: its place in the order of listing, its key and its tiers.
type Listed = (u64, BlockKey, u8);

/// Where a source stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStatus {
    /// Its id.
    pub id: SourceId,
    /// Its worker and rank.
    pub name: Arc<SourceName>,
    /// The last epoch that it named.
    pub epoch: Option<u64>,
    /// The number of the batch that is due; `None` after the last of all numbers.
    pub due: Option<u64>,
    /// Whether batches of it are missing.
    pub is_unsure: bool,
    /// Pairs of block and tier that it has.
    pub n_blocks: u64,
}

/// The names of all sources at one moment.
#[derive(Debug, Clone)]
pub struct SourceNames {
    names: Arc<Vec<Option<Arc<SourceName>>>>,
}

impl SourceNames {
    /// The name of a source.
    pub fn get(&self, source: SourceId) -> Option<&Arc<SourceName>> {
        self.names.get(source.as_index())?.as_ref()
    }

    /// The source of a name.
    pub fn find(&self, name: &SourceName) -> Option<SourceId> {
        let at = self.names.iter().position(|other| other.as_deref() == Some(name))?;
        Some(SourceId(at as u32))
    }
}

impl HolderReader {
    /// The names of all sources. A lookup's row is of the source of that name if the name was the same, by
    /// address, before and after the lookup; otherwise its number was given out again meanwhile.
    pub fn names(&self) -> SourceNames {
        SourceNames { names: self.shared.names.load_full() }
    }

    /// Up to `limit` blocks (at least one) of a source, from the place `from` on that the page before named as the
    /// next; `None` is the first page.
    ///
    /// It takes no lock and looks at a bounded part of the index, so a page may have fewer blocks than `limit`, or
    /// none, although more follow. Over all pages, a block that the source has throughout is listed exactly once, and
    /// no block is listed twice. The order depends on [`IndexConfig::hash_seed`](super::IndexConfig::hash_seed). Two keys with
    /// one place in the order, which has 64 bits, are on one page even if that exceeds the limit.
    pub fn blocks_of(&self, source: SourceId, from: Option<u64>, limit: usize) -> BlockPage {
        let from = from.unwrap_or(0);
        let mut tag = (from >> 32) as u32;
        let mut page = BlockPage::default();
        let mut root = self.shared.root.load();
        let mut next_load = LINES_PER_ROOT;
        let mut cache = (SetRef::EMPTY, 0);
        let mut line: Vec<Listed> = Vec::new();
        loop {
            let Some((end, n_lines)) = self.list_line(&root, source, tag, &mut cache, &mut line) else {
                root = self.shared.root.load();
                cache = (SetRef::EMPTY, 0);
                continue;
            };
            page.n_lines += n_lines;
            line.sort_unstable();
            line.dedup_by_key(|(place, key, _)| (*place, *key));
            let mut last_place = None;
            for (place, key, tiers) in line.drain(..).filter(|(place, ..)| *place >= from) {
                if page.blocks.len() >= limit.max(1) && last_place != Some(place) {
                    page.next = Some(place);
                    return page;
                }
                last_place = Some(place);
                page.blocks.push((key, tiers));
            }
            let Ok(next_tag) = u32::try_from(end) else { return page };
            tag = next_tag;
            if page.blocks.len() >= limit || page.n_lines >= MAX_PAGE_LINES {
                page.next = Some(u64::from(tag) << 32);
                return page;
            }
            if page.n_lines >= next_load {
                next_load = page.n_lines + LINES_PER_ROOT;
                root = self.shared.root.load();
                cache = (SetRef::EMPTY, 0);
            }
        }
    }

    /// The blocks of a source whose tags are in the line of `tag` and not below it; gives the first tag of the next
    /// line and how many lines were looked at, or `None` if the arrays at hand are too old.
    fn list_line(
        &self,
        root: &Root,
        source: SourceId,
        tag: u32,
        cache: &mut (SetRef, u8),
        found: &mut Vec<Listed>,
    ) -> Option<(u64, usize)> {
        found.clear();
        let mut is_stale = false;
        let walked = root.directory.walk_line(tag, |index: EntryIndex| {
            let Some(Some(extent)) = root.extents.get(index.slot()) else {
                is_stale = true;
                return;
            };
            // The set before the key: a set that is there says that the key is.
            let set = extent.set(index.offset());
            is_stale |= set == SetRef::MOVED;
            if !set.is_live() {
                return;
            }
            // Neighbors mostly have the same set.
            if set != cache.0 {
                let Some(tiers) = self.tiers_of(root, set, source) else {
                    is_stale = true;
                    return;
                };
                *cache = (set, tiers);
            }
            if cache.1 != 0 {
                let key = extent.key(index.offset());
                found.push((self.shared.hash_key.mix(key), BlockKey(key), cache.1));
            }
        });
        (!is_stale).then_some(walked)
    }

    /// The tiers in which a source is in a set; `None` if the arrays at hand are too old for it.
    fn tiers_of(&self, root: &Root, set: SetRef, source: SourceId) -> Option<u8> {
        let mut tiers = 0;
        let mut add = |holder| {
            if let Some(live) = self.shared.roll.live(holder)
                && live.source == source.0
            {
                tiers |= 1 << live.tier;
            }
        };
        if let Some((first, second)) = set.inline() {
            add(first);
            add(second);
            return Some(tiers);
        }
        for_each_interned(&root.sets, set, add).then_some(tiers)
    }
}

impl HolderIndex {
    /// Where a source stands.
    pub fn status(&self, source: SourceId) -> Option<SourceStatus> {
        let entry = self.sources.get(source)?;
        Some(SourceStatus {
            id: source,
            name: Arc::clone(&entry.name),
            epoch: entry.ordering.epoch,
            due: entry.ordering.due,
            is_unsure: entry.ordering.gap != Gap::None,
            n_blocks: entry.n_blocks,
        })
    }

    /// Where all sources stand.
    pub fn statuses(&self) -> impl Iterator<Item = SourceStatus> {
        (0..self.sources.list.len() as u32).filter_map(|number| self.status(SourceId(number)))
    }

    /// Takes blocks away from a source in every tier, however often it stored them; gives how many pairs of
    /// block and tier it had.
    pub fn forget(&mut self, source: SourceId, keys: &[BlockKey]) -> u64 {
        let Some(entry) = self.sources.get(source) else { return 0 };
        let holders = entry.holders;
        let mut n_forgotten = 0;
        for &BlockKey(key) in keys {
            let Some((index, set)) = self.find_entry(key) else { continue };
            let mut n_leaving = 0;
            for holder in holders.into_iter().flatten() {
                if !self.sets.contains(set, holder) {
                    continue;
                }
                self.take_store_counts(holder, index);
                self.sources.count(holder, -1);
                n_leaving += 1;
            }
            if n_leaving > 0 {
                let rest = self.sets.without(set, |member| holders.contains(&Some(member)));
                self.publish_grown_sets();
                self.put_entry_set(index, key, set, rest);
                n_forgotten += n_leaving;
            }
        }
        self.counters.blocks_removed += n_forgotten;
        self.settle();
        n_forgotten
    }
}
