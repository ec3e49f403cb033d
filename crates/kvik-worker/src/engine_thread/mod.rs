//! The thread that owns the engine.
//!
//! The engine computes for milliseconds at a time and must not sit on a thread that serves sockets;
//! one plain thread owns it and everything else sends commands. Commands are taken between two
//! steps, events go out after each step, and neither ever waits for a client: see
//! [`generation`](crate::generation) for how slow ones are held.
//!
//! If the thread panics, everything that it owns is dropped: requests see their events end, commands
//! see their channel closed, and [`EngineHandle::is_alive`] turns false. If the device is lost, requests end with that reason, and the
//! thread ends. [`EngineHandle::failure`] has the reason of both; the worker ends then.

mod arrivals;
mod blends;
mod entries;
#[cfg(test)]
pub(crate) mod fragile;
mod gathering;
mod lends;
mod loads;
mod moves;
mod run;
mod steps;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_model::{Begun, Engine, GenerateRequest, LentBlocks, ModelError, SequenceKv, StageId};
use kvik_node::KvLog;
use kvik_proto::journal::MoveNotice;
use kvik_proto::kv_stream::KvTier;
use kvik_proto::openai::CachedTiers;
use kvik_types::CacheSalt;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::admission::Permit;
use crate::error::{Refusal, Result, WorkerError};
use crate::events::EventSender;
use crate::key_page::KeyPage;
use crate::metrics::WorkerMetrics;
use crate::plan::BlendPart;
use crate::snapshot::Snapshot;
use crate::store::KvStore;

pub(crate) use blends::{AddedSegment, SegmentKey};
pub(crate) use lends::{LendRequest, LendWait};
pub(crate) use moves::{StageBlocks, StageOutcome};
use run::EngineThread;

/// A request for the engine.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) origin: Origin,
    pub(crate) request: GenerateRequest,
    /// How far it has come on another worker.
    pub(crate) begun: Option<BegunPart>,
    /// How its prompt is put together.
    pub(crate) blend: Option<BlendPart>,
}

/// How far a prompt's outputs have come on another worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct BegunPart {
    pub(crate) outputs: Begun,
    /// Where the cached tokens of the prompt were.
    pub(crate) tiers: CachedTiers,
}

/// Where a request comes from.
#[derive(Debug)]
pub(crate) struct Origin {
    /// Names the request towards the thread.
    pub(crate) ticket: u64,
    /// The prompt's place among those of its client's request.
    pub(crate) part_idx: usize,
    /// Name that the sequence stays resident under.
    pub(crate) name: Option<String>,
    /// Keeps its KV apart from that of other requests.
    pub(crate) salt: Option<CacheSalt>,
    /// Tokens that may be chosen before a grant.
    pub(crate) credits: u32,
    /// Whether its client advances it: it may wait for credits for long.
    pub(crate) is_stepped: bool,
    pub(crate) arrived: Instant,
    /// Its place, given back when the engine is done with it: a client that does not read its
    /// answer holds none. All prompts of a request share one.
    pub(crate) permit: Arc<Permit>,
    pub(crate) events: EventSender,
}

/// What the thread is asked to do.
pub(crate) enum Command {
    Submit(Box<Submission>),
    Grant {
        ticket: u64,
        n: u32,
    },
    Abandon {
        ticket: u64,
    },
    Finish {
        ticket: Option<u64>,
        name: String,
        forgets: bool,
        reply: oneshot::Sender<usize>,
    },
    Export {
        name: String,
        layers: Range<usize>,
        reply: oneshot::Sender<Option<SequenceKv>>,
    },
    Import {
        name: String,
        kv: SequenceKv,
        /// Dropped when the engine has the KV.
        hold: Box<dyn Any + Send>,
        reply: oneshot::Sender<Result<(), ModelError>>,
    },
    Stats {
        reply: oneshot::Sender<Snapshot>,
    },
    Blocks {
        page: KeyPage<Vec<KvTier>>,
        reply: oneshot::Sender<KeyPage<Vec<KvTier>>>,
    },
    /// Stops the requests between two steps and sends the notice behind all that was sent before.
    Freeze {
        tickets: Vec<u64>,
        notice: Option<MoveNotice>,
        reply: oneshot::Sender<bool>,
    },
    /// Lets frozen requests go on.
    Thaw {
        tickets: Vec<u64>,
    },
    Lend {
        request: LendRequest,
        reply: oneshot::Sender<Option<LentBlocks>>,
    },
    Stage {
        blocks: StageBlocks,
        reply: oneshot::Sender<Result<StageOutcome, ModelError>>,
    },
    Unstage {
        stage: StageId,
    },
    /// The KV of a request has come from the store.
    Loaded {
        ticket: u64,
    },
    /// A segment has come from the store, or will not come.
    SegmentLoaded {
        key: Box<SegmentKey>,
    },
    AddSegment {
        key: Box<SegmentKey>,
        reply: oneshot::Sender<AddedSegment>,
    },
    /// Other engines ask for memory.
    GiveBack,
    /// An ended sequence was copied.
    BlocksReturned,
    /// KV of a request that the engine has, has come from the store or is lost.
    KvArrived,
    Stop,
}

