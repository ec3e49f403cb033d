//! What the thread does.
//!
//! One turn: take commands, step, send events, end clients that do not read. The thread sleeps only
//! when the engine has nothing to do, and then wakes once a second if some output waits for its
//! client, and when KV of the store is waited for no longer.
//!
//! The state is here, with the turn and the commands; what a command or a step leads to is in a file by its subject:
//! `arrivals`, `gathering`, `steps` and `moves`.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvik_model::{BlockChange, Engine, EngineEvent};
use kvik_node::{HeldChange, KvLog};
use kvik_proto::kv_stream::{KvKey, KvTier};

use super::blends::Blends;
use super::entries::{Entries, Entry};
use super::lends::WaitingLend;
use super::loads::Loads;
use super::{Command, Origin, Patience, Shared};
use crate::block_groups::BLOCKS;
use crate::events::{Event, StopCause};
use crate::metrics::WorkerMetrics;
use crate::snapshot::Snapshot;
use crate::store::KvStore;

/// Time between two tries to get memory that other engines hold.
const STARVED_INTERVAL: Duration = Duration::from_millis(5);

/// Time between two looks for KV that is due: what has come is waited for no longer.
const DUE_INTERVAL: Duration = Duration::from_millis(1);

/// Time between two looks for clients that do not read.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The store, and what wakes this thread when something was loaded.
pub(super) type StoreLink = (Arc<dyn KvStore>, Weak<Sender<Command>>);

/// The thread's state.
pub(super) struct EngineThread {
    pub(super) engine: Engine,
    /// The store and how it wakes this thread. Weak: the thread must still see when the last sender of
    /// commands is gone.
    pub(super) store: Option<StoreLink>,
    kv_log: Arc<KvLog>,
    pub(super) loads: Loads,
    pub(super) blends: Blends,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    pub(super) metrics: WorkerMetrics,
    pub(super) patience: Patience,
    /// Since when nothing runs for want of memory.
    pub(super) starved_since: Option<Instant>,
    pub(super) entries: Entries,
    /// Blocks that are asked for and not full yet.
    pub(super) lends: Vec<WaitingLend>,
    pub(super) events: Vec<EngineEvent>,
    pub(super) busy: Duration,
    pub(super) last_look: Instant,
}

/// Tells the other side that the thread has ended, also when it panics.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the engine's thread panicked; the worker serves nothing more");
            // Of two reasons the first one counts.
            let _ = self.0.failure.set("its thread panicked".to_owned());
        }
        self.0.is_alive.store(false, Ordering::Release);
        self.0.ended.cancel();
    }
}

impl EngineThread {
    pub(super) fn new(
        engine: Engine,
        store: Option<StoreLink>,
        kv_log: Arc<KvLog>,
        commands: Receiver<Command>,
        shared: Arc<Shared>,
        metrics: WorkerMetrics,
        patience: Patience,
    ) -> Self {
        let mut thread = Self {
            engine,
            store,
            kv_log,
            loads: Loads::default(),
            blends: Blends::default(),
            commands,
            shared,
            metrics,
            patience,
            starved_since: None,
            entries: Entries::default(),
            lends: Vec::new(),
            events: Vec::new(),
            busy: Duration::ZERO,
            last_look: Instant::now(),
        };
        thread.publish();
        thread
    }

    /// Runs until it is stopped, the last sender of commands is gone or the device is lost.
    pub(super) fn run(mut self) {
        let _guard = EndGuard(Arc::clone(&self.shared));
        while self.take_commands() {
            self.end_late_loads();
            self.end_late_segments();
            if self.engine.has_work() {
                self.step();
                self.end_starved();
            } else {
                self.publish();
            }
            if self.engine.lost_device().is_some() {
                break;
            }
            self.answer_lends();
            self.end_slow_clients();
        }
        let cause = match self.engine.lost_device() {
            None => StopCause::Ended,
            Some(reason) => {
                let _ = self.shared.failure.set(format!("the device is lost: {reason}"));
                StopCause::DeviceLost
            }
        };
        for entry in self.entries.drain() {
            if cause == StopCause::DeviceLost {
                self.metrics.cancelled("failure");
            }
            entry.send_last(Event::Stopped(cause));
        }
        let (gathering, _) = self.blends.drain();
        for arrival in self.loads.drain().chain(gathering) {
            let Origin { part_idx, events, permit, .. } = arrival.origin;
            drop(permit);
            let _ = events.send((part_idx, Event::Stopped(cause)));
        }
    }

