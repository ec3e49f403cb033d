//! The way of a request into the engine: by the store, which may have KV of its prompt.
//!
//! A request is in the engine, among the loads or among the blends, never in two of them; it leaves the loads with what
//! has come, at the latest when its time is over.

use std::sync::{Arc, Weak};
use std::time::Instant;

use kvik_model::{Blend, SubmitOptions};

use super::entries::Entry;
use super::loads::Arrival;
use super::run::EngineThread;
use super::{Command, Submission};
use crate::events::Event;
use crate::store::{LoadRequest, Loading, PromptKv};

impl EngineThread {
    /// Has the KV of a request's prompt come from the store, then takes the request.
    pub(super) fn load(&mut self, submission: Submission) {
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
    pub(super) fn end_late_loads(&mut self) {
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
}
