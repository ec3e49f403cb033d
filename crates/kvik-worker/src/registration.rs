//! Membership with the coordinators.
//!
//! The worker registers with the first coordinator that takes it and sends heartbeats with its load.
//! A coordinator that does not know it (404: it has restarted, or heartbeats were lost) makes it
//! register again at once. One that cannot be reached is passed over for the next; when none can,
//! attempts go on with growing, random pauses, because a whole fleet may be looking for the same
//! coordinator. Pauses between heartbeats stay within the interval: a new leader takes the members over
//! and forgets those that it has not heard of for three intervals. The coordinator may ask the worker to
//! drain; when it drains, it leaves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_proto::client::{ClientError, CoordinatorClient};
use kvik_proto::coordinator::{
    DeregisterRequest, HeartbeatRequest, RegisterRequest, WorkerInfo, WorkerLoad, WorkerState as MemberState,
};
use kvik_runtime::shutdown::Shutdown;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::engine_thread::EngineHandle;
use crate::metrics::WorkerMetrics;
use crate::state::{Loaded, WorkerState, random_seed};
use crate::store::KvStore;

/// First pause after a failure.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Shortest time between two heartbeats, whatever a coordinator asks for.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// A worker's membership.
#[derive(Debug)]
pub(crate) struct Registration {
    clients: Vec<CoordinatorClient>,
    /// The one that answered last.
    client_idx: usize,
    worker: WorkerInfo,
    /// The store below the engine, which other nodes may read from.
    store: Option<Arc<dyn KvStore>>,
    engine: EngineHandle,
    metrics: WorkerMetrics,
    draining: CancellationToken,
    /// Time between two heartbeats, as the coordinator asked for it.
    interval: Duration,
    longest_pause: Duration,
    pause: Duration,
    /// Until when heartbeats that fail are not logged again.
    quiet_until: Option<Instant>,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    RegisterAfter(Duration),
    HeartbeatAfter(Duration),
}

impl Registration {
    pub(crate) fn new(
        clients: Vec<CoordinatorClient>,
        state: &WorkerState,
        loaded: &Arc<Loaded>,
        epoch: u64,
        address: &str,
    ) -> Self {
        let worker = WorkerInfo {
            id: state.id.clone(),
            epoch,
            address: address.to_owned(),
            model: loaded.model_name.clone(),
            capacity_tokens: loaded.capacity_tokens,
            weight: state.config.weight,
            role: state.config.role,
            store: None,
        };
        Self {
            clients,
            client_idx: 0,
            worker,
            store: loaded.store.clone(),
            engine: loaded.engine.clone(),
            metrics: loaded.metrics.clone(),
            draining: state.draining.clone(),
            interval: SHORTEST_INTERVAL,
            longest_pause: state.config.coordinator_backoff(),
            pause: FIRST_PAUSE,
            quiet_until: None,
        }
    }

    /// Remains a member until the worker drains; `_left` is dropped when it has left.
    pub(crate) async fn run(mut self, shutdown: Shutdown, _left: DropGuard) {
        let draining = self.draining.clone();
        tokio::select! {
            () = self.remain() => {}
            () = draining.cancelled() => {}
            () = shutdown.draining() => {}
        }
        self.metrics.registered.set(0.0);
        tokio::select! {
            () = self.leave() => {}
            () = shutdown.stopping() => {}
        }
    }

    /// Ends only when the engine has.
    async fn remain(&mut self) {
        let mut next = Next::RegisterAfter(Duration::ZERO);
        // A worker whose engine is gone must not attract requests.
        while self.engine.is_alive() {
            next = match next {
                Next::RegisterAfter(pause) => {
                    tokio::time::sleep(pause).await;
                    self.register().await
                }
                Next::HeartbeatAfter(pause) => {
                    tokio::time::sleep(pause).await;
                    self.heartbeat().await
                }
            };
        }
    }

