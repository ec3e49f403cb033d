//! Random transactions with random failures: all ranks have what the leader's model says.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::ranks::frame::{Op, Request};
use kvik_memory::{Extent, PageId};
use parking_lot::Mutex;

use crate::proxy::{Act, Proxy};
use crate::support::{FakeMapper, MapFault, leader, peer, scratch_directory, worker};

const N_TRANSACTIONS: usize = 1_000;
const N_RANKS: usize = 3;

/// Numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// The leader's model: what is mapped, and what is never used again.
#[derive(Default)]
struct Expected {
    mapped: BTreeMap<u32, u32>,
    quarantined: BTreeSet<u32>,
}

impl Expected {
    fn is_free(&self, extent: Extent) -> bool {
        let pages = extent.first_page.0..extent.first_page.0 + extent.n_pages;
        let is_mapped = |page| {
            self.mapped.range(..=page).next_back().is_some_and(|(first, n_pages)| page < first + n_pages)
        };
        pages.into_iter().all(|page| !self.quarantined.contains(&page) && !is_mapped(page))
    }

    fn quarantine(&mut self, extents: &[Extent]) {
        for extent in extents {
            self.quarantined.extend(extent.first_page.0..extent.first_page.0 + extent.n_pages);
        }
    }

    fn choose_free(&self, random: &mut Random) -> Vec<Extent> {
        let mut chosen: Vec<Extent> = Vec::new();
        let mut expected = Self { mapped: self.mapped.clone(), quarantined: self.quarantined.clone() };
        for _ in 0..=random.below(4) {
            let n_pages = 1 << random.below(6);
            let extent = Extent { first_page: PageId(random.below(1 << 11) as u32 * n_pages), n_pages };
            if expected.is_free(extent) {
                expected.mapped.insert(extent.first_page.0, n_pages);
                chosen.push(extent);
            }
        }
        chosen
    }

    fn choose_mapped(&self, random: &mut Random) -> Vec<Extent> {
        let all = self.mapped.iter().map(|(&first, &n_pages)| Extent { first_page: PageId(first), n_pages });
        all.filter(|_| random.one_in(4)).collect()
    }

    /// Every rank has what is in the expected and nothing else that could be used.
    fn check(&self, ranks: &[Arc<FakeMapper>], step: usize) {
        let expected: Vec<(u32, u32)> =
            self.mapped.iter().map(|(&first, &n_pages)| (first, n_pages)).collect();
        for (rank, mapper) in ranks.iter().enumerate() {
            let usable =
                mapper.mapped().into_iter().filter(|extent| !self.quarantined.contains(&extent.first_page.0));
            let usable: Vec<(u32, u32)> =
                usable.map(|extent| (extent.first_page.0, extent.n_pages)).collect();
            assert_eq!(usable, expected, "rank {rank} after transaction {step}");
        }
    }
}

/// What a proxy does to the next request of an operation, once.
type Incident = Arc<Mutex<Option<(Op, Act)>>>;

#[test]
fn a_thousand_random_transactions_leave_all_ranks_equal_to_the_book() {
    let directory = scratch_directory();
    let path = |name: &str, rank: usize| directory.path().join(format!("{name}{rank}"));
    let ranks: Vec<Arc<FakeMapper>> = (0..N_RANKS).map(|_| Arc::new(FakeMapper::new())).collect();
    let incidents: Vec<Incident> = (0..N_RANKS).map(|_| Incident::default()).collect();
    let _workers: Vec<_> = (1..N_RANKS)
        .map(|rank| worker(rank as u32, N_RANKS as u32, path("back", rank), &ranks[rank]))
        .collect();
    let _proxies: Vec<_> = (1..N_RANKS)
        .map(|rank| {
            let incident = Arc::clone(&incidents[rank]);
            let decide = move |request: &Request| {
                let due = incident.lock().take_if(|(op, _)| *op == request.op());
                due.map_or(Act::Forward, |(_, act)| act)
            };
            Proxy::start(&path("front", rank), &path("back", rank), decide, || {
                unreachable!("no rank dies here")
            })
        })
        .collect();
    let mapper =
        leader(Some(&ranks[0]), (1..N_RANKS).map(|rank| peer(rank as u32, path("front", rank))).collect());

    let mut random = Random(20_261_115);
    let mut expected = Expected::default();
    let (mut n_mapped, mut n_failed) = (0, 0);
    for step in 0..N_TRANSACTIONS {
        let is_map = random.below(5) < 3;
        let extents =
            if is_map { expected.choose_free(&mut random) } else { expected.choose_mapped(&mut random) };
        let mut expected_fault = None;
        if random.one_in(4) && !extents.is_empty() {
            let faults = [MapFault::NoMemory, MapFault::Failed, MapFault::FailedStuck];
            let fault = faults[random.below(3) as usize];
            ranks[random.below(N_RANKS as u64) as usize].set_map_fault(Some(fault));
            expected_fault = Some(fault);
        }
        if random.one_in(6) && !extents.is_empty() {
            let stubborn = extents[random.below(extents.len() as u64) as usize];
            ranks[random.below(N_RANKS as u64) as usize].set_stubborn(&[stubborn]);
        }
        if random.one_in(3) {
            let ops = [Op::PrepareMap, Op::CommitMap, Op::AbortMap, Op::PrepareUnmap, Op::CommitUnmap];
            let acts = [Act::BreakBefore, Act::BreakAfter, Act::Repeat];
            let rank = 1 + random.below(N_RANKS as u64 - 1) as usize;
            *incidents[rank].lock() = Some((ops[random.below(5) as usize], acts[random.below(3) as usize]));
        }
        if is_map {
            match mapper.map(&extents) {
                MapOutcome::Mapped => {
                    n_mapped += 1;
                    assert!(expected_fault.is_none(), "transaction {step} hid {expected_fault:?}");
                    expected
                        .mapped
                        .extend(extents.iter().map(|extent| (extent.first_page.0, extent.n_pages)));
                }
                MapOutcome::NoMemory => {
                    assert_eq!(expected_fault, Some(MapFault::NoMemory), "transaction {step}");
                }
                MapOutcome::Failed { stuck, .. } => {
                    n_failed += 1;
                    assert!(stuck.iter().all(|extent| extents.contains(extent)));
                    // One rank at most is stuck with one extent, and one with its stubborn one.
                    assert!(stuck.len() <= 2 || extents.len() == stuck.len(), "{stuck:?} of {extents:?}");
                    expected.quarantine(&stuck);
                }
            }
        } else {
            let left = mapper.unmap(&extents);
            assert!(left.len() <= 1, "one extent was stubborn, not {left:?}");
            for extent in &extents {
                expected.mapped.remove(&extent.first_page.0);
            }
            expected.quarantine(&left);
        }
        for rank in 0..N_RANKS {
            ranks[rank].set_map_fault(None);
            ranks[rank].set_stubborn(&[]);
            *incidents[rank].lock() = None;
        }
        expected.check(&ranks, step);
    }
    assert!(
        N_TRANSACTIONS / 4 < n_mapped && N_TRANSACTIONS / 50 < n_failed,
        "{n_mapped} mapped, {n_failed} failed"
    );
}
