//! What a region does on every backend: each function is one test, run on each device.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::region::{Guard, Region};
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::faulty::{Call, Fault, FaultyVmm};
use kvik_memory::{Extent, Geometry, PageId};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Makes a test of each function below, on the devices that `$open` opens.
macro_rules! region_conformance {
    ($open:path) => {
        crate::region_suite::region_conformance!($open:
            mapped_pages_keep_their_pattern_and_unmapped_pages_read_zeros,
            a_call_that_fails_once_leaves_the_region_as_it_was,
            a_failing_unmap_is_reported_and_the_rest_goes_on,
            memory_that_cannot_be_released_is_reported_as_stuck,
            a_lack_of_memory_at_any_extent_leaves_nothing_behind,
            what_is_not_mapped_so_is_not_unmapped,
            pages_are_not_mapped_twice,
            adjacent_extents_share_calls,
            threads_map_and_unmap_side_by_side,
        );
    };
    ($open:path: $($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                crate::region_suite::$name(&|| $open());
            }
        )*
    };
}
pub(crate) use region_conformance;

pub(crate) type Open<'a> = &'a dyn Fn() -> Arc<dyn Vmm>;

const N_BUFFERS: u32 = 2;
const CAPACITY_PAGES: u32 = 28;

pub(crate) fn extent(first_page: u32, n_pages: u32) -> Extent {
    Extent::try_new(PageId(first_page), n_pages).unwrap()
}

/// A region with what should be in it.
pub(crate) struct Modelled {
    pub(crate) region: Region,
    /// The pattern of each mapped page.
    pages: BTreeMap<u32, u64>,
    next_pattern: u64,
}

impl Modelled {
    pub(crate) fn new(vmm: Arc<dyn Vmm>) -> Self {
        Self::with_capacity(vmm, CAPACITY_PAGES)
    }

    fn with_capacity(vmm: Arc<dyn Vmm>, capacity_pages: u32) -> Self {
        let geometry = Geometry::try_new(N_BUFFERS, UNIT_BYTES, capacity_pages).unwrap();
        let region = Region::try_new(vmm, geometry, Guard::Zero).unwrap();
        Self { region, pages: BTreeMap::new(), next_pattern: 1 }
    }

    pub(crate) fn map(&mut self, extents: &[Extent]) -> MapOutcome {
        let outcome = self.region.map(extents);
        if matches!(outcome, MapOutcome::Mapped) {
            for page in extents.iter().flat_map(Extent::pages) {
                self.write_pattern(page);
            }
        }
        outcome
    }

    fn map_all(&mut self, extents: &[Extent]) {
        match self.map(extents) {
            MapOutcome::Mapped => {}
            outcome => panic!("{extents:?} are mapped, not {outcome:?}"),
        }
    }

    fn unmap(&mut self, extents: &[Extent]) -> Vec<Extent> {
        let refused = self.region.unmap(extents);
        for page in extents.iter().flat_map(Extent::pages) {
            self.pages.remove(&page.0);
        }
        refused
    }

    fn write_pattern(&mut self, page: PageId) {
        let pattern = self.next_pattern;
        self.next_pattern += 1;
        self.pages.insert(page.0, pattern);
        for buffer in 0..N_BUFFERS {
            for offset_bytes in probes() {
                let address = self.region.address_of(buffer, page).unwrap() + offset_bytes;
                let bytes = word_of(pattern, buffer, offset_bytes).to_le_bytes();
                self.region.vmm().write(address, &bytes).unwrap();
            }
        }
    }

    /// Every page that is not in `stuck` has its own pattern, or zeros if it is not mapped.
    pub(crate) fn check(&self, stuck: &[Extent]) {
        let pages = (0..self.region.geometry().capacity_pages()).map(PageId);
        for page in pages.filter(|page| !stuck.iter().any(|extent| extent.contains(*page))) {
            let pattern = self.pages.get(&page.0);
            for buffer in 0..N_BUFFERS {
                for offset_bytes in probes() {
                    let address = self.region.address_of(buffer, page).unwrap() + offset_bytes;
                    let mut bytes = [0xee; 8];
                    self.region.vmm().read(address, &mut bytes).unwrap();
                    let expected = pattern.map_or(0, |pattern| word_of(*pattern, buffer, offset_bytes));
                    assert_eq!(u64::from_le_bytes(bytes), expected, "page {page} of buffer {buffer}");
                }
            }
        }
        assert_eq!(self.region.usage().n_guard_holes, 0);
    }
}

