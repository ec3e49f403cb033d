//! The index as bytes, so that a restart does not start from nothing.
//!
//! Everything is little-endian. A header, the sources, their holders, the interned sets, then the
//! keys of all entries and their sets in the order in which they lie in memory, repetitions, and a
//! checksum over all before it. Nothing of a snapshot is believed before it is checked.

use std::io::Write;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::arena::{EXTENT_BYTES, EXTENT_ENTRIES, EntryIndex};
use super::index::HolderIndex;
use super::ordering::{Gap, Ordering};
use super::reclaim::Root;
use super::sets::{MAX_HOLDERS, SetRef};
use super::sources::SourceName;
use super::table::Table;
use super::types::{IndexConfig, IndexError, SourceId, Tier};

const MAGIC: [u8; 8] = *b"KVIKHIDX";
const VERSION: u32 = 1;
const CHECKSUM_BYTES: usize = 8;
/// Set in an entry's word if one or two holders are written out in the rest of it.
const INLINE: u32 = 1 << 31;
/// Set if the entry begins a run.
const STARTS_RUN: u32 = 1 << 30;
const HOLDER_BITS: u32 = 15;

/// A writer that knows the checksum of what went through it.
struct Summed<W> {
    out: W,
    buffer: Vec<u8>,
    sum: Xxh3,
}

/// A reader of bytes that may be short.
struct Fields<'a> {
    rest: &'a [u8],
}

impl HolderIndex {
    /// Writes the index as a snapshot. What is retired is swept first; replacements in progress are abandoned.
    pub fn write_snapshot(&mut self, out: impl Write) -> Result<(), IndexError> {
        self.abandon_replacements(|_| true);
        self.sweep_all();
        let mut out = Summed { out, buffer: Vec::new(), sum: Xxh3::new() };
        let sources: Vec<usize> =
            (0..self.sources.list.len()).filter(|at| self.sources.list[*at].is_some()).collect();
        let mut holder_numbers = vec![u16::MAX; self.sources.holders.len()];
        let mut holders = Vec::new();
        let mut n_repeats = 0_u64;
        for (number, holder) in self.sources.holders.iter().enumerate() {
            if let Some(holder) = holder {
                holder_numbers[number] = holders.len() as u16;
                holders.push(holder);
                n_repeats += holder.store_counts.n_entries();
            }
        }
        let (set_numbers, sets) = self.number_sets(&holder_numbers);

        out.bytes(&MAGIC)?;
        for word in [VERSION, self.config.block_tokens, self.config.key_mode] {
            out.bytes(&word.to_le_bytes())?;
        }
        for count in [sources.len(), holders.len(), sets.len()] {
            out.bytes(&(count as u32).to_le_bytes())?;
        }
        out.bytes(&self.arena.n_live.to_le_bytes())?;
        out.bytes(&n_repeats.to_le_bytes())?;
        for source in sources.iter().filter_map(|at| self.sources.list[*at].as_ref()) {
            out.bytes(&(source.name.worker.len() as u16).to_le_bytes())?;
            out.bytes(source.name.worker.as_bytes())?;
            out.bytes(&source.name.rank.to_le_bytes())?;
            for number in [source.ordering.epoch, source.ordering.due] {
                out.bytes(&[u8::from(number.is_some())])?;
                out.bytes(&number.unwrap_or(0).to_le_bytes())?;
            }
            let (kind, until) = match source.ordering.gap {
                Gap::None => (0, 0),
                Gap::Open { until } => (1, until),
                Gap::Skipped => (2, 0),
            };
            out.bytes(&[kind])?;
            out.bytes(&until.to_le_bytes())?;
        }
        for holder in &holders {
            let source = sources.partition_point(|at| *at < holder.source as usize) as u32;
            out.bytes(&source.to_le_bytes())?;
            out.bytes(&[holder.tier.as_index() as u8])?;
        }
        for members in &sets {
            out.bytes(&(members.len() as u16).to_le_bytes())?;
            for member in members {
                out.bytes(&member.to_le_bytes())?;
            }
        }
        self.for_each_entry(|key, _, _| out.bytes(&key.to_le_bytes()))?;
        self.for_each_entry(|_, set, starts_run| {
            let word = match set.inline() {
                Some((a, b)) => {
                    let (a, b) = (holder_numbers[usize::from(a)], holder_numbers[usize::from(b)]);
                    INLINE | u32::from(a.max(b)) << HOLDER_BITS | u32::from(a.min(b))
                }
                None => set_numbers.get(&set.0).copied().unwrap_or(0),
            };
            out.bytes(&(word | if starts_run { STARTS_RUN } else { 0 }).to_le_bytes())
        })?;
        for (number, holder) in holders.iter().enumerate() {
            for (index, count) in holder.store_counts.iter() {
                let key = self.arena.entry(index).map_or(0, |(key, _)| key);
                out.bytes(&(number as u16).to_le_bytes())?;
                out.bytes(&key.to_le_bytes())?;
                out.bytes(&count.to_le_bytes())?;
            }
        }
        out.finish()
    }

