//! Growth of an engine's memory, by steps and at once, and what giving it back takes.
//!
//! Each round begins with a pool that has nothing mapped and ends with one: nothing is prepared or trimmed in between.

use std::time::{Duration, Instant};

use anyhow::ensure;
use kvik_memory::pool::{KvPool, PoolSettings};

use super::stand::{BLOCK_BYTES, CAPACITY_PAGES};
use super::{BenchDevice, KVCACHED_ON_H200, MemoryBench, better_than, take_blocks};
use crate::report::Measurement;

/// Milliseconds in which kvcached grows by 512 MiB, with pages of 2 MiB in each buffer.
const KVCACHED_GROW_MS: f64 = 29.0;
/// Milliseconds in which kvcached frees 32 GiB of such pages.
const KVCACHED_FREE_MS: f64 = 1_362.0;

/// One step of growth: 256 blocks of 2 MiB over all buffers.
const STEP_BLOCKS: u32 = 256;
const STEP_BYTES: u64 = 512 << 20;
/// Steps that are averaged: the first of them finds the guard uncut.
const STEPS_PER_VALUE: usize = 8;

/// Milliseconds of growth and of giving back.
#[derive(Debug, Default)]
struct GrowthTimes {
    open: Vec<f64>,
    step: Vec<f64>,
    slowest_step: Vec<f64>,
    at_once: Vec<f64>,
    free_of_steps: Vec<f64>,
    free_at_once: Vec<f64>,
}

impl MemoryBench {
    /// Growth by half a gibibyte at a time and all at once, each from nothing and back to nothing.
    pub(super) fn growth(&self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let mut times = GrowthTimes::default();
        for round in 0..=self.options.slow_rounds() {
            let values = self.grow_and_free()?;
            if 0 < round || self.options.is_quick {
                times.extend(values);
            }
        }
        let n_gib = self.options.growth_bytes() >> 30;
        let is_as_kvcached = self.is_on_gpu() && n_gib == 32;
        let grown = |result: Measurement| match self.options.device {
            BenchDevice::Host => result,
            BenchDevice::Cuda(_) => better_than(result, KVCACHED_ON_H200, KVCACHED_GROW_MS, Some(2.0)),
        };
        let freed = |name: &str, times: Vec<f64>| {
            let name = format!("free_{n_gib}_gib_grown_{name}");
            Measurement::from_repeats(name, "ms", times).map(|result| {
                if is_as_kvcached {
                    better_than(result, KVCACHED_ON_H200, KVCACHED_FREE_MS, Some(10.0))
                } else {
                    result
                }
            })
        };
        Ok(vec![
            Measurement::from_repeats("open_64_gib_reservation".to_owned(), "ms", times.open),
            Measurement::from_repeats("grow_512_mib".to_owned(), "ms", times.step).map(grown),
            Measurement::from_repeats("grow_512_mib_slowest".to_owned(), "ms", times.slowest_step),
            Measurement::from_repeats(format!("grow_{n_gib}_gib_at_once"), "ms", times.at_once),
            freed("at_once", times.free_at_once),
            freed("by_512_mib", times.free_of_steps),
        ])
    }

    fn grow_and_free(&self) -> anyhow::Result<GrowthTimes> {
        let mut times = GrowthTimes::default();
        // Nothing is prepared or trimmed in the background of the measurement.
        let settings = PoolSettings {
            is_preallocating: false,
            low_watermark_pages: 0,
            high_watermark_pages: CAPACITY_PAGES,
            trim_after: Duration::from_hours(1),
            ..PoolSettings::new(BLOCK_BYTES)
        };
        let (pool, opened) = timed_ms(|| self.stand.pool("growth", settings))?;
        times.open.push(opened);
        let n_steps = (self.options.growth_bytes() / STEP_BYTES) as usize;
        let mut blocks = Vec::with_capacity(n_steps * STEP_BLOCKS as usize);
        let mut steps = Vec::with_capacity(n_steps);
        for _ in 0..n_steps {
            steps.push(timed_ms(|| take_blocks(&pool, STEP_BLOCKS, &mut blocks))?.1);
        }
        let mean = |steps: &[f64]| steps.iter().sum::<f64>() / steps.len() as f64;
        times.step.extend(steps.chunks(STEPS_PER_VALUE).map(mean));
        times.slowest_step.extend(steps.iter().copied().reduce(f64::max));
        times.free_of_steps.push(free_and_trim(&pool, &mut blocks)?);

        let n_blocks = n_steps as u32 * STEP_BLOCKS;
        times.at_once.push(timed_ms(|| take_blocks(&pool, n_blocks, &mut blocks))?.1);
        times.free_at_once.push(free_and_trim(&pool, &mut blocks)?);
        Ok(times)
    }
}

impl GrowthTimes {
    fn extend(&mut self, other: Self) {
        self.open.extend(other.open);
        self.step.extend(other.step);
        self.slowest_step.extend(other.slowest_step);
        self.at_once.extend(other.at_once);
        self.free_of_steps.extend(other.free_of_steps);
        self.free_at_once.extend(other.free_at_once);
    }
}

/// Frees all blocks and unmaps all pages; the milliseconds of both.
fn free_and_trim(pool: &KvPool, blocks: &mut Vec<kvik_memory::BlockId>) -> anyhow::Result<f64> {
    let (_, elapsed) = timed_ms(|| {
        pool.free(blocks)?;
        Ok(pool.trim())
    })?;
    blocks.clear();
    let n_held = pool.counters().pages.n_parked + pool.counters().pages.n_quarantined;
    ensure!(n_held == 0, "{n_held} pages were not unmapped");
    Ok(elapsed)
}

fn timed_ms<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, f64)> {
    let begun = Instant::now();
    let value = work()?;
    Ok((value, begun.elapsed().as_secs_f64() * 1e3))
}
