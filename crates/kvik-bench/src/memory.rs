//! What elastic memory costs: blocks and pages at hand, grants, growth, and giving memory back.
//!
//! One engine's memory as a model of 32 layers has it: a buffer for the keys and one for the values of each
//! layer, pages of 2 MiB, blocks of 32 KiB in each buffer. The ledger is one of its own, so that engines that
//! run on the machine are not asked for memory; every grant, publication and page state is written as in an
//! engine. Values are medians of rounds after a warm-up. A p50 comes from samples of many operations, so that
//! reading the clock does not count; a p99 comes from single ones, and it does.

mod fanout;
mod growth;
mod peer;
mod stand;

use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use anyhow::ensure;
use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::Member;
use kvik_memory::pages::{
    Claim, Grants as _, MapOutcome, PageAllocator, PageMapper as _, PageSettings, PagesOutcome,
};
use kvik_memory::pool::{KvPool, PoolSettings};
use kvik_memory::{Extent, PageId};

use self::peer::Peer;
pub use self::peer::run as run_peer;
use self::stand::{BLOCK_BYTES, CAPACITY_PAGES, N_BUFFERS, PAGE_BYTES, Stand};
use crate::report::{Baseline, Goal, Measurement};

/// kvcached 0.1.6 as it was measured before, on an H200 with memory of the same shape: not in this run.
const KVCACHED_ON_H200: &str = "kvcached_0.1.6_earlier_on_h200";
/// kvcached 0.1.6 as it was measured before, with a driver that does nothing, on two cores: not in this run.
const KVCACHED_PAGES: &str = "kvcached_0.1.6_earlier_without_gpu";
/// Nanoseconds for a pair of allocating and freeing a page that kvcached has reserved.
const KVCACHED_PAGE_NS: f64 = 49_000.0;
/// Blocks of one batch, and the nanoseconds that kvcached takes for a pair on an H200.
const BATCHES: [(u32, f64); 5] =
    [(1, 7_700.0), (4, 10_100.0), (16, 13_400.0), (64, 47_000.0), (256, 129_000.0)];

/// Other processes that claim at the same time, besides this one.
const N_PEERS: usize = 7;

/// Longest time in which a map should reach all ranks of an engine, in microseconds.
const MAX_FANOUT_US: f64 = 50.0;

/// The memory to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchDevice {
    /// This machine's memory.
    Host,
    /// The GPU with this index.
    Cuda(u32),
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct MemoryBenchOptions {
    /// The memory to measure.
    pub device: BenchDevice,
    /// Takes less time for less precise values, and less memory.
    pub is_quick: bool,
}

/// The measurements, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Blocks on pages that are at hand.
    Blocks,
    /// Pages that are parked, alone and beside another process.
    Pages,
    /// Grants of the ledger, alone, beside another process and beside seven.
    Grants,
    /// Maps that go to the ranks of an engine.
    Ranks,
    /// Extents of several sizes.
    Extents,
    /// Growth, and giving it back.
    Growth,
}

/// A device with a ledger of its own.
#[derive(Debug)]
pub struct MemoryBench {
    options: MemoryBenchOptions,
    stand: Stand,
}

/// Nanoseconds of an operation, one value a round.
#[derive(Debug, Default)]
struct Latency {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

// === impl BenchDevice ===

impl FromStr for BenchDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match (text, ordinal) {
            ("host", _) => Ok(Self::Host),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err("allowed: `host`, or `cuda:` and the number of a GPU".to_owned()),
        }
    }
}

// === impl Kind ===

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Blocks, Self::Pages, Self::Grants, Self::Ranks, Self::Extents, Self::Growth];

    /// What is measured, for the progress line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::Pages => "pages",
            Self::Grants => "grants",
            Self::Ranks => "ranks",
            Self::Extents => "extents",
            Self::Growth => "growth",
        }
    }
}

// === impl MemoryBenchOptions ===