/// How long the thread waits for others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// For a client that does not read.
    pub(crate) slow_client: Duration,
    /// For memory that other engines hold.
    pub(crate) memory: Duration,
}

/// Sends commands to the thread; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct EngineHandle {
    commands: Arc<mpsc::Sender<Command>>,
    shared: Arc<Shared>,
}

/// What both sides see.
#[derive(Debug)]
struct Shared {
    is_alive: AtomicBool,
    /// Cancelled when the thread has ended, however.
    ended: CancellationToken,
    /// Why it ended, if not because it was told to.
    failure: Arc<OnceLock<String>>,
    n_tickets: AtomicU64,
    snapshot: Mutex<Snapshot>,
}

// === impl Command ===

impl std::fmt::Debug for Command {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Submit(_) => "Submit",
            Self::Grant { .. } => "Grant",
            Self::Abandon { .. } => "Abandon",
            Self::Finish { .. } => "Finish",
            Self::Export { .. } => "Export",
            Self::Import { .. } => "Import",
            Self::Stats { .. } => "Stats",
            Self::Blocks { .. } => "Blocks",
            Self::Freeze { .. } => "Freeze",
            Self::Thaw { .. } => "Thaw",
            Self::Lend { .. } => "Lend",
            Self::Stage { .. } => "Stage",
            Self::Unstage { .. } => "Unstage",
            Self::Loaded { .. } => "Loaded",
            Self::SegmentLoaded { .. } => "SegmentLoaded",
            Self::AddSegment { .. } => "AddSegment",
            Self::GiveBack => "GiveBack",
            Self::BlocksReturned => "BlocksReturned",
            Self::KvArrived => "KvArrived",
            Self::Stop => "Stop",
        })
    }
}

// === impl Shared ===

impl Shared {
    fn new() -> Self {
        Self {
            is_alive: AtomicBool::new(true),
            ended: CancellationToken::new(),
            failure: Arc::default(),
            n_tickets: AtomicU64::new(0),
            snapshot: Mutex::new(Snapshot::default()),
        }
    }
}

// === impl EngineHandle ===

