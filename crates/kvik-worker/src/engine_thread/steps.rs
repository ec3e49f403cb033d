//! A step of the engine, and what its events mean for requests.
//!
//! An event goes to its request or, if the request is gone, nowhere; nothing here waits for a client. Requests end here
//! that the engine fails, that get no memory, or whose clients do not read.

use std::time::Instant;

use kvik_model::{EngineEvent, ModelError};

use super::entries::{Entry, TokenTime};
use super::loads::Arrival;
use super::run::{EngineThread, LOOK_INTERVAL};
use crate::events::{Event, Token, Usage};

impl EngineThread {
    /// Has the engine compute a step, and sends what came of it.
    pub(super) fn step(&mut self) {
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
    pub(super) fn end_starved(&mut self) {
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
    pub(super) fn end_slow_clients(&mut self) {
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
}
