//! Three engines, each a process, take turns at most of a device's memory.
//!
//! Each engine keeps a twenty-fifth of the budget all the time, and grows to four fifths in its turn; what it
//! frees afterwards stays parked with it until the next one asks. In the end one is killed in its turn, the
//! next one gets its memory, and another process takes its place.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{Ledger, LedgerOptions};

use super::engine::{Report, open_device};
use super::{Answer, Backend};

const NAMES: [&str; 3] = ["red", "green", "blue"];
/// Of what is free when all engines run.
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

/// What an engine did.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) engine: &'static str,
    pub(crate) what: &'static str,
    pub(crate) report: Report,
}

/// What was seen.
#[derive(Debug)]
pub(crate) struct Played {
    pub(crate) device: String,
    pub(crate) budget_bytes: u64,
    /// Bytes of a block over all buffers.
    pub(crate) block_bytes: u64,
    pub(crate) turns: Vec<Turn>,
}

/// The device, its ledger and the engines' program.
struct Stage<'a> {
    scenario: Scenario,
    program: &'a Path,
    ledger: Ledger,
    folder: Folder,
    block_bytes: u64,
    n_started: u64,
    turns: Vec<Turn>,
}

/// An engine in its process, which is killed when this is dropped.
struct Actor {
    name: &'static str,
    child: Child,
    /// Until it is to end.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// A folder that goes when this is dropped.
struct Folder(PathBuf);

/// Plays the scenario with processes of `program`, which calls [`super::engine::run`] with the rest of its
/// arguments if the first one is `engine`. The ledger is in a new folder in `parent_folder`.
///
/// Fails where an engine fails or does not get its memory, or where the ledger says less than what is held or
/// more than the budget. Lost words are counted in the turns.
pub(crate) fn play(scenario: Scenario, program: &Path, parent_folder: &Path) -> Answer<Played> {
    let vmm = open_device(scenario.backend)?;
    let usable_bytes = vmm.memory_info()?.free_bytes.saturating_sub(CONTEXTS_BYTES);
    let budget_bytes = scenario.budget_bytes.unwrap_or(usable_bytes / 100 * BUDGET_PERCENT);
    let device = vmm.device_name().to_owned();
    let folder = Folder::create(parent_folder)?;
    let options = LedgerOptions {
        dir: folder.0.clone(),
        budget_bytes: Some(budget_bytes),
        ..LedgerOptions::new(device.as_str())
    };
    let ledger = Ledger::open(&options)?;
    let block_bytes = u64::from(scenario.n_buffers) * UNIT_BYTES;
    let mut stage = Stage { scenario, program, ledger, folder, block_bytes, n_started: 0, turns: Vec::new() };
    stage.play()?;
    Ok(Played { device, budget_bytes: stage.ledger.budget_bytes(), block_bytes, turns: stage.turns })
}

impl Played {
    pub(crate) fn n_words_checked(&self) -> u64 {
        self.turns.iter().map(|turn| turn.report.n_words_checked).sum()
    }

    pub(crate) fn n_words_lost(&self) -> u64 {
        self.turns.iter().map(|turn| turn.report.n_words_lost).sum()
    }
}

impl Stage<'_> {
    fn play(&mut self) -> Answer<()> {
        let n_blocks = |percent: u64| self.ledger.budget_bytes() / 100 * percent / self.block_bytes;
        let keep = format!("grow {}", n_blocks(KEPT_PERCENT).max(1));
        let shrink = format!("shrink {}", n_blocks(KEPT_PERCENT).max(1));
        let grow = format!("grow {}", n_blocks(TURN_PERCENT));

        let mut actors = Vec::new();
        for name in NAMES {
            let mut actor = self.start(name)?;
            self.order(&mut actor, &keep, "starts")?;
            actors.push(actor);
        }
        for _ in 0..self.scenario.n_rounds {
            for idx in 0..actors.len() {
                self.order(&mut actors[idx], &grow, "has its turn")?;
                self.check_others(&mut actors, idx)?;
                self.order(&mut actors[idx], &shrink, "frees")?;
            }
        }

        self.order(&mut actors[0], &grow, "is killed after this")?;
        // Its memory is neither parked nor freed: only its death returns it.
        drop(actors.remove(0));
        self.order(&mut actors[0], &grow, "takes what it left")?;
        self.check_others(&mut actors, 0)?;
        self.order(&mut actors[0], &shrink, "frees")?;
        let mut successor = self.start(NAMES[0])?;
        self.order(&mut successor, &grow, "starts again")?;
        self.check_others(&mut actors, usize::MAX)?;
        actors.push(successor);
        for mut actor in actors {
            self.order(&mut actor, "end", "ends")?;
            actor.finish()?;
        }
        match self.ledger.snapshot()?.held_bytes {
            0 => Ok(()),
            n_bytes => Err(format!("{n_bytes} bytes are held without a member").into()),
        }
    }

    fn start(&mut self, name: &'static str) -> Answer<Actor> {
        self.n_started += 1;
        let capacity_pages = self.ledger.budget_bytes() / self.block_bytes;
        let mut child = Command::new(self.program)
            .args(["engine", self.scenario.backend.name()])
            .arg(&self.folder.0)
            .args([name, &self.n_started.to_string()])
            .args([self.scenario.n_buffers.to_string(), capacity_pages.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let mut actor = Actor { name, child, input, output: BufReader::new(output.ok_or("no pipe")?) };
        actor.read_report()?;
        Ok(actor)
    }

    fn order(&mut self, actor: &mut Actor, order: &str, what: &'static str) -> Answer<()> {
        writeln!(actor.input.as_mut().ok_or("it was ended")?, "{order}")?;
        let report = actor.read_report()?;
        self.turns.push(Turn { engine: actor.name, what, report });
        let snapshot = self.ledger.snapshot()?;
        let group = snapshot.groups.iter().find(|group| group.ipc_name == actor.name);
        let granted_bytes = group.map_or(0, |group| group.held_bytes);
        if granted_bytes < report.n_blocks * self.block_bytes || snapshot.held_bytes > snapshot.budget_bytes {
            let name = actor.name;
            return Err(format!("{name} has {} blocks; the ledger says {snapshot:?}", report.n_blocks).into());
        }
        Ok(())
    }

    /// All but one look whether what they kept is still there.
    fn check_others(&mut self, actors: &mut [Actor], but: usize) -> Answer<()> {
        for (idx, actor) in actors.iter_mut().enumerate() {
            if idx != but {
                self.order(actor, "check", "has kept")?;
            }
        }
        Ok(())
    }
}

impl Actor {
    fn read_report(&mut self) -> Answer<Report> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err(format!("{} ended by itself", self.name).into());
        }
        Ok(line.trim_end().parse()?)
    }

    /// Waits for its end.
    fn finish(mut self) -> Answer<()> {
        drop(self.input.take());
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("{} ended with {status}", self.name).into()) }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // SIGKILL; both do nothing if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Folder {
    fn create(parent: &Path) -> Answer<Self> {
        let path = parent.join(format!("kvik-elastic-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left of it is a few kilobytes; a failure has no consequence.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
