//! Small stores, tiers that obey the test, and content that names itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvik_store::policy::PolicyKind;
use kvik_store::{
    Chain, ChunkFormat, Commit, LowerTier, Retrieved, Space, Store, StoreOptions, TierName, Write,
};
use kvik_tier::conformance::MapTier;
use kvik_tier::{
    Arena, ArenaOptions, ChunkKey, GetItem, GetOutcome, PutItem, PutOutcome, RamTier, Result, Tier,
    TierError, TierKind, TierStat,
};
use kvik_types::{BlockSize, Dtype, Namespace};
use parking_lot::{Condvar, Mutex};

pub(crate) const CHUNK_TOKENS: usize = 4;
pub(crate) const N_LAYERS: u32 = 3;
pub(crate) const SECTION_BYTES: usize = 1024;
pub(crate) const PAYLOAD_BYTES: usize = SECTION_BYTES * N_LAYERS as usize;
/// What a payload takes of the arena.
pub(crate) const SLOT_BYTES: u64 = 4096;

/// A tier that blocks, fails and counts as the test says.
#[derive(Debug)]
pub(crate) struct TestTier {
    kind: TierKind,
    pub(crate) map: MapTier,
    pub(crate) gets: Gate,
    /// Behind the reading: the bytes are there, and the call has not returned.
    pub(crate) after_gets: Gate,
    pub(crate) puts: Gate,
    pub(crate) n_got: AtomicU64,
    pub(crate) n_put: AtomicU64,
    /// Calls that asked what is there.
    pub(crate) n_asked: AtomicU64,
    /// Keys that they asked for.
    pub(crate) n_keys_asked: AtomicU64,
    /// Questions wait here by their number.
    pub(crate) asks: Gate,
    pub(crate) is_failing: AtomicBool,
}

/// A door that calls wait at.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// Ranges that start here or later must wait.
    closed_from: Option<u64>,
    n_waiting: usize,
}

// === impl Gate ===

impl Gate {
    pub(crate) fn close(&self) {
        self.close_from(0);
    }

    pub(crate) fn close_from(&self, offset: u64) {
        self.state.lock().closed_from = Some(offset);
        self.changed.notify_all();
    }

    pub(crate) fn open(&self) {
        self.state.lock().closed_from = None;
        self.changed.notify_all();
    }

    pub(crate) fn n_waiting(&self) -> usize {
        self.state.lock().n_waiting
    }

    fn pass(&self, offset: u64) {
        let mut state = self.state.lock();
        state.n_waiting += 1;
        while state.closed_from.is_some_and(|closed_from| offset >= closed_from) {
            self.changed.wait(&mut state);
        }
        state.n_waiting -= 1;
    }
}

// === impl TestTier ===

impl TestTier {
    pub(crate) fn new(kind: TierKind) -> Arc<Self> {
        Self::on(kind, MapTier::new())
    }

    pub(crate) fn on(kind: TierKind, map: MapTier) -> Arc<Self> {
        Arc::new(Self {
            kind,
            map,
            gets: Gate::default(),
            after_gets: Gate::default(),
            puts: Gate::default(),
            n_got: AtomicU64::new(0),
            n_put: AtomicU64::new(0),
            n_asked: AtomicU64::new(0),
            n_keys_asked: AtomicU64::new(0),
            asks: Gate::default(),
            is_failing: AtomicBool::new(false),
        })
    }

    pub(crate) fn n_got(&self) -> u64 {
        self.n_got.load(Ordering::SeqCst)
    }

    pub(crate) fn n_put(&self) -> u64 {
        self.n_put.load(Ordering::SeqCst)
    }

    /// Calls that asked what is there, and the keys that they asked for.
    pub(crate) fn asked(&self) -> (u64, u64) {
        (self.n_asked.load(Ordering::SeqCst), self.n_keys_asked.load(Ordering::SeqCst))
    }

    pub(crate) fn set_failing(&self, is_failing: bool) {
        self.is_failing.store(is_failing, Ordering::SeqCst);
    }

    pub(crate) fn has(&self, chain: &Chain, chunk_idx: usize) -> bool {
        self.map.bytes_of(chain.key(chunk_idx, 0).unwrap()).is_some()
    }

    fn failure(&self) -> Option<TierError> {
        let is_failing = self.is_failing.load(Ordering::SeqCst);
        is_failing.then(|| TierError::remote("ask the tier", &"told to fail", true))
    }
}

