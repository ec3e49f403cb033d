//! The state of every page of one member, two bits each, for tools to look at.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::SharedWords;
use super::liveness::Life;
use super::segment::{self, Segment, segment_error};
use crate::geometry::PageId;
use crate::pages::PageState;
use crate::{MemoryError, Result};

const PAGE_MAGIC: u64 = u64::from_le_bytes(*b"KVIKPAGE");
const PAGE_VERSION: u64 = 1;
const PAGES_PER_WORD: u32 = 32;

/// How many page files one name can have at a time: the slots of a few devices.
const MAX_PAGE_FILES: u32 = 4096;

/// How many pages are in which state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Nothing is behind them.
    pub n_unmapped: u64,
    /// Mapped and free.
    pub n_parked: u64,
    /// In use.
    pub n_used: u64,
    /// Given up.
    pub n_quarantined: u64,
}

/// The page file of one member: written by it alone, read by tools.
#[derive(Debug)]
pub struct PageStates {
    segment: Segment<PageHeader>,
    n_pages: u32,
    number: u32,
    life: Life,
}

#[derive(Debug)]
#[repr(C)]
struct PageHeader {
    magic: AtomicU64,
    version: AtomicU64,
    size_bytes: AtomicU64,
    n_pages: AtomicU64,
    page_cost_bytes: AtomicU64,
    reserved: [AtomicU64; 3],
}

// SAFETY: repr(C), atomics only.
unsafe impl SharedWords for PageHeader {}

/// The path of page file `number` of `ipc_name`.
pub(super) fn page_file_path(dir: &Path, ipc_name: &str, number: u32) -> PathBuf {
    dir.join(format!("{ipc_name}_page_{number}"))
}

/// Whether `path` is a page file of ours, or one that its maker did not finish.
pub(super) fn is_page_file(path: &Path) -> bool {
    let Ok(Some(file)) = segment::open(path) else { return false };
    segment::first_words::<1>(&file, path).is_ok_and(|words| words[0] == PAGE_MAGIC || words[0] == 0)
}

// === impl PageStates ===

impl PageStates {
    /// Creates the file with the lowest free number.
    pub(super) fn create(dir: &Path, ipc_name: &str, n_pages: u32, page_cost_bytes: u64) -> Result<Self> {
        let n_words = n_pages.div_ceil(PAGES_PER_WORD) as usize;
        let n_bytes = size_of::<PageHeader>() + n_words * size_of::<u64>();
        for number in 0..MAX_PAGE_FILES {
            let path = page_file_path(dir, ipc_name, number);
            let Some(file) = segment::create(&path)? else { continue };
            if let Err(error) = segment::allocate(&file, &path, n_bytes) {
                segment::unlink(&path)?;
                return Err(error);
            }
            let segment = Segment::<PageHeader>::map(&file, &path, n_bytes)?;
            segment.version.store(PAGE_VERSION, Ordering::Relaxed);
            segment.size_bytes.store(n_bytes as u64, Ordering::Relaxed);
            segment.n_pages.store(n_pages.into(), Ordering::Relaxed);
            segment.page_cost_bytes.store(page_cost_bytes, Ordering::Relaxed);
            segment.magic.store(PAGE_MAGIC, Ordering::Release);
            return Ok(Self { segment, n_pages, number, life: Life::current() });
        }
        let path = page_file_path(dir, ipc_name, 0);
        Err(segment_error("create", &path, std::io::Error::from(std::io::ErrorKind::AlreadyExists)))
    }

