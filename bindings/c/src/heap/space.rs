//! Where allocations lie in the addresses of a heap. Bookkeeping only: the caller maps and unmaps.
//!
//! A large allocation has whole pages. Small ones share a page, in which the smallest gap that fits is taken.
//!
//! # Invariants
//!
//! * A page is part of one free run, of one large allocation, shared, or in the hands of a caller that maps or
//!   unmaps it.
//! * Free runs that touch are one; gaps of one page that touch are one; no gap crosses the border of a page.
//! * A shared page has an allocation: with its last one it goes back to the caller.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// Every allocation starts at a multiple of this, as those of the CUDA driver do, and takes a multiple of it.
pub(super) const QUANTUM_BYTES: u64 = 256;

/// Gaps that are tried before one is taken that fits whatever its address.
const N_CLOSE_FITS: usize = 8;

/// What an allocation must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    /// 1 or more.
    pub(super) n_bytes: u64,
    /// A power of two.
    pub(super) alignment: u64,
}

/// How far an allocation came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Begun {
    /// It lies at this address, in a page that has memory.
    Placed(u64),
    /// These pages are the caller's: it maps them and finishes, or returns them.
    NeedsPages(Range<u32>),
    /// There are no addresses for it.
    Full,
}

/// What is left to do for an allocation that was freed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Freed {
    /// Nothing: others are on its page.
    Gap,
    /// These pages are the caller's: it unmaps them and returns them.
    Pages(Range<u32>),
}

/// The addresses of a heap.
#[derive(Debug)]
pub(super) struct HeapSpace {
    base_address: u64,
    page_bytes: u64,
    free_runs: SizedRanges<u32>,
    gaps: SizedRanges<u64>,
    /// Allocations on each shared page.
    n_on_page: HashMap<u32, u32>,
    allocations: HashMap<u64, Allocation>,
    allocated_bytes: u64,
}

#[derive(Debug)]
struct Allocation {
    n_bytes: u64,
    /// The pages that it has for itself; none where it shares one.
    pages: Option<Range<u32>>,
}

/// Free ranges by where they start and by how long they are.
#[derive(Debug)]
struct SizedRanges<N> {
    by_start: BTreeMap<N, N>,
    by_length: BTreeSet<(N, N)>,
}

impl HeapSpace {
    /// The space of `n_pages` pages from `base_address` on, none of which has memory.
    pub(super) fn new(base_address: u64, page_bytes: u64, n_pages: u32) -> Self {
        let mut free_runs = SizedRanges::new();
        free_runs.insert(0, n_pages);
        Self {
            base_address,
            page_bytes,
            free_runs,
            gaps: SizedRanges::new(),
            n_on_page: HashMap::new(),
            allocations: HashMap::new(),
            allocated_bytes: 0,
        }
    }

    /// Finds a place; where it has no memory yet, [`finish`](Self::finish) ends what this begins.
    pub(super) fn begin(&mut self, request: Request) -> Begun {
        if self.is_shared(request) {
            if let Some(address) = self.place_in_gap(request) {
                return Begun::Placed(address);
            }
            let Some((first, n_pages)) = self.free_runs.at_least(1).next() else { return Begun::Full };
            self.take_pages(first, n_pages, first..first + 1);
            return Begun::NeedsPages(first..first + 1);
        }
        let n_min_pages = request.n_bytes.div_ceil(self.page_bytes);
        let Ok(n_min_pages) = u32::try_from(n_min_pages) else { return Begun::Full };
        let fit = self.free_runs.at_least(n_min_pages).find_map(|(first, n_pages)| {
            let pages = self.pages_from(first, request)?;
            (pages.end <= first + n_pages).then_some((first, n_pages, pages))
        });
        let Some((first, n_pages, pages)) = fit else { return Begun::Full };
        self.take_pages(first, n_pages, pages.clone());
        Begun::NeedsPages(pages)
    }

    /// Places what was begun on `pages`, which have memory now.
    pub(super) fn finish(&mut self, request: Request, pages: Range<u32>) -> u64 {
        let start = self.address_of(pages.start);
        if self.is_shared(request) {
            self.n_on_page.insert(pages.start, 0);
            self.gaps.insert(start, self.page_bytes);
            // The new gap is a whole page, which any shared allocation fits in.
            return self.place_in_gap(request).unwrap_or(start);
        }
        let address = start.next_multiple_of(request.alignment);
        self.enter(address, Allocation { n_bytes: request.n_bytes, pages: Some(pages) });
        address
    }

    /// Takes back pages that have no memory.
    pub(super) fn return_pages(&mut self, pages: Range<u32>) {
        let (mut first, mut n_pages) = (pages.start, pages.end - pages.start);
        if let Some((start, length)) = self.free_runs.ending_at(first) {
            self.free_runs.remove(start, length);
            (first, n_pages) = (start, n_pages + length);
        }
        if let Some(length) = self.free_runs.starting_at(pages.end) {
            self.free_runs.remove(pages.end, length);
            n_pages += length;
        }
        self.free_runs.insert(first, n_pages);
    }