impl Tier for TestTier {
    fn kind(&self) -> TierKind {
        self.kind
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        self.puts.pass(0);
        self.n_put.fetch_add(batch.len() as u64, Ordering::SeqCst);
        match self.failure() {
            Some(error) => batch.iter_mut().for_each(|item| item.outcome = PutOutcome::Failed(error.clone())),
            None => self.map.put(batch),
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        self.gets.pass(batch.iter().map(|item| item.offset).max().unwrap_or(0));
        self.n_got.fetch_add(batch.len() as u64, Ordering::SeqCst);
        match self.failure() {
            Some(error) => batch.iter_mut().for_each(|item| item.outcome = GetOutcome::Failed(error.clone())),
            None => self.map.get(batch),
        }
        self.after_gets.pass(0);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.gets.pass(0);
        self.asks.pass(self.n_asked.fetch_add(1, Ordering::SeqCst));
        self.n_keys_asked.fetch_add(keys.len() as u64, Ordering::SeqCst);
        self.failure().map_or(Ok(()), Err)?;
        self.map.contains(keys, present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.map.delete(keys)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        if self.kind == TierKind::Nvme {
            self.map.visit_keys(visit);
        }
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn stat(&self) -> TierStat {
        self.map.stat()
    }
}

// === stores ===

/// A store of so many payloads in memory.
pub(crate) struct Setup {
    pub(crate) options: StoreOptions,
    n_slots: u64,
    locals: Vec<LowerTier>,
    remotes: Vec<LowerTier>,
}

impl Setup {
    pub(crate) fn new(n_slots: u64) -> Self {
        let options = StoreOptions {
            chunk_tokens: BlockSize::try_new(CHUNK_TOKENS).unwrap(),
            policy: PolicyKind::Lru,
            ram_free_share: 0.0,
            write_queue_bytes: Some(1 << 30),
            load_in_flight_bytes: Some(1 << 30),
            retrieve_timeout: Duration::from_secs(30),
            lookup_timeout: Duration::from_secs(30),
            ..StoreOptions::default()
        };
        Self { options, n_slots, locals: Vec::new(), remotes: Vec::new() }
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut StoreOptions)) -> Self {
        change(&mut self.options);
        self
    }

    pub(crate) fn local(self, tier: &Arc<TestTier>) -> Self {
        self.local_dyn(Arc::clone(tier) as Arc<dyn Tier>)
    }

    pub(crate) fn local_dyn(mut self, tier: Arc<dyn Tier>) -> Self {
        self.locals.push(LowerTier::local(tier));
        self
    }

    pub(crate) fn remote(self, tier: &Arc<TestTier>) -> Self {
        self.remote_dyn(Arc::clone(tier) as Arc<dyn Tier>)
    }

    /// Gives the local tiers names, in their order.
    pub(crate) fn named(mut self, names: &[&str]) -> Self {
        for (tier, name) in self.locals.iter_mut().zip(names) {
            tier.name = Some(TierName::try_new(name).unwrap());
        }
        self
    }

    pub(crate) fn remote_dyn(mut self, tier: Arc<dyn Tier>) -> Self {
        self.remotes.push(LowerTier::remote(tier));
        self
    }

    pub(crate) fn open(self) -> Store {
        let ram = RamTier::new(Arena::new(ArenaOptions::new(self.n_slots * SLOT_BYTES)).unwrap());
        let mut builder = Store::builder(self.options, ram);
        for tier in self.locals.into_iter().chain(self.remotes) {
            builder = builder.tier(tier);
        }
        builder.open().unwrap()
    }
}

pub(crate) fn namespace(tenant: &str) -> Namespace {
    Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: tenant.into() }
}

pub(crate) fn space_of(store: &Store, tenant: &str, n_ranks: u16) -> Space {
    let block_tokens = BlockSize::try_new(2).unwrap();
    let token_layer_bytes = (SECTION_BYTES / CHUNK_TOKENS) as u64;
    let format = ChunkFormat { n_layers: N_LAYERS, token_layer_bytes, n_ranks, block_tokens };
    store.space(&namespace(tenant), format).unwrap()
}

/// A chain of its own for every name.
pub(crate) fn chain_of(store: &Store, name: u32, n_chunks: usize) -> Chain {
    space_of(store, "", 1).chain(&tokens_of(name, n_chunks * CHUNK_TOKENS))
}

pub(crate) fn tokens_of(name: u32, n_tokens: usize) -> Vec<u32> {
    (0..n_tokens as u32).map(|token| name * 10_000 + token).collect()
}

/// The bytes that belong under a key, and under no other.
pub(crate) fn content(key: ChunkKey, n_bytes: usize) -> Vec<u8> {
    let mut state =
        (key.chunk.to_u128() as u64) ^ (u64::from(key.rank) << 32) ^ key.namespace.0.to_u128() as u64;
    let mut bytes = Vec::with_capacity(n_bytes + 8);
    while bytes.len() < n_bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    bytes.truncate(n_bytes);
    bytes
}

/// Stores one chunk for all ranks; says whether it is in memory now.
pub(crate) fn store_chunk(store: &Store, chain: &Chain, chunk_idx: usize) -> bool {
    (0..chain.space().format().n_ranks).all(|rank| match store.begin_write(chain, chunk_idx, rank) {
        Write::Slot(mut writer) => {
            let bytes = content(chain.key(chunk_idx, rank).unwrap(), chain.payload_bytes(chunk_idx));
            writer.payload_mut().copy_from_slice(&bytes);
            matches!(writer.commit(), Commit::Stored | Commit::Present)
        }
        Write::Present => true,
        Write::NoRoom | Write::NoParent | Write::Collision => false,
    })
}

/// Stores as much of a chain as there is room for; returns the number of chunks.
pub(crate) fn store_chain(store: &Store, chain: &Chain) -> usize {
    store.note_request(chain, None);
    (0..chain.n_chunks()).take_while(|chunk_idx| store_chunk(store, chain, *chunk_idx)).count()
}

/// Puts a chunk into a tier behind the store's back.
pub(crate) fn plant(tier: &TestTier, chain: &Chain, chunk_idx: usize) {
    for rank in 0..chain.space().format().n_ranks {
        let key = chain.key(chunk_idx, rank).unwrap();
        tier.map.overwrite(key, &content(key, chain.payload_bytes(chunk_idx)));
    }
}

/// Every byte must be the right one; returns the number of chunks.
pub(crate) fn verify(retrieved: &Retrieved, chain: &Chain, first_chunk: usize) -> usize {
    for (place, chunk) in retrieved.chunks().iter().enumerate() {
        assert_eq!(chunk.token_range(), chain.tokens_of(first_chunk + place));
        for rank in 0..chain.space().format().n_ranks {
            let key = chain.key(first_chunk + place, rank).unwrap();
            let expected = content(key, chain.payload_bytes(first_chunk + place));
            assert!(chunk.payload(rank) == expected, "chunk {} of rank {rank}", first_chunk + place);
        }
    }
    retrieved.chunks().len()
}

/// Retrieves from the start and verifies; returns the number of chunks.
pub(crate) fn retrieve_all(store: &Store, chain: &Chain) -> usize {
    verify(&store.retrieve(chain, 0), chain, 0)
}

/// Waits for a condition.
pub(crate) fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        std::thread::park_timeout(Duration::from_micros(200));
    }
}

pub(crate) fn flush(store: &Store) {
    assert!(store.flush(Duration::from_secs(30)), "writes take too long");
}

/// Makes a store forget what is in memory of a chain.
pub(crate) fn forget_memory(store: &Store) {
    store.clear(&kvik_store::Clear {
        tiers: Some(vec![TierKind::Ram.into()]),
        ..kvik_store::Clear::default()
    });
}

/// A tier under the name of another kind.
#[derive(Debug)]
pub(crate) struct Kind<T>(pub(crate) TierKind, pub(crate) T);

impl<T: Tier> Tier for Kind<T> {
    fn kind(&self) -> TierKind {
        self.0
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        self.1.put(batch);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        self.1.get(batch);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.1.contains(keys, present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.1.delete(keys)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        if self.0 == TierKind::Nvme {
            self.1.visit_keys(visit);
        }
    }

    fn flush(&self) -> Result<()> {
        self.1.flush()
    }

    fn stat(&self) -> TierStat {
        self.1.stat()
    }
}

impl TestTier {
    pub(crate) fn stat_chunks(&self) -> u64 {
        self.map.stat().n_chunks.unwrap()
    }
}
