//! The functions of `include/kvik.h` about a pool that is spread over the processes of several ranks.
//!
//! The leader, which is rank 0, has the blocks; every other rank serves a region of the same shape on its own device, into
//! which the leader has the same pages mapped. Each rank takes the grants of what it maps from the ledger of its device.

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvik_memory::pages::{Claim, MapOutcome, PageMapper, PageObserver};
use kvik_memory::pool::{KvPool, PoolParts, PoolSettings};
use kvik_memory::ranks::{RankLeaderOptions, RankMapper, RankPeer, RankWorker, RankWorkerOptions};
use kvik_memory::region::Region;
use kvik_memory::{Extent, Geometry, SocketAddress};

use crate::abi::{answer, check_array, open_pool};
use crate::config::{kvik_config, text_of};
use crate::grants::EngineGrants;
use crate::handle::kvik_pool;
use crate::status::{Failure, kvik_status};

/// More ranks than any group of processes has.
const MAX_RANKS: usize = 4096;

/// What a pool is among ranks.
#[derive(Debug)]
pub(crate) enum Role {
    /// It is the only one.
    Alone,
    /// It has the blocks of all, and is rank 0.
    Leader {
        /// Where the ranks from 1 on listen.
        sockets: Vec<PathBuf>,
        /// How long they may take.
        timeout: Duration,
    },
    /// It has memory where the leader says.
    Rank {
        rank: u32,
        n_ranks: u32,
        /// Where it listens.
        socket: PathBuf,
    },
}

/// Serves the region of a rank until it is dropped.
#[derive(Debug)]
pub(crate) struct RankServer {
    /// Goes first: it ends the thread that maps.
    _worker: RankWorker,
    region: Arc<GrantedRegion>,
}

/// A region that has its memory granted before it maps.
#[derive(Debug)]
struct GrantedRegion {
    region: Region,
    grants: Arc<EngineGrants>,
    held_bytes: AtomicU64,
}

/// Opens a pool whose blocks have memory on several ranks: on this process' device, which is rank 0, and on those of the
/// ranks 1, 2 and so on, which kvik_open_rank serves at these sockets. It waits up to timeout_ms for them to start, and
/// as long for each change; 0 is 60 s. A block is allocated on all ranks or on none; kvik_block_address and
/// kvik_block_pointers of a rank's pool tell where it lies there. All ranks have the same configuration but for device,
/// ipc_name, directory, label and limits. A rank that ends takes the pool with it: open all of them again.
///
/// # Safety
///
/// As kvik_open; sockets is NULL or has n_sockets C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_open_leader(
    config: *const kvik_config,
    sockets: *const *const c_char,
    n_sockets: usize,
    timeout_ms: u32,
    pool: *mut *mut kvik_pool,
) -> kvik_status {
    answer(|| {
        check_array("sockets", sockets, n_sockets)?;
        if n_sockets == 0 || n_sockets >= MAX_RANKS {
            return Err(Failure::invalid(format!(
                "`n_sockets` is {n_sockets}; allowed: 1 to {}",
                MAX_RANKS - 1
            )));
        }
        let mut paths = Vec::with_capacity(n_sockets);
        for place in 0..n_sockets {
            // SAFETY: the caller promised that many C strings.
            paths.push(unsafe { path_of("sockets", sockets.add(place).read()) }?);
        }
        let timeout_ms = if timeout_ms == 0 { 60_000 } else { timeout_ms };
        let role = Role::Leader { sockets: paths, timeout: Duration::from_millis(timeout_ms.into()) };
        // SAFETY: the caller promised a whole configuration and room for the handle.
        unsafe { open_pool(config, role, pool) }
    })
}

/// Opens this process' part of a pool that a leader opens (kvik_open_leader), and serves it at socket: rank is 1 or more
/// and below n_ranks. The socket lies in a folder that only this user can enter. The leader maps and unmaps; blocks are
/// not allocated here. What is mapped is granted by the ledger of this device: where it does not, the leader's allocation
/// answers KVIK_NO_MEMORY. Everything else of the pool works as ever, the callback for memory that others need included.
///
/// # Safety
///
/// As kvik_open; socket is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_open_rank(
    config: *const kvik_config,
    rank: u32,
    n_ranks: u32,
    socket: *const c_char,
    pool: *mut *mut kvik_pool,
) -> kvik_status {
    answer(|| {
        if rank == 0 || rank >= n_ranks || n_ranks as usize > MAX_RANKS {
            return Err(Failure::invalid(format!(
                "`rank` is {rank} of `n_ranks` {n_ranks}; allowed: 1 or more, below n_ranks, which is up to {MAX_RANKS}"
            )));
        }
        // SAFETY: the caller promised a C string.
        let role = Role::Rank { rank, n_ranks, socket: unsafe { path_of("socket", socket) }? };
        // SAFETY: the caller promised a whole configuration and room for the handle.
        unsafe { open_pool(config, role, pool) }
    })
}