    async fn register(&mut self) -> Next {
        let is_draining = self.draining.is_cancelled();
        let state = if is_draining { MemberState::Draining } else { MemberState::Ready };
        self.worker.store = self.peer_address();
        let request = RegisterRequest { worker: self.worker.clone(), load: self.load(), state };
        for attempt in 0..self.clients.len() {
            let idx = (self.client_idx + attempt) % self.clients.len();
            match self.clients[idx].register(&request).await {
                Ok(answer) => {
                    self.answered(idx);
                    tracing::info!(
                        worker = %self.worker.id,
                        coordinator = self.clients[idx].base(),
                        term = answer.term,
                        "registered with a coordinator"
                    );
                    self.interval =
                        Duration::from_millis(answer.heartbeat_interval_ms).max(SHORTEST_INTERVAL);
                    return Next::HeartbeatAfter(self.interval);
                }
                Err(error) => self.warn(&error, "failed to register"),
            }
        }
        self.metrics.registered.set(0.0);
        Next::RegisterAfter(self.next_pause())
    }

    async fn heartbeat(&mut self) -> Next {
        // A daemon that came, went or moved is sent as a correction of what was registered.
        if self.worker.store != self.peer_address() {
            return Next::RegisterAfter(Duration::ZERO);
        }
        let is_logged = self.quiet_until.is_none_or(|until| until <= Instant::now());
        let request =
            HeartbeatRequest { id: self.worker.id.clone(), epoch: self.worker.epoch, load: self.load() };
        for attempt in 0..self.clients.len() {
            let idx = (self.client_idx + attempt) % self.clients.len();
            match self.clients[idx].heartbeat(&request).await {
                Ok(answer) => {
                    self.answered(idx);
                    if answer.state == MemberState::Draining {
                        tracing::info!(worker = %self.worker.id, "the coordinator asks the worker to drain");
                        self.draining.cancel();
                    }
                    return Next::HeartbeatAfter(self.interval);
                }
                Err(ClientError::Refused { status: 404, .. }) => {
                    self.client_idx = idx;
                    return Next::RegisterAfter(Duration::ZERO);
                }
                Err(error) if is_logged => self.warn(&error, "failed to send a heartbeat"),
                Err(_) => {}
            }
        }
        self.metrics.registered.set(0.0);
        let pause = self.next_pause();
        if is_logged {
            self.quiet_until = Some(Instant::now() + pause);
        }
        Next::HeartbeatAfter(pause.min(self.interval))
    }

    /// Notes the coordinator that took the worker.
    fn answered(&mut self, client_idx: usize) {
        self.client_idx = client_idx;
        self.pause = FIRST_PAUSE;
        self.quiet_until = None;
        self.metrics.registered.set(1.0);
    }

    async fn leave(&self) {
        let request = DeregisterRequest { id: self.worker.id.clone(), epoch: self.worker.epoch };
        for attempt in 0..self.clients.len() {
            let client = &self.clients[(self.client_idx + attempt) % self.clients.len()];
            match client.deregister(&request).await {
                // To 404 there is nothing to leave: it does not know the worker.
                Ok(()) | Err(ClientError::Refused { status: 404, .. }) => return,
                Err(error) => self.warn(&error, "failed to deregister"),
            }
        }
    }

    /// A random time up to the current pause, which doubles.
    fn next_pause(&mut self) -> Duration {
        let share = (random_seed() >> 11) as f64 / (1_u64 << 53) as f64;
        let pause = self.pause.mul_f64(0.5 + share / 2.0);
        self.pause = (self.pause * 2).min(self.longest_pause);
        pause
    }

    fn peer_address(&self) -> Option<String> {
        self.store.as_ref().and_then(|store| store.peer_address())
    }

    fn load(&self) -> WorkerLoad {
        let snapshot = self.engine.last_snapshot();
        WorkerLoad {
            running: snapshot.n_running as u64,
            waiting: snapshot.n_waiting as u64,
            outstanding_tokens: snapshot.outstanding_tokens as u64,
            kv_usage: snapshot.kv_usage(),
        }
    }

    fn warn(&self, error: &ClientError, what: &'static str) {
        tracing::warn!(worker = %self.worker.id, %error, "{what}");
    }
}
