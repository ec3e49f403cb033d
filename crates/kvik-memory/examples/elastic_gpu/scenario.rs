//! Three engines, each a process, take turns at most of a device's memory.
//!
//! Each engine keeps a twenty-fifth of the budget all the time, and grows to four fifths in its turn; what it
//! frees afterwards stays parked with it until the next one asks. In the end one is killed in its turn, and
//! another one takes its place.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{Ledger, LedgerOptions};

use super::engine::{Report, open_device};
use super::{Answer, Backend};

const NAMES: [&str; 3] = ["red", "green", "blue"];
/// Of the memory that is free when all engines run.
const BUDGET_PERCENT: u64 = 95;
const TURN_PERCENT: u64 = 80;
const KEPT_PERCENT: u64 = 4;
/// What the drivers of three processes take of the device beside the memory that is mapped.
const CONTEXTS_BYTES: u64 = 4 << 30;

/// What is played.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scenario {
    pub(crate) backend: Backend,
    /// What all engines together may hold; by default most of what the device has free.
    pub(crate) budget_bytes: Option<u64>,
    pub(crate) n_buffers: u32,
    /// How often each engine has its turn before one is killed.
    pub(crate) n_rounds: usize,
}

/// One line of the table.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    pub(crate) engine: &'static str,
    pub(crate) what: &'static str,
    pub(crate) held_bytes: u64,
    pub(crate) report: Report,
}

/// What was seen.
#[derive(Debug)]
pub(crate) struct Played {
    pub(crate) device: String,
    pub(crate) budget_bytes: u64,
    pub(crate) page_cost_bytes: u64,
    pub(crate) turns: Vec<Turn>,
}

/// A stage on which engines play.
struct Stage {
    scenario: Scenario,
    folder: Folder,
    ledger: Ledger,
    n_started: u64,
    n_kept: u64,
    n_most: u64,
    turns: Vec<Turn>,
}

/// An engine in its process, which is killed when this is dropped.
struct Actor {
    name: &'static str,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// A folder that goes when this is dropped.
#[derive(Debug)]
struct Folder(PathBuf);

/// Plays the scenario with processes of `program`, which runs [`super::engine::run`] when its first argument
/// is `engine`, with a ledger in a new folder in `parent_folder`.
///
/// Fails where an engine fails, does not get its memory, or holds another amount than the ledger says. Lost
/// words are counted in the turns.
pub(crate) fn play(scenario: Scenario, program: &Path, parent_folder: &Path) -> Answer<Played> {
    let vmm = open_device(scenario.backend)?;
    let memory = vmm.memory_info()?;
    let usable_bytes = memory.free_bytes.saturating_sub(CONTEXTS_BYTES) / 100 * BUDGET_PERCENT;
    let budget_bytes = scenario.budget_bytes.unwrap_or(usable_bytes) / UNIT_BYTES * UNIT_BYTES;
    let device = vmm.device_name().to_owned();
    let folder = Folder::create(parent_folder)?;
    let ledger = Ledger::open(&LedgerOptions {
        dir: folder.0.clone(),
        budget_bytes: Some(budget_bytes),
        ..LedgerOptions::new(device.as_str())
    })?;
    let page_cost_bytes = u64::from(scenario.n_buffers) * UNIT_BYTES;
    let n_pages = |percent: u64| budget_bytes / 100 * percent / page_cost_bytes;
    let (n_kept, n_most) = (n_pages(KEPT_PERCENT).max(1), n_pages(TURN_PERCENT));
    let mut stage = Stage { scenario, folder, ledger, n_started: 0, n_kept, n_most, turns: Vec::new() };
    stage.play()?;
    Ok(Played { device, budget_bytes, page_cost_bytes, turns: stage.turns })
        .inspect(|_| drop(program.to_owned()))
}