    /// Builds an index from a snapshot.
    ///
    /// The bytes may be anything: what does not fit together is refused, and nothing is allocated that
    /// the bytes do not pay for.
    pub fn from_snapshot(config: IndexConfig, bytes: &[u8]) -> Result<Self, IndexError> {
        let mut index = Self::new(config);
        let (body, checksum) = bytes
            .split_last_chunk::<CHECKSUM_BYTES>()
            .ok_or(IndexError::BadSnapshot { reason: "too short" })?;
        let mut fields = Fields { rest: body };
        if fields.array::<8>()? != MAGIC || fields.u32()? != VERSION {
            return bad("not a snapshot of this version");
        }
        if xxh3_64(body) != u64::from_le_bytes(*checksum) {
            return bad("the checksum is wrong");
        }
        for (field, expected) in [("block_tokens", config.block_tokens), ("key_mode", config.key_mode)] {
            let found = fields.u32()?;
            if found != expected {
                return Err(IndexError::OtherKeys { field, found, expected });
            }
        }
        let (n_sources, n_holders, n_sets) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let (n_entries, n_repeats) = (fields.u64()?, fields.u64()?);
        if n_sources as usize > index.config.max_sources {
            return Err(IndexError::TooManySources { max_sources: index.config.max_sources });
        }
        for _ in 0..n_sources {
            index.load_source(&mut fields)?;
        }
        if n_holders as usize > MAX_HOLDERS {
            return bad("too many holders");
        }
        for _ in 0..n_holders {
            index.load_holder(&mut fields, n_sources)?;
        }
        let mut sets = Vec::new();
        for _ in 0..n_sets {
            sets.push(index.load_set(&mut fields, n_holders)?);
        }
        let n_extents = n_entries.div_ceil(EXTENT_ENTRIES as u64);
        let needed_bytes =
            n_extents.saturating_mul(EXTENT_BYTES).saturating_add(n_entries.saturating_mul(16));
        if needed_bytes > config.budget_bytes {
            return Err(IndexError::OverBudget { needed_bytes, budget_bytes: config.budget_bytes });
        }
        let n_key_bytes = (n_entries as usize).checked_mul(8).filter(|n| *n <= fields.rest.len());
        let keys =
            fields.take(n_key_bytes.ok_or(IndexError::BadSnapshot { reason: "the keys are cut off" })?)?;
        let words = fields.take(n_entries as usize * 4)?;
        index.load_entries(keys, words, &sets, n_holders)?;
        for set in sets {
            index.sets.release_if_unused(set);
        }
        for _ in 0..n_repeats {
            let (holder, key, count) = (fields.u16()?, fields.u64()?, fields.u32()?);
            index.load_repeat(holder, key, count)?;
        }
        if !fields.rest.is_empty() {
            return bad("bytes are left over");
        }
        index.publish_names();
        index.reclaimer.publish(
            &index.shared.root,
            Root {
                directory: Arc::new(index.table.published()),
                extents: Arc::new(index.arena.published()),
                sets: Arc::new(index.sets.published()),
            },
        );
        index.settle();
        Ok(index)
    }

