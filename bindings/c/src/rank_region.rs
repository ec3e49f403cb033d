//! The regions of a pool that is spread over the processes of several ranks.
//!
//! The leader, which is rank 0, has the blocks; every other rank serves a region of the same shape on its own device, into
//! which the leader has the same pages mapped. Each rank takes the grants of what it maps from the ledger of its device.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvik_memory::pages::{Claim, MapOutcome, PageMapper, PageObserver};
use kvik_memory::pool::{KvPool, PoolParts, PoolSettings};
use kvik_memory::ranks::{RankLeaderOptions, RankMapper, RankPeer, RankWorker, RankWorkerOptions};
use kvik_memory::region::Region;
use kvik_memory::{Extent, Geometry, SocketAddress};

use crate::grants::EngineGrants;
use crate::status::Failure;

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
