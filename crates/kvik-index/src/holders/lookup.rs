//! The readers of the index: one pass over the keys, without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use arc_swap::ArcSwap;

use super::arena::{EXTENT_ENTRIES, EntryIndex, Extent};
use super::hash_key::HashKey;
use super::matches::{LookupOptions, Matches, Walk};
use super::reclaim::Root;
use super::sets::{SetRef, for_each_interned};
use super::sources::{Roll, SourceName};
use super::types::{BlockKey, SourceId};

/// Keys whose table lines are asked for at a time where a prompt lies in small pieces.
const TOUCH_GROUP: usize = 8;

/// A reader of the index; clones read the same index.
///
/// A lookup takes no lock and is never blocked by the writer.
#[derive(Debug, Clone)]
pub struct HolderReader {
    pub(super) shared: Arc<Shared>,
}

/// What the writer and all readers share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) root: ArcSwap<Root>,
    pub(super) roll: Arc<Roll>,
    pub(super) names: ArcSwap<Vec<Option<Arc<SourceName>>>>,
    pub(super) hash_key: HashKey,
    /// The budget comes near: lookups mark where they ended.
    pub(super) wants_marks: AtomicBool,
}

/// What a search for one key came to.
enum Found<'a> {
    /// The entry, and its set when it was read.
    Entry(&'a Arc<Extent>, usize, SetRef),
    Absent,
    /// The arrays at hand are older than what they point to.
    Stale,
}

impl HolderReader {
    /// The worker and rank of a source.
    pub fn name(&self, source: SourceId) -> Option<Arc<SourceName>> {
        self.shared.names.load().get(source.as_index())?.clone()
    }

