//! Latencies of taking and freeing blocks and pages that are mapped already.
//!
//!     cargo run --release --package kvik-memory --example alloc_latency
//!
//! The region maps nothing, so this is the bookkeeping alone: with the pool's agent, or without it.

#![expect(clippy::print_stdout, reason = "printing is its purpose")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::blocks::BlockAllocator;
use kvik_memory::geometry::{BlockGeometry, UNIT_BYTES};
use kvik_memory::pages::{FixedGrants, MapOutcome, PageAllocator, PageMapper, PageSettings};
use kvik_memory::pool::{KvPool, PoolParts, PoolSettings};
use kvik_memory::{Extent, Geometry, Result};

const CAPACITY_PAGES: u32 = 4_096;
const BLOCKS_PER_PAGE: u64 = 32;
const N_SAMPLES: usize = 20_000;

/// A region behind which there is nothing.
#[derive(Debug)]
struct NothingMapper(Geometry);

impl PageMapper for NothingMapper {
    fn geometry(&self) -> &Geometry {
        &self.0
    }

    fn map(&self, _: &[Extent]) -> MapOutcome {
        MapOutcome::Mapped
    }

    fn unmap(&self, _: &[Extent]) -> Vec<Extent> {
        Vec::new()
    }
}

/// Prints p50 and p99 of `pair`, which takes and frees once.
fn measure(what: &str, n: u32, mut pair: impl FnMut() -> Result<()>) -> Result<()> {
    // One sample is several pairs, so that reading the clock does not count.
    let n_pairs = (256 / n).clamp(1, 64);
    let mut samples = Vec::with_capacity(N_SAMPLES);
    for _ in 0..N_SAMPLES {
        let begun = Instant::now();
        for _ in 0..n_pairs {
            pair()?;
        }
        samples.push(begun.elapsed() / n_pairs);
    }
    samples.sort_unstable();
    let nanoseconds = |sample: Duration| sample.as_nanos();
    println!(
        "{what:<24} {n:>5} {:>9} {:>9}",
        nanoseconds(samples[N_SAMPLES / 2]),
        nanoseconds(samples[N_SAMPLES * 99 / 100])
    );
    Ok(())
}

fn main() -> Result<()> {
    let geometry = Geometry::try_new(1, UNIT_BYTES, CAPACITY_PAGES)?;
    let block_geometry = BlockGeometry::try_new(&geometry, UNIT_BYTES / BLOCKS_PER_PAGE)?;
    let budget = || Arc::new(FixedGrants::new(geometry.region_bytes()));
    println!("{:<24} {:>5} {:>9} {:>9}", "take + free", "n", "p50 ns", "p99 ns");

    let pages = PageAllocator::try_new(Arc::new(NothingMapper(geometry)), budget(), PageSettings::default())?;
    for n in [1, 4, 16, 64, 256] {
        let mut taken = Vec::with_capacity(n as usize);
        measure("pages, parked", n, || {
            taken.clear();
            let _ = pages.alloc(n, &mut taken)?;
            pages.free(&taken)
        })?;
    }
    drop(pages);

    let pages = PageAllocator::try_new(Arc::new(NothingMapper(geometry)), budget(), PageSettings::default())?;
    let blocks = BlockAllocator::try_new(Arc::new(pages), block_geometry)?;
    // Every other block of many pages is in use, as in an engine that has run for a while.
    let mut used = Vec::new();
    let _ = blocks.alloc(CAPACITY_PAGES / 2 * BLOCKS_PER_PAGE as u32, &mut used)?;
    let every_other: Vec<_> = used.iter().copied().step_by(2).collect();
    blocks.free(&every_other)?;
    for n in [1, 4, 16, 64, 256] {
        let mut taken = Vec::with_capacity(n as usize);
        measure("blocks, fragmented", n, || {
            taken.clear();
            let _ = blocks.alloc(n, &mut taken)?;
            blocks.free(&taken)
        })?;
    }
    drop(blocks);

    let budget = budget();
    let parts = PoolParts {
        mapper: Arc::new(NothingMapper(geometry)),
        grants: budget.clone(),
        events: budget,
        observer: None,
    };
    let pool = KvPool::start(parts, PoolSettings::new(block_geometry.block_bytes()))?;
    for n in [1, 4, 16, 64, 256] {
        let mut taken = Vec::with_capacity(n as usize);
        measure("blocks of a pool, fresh", n, || {
            taken.clear();
            let _ = pool.alloc(n, &mut taken)?;
            pool.free(&taken)
        })?;
    }
    Ok(())
}
