//! What is reported of engines: to `kvik engines status`, and to clients of the gateway.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::engine::handle::EngineHandle;
use crate::memory;
use crate::supervisor::Supervisor;

/// Seconds that the rates of a status look back.
const WINDOW_S: u64 = 60;

/// A controller and its engines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ControllerStatus {
    /// The controller's process.
    pub pid: u32,
    /// Where its gateway listens.
    pub gateway: String,
    /// The file that it was started with.
    pub config: String,
    /// The engines, by name.
    pub engines: Vec<EngineStatus>,
}

/// One engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// Its name.
    pub name: String,
    /// The model that requests name.
    pub model: String,
    /// `kvik`, `vllm`, `sglang` or `command`.
    pub kind: String,
    /// `asleep`, `queued`, `starting`, `ready`, `giving_way`, `falling_asleep`, `stopping` or `failed`.
    pub state: String,
    /// Time in this state.
    pub state_seconds: f64,
    /// Its address.
    pub url: String,
    /// Its process, if it has one.
    pub pid: Option<i32>,
    /// Requests that run.
    pub in_flight: usize,
    /// Requests that wait for it.
    pub waiting: usize,
    /// Requests since the controller began.
    pub total_requests: u64,
    /// Those of them that failed.
    pub failed_requests: u64,
    /// Requests a second over the last minute.
    pub requests_per_second: f64,
    /// Time since the end of its last request; 0 while one runs.
    pub idle_seconds: f64,
    /// Times that it started or woke.
    pub wakes: u64,
    /// From the request for it to its being ready, the last time.
    pub last_wake_seconds: Option<f64>,
    /// Failures in a row.
    pub failures: u32,
    /// Times that it broke and was started again.
    pub restarts: u64,
    /// Why it failed last, or did not fall asleep.
    pub reason: Option<String>,
    /// Its log.
    pub log: String,
    /// Its group in the ledger.
    pub memory_group: Option<String>,
    /// Bytes that the group holds.
    pub memory_held_bytes: Option<u64>,
    /// Bytes of them that are in use.
    pub memory_used_bytes: Option<u64>,
}

/// The states of all engines.
pub(crate) fn engines(supervisor: &Supervisor) -> Vec<EngineStatus> {
    let engines = supervisor.engines();
    let dir = supervisor.memory.read().dir.clone();
    let mut held = BTreeMap::new();
    for memory in engines.iter().filter_map(|engine| engine.memory.read().clone()) {
        held.entry(memory.device.clone()).or_insert_with(|| memory::held(&dir, &memory.device));
    }
    let of = |engine: &Arc<EngineHandle>| {
        let memory = engine.memory.read().clone();
        let group = memory.as_ref().and_then(|memory| held.get(&memory.device)?.get(&memory.group).copied());
        EngineStatus {
            memory_group: memory.map(|memory| memory.group),
            memory_held_bytes: group.map(|group| group.held_bytes),
            memory_used_bytes: group.map(|group| group.used_bytes),
            ..engine_status(supervisor, engine)
        }
    };
    engines.iter().map(of).collect()
}

fn engine_status(supervisor: &Supervisor, engine: &EngineHandle) -> EngineStatus {
    let now = Instant::now();
    let traffic = engine.traffic.lock().report(WINDOW_S, now);
    let state = supervisor.look(|machine, _| machine.engine(engine.name()).cloned());
    let since = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
    EngineStatus {
        name: engine.name().to_owned(),
        model: engine.config.model.clone(),
        kind: engine.config.kind.as_str().to_owned(),
        state: state.as_ref().map_or("gone", |state| state.phase.as_str()).to_owned(),
        state_seconds: state.as_ref().map_or(0.0, |state| since(state.since)),
        url: engine.config.url(),
        pid: *engine.pid.lock(),
        in_flight: state.as_ref().map_or(0, |state| state.in_flight),
        waiting: state.as_ref().map_or(0, |state| state.waiting),
        total_requests: traffic.total_requests,
        failed_requests: traffic.failed_requests,
        requests_per_second: traffic.requests_per_second,
        idle_seconds: state
            .as_ref()
            .filter(|state| state.in_flight == 0)
            .map_or(0.0, |state| since(state.last_used)),
        wakes: state.as_ref().map_or(0, |state| state.n_wakes),
        last_wake_seconds: state.as_ref().and_then(|state| state.last_wake).map(|wake| wake.as_secs_f64()),
        failures: state.as_ref().map_or(0, |state| state.n_failures),
        restarts: state.as_ref().map_or(0, |state| state.n_restarts),
        reason: state.and_then(|state| state.failure).map(|failure| failure.to_string()),
        log: engine.log.display().to_string(),
        memory_group: None,
        memory_held_bytes: None,
        memory_used_bytes: None,
    }
}
