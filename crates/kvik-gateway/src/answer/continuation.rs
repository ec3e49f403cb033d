//! Answers that go on at another worker.
//!
//! The gateway holds the client's stream, so it decides where a request runs. Its journal says what the client has; the
//! request's body and the journal are all that another worker needs to go on with the very next token. That is how an answer
//! survives its worker, and how a worker that drains gives its requests away: there the KV has gone ahead.
//!
//! | what happens | what is done |
//! |---|---|
//! | the stream breaks, ends early or falls silent | the request goes on at another worker, as often as allowed |
//! | the worker says that it drains | it is asked to move the request to a worker that is placed like for a new request |
//! | the request is frozen | it goes on where its KV is; if that fails it is thawed, and if that fails too it goes on anywhere |

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Method, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use kvik_proto::journal::MoveNotice;
use kvik_proto::moves::{MoveRequest, ResumeHead};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::answer::journal::Journal;
use crate::answer::send::{Outgoing, worker_path};
use crate::metrics::Metrics;
use crate::placement::lookup::Lookup;
use crate::placement::{Placed, Wanted, place_at, place_worker};
use crate::request::peek::Peek;
use crate::state::{Shared, View};
use crate::upstream::backend::{Backend, LoadGuard};
use crate::upstream::exchange::{WorkerBody, exchange};
use crate::upstream::fleet::ModelGroup;

/// Interval at which the fleet is polled while no worker is usable.
const WAIT_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time that a worker that drains may take to move a request: minutes of copies would be a broken network.
const MOVE_TIMEOUT: Duration = Duration::from_mins(1);
/// Workers that a request is offered to before it stays where it is.
const MOVE_TRIES: usize = 3;
/// Time for a frozen request to be thawed.
const THAW_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest answer of a worker to such a call, in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// What continues an answer.
#[derive(Debug)]
pub(crate) struct Continuation {
    pub(crate) journal: Journal,
    continuer: Arc<Continuer>,
    n_continued: u32,
    /// Ends the call that asks for a move, and its load, when the answer ends or goes on elsewhere.
    asking: Option<DropGuard>,
}

/// Sends a request again.
#[derive(Debug)]
pub(crate) struct Continuer {
    shared: Arc<Shared>,
    model: String,
    key: Vec<u8>,
    n_tokens: u64,
    n_output_tokens: u64,
    is_named: bool,
    outgoing: Outgoing,
}

/// What became of an answer that had to go on.
#[derive(Debug)]
pub(crate) enum Continued {
    /// It goes on in another body.
    Elsewhere(WorkerBody, LoadGuard),
    /// It goes on in the same body.
    Here,
    /// It cannot go on.
    Nowhere,
}

// === impl Continuation ===

impl Continuation {
    pub(crate) fn new(continuer: Continuer) -> Self {
        Self { journal: Journal::default(), continuer: Arc::new(continuer), n_continued: 0, asking: None }
    }

    /// Goes on at another worker than `failed`, after that has failed; `None` if that is not possible.
    pub(crate) fn replay(
        &mut self,
        failed: &Arc<Backend>,
    ) -> Option<impl Future<Output = Continued> + Send + use<>> {
        let config = Arc::clone(&self.continuer.shared.view().config);
        let resumed = self.resumed(None)?;
        if config.retry.max_continuations <= self.n_continued {
            return None;
        }
        self.n_continued += 1;
        self.asking = None;
        let (continuer, failed) = (Arc::clone(&self.continuer), Arc::clone(failed));
        Some(async move { continuer.replay(resumed, &failed).await })
    }

    /// Goes on where the KV of a frozen request is; one whose journal cannot be continued is thawed where it is.
    pub(crate) fn follow(
        &mut self,
        notice: MoveNotice,
        source: &Arc<Backend>,
    ) -> Option<impl Future<Output = Continued> + Send + use<>> {
        let sequence = self.journal.sequence()?.to_owned();
        let resumed = self.resumed(Some(notice.ticket));
        let (continuer, source) = (Arc::clone(&self.continuer), Arc::clone(source));
        Some(async move { continuer.follow(resumed, &notice.to, &source, &sequence).await })
    }