    /// Frees the allocation that starts at `address`; nothing where none does.
    pub(super) fn free(&mut self, address: u64) -> Option<Freed> {
        let Allocation { n_bytes, pages } = self.allocations.remove(&address)?;
        self.allocated_bytes -= n_bytes;
        if let Some(pages) = pages {
            return Some(Freed::Pages(pages));
        }
        let page = self.page_of(address);
        let page_start = self.address_of(page);
        let (mut start, mut end) = (address, address + n_bytes.next_multiple_of(QUANTUM_BYTES));
        if start > page_start
            && let Some((gap_start, length)) = self.gaps.ending_at(start)
        {
            self.gaps.remove(gap_start, length);
            start = gap_start;
        }
        if end < page_start + self.page_bytes
            && let Some(length) = self.gaps.starting_at(end)
        {
            self.gaps.remove(end, length);
            end += length;
        }
        let n_left = self.n_on_page.get_mut(&page)?;
        *n_left -= 1;
        if *n_left == 0 {
            self.n_on_page.remove(&page);
            return Some(Freed::Pages(page..page + 1));
        }
        self.gaps.insert(start, end - start);
        Some(Freed::Gap)
    }

    /// Bytes that were asked for and not freed.
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }

    /// Allocations that were not freed.
    pub(super) fn n_allocations(&self) -> usize {
        self.allocations.len()
    }

    /// Half a page or less shares one: more would leave little for others.
    fn is_shared(&self, request: Request) -> bool {
        request.n_bytes.max(request.alignment) <= self.page_bytes / 2
    }

    /// Takes the smallest gap that fits, or nearly that.
    fn place_in_gap(&mut self, request: Request) -> Option<u64> {
        let n_bytes = request.n_bytes.next_multiple_of(QUANTUM_BYTES);
        let aligned = |(start, length): (u64, u64)| {
            let address = start.next_multiple_of(request.alignment.max(QUANTUM_BYTES));
            (address + n_bytes <= start + length).then_some((start, length, address))
        };
        let close_fit = self.gaps.at_least(n_bytes).take(N_CLOSE_FITS).find_map(aligned);
        let sure_bytes = n_bytes + request.alignment.saturating_sub(QUANTUM_BYTES);
        let fit = close_fit.or_else(|| self.gaps.at_least(sure_bytes).next().and_then(aligned));
        let (start, length, address) = fit?;
        self.gaps.remove(start, length);
        if address > start {
            self.gaps.insert(start, address - start);
        }
        let (end, gap_end) = (address + n_bytes, start + length);
        if end < gap_end {
            self.gaps.insert(end, gap_end - end);
        }
        *self.n_on_page.entry(self.page_of(address)).or_insert(0) += 1;
        self.enter(address, Allocation { n_bytes: request.n_bytes, pages: None });
        Some(address)
    }

    fn enter(&mut self, address: u64, allocation: Allocation) {
        self.allocated_bytes += allocation.n_bytes;
        self.allocations.insert(address, allocation);
    }

    /// The pages of an allocation at the first address from page `first` on that is aligned.
    fn pages_from(&self, first: u32, request: Request) -> Option<Range<u32>> {
        let address = self.address_of(first).checked_next_multiple_of(request.alignment)?;
        let end = (address - self.base_address).checked_add(request.n_bytes)?.div_ceil(self.page_bytes);
        Some(self.page_of(address)..u32::try_from(end).ok()?)
    }

    /// Cuts `pages` out of the free run of `n_pages` from `first` on.
    fn take_pages(&mut self, first: u32, n_pages: u32, pages: Range<u32>) {
        self.free_runs.remove(first, n_pages);
        if first < pages.start {
            self.free_runs.insert(first, pages.start - first);
        }
        if pages.end < first + n_pages {
            self.free_runs.insert(pages.end, first + n_pages - pages.end);
        }
    }

    fn address_of(&self, page: u32) -> u64 {
        self.base_address + u64::from(page) * self.page_bytes
    }

    fn page_of(&self, address: u64) -> u32 {
        ((address - self.base_address) / self.page_bytes) as u32
    }
}

impl<N: Copy + Ord + Default + std::ops::Add<Output = N>> SizedRanges<N> {
    fn new() -> Self {
        Self { by_start: BTreeMap::new(), by_length: BTreeSet::new() }
    }

    fn insert(&mut self, start: N, length: N) {
        self.by_start.insert(start, length);
        self.by_length.insert((length, start));
    }

    fn remove(&mut self, start: N, length: N) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
    }

    /// Start and length of the ranges that are at least so long: the shortest first, the lowest of one length first.
    fn at_least(&self, length: N) -> impl Iterator<Item = (N, N)> + '_ {
        self.by_length.range((length, N::default())..).map(|&(length, start)| (start, length))
    }

    fn starting_at(&self, start: N) -> Option<N> {
        self.by_start.get(&start).copied()
    }

    fn ending_at(&self, end: N) -> Option<(N, N)> {
        let (&start, &length) = self.by_start.range(..end).next_back()?;
        (start + length == end).then_some((start, length))
    }
}

#[cfg(test)]
mod tests;
