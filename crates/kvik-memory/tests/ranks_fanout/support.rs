//! A mapper that records and fails at will, and short ways to make leaders and ranks.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::ranks::{RankLeaderOptions, RankMapper, RankPeer, RankWorker, RankWorkerOptions};
use kvik_memory::{Extent, Geometry, MemoryError, PageId};
use parking_lot::Mutex;

/// Longer than any test needs on a slow machine; nothing passes by waiting for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A region that is a list.
#[derive(Debug)]
pub(crate) struct FakeMapper {
    geometry: Geometry,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    mapped: BTreeMap<u32, u32>,
    n_maps: usize,
    map_fault: Option<MapFault>,
    stubborn: Vec<Extent>,
}

/// How every map fails until it is told otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum MapFault {
    NoMemory,
    Failed,
    /// The first extent stays mapped and is reported.
    FailedStuck,
    Panic,
    /// The nth call and all after it find no memory, from 1 on.
    NoMemoryFromCall(usize),
}

impl FakeMapper {
    pub(crate) fn new() -> Self {
        Self { geometry: geometry(), state: Mutex::default() }
    }

    pub(crate) fn set_map_fault(&self, fault: Option<MapFault>) {
        self.state.lock().map_fault = fault;
    }

    /// From now on these cannot be unmapped.
    pub(crate) fn set_stubborn(&self, extents: &[Extent]) {
        self.state.lock().stubborn = extents.to_vec();
    }

    pub(crate) fn mapped(&self) -> Vec<Extent> {
        let state = self.state.lock();
        state.mapped.iter().map(|(&first, &n_pages)| Extent { first_page: PageId(first), n_pages }).collect()
    }

    pub(crate) fn n_maps(&self) -> usize {
        self.state.lock().n_maps
    }
}

impl PageMapper for FakeMapper {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn map(&self, extents: &[Extent]) -> MapOutcome {
        let mut state = self.state.lock();
        state.n_maps += 1;
        let error = || MemoryError::Device { call: "fakeMap", reason: "told to fail".to_owned() };
        match state.map_fault {
            None => {}
            Some(MapFault::NoMemoryFromCall(call)) if state.n_maps < call => {}
            Some(MapFault::NoMemory | MapFault::NoMemoryFromCall(_)) => return MapOutcome::NoMemory,
            Some(MapFault::Failed) => return MapOutcome::Failed { error: error(), stuck: Vec::new() },
            Some(MapFault::FailedStuck) => {
                state.mapped.insert(extents[0].first_page.0, extents[0].n_pages);
                return MapOutcome::Failed { error: error(), stuck: vec![extents[0]] };
            }
            Some(MapFault::Panic) => panic!("told to panic"),
        }
        for extent in extents {
            let before = state.mapped.insert(extent.first_page.0, extent.n_pages);
            assert_eq!(before, None, "{extent:?} is mapped twice");
        }
        MapOutcome::Mapped
    }

    fn unmap(&self, extents: &[Extent]) -> Vec<Extent> {
        let mut state = self.state.lock();
        let mut left = Vec::new();
        for extent in extents {
            if state.stubborn.contains(extent) {
                left.push(*extent);
            } else {
                assert_eq!(
                    state.mapped.remove(&extent.first_page.0),
                    Some(extent.n_pages),
                    "{extent:?} is not mapped"
                );
            }
        }
        left
    }
}

pub(crate) fn geometry() -> Geometry {
    Geometry::try_new(4, 2 << 20, 1 << 16).unwrap()
}

pub(crate) fn page(first_page: u32) -> Extent {
    Extent { first_page: PageId(first_page), n_pages: 1 }
}

/// A directory as ranks need it: of this user alone.
pub(crate) fn scratch_directory() -> tempfile::TempDir {
    tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap()
}

pub(crate) fn peer(rank: u32, path: PathBuf) -> RankPeer {
    RankPeer { rank, address: SocketAddress::Path(path), geometry: geometry() }
}

pub(crate) fn worker(rank: u32, world: u32, path: PathBuf, mapper: &Arc<FakeMapper>) -> RankWorker {
    let options = RankWorkerOptions { rank, world, group: 0, address: SocketAddress::Path(path) };
    RankWorker::start(&options, Arc::clone(mapper) as Arc<dyn PageMapper>).unwrap()
}

pub(crate) fn try_leader(
    local: Option<&Arc<FakeMapper>>,
    peers: Vec<RankPeer>,
    timeout: Duration,
) -> kvik_memory::Result<RankMapper> {
    let local = local.map(|mapper| (0, Arc::clone(mapper) as Arc<dyn PageMapper>));
    let mut options = RankLeaderOptions::default();
    options.timeout = timeout;
    RankMapper::connect(local, peers, options)
}

pub(crate) fn leader(local: Option<&Arc<FakeMapper>>, peers: Vec<RankPeer>) -> RankMapper {
    try_leader(local, peers, PATIENCE).unwrap()
}

pub(crate) fn assert_mapped(outcome: &MapOutcome) {
    assert!(matches!(outcome, MapOutcome::Mapped), "{outcome:?}");
}

/// The rank, the reason and the stuck extents of a map that failed on a rank.
pub(crate) fn rank_failure(outcome: MapOutcome) -> (u32, String, Vec<Extent>) {
    match outcome {
        MapOutcome::Failed { error: MemoryError::Rank { rank, reason }, stuck } => (rank, reason, stuck),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}