    /// Finds for every source how much of a prompt it has; `keys` are the prompt's blocks in order.
    ///
    /// The answer replaces what is in `matches`, whose memory is used again: after the first few calls
    /// nothing is allocated. Each block is judged at one moment during the call.
    pub fn lookup(&self, keys: &[BlockKey], options: LookupOptions<'_>, matches: &mut Matches) {
        matches.begin(options.order);
        let wants_marks = self.shared.wants_marks.load(Relaxed);
        let mut guard = self.shared.root.load();
        let mut at = 0;
        let mut touched_to = 0;
        'keys: while at < keys.len() {
            let root: &Root = &guard;
            let (extent, first, set) = match self.find(root, keys[at].0) {
                Found::Entry(extent, offset, set) => (extent, offset, set),
                Found::Absent => {
                    matches.end_prefix();
                    if options.walk == Walk::Prefix {
                        break;
                    }
                    at += 1;
                    if at >= touched_to {
                        touched_to = self.touch(root, keys, at);
                    }
                    continue;
                }
                Found::Stale => {
                    guard = self.shared.root.load();
                    continue;
                }
            };
            // One set after the other, each as far as neighbors have it.
            let stretch_start = at;
            let mut set = set;
            let sets = &extent.sets[first..];
            let in_extent = keys[at..].iter().zip(&extent.keys[first..]).zip(sets);
            let n_possible = in_extent.len();
            loop {
                if !self.begin_segment(root, set, options, matches) {
                    matches.abandon_segment();
                    guard = self.shared.root.load();
                    continue 'keys;
                }
                let segment_start = at;
                at += 1;
                let done = at - stretch_start;
                let equal = keys[at..]
                    .iter()
                    .zip(&extent.keys[first + done..])
                    .zip(&sets[done..])
                    .take_while(|((wanted, key), other)| {
                        key.load(Relaxed) == wanted.0 && other.load(Relaxed) == set.0
                    })
                    .count();
                at += equal;
                matches.end_segment((at - segment_start) as u32, at as u32, options.walk);
                if options.walk == Walk::Prefix && matches.n_active() == 0 {
                    break 'keys;
                }
                let done = at - stretch_start;
                if done == n_possible {
                    break;
                }
                set = extent.set(first + done);
                if !set.is_live() || extent.key(first + done) != keys[at].0 {
                    break;
                }
            }
            if wants_marks {
                extent.mark(first + at - stretch_start - 1);
            }
            if at - stretch_start < 4 && at >= touched_to {
                touched_to = self.touch(root, keys, at);
            }
        }
        matches.finish();
    }

    /// Asks for the table lines of the next keys, so that their misses overlap; gives the place behind them.
    #[inline]
    fn touch(&self, root: &Root, keys: &[BlockKey], at: usize) -> usize {
        let end = (at + TOUCH_GROUP).min(keys.len());
        for key in &keys[at..end] {
            root.directory.prefetch(self.shared.hash_key.tag(key.0));
        }
        end
    }

    #[inline]
    fn find<'a>(&self, root: &'a Root, key: u64) -> Found<'a> {
        let mut found = None;
        let mut is_stale = false;
        let index = root.directory.find(self.shared.hash_key.tag(key), |index: EntryIndex| {
            let Some(Some(extent)) = root.extents.get(index.slot()) else {
                is_stale = true;
                return true;
            };
            // The set before the key: a set that is there says that the key is.
            let set = extent.set(index.offset());
            let fits = extent.key(index.offset()) == key;
            if fits {
                found = Some((extent, set));
            }
            fits
        });
        match (index, found) {
            _ if is_stale => Found::Stale,
            (Some(index), Some((extent, set))) if set.is_live() => Found::Entry(extent, index.offset(), set),
            // The table was asked before the entry moved, or these arrays are from before that.
            (_, Some((_, SetRef::MOVED))) => Found::Stale,
            _ => Found::Absent,
        }
    }

    /// Enters the holders of a set; false if the arrays at hand are too old for it.
    #[inline]
    fn begin_segment(
        &self,
        root: &Root,
        set: SetRef,
        options: LookupOptions<'_>,
        matches: &mut Matches,
    ) -> bool {
        let roll = &self.shared.roll;
        let mut enter = |holder| {
            if let Some(live) = roll.live(holder)
                && options.only.is_none_or(|only| only.contains_index(live.source))
            {
                matches.enter(live, options.walk);
            }
        };
        if let Some((first, second)) = set.inline() {
            enter(first);
            if second != first {
                enter(second);
            }
            return true;
        }
        for_each_interned(&root.sets, set, enter)
    }
}

const _: () = assert!(EXTENT_ENTRIES.is_power_of_two(), "an index is split into slot and offset by bits");

#[cfg(test)]
mod tests {
    use super::super::{Batch, Event, HolderIndex, IndexConfig, Tier};
    use super::*;

    #[test]
    fn a_reader_of_replaced_arrays_learns_that_an_entry_has_moved() {
        let mut index = HolderIndex::new(IndexConfig::default());
        let source = index.add_source("worker", 0).unwrap();
        let keys: Vec<BlockKey> = (0..80_000).map(BlockKey).collect();
        let (tier, parent) = (Tier::Gpu, None);
        let reader = index.reader();
        let mut send = |sequence, event| {
            let batch = Batch { source, epoch: None, sequence, replayed: false, events: &[event] };
            let _verdict = index.apply(&batch);
            index.maintain(usize::MAX);
            index.counters().entries_moved
        };
        send(0, Event::Stored { tier, parent, keys: &keys[..40_000] });
        let old = reader.shared.root.load_full();
        // The pages grow, so the old ones still point to where the first key was.
        send(1, Event::Stored { tier, parent, keys: &keys[40_000..] });
        let n_moved = send(2, Event::Removed { tier, keys: &keys[1..32_000] });
        assert!(n_moved > 0);
        assert!(matches!(reader.find(&old, 0), Found::Stale));
        let current = reader.shared.root.load_full();
        assert!(matches!(reader.find(&current, 0), Found::Entry(..)));
        assert!(matches!(reader.find(&current, 1), Found::Absent));
    }
}
