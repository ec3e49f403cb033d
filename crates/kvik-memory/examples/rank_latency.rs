//! How long a map and unmap of one page takes over 1, 2 and 4 ranks, without any device's part of it.
//!
//! Rank 0 is in the leader's process and the others behind sockets, as in an engine; `all remote` has
//! every rank behind a socket.
//!
//!     cargo run --release --package kvik-memory --example rank_latency

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::ranks::{RankLeaderOptions, RankMapper, RankPeer, RankWorker, RankWorkerOptions};
use kvik_memory::{Extent, Geometry, PageId};

const N_WARM_UP: usize = 1_000;
const N_ROUNDS: usize = 20_000;

type Failure = Box<dyn std::error::Error>;

/// A region without memory: what is measured is the protocol.
#[derive(Debug)]
struct NoDevice {
    geometry: Geometry,
}

impl PageMapper for NoDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn map(&self, _extents: &[Extent]) -> MapOutcome {
        MapOutcome::Mapped
    }

    fn unmap(&self, _extents: &[Extent]) -> Vec<Extent> {
        Vec::new()
    }
}

#[expect(clippy::print_stdout, reason = "it is a program")]
fn main() -> Result<(), Failure> {
    println!("{:>6}  {:>12}  {:>9}  {:>9}", "ranks", "", "p50 us", "p99 us");
    for (words, has_local) in [("one local", true), ("all remote", false)] {
        for world in [1, 2, 4] {
            let mut rounds = measure(world, has_local)?;
            rounds.sort_unstable();
            let at = |percent: usize| rounds[rounds.len() * percent / 100].as_secs_f64() * 1e6;
            println!("{world:>6}  {words:>12}  {:>9.1}  {:>9.1}", at(50), at(99));
        }
    }
    Ok(())
}

fn measure(world: u32, has_local: bool) -> Result<Vec<Duration>, Failure> {
    let directory = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir()?;
    let geometry = Geometry::try_new(64, 2 << 20, 1024)?;
    let mapper: Arc<dyn PageMapper> = Arc::new(NoDevice { geometry });
    let remote_ranks = u32::from(has_local)..world;
    let workers: Vec<RankWorker> = remote_ranks
        .clone()
        .map(|rank| {
            let options =
                RankWorkerOptions { rank, world, group: 0, address: address(directory.path(), rank) };
            RankWorker::start(&options, Arc::clone(&mapper))
        })
        .collect::<Result<_, _>>()?;
    let peers = remote_ranks
        .map(|rank| RankPeer { rank, address: address(directory.path(), rank), geometry })
        .collect();
    let local = has_local.then(|| (0, Arc::clone(&mapper)));
    let leader = RankMapper::connect(local, peers, RankLeaderOptions::default())?;
    let page = [Extent { first_page: PageId(7), n_pages: 1 }];
    let mut rounds = Vec::with_capacity(N_ROUNDS);
    for _ in 0..N_WARM_UP + N_ROUNDS {
        let started = Instant::now();
        if !matches!(leader.map(&page), MapOutcome::Mapped) || !leader.unmap(&page).is_empty() {
            return Err("a rank failed".into());
        }
        rounds.push(started.elapsed());
    }
    drop(leader);
    drop(workers);
    Ok(rounds.split_off(N_WARM_UP))
}

fn address(directory: &Path, rank: u32) -> SocketAddress {
    SocketAddress::Path(directory.join(format!("r{rank}")))
}