    /// Numbers the interned sets that entries have, and lists their members.
    fn number_sets(&self, holder_numbers: &[u16]) -> (std::collections::HashMap<u32, u32>, Vec<Vec<u16>>) {
        let mut numbers = std::collections::HashMap::new();
        let mut sets = Vec::new();
        let mut last = SetRef::EMPTY;
        let mut members = Vec::new();
        let Ok(()) = self.for_each_entry(|_, set, _| {
            if set != last && set.inline().is_none() {
                numbers.entry(set.0).or_insert_with(|| {
                    self.sets.members(set, &mut members);
                    let mut numbered: Vec<u16> =
                        members.iter().map(|holder| holder_numbers[usize::from(*holder)]).collect();
                    numbered.sort_unstable();
                    sets.push(numbered);
                    sets.len() as u32 - 1
                });
            }
            last = set;
            Ok::<(), std::convert::Infallible>(())
        });
        (numbers, sets)
    }

    /// Visits all live entries in the order of age.
    fn for_each_entry<E>(&self, mut visit: impl FnMut(u64, SetRef, bool) -> Result<(), E>) -> Result<(), E> {
        for slot in self.arena.sealed.iter().chain(&self.arena.tail) {
            let Some(state) = self.arena.state(*slot as usize) else { continue };
            let mut starts_run = true;
            for offset in 0..state.n_used {
                starts_run |= state.starts_run(offset);
                let set = state.extent.set(offset);
                if set.is_live() {
                    visit(state.extent.key(offset), set, starts_run)?;
                    starts_run = false;
                }
            }
        }
        Ok(())
    }

    fn load_source(&mut self, fields: &mut Fields<'_>) -> Result<(), IndexError> {
        let n_name_bytes = usize::from(fields.u16()?);
        if n_name_bytes == 0 || n_name_bytes > Self::MAX_NAME_BYTES {
            return Err(IndexError::BadName { n_bytes: n_name_bytes });
        }
        let Ok(worker) = std::str::from_utf8(fields.take(n_name_bytes)?) else {
            return bad("a name is not UTF-8");
        };
        let name = SourceName { worker: worker.into(), rank: fields.u32()? };
        let (epoch, due) = (fields.option()?, fields.option()?);
        let gap = match (fields.u8()?, fields.u64()?) {
            (0, _) => Gap::None,
            (1, until) => Gap::Open { until },
            (2, _) => Gap::Skipped,
            _ => return bad("no such kind of gap"),
        };
        if self.sources.by_name.contains_key(&name) {
            return bad("a source is there twice");
        }
        let max_sources = self.config.max_sources;
        let added = self.sources.add(name, Ordering { epoch, due, gap });
        added.map(drop).ok_or(IndexError::TooManySources { max_sources })
    }

    fn load_holder(&mut self, fields: &mut Fields<'_>, n_sources: u32) -> Result<(), IndexError> {
        let (source, tier) = (fields.u32()?, fields.u8()?);
        let Some(tier) = Tier::ALL.get(usize::from(tier)).copied().filter(|_| source < n_sources) else {
            return bad("a holder is of no source or no tier");
        };
        let generation = self.sources.get(SourceId(source)).map_or(0, |source| source.generation);
        let holder = self.sources.open_holder(SourceId(source), tier, self.hash_key);
        if let Some(holder) = holder {
            self.sources.show_holder(holder, generation);
        }
        let place = self.sources.get_mut(SourceId(source)).map(|source| &mut source.holders[tier.as_index()]);
        match place {
            Some(place) if place.is_none() => *place = holder,
            _ => return bad("a holder is there twice"),
        }
        Ok(())
    }

    fn load_set(&mut self, fields: &mut Fields<'_>, n_holders: u32) -> Result<SetRef, IndexError> {
        let n_members = usize::from(fields.u16()?);
        let members = fields.take(n_members * 2)?;
        let members: Vec<u16> =
            members.as_chunks::<2>().0.iter().map(|member| u16::from_le_bytes(*member)).collect();
        let rises = members.windows(2).all(|pair| pair[0] < pair[1]);
        if n_members < 3 || !rises || members.last().is_some_and(|last| u32::from(*last) >= n_holders) {
            return bad("a set is not one");
        }
        Ok(self.sets.of(&members))
    }