    /// Has the worker `source`, which drains, move the request; the stream tells what became of it.
    pub(crate) fn ask_to_move(&mut self, source: &Arc<Backend>) {
        let Some((head, _)) = self.journal.continuable() else { return };
        let sequence = head.sequence.clone();
        let (continuer, source) = (Arc::clone(&self.continuer), Arc::clone(source));
        let shutdown = continuer.shared.shutdown.clone();
        let ended = CancellationToken::new();
        self.asking = Some(ended.clone().drop_guard());
        shutdown.spawn(async move {
            tokio::select! {
                () = continuer.ask_to_move(&source, &sequence) => {}
                () = ended.cancelled() => {}
            }
        });
    }

    fn resumed(&self, ticket: Option<String>) -> Option<ResumeHead> {
        let (head, progress) = self.journal.continuable()?;
        Some(ResumeHead {
            path: worker_path(self.continuer.outgoing.route).to_owned(),
            head: head.clone(),
            progress: progress.to_owned(),
            ticket,
            partial: None,
        })
    }
}

// === impl Continuer ===

impl Continuer {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        group: &ModelGroup,
        wanted: Wanted<'_>,
        outgoing: &Outgoing,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            model: group.model.clone(),
            key: wanted.request.key.to_vec(),
            n_tokens: wanted.request.tokens,
            n_output_tokens: wanted.output_tokens,
            is_named: wanted.is_named,
            outgoing: outgoing.clone(),
        }
    }

    fn wanted<'a>(&'a self, matched_tokens: &'a [f64]) -> Wanted<'a> {
        let request =
            kvik_index::placement::Request { key: &self.key, tokens: self.n_tokens, matched_tokens };
        Wanted { request, output_tokens: self.n_output_tokens, is_named: self.is_named }
    }

    fn group(&self, view: &View) -> Option<Arc<ModelGroup>> {
        view.fleet.group(&self.model).map(Arc::clone)
    }

    /// Goes on anywhere but at `failed`, with the worker that has most of the prompt if there is one.
    async fn replay(&self, resumed: ResumeHead, failed: &Arc<Backend>) -> Continued {
        let until = self.outgoing.deadline.min(Instant::now() + self.wait());
        let mut matched_tokens = Vec::new();
        let view = self.shared.view();
        if let (Some(group), Ok(peek)) = (self.group(&view), Peek::read(&self.outgoing.body)) {
            let routing = &view.config.routing;
            let lookup = Lookup::ask(&self.shared, &group, self.outgoing.route, &peek, routing).await;
            if let Some(lookup) = lookup {
                matched_tokens = lookup.saved_tokens(&group, &self.shared.under_way);
            }
        }
        let mut failed = Arc::clone(failed);
        loop {
            let view = self.shared.view();
            let group = self.group(&view);
            // The places of the index are those of the group that it was asked for.
            let fits = group.as_ref().is_some_and(|group| group.seats.len() == matched_tokens.len());
            let wanted = self.wanted(if fits { &matched_tokens } else { &[] });
            let left = std::slice::from_ref(&failed);
            let placed = group.as_ref().and_then(|group| place_worker(group, wanted, &view.config, left));
            if let Some(placed) = placed {
                failed = Arc::clone(&placed.load.backend);
                if let Some((body, load)) = self.send(&resumed, placed, &view).await {
                    Metrics::continued("replayed");
                    return Continued::Elsewhere(body, load);
                }
            }
            if until <= Instant::now() {
                Metrics::continued("failed");
                return Continued::Nowhere;
            }
            tokio::time::sleep(WAIT_INTERVAL).await;
        }
    }

    fn wait(&self) -> Duration {
        crate::config::millis(self.shared.view().config.retry.continuation_wait_ms)
    }

    /// Goes on at `to`; else where the request was, and else anywhere.
    async fn follow(
        &self,
        resumed: Option<ResumeHead>,
        to: &str,
        source: &Arc<Backend>,
        sequence: &str,
    ) -> Continued {
        let view = self.shared.view();
        let placed = self.group(&view).and_then(|group| place_at(&group, self.wanted(&[]), to));
        if let (Some(resumed), Some(placed)) = (&resumed, placed)
            && let Some((body, load)) = self.send(resumed, placed, &view).await
        {
            Metrics::continued("moved");
            return Continued::Elsewhere(body, load);
        }
        let path = format!("/sequences/{sequence}/thaw");
        let thawing = self.call(source, &path, Vec::new());
        if let Ok(Some(StatusCode::OK)) = tokio::time::timeout(THAW_TIMEOUT, thawing).await {
            Metrics::continued("stayed");
            return Continued::Here;
        }
        let Some(resumed) = resumed else {
            Metrics::continued("failed");
            return Continued::Nowhere;
        };
        self.replay(ResumeHead { ticket: None, ..resumed }, source).await
    }

    /// Sends the request to a worker that goes on with it.
    async fn send(
        &self,
        resumed: &ResumeHead,
        placed: Placed,
        view: &View,
    ) -> Option<(WorkerBody, LoadGuard)> {
        let Placed { load, .. } = placed;
        let outgoing = Outgoing { resumed: Some(resumed.clone()), ..self.outgoing.clone() };
        let config = &view.config;
        let call = outgoing.resume_call(config)?;
        match exchange(&self.shared, &load.backend, &call).await {
            Ok(response) if response.status() == StatusCode::OK => Some((response.into_body(), load)),
            Ok(response) => {
                let status = response.status().as_u16();
                tracing::debug!(worker = %load.backend.id, status, "the worker does not go on with a request");
                None
            }
            Err(failure) => {
                load.backend.record(failure.outcome(), &config.breaker);
                None
            }
        }
    }

    async fn ask_to_move(&self, source: &Arc<Backend>, sequence: &str) {
        // It does not move to itself, nor to a worker that has refused it.
        let mut left = vec![Arc::clone(source)];
        while left.len() <= MOVE_TRIES {
            let view = self.shared.view();
            let Some(group) = self.group(&view) else { return };
            // Its load counts from now on, so that the requests of a worker that drains are spread.
            let placed = place_worker(&group, self.wanted(&[]), &view.config, &left);
            let Some(Placed { load, .. }) = placed else { return };
            let request = MoveRequest { to: load.backend.base.clone() };
            let body = serde_json::to_vec(&request).unwrap_or_default();
            let path = format!("/sequences/{sequence}/move");
            let moving = self.call(source, &path, body);
            match tokio::time::timeout(MOVE_TIMEOUT, moving).await {
                // It moves, or has ended. The stream tells, also if the worker is gone.
                Ok(None | Some(StatusCode::OK | StatusCode::NOT_FOUND | StatusCode::CONFLICT)) | Err(_) => {
                    return;
                }
                Ok(Some(_)) => left.push(Arc::clone(&load.backend)),
            }
        }
    }

    /// Calls a worker; the status of its answer, `None` if there is none.
    async fn call(&self, worker: &Backend, path: &str, body: Vec<u8>) -> Option<StatusCode> {
        let mut request = http::Request::new(Full::new(body.into()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = format!("{}{path}", worker.base).parse().ok()?;
        let mut headers = HeaderMap::new();
        headers.extend(self.shared.cluster_header.clone());
        *request.headers_mut() = headers;
        let response = kvik_proto::client::send(&self.shared.http, request).await.ok()?;
        let status = response.status();
        // Read to its end, so that the connection can be used again.
        let _ = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
        Some(status)
    }
}
