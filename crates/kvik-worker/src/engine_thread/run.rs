//! What the thread does.
//!
//! One turn: take commands, hand requests to the engine, step, send events, end clients that do not
//! read. The thread sleeps only when the engine has nothing to do, and then wakes once a second if
//! some output waits for its client.
//!
//! The engine tells how much of a prompt was found only at an output's end, but who steps a sequence
//! is told at its start. So a stepped request is handed over when every request before it has been
//! admitted, and those after it wait until it is: what the engine then counts as found is its own.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use kvik_model::{Engine, EngineEvent, SubmitOptions};

use super::entries::{Entries, Entry, TokenTime};
use super::{Command, Shared, Snapshot, Submission};
use crate::generation::{Event, Token};
use crate::metrics::WorkerMetrics;

/// Time between two looks for clients that do not read.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The thread's state.
pub(super) struct EngineThread {
    engine: Engine,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    metrics: WorkerMetrics,
    slow_client_timeout: Duration,
    entries: Entries,
    /// Requests that wait for a stepped one to be admitted.
    queue: VecDeque<Submission>,
    /// The stepped request that is being admitted, and the tokens found before it.
    admitting: Option<(u64, u64)>,
    events: Vec<EngineEvent>,
    busy: Duration,
    last_look: Instant,
}

/// Tells the other side that the thread has ended, also when it panics.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.is_alive.store(false, Ordering::Release);
        if std::thread::panicking() {
            tracing::error!("the engine's thread panicked; the worker serves nothing more");
        }
    }
}

impl EngineThread {
    pub(super) fn new(
        engine: Engine,
        commands: Receiver<Command>,
        shared: Arc<Shared>,
        metrics: WorkerMetrics,
        slow_client_timeout: Duration,
    ) -> Self {
        let mut thread = Self {
            engine,
            commands,
            shared,
            metrics,
            slow_client_timeout,
            entries: Entries::default(),
            queue: VecDeque::new(),
            admitting: None,
            events: Vec::new(),
            busy: Duration::ZERO,
            last_look: Instant::now(),
        };
        thread.publish();
        thread
    }

    /// Runs until told to stop or nobody can send commands any more.
    pub(super) fn run(mut self) {
        let _guard = EndGuard(Arc::clone(&self.shared));
        while self.take_commands() {
            self.hand_over();
            if self.engine.has_work() {
                self.step();
            } else {
                self.publish();
            }
            self.end_slow_clients();
        }
        for entry in self.entries.drain() {
            entry.send_last(Event::Failed("the worker stops".to_owned()));
        }
        for Submission { origin, .. } in self.queue.drain(..) {
            let _ = origin.events.send((origin.part_idx, Event::Failed("the worker stops".to_owned())));
        }
    }