impl MemoryBenchOptions {
    fn rounds(self) -> usize {
        if self.is_quick { 3 } else { 11 }
    }

    fn samples_per_round(self) -> usize {
        if self.is_quick { 200 } else { 4_000 }
    }

    /// Rounds of what takes milliseconds.
    fn slow_rounds(self) -> usize {
        if self.is_quick { 1 } else { 5 }
    }

    /// What is grown to and freed.
    fn growth_bytes(self) -> u64 {
        match (self.device, self.is_quick) {
            (_, true) => 1 << 30,
            (BenchDevice::Host, false) => 4 << 30,
            (BenchDevice::Cuda(_), false) => 32 << 30,
        }
    }
}

// === impl MemoryBench ===

impl MemoryBench {
    /// Opens the device and makes a ledger for it.
    pub fn try_new(options: MemoryBenchOptions) -> anyhow::Result<Self> {
        Ok(Self { options, stand: Stand::try_new(options.device, options.growth_bytes())? })
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        serde_json::json!({
            "device": self.stand.device_name(),
            "buffers": N_BUFFERS,
            "page_bytes": PAGE_BYTES,
            "block_bytes_per_buffer": BLOCK_BYTES,
            "guard": format!("{:?}", self.stand.guard()).to_lowercase(),
            "growth_bytes": self.options.growth_bytes(),
            "rounds": self.options.rounds(),
            "samples_per_round": self.options.samples_per_round(),
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        format!(
            "{}; {N_BUFFERS} buffers, pages of 2 MiB, blocks of 32 KiB in each buffer; medians of {} rounds",
            self.stand.device_name(),
            self.options.rounds()
        )
    }

    /// Does the measurements of one kind.
    pub fn measure(&self, kind: Kind) -> anyhow::Result<Vec<Measurement>> {
        let results = match kind {
            Kind::Blocks => self.blocks()?,
            Kind::Pages => self.pages()?,
            Kind::Grants => self.grants()?,
            Kind::Ranks => self.ranks()?,
            Kind::Extents => self.extents()?,
            Kind::Growth => self.growth()?,
        };
        Ok(results.into_iter().flatten().collect())
    }

    fn is_on_gpu(&self) -> bool {
        matches!(self.options.device, BenchDevice::Cuda(_))
    }

    /// Batches of blocks, in an engine's pool with its agent.
    fn blocks(&self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let pool = self.stand.pool("blocks", PoolSettings::new(BLOCK_BYTES))?;
        let mut results = Vec::new();
        for (n_blocks, kvcached_ns) in BATCHES {
            let mut blocks = Vec::with_capacity(n_blocks as usize);
            let latency = self.latency(n_blocks, || {
                blocks.clear();
                take_blocks(&pool, n_blocks, &mut blocks)?;
                Ok(pool.free(&blocks)?)
            })?;
            let p50 =
                Measurement::from_repeats(format!("block_alloc_free_{n_blocks}_p50"), "ns", latency.p50);
            results.push(p50.map(|p50| match (self.is_on_gpu(), n_blocks) {
                (true, 1 | 256) => better_than(p50, KVCACHED_ON_H200, kvcached_ns, Some(20.0)),
                (true, _) => better_than(p50, KVCACHED_ON_H200, kvcached_ns, None),
                (false, 1) => with_goal(p50, 100.0),
                (false, _) => p50,
            }));
            if n_blocks == 1 {
                let name = format!("block_alloc_free_{n_blocks}_p99");
                results.push(Measurement::from_repeats(name, "ns", latency.p99));
            }
        }
        Ok(results)
    }

    /// Single pages that are parked, with all that tools see of them.
    fn pages(&self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let member = self.stand.join("pages")?;
        let states = member.create_page_states(CAPACITY_PAGES, self.stand.geometry().page_cost_bytes())?;
        let settings = PageSettings { high_watermark_pages: CAPACITY_PAGES, ..PageSettings::default() };
        let pages = PageAllocator::try_new(Arc::new(self.stand.region()?), Arc::new(member), settings)?;
        pages.set_observer(Arc::new(states));
        let mut taken = Vec::new();
        take_pages(&pages, 8, &mut taken)?;
        pages.free(&taken)?;
        let mut pair = || {
            taken.clear();
            take_pages(&pages, 1, &mut taken)?;
            Ok(pages.free(&taken)?)
        };
        let alone = self.latency(1, &mut pair)?;
        let contended = self.beside_peers(1, &mut pair)?;
        let name = "page_alloc_free_parked";
        let p50 = Measurement::from_repeats(format!("{name}_p50"), "ns", alone.p50.clone())
            .map(|p50| with_goal(better_than(p50, KVCACHED_PAGES, KVCACHED_PAGE_NS, None), 1_000.0));
        Ok([p50].into_iter().chain(contention(name, alone, contended)).collect())
    }

    /// One unit of memory, claimed and given back.
    fn grants(&self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let member = self.stand.join("grants")?;
        let mut pair = || claim_and_give_back(&member);
        let alone = self.latency(1, &mut pair)?;
        let contended = self.beside_peers(1, &mut pair)?;
        let crowded = self.beside_peers(N_PEERS, &mut pair)?;
        let name = "claim_give_back";
        let p50 = Measurement::from_repeats(format!("{name}_p50"), "ns", alone.p50.clone());
        let crowded =
            Measurement::from_repeats(format!("{name}_of_{}_processes_p50", N_PEERS + 1), "ns", crowded.p50)
                .map(|crowded| {
                    let alone = Baseline::new("alone", alone.p50.clone());
                    let most = Goal::AtMost(3.0 * alone.value);
                    crowded.compared_with(alone, Some(most))
                });
        Ok([p50, crowded].into_iter().chain(contention(name, alone, contended)).collect())
    }

    /// One page, mapped and unmapped on several ranks by a driver that does nothing.
    fn ranks(&self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let (mut map, mut unmap) = (Vec::new(), Vec::new());
        for round in 0..=self.options.rounds() {
            let (mut maps, mut unmaps) = fanout::samples_us(self.options.samples_per_round())?;
            if 0 < round {
                map.push(percentile(&mut maps, 50));
                unmap.push(percentile(&mut unmaps, 50));
            }
        }
        let n_ranks = fanout::N_RANKS;
        Ok(vec![
            Measurement::from_repeats(format!("map_on_{n_ranks}_ranks_p50"), "us", map)
                .map(|map| with_goal(map, MAX_FANOUT_US)),
            Measurement::from_repeats(format!("unmap_on_{n_ranks}_ranks_p50"), "us", unmap),
        ])
    }

    /// The same extent again and again, as an engine whose load goes up and down.
    fn extents(&self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let region = self.stand.region()?;
        let mut results = Vec::new();
        for n_pages in [1, 8, 32] {
            // Away from the first page, so that the guard is cut on both sides where it has to be.
            let extents = [Extent::try_new(PageId(3 * n_pages), n_pages)?];
            let (mut map, mut unmap) = (Vec::new(), Vec::new());
            for round in 0..=self.options.rounds() {
                let begun = Instant::now();
                let outcome = region.map(&extents);
                let mapped = begun.elapsed();
                ensure!(matches!(outcome, MapOutcome::Mapped), "map {n_pages} pages: {outcome:?}");
                let begun = Instant::now();
                let stuck = region.unmap(&extents);
                let unmapped = begun.elapsed();
                ensure!(stuck.is_empty(), "unmap {stuck:?}");
                if 0 < round {
                    map.push(mapped.as_secs_f64() * 1e6);
                    unmap.push(unmapped.as_secs_f64() * 1e6);
                }
            }
            results.push(Measurement::from_repeats(format!("map_extent_{n_pages}_pages"), "us", map));
            results.push(Measurement::from_repeats(format!("unmap_extent_{n_pages}_pages"), "us", unmap));
        }
        Ok(results)
    }

    /// Measures `pair` while `n_peers` other processes take and return grants of the same ledger.
    fn beside_peers(
        &self,
        n_peers: usize,
        pair: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Latency> {
        let peers = (0..n_peers).map(|_| Peer::start(&self.stand)).collect::<anyhow::Result<Vec<_>>>()?;
        let latency = self.latency(1, pair)?;
        for peer in peers {
            ensure!(0 < peer.finish()?, "another process did nothing");
        }
        Ok(latency)
    }

    /// Measures `pair`, which allocates and frees `n` things.
    fn latency(&self, n: u32, mut pair: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Latency> {
        let n_samples = self.options.samples_per_round();
        let n_pairs = (256 / n).clamp(4, 64);
        let mut latency = Latency::default();
        for round in 0..=self.options.rounds() {
            let (mut means, mut singles) = (Vec::with_capacity(n_samples), Vec::with_capacity(n_samples));
            for _ in 0..n_samples {
                let begun = Instant::now();
                for _ in 0..n_pairs {
                    pair()?;
                }
                means.push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(n_pairs));
                let begun = Instant::now();
                pair()?;
                singles.push(begun.elapsed().as_secs_f64() * 1e9);
            }
            if 0 < round {
                latency.p50.push(percentile(&mut means, 50));
                latency.p99.push(percentile(&mut singles, 99));
            }
        }
        Ok(latency)
    }
}

/// What follows the p50 of an operation that was also measured beside another process.
fn contention(name: &str, alone: Latency, contended: Latency) -> [Option<Measurement>; 3] {
    let beside = |quantile: &str, alone: Vec<f64>, contended: Vec<f64>| {
        let result = Measurement::from_repeats(format!("{name}_contended_{quantile}"), "ns", contended);
        result.map(|result| result.compared_with(Baseline::new("alone", alone), None))
    };
    [
        Measurement::from_repeats(format!("{name}_p99"), "ns", alone.p99.clone()),
        beside("p50", alone.p50, contended.p50),
        beside("p99", alone.p99, contended.p99),
    ]
}

/// Compares a time with a known one, of which it should be at most one in `factor`.
fn better_than(result: Measurement, name: &'static str, known: f64, factor: Option<f64>) -> Measurement {
    let goal = factor.map(|factor| Goal::AtMost(known / factor));
    result.compared_with(Baseline::new(name, vec![known]), goal)
}

fn with_goal(mut result: Measurement, at_most: f64) -> Measurement {
    result.is_reached = Some(result.value <= at_most);
    result.goal = Some(Goal::AtMost(at_most));
    result
}

fn take_blocks(pool: &KvPool, n_blocks: u32, blocks: &mut Vec<kvik_memory::BlockId>) -> anyhow::Result<()> {
    match pool.alloc(n_blocks, blocks)? {
        BlocksOutcome::Allocated => Ok(()),
        BlocksOutcome::NoMemory(shortage) => anyhow::bail!("no memory for {n_blocks} blocks: {shortage:?}"),
    }
}

fn take_pages(pages: &PageAllocator, n_pages: u32, taken: &mut Vec<PageId>) -> anyhow::Result<()> {
    match pages.alloc(n_pages, taken)? {
        PagesOutcome::Allocated => Ok(()),
        PagesOutcome::NoMemory(shortage) => anyhow::bail!("no memory for {n_pages} pages: {shortage:?}"),
    }
}

/// One unit, as the engine of this process and the other one do it.
fn claim_and_give_back(member: &Member) -> anyhow::Result<()> {
    let claim = member.claim(UNIT_BYTES)?;
    ensure!(claim == Claim::Granted, "no grant for {UNIT_BYTES} bytes: {claim:?}");
    member.give_back(UNIT_BYTES);
    Ok(())
}

/// A percentile of `values`, which are sorted; not a number if there are none.
fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = values.len() * percent / 100;
    values.get(rank).or(values.last()).copied().unwrap_or(f64::NAN)
}
