//! One engine of the scenario: a process that does what the lines on its standard input say.
//!
//! `grow N` takes blocks until it has N and fills the new ones; `shrink N` frees all but N; `check` only
//! checks; `end` frees all. After each it checks every block that it had before or has now, and answers with
//! one line of numbers, see [`Report`].

use std::fmt;
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{JoinOptions, Ledger};
use kvik_memory::pool::{KvPool, PoolOptions, PoolSettings};
use kvik_memory::region::Guard;
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};
use kvik_memory::{BlockId, Geometry, PageId};

use super::pattern::Painter;
use super::{Answer, Backend};

/// For how long an engine waits for memory of others.
const PATIENCE: Duration = Duration::from_mins(1);

/// Opens the device of a backend.
pub(crate) fn open_device(backend: Backend) -> Answer<Arc<dyn Vmm>> {
    Ok(match backend {
        // The ledger says how much there is.
        Backend::Host => Arc::new(HostVmm::open(HostDevice::new(1 << 40))?),
        Backend::Cuda => Arc::new(CudaVmm::open(0)?),
    })
}

/// What an engine answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Blocks that it has now.
    pub(crate) n_blocks: u64,
    /// Words that were read and compared.
    pub(crate) n_words_checked: u64,
    /// Words that were not what was written there.
    pub(crate) n_words_lost: u64,
    /// How long the memory took to come or to go.
    pub(crate) memory_us: u64,
    /// How long the filling took.
    pub(crate) fill_us: u64,
    /// How long the check took.
    pub(crate) check_us: u64,
}

/// The engine in its process.
struct Engine {
    pool: KvPool,
    painter: Painter,
    geometry: Geometry,
    /// Tells the patterns of engines apart.
    seed: u64,
    blocks: Vec<Painted>,
    n_painted: u64,
}

/// A block with a pattern of its own.
#[derive(Debug, Clone, Copy)]
struct Painted {
    block: BlockId,
    seed: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_blocks, n_words_checked, n_words_lost, memory_us, fill_us, check_us } = self;
        write!(formatter, "{n_blocks} {n_words_checked} {n_words_lost} {memory_us} {fill_us} {check_us}")
    }
}

impl FromStr for Report {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [n_blocks, n_words_checked, n_words_lost, memory_us, fill_us, check_us] = numbers[..] else {
            return Err(format!("an engine said `{line}`"));
        };
        Ok(Self { n_blocks, n_words_checked, n_words_lost, memory_us, fill_us, check_us })
    }
}

/// The life of an engine; `arguments` are those of [`Engine::open`].
pub(crate) fn run(arguments: &[String]) -> Answer<()> {
    let mut engine = Engine::open(arguments)?;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", Report::default())?;
    stdout.flush()?;
    for line in std::io::stdin().lock().lines() {
        let report = engine.obey(&line?)?;
        writeln!(stdout, "{report}")?;
        stdout.flush()?;
    }
    Ok(())
}

impl Engine {
    fn open(arguments: &[String]) -> Answer<Self> {
        let [backend, dir, name, seed, n_buffers, capacity_pages] = arguments else {
            return Err("an engine takes backend, folder, name, seed, buffers and pages".into());
        };
        let backend: Backend = backend.parse()?;
        let vmm = open_device(backend)?;
        let ledger =
            Ledger::open_existing(Path::new(dir), vmm.device_name())?.ok_or("there is no ledger there")?;
        let member = ledger.join(&JoinOptions::new(name.as_str(), name.as_str()))?;
        let geometry = Geometry::try_new(n_buffers.parse()?, UNIT_BYTES, capacity_pages.parse()?)?;
        let settings = PoolSettings {
            is_preallocating: false,
            low_watermark_pages: 0,
            // Freed pages stay parked here until another engine asks for them.
            high_watermark_pages: geometry.capacity_pages(),
            // A block is a page.
            ..PoolSettings::new(UNIT_BYTES)
        };
        let pool = KvPool::open(vmm, member, &PoolOptions { geometry, guard: Guard::Zero, settings })?;
        let painter = Painter::open(backend)?;
        Ok(Self { pool, painter, geometry, seed: seed.parse()?, blocks: Vec::new(), n_painted: 0 })
    }

