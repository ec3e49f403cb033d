//! How the segments of a prompt are gathered, and its request submitted.
//!
//! A segment is looked for in the store first, and computed by the engine otherwise; however many wait for it, that happens
//! once. A request is submitted when none of its segments is missing any more.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvik_model::{Blend, BlendSegment, ComputedSegment, RequestId, SegmentKv};
use kvik_types::TokenId;
use tokio::sync::oneshot;

use super::blends::{AddedSegment, Coming, Gathering, SegmentKey, Source, Waiter, WantedSegment};
use super::loads::Arrival;
use super::run::EngineThread;
use super::{Command, EngineHandle};
use crate::error::Refusal;
use crate::plan::BlendPart;
use crate::store::SegmentLoading;

impl EngineThread {
    /// Has the segments of a request's prompt come, then takes the request.
    pub(super) fn gather(&mut self, arrival: Arrival, part: BlendPart) {
        let BlendPart { segments, selectors } = part;
        let ticket = arrival.origin.ticket;
        let (prompt, salt) = (&arrival.prepared.request().prompt, &arrival.prepared.options().salt);
        let key_of = |range: &Range<usize>| prompt.get(range.clone()).map(<[TokenId]>::to_vec);
        let keys: Vec<Option<SegmentKey>> = segments
            .iter()
            .map(|range| key_of(range).map(|tokens| SegmentKey { tokens, salt: salt.clone() }))
            .collect();
        let n_missing = keys.len();
        let wanted = |range: Range<usize>| WantedSegment { first_token: range.start, kv: None };
        let segments = segments.into_iter().map(wanted).collect();
        self.blends.by_ticket.insert(ticket, Gathering { arrival, selectors, segments, n_missing });
        for (idx, key) in keys.into_iter().enumerate() {
            match key {
                Some(key) => self.find_segment(key, Waiter::Request(ticket, idx)),
                None => self.fill(ticket, idx, None),
            }
        }
        self.submit_if_gathered(ticket);
    }

    /// Has a segment computed and kept, unless the store has it.
    pub(super) fn add_segment(&mut self, key: SegmentKey, reply: oneshot::Sender<AddedSegment>) {
        self.find_segment(key, Waiter::Client(reply));
    }

    /// Hands a segment out, now or when it has come.
    fn find_segment(&mut self, key: SegmentKey, waiter: Waiter) {
        if let Some(coming) = self.blends.coming.get_mut(&key) {
            coming.waiters.push(waiter);
            return;
        }
        let Some((store, waker)) = &self.store else {
            return self.compute_segment(key, vec![waiter]);
        };
        match store.segments().load(&key.tokens, key.salt.as_ref()) {
            SegmentLoading::Ready(kv) => self.hand_out(vec![waiter], Some(&kv), AddedSegment::Present),
            SegmentLoading::Nothing => self.compute_segment(key, vec![waiter]),
            SegmentLoading::Pending(load) => {
                let (waker, loaded) = (Weak::clone(waker), key.clone());
                load.on_done(move || {
                    if let Some(sender) = waker.upgrade() {
                        // A thread that has ended waits for nothing.
                        let _ = sender.send(Command::SegmentLoaded { key: Box::new(loaded) });
                    }
                });
                self.blends.coming.insert(key, Coming { source: Source::Store(load), waiters: vec![waiter] });
            }
        }
    }

    /// Has the engine compute a segment, which it may refuse.
    fn compute_segment(&mut self, key: SegmentKey, waiters: Vec<Waiter>) {
        match self.engine.submit_segment(&key.tokens) {
            Ok(id) => {
                self.blends.coming.insert(key, Coming { source: Source::Engine(id), waiters });
            }
            Err(error) => {
                tracing::debug!(%error, "a segment is computed as part of its prompt");
                self.hand_out(waiters, None, AddedSegment::Refused);
            }
        }
    }

    /// Takes a segment that has come from the store, or has it computed.
    pub(super) fn take_loaded_segment(&mut self, key: &SegmentKey) {
        // One that was waited for no longer is in the engine already.
        let is_loading = |coming: &Coming| matches!(coming.source, Source::Store(_));
        if !self.blends.coming.get(key).is_some_and(is_loading) {
            return;
        }
        let Some(Coming { source: Source::Store(load), waiters }) = self.blends.coming.remove(key) else {
            return;
        };
        match load.finish() {
            Some(kv) => self.hand_out(waiters, Some(&kv), AddedSegment::Present),
            None => self.compute_segment(key.clone(), waiters),
        }
    }

    /// Has those segments computed that did not come in time.
    pub(super) fn end_late_segments(&mut self) {
        if self.blends.coming.is_empty() {
            return;
        }
        for key in self.blends.late(Instant::now()) {
            self.take_loaded_segment(&key);
        }
    }

    /// Takes a segment that the engine has computed.
    pub(super) fn take_computed_segment(&mut self, id: RequestId, segment: ComputedSegment) {
        let Some(key) = self.blends.key_of(id) else { return };
        let Some(coming) = self.blends.coming.remove(&key) else { return };
        let segment = Arc::new(segment);
        if let Some((store, _)) = &self.store {
            store.segments().keep(&segment, key.salt);
        }
        self.hand_out(coming.waiters, Some(&(segment as Arc<dyn SegmentKv>)), AddedSegment::Computed);
    }

    /// Lets the requests that wait for a segment go on without it; false if it is not a segment.
    pub(super) fn lose_segment(&mut self, id: RequestId) -> bool {
        let Some(key) = self.blends.key_of(id) else { return false };
        if let Some(coming) = self.blends.coming.remove(&key) {
            self.hand_out(coming.waiters, None, AddedSegment::Refused);
        }
        true
    }

    fn hand_out(&mut self, waiters: Vec<Waiter>, kv: Option<&Arc<dyn SegmentKv>>, added: AddedSegment) {
        for waiter in waiters {
            match waiter {
                Waiter::Request(ticket, idx) => {
                    self.fill(ticket, idx, kv.cloned());
                    self.submit_if_gathered(ticket);
                }
                // A client that is gone wants no answer.
                Waiter::Client(reply) => drop(reply.send(added)),
            }
        }
    }

    fn fill(&mut self, ticket: u64, idx: usize, kv: Option<Arc<dyn SegmentKv>>) {
        if let Some(gathering) = self.blends.by_ticket.get_mut(&ticket)
            && let Some(segment) = gathering.segments.get_mut(idx)
        {
            segment.kv = kv;
            gathering.n_missing -= 1;
        }
    }

    fn submit_if_gathered(&mut self, ticket: u64) {
        if self.blends.by_ticket.get(&ticket).is_none_or(|gathering| 0 < gathering.n_missing) {
            return;
        }
        let Some(Gathering { arrival, selectors, segments, .. }) = self.blends.by_ticket.remove(&ticket)
        else {
            return;
        };
        let segments = segments
            .into_iter()
            .filter_map(|WantedSegment { first_token, kv }| Some(BlendSegment { first_token, kv: kv? }))
            .collect();
        self.submit(arrival, None, Some(Blend { segments, selectors }));
    }
}

impl EngineHandle {
    /// Has a segment computed and kept, unless the store has it.
    pub(crate) async fn add_segment(&self, key: SegmentKey) -> Result<AddedSegment, Refusal> {
        self.ask(|reply| Command::AddSegment { key: Box::new(key), reply }).await
    }
}