impl EngineHandle {
    /// Starts the thread of `engine`, with the store below it; `kv_log` receives which blocks it has.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(crate) fn spawn(
        engine: Engine,
        store: Option<Arc<dyn KvStore>>,
        kv_log: Arc<KvLog>,
        metrics: WorkerMetrics,
        patience: Patience,
    ) -> Result<(Self, JoinHandle<()>)> {
        let (sender, receiver) = mpsc::channel();
        let sender = Arc::new(sender);
        // Weak: the thread must still see when the last sender of commands is gone.
        let waker = Arc::downgrade(&sender);
        let mut engine = engine;
        engine.record_block_changes();
        let store = match store {
            None => None,
            Some(store) => {
                engine.set_kv_sink(store.sink()?);
                let waker = Arc::downgrade(&sender);
                engine.set_loan_waker(Box::new(move || {
                    if let Some(sender) = waker.upgrade() {
                        let _ = sender.send(Command::BlocksReturned);
                    }
                }));
                Some((store, Arc::downgrade(&sender)))
            }
        };
        engine.set_memory_waker(Box::new(move || {
            if let Some(sender) = waker.upgrade() {
                // A thread that has ended holds no memory.
                let _ = sender.send(Command::GiveBack);
            }
        }));
        let shared = Arc::new(Shared::new());
        let thread =
            EngineThread::new(engine, store, kv_log, receiver, Arc::clone(&shared), metrics, patience);
        let thread =
            std::thread::Builder::new()
                .name("kvik-engine".to_owned())
                .spawn(move || thread.run())
                .map_err(|source| WorkerError::Io { what: "start the engine's thread".to_owned(), source })?;
        Ok((Self { commands: sender, shared }, thread))
    }

    /// A handle whose commands are taken by the test.
    #[cfg(test)]
    pub(crate) fn without_thread() -> (Self, mpsc::Receiver<Command>) {
        let (sender, receiver) = mpsc::channel();
        (Self { commands: Arc::new(sender), shared: Arc::new(Shared::new()) }, receiver)
    }

    /// Whether the thread runs.
    pub(crate) fn is_alive(&self) -> bool {
        self.shared.is_alive.load(Ordering::Acquire)
    }

    /// Waits until the thread has ended. Cancel safe.
    pub(crate) async fn ended(&self) {
        self.shared.ended.cancelled().await;
    }

    /// Why the thread ended; empty while it runs, and if it was told to end.
    pub(crate) fn failure(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.shared.failure)
    }

    /// The state after the last step, without waiting for the thread.
    pub(crate) fn last_snapshot(&self) -> Snapshot {
        *self.shared.snapshot.lock()
    }

    pub(crate) fn next_ticket(&self) -> u64 {
        // Relaxed: a ticket needs uniqueness only.
        self.shared.n_tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// Hands a request over; its first event says what became of it.
    pub(crate) fn submit(&self, submission: Submission) -> Result<(), Refusal> {
        self.send(Command::Submit(Box::new(submission)))
    }

    /// Lets the outputs of a request choose `n` more tokens each.
    pub(crate) fn grant(&self, ticket: u64, n: u32) {
        // A thread that has ended has ended the events of the request.
        let _ = self.send(Command::Grant { ticket, n });
    }

    /// Ends a request without a waiter; a named sequence stays resident.
    pub(crate) fn abandon(&self, ticket: u64) {
        let _ = self.send(Command::Abandon { ticket });
    }

    /// Ends the request `ticket`, if any; returns the tokens of `name` that stay resident.
    pub(crate) async fn finish(
        &self,
        ticket: Option<u64>,
        name: &str,
        forgets: bool,
    ) -> Result<usize, Refusal> {
        let name = name.to_owned();
        self.ask(|reply| Command::Finish { ticket, name, forgets, reply }).await
    }

    /// The KV of a named sequence in some layers.
    pub(crate) async fn export_kv(
        &self,
        name: &str,
        layers: Range<usize>,
    ) -> Result<Option<SequenceKv>, Refusal> {
        let name = name.to_owned();
        self.ask(|reply| Command::Export { name, layers, reply }).await
    }

    /// Makes `kv` the resident `name`, also if the result is not waited for; `hold` is dropped when `kv` is.
    pub(crate) fn begin_import(
        &self,
        name: &str,
        kv: SequenceKv,
        hold: Box<dyn Any + Send>,
    ) -> Result<impl Future<Output = Result<(), Refusal>> + Send + use<>, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Import { name: name.to_owned(), kv, hold, reply })?;
        Ok(async { answer.await.map_err(|_| Refusal::engine_gone())?.map_err(Refusal::from) })
    }

    /// The state now, after all commands that were sent before.
    pub(crate) async fn snapshot(&self) -> Result<Snapshot, Refusal> {
        self.ask(|reply| Command::Stats { reply }).await
    }

    /// Offers all blocks that a prompt could find now to a page.
    pub(crate) async fn blocks(&self, page: KeyPage<Vec<KvTier>>) -> Result<KeyPage<Vec<KvTier>>, Refusal> {
        self.ask(|reply| Command::Blocks { page, reply }).await
    }

    /// Ends the thread; requests that run fail.
    pub(crate) fn stop(&self) {
        let _ = self.send(Command::Stop);
    }

    fn send(&self, command: Command) -> Result<(), Refusal> {
        self.commands.send(command).map_err(|_| Refusal::engine_gone())
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer.await.map_err(|_| Refusal::engine_gone())
    }
}
