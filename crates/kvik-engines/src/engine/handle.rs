//! What is known of one engine, beside its place in the machine.

use std::path::PathBuf;

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::machine::Order;
use crate::config::{EngineConfig, EngineMemory};
use crate::process::Process;
use crate::traffic::Traffic;

/// What the task of an engine is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// To do what the machine says.
    Order(Order),
    /// To take over a process of an earlier controller.
    Adopt { process: Box<Process>, is_asleep: bool },
    /// To end its process and itself.
    Retire,
    /// To end and leave its process.
    Leave,
}

/// One engine; its task and requests share it.
#[derive(Debug)]
pub(crate) struct EngineHandle {
    pub(crate) config: EngineConfig,
    /// Woken at every change of its phase.
    pub(crate) changed: Notify,
    commands: mpsc::UnboundedSender<Command>,
    pub(crate) traffic: Mutex<Traffic>,
    /// The number of its process, if it has one.
    pub(crate) pid: Mutex<Option<i32>>,
    pub(crate) log: PathBuf,
    /// Its place in a ledger; changes while it runs.
    pub(crate) memory: RwLock<Option<EngineMemory>>,
    /// Cancelled when its task has ended.
    pub(crate) ended: CancellationToken,
}

impl EngineHandle {
    /// An engine without a process, and what its task listens to.
    pub(crate) fn new(
        config: EngineConfig,
        log: PathBuf,
        now: Instant,
    ) -> (Self, mpsc::UnboundedReceiver<Command>) {
        // Bounded by the machine, which gives an engine one order at a time.
        let (commands, receiver) = mpsc::unbounded_channel();
        let memory = RwLock::new(config.memory.clone());
        let handle = Self {
            config,
            memory,
            changed: Notify::new(),
            commands,
            traffic: Mutex::new(Traffic::new(now)),
            pid: Mutex::new(None),
            log,
            ended: CancellationToken::new(),
        };
        (handle, receiver)
    }

    /// Sends its task a message; one that has ended receives nothing.
    pub(crate) fn tell(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }
}