    /// Takes all commands that are there, waiting for one if there is nothing else to do; false at
    /// the end.
    fn take_commands(&mut self) -> bool {
        if !self.engine.has_work() {
            // Before the sleep: what the last request held or waited for is for others now.
            self.engine.rest();
            self.tell_blocks();
        }
        let is_starved = self.engine.is_starved();
        if is_starved || !self.engine.has_work() {
            let deadlines = [self.loads.next_deadline(), self.blends.next_deadline()];
            let late =
                deadlines.into_iter().flatten().min().map(|at| at.saturating_duration_since(Instant::now()));
            let command = if is_starved {
                self.commands.recv_timeout(STARVED_INTERVAL)
            } else if self.engine.is_waiting_for_kv() {
                self.commands.recv_timeout(DUE_INTERVAL)
            } else if self.entries.is_empty() && late.is_none() {
                self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                self.commands.recv_timeout(late.unwrap_or(LOOK_INTERVAL).min(LOOK_INTERVAL))
            };
            match command {
                Ok(command) => {
                    if !self.handle(command) {
                        return false;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        while let Ok(command) = self.commands.try_recv() {
            if !self.handle(command) {
                return false;
            }
        }
        true
    }

    /// Handles a command; false for the last one.
    fn handle(&mut self, command: Command) -> bool {
        // The sender may be gone; the answer then goes nowhere.
        match command {
            Command::Submit(submission) => self.load(*submission),
            Command::Loaded { ticket } => {
                // One that was waited for no longer is in the engine already.
                if let Some((arrival, kv)) = self.loads.finish(ticket) {
                    self.submit(arrival, kv, None);
                }
            }
            Command::AddSegment { key, reply } => self.add_segment(*key, reply),
            Command::SegmentLoaded { key } => self.take_loaded_segment(&key),
            Command::Grant { ticket, n } => {
                if let Some(entry) = self.entries.get_mut(ticket) {
                    entry.grant(n, Instant::now());
                    self.engine.grant(entry.id, n);
                }
            }
            Command::Abandon { ticket } => {
                let is_coming = self.loads.remove(ticket).or_else(|| self.blends.remove(ticket)).is_some();
                if is_coming || self.end(ticket).is_some() {
                    self.metrics.cancelled("client");
                }
            }
            Command::Finish { ticket, name, forgets, reply } => {
                if let Some(ticket) = ticket
                    && self.loads.remove(ticket).or_else(|| self.blends.remove(ticket)).is_none()
                {
                    self.end(ticket);
                }
                if forgets {
                    self.engine.forget_resident(&name);
                }
                let n_resident = self.engine.resident_tokens(&name).map_or(0, <[u32]>::len);
                let _ = reply.send(n_resident);
            }
            Command::Export { name, layers, reply } => {
                // Without an answer where the device is lost: the thread ends.
                if let Ok(kv) = self.engine.export_kv(&name, layers) {
                    let _ = reply.send(kv);
                }
            }
            Command::Import { name, kv, hold, reply } => {
                let outcome = self.engine.import_kv(&name, &kv);
                drop((kv, hold));
                let _ = reply.send(outcome);
            }
            Command::Stats { reply } => {
                let _ = reply.send(self.snapshot());
            }
            Command::Blocks { mut page, reply } => {
                for hash in self.engine.registered_blocks() {
                    page.offer(KvKey::from(hash), || vec![KvTier::Gpu]);
                }
                let _ = reply.send(page);
            }
            Command::Freeze { tickets, notice, reply } => {
                let _ = reply.send(self.freeze(&tickets, notice));
            }
            Command::Thaw { tickets } => self.thaw(&tickets),
            Command::Lend { request, reply } => self.lend(request, reply),
            Command::Stage { blocks, reply } => {
                let _ = reply.send(self.stage(&blocks));
            }
            Command::Unstage { stage } => self.engine.unstage(stage),
            Command::GiveBack => self.engine.give_back_memory(),
            // The next turn takes them.
            Command::BlocksReturned | Command::KvArrived => {}
            Command::Stop => return false,
        }
        true
    }

    /// Takes a request from the engine; `None` if it never had it or has ended it.
    pub(super) fn end(&mut self, ticket: u64) -> Option<Entry> {
        let entry = self.entries.remove(ticket)?;
        if entry.origin.name.is_some() {
            self.engine.finish(entry.id);
        } else {
            self.engine.cancel(entry.id);
        }
        Some(entry)
    }

    fn snapshot(&self) -> Snapshot {
        let stats = self.engine.stats();
        let busy = self.busy.as_secs_f64();
        Snapshot {
            n_running: self.engine.n_running(),
            n_waiting: self.engine.n_waiting() + self.loads.len() + self.blends.len(),
            n_residents: self.engine.n_residents(),
            n_resident_blocks: self.engine.n_resident_blocks(),
            outstanding_tokens: self.engine.outstanding_tokens(),
            pool: self.engine.pool_stats(),
            stats,
            tokens_per_second: if 0.0 < busy { stats.n_computed_tokens as f64 / busy } else { 0.0 },
        }
    }

    /// Logs which blocks have come and gone; never waits for a reader.
    fn tell_blocks(&mut self) {
        let changes = self.engine.take_block_changes();
        if changes.len() == 0 {
            return;
        }
        self.kv_log.append(
            BLOCKS,
            changes.map(|BlockChange { hash, parent, is_registered }| HeldChange {
                key: KvKey::from(hash),
                parent: parent.map(KvKey::from),
                tier: KvTier::Gpu,
                is_held: is_registered,
            }),
        );
    }

    pub(super) fn publish(&mut self) {
        self.tell_blocks();
        let snapshot = self.snapshot();
        self.metrics.snapshot(&snapshot);
        *self.shared.snapshot.lock() = snapshot;
    }
}
