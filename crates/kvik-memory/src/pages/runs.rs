//! Unmapped page ids as aligned runs, so that a growth finds the largest extents at once.

use super::bitmap::Bitmap;
use crate::geometry::{Extent, MAX_EXTENT_PAGES, PageId};

/// Largest order of a run: `2^MAX_ORDER` pages are an extent of the largest size.
const MAX_ORDER: u32 = MAX_EXTENT_PAGES.trailing_zeros();

/// The unmapped pages of a region, each in exactly one maximal aligned run of a power of two.
///
/// A run is split when a smaller one is asked for and joined with its other half when that comes
/// back, so pages that were mapped one by one can be mapped by extents later.
#[derive(Debug)]
pub(crate) struct UnmappedRuns {
    /// Element k has bit i if the `2^k` pages from `i * 2^k` on are a run.
    by_order: Vec<Bitmap>,
}

impl UnmappedRuns {
    /// All pages of a region.
    pub(crate) fn new(capacity_pages: u32) -> Self {
        let mut runs = Self {
            by_order: (0..=MAX_ORDER).map(|order| Bitmap::new((capacity_pages >> order) + 1)).collect(),
        };
        let mut page = 0;
        while page < capacity_pages {
            let fits = (capacity_pages - page).ilog2();
            let order = page.trailing_zeros().min(fits).min(MAX_ORDER);
            runs.by_order[order as usize].insert(page >> order);
            page += 1 << order;
        }
        runs
    }

    /// Takes the largest extent of at most `n_pages` that there is; `None` if no page is unmapped.
    ///
    /// Of runs that hold it the smallest is cut, and of those the lowest.
    pub(crate) fn take(&mut self, n_pages: u32) -> Option<Extent> {
        let largest = n_pages.checked_ilog2()?.min(MAX_ORDER);
        (0..=largest).rev().find_map(|order| self.take_order(order))
    }

    /// Takes this extent; `None` if not all of its pages are unmapped.
    pub(crate) fn take_extent(&mut self, extent: Extent) -> Option<Extent> {
        let page = extent.first_page.0;
        let order = extent.n_pages.trailing_zeros();
        let found =
            (order..=MAX_ORDER).find(|&found| self.by_order[found as usize].contains(page >> found))?;
        self.by_order[found as usize].remove(page >> found);
        for other_half in order..found {
            self.by_order[other_half as usize].insert((page >> other_half) ^ 1);
        }
        Some(extent)
    }

    /// Puts an extent back.
    pub(crate) fn put_back(&mut self, extent: Extent) {
        let mut order = extent.n_pages.trailing_zeros();
        let mut run = extent.first_page.0 >> order;
        while order < MAX_ORDER && self.by_order[order as usize].contains(run ^ 1) {
            self.by_order[order as usize].remove(run ^ 1);
            run /= 2;
            order += 1;
        }
        self.by_order[order as usize].insert(run);
    }

    fn take_order(&mut self, order: u32) -> Option<Extent> {
        let (found_order, run) =
            (order..=MAX_ORDER).find_map(|found| Some((found, self.by_order[found as usize].first()?)))?;
        self.by_order[found_order as usize].remove(run);
        let first_page = run << found_order;
        for upper_half in order..found_order {
            self.by_order[upper_half as usize].insert((first_page >> upper_half) + 1);
        }
        Some(Extent { first_page: PageId(first_page), n_pages: 1 << order })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_neither_overlap_nor_get_lost(
            capacity_pages in 1_u32..200,
            steps in prop::collection::vec((0..3, 0_u32..6, 1_u32..80, any::<prop::sample::Index>()), 1..100),
        ) {
            let mut runs = UnmappedRuns::new(capacity_pages);
            let mut taken: Vec<Extent> = Vec::new();
            let mut is_taken = vec![false; capacity_pages as usize];
            for (kind, order, n_pages, which) in steps {
                if kind < 2 {
                    let page = which.index(capacity_pages as usize) as u32 >> order << order;
                    let wanted = Extent { first_page: PageId(page), n_pages: 1 << order };
                    let extent = if kind == 0 { runs.take(n_pages) } else { runs.take_extent(wanted) };
                    let Some(extent) = extent else {
                        let is_any_free = kind == 0 && is_taken.contains(&false);
                        let mut pages = wanted.pages();
                        let is_any_taken = pages.any(|page| is_taken.get(page.0 as usize) != Some(&false));
                        prop_assert!(!is_any_free && (kind == 0 || is_any_taken));
                        continue;
                    };
                    prop_assert!(kind == 0 || extent == wanted);
                    prop_assert!((kind == 1 || extent.n_pages <= n_pages) && extent.n_pages.is_power_of_two());
                    prop_assert_eq!(extent.first_page.0 % extent.n_pages, 0);
                    for page in extent.first_page.0..extent.first_page.0 + extent.n_pages {
                        prop_assert!(!std::mem::replace(&mut is_taken[page as usize], true));
                    }
                    taken.push(extent);
                } else if !taken.is_empty() {
                    let extent = taken.swap_remove(which.index(taken.len()));
                    for page in extent.first_page.0..extent.first_page.0 + extent.n_pages {
                        is_taken[page as usize] = false;
                    }
                    runs.put_back(extent);
                }
            }
            for extent in taken {
                runs.put_back(extent);
            }
            let fresh = UnmappedRuns::new(capacity_pages);
            for (order, bitmap) in runs.by_order.iter().enumerate() {
                prop_assert!(bitmap.iter().eq(fresh.by_order[order].iter()), "runs of order {} joined", order);
            }
        }
    }
}