fn probes() -> [u64; 3] {
    [0, UNIT_BYTES / 2 - 4, UNIT_BYTES - 8]
}

fn word_of(pattern: u64, buffer: u32, offset_bytes: u64) -> u64 {
    pattern << 32 | u64::from(buffer) << 24 | offset_bytes >> 2
}

fn error_of(outcome: MapOutcome) -> Vec<Extent> {
    match outcome {
        MapOutcome::Failed { stuck, .. } => stuck,
        outcome => panic!("the map fails, not {outcome:?}"),
    }
}

pub(crate) fn mapped_pages_keep_their_pattern_and_unmapped_pages_read_zeros(open: Open<'_>) {
    let steps = proptest::collection::vec((0..CAPACITY_PAGES, 0..5_u32, any::<bool>()), 1..24);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(16) });
    let result = runner.run(&steps, |steps| {
        let mut modelled = Modelled::new(open());
        let mut mapped: Vec<Extent> = Vec::new();
        for (page, size_exponent, is_batch) in steps {
            let n_pages = 1 << size_exponent;
            let wanted = extent(page / n_pages * n_pages, n_pages);
            if let Some(idx) = mapped.iter().position(|held| held.overlaps(&wanted)) {
                // An overlap makes room: the whole of the held extents or one of them.
                let n_gone = if is_batch { mapped.len() - idx } else { 1 };
                let gone: Vec<Extent> = mapped.drain(idx..idx + n_gone).collect();
                prop_assert_eq!(modelled.unmap(&gone), vec![]);
            } else if wanted.end_page() <= CAPACITY_PAGES {
                let mut batch = vec![wanted];
                let next = Extent { first_page: PageId(wanted.end_page()), n_pages };
                let is_free = next.is_well_formed()
                    && next.end_page() <= CAPACITY_PAGES
                    && !mapped.iter().any(|held| held.overlaps(&next));
                if is_batch && is_free {
                    batch.insert(0, next);
                }
                modelled.map_all(&batch);
                mapped.extend(batch);
            } else {
                prop_assert_eq!(error_of(modelled.map(&[wanted])), vec![]);
            }
            modelled.check(&[]);
        }
        prop_assert_eq!(modelled.unmap(&mapped), vec![]);
        modelled.check(&[]);
        let usage = modelled.region.usage();
        prop_assert_eq!((usage.n_extents, usage.n_stuck), (0, 0));
        prop_assert!(usage.n_guard_pieces <= N_BUFFERS as usize * 2 * 8, "two blocks of 8 pieces at most");
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

pub(crate) fn a_call_that_fails_once_leaves_the_region_as_it_was(open: Open<'_>) {
    let kept = [extent(0, 2), extent(8, 2)];
    let wanted = [extent(3, 1), extent(4, 2), extent(6, 2), extent(10, 1), extent(12, 1)];
    for is_unmap in [false, true] {
        for k in 0.. {
            let vmm = Arc::new(FaultyVmm::new(open()));
            let mut modelled = Modelled::with_capacity(vmm.clone(), 14);
            modelled.map_all(&kept);
            if is_unmap {
                modelled.map_all(&wanted);
            }
            vmm.take_records();
            vmm.set_fault(Some(Fault::once(None, k)));
            let outcome = if is_unmap { None } else { Some(modelled.map(&wanted)) };
            let stuck = match outcome {
                None => modelled.unmap(&wanted),
                Some(MapOutcome::Failed { stuck, .. }) => stuck,
                Some(MapOutcome::Mapped) => Vec::new(),
                Some(MapOutcome::NoMemory) => panic!("call {k}: a failure is not a lack of memory"),
            };
            vmm.set_fault(None);
            let has_failed = vmm.take_records().iter().any(|record| record.has_failed);
            modelled.check(&stuck);
            if modelled.region.usage().n_extents > kept.len() {
                assert!(!has_failed && !is_unmap, "call {k}: a failure is told");
                assert_eq!(modelled.unmap(&wanted), []);
            }
            let usage = modelled.region.usage();
            assert_eq!((usage.n_extents, usage.n_stuck), (kept.len(), stuck.len()), "call {k}");
            for extent in &stuck {
                assert_eq!(error_of(modelled.map(&[*extent])), [], "what is stuck is never mapped again");
            }

            // Everything else works as if nothing had happened.
            let others: Vec<Extent> = wanted.into_iter().filter(|extent| !stuck.contains(extent)).collect();
            modelled.map_all(&others);
            modelled.check(&stuck);
            assert_eq!(modelled.unmap(&others), []);
            assert_eq!(modelled.unmap(&kept), []);
            modelled.check(&stuck);
            assert_eq!(modelled.region.usage().n_extents, 0);
            if !has_failed {
                assert!(k >= 16, "no less than an unmap of three runs and ten releases");
                break;
            }
        }
    }
}

pub(crate) fn a_failing_unmap_is_reported_and_the_rest_goes_on(open: Open<'_>) {
    let inner = open();
    let vmm = Arc::new(FaultyVmm::new(inner));
    let mut modelled = Modelled::new(vmm.clone());
    let extents = [extent(4, 1), extent(5, 1), extent(8, 2)];
    modelled.map_all(&extents);
    // The run of both fails, then the first alone.
    vmm.set_fault(Some(Fault { n_failures: 2, ..Fault::once(Some(Call::Unmap), 0) }));
    assert_eq!(modelled.unmap(&extents), [extents[0]]);
    vmm.set_fault(None);
    modelled.check(&extents[..1]);
    assert_eq!((modelled.region.usage().n_extents, modelled.region.usage().n_stuck), (0, 1));
    assert_eq!(modelled.unmap(&extents[..1]), extents[..1], "it stays as it is");
    modelled.map_all(&extents[1..]);
    modelled.check(&extents[..1]);

    vmm.set_fault(Some(Fault::always(None)));
    assert_eq!(modelled.unmap(&extents[1..]).len(), 2);
    let geometry = *modelled.region.geometry();
    let range = modelled.region.range();
    drop(modelled);
    // A region that could not take itself apart leaves the rest to the device.
    vmm.set_fault(None);
    vmm.free_reservation(range).unwrap_err();
    let region = Region::try_new(vmm, geometry, Guard::Zero).unwrap();
    assert!(matches!(region.map(&extents), MapOutcome::Mapped));
}

pub(crate) fn memory_that_cannot_be_released_is_reported_as_stuck(open: Open<'_>) {
    let vmm = Arc::new(FaultyVmm::new(open()));
    let mut modelled = Modelled::new(vmm.clone());
    let extents = [extent(0, 1), extent(1, 1), extent(2, 2)];
    modelled.map_all(&extents);
    vmm.set_fault(Some(Fault::once(Some(Call::Release), 2)));
    assert_eq!(modelled.unmap(&extents), [extents[1]]);
    vmm.set_fault(None);
    modelled.check(&extents[1..2]);

    // Memory that ran out half way and then stays held is no plain lack of memory.
    vmm.set_fault(Some(Fault { call: None, ..Fault::no_memory(3) }));
    assert!(matches!(modelled.map(&[extent(4, 4), extent(8, 8)]), MapOutcome::NoMemory));
    vmm.set_fault(Some(Fault { call: None, n_failures: 2, ..Fault::no_memory(3) }));
    assert_eq!(error_of(modelled.map(&[extent(4, 4), extent(8, 8)])), [extent(4, 4)]);
    vmm.set_fault(None);
    modelled.map_all(&[extent(8, 8)]);
    modelled.check(&[extents[1], extent(4, 4)]);
}

pub(crate) fn a_lack_of_memory_at_any_extent_leaves_nothing_behind(open: Open<'_>) {
    let vmm = Arc::new(FaultyVmm::new(open()));
    let mut modelled = Modelled::new(vmm.clone());
    modelled.map_all(&[extent(0, 1)]);
    let extents = [extent(4, 4), extent(1, 1), extent(16, 8)];
    let usage = modelled.region.usage();
    for n in 0..extents.len() * N_BUFFERS as usize {
        vmm.set_fault(Some(Fault::no_memory(n)));
        vmm.take_records();
        assert!(matches!(modelled.map(&extents), MapOutcome::NoMemory), "create {n}");
        let records = vmm.take_records();
        let n_of = |call| records.iter().filter(|record| record.call == call).count();
        assert_eq!((n_of(Call::Create), n_of(Call::Release)), (n + 1, n));
        assert_eq!(n_of(Call::Map), 0, "nothing is mapped before all is created");
        vmm.set_fault(None);
        modelled.check(&[]);
        assert_eq!(modelled.region.usage(), usage);
    }
    modelled.map_all(&extents);
    modelled.check(&[]);
}

pub(crate) fn what_is_not_mapped_so_is_not_unmapped(open: Open<'_>) {
    let mut modelled = Modelled::new(open());
    modelled.map_all(&[extent(4, 4)]);
    for other in [extent(4, 2), extent(5, 1), extent(0, 8), extent(8, 4)] {
        assert_eq!(modelled.region.unmap(&[other]), [other]);
        modelled.check(&[]);
    }
    let malformed = Extent { first_page: PageId(4), n_pages: u32::MAX };
    assert_eq!(modelled.region.unmap(&[malformed]), [malformed]);
    assert_eq!(modelled.unmap(&[extent(4, 4)]), []);
    assert_eq!(modelled.region.unmap(&[extent(4, 4)]), [extent(4, 4)]);
    modelled.check(&[]);
}

pub(crate) fn pages_are_not_mapped_twice(open: Open<'_>) {
    let mut modelled = Modelled::new(open());
    modelled.map_all(&[extent(4, 4)]);
    let malformed = |first_page, n_pages| Extent { first_page: PageId(first_page), n_pages };
    for bad in [
        vec![extent(4, 4)],
        vec![extent(6, 1)],
        vec![extent(0, 16)],
        vec![extent(16, 1), extent(16, 1)],
        vec![extent(16, 1), extent(16, 4)],
        vec![extent(8, 1), extent(7, 1)],
        vec![extent(8, 1), malformed(9, 2)],
        vec![extent(8, 1), malformed(CAPACITY_PAGES, 1)],
        vec![extent(8, 1), malformed(0, 0)],
        vec![extent(8, 1), malformed(u32::MAX, 1)],
    ] {
        assert_eq!(error_of(modelled.map(&bad)), [], "{bad:?}");
        assert_eq!(modelled.region.usage().n_extents, 1);
        modelled.check(&[]);
    }
    modelled.map_all(&[extent(8, 1)]);
}

pub(crate) fn adjacent_extents_share_calls(open: Open<'_>) {
    let vmm = Arc::new(FaultyVmm::new(open()));
    let geometry = Geometry::try_new(N_BUFFERS, UNIT_BYTES, CAPACITY_PAGES).unwrap();
    let region = Region::try_new(vmm.clone(), geometry, Guard::None).unwrap();
    vmm.take_records();
    let extents = [extent(6, 2), extent(2, 2), extent(4, 2), extent(16, 8)];
    let n_calls = |call| {
        let records = vmm.take_records();
        let of_call: Vec<_> = records.iter().filter(|record| record.call == call).collect();
        (of_call.len(), records.len())
    };
    assert!(matches!(region.map(&extents), MapOutcome::Mapped));
    assert_eq!(n_calls(Call::SetAccess), (4, 8 + 8 + 4), "one a run and buffer");
    assert_eq!(region.unmap(&extents), []);
    assert_eq!(n_calls(Call::Unmap), (4, 4 + 8), "one a run and buffer");
}

pub(crate) fn threads_map_and_unmap_side_by_side(open: Open<'_>) {
    let modelled = Modelled::new(open());
    let region = &modelled.region;
    std::thread::scope(|scope| {
        for thread in 0..3_u32 {
            scope.spawn(move || {
                for round in 0..20_u8 {
                    // Alternate sizes, so that the guard is cut and merged under the others.
                    let mine = extent(thread * 4 + 4, if round % 2 == 0 { 4 } else { 1 });
                    assert!(matches!(region.map(&[mine]), MapOutcome::Mapped));
                    let address = region.address_of(1, mine.first_page).unwrap();
                    let pattern = [thread as u8 + 1, round];
                    region.vmm().write(address, &pattern).unwrap();
                    let mut bytes = [0; 2];
                    region.vmm().read(address, &mut bytes).unwrap();
                    assert_eq!(bytes, pattern);
                    assert_eq!(region.unmap(&[mine]), []);
                }
            });
        }
    });
    assert_eq!(region.usage().n_extents, 0);
    modelled.check(&[]);
}
