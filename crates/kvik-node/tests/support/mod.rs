//! What the tests of a daemon share: its clients' chunks, which all have bytes of their own, and a daemon in this process.

#![allow(dead_code, unreachable_pub, reason = "each test uses some of it")]

pub mod place;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_node::{AttachOptions, NodeClient, NodeError, NodeOptions, NodeServer};
use kvik_store::{Chain, ChunkChange, ChunkFormat, ChunkObserver, Commit, Space, Store, StoreOptions};
use kvik_tier::shared::checksum;
use kvik_tier::{Arena, ArenaOptions, RamTier, TierKind};
use kvik_types::{BlockHash, BlockSize, Dtype, Namespace};
use parking_lot::Mutex;

pub const CHUNK_TOKENS: usize = 32;
pub const N_LAYERS: u32 = 4;
pub const TOKEN_LAYER_BYTES: u64 = 256;
pub const CHUNK_BYTES: usize = CHUNK_TOKENS * N_LAYERS as usize * TOKEN_LAYER_BYTES as usize;

/// A daemon in a folder of its own.
pub struct Daemon {
    pub server: Option<NodeServer>,
    pub store: Store,
    pub socket: SocketAddress,
    pub folder: tempfile::TempDir,
}

impl Daemon {
    pub fn start(arena_bytes: u64) -> Self {
        Self::start_with(Self::open_store(arena_bytes))
    }

    pub fn start_with(store: Store) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // The folder of a socket is for its user alone.
        let socket = SocketAddress::Path(folder.path().join("private/node.sock"));
        let server = NodeServer::start(NodeOptions::new(socket.clone(), store.clone())).unwrap();
        Self { server: Some(server), store, socket, folder }
    }

    pub fn open_store(arena_bytes: u64) -> Store {
        let ram = RamTier::new(Arena::new(ArenaOptions::new(arena_bytes)).unwrap());
        Store::builder(store_options(), ram).open().unwrap()
    }

    pub fn options(&self) -> AttachOptions {
        attach_options(self.socket.clone())
    }

    pub fn attach(&self) -> NodeClient {
        NodeClient::attach(&self.options()).unwrap()
    }

    pub fn used_bytes(&self) -> u64 {
        self.store.arena().stat().used_bytes
    }
}

pub fn store_options() -> StoreOptions {
    StoreOptions { chunk_tokens: BlockSize::try_new(CHUNK_TOKENS).unwrap(), ..StoreOptions::default() }
}

pub fn attach_options(socket: SocketAddress) -> AttachOptions {
    let namespace =
        Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: String::new() };
    let block_tokens = BlockSize::try_new(16).unwrap();
    let format =
        ChunkFormat { n_layers: N_LAYERS, token_layer_bytes: TOKEN_LAYER_BYTES, n_ranks: 1, block_tokens };
    AttachOptions::new(socket, namespace, format)
}

pub fn tokens(seed: u32, n_chunks: usize) -> Vec<u32> {
    (0..(n_chunks * CHUNK_TOKENS) as u32).map(|place| place ^ seed << 16).collect()
}

pub fn chain_in(space: &Space, seed: u32, n_chunks: usize) -> Chain {
    space.chain(&tokens(seed, n_chunks))
}

pub fn chain(client: &NodeClient, seed: u32, n_chunks: usize) -> Chain {
    chain_in(client.space(), seed, n_chunks)
}

/// The bytes of a chunk, which no other has.
pub fn content(seed: u32, chunk_idx: usize) -> Vec<u8> {
    let mut state = u64::from(seed) << 32 | chunk_idx as u64 | 1 << 63;
    (0..CHUNK_BYTES)
        .map(|_| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (state >> 56) as u8
        })
        .collect()
}

/// Stores a chain; returns how many chunks are new.
pub fn store(client: &NodeClient, seed: u32, n_chunks: usize) -> Result<usize, NodeError> {
    let opened = client.open(&chain(client, seed, n_chunks))?;
    let write = opened.write(0, n_chunks)?;
    let mut n_stored = 0;
    for place in (0..write.n_chunks()).filter(|place| !write.is_present(*place)) {
        let bytes = content(seed, place);
        write.copy_in(place, 0, &bytes)?;
        n_stored += usize::from(write.commit(place, checksum(&bytes))? == Commit::Stored);
    }
    Ok(n_stored)
}

/// Stores what is missing of a chain, without a wait for each chunk; returns how many chunks are there now.
pub fn complete(client: &NodeClient, seed: u32, n_chunks: usize) -> Result<usize, NodeError> {
    let opened = client.open(&chain(client, seed, n_chunks))?;
    let mut write = opened.write(0, n_chunks)?;
    for place in (0..write.n_chunks()).filter(|place| !write.is_present(*place)).collect::<Vec<_>>() {
        write.write_chunk(place, &content(seed, place))?;
    }
    let outcomes = write.finish()?;
    Ok(outcomes.iter().filter(|outcome| matches!(outcome, None | Some(Commit::Stored))).count())
}

/// Reads a chain and compares every byte; returns how many chunks were there.
pub fn verify(client: &NodeClient, seed: u32, n_chunks: usize) -> Result<usize, NodeError> {
    let lease = client.open(&chain(client, seed, n_chunks))?.retrieve(0)?;
    let mut bytes = vec![0; CHUNK_BYTES];
    for place in 0..lease.n_chunks() {
        lease.copy_out(place, 0, &mut bytes)?;
        assert!(bytes == content(seed, place), "chunk {place} of {seed} has other bytes");
    }
    Ok(lease.n_chunks())
}

#[track_caller]
pub fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what} did not happen");
        std::thread::yield_now();
    }
}

/// Keeps a copy of what it is told, counts it, and fails where a change repeats what holds already.
#[derive(Debug, Default)]
pub struct Copy {
    pub held: Mutex<HashSet<(BlockHash, TierKind)>>,
    pub n_changes: AtomicU64,
}

impl ChunkObserver for Copy {
    fn changed(&self, changes: &[ChunkChange]) {
        let mut held = self.held.lock();
        self.n_changes.fetch_add(changes.len() as u64, Ordering::SeqCst);
        for ChunkChange { hash, tier, is_held, .. } in changes {
            let place = (*hash, *tier);
            assert!(if *is_held { held.insert(place) } else { held.remove(&place) }, "{place:?}");
        }
    }
}
