//! The requests that run here, by name: what can be listed, and what can go on elsewhere.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use bytes::Bytes;
use kvik_proto::journal::MoveNotice;
use kvik_proto::moves::{DrainReport, RunningSequence};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::engine_thread::EngineHandle;
use crate::error::Refusal;

/// Outputs with no more tokens to go than this stay while their worker drains: they end before they could have moved.
const SHORT_REST_TOKENS: usize = 16;

/// Tickets at other workers that nothing comes for.
pub(crate) type UnusedTickets = mpsc::UnboundedReceiver<MoveNotice>;

/// All running requests.
#[derive(Debug)]
pub(crate) struct RunningRequests {
    by_id: Mutex<BTreeMap<String, Arc<RunningRequest>>>,
    /// How many there are.
    n_running: watch::Sender<usize>,
    /// What became of those that ended while the worker drained.
    drained: Mutex<DrainReport>,
    /// Goes to [`UnusedTickets`].
    unused: mpsc::UnboundedSender<MoveNotice>,
}

/// How a request ended here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Its client has left, or it failed by itself.
    Left,
    /// All its outputs are complete.
    Finished,
    /// Another worker has its KV.
    Migrated,
    /// The worker ends before it.
    Stopped,
}

/// A running request, listed until this is dropped.
#[derive(Debug)]
pub(crate) struct RunningGuard {
    request: Arc<RunningRequest>,
    all: Arc<RunningRequests>,
    /// Moves it after its first token; ends with it.
    leaving: Option<AbortOnDropHandle<()>>,
}

/// What is known of a running request.
#[derive(Debug)]
pub(crate) struct RunningRequest {
    pub(crate) id: String,
    pub(crate) seq_id: Option<String>,
    pub(crate) path: &'static str,
    /// As it came; empty if the request cannot move.
    pub(crate) body: Bytes,
    /// Tokens of each prompt.
    pub(crate) prompt_tokens: Vec<usize>,
    /// Of each prompt.
    pub(crate) n_choices: u32,
    /// Of each output.
    pub(crate) max_tokens: usize,
    /// Of its prompts towards the engine.
    pub(crate) tickets: Vec<u64>,
    pub(crate) engine: EngineHandle,
    /// Whether a gateway continues it elsewhere.
    pub(crate) can_move: bool,
    /// Cancelled when the worker drains.
    pub(crate) draining: CancellationToken,
    /// When it came from another worker; `None` if it has begun here.
    pub(crate) came: Option<Instant>,
    pub(crate) progress: RequestProgress,
}

/// What changes while a request runs.
#[derive(Debug)]
pub(crate) struct RequestProgress {
    n_output_tokens: AtomicUsize,
    is_moving: AtomicBool,
    /// What another worker holds for it, while it is frozen.
    ticket: Mutex<Option<MoveNotice>>,
    /// If it ended now.
    end: Mutex<End>,
}

/// The right to move a request; one at a time has it.
#[derive(Debug)]
pub(crate) struct MoveGuard(Arc<RunningRequest>);

impl RunningRequests {
    /// None, and the tickets at other workers that will not be used.
    pub(crate) fn new() -> (Self, UnusedTickets) {
        let (unused, receiver) = mpsc::unbounded_channel();
        let requests = Self {
            by_id: Mutex::default(),
            n_running: watch::Sender::default(),
            drained: Mutex::default(),
            unused,
        };
        (requests, receiver)
    }

    /// Lists a request.
    pub(crate) fn insert(self: &Arc<Self>, request: RunningRequest) -> RunningGuard {
        let request = Arc::new(request);
        self.n_running.send_modify(|n_running| *n_running += 1);
        self.by_id.lock().insert(request.id.clone(), Arc::clone(&request));
        RunningGuard { request, all: Arc::clone(self), leaving: None }
    }

    /// The request with this id, or the only one of this `seq_id`.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<RunningRequest>> {
        let by_id = self.by_id.lock();
        let named = || by_id.values().find(|request| request.seq_id.as_deref() == Some(name));
        by_id.get(name).or_else(named).map(Arc::clone)
    }

    /// Lets what another worker holds for a request be forgotten: it goes on here, or its gateway is gone. A ticket that the gateway has
    /// used is unknown there, and nothing happens.
    pub(crate) fn forget_ticket(&self, request: &RunningRequest) {
        if let Some(notice) = request.progress.ticket.lock().take() {
            // A worker that ends tells nothing; the other one gives the ticket up by itself.
            let _ = self.unused.send(notice);
        }
    }

    /// Waits until none runs. Cancel safe.
    pub(crate) async fn idle(&self) {
        // The sender lives as long as `self`.
        let _ = self.n_running.subscribe().wait_for(|n_running| *n_running == 0).await;
    }

    /// What became of those that ended while the worker drained, and how many still run.
    pub(crate) fn drain_report(&self) -> DrainReport {
        let running = self.by_id.lock().len() as u64;
        DrainReport { running, ..*self.drained.lock() }
    }

    fn count(&self, request: &RunningRequest) {
        match *request.progress.end.lock() {
            End::Stopped if request.can_move => self.drained.lock().replayed += 1,
            end => self.count_drained(end),
        }
    }

    /// Counts how a request ended while the worker drained that no gateway continues.
    pub(crate) fn count_drained(&self, end: End) {
        let mut report = self.drained.lock();
        match end {
            End::Left => {}
            End::Finished => report.finished += 1,
            End::Migrated => report.migrated += 1,
            End::Stopped => report.failed += 1,
        }
    }

    /// All of them.
    pub(crate) fn list(&self) -> Vec<RunningSequence> {
        self.by_id.lock().values().map(|request| request.describe()).collect()
    }
}

