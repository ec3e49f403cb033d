//! The global index in this process: which worker already has how much of a prompt.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};

use kvik_index::holders::{
    Batch, BlockKey, Bridge, BridgeConfig, BridgeEvent, Event, HolderIndex, HolderReader, IndexConfig,
    LookupOptions, Matches, OwnChain, OwnRun, SourceId, Tier, Verdict,
};
use kvik_proto::events::{Attention, BlocksStored, EngineHash, EventBatch, KvEvent, Medium};
use kvik_types::BlockSize;
use parking_lot::Mutex;
use pyo3::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{InvalidValueError, invalid, invalid_type};

/// Which worker has how much of a prompt, from the KV events that vLLM and SGLang publish.
///
/// Engines may hash blocks as they like and have blocks of any size, as long as their events have tokens. Blocks with an adapter, an
/// image or a salt are left out. It names a block for a worker only if the worker said that it has it. May be used from
/// any thread; lookups take no lock.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Index {
    chain: TokenChain,
    reader: HolderReader,
    writer: Mutex<Writer>,
}

#[derive(Debug)]
struct Writer {
    index: HolderIndex,
    sources: HashMap<SourceId, Source>,
}

/// What is known of a worker's rank beside its blocks.
#[derive(Debug)]
struct Source {
    bridge: Bridge,
    /// The cache group whose blocks are kept: the first that may look back at all tokens.
    group: Option<u32>,
}

/// What one worker has of a prompt.
#[pyclass(frozen, get_all, module = "kvik")]
#[derive(Debug)]
pub(crate) struct WorkerMatch {
    /// Its name.
    worker: String,
    /// Its data-parallel rank.
    rank: u32,
    /// Tokens, from the first on, in blocks of the index.
    n_tokens: usize,
    /// Those of them that are in memory of its device.
    n_device_tokens: usize,
    /// Whether events of it are missing, so that it may have more or less.
    is_unsure: bool,
}

/// Keys of blocks: a hash of the parent's key and the tokens.
#[derive(Debug, Clone, Copy)]
struct TokenChain {
    block_tokens: usize,
    seed: u64,
}

#[pymethods]
impl Index {
    /// An empty index. `block_tokens` is the length of the blocks that it counts in; it takes at most `max_bytes`.
    #[new]
    #[pyo3(signature = (*, block_tokens=16, max_bytes=1 << 30))]
    fn new(block_tokens: usize, max_bytes: u64) -> PyResult<Self> {
        let block_tokens = BlockSize::try_new(block_tokens).map_err(|error| invalid_type(&error))?.get();
        if max_bytes < HolderIndex::MIN_BUDGET_BYTES {
            let allowed = format!("at least {}", HolderIndex::MIN_BUDGET_BYTES);
            return Err(invalid("max_bytes", &max_bytes, &allowed));
        }
        let seed = RandomState::new().hash_one(0);
        let config = IndexConfig { budget_bytes: max_bytes, hash_seed: seed, ..IndexConfig::default() };
        let index = HolderIndex::new(config);
        Ok(Self {
            chain: TokenChain { block_tokens, seed },
            reader: index.reader(),
            writer: Mutex::new(Writer { index, sources: HashMap::new() }),
        })
    }