    /// Takes all commands that are there, waiting for one if there is nothing else to do; false at
    /// the end.
    fn take_commands(&mut self) -> bool {
        if !self.engine.has_work() && self.queue.is_empty() {
            let command = if self.entries.is_empty() {
                self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                self.commands.recv_timeout(LOOK_INTERVAL)
            };
            match command {
                Ok(command) => {
                    if !self.obey(command) {
                        return false;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        while let Ok(command) = self.commands.try_recv() {
            if !self.obey(command) {
                return false;
            }
        }
        true
    }

    /// Does what a command asks; false for the last one.
    fn obey(&mut self, command: Command) -> bool {
        // Who asked may be gone; the answers then go nowhere.
        match command {
            Command::Submit(submission) => self.queue.push_back(*submission),
            Command::Grant { ticket, n } => {
                if let Some(entry) = self.entries.get_mut(ticket) {
                    entry.grant(n, Instant::now());
                    self.engine.grant(entry.id, n);
                }
            }
            Command::Abandon { ticket } => {
                if self.end(ticket).is_some() {
                    self.metrics.cancelled("client");
                }
            }
            Command::Finish { ticket, name, forgets, reply } => {
                if let Some(ticket) = ticket {
                    self.end(ticket);
                }
                if forgets {
                    self.engine.forget_resident(&name);
                }
                let n_resident = self.engine.resident_tokens(&name).map_or(0, <[u32]>::len);
                let _ = reply.send(n_resident);
            }
            Command::Export { name, layers, reply } => {
                let _ = reply.send(self.engine.export_kv(&name, layers));
            }
            Command::Import { name, kv, reply } => {
                let _ = reply.send(self.engine.import_kv(&name, &kv));
            }
            Command::Stats { reply } => {
                let _ = reply.send(self.snapshot());
            }
            Command::Stop => return false,
        }
        true
    }

    /// Takes a request from the engine; `None` if it never had it or has ended it.
    fn end(&mut self, ticket: u64) -> Option<Entry> {
        self.queue.retain(|submission| submission.origin.ticket != ticket);
        let entry = self.entries.remove(ticket)?;
        if self.admitting.is_some_and(|(admitting, _)| admitting == ticket) {
            self.admitting = None;
        }
        if entry.origin.name.is_some() {
            self.engine.finish(entry.id);
        } else {
            self.engine.cancel(entry.id);
        }
        Some(entry)
    }

    /// Gives the engine the requests that need not wait.
    fn hand_over(&mut self) {
        while self.admitting.is_none() {
            let Some(next) = self.queue.front() else { return };
            if next.origin.is_stepped && self.entries.iter().any(|(_, entry)| !entry.has_first_token()) {
                return;
            }
            if let Some(submission) = self.queue.pop_front() {
                self.submit(submission);
            }
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { origin, request } = submission;
        let options = SubmitOptions { name: origin.name.clone(), credits: Some(origin.credits) };
        let (n_prompt_tokens, n_choices) = (request.prompt.len(), request.sampling.n as usize);
        match self.engine.submit_with(request, options) {
            Ok(id) => {
                self.metrics.accepted(n_prompt_tokens);
                if origin.is_stepped {
                    self.admitting = Some((origin.ticket, self.engine.stats().n_cached_tokens));
                }
                let entry = Entry::new(id, origin, n_choices);
                entry.send(Event::Accepted);
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
        let outcome = self.engine.step(&mut events);
        let now = Instant::now();
        self.busy += now - started;
        // Before the events: who has read its last one finds itself gone from the numbers.
        self.publish();
        self.tell_admission(&events);
        for event in events.drain(..) {
            self.deliver(event, now);
        }
        self.events = events;
        if let Err(error) = outcome {
            // The batch is poisoned: without this it would be tried again for ever.
            tracing::error!(%error, "the engine refused its own batch; all its requests fail");
            let ended: Vec<Entry> = self.entries.drain().collect();
            self.admitting = None;
            for entry in ended {
                self.engine.cancel(entry.id);
                self.metrics.cancelled("failure");
                entry.send_last(Event::Failed(format!("the engine failed: {error}")));
            }
        }
    }

    /// Tells the stepped request that waits for it how much of its prompt was found.
    fn tell_admission(&mut self, events: &[EngineEvent]) {
        let Some((ticket, n_cached_before)) = self.admitting else { return };
        let Some(entry) = self.entries.get_mut(ticket) else {
            self.admitting = None;
            return;
        };
        let has_token = events
            .iter()
            .any(|event| matches!(event, EngineEvent::Token(token) if token.request == entry.id));
        let cached_tokens = (self.engine.stats().n_cached_tokens - n_cached_before) as usize;
        if has_token || 0 < cached_tokens || self.engine.n_waiting() == 0 {
            entry.send(Event::Admitted { cached_tokens });
            self.admitting = None;
        }
    }

    fn deliver(&mut self, event: EngineEvent, now: Instant) {
        match event {
            EngineEvent::Token(token) => {
                let Some((_, entry)) = self.entries.of_request(token.request) else { return };
                match entry.note_token(token.choice, now) {
                    TokenTime::First(time) => self.metrics.first_token_seconds.record(time),
                    TokenTime::Next(time) => self.metrics.inter_token_seconds.record(time),
                    TokenTime::Unmeasured => {}
                }
                entry.send(Event::Token(Token {
                    choice: token.choice,
                    id: token.token,
                    text: token.text,
                    logprobs: token.logprobs,
                }));
            }
            EngineEvent::Finished { request, choice, text, reason, usage } => {
                let Some((ticket, entry)) = self.entries.of_request(request) else { return };
                self.metrics.finished(reason.as_str());
                let event = Event::Finished { choice, text, reason, usage };
                match entry.note_finished(now) {
                    None => entry.send(event),
                    Some(time) => {
                        self.metrics.request_seconds.record(time);
                        self.end_with(ticket, event);
                    }
                }
            }
            EngineEvent::Failed { request, error } => {
                let Some((ticket, _)) = self.entries.of_request(request) else { return };
                tracing::warn!(%error, "a request failed");
                self.metrics.cancelled("failure");
                self.end_with(ticket, Event::Failed(error.to_string()));
            }
            other => tracing::debug!(?other, "passed over an event"),
        }
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
        if now - self.last_look < LOOK_INTERVAL.min(self.slow_client_timeout) {
            return;
        }
        self.last_look = now;
        let Some(deadline) = now.checked_sub(self.slow_client_timeout) else { return };
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
            n_waiting: self.engine.n_waiting() + self.queue.len(),
            n_residents: self.engine.n_residents(),
            n_resident_blocks: self.engine.n_resident_blocks(),
            outstanding_tokens: self.engine.outstanding_tokens(),
            pool: self.engine.pool_stats(),
            stats,
            tokens_per_second: if 0.0 < busy { stats.n_computed_tokens as f64 / busy } else { 0.0 },
        }
    }

    fn publish(&mut self) {
        let snapshot = self.snapshot();
        self.metrics.snapshot(&snapshot);
        *self.shared.snapshot.lock() = snapshot;
    }
}
