//! The fleet as pages get it.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvik_proto::index::ModelStats;
use serde::Serialize;

use super::figures::{ByName, Counts, Gauges};
use crate::upstream::backend::{Backend, BackendKind};
use crate::upstream::breaker::State;
use crate::upstream::fleet::Fleet;

/// Everything that changes.
#[derive(Debug, Serialize)]
pub(super) struct FleetReport {
    /// Unix time, in milliseconds.
    pub(super) time_ms: u64,
    pub(super) version: &'static str,
    pub(super) gateway: GatewayReport,
    /// By name.
    pub(super) workers: Vec<WorkerReport>,
}

/// The gateway itself.
#[derive(Debug, Default, Serialize)]
pub(super) struct GatewayReport {
    pub(super) requests_per_s: f64,
    pub(super) failed_per_s: f64,
    pub(super) outstanding_requests: f64,
    pub(super) queue_length: f64,
    /// Over the last minute.
    pub(super) ttft_p50_s: Option<f64>,
    pub(super) ttft_p95_s: Option<f64>,
    pub(super) is_coordinator_connected: bool,
    pub(super) has_index: bool,
    /// Choices of a worker since the start, by reason.
    pub(super) decisions: ByName,
}

/// A worker or another engine.
#[derive(Debug, Serialize)]
pub(super) struct WorkerReport {
    pub(super) id: String,
    /// `worker`, or `engine` where it is not kvik's own.
    pub(super) kind: &'static str,
    pub(super) address: String,
    pub(super) models: Vec<String>,
    /// `prefill`, `decode` or `both`.
    pub(super) role: &'static str,
    /// `ready`; `draining`; `down`: its breaker is open; `silent`: it did not answer just now.
    pub(super) state: &'static str,
    /// Share of the ring.
    pub(super) weight: f64,
    /// Estimated tokens of the requests that this gateway has sent to it.
    pub(super) outstanding_tokens: u64,
    /// How fast it computed prompts lately.
    pub(super) prefill_tokens_per_s: Option<f64>,
    /// Pairs of block and tier that the index knows of it.
    pub(super) index_blocks: Option<u64>,
    /// Whether the index misses events of it.
    pub(super) is_unsure: bool,
    /// How it is; absent while it does not say.
    pub(super) gauges: Option<Gauges>,
    /// What it does in a second, over the time since the last look.
    pub(super) rates: Option<Counts>,
    /// What it has done since its start.
    pub(super) totals: Option<Counts>,
}

/// A backend and what the fleet says of it.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) backend: Arc<Backend>,
    models: Vec<String>,
    role: &'static str,
    takes_requests: bool,
    weight: f64,
}

/// What the index knows of a worker.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Indexed {
    n_blocks: u64,
    is_unsure: bool,
}

/// The backends of all models, each once, by name.
pub(super) fn list(fleet: &Fleet) -> Vec<Listed> {
    let mut listed: BTreeMap<&str, Listed> = BTreeMap::new();
    for group in &fleet.groups {
        for (seat, weight) in group.seats.iter().zip(&group.weights) {
            let found = listed.entry(&seat.backend.id).or_insert_with(|| Listed {
                backend: Arc::clone(&seat.backend),
                models: Vec::new(),
                role: seat.part.role.as_str(),
                takes_requests: seat.takes_requests,
                weight: *weight,
            });
            found.models.push(group.model.clone());
        }
    }
    listed.into_values().collect()
}

/// What the index knows, by worker.
pub(super) fn indexed(models: &[ModelStats]) -> BTreeMap<String, Indexed> {
    let mut indexed: BTreeMap<String, Indexed> = BTreeMap::new();
    let sources = models.iter().flat_map(|model| &model.books).flat_map(|book| &book.sources);
    for source in sources {
        let found = indexed.entry(source.worker.clone()).or_default();
        found.n_blocks += source.n_blocks.unwrap_or(0);
        found.is_unsure |= source.is_unsure;
    }
    indexed
}

impl Listed {
    /// The report on a worker that `answers`, or not.
    pub(super) fn report(
        self,
        answers: bool,
        indexed: Option<Indexed>,
        figures: Option<(Gauges, Counts)>,
        rates: Option<Counts>,
    ) -> WorkerReport {
        let Self { backend, models, role, takes_requests, weight } = self;
        let state = match backend.breaker_state() {
            State::Open | State::HalfOpen => "down",
            State::Closed if !answers => "silent",
            State::Closed if !takes_requests => "draining",
            State::Closed => "ready",
        };
        let (gauges, totals) = figures.unzip();
        WorkerReport {
            id: backend.id.clone(),
            kind: match backend.kind {
                BackendKind::Worker => "worker",
                BackendKind::OpenAi => "engine",
            },
            address: backend.base.clone(),
            models,
            role,
            state,
            weight,
            outstanding_tokens: backend.outstanding_tokens(),
            prefill_tokens_per_s: backend.prefill_speed.tokens_per_s(),
            index_blocks: indexed.map(|indexed| indexed.n_blocks),
            is_unsure: indexed.is_some_and(|indexed| indexed.is_unsure),
            gauges,
            rates,
            totals,
        }
    }
}
