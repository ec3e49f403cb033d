//! The task that looks at the fleet for the page.
//!
//! Each look asks every worker for `/metrics`, many at a time and each for less than a second. A worker whose breaker is open is
//! not asked: it is known to be away, and would make every look as long as the time that it has.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full, Limited};
use kvik_proto::client::send;
use kvik_runtime::telemetry;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use super::figures::{Counts, GatewayFigures, Gauges, WorkerFigures};
use super::fleet_report::{FleetReport, GatewayReport, Listed, indexed, list};
use super::series::{End, INTERVAL, Series};
use crate::state::Shared;
use crate::upstream::backend::{Backend, BackendKind};

/// Time between two looks while a page is open.
const TICK: Duration = Duration::from_secs(1);
/// Time that a worker has for its figures.
const TIMEOUT: Duration = Duration::from_millis(800);
/// Workers that are asked at a time.
const MAX_ASKED: usize = 64;
/// Longest `/metrics` that is read, in bytes.
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// Time that the index has for its figures; a server that keeps it may be slow.
const INDEX_TIMEOUT: Duration = Duration::from_millis(500);

/// What is kept between two looks.
#[derive(Debug, Default)]
struct Collector {
    series: Series,
    /// By the number of the backend, which stands for one life of it.
    before: HashMap<u64, (Instant, Counts)>,
    /// The gateway's figures of the last look.
    gateway_before: Option<(Instant, GatewayFigures)>,
}

/// Looks until everything stops.
pub(crate) async fn run(shared: Arc<Shared>) {
    let shutdown = shared.shutdown.clone();
    tokio::select! {
        () = collect(&shared) => {}
        () = shutdown.stopping() => {}
    }
}

async fn collect(shared: &Arc<Shared>) {
    let mut collector = Collector::default();
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut point_began: Option<Instant> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shared.board.opened() => {}
        }
        let is_point_due = point_began.is_none_or(|began| INTERVAL <= began.elapsed());
        if !is_point_due && shared.board.n_pages() == 0 {
            continue;
        }
        let report = collector.look(shared).await;
        if is_point_due {
            let seconds = point_began.map_or(INTERVAL, |began| began.elapsed()).as_secs_f64();
            collector.end_point(&report, seconds);
            point_began = Some(Instant::now());
        }
        match serde_json::to_string(&report) {
            Ok(fleet) => shared.board.show(fleet, collector.series.points()),
            Err(error) => tracing::error!(%error, "the fleet cannot be shown"),
        }
    }
}

impl Collector {
    async fn look(&mut self, shared: &Arc<Shared>) -> FleetReport {
        let listed = list(&shared.view().fleet);
        let mut answers = ask_all(shared, &listed).await;
        let models = match &shared.indexer {
            Some(indexer) => tokio::time::timeout(INDEX_TIMEOUT, indexer.stats()).await.ok(),
            None => None,
        };
        let indexed = indexed(&models.and_then(Result::ok).unwrap_or_default());
        let now = Instant::now();
        let mut before = std::mem::take(&mut self.before);
        let workers = listed.into_iter().map(|listed| {
            let (id, number) = (listed.backend.id.clone(), listed.backend.number);
            let answer = answers.remove(&number);
            let earlier = before.remove(&number);
            let rates = answer.as_ref().zip(earlier.as_ref()).map(|(figures, (then, counts))| {
                let done = figures.counts.since(counts);
                self.series.add(&done);
                done.per_second((now - *then).as_secs_f64().max(1e-3))
            });
            // What does not arrive now is counted with the next answer.
            let last = answer.as_ref().map(|figures| (now, figures.counts.clone())).or(earlier);
            self.before.extend(last.map(|last| (number, last)));
            let figures: Option<(Gauges, Counts)> = answer.map(|figures| (figures.gauges, figures.counts));
            listed.report(figures.is_some(), indexed.get(&id).copied(), figures, rates)
        });
        let workers = workers.collect();
        FleetReport {
            time_ms: unix_time().as_millis() as u64,
            version: env!("CARGO_PKG_VERSION"),
            gateway: self.look_here(shared, now),
            workers,
        }
    }

    /// The gateway's own part of a look.
    fn look_here(&mut self, shared: &Shared, now: Instant) -> GatewayReport {
        let figures = GatewayFigures::read(&telemetry::render_metrics());
        let recent = self.series.recent().cloned().unwrap_or_default();
        let first_tokens = figures.first_tokens.since(&recent.first_tokens);
        let mut report = GatewayReport {
            outstanding_requests: figures.outstanding_requests,
            queue_length: figures.queue_length,
            ttft_p50_s: first_tokens.quantile(0.5),
            ttft_p95_s: first_tokens.quantile(0.95),
            is_coordinator_connected: figures.is_coordinator_connected,
            has_index: shared.indexer.is_some(),
            decisions: figures.decisions.clone(),
            ..GatewayReport::default()
        };
        if let Some((then, before)) = &self.gateway_before {
            let seconds = (now - *then).as_secs_f64().max(1e-3);
            report.requests_per_s = (figures.ok_requests - before.ok_requests).max(0.0) / seconds;
            report.failed_per_s = (figures.failed_requests - before.failed_requests).max(0.0) / seconds;
        }
        self.gateway_before = Some((now, figures));
        report
    }

    fn end_point(&mut self, report: &FleetReport, seconds: f64) {
        let gauges = || report.workers.iter().filter_map(|worker| worker.gauges.as_ref());
        let end = End {
            time_s: report.time_ms / 1000,
            seconds,
            running: gauges().map(|gauges| gauges.running).sum(),
            waiting: gauges().map(|gauges| gauges.waiting).sum(),
            workers: gauges().count(),
        };
        if let Some((_, gateway)) = &self.gateway_before {
            self.series.end(end, gateway);
        }
    }
}

/// Asks all workers; those that do not answer are left out.
async fn ask_all(shared: &Arc<Shared>, listed: &[Listed]) -> HashMap<u64, WorkerFigures> {
    let mut asking = JoinSet::new();
    let permits = Arc::new(Semaphore::new(MAX_ASKED));
    for backend in listed.iter().map(|listed| &listed.backend).filter(|backend| backend.is_usable()) {
        let (shared, backend, permits) = (Arc::clone(shared), Arc::clone(backend), Arc::clone(&permits));
        asking.spawn(async move {
            let _permit = permits.acquire_owned().await;
            (backend.number, ask(&shared, &backend).await)
        });
    }
    let mut answers = HashMap::new();
    while let Some(asked) = asking.join_next().await {
        if let Ok((number, Some(figures))) = asked {
            answers.insert(number, figures);
        }
    }
    answers
}

/// Asks a worker; none if it does not answer. One that has no figures has none that are above 0.
async fn ask(shared: &Shared, backend: &Backend) -> Option<WorkerFigures> {
    let request = Request::get(format!("{}/metrics", backend.base)).body(Full::default()).ok()?;
    let asking = async {
        let response = send(&shared.http, request).await.ok()?;
        let is_success = response.status().is_success();
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await.ok()?;
        Some(if is_success { body.to_bytes() } else { Bytes::new() })
    };
    let text = tokio::time::timeout(TIMEOUT, asking).await.ok()??;
    let name = match backend.kind {
        BackendKind::Worker => Some(backend.id.as_str()),
        BackendKind::OpenAi => None,
    };
    Some(WorkerFigures::read(&String::from_utf8_lossy(&text), name))
}

fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
