//! One worker as the gateway sees it: address, load, breaker.
//!
//! The load is what this gateway itself has sent and not yet seen end, in estimated tokens; it is
//! never scraped, so it cannot lag. A [`LoadGuard`] holds a request's part of it: that of its prompt until the
//! first token of the answer, that of the answer until its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use http::{HeaderValue, Uri};
use kvik_runtime::telemetry::MetricSet;
use metrics::Gauge;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::BreakerConfig;
use crate::metrics::{BREAKER_STATE, OUTSTANDING_TOKENS};
use crate::route::Route;
use crate::upstream::breaker::{Breaker, Outcome, State};
use crate::upstream::links::Links;
use crate::upstream::speed::Speed;

/// The number of the next backend.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// Which APIs a backend has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackendKind {
    /// A worker of kvik: the `OpenAI` API and its own.
    Worker,
    /// Another engine: the `OpenAI` API only.
    OpenAi,
}

impl BackendKind {
    /// Where this kind serves `route`. Engines without `/generate` get it as one of the others.
    pub(crate) fn path(self, route: Route) -> &'static str {
        match (route, self) {
            (Route::Generate, Self::Worker) => "/inference/generate",
            (Route::Generate, Self::OpenAi) => Route::Completions.name(),
            (route, _) => route.name(),
        }
    }
}

/// A worker or engine that takes requests.
#[derive(Debug)]
pub(crate) struct Backend {
    /// A worker's id; the address of another engine.
    pub(crate) id: String,
    pub(crate) kind: BackendKind,
    /// Stands for this life of it within the process.
    pub(crate) number: u64,
    /// One life of a worker; 0 for other engines.
    pub(crate) epoch: u64,
    /// Without a slash at the end.
    pub(crate) base: String,
    /// Host and port, as `ip:port` where the address has an IP.
    pub(crate) endpoint: String,
    /// Where each route goes; `None` if the address cannot be used.
    uris: Option<Box<[Uri; Route::ALL.len()]>>,
    /// Connections of its own; `None` if it is reached through the client that all share.
    pub(crate) links: Option<Arc<Links>>,
    /// Its id as answers show it.
    pub(crate) header: Option<HeaderValue>,
    outstanding_tokens: AtomicU64,
    /// How fast it computes prompts.
    pub(crate) prefill_speed: Speed,
    /// How fast it takes over KV that another engine computed.
    pub(crate) transfer_speed: Speed,
    breaker: Mutex<Breaker>,
    /// Copy of the breaker's state that is read without its lock.
    is_closed: AtomicBool,
    /// Health questions in a row that were not answered.
    n_silent: AtomicU32,
    pub(crate) is_probed: AtomicBool,
    next_probe: Mutex<Instant>,
    /// Wakes requests that wait for this backend when it is found not to answer at all.
    pub(crate) unresponsive: Notify,
    /// Whether a byte of an answer came since its health was asked last: a worker that streams lives,
    /// however late it answers questions.
    is_heard: AtomicBool,
    /// Cancelled, and replaced, when it is found not to answer at all: the answers that wait end.
    silence: Mutex<CancellationToken>,
    tokens_gauge: Gauge,
    breaker_gauge: Gauge,
    /// `None` once it has left the fleet: what it still answers is shown nowhere.
    metrics: Mutex<Option<MetricSet>>,
}

/// A request's part of a backend's load; given back when dropped.
#[derive(Debug)]
pub(crate) struct LoadGuard {
    pub(crate) backend: Arc<Backend>,
    /// What the request was when it came.
    pub(crate) n_tokens: u64,
    /// The part of it that is still counted.
    n_counted_tokens: u64,
    /// The part of it that ends with the answer.
    n_output_tokens: u64,
    /// When it came; `None` if the time to its first token says nothing about the backend's speed.
    since: Option<Instant>,
    /// Cancelled when the backend is found not to answer at all.
    pub(crate) silence: CancellationToken,
}

// === impl Backend ===

