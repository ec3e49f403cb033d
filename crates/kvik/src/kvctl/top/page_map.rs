//! The pages of one member, drawn one character a cell.

use kvik_memory::PageId;
use kvik_memory::ledger::{PageCounts, PageStates};
use kvik_memory::pages::PageState;

/// The state of every page of one member at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageMap {
    states: Vec<PageState>,
    counts: PageCounts,
    page_cost_bytes: u64,
}

/// What one character of the map stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cell {
    Unmapped,
    Parked,
    Used,
    /// Some of its pages are used and some are not.
    PartlyUsed,
    /// One of its pages at least is given up.
    Quarantined,
}

// === impl PageMap ===

impl PageMap {
    pub(crate) fn new(states: Vec<PageState>, page_cost_bytes: u64) -> Self {
        let mut counts = PageCounts::default();
        for state in &states {
            *match state {
                PageState::Unmapped => &mut counts.n_unmapped,
                PageState::Parked => &mut counts.n_parked,
                PageState::Used => &mut counts.n_used,
                PageState::Quarantined => &mut counts.n_quarantined,
            } += 1;
        }
        Self { states, counts, page_cost_bytes }
    }

    /// Copies a member's page file.
    pub(crate) fn read(file: &PageStates) -> Self {
        let states = (0..file.n_pages()).filter_map(|page| file.get(PageId(page))).collect();
        Self::new(states, file.page_cost_bytes())
    }

    pub(crate) fn counts(&self) -> PageCounts {
        self.counts
    }

    pub(crate) fn n_pages(&self) -> usize {
        self.states.len()
    }

    pub(crate) fn page_cost_bytes(&self) -> u64 {
        self.page_cost_bytes
    }

    /// How many pages one cell stands for where there is room for `n_cells`.
    pub(crate) fn pages_per_cell(&self, n_cells: usize) -> usize {
        self.states.len().div_ceil(n_cells.max(1)).max(1)
    }

    /// The map in at most `n_cells` cells.
    pub(crate) fn cells(&self, n_cells: usize) -> impl Iterator<Item = Cell> {
        self.states.chunks(self.pages_per_cell(n_cells)).map(Cell::of)
    }
}

// === impl Cell ===

impl Cell {
    fn of(pages: &[PageState]) -> Self {
        let has = |state: PageState| pages.contains(&state);
        if has(PageState::Quarantined) {
            Self::Quarantined
        } else if pages.iter().all(|page| *page == PageState::Used) {
            Self::Used
        } else if has(PageState::Used) {
            Self::PartlyUsed
        } else if has(PageState::Parked) {
            Self::Parked
        } else {
            Self::Unmapped
        }
    }

    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Self::Unmapped => ".",
            Self::Parked => "=",
            Self::Used => "#",
            Self::PartlyUsed => "+",
            Self::Quarantined => "x",
        }
    }
}
