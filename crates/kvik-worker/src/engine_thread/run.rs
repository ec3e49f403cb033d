//! What the thread does.
//!
//! One turn: take commands, step, send events, end clients that do not read. The thread sleeps only
//! when the engine has nothing to do, and then wakes once a second if some output waits for its
//! client, and when KV of the store is waited for no longer.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvik_model::{Blend, BlockChange, Engine, EngineEvent, ModelError, SubmitOptions};
use kvik_node::{HeldChange, KvLog};
use kvik_proto::kv_stream::{KvKey, KvTier};

use super::blends::Blends;
use super::entries::{Entries, Entry, TokenTime};
use super::lends::WaitingLend;
use super::loads::{Arrival, Loads};
use super::{Command, Origin, Patience, Shared, Submission};
use crate::block_groups::BLOCKS;
use crate::events::{Event, StopCause, Token, Usage};
use crate::metrics::WorkerMetrics;
use crate::snapshot::Snapshot;
use crate::store::{KvStore, LoadRequest, Loading, PromptKv};

/// Time between two tries to get memory that other engines hold.
const STARVED_INTERVAL: Duration = Duration::from_millis(5);

/// Time between two looks for KV that is due: what has come is waited for no longer.
const DUE_INTERVAL: Duration = Duration::from_millis(1);