impl Backend {
    pub(crate) fn new(id: String, kind: BackendKind, epoch: u64, address: &str) -> Self {
        let now = Instant::now();
        let metrics = MetricSet::new(&[("worker", &id)]);
        let base = address.trim_end_matches('/').to_owned();
        let uris = Route::ALL
            .iter()
            .map(|route| format!("{base}{}", kind.path(*route)).parse())
            .collect::<Result<Vec<Uri>, _>>()
            .ok()
            .and_then(|uris| Box::<[Uri; Route::ALL.len()]>::try_from(uris).ok());
        if uris.is_none() {
            tracing::warn!(worker = %id, %address, "the worker's address cannot be used");
        }
        Self {
            tokens_gauge: metrics.gauge(OUTSTANDING_TOKENS),
            breaker_gauge: metrics.gauge(BREAKER_STATE),
            metrics: Mutex::new(Some(metrics)),
            header: HeaderValue::from_str(&id).ok(),
            id,
            kind,
            // Relaxed: only that it is given out once counts.
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            epoch,
            endpoint: endpoint_of(&base),
            base,
            links: uris.as_ref().and_then(|uris| Links::new(&uris[0])).map(Arc::new),
            uris,
            outstanding_tokens: AtomicU64::new(0),
            prefill_speed: Speed::default(),
            transfer_speed: Speed::default(),
            breaker: Mutex::new(Breaker::new(now)),
            is_closed: AtomicBool::new(true),
            n_silent: AtomicU32::new(0),
            is_probed: AtomicBool::new(false),
            next_probe: Mutex::new(now),
            unresponsive: Notify::new(),
            is_heard: AtomicBool::new(false),
            silence: Mutex::new(CancellationToken::new()),
        }
    }

    /// Notes that it has left the fleet: its metrics are no longer shown.
    pub(crate) fn leave(&self) {
        *self.metrics.lock() = None;
    }

    /// Where `route` goes.
    pub(crate) fn uri(&self, route: Route) -> Option<&Uri> {
        self.uris.as_ref()?.get(route as usize)
    }

    /// Whether it may get requests.
    pub(crate) fn is_usable(&self) -> bool {
        // Relaxed: a request that slips through while the breaker opens is like one before it.
        self.uris.is_some() && self.is_closed.load(Ordering::Relaxed)
    }

    /// Estimated tokens of the requests it has; of a stream that has begun, of its answer only.
    pub(crate) fn outstanding_tokens(&self) -> u64 {
        // Relaxed: whether a choice still holds is decided by `try_load`; ends may come at any time.
        self.outstanding_tokens.load(Ordering::Relaxed)
    }

    /// Adds a request to its load: all its tokens, of which the last `n_output_tokens` are its answer. `None` if its load
    /// has grown beyond `max_load` since: what was chosen by that load must be chosen again.
    ///
    /// At least one token of it is the answer's, so that a backend which answers something always has a load.
    pub(crate) fn try_load(
        self: &Arc<Self>,
        max_load: u64,
        n_tokens: u64,
        n_output_tokens: u64,
    ) -> Option<LoadGuard> {
        let n_tokens = n_tokens.max(1);
        let add = |load: u64| (load <= max_load).then(|| load.saturating_add(n_tokens));
        // Relaxed: the comparison and the addition are one step on one number, and nothing else is read by it.
        self.outstanding_tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        self.tokens_gauge.increment(n_tokens as f64);
        Some(LoadGuard {
            backend: Arc::clone(self),
            n_tokens,
            n_counted_tokens: n_tokens,
            n_output_tokens: n_output_tokens.clamp(1, n_tokens),
            since: Some(Instant::now()),
            silence: self.silence.lock().clone(),
        })
    }

    /// Adds a request to its load, whatever that is.
    #[cfg(test)]
    pub(crate) fn load(self: &Arc<Self>, n_tokens: u64, n_output_tokens: u64) -> LoadGuard {
        self.try_load(u64::MAX, n_tokens, n_output_tokens).unwrap()
    }

    /// Notes a byte of an answer.
    pub(crate) fn hear(&self) {
        // Relaxed: a sign of life that is seen a question later does no harm. Read first, so that
        // streams do not fight for the line.
        if !self.is_heard.load(Ordering::Relaxed) {
            self.is_heard.store(true, Ordering::Relaxed);
        }
    }