    /// Takes one message of a worker: the payload, msgpack, that vLLM and SGLang publish over `ZeroMQ`, and its sequence number; without
    /// one it is the next. Returns what became of it:
    ///
    /// `applied`; `restarted`, where the numbers fell back: what the worker had before is forgotten; `duplicate`; `gap`, where
    /// messages before it are missing: replay from `due`, each with `is_replay`, and hand it in again, or call `skip_gap`. A message
    /// that cannot be read changes nothing.
    #[pyo3(signature = (worker, payload, *, rank=None, sequence=None, is_replay=false))]
    fn apply(
        &self,
        py: Python<'_>,
        worker: &str,
        payload: &[u8],
        rank: Option<u32>,
        sequence: Option<u64>,
        is_replay: bool,
    ) -> PyResult<&'static str> {
        py.detach(|| {
            let batch =
                EventBatch::decode(payload).map_err(|error| InvalidValueError::new_err(error.to_string()))?;
            let rank = rank.or(batch.data_parallel_rank).unwrap_or(0);
            let mut writer = self.writer.lock();
            let verdict = writer.apply(self.chain, (worker, rank), &batch.events, sequence, is_replay)?;
            Ok(match verdict {
                Verdict::Applied => "applied",
                Verdict::Restarted => "restarted",
                Verdict::Duplicate | Verdict::OldEpoch => "duplicate",
                Verdict::Gap { .. } | Verdict::UnknownSource => "gap",
            })
        })
    }

    /// The sequence number that is due from a worker; 0 where nothing came yet.
    #[pyo3(signature = (worker, *, rank=0))]
    fn due(&self, py: Python<'_>, worker: &str, rank: u32) -> u64 {
        py.detach(|| {
            let writer = self.writer.lock();
            let source = writer.index.source(worker, rank);
            source.and_then(|source| writer.index.position(source)?.1).unwrap_or(0)
        })
    }

    /// Gives up on the messages before the number `next`; the worker is unsure from then on.
    #[pyo3(signature = (worker, next, *, rank=0))]
    fn skip_gap(&self, py: Python<'_>, worker: &str, next: u64, rank: u32) -> PyResult<bool> {
        py.detach(|| {
            let mut writer = self.writer.lock();
            let source = writer.source(worker, rank)?;
            Ok(writer.index.skip_gap(source, next))
        })
    }

    /// How much of a prompt each worker has, those with most first; workers without its first block are left out.
    fn find(&self, py: Python<'_>, tokens: Vec<u32>) -> Vec<WorkerMatch> {
        py.detach(|| {
            let mut matches = Matches::default();
            self.reader.lookup(&self.chain.keys(&tokens), LookupOptions::default(), &mut matches);
            let block_tokens = self.chain.block_tokens;
            let mut found: Vec<WorkerMatch> = matches
                .rows()
                .iter()
                .filter_map(|row| {
                    let name = self.reader.name(row.source())?;
                    Some(WorkerMatch {
                        worker: name.worker.to_string(),
                        rank: name.rank,
                        n_tokens: row.prefix_blocks() as usize * block_tokens,
                        n_device_tokens: row.prefix_in(Tier::Gpu) as usize * block_tokens,
                        is_unsure: row.is_unsure(),
                    })
                })
                .filter(|found| found.n_tokens > 0)
                .collect();
            found.sort_by(|left, right| {
                let order = right.n_tokens.cmp(&left.n_tokens);
                order.then_with(|| left.worker.cmp(&right.worker)).then(left.rank.cmp(&right.rank))
            });
            found
        })
    }

    /// Forgets a worker's rank; says whether it was there.
    #[pyo3(signature = (worker, *, rank=0))]
    fn remove(&self, py: Python<'_>, worker: &str, rank: u32) -> bool {
        py.detach(|| {
            let mut writer = self.writer.lock();
            let Some(source) = writer.index.source(worker, rank) else { return false };
            writer.sources.remove(&source);
            writer.index.remove_source(source)
        })
    }

    /// Distinct blocks of all workers.
    #[getter]
    fn n_blocks(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.writer.lock().index.stats().n_blocks)
    }

    /// Bytes that the blocks of the index take.
    #[getter]
    fn n_bytes(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.writer.lock().index.stats().bytes)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let stats = py.detach(|| self.writer.lock().index.stats());
        format!("Index(n_workers={}, n_blocks={})", stats.n_sources, stats.n_blocks)
    }
}

#[pymethods]
impl WorkerMatch {
    fn __repr__(&self) -> String {
        let Self { worker, rank, n_tokens, .. } = self;
        format!("WorkerMatch(worker={worker:?}, rank={rank}, n_tokens={n_tokens})")
    }
}

// === impl Writer ===

impl Writer {
    fn source(&mut self, worker: &str, rank: u32) -> PyResult<SourceId> {
        let known = self.index.source(worker, rank);
        let source = match known {
            Some(source) => source,
            None => self
                .index
                .add_source(worker, rank)
                .map_err(|error| InvalidValueError::new_err(error.to_string()))?,
        };
        let new = || Source { bridge: Bridge::new(BridgeConfig::default()), group: None };
        self.sources.entry(source).or_insert_with(new);
        Ok(source)
    }

