//! Sets of holders, as 32 bits an entry: one or two holders are written out, larger sets are interned.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::hash_key::HashKey;

/// Holder numbers are below this: two fit beside the flag.
pub(super) const MAX_HOLDERS: usize = (1 << HOLDER_BITS) - 1;
const HOLDER_BITS: u32 = 15;
const HOLDER_MASK: u32 = (1 << HOLDER_BITS) - 1;
const INLINE: u32 = 1 << 31;
/// Fills up the last word of an interned set.
const NO_HOLDER: u16 = u16::MAX;

/// Sizes of interned sets: class `c` has room for `4 << c` holders.
const N_CLASSES: usize = 14;
const CLASS_SHIFT: u32 = 27;
const INDEX_MASK: u32 = (1 << CLASS_SHIFT) - 1;
/// Words of a chunk, where one set is not larger.
const CHUNK_WORDS: usize = 1024;
/// The first numbers of class 0 mean an empty and a moved entry.
const FIRST_INDEX: u32 = 2;

/// A set of holders as an entry names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SetRef(pub(super) u32);

/// The words of interned sets by class and chunk; four holders a word, in rising order.
pub(super) type SetChunks = Vec<Vec<Arc<[AtomicU64]>>>;

/// Holders of one set, on the way out.
pub(super) type Members = Vec<u16>;

/// The writer's side.
#[derive(Debug)]
pub(super) struct Sets {
    chunks: SetChunks,
    n_references: Vec<Vec<u32>>,
    free: Vec<Vec<u32>>,
    interned: HashMap<Box<[u16]>, SetRef, HashKey>,
    scratch: Members,
    n_chunk_words: u64,
    n_interned_members: u64,
    /// Sets without a reference, whose numbers readers may still know.
    pub(super) unreferenced: Vec<SetRef>,
    /// Chunks were added since the last look.
    pub(super) grown: bool,
}

impl SetRef {
    /// No holder: the entry is dead.
    pub(super) const EMPTY: Self = Self(0);
    /// The entry was copied to another place; the table knows where.
    pub(super) const MOVED: Self = Self(1);

    pub(super) fn one(holder: u16) -> Self {
        Self::two(holder, holder)
    }

    fn two(first: u16, second: u16) -> Self {
        Self(INLINE | u32::from(second) << HOLDER_BITS | u32::from(first))
    }

    pub(super) fn is_live(self) -> bool {
        self.0 > Self::MOVED.0
    }

    /// The one or two holders of a set that is written out.
    pub(super) fn inline(self) -> Option<(u16, u16)> {
        let first = (self.0 & HOLDER_MASK) as u16;
        let second = (self.0 >> HOLDER_BITS & HOLDER_MASK) as u16;
        (self.0 & INLINE != 0).then_some((first, second))
    }

    fn class(self) -> usize {
        (self.0 >> CLASS_SHIFT) as usize
    }

    fn index(self) -> usize {
        (self.0 & INDEX_MASK) as usize
    }
}

/// Hands every holder of an interned set to `take`; false if the chunk is newer than these.
#[inline]
pub(super) fn for_each_interned(chunks: &SetChunks, set: SetRef, mut take: impl FnMut(u16)) -> bool {
    let n_words = 1_usize << set.class();
    let per_chunk = (CHUNK_WORDS / n_words).max(1);
    let chunk = chunks.get(set.class()).and_then(|chunks| chunks.get(set.index() / per_chunk));
    let Some(chunk) = chunk else { return false };
    let first = set.index() % per_chunk * n_words;
    for word in &chunk[first..first + n_words] {
        // Relaxed: the words were written before the set was stored in an entry, with release.
        let word = word.load(Relaxed);
        for lane in 0..4 {
            let holder = (word >> (16 * lane)) as u16;
            if holder == NO_HOLDER {
                return true;
            }
            take(holder);
        }
    }
    true
}

