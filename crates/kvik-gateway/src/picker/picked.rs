//! A request that has a worker, until its answer has ended.

use std::sync::Arc;

use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use kvik_proto::journal::JOURNAL;
use kvik_proto::moves::{DECODE_AT, HELD};
use kvik_runtime::trust::TOKEN_HEADER;

use super::{Chosen, TRACE_PARENT, is_endpoint};
use crate::answer::record::{Ending, Record};
use crate::disaggregation::Prefill;
use crate::request::headers::REQUEST_ID;
use crate::upstream::backend::{Backend, BackendKind};
use crate::upstream::exchange::outcome_of;
use crate::upstream::fleet::ModelGroup;

/// A request that has a worker. Its permit, its load and what the index predicted live here: they end with [`end`](Self::end), or
/// when this is dropped, which means that the client has left.
#[derive(Debug)]
pub struct Picked {
    record: Record,
    group: Arc<ModelGroup>,
    backends: Vec<Arc<Backend>>,
    /// On the engine that computes the prompt, until the answer begins.
    prefill: Option<Prefill>,
    /// Tokens of the request on its worker, and those of them that are the answer's.
    tokens: (u64, u64),
    added_headers: Vec<(HeaderName, HeaderValue)>,
    removed_headers: Vec<HeaderName>,
}

impl Picked {
    pub(super) fn new(
        record: Record,
        chosen: Chosen,
        trace_parent: Option<HeaderValue>,
        (shows_token, hides_key): (bool, bool),
    ) -> Self {
        let Chosen { group, backends, prefill, tokens } = chosen;
        let mut added_headers = vec![(REQUEST_ID, record.request_id.clone())];
        added_headers.extend(trace_parent.map(|parent| (HeaderName::from_static(TRACE_PARENT), parent)));
        // What only a gateway says to a worker.
        let mut removed_headers = [JOURNAL, DECODE_AT, HELD].map(HeaderName::from_static).to_vec();
        // Other engines never see the token.
        let has_workers_only = backends.iter().all(|backend| backend.kind == BackendKind::Worker);
        match record.shared().cluster_header.clone().filter(|_| shows_token && has_workers_only) {
            Some(token) => added_headers.push(token),
            None => removed_headers.push(TOKEN_HEADER),
        }
        removed_headers.extend(hides_key.then_some(AUTHORIZATION));
        Self { record, group, backends, prefill, tokens, added_headers, removed_headers }
    }

    /// The endpoint that takes the request, then those to try if it fails, each as `host:port`.
    pub fn endpoints(&self) -> impl Iterator<Item = &str> {
        self.backends.iter().map(|backend| backend.endpoint.as_str())
    }

    /// The endpoint of the engine that is to compute the prompt, if that is another one.
    pub fn prefill_endpoint(&self) -> Option<&str> {
        self.prefill.as_ref().map(|prefill| prefill.load.backend.endpoint.as_str())
    }

    /// Headers that the worker gets, in place of those of the client.
    pub fn added_headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.added_headers
    }

    /// Headers of the client that the worker does not get.
    pub fn removed_headers(&self) -> &[HeaderName] {
        &self.removed_headers
    }

    /// Takes the head of the answer; `served` is the endpoint that it came from, if the data plane says so.
    pub fn answered(&mut self, status: StatusCode, headers: &HeaderMap, served: Option<&str>) {
        self.prefill = None;
        if let Some(served) = served {
            self.move_to(served);
        }
        let content_type = headers.get(CONTENT_TYPE);
        let record = &mut self.record;
        record.is_stream = content_type.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        record.status = status.as_u16();
        record.head_outcome = outcome_of(status, headers);
    }

    /// Takes a part of the answer's body.
    pub fn data(&mut self, data: &[u8]) {
        self.record.count(data);
    }

    /// The answer is complete.
    pub fn end(mut self) {
        self.record.end(Ending::Complete);
    }

    /// Takes the load to the endpoint that answered, if that is another one: the data plane goes on only after a failure.
    fn move_to(&mut self, served: &str) {
        let is_here = self.record.load.as_ref().is_some_and(|load| is_endpoint(&load.backend, served));
        let seat = self.group.seats.iter().find(|seat| is_endpoint(&seat.backend, served));
        let Some(seat) = seat.filter(|_| !is_here) else { return };
        let (n_tokens, n_output_tokens) = self.tokens;
        if let Some(load) = seat.backend.try_load(u64::MAX, n_tokens, n_output_tokens) {
            self.record.note_failure();
            self.record.go_on(load);
        }
    }
}