impl RunningGuard {
    /// Ends a task with the request.
    pub(crate) fn own(&mut self, leaving: JoinHandle<()>) {
        self.leaving = Some(AbortOnDropHandle::new(leaving));
    }
}

impl std::ops::Deref for RunningGuard {
    type Target = Arc<RunningRequest>;

    fn deref(&self) -> &Arc<RunningRequest> {
        &self.request
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        // Before the ticket is forgotten, which a task that goes on might take another time.
        self.leaving = None;
        if self.request.draining.is_cancelled() {
            self.all.count(&self.request);
        }
        self.all.forget_ticket(&self.request);
        self.all.by_id.lock().remove(&self.request.id);
        self.all.n_running.send_modify(|n_running| *n_running -= 1);
    }
}

impl RequestProgress {
    /// That of a request whose outputs have `n_output_tokens` from elsewhere.
    pub(crate) fn new(n_output_tokens: usize) -> Self {
        Self {
            n_output_tokens: AtomicUsize::new(n_output_tokens),
            is_moving: AtomicBool::new(false),
            ticket: Mutex::new(None),
            end: Mutex::new(End::Left),
        }
    }
}

impl RunningRequest {
    pub(crate) fn note_token(&self) {
        // Relaxed: a number to look at.
        self.progress.n_output_tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes what another worker holds for it from now on; `None` if that is not its own to forget.
    pub(crate) fn set_ticket(&self, notice: Option<MoveNotice>) {
        *self.progress.ticket.lock() = notice;
    }

    /// Notes how it ends, if nothing else happens.
    pub(crate) fn note_end(&self, end: End) {
        *self.progress.end.lock() = end;
    }

    /// Whether it has ended here because another worker has its KV.
    pub(crate) fn has_migrated(&self) -> bool {
        *self.progress.end.lock() == End::Migrated
    }

    /// Waits until the worker drains, and forever if the request has so little to go that it should stay.
    pub(crate) async fn should_leave(&self) {
        self.draining.cancelled().await;
        if self.tokens_left() <= SHORT_REST_TOKENS * self.n_outputs() {
            std::future::pending::<()>().await;
        }
    }

    /// Over all prompts.
    fn n_outputs(&self) -> usize {
        self.prompt_tokens.len() * self.n_choices as usize
    }

    /// Tokens that its outputs have to go at most.
    fn tokens_left(&self) -> usize {
        let n_output_tokens = self.progress.n_output_tokens.load(Ordering::Relaxed);
        self.max_tokens.saturating_mul(self.n_outputs()).saturating_sub(n_output_tokens)
    }

    /// Takes the right to move it; `None` if it moves already.
    pub(crate) fn begin_move(self: &Arc<Self>) -> Option<MoveGuard> {
        (!self.progress.is_moving.swap(true, Ordering::AcqRel)).then(|| MoveGuard(Arc::clone(self)))
    }

    /// Freezes it without a place to go; false if it has ended or cannot be frozen yet.
    pub(crate) async fn freeze(&self) -> Result<bool, Refusal> {
        self.engine.freeze(self.tickets.clone(), None).await
    }

    fn describe(&self) -> RunningSequence {
        RunningSequence {
            id: self.id.clone(),
            seq_id: self.seq_id.clone(),
            path: self.path.to_owned(),
            prompt_tokens: self.prompt_tokens.iter().sum(),
            output_tokens: self.progress.n_output_tokens.load(Ordering::Relaxed),
            can_move: self.can_move,
            is_moving: self.progress.is_moving.load(Ordering::Relaxed),
            outputs: self.n_outputs() as u64,
            tokens_left: self.tokens_left() as u64,
            moved_ms_ago: self.came.map(|came| came.elapsed().as_millis() as u64),
        }
    }
}

impl MoveGuard {
    pub(crate) fn request(&self) -> &Arc<RunningRequest> {
        &self.0
    }
}

impl Drop for MoveGuard {
    fn drop(&mut self) {
        self.0.progress.is_moving.store(false, Ordering::Release);
    }
}