    fn obey(&mut self, line: &str) -> Answer<Report> {
        let mut words = line.split_whitespace();
        let verb = words.next().unwrap_or_default();
        let n_blocks: usize = words.next().map_or(Ok(0), str::parse)?;
        let mut report = Report::default();
        match verb {
            "grow" => {
                let n_missing = n_blocks.saturating_sub(self.blocks.len());
                self.grow(n_missing as u32, &mut report)?;
            }
            "check" => {}
            // Checked before as well: what is freed here must be intact, too.
            "shrink" | "end" => {
                self.check(&mut report)?;
                self.shrink(n_blocks, &mut report)?;
            }
            _ => return Err(format!("no such order: `{line}`").into()),
        }
        self.check(&mut report)?;
        report.n_blocks = self.blocks.len() as u64;
        Ok(report)
    }

    fn grow(&mut self, n_blocks: u32, report: &mut Report) -> Answer<()> {
        let mut taken = Vec::new();
        let begun = Instant::now();
        let outcome = self.pool.alloc_wait(n_blocks, begun + PATIENCE, &mut taken)?;
        report.memory_us = begun.elapsed().as_micros() as u64;
        if let BlocksOutcome::NoMemory(shortage) = outcome {
            return Err(format!("no memory for {n_blocks} blocks: {shortage:?}").into());
        }
        let begun = Instant::now();
        for block in taken {
            self.n_painted += 1;
            let painted = Painted { block, seed: mixed(self.seed ^ mixed(self.n_painted)) };
            for buffer in 0..self.geometry.n_buffers() {
                let seed = painted.seed_of(buffer);
                self.painter.fill(self.address_of(painted, buffer)?, UNIT_BYTES, seed)?;
            }
            self.blocks.push(painted);
        }
        self.painter.finish(0)?;
        report.fill_us = begun.elapsed().as_micros() as u64;
        self.check_the_check()
    }

    fn shrink(&mut self, n_blocks: usize, report: &mut Report) -> Answer<()> {
        let freed: Vec<BlockId> = self.blocks.drain(n_blocks..).map(|painted| painted.block).collect();
        let begun = Instant::now();
        self.pool.free(&freed)?;
        report.memory_us = begun.elapsed().as_micros() as u64;
        Ok(())
    }

    /// Compares every word of every block.
    fn check(&self, report: &mut Report) -> Answer<()> {
        let begun = Instant::now();
        let mut n_different = 0;
        for &painted in &self.blocks {
            for buffer in 0..self.geometry.n_buffers() {
                let (address, seed) = (self.address_of(painted, buffer)?, painted.seed_of(buffer));
                self.painter.check(address, UNIT_BYTES, seed, &mut n_different)?;
                report.n_words_checked += UNIT_BYTES / 8;
            }
        }
        report.n_words_lost += self.painter.finish(n_different)?;
        report.check_us += begun.elapsed().as_micros() as u64;
        Ok(())
    }

    /// A check that cannot find a difference would be worth nothing.
    fn check_the_check(&self) -> Answer<()> {
        let Some(&painted) = self.blocks.last() else { return Ok(()) };
        let mut n_different = 0;
        let foreign_seed = painted.seed_of(0) ^ 1;
        self.painter.check(self.address_of(painted, 0)?, UNIT_BYTES, foreign_seed, &mut n_different)?;
        match self.painter.finish(n_different)? {
            n_different if n_different == UNIT_BYTES / 8 => Ok(()),
            n_different => Err(format!("the check found {n_different} words of a foreign pattern").into()),
        }
    }

    fn address_of(&self, painted: Painted, buffer: u32) -> Answer<u64> {
        let region = self.pool.region().ok_or("the pool has no region")?;
        let address = region.address_of(buffer, PageId(painted.block.0));
        Ok(address.ok_or_else(|| format!("block {} is outside of the region", painted.block))?)
    }
}

impl Painted {
    fn seed_of(self, buffer: u32) -> u64 {
        mixed(self.seed ^ u64::from(buffer))
    }
}

/// `SplitMix64`: near numbers become far ones.
fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