/// Time between two looks for clients that do not read.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

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
    metrics: WorkerMetrics,
    patience: Patience,
    /// Since when nothing runs for want of memory.
    starved_since: Option<Instant>,
    pub(super) entries: Entries,
    /// Blocks that are asked for and not full yet.
    pub(super) lends: Vec<WaitingLend>,
    events: Vec<EngineEvent>,
    busy: Duration,
    last_look: Instant,
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
    fn end(&mut self, ticket: u64) -> Option<Entry> {
        let entry = self.entries.remove(ticket)?;
        if entry.origin.name.is_some() {
            self.engine.finish(entry.id);
        } else {
            self.engine.cancel(entry.id);
        }
        Some(entry)
    }

    /// Has the KV of a request's prompt come from the store, then takes the request.
    fn load(&mut self, submission: Submission) {
        let Submission { origin, request, begun, blend } = submission;
        let options = SubmitOptions {
            name: origin.name.clone(),
            credits: Some(origin.credits),
            salt: origin.salt.clone(),
        };
        let mut prepared = self.engine.prepare(request, options);
        if let Some(blend) = blend {
            return self.gather(Arrival { origin, prepared, begun }, blend);
        }
        let Some((store, waker)) = &self.store else {
            return self.submit(Arrival { origin, prepared, begun }, None, None);
        };
        let chain = store.loadable(&prepared.request().prompt, prepared.options().salt.as_ref());
        let Some(chain) = chain else {
            return self.submit(Arrival { origin, prepared, begun }, None, None);
        };
        let request = LoadRequest {
            n_prompt_tokens: prepared.request().prompt.len(),
            n_matched_tokens: self.engine.matched_tokens(&prepared),
            n_queued_tokens: self.engine.pending_tokens(),
            chain,
        };
        let loading = store.load(&request);
        // For the end of its sequences, whose first chunks have the same names.
        prepared.attach(Arc::new(request.chain));
        let arrival = Arrival { origin, prepared, begun };
        match loading {
            Loading::Nothing => self.submit(arrival, None, None),
            Loading::Ready(kv) => self.submit(arrival, Some(kv), None),
            Loading::Pending(load) => {
                let (ticket, waker) = (arrival.origin.ticket, Weak::clone(waker));
                load.on_done(move || {
                    if let Some(sender) = waker.upgrade() {
                        // A thread that has ended waits for nothing.
                        let _ = sender.send(Command::Loaded { ticket });
                    }
                });
                self.loads.insert(arrival, load);
            }
        }
    }

    /// Takes the requests whose KV did not come in time, with what has arrived.
    fn end_late_loads(&mut self) {
        if self.loads.is_empty() {
            return;
        }
        for ticket in self.loads.late(Instant::now()) {
            if let Some((arrival, kv)) = self.loads.finish(ticket) {
                self.submit(arrival, kv, None);
            }
        }
    }

    /// Hands a request to the engine.
    pub(super) fn submit(&mut self, arrival: Arrival, kv: Option<PromptKv>, blend: Option<Blend>) {
        let Arrival { origin, prepared, begun } = arrival;
        let request = prepared.request();
        let (n_prompt_tokens, n_choices) = (request.prompt.len(), request.sampling.n as usize);
        if let (Some(kv), Some((_, waker))) = (&kv, &self.store) {
            let waker = Weak::clone(waker);
            kv.on_each(move || {
                if let Some(sender) = waker.upgrade() {
                    let _ = sender.send(Command::KvArrived);
                }
            });
        }
        let (prefix, chunks) = kv.map(PromptKv::into_parts).unzip();
        let chunks = chunks.unwrap_or_default();
        let outputs = begun.as_ref().map(|begun| &begun.outputs);
        let submitted = match (blend, outputs) {
            (Some(blend), outputs) => self.engine.submit_blended(prepared, outputs, blend),
            (None, None) => self.engine.submit_prepared(prepared, prefix),
            (None, Some(outputs)) => self.engine.submit_begun(prepared, outputs, prefix),
        };
        match submitted {
            Ok(id) => {
                self.metrics.accepted(n_prompt_tokens);
                let mut entry = Entry::new(id, origin, n_choices, chunks);
                if let Some(begun) = &begun {
                    entry.note_begun(begun);
                }
                entry.send(Event::Accepted { seed: self.engine.seed(id).unwrap_or_default() });
                self.entries.insert(entry);
            }
            Err(error) => {
                let _ = origin.events.send((origin.part_idx, Event::Rejected(error)));
            }
        }
    }

    fn step(&mut self) {
        let started = Instant::now();
        let mut events = std::mem::take(&mut self.events);
        let before = self.engine.stats();
        let outcome = self.engine.step(&mut events);
        let now = Instant::now();
        self.busy += now - started;
        if let Some((store, _)) = &self.store {
            let after = self.engine.stats();
            let n_tokens = (after.n_computed_tokens - before.n_computed_tokens) as usize;
            let n_attended = after.n_attended_tokens - before.n_attended_tokens;
            store.note_pass(n_tokens, n_attended, (now - started).as_secs_f64());
        }
        // Before the events: a request that has read its last one is no longer in the numbers.
        self.publish();
        let mut delivered = events.drain(..).peekable();
        while let Some(event) = delivered.next() {
            let is_last = match (&event, delivered.peek()) {
                (EngineEvent::Token(token), Some(EngineEvent::Finished { request, choice, .. })) => {
                    (token.request, token.choice) == (*request, *choice)
                }
                _ => false,
            };
            self.deliver(event, is_last, started, now);
        }
        drop(delivered);
        self.events = events;
        if let Err(error) = outcome.or_else(|error| self.unless_lost(error)) {
            // The batch is poisoned: without this it would be tried again for ever.
            tracing::error!(%error, "the engine refused its own batch; all its requests fail");
            let (gathering, computing) = self.blends.drain();
            for id in computing {
                self.engine.cancel(id);
            }
            for Arrival { origin, .. } in gathering {
                let _ = origin
                    .events
                    .send((origin.part_idx, Event::Failed(format!("the engine failed: {error}"))));
            }
            let ended: Vec<Entry> = self.entries.drain().collect();
            for entry in ended {
                self.engine.cancel(entry.id);
                self.metrics.cancelled("failure");
                entry.send_last(Event::Failed(format!("the engine failed: {error}")));
            }
        }
    }

    /// An error of the engine, unless its device is lost: then the thread ends, and tells all requests so.
    fn unless_lost(&self, error: ModelError) -> Result<(), ModelError> {
        if self.engine.lost_device().is_some() { Ok(()) } else { Err(error) }
    }

    /// Passes on an event of the step from `started` to `now`; `is_last` if it is a token and the end of its output is next.
    fn deliver(&mut self, event: EngineEvent, is_last: bool, started: Instant, now: Instant) {
        match event {
            EngineEvent::Admitted { request, cached_tokens, loaded_tokens } => {
                let Some((_, entry)) = self.entries.of_request(request) else { return };
                self.metrics.queue_seconds.record(entry.note_admitted(started));
                let tiers = entry.note_cached(cached_tokens, loaded_tokens);
                self.metrics.cached(tiers);
                entry.send(Event::Admitted { cached_tokens, tiers, at: started });
            }
            EngineEvent::Token(token) => {
                let Some((_, entry)) = self.entries.of_request(token.request) else { return };
                match entry.note_token(token.choice, now) {
                    TokenTime::First { since_arrival, since_admission } => {
                        self.metrics.first_token_seconds.record(since_arrival);
                        self.metrics.prefill_seconds.record(since_admission);
                    }
                    TokenTime::Next(time) => self.metrics.inter_token_seconds.record(time),
                    TokenTime::Unmeasured => {}
                }
                entry.send(Event::Token(Token {
                    choice: token.choice,
                    id: token.token,
                    text: token.text,
                    logprobs: token.logprobs,
                    is_last,
                }));
            }
            EngineEvent::Finished { request, choice, text, reason, usage } => {
                let Some((ticket, entry)) = self.entries.of_request(request) else { return };
                self.metrics.finished(reason.as_str());
                let usage = Usage::new(usage, entry.cached_tiers());
                let event = Event::Finished { choice, text, reason, usage };
                match entry.note_finished(now) {
                    None => entry.send(event),
                    Some(time) => {
                        self.metrics.decode_seconds.record(time.since_first_token);
                        self.metrics.request_seconds.record(time.since_arrival);
                        self.end_with(ticket, event);
                    }
                }
            }
            EngineEvent::Segment { request, segment } => self.take_computed_segment(request, *segment),
            EngineEvent::Failed { request, error } => {
                if self.lose_segment(request) {
                    return;
                }
                let Some((ticket, _)) = self.entries.of_request(request) else { return };
                tracing::warn!(%error, "a request failed");
                self.metrics.cancelled("failure");
                self.end_with(ticket, Event::Failed(error.to_string()));
            }
            other => tracing::debug!(?other, "passed over an event"),
        }
    }

    /// Fails the request that has waited longest if nothing could run for too long because other engines
    /// hold the memory.
    fn end_starved(&mut self) {
        if !self.engine.is_starved() {
            self.starved_since = None;
            return;
        }
        let now = Instant::now();
        if now - *self.starved_since.get_or_insert(now) < self.patience.memory {
            return;
        }
        self.starved_since = None;
        let mut events = std::mem::take(&mut self.events);
        self.engine.fail_starved(&mut events);
        for event in events.drain(..) {
            self.deliver(event, false, now, now);
        }
        self.events = events;
    }

    /// Forgets a request that the engine is done with.
    fn end_with(&mut self, ticket: u64, event: Event) {
        if let Some(entry) = self.entries.remove(ticket) {
            entry.send_last(event);
        }
    }

    /// Ends the outputs that their clients have not read for too long.
    fn end_slow_clients(&mut self) {
        let now = Instant::now();
        if now - self.last_look < LOOK_INTERVAL.min(self.patience.slow_client) {
            return;
        }
        self.last_look = now;
        let Some(deadline) = now.checked_sub(self.patience.slow_client) else { return };
        let stalled: Vec<u64> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_stalled_since(deadline))
            .map(|(ticket, _)| ticket)
            .collect();
        for ticket in stalled {
            if let Some(entry) = self.end(ticket) {
                entry.send_last(Event::Failed("the client did not read its answer in time".to_owned()));
            }
            self.metrics.cancelled("slow_client");
        }
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

    fn publish(&mut self) {
        self.tell_blocks();
        let snapshot = self.snapshot();
        self.metrics.snapshot(&snapshot);
        *self.shared.snapshot.lock() = snapshot;
    }
}