/// Starts the leader's pool on `region` and on those of the ranks.
pub(crate) fn start_leader(
    region: Arc<Region>,
    sockets: &[PathBuf],
    timeout: Duration,
    grants: &Arc<EngineGrants>,
    observer: Arc<dyn PageObserver>,
    settings: PoolSettings,
) -> Result<KvPool, Failure> {
    let geometry = *region.geometry();
    let peers = (1..).zip(sockets).map(|(rank, socket)| RankPeer {
        rank,
        address: SocketAddress::Path(socket.clone()),
        geometry,
    });
    let mut options = RankLeaderOptions::default();
    options.timeout = timeout;
    let mapper = RankMapper::connect(Some((0, region)), peers.collect(), options)?;
    let parts = PoolParts {
        mapper: Arc::new(mapper),
        grants: Arc::<EngineGrants>::clone(grants),
        events: Arc::<EngineGrants>::clone(grants),
        observer: Some(observer),
    };
    Ok(KvPool::start(parts, settings)?)
}

impl RankServer {
    /// Listens, and has memory in `region` where the leader says.
    pub(crate) fn start(
        region: Region,
        grants: &Arc<EngineGrants>,
        rank: u32,
        n_ranks: u32,
        socket: PathBuf,
    ) -> Result<Self, Failure> {
        let region =
            Arc::new(GrantedRegion { region, grants: Arc::clone(grants), held_bytes: AtomicU64::new(0) });
        let options =
            RankWorkerOptions { rank, world: n_ranks, group: 0, address: SocketAddress::Path(socket) };
        let worker = RankWorker::start(&options, Arc::<GrantedRegion>::clone(&region))?;
        Ok(Self { _worker: worker, region })
    }

    /// Bytes that the leader has mapped here.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.region.held_bytes.load(Ordering::Relaxed)
    }
}

impl GrantedRegion {
    fn cost_of(&self, extents: &[Extent]) -> u64 {
        extents.iter().map(|extent| self.region.geometry().extent_cost_bytes(*extent)).sum()
    }

    fn give_back(&self, n_bytes: u64) {
        if n_bytes > 0 {
            self.held_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
            self.grants.give_back_beside(n_bytes);
        }
    }
}

impl PageMapper for GrantedRegion {
    fn geometry(&self) -> &Geometry {
        self.region.geometry()
    }

    fn map(&self, extents: &[Extent]) -> MapOutcome {
        let n_bytes = self.cost_of(extents);
        match self.grants.claim_beside(n_bytes) {
            Ok(Claim::Granted) => {}
            Ok(Claim::Denied(_)) => return MapOutcome::NoMemory,
            Err(error) => return MapOutcome::Failed { error, stuck: Vec::new() },
        }
        self.held_bytes.fetch_add(n_bytes, Ordering::Relaxed);
        let outcome = self.region.map(extents);
        match &outcome {
            MapOutcome::Mapped => {}
            MapOutcome::NoMemory => self.give_back(n_bytes),
            MapOutcome::Failed { stuck, .. } => self.give_back(n_bytes - self.cost_of(stuck)),
        }
        outcome
    }

    fn unmap(&self, extents: &[Extent]) -> Vec<Extent> {
        let left = self.region.unmap(extents);
        self.give_back(self.cost_of(extents) - self.cost_of(&left));
        left
    }
}

/// # Safety
///
/// `text` is NULL or a C string that lives during the call.
unsafe fn path_of(argument: &'static str, text: *const c_char) -> Result<PathBuf, Failure> {
    // SAFETY: the caller promised it.
    let text = unsafe { text_of(argument, text) }?;
    text.map(PathBuf::from).ok_or_else(|| Failure::null(argument))
}
