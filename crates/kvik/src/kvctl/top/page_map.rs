//! The pages of one member or of a group, drawn one character a cell.

use std::path::Path;

use kvik_memory::PageId;
use kvik_memory::ledger::{PageCounts, PageStates};
use kvik_memory::pages::PageState;

use super::rows::RowKey;
use crate::folder::Reading;

/// The pages of all members, as they were when the lines of the screen were read.
#[derive(Debug, Default)]
pub(crate) struct PageMaps {
    by_member: Vec<(RowKey, PageMap)>,
}

/// The state of every page of a line at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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

// === impl PageMaps ===

impl PageMaps {
    /// Copies the page files of all members of a reading; those without one have no map.
    pub(crate) fn read(dir: &Path, reading: &Reading) -> Self {
        let members = reading.devices.iter().flat_map(|device| {
            device.members.iter().filter_map(move |member| {
                let file = PageStates::open(dir, &member.ipc_name, member.page_file?).ok()??;
                let (device, ipc_name) = (device.device.clone(), member.ipc_name.clone());
                let key = RowKey { device, ipc_name, slot: Some(member.slot) };
                Some((key, PageMap::read(&file)))
            })
        });
        Self { by_member: members.collect() }
    }

    #[cfg(test)]
    pub(crate) fn new(by_member: Vec<(RowKey, PageMap)>) -> Self {
        Self { by_member }
    }

    /// The pages of a line: of a member, or of all members of a group one after the other.
    pub(crate) fn of(&self, line: &RowKey) -> Option<PageMap> {
        let is_in = |key: &RowKey| {
            key.device == line.device
                && key.ipc_name == line.ipc_name
                && (line.slot.is_none() || line.slot == key.slot)
        };
        let maps = self.by_member.iter().filter(|(key, _)| is_in(key)).map(|(_, map)| map);
        maps.cloned().reduce(PageMap::join)
    }
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

    /// The pages of both; members of a group have pages of one size, or the larger one is shown.
    fn join(mut self, other: Self) -> Self {
        self.states.extend(other.states);
        let page_cost_bytes = self.page_cost_bytes.max(other.page_cost_bytes);
        Self::new(self.states, page_cost_bytes)
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
