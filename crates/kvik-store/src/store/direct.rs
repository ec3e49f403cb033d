//! Chunks that their reader fetches from files by itself, past memory: a device that reads into memory of its own.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvik_tier::{ChunkFile, GetOutcome, Lease, TierError, TierKind};

use super::Store;
use super::core::Core;
use super::inquiry::ChunkPlaces;
use super::lookup::all_ranks_of;
use crate::chain::Chain;
use crate::counters::Counter;
use crate::tiers::{MAX_TIERS, RAM, TierIdx};

/// Sections are a multiple of this, so that a device computes their checksums word by word.
const SECTION_ALIGNMENT: usize = 8;

/// Chunks of a chain of which some are in memory and the others in files.
///
/// Those in memory are leased. A file is opened when it is read, and what has left its tier until then is not there.
#[derive(Debug)]
pub struct FileChunks {
    core: Arc<Core>,
    chain: Chain,
    first_chunk: usize,
    generation: u64,
    places: Vec<Place>,
}

#[derive(Debug)]
enum Place {
    Memory(Lease),
    File(TierIdx),
}

/// A chunk in an open file, one section for each layer. Its reader tells what became of it; one that is dropped without
/// that was not read.
#[derive(Debug)]
pub struct OpenChunk {
    core: Arc<Core>,
    chain: Chain,
    chunk_idx: usize,
    tier: TierIdx,
    file: ChunkFile,
    is_told: AtomicBool,
}

/// What became of the reading of a chunk from its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkRead {
    /// All of it was read, and every section had its checksum.
    Whole,
    /// A section did not have its checksum.
    Corrupt,
    /// It could not be read.
    Failed,
}

impl Store {
    /// Chunks of a chain, from `first_chunk` on, for a reader that fetches those in files by itself; `None` unless all that
    /// `places` has are in memory or in files, with at least one in a file and no layer longer than `max_section_bytes`.
    ///
    /// They count as retrieved.
    pub fn file_chunks(
        &self,
        chain: &Chain,
        first_chunk: usize,
        places: &ChunkPlaces,
        max_section_bytes: usize,
    ) -> Option<FileChunks> {
        let core = self.core();
        let generation = chain.namespace().generation();
        let end = (first_chunk + places.n_chunks()).min(core.n_chunks(chain));
        let fits = |chunk_idx| {
            let n_bytes = chain.section_bytes(chunk_idx);
            n_bytes <= max_section_bytes && n_bytes.is_multiple_of(SECTION_ALIGNMENT)
        };
        if chain.n_ranks() != 1 || !(first_chunk..end).all(fits) {
            return None;
        }
        let places: Option<Vec<Place>> =
            (first_chunk..end).map(|chunk_idx| core.place_of(chain, chunk_idx)).collect();
        let places = places.filter(|places| places.iter().any(|place| matches!(place, Place::File(_))))?;
        core.counters.add(Counter::Retrieves, 1);
        core.counters
            .add(Counter::RequestedTokens, chain.tokens_between(first_chunk..chain.n_chunks()) as u64);
        for (chunk_idx, place) in (first_chunk..).zip(&places) {
            core.counters.add(Counter::HitTokens(place.tier()), chain.tokens_of(chunk_idx).len() as u64);
            core.note_used(chain, chunk_idx, &core.directory.view(chain.hash(chunk_idx)));
        }
        Some(FileChunks { core: Arc::clone(core), chain: chain.clone(), first_chunk, generation, places })
    }
}

impl Core {
    /// Where a chunk of one rank is fetched from; `None` where that is neither memory nor a file.
    fn place_of(&self, chain: &Chain, chunk_idx: usize) -> Option<Place> {
        let ranks = self.directory.view(chain.hash(chunk_idx)).ranks;
        let has = |tier: &TierIdx| ranks[*tier] == all_ranks_of(chain);
        if has(&RAM)
            && let Some(lease) = self.ram.lease(&chain.key_of(chunk_idx, 0), chain.digest_of(chunk_idx))
        {
            return Some(Place::Memory(lease));
        }
        let tier = (1..MAX_TIERS).find(has)?;
        self.lower(tier).filter(|lower| lower.tier.has_files()).map(|_| Place::File(tier))
    }
}