    /// Tells the breaker how a request ended.
    pub(crate) fn record(&self, outcome: Outcome, config: &BreakerConfig) {
        self.change_breaker(|breaker| breaker.record(outcome, config, Instant::now()));
    }

    /// Time until it may get requests again.
    pub(crate) fn time_to_probe(&self) -> Duration {
        self.breaker.lock().time_to_probe(Instant::now())
    }

    /// The breaker's state.
    pub(crate) fn breaker_state(&self) -> State {
        self.breaker.lock().state()
    }

    /// Whether its health should be asked now, because its breaker or the interval says so.
    pub(crate) fn is_probe_due(&self, now: Instant) -> bool {
        let is_half_open = self.change_breaker(|breaker| breaker.start_probe(now));
        is_half_open || *self.next_probe.lock() <= now
    }

    /// Takes the answer to a question for its health. After `max_silent` missing answers in a row,
    /// with no byte of an answer between them, it counts as unresponsive: its breaker opens, and
    /// requests that wait for it or for the rest of its answer end.
    pub(crate) fn end_probe(
        &self,
        is_healthy: bool,
        max_silent: u32,
        interval: Duration,
        config: &BreakerConfig,
    ) {
        let now = Instant::now();
        *self.next_probe.lock() = now + interval;
        if let Some(links) = &self.links {
            links.close_idle(now);
        }
        // Relaxed: only one probe of a backend runs at a time.
        let lives = self.is_heard.swap(false, Ordering::Relaxed) || is_healthy;
        let n_silent = if lives { 0 } else { self.n_silent.load(Ordering::Relaxed).saturating_add(1) };
        self.n_silent.store(n_silent, Ordering::Relaxed);
        let is_unresponsive = max_silent <= n_silent;
        self.change_breaker(|breaker| {
            breaker.end_probe(is_healthy, config, now);
            if is_unresponsive {
                breaker.trip(config, now);
            }
        });
        if is_unresponsive {
            self.unresponsive.notify_waiters();
            std::mem::take(&mut *self.silence.lock()).cancel();
        }
    }

    fn change_breaker<T>(&self, change: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breaker = self.breaker.lock();
        let before = breaker.state();
        let value = change(&mut breaker);
        let after = breaker.state();
        if before != after {
            self.is_closed.store(after == State::Closed, Ordering::Relaxed);
            let number = match after {
                State::Closed => 0.0,
                State::HalfOpen => 1.0,
                State::Open => 2.0,
            };
            self.breaker_gauge.set(number);
            match (before, after) {
                (State::Closed, State::Open) => tracing::warn!(worker = %self.id, "breaker opened"),
                (_, State::Closed) => tracing::info!(worker = %self.id, "breaker closed"),
                _ => {}
            }
        }
        value
    }
}

/// Host and port of a base address, with the scheme's own port where it names none.
fn endpoint_of(base: &str) -> String {
    let (scheme, authority) = base.split_once("://").unwrap_or(("http", base));
    let authority = authority.split('/').next().unwrap_or_default();
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
    match (has_port, scheme) {
        (true, _) => authority.to_owned(),
        (false, "https") => format!("{authority}:443"),
        (false, _) => format!("{authority}:80"),
    }
}

// === impl LoadGuard ===

impl LoadGuard {
    /// Notes the first token of the answer: the prompt is computed and no load any more.
    pub(crate) fn end_prompt(&mut self) {
        if let Some(since) = self.since.take() {
            self.backend.prefill_speed.measure(self.n_tokens - self.n_output_tokens, since.elapsed());
        }
        self.keep(self.n_output_tokens);
    }

    /// Notes that the backend does not compute the prompt, or not alone: its time measures no speed.
    pub(crate) fn forget_speed(&mut self) {
        self.since = None;
    }

    fn keep(&mut self, n_tokens: u64) {
        let n_ended = self.n_counted_tokens.saturating_sub(n_tokens);
        self.n_counted_tokens -= n_ended;
        // Relaxed: as for the choice, see `outstanding_tokens`.
        self.backend.outstanding_tokens.fetch_sub(n_ended, Ordering::Relaxed);
        self.backend.tokens_gauge.decrement(n_ended as f64);
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.keep(0);
    }
}