    fn apply(
        &mut self,
        chain: TokenChain,
        (worker, rank): (&str, u32),
        events: &[KvEvent],
        sequence: Option<u64>,
        replayed: bool,
    ) -> PyResult<Verdict> {
        let source = self.source(worker, rank)?;
        let due = self.index.position(source).and_then(|(_, due)| due);
        let sequence = sequence.or(due).unwrap_or(0);
        let is_restart = !replayed && due.is_none_or(|due| sequence < due);
        let Some(known) = self.sources.get_mut(&source) else { return Ok(Verdict::UnknownSource) };
        if is_restart {
            known.bridge.reset();
            known.group = None;
        }
        let mut runs = Vec::new();
        // A bridge counts: it must receive only what is applied.
        if due == Some(sequence) || (is_restart && sequence == 0) {
            for event in events {
                known.translate(chain, event, &mut runs);
            }
        }
        let events: Vec<Event<'_>> = runs.iter().map(OwnRun::as_event).collect();
        Ok(self.index.apply(&Batch { source, epoch: None, sequence, replayed, events: &events }))
    }
}

// === impl Source ===

impl Source {
    fn translate(&mut self, chain: TokenChain, event: &KvEvent, runs: &mut Vec<OwnRun>) {
        match event {
            KvEvent::Stored(stored) => {
                let BlocksStored { hashes, parent, tokens, block_tokens, medium, attention, .. } = stored;
                if let Some(group) = stored.group_idx
                    && self.group.is_none()
                    && *attention != Attention::Partial
                {
                    self.group = Some(group);
                }
                // What is more than tokens has no name here, nor have blocks that follow it.
                if !self.has_group(stored.group_idx) || !stored.is_plain() || stored.is_paired {
                    return;
                }
                let event = BridgeEvent::Stored {
                    tier: tier_of(*medium),
                    parent: parent.map(|parent| BlockKey(parent.0)),
                    keys: &keys_of(hashes),
                    tokens,
                    block_tokens: *block_tokens as usize,
                };
                self.bridge.translate(&event, &chain, runs);
            }
            KvEvent::Removed(removed) if self.has_group(removed.group_idx) => {
                let tier = tier_of(removed.medium);
                let event = BridgeEvent::Removed { tier, keys: &keys_of(&removed.hashes) };
                self.bridge.translate(&event, &chain, runs);
            }
            KvEvent::Removed(_) => {}
            KvEvent::Cleared => {
                self.bridge.translate(&BridgeEvent::Cleared { tier: None }, &chain, runs);
            }
        }
    }

    /// Whether blocks of a cache group are kept; engines with one group name none.
    fn has_group(&self, group: Option<u32>) -> bool {
        group.is_none() || group == self.group
    }
}

// === impl TokenChain ===

impl TokenChain {
    fn keys(&self, tokens: &[u32]) -> Vec<BlockKey> {
        let mut parent = None;
        tokens
            .chunks_exact(self.block_tokens)
            .map(|block| {
                let key = self.key(parent, block);
                parent = Some(key);
                key
            })
            .collect()
    }
}

impl OwnChain for TokenChain {
    fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    fn key(&self, parent: Option<BlockKey>, tokens: &[u32]) -> BlockKey {
        let mut hasher = Xxh3::with_seed(self.seed);
        hasher.update(&parent.map_or(0, |parent| parent.0).to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        BlockKey(hasher.digest())
    }
}

fn keys_of(hashes: &[EngineHash]) -> Vec<BlockKey> {
    hashes.iter().map(|hash| BlockKey(hash.0)).collect()
}

fn tier_of(medium: Medium) -> Tier {
    match medium {
        Medium::Gpu => Tier::Gpu,
        Medium::Cpu => Tier::Cpu,
        Medium::Disk => Tier::Disk,
        Medium::Remote => Tier::Remote,
    }
}