impl FileChunks {
    /// Which they are.
    pub fn chunks(&self) -> Range<usize> {
        self.first_chunk..self.first_chunk + self.places.len()
    }

    /// What kind of tier a chunk comes from; `None` where there is no such chunk.
    pub fn kind(&self, chunk_idx: usize) -> Option<TierKind> {
        self.place(chunk_idx).map(|place| self.core.kind_of(place.tier()))
    }

    /// The bytes of a chunk that is in memory.
    pub fn memory(&self, chunk_idx: usize) -> Option<&[u8]> {
        match self.place(chunk_idx)? {
            Place::Memory(lease) => Some(&lease[..]),
            Place::File(_) => None,
        }
    }

    /// Opens the file of a chunk and proves whose it is and of which tokens; `None` where it is not there any more, or is not
    /// what was stored.
    pub fn open(&self, chunk_idx: usize) -> Option<OpenChunk> {
        let Place::File(tier) = *self.place(chunk_idx)? else { return None };
        let lower = self.core.lower(tier)?;
        let (core, chain) = (&self.core, &self.chain);
        if chain.namespace().generation() != self.generation {
            return None;
        }
        let opened = lower.tier.open_chunk(chain.key_of(chunk_idx, 0), chain.digest_of(chunk_idx));
        let opened = opened.and_then(|file| {
            if file.n_bytes() != chain.payload_bytes(chunk_idx) as u64 {
                return Err(GetOutcome::Corrupt("length"));
            }
            // Sections of another length were written for other readers: only memory takes them.
            let n_layers = chain.space().format().n_layers as usize;
            let is_by_layers = file.section_bytes() == chain.section_bytes(chunk_idx) as u64
                && file.checksums().len() == n_layers;
            if is_by_layers { Ok(file) } else { Err(GetOutcome::Skipped) }
        });
        match opened {
            Ok(file) => {
                let (core, chain) = (Arc::clone(core), chain.clone());
                Some(OpenChunk { core, chain, chunk_idx, tier, file, is_told: AtomicBool::new(false) })
            }
            Err(outcome) => {
                core.note_outcome(lower, chain, chunk_idx, 0, &outcome);
                core.counters.add(Counter::FailedDirectReads, 1);
                None
            }
        }
    }

    fn place(&self, chunk_idx: usize) -> Option<&Place> {
        self.places.get(chunk_idx.checked_sub(self.first_chunk)?)
    }
}

impl Place {
    fn tier(&self) -> TierIdx {
        match self {
            Self::Memory(_) => RAM,
            Self::File(tier) => *tier,
        }
    }
}

impl OpenChunk {
    /// Where its bytes are, and their checksums.
    pub fn file(&self) -> &ChunkFile {
        &self.file
    }

    /// Tells what became of it; once is enough. One that is wrong leaves its tier.
    pub fn note_read(&self, read: ChunkRead) {
        let Some(lower) = self.core.lower(self.tier).filter(|_| !self.is_told.swap(true, Ordering::Relaxed))
        else {
            return;
        };
        let outcome = match read {
            ChunkRead::Whole => GetOutcome::Hit,
            ChunkRead::Corrupt => GetOutcome::Corrupt("section checksum"),
            ChunkRead::Failed => {
                let error = std::io::Error::other("the device could not read it");
                GetOutcome::Failed(TierError::io("read a chunk from its file", error))
            }
        };
        let counters = &self.core.counters;
        match read {
            ChunkRead::Whole => {
                counters.add(Counter::DirectChunks, 1);
                counters.add(Counter::DirectBytes, self.file.n_bytes());
            }
            ChunkRead::Corrupt | ChunkRead::Failed => counters.add(Counter::FailedDirectReads, 1),
        }
        if read == ChunkRead::Corrupt {
            self.file.note_corrupt();
        }
        self.core.note_outcome(lower, &self.chain, self.chunk_idx, 0, &outcome);
    }
}