impl Sets {
    pub(super) fn new(hash_key: HashKey) -> Self {
        Self {
            chunks: vec![Vec::new(); N_CLASSES],
            n_references: vec![vec![0; FIRST_INDEX as usize]; N_CLASSES],
            free: vec![Vec::new(); N_CLASSES],
            interned: HashMap::with_hasher(hash_key),
            scratch: Vec::new(),
            n_chunk_words: 0,
            n_interned_members: 0,
            unreferenced: Vec::new(),
            grown: false,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        let references: usize = self.n_references.iter().map(Vec::capacity).sum();
        let free: usize = self.free.iter().map(Vec::capacity).sum();
        self.n_chunk_words * 8
            + (self.interned.capacity() * (size_of::<(Box<[u16]>, SetRef)>() + 1)) as u64
            + self.n_interned_members * 2
            + (references + free + self.unreferenced.capacity()) as u64 * 4
    }

    /// Changes whenever [`Self::bytes`] changes by more than a few words.
    pub(super) fn size_mark(&self) -> u64 {
        self.n_chunk_words + self.interned.capacity() as u64 + self.n_interned_members
    }

    pub(super) fn n_interned(&self) -> usize {
        self.interned.len()
    }

    /// Writes the members of a set, in rising order.
    pub(super) fn members(&self, set: SetRef, out: &mut Members) {
        out.clear();
        if let Some((first, second)) = set.inline() {
            out.push(first);
            if second != first {
                out.push(second);
            }
        } else if set.is_live() {
            for_each_interned(&self.chunks, set, |holder| out.push(holder));
        }
    }

    pub(super) fn contains(&self, set: SetRef, holder: u16) -> bool {
        if let Some((first, second)) = set.inline() {
            return first == holder || second == holder;
        }
        let mut found = false;
        if set.is_live() {
            for_each_interned(&self.chunks, set, |member| found |= member == holder);
        }
        found
    }

    /// The set with one more holder, which must not be in it. The result has no references yet.
    pub(super) fn with(&mut self, set: SetRef, holder: u16) -> SetRef {
        match set.inline() {
            Some((first, second)) if first == second => SetRef::two(first.min(holder), first.max(holder)),
            None if !set.is_live() => SetRef::one(holder),
            _ => self.change(set, |members| {
                let at = members.partition_point(|member| *member < holder);
                members.insert(at, holder);
            }),
        }
    }

    /// The set without the holders that `leaves` names. The result has no references yet.
    pub(super) fn without(&mut self, set: SetRef, mut leaves: impl FnMut(u16) -> bool) -> SetRef {
        match set.inline() {
            Some((first, second)) => match (leaves(first), leaves(second)) {
                (true, true) => SetRef::EMPTY,
                (true, false) => SetRef::one(second),
                (false, true) => SetRef::one(first),
                (false, false) => set,
            },
            None if !set.is_live() => set,
            None => self.change(set, |members| members.retain(|member| !leaves(*member))),
        }
    }

    /// The set with exactly these members, in rising order and without repetition.
    pub(super) fn of(&mut self, members: &[u16]) -> SetRef {
        match *members {
            [] => SetRef::EMPTY,
            [only] => SetRef::one(only),
            [first, second] => SetRef::two(first, second),
            _ => self.intern(members),
        }
    }

    /// Notes that so many more entries have the set.
    pub(super) fn retain(&mut self, set: SetRef, n_entries: u32) {
        if set.inline().is_none() && set.is_live() {
            self.n_references[set.class()][set.index()] += n_entries;
        }
    }

    /// Notes that so many entries have it no more.
    pub(super) fn release(&mut self, set: SetRef, n_entries: u32) {
        if set.inline().is_some() || !set.is_live() {
            return;
        }
        let count = &mut self.n_references[set.class()][set.index()];
        *count -= n_entries;
        if *count == 0 {
            self.forget(set);
        }
    }

    /// Gives the number of a set back that was made and then not used.
    pub(super) fn release_if_unused(&mut self, set: SetRef) {
        if set.inline().is_none() && set.is_live() && self.n_references[set.class()][set.index()] == 0 {
            self.forget(set);
        }
    }

    /// Makes a number free that no reader knows any more.
    pub(super) fn recycle(&mut self, set: SetRef) {
        self.free[set.class()].push(set.index() as u32);
    }

    /// What readers are given.
    pub(super) fn published(&mut self) -> SetChunks {
        self.grown = false;
        self.chunks.clone()
    }

    fn forget(&mut self, set: SetRef) {
        let mut members = std::mem::take(&mut self.scratch);
        self.members(set, &mut members);
        if self.interned.remove(members.as_slice()).is_some() {
            self.n_interned_members -= members.len() as u64;
            self.unreferenced.push(set);
        }
        if self.interned.len() * 8 < self.interned.capacity() && self.interned.capacity() > 1024 {
            self.interned.shrink_to(self.interned.len() * 2);
        }
        self.scratch = members;
    }

    fn change(&mut self, set: SetRef, edit: impl FnOnce(&mut Members)) -> SetRef {
        let mut members = std::mem::take(&mut self.scratch);
        self.members(set, &mut members);
        edit(&mut members);
        let changed = self.of(&members);
        self.scratch = members;
        changed
    }

    fn intern(&mut self, members: &[u16]) -> SetRef {
        if let Some(set) = self.interned.get(members) {
            return *set;
        }
        let class = members.len().div_ceil(4).next_power_of_two().trailing_zeros() as usize;
        let n_words = 1_usize << class;
        let per_chunk = (CHUNK_WORDS / n_words).max(1);
        let index = self.free[class].pop().unwrap_or_else(|| {
            self.n_references[class].push(0);
            self.n_references[class].len() as u32 - 1
        }) as usize;
        while self.chunks[class].len() * per_chunk <= index {
            let n_chunk_words = per_chunk * n_words;
            self.chunks[class].push((0..n_chunk_words).map(|_| AtomicU64::new(u64::MAX)).collect());
            self.n_chunk_words += n_chunk_words as u64;
            self.grown = true;
        }
        let first = index % per_chunk * n_words;
        let words = &self.chunks[class][index / per_chunk][first..first + n_words];
        for (at, word) in words.iter().enumerate() {
            let lanes =
                (0..4).map(|lane| u64::from(members.get(at * 4 + lane).copied().unwrap_or(NO_HOLDER)));
            word.store(
                lanes.enumerate().fold(0, |word, (lane, holder)| word | holder << (16 * lane)),
                Relaxed,
            );
        }
        let set = SetRef((class as u32) << CLASS_SHIFT | index as u32);
        self.interned.insert(members.into(), set);
        self.n_interned_members += members.len() as u64;
        set
    }
}