    fn load_entries(
        &mut self,
        keys: &[u8],
        words: &[u8],
        sets: &[SetRef],
        n_holders: u32,
    ) -> Result<(), IndexError> {
        let (keys, words) = (keys.as_chunks::<8>().0, words.as_chunks::<4>().0);
        self.table = Table::with_room(keys.len() as u64);
        let mut set_counts = vec![0_u32; sets.len()];
        let mut holder_counts = vec![0_i64; n_holders as usize];
        for (key, word) in keys.iter().zip(words) {
            let (key, word) = (u64::from_le_bytes(*key), u32::from_le_bytes(*word));
            let set = if word & INLINE == 0 {
                let number = (word & !STARTS_RUN) as usize;
                let Some(set) = sets.get(number) else { return bad("an entry has no such set") };
                set_counts[number] += 1;
                *set
            } else {
                let mask = (1 << HOLDER_BITS) - 1;
                let (first, second) = ((word & mask) as u16, (word >> HOLDER_BITS & mask) as u16);
                if first > second || u32::from(second) >= n_holders {
                    return bad("an entry has no such holder");
                }
                holder_counts[usize::from(first)] += 1;
                if first == second {
                    SetRef::one(first)
                } else {
                    holder_counts[usize::from(second)] += 1;
                    self.sets.of(&[first, second])
                }
            };
            if self.arena.tail_is_full() && self.arena.open_extent().is_none() {
                return bad("too many entries");
            }
            self.arena.append(key, set, word & STARTS_RUN != 0);
        }
        self.load_table()?;
        let mut members = Vec::new();
        for (set, count) in sets.iter().zip(&set_counts) {
            self.sets.retain(*set, *count);
            self.sets.members(*set, &mut members);
            for holder in &members {
                holder_counts[usize::from(*holder)] += i64::from(*count);
            }
        }
        for (holder, count) in holder_counts.iter().enumerate() {
            self.sources.count(holder as u16, *count);
        }
        Ok(())
    }

    /// Inserts all entries into the table.
    fn load_table(&mut self) -> Result<(), IndexError> {
        let places: Vec<EntryIndex> =
            self.arena.sealed.iter().chain(&self.arena.tail).map(|slot| EntryIndex::new(*slot, 0)).collect();
        let absorbed = self.table.absorb_many(&self.arena, &places, self.hash_key, self.config.n_threads);
        if absorbed.n_twins > 0 { bad("a key is there twice") } else { Ok(()) }
    }

    fn load_repeat(&mut self, holder: u16, key: u64, count: u32) -> Result<(), IndexError> {
        let Some((index, set)) = self.find_entry(key) else { return bad("a repetition is of no block") };
        if count == 0 || !self.sets.contains(set, holder) {
            return bad("a repetition is of no holder");
        }
        self.arena.set_repeated(index, 1);
        self.sources.with_store_counts(holder, |store_counts| store_counts.add(index, count));
        Ok(())
    }
}

impl<W: Write> Summed<W> {
    fn bytes(&mut self, bytes: &[u8]) -> Result<(), IndexError> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= 1 << 16 {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IndexError> {
        self.sum.update(&self.buffer);
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<(), IndexError> {
        self.flush()?;
        self.out.write_all(&self.sum.digest().to_le_bytes())?;
        self.out.flush()?;
        Ok(())
    }
}

impl<'a> Fields<'a> {
    fn take(&mut self, n_bytes: usize) -> Result<&'a [u8], IndexError> {
        let (taken, rest) =
            self.rest.split_at_checked(n_bytes).ok_or(IndexError::BadSnapshot { reason: "it is cut off" })?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], IndexError> {
        let (taken, rest) =
            self.rest.split_first_chunk::<N>().ok_or(IndexError::BadSnapshot { reason: "it is cut off" })?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, IndexError> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, IndexError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, IndexError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, IndexError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn option(&mut self) -> Result<Option<u64>, IndexError> {
        let (is_some, number) = (self.u8()?, self.u64()?);
        Ok((is_some != 0).then_some(number))
    }
}

fn bad<T>(reason: &'static str) -> Result<T, IndexError> {
    Err(IndexError::BadSnapshot { reason })
}
