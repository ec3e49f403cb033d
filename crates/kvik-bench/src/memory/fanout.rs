//! A map that goes to the ranks of a tensor-parallel engine: what the fan-out itself costs.

use std::sync::Arc;
use std::time::Instant;

use anyhow::ensure;
use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::ranks::{RankLeaderOptions, RankMapper, RankPeer, RankWorker, RankWorkerOptions};
use kvik_memory::{Extent, Geometry, PageId, SocketAddress};

use super::stand::{CAPACITY_PAGES, N_BUFFERS, PAGE_BYTES};

/// Ranks that are reached by sockets, each served by a thread of its own.
pub(super) const N_RANKS: u32 = 4;

/// Memory without a driver, so that only the fan-out takes time.
#[derive(Debug)]
struct NoDriver(Geometry);

impl PageMapper for NoDriver {
    fn geometry(&self) -> &Geometry {
        &self.0
    }

    fn map(&self, _extents: &[Extent]) -> MapOutcome {
        MapOutcome::Mapped
    }

    fn unmap(&self, _extents: &[Extent]) -> Vec<Extent> {
        Vec::new()
    }
}

/// Microseconds of `n_samples` maps and unmaps of a page on all ranks, in their order.
///
/// # Errors
/// If a rank cannot be reached or a map fails.
pub(super) fn samples_us(n_samples: usize) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let geometry = Geometry::try_new(N_BUFFERS, PAGE_BYTES, CAPACITY_PAGES)?;
    let address = |rank| SocketAddress::Abstract(format!("kvik-bench-ranks-{}-{rank}", std::process::id()));
    let mut workers = Vec::new();
    let mut peers = Vec::new();
    for rank in 0..N_RANKS {
        let options = RankWorkerOptions { rank, world: N_RANKS, group: 0, address: address(rank) };
        workers.push(RankWorker::start(&options, Arc::new(NoDriver(geometry)))?);
        peers.push(RankPeer { rank, address: address(rank), geometry });
    }
    let leader = RankMapper::connect(None, peers, RankLeaderOptions::default())?;
    let extents = [Extent::try_new(PageId(0), 1)?];
    let (mut maps, mut unmaps) = (Vec::with_capacity(n_samples), Vec::with_capacity(n_samples));
    for _ in 0..n_samples {
        let begun = Instant::now();
        let outcome = leader.map(&extents);
        maps.push(begun.elapsed().as_secs_f64() * 1e6);
        ensure!(matches!(outcome, MapOutcome::Mapped), "map a page on all ranks: {outcome:?}");
        let begun = Instant::now();
        let stuck = leader.unmap(&extents);
        unmaps.push(begun.elapsed().as_secs_f64() * 1e6);
        ensure!(stuck.is_empty(), "unmap a page on all ranks: {stuck:?} stay");
    }
    drop(leader);
    drop(workers);
    Ok((maps, unmaps))
}