    /// Opens page file `number` of `ipc_name` to look at it; `None` if there is none.
    pub fn open(dir: &Path, ipc_name: &str, number: u32) -> Result<Option<Self>> {
        super::name::check_ipc_name(ipc_name)?;
        let path: PathBuf = page_file_path(dir, ipc_name, number);
        let Some(file) = segment::open(&path)? else { return Ok(None) };
        let n_bytes = segment::length_bytes(&file, &path)?;
        let foreign = |reason: String| MemoryError::ForeignSegment { path: path.clone(), reason };
        let n_mapped = usize::try_from(n_bytes).map_err(|_| foreign(format!("it has {n_bytes} bytes")))?;
        let segment = Segment::<PageHeader>::map(&file, &path, n_mapped)?;
        let magic = segment.magic.load(Ordering::Acquire);
        let version = segment.version.load(Ordering::Relaxed);
        if magic != PAGE_MAGIC || version != PAGE_VERSION {
            let reason = format!(
                "found magic {magic:#018x}, version {version}; expected {PAGE_MAGIC:#018x}, version {PAGE_VERSION}"
            );
            return Err(foreign(reason));
        }
        let n_room = segment.tail().len() as u64 * u64::from(PAGES_PER_WORD);
        let n_pages = segment.n_pages.load(Ordering::Relaxed);
        let n_pages = u32::try_from(n_pages.min(n_room)).map_err(|_| foreign(format!("{n_pages} pages")))?;
        Ok(Some(Self { segment, n_pages, number, life: Life::current() }))
    }

    /// The number in the file's name.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How many pages it describes.
    pub fn n_pages(&self) -> u32 {
        self.n_pages
    }

    /// Physical bytes behind one page id.
    pub fn page_cost_bytes(&self) -> u64 {
        self.segment.page_cost_bytes.load(Ordering::Relaxed)
    }

    /// Writes the state of `n_pages` pages from `first_page`; those out of range are left out.
    ///
    /// Does nothing in a forked child: the file is its parent's.
    pub fn set(&self, first_page: PageId, n_pages: u32, state: PageState) {
        if self.life.check().is_err() {
            return;
        }
        let end = first_page.0.saturating_add(n_pages).min(self.n_pages);
        let words = self.segment.tail();
        let mut page = first_page.0;
        while page < end {
            let shift = page % PAGES_PER_WORD;
            let n_here = (PAGES_PER_WORD - shift).min(end - page);
            let mask = (u64::MAX >> (64 - 2 * n_here)) << (2 * shift);
            let pattern = (u64::MAX / 3).wrapping_mul(state as u64) & mask;
            let word = &words[(page / PAGES_PER_WORD) as usize];
            // Tools read one word at a time; nothing else depends on it.
            let _ =
                word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| Some((old & !mask) | pattern));
            page += n_here;
        }
    }

    /// The state of `page`; `None` out of range.
    pub fn get(&self, page: PageId) -> Option<PageState> {
        if page.0 >= self.n_pages {
            return None;
        }
        let word = self.segment.tail()[(page.0 / PAGES_PER_WORD) as usize].load(Ordering::Relaxed);
        Some(match (word >> (2 * (page.0 % PAGES_PER_WORD))) & 3 {
            0 => PageState::Unmapped,
            1 => PageState::Parked,
            2 => PageState::Used,
            _ => PageState::Quarantined,
        })
    }

    /// Counts the pages in each state.
    pub fn counts(&self) -> PageCounts {
        const LOW_BITS: u64 = u64::MAX / 3;
        let mut counts = PageCounts::default();
        for (index, word) in self.segment.tail().iter().enumerate() {
            let n_here = u64::from(self.n_pages).saturating_sub(index as u64 * u64::from(PAGES_PER_WORD));
            let n_here = n_here.min(u64::from(PAGES_PER_WORD));
            if n_here == 0 {
                break;
            }
            let word = word.load(Ordering::Relaxed) & (u64::MAX >> (64 - 2 * n_here));
            let (low, high) = (word & LOW_BITS, (word >> 1) & LOW_BITS);
            let n_quarantined = u64::from((low & high).count_ones());
            counts.n_quarantined += n_quarantined;
            counts.n_parked += u64::from(low.count_ones()) - n_quarantined;
            counts.n_used += u64::from(high.count_ones()) - n_quarantined;
            counts.n_unmapped += n_here - u64::from((low | high).count_ones());
        }
        counts
    }
}
