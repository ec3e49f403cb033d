use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// Aligned as any reservation is, and not better.
const BASE: u64 = (1 << 40) + PAGE;
const PAGE: u64 = 2 << 20;

/// A space, and what its callers know of it.
struct Model {
    space: HeapSpace,
    live: Vec<(u64, Request)>,
    mapped: BTreeSet<u32>,
    page_bytes: u64,
    n_pages: u32,
}

impl Model {
    fn new(page_bytes: u64, n_pages: u32) -> Self {
        let space = HeapSpace::new(BASE, page_bytes, n_pages);
        Self { space, live: Vec::new(), mapped: BTreeSet::new(), page_bytes, n_pages }
    }

    fn alloc(&mut self, request: Request) -> Option<u64> {
        let address = match self.space.begin(request) {
            Begun::Placed(address) => address,
            Begun::NeedsPages(pages) => {
                for page in pages.clone() {
                    assert!(page < self.n_pages && self.mapped.insert(page), "page {page} is not free");
                }
                self.space.finish(request, pages)
            }
            Begun::Full => return None,
        };
        assert!(address.is_multiple_of(request.alignment.max(QUANTUM_BYTES)));
        for page in self.pages_of(address, request) {
            assert!(self.mapped.contains(&page), "page {page} has no memory");
        }
        for &(other, theirs) in &self.live {
            assert!(
                address + request.n_bytes <= other || other + theirs.n_bytes <= address,
                "{address:#x} overlaps {other:#x}"
            );
        }
        self.live.push((address, request));
        Some(address)
    }

    fn free(&mut self, place: usize) {
        let (address, _) = self.live.swap_remove(place);
        if let Freed::Pages(pages) = self.space.free(address).unwrap() {
            for page in pages.clone() {
                assert!(self.mapped.remove(&page), "page {page} has no memory");
                let is_on_page =
                    |(address, request): &(u64, Request)| self.pages_of(*address, *request).contains(&page);
                assert!(!self.live.iter().any(is_on_page), "page {page} is in use");
            }
            self.space.return_pages(pages);
        }
        assert_eq!(self.space.free(address), None, "a second free finds nothing");
    }

    fn pages_of(&self, address: u64, request: Request) -> Range<u32> {
        let first = (address - BASE) / self.page_bytes;
        let end = (address + request.n_bytes - BASE).div_ceil(self.page_bytes);
        first as u32..end as u32
    }
}

fn request(n_bytes: u64, alignment: u64) -> Request {
    Request { n_bytes, alignment }
}

#[test]
fn small_allocations_share_a_page_and_large_ones_have_their_own() {
    let mut model = Model::new(PAGE, 8);
    model.alloc(request(1, 1));
    model.alloc(request(1000, 256));
    model.alloc(request(PAGE / 2, 256));
    assert_eq!(model.mapped.len(), 1);
    model.alloc(request(PAGE / 2 + 1, 256));
    assert_eq!(model.mapped.len(), 2);
    model.alloc(request(3 * PAGE, 256));
    assert_eq!(model.mapped.len(), 5);
    assert_eq!(model.space.allocated_bytes(), 1 + 1000 + PAGE / 2 + PAGE / 2 + 1 + 3 * PAGE);
}

#[test]
fn the_place_of_a_freed_allocation_is_used_again() {
    let mut model = Model::new(PAGE, 8);
    let first = model.alloc(request(3 * PAGE, 256));
    model.alloc(request(PAGE, 256));
    model.free(0);
    assert_eq!(model.alloc(request(3 * PAGE, 256)), first);
}

#[test]
fn an_alignment_above_the_page_is_kept() {
    for page_bytes in [PAGE, 3 * PAGE] {
        let mut model = Model::new(page_bytes, 64);
        model.alloc(request(PAGE, 256));
        let address = model.alloc(request(100, 16 * PAGE)).unwrap();
        assert!(address.is_multiple_of(16 * PAGE));
    }
}

#[test]
fn what_has_no_addresses_changes_nothing() {
    let mut model = Model::new(PAGE, 4);
    assert_eq!(model.alloc(request(4 * PAGE + 1, 256)), None);
    assert_eq!(model.alloc(request(u64::MAX, 256)), None);
    assert_eq!(model.alloc(request(1, 1 << 62)), None);
    model.alloc(request(4 * PAGE, 256)).unwrap();
    assert_eq!(model.alloc(request(1, 1)), None);
    model.free(0);
    model.alloc(request(1, 1)).unwrap();
}

proptest! {
    #[test]
    fn allocations_never_overlap_and_all_pages_come_back(
        page_units in 1u64..4,
        steps in prop::collection::vec((any::<bool>(), 0u32..24, 0u32..26, 0u64..1000, any::<prop::sample::Index>()), 1..200),
    ) {
        let mut model = Model::new(page_units * PAGE, 40);
        for (frees, size_log, align_log, extra_bytes, index) in steps {
            if frees && !model.live.is_empty() {
                let place = index.index(model.live.len());
                model.free(place);
            } else {
                model.alloc(request((1 << size_log) + extra_bytes, 1 << align_log));
            }
            let sum: u64 = model.live.iter().map(|(_, request)| request.n_bytes).sum();
            prop_assert_eq!(model.space.allocated_bytes(), sum);
            prop_assert_eq!(model.space.n_allocations(), model.live.len());
        }
        while !model.live.is_empty() {
            model.free(0);
        }
        prop_assert!(model.mapped.is_empty());
        prop_assert_eq!(model.space.free_runs.by_length.len(), 1);
        prop_assert!(model.space.gaps.by_start.is_empty());
    }
}
