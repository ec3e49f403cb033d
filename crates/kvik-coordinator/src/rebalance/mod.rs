//! The task that spreads running requests over the workers, if it is turned on.
//!
//! Only the leader does it. Heartbeats tell where loads are uneven; before anything moves the two workers are asked for the
//! requests that they have now, and a worker that does not answer is skipped. The coordinator asks the source to move a request, as
//! `kvctl move` does: it offers the request to the destination, which refuses while it drains, and the request's gateway
//! lets it go on there. So a move that fails changes nothing, and nothing is remembered of it that a next leader would need.

mod balance;

use std::sync::Arc;
use std::time::Duration;

use kvik_proto::client::{ClientError, HttpClient, WorkerClient};
use kvik_proto::coordinator::{Member, WorkerState};
use kvik_proto::moves::{MoveRequest, RunningSequence};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::Tracer;
use kvik_runtime::trust::Trust;
use tokio::sync::watch;
use tokio::time::Instant;

pub(crate) use self::balance::BalanceSettings;
use self::balance::{Balance, BalancedWorker, Transfer};
use crate::metrics;
use crate::publish::Publisher;
use crate::state::Role;

/// Longest time that a moved request is waited for to leave its source: its gateway lets it go on within milliseconds.
const LEAVING_TIME: Duration = Duration::from_secs(5);

/// The task's state.
#[derive(Debug)]
pub(crate) struct Rebalancer {
    balance: Balance,
    interval: Duration,
    http: HttpClient,
    trust: Arc<Trust>,
    tracer: Tracer,
    role: watch::Receiver<Role>,
    publisher: Publisher,
    /// Where time is counted from.
    origin: Instant,
    /// A request whose KV is at its destination and that its source still lists.
    leaving: Option<Leaving>,
}

#[derive(Debug)]
struct Leaving {
    client: WorkerClient,
    request: String,
    since: Instant,
}

impl Rebalancer {
    pub(crate) fn new(
        settings: BalanceSettings,
        http: HttpClient,
        trust: Arc<Trust>,
        tracer: Tracer,
        role: watch::Receiver<Role>,
        publisher: Publisher,
    ) -> Self {
        Self {
            balance: Balance::new(settings),
            interval: settings.move_interval,
            http,
            trust,
            tracer,
            role,
            publisher,
            origin: Instant::now(),
            leaving: None,
        }
    }

    /// Moves requests until the service drains.
    pub(crate) async fn run(mut self, shutdown: Shutdown) {
        loop {
            let turn = async {
                let began = Instant::now();
                if self.role.borrow().leads(began)
                    && let Err(error) = self.turn().await
                {
                    metrics::rebalanced("unreachable");
                    tracing::debug!(%error, "no request moves: a worker does not answer");
                }
                tokio::time::sleep_until(began + self.interval).await;
            };
            tokio::select! {
                () = turn => {}
                // A move that has begun goes on without this.
                () = shutdown.draining() => return,
            }
        }
    }

    /// Moves one request, if that helps.
    async fn turn(&mut self) -> Result<(), ClientError> {
        let Some(published) = self.publisher.current() else { return Ok(()) };
        let members = &published.snapshot.members;
        let mut workers: Vec<BalancedWorker> = members.iter().map(balanced).collect();
        let Some(Transfer { from, to, .. }) = self.balance.choose(&workers, self.now()) else {
            return Ok(());
        };
        if self.is_leaving().await? {
            return Ok(());
        }
        // Loads of heartbeats are as old as those; these are of now.
        let source = self.client(&members[from]);
        let running = source.sequences().await?.sequences;
        workers[from].n_sequences = n_sequences(&running);
        workers[to].n_sequences = n_sequences(&self.client(&members[to]).sequences().await?.sequences);
        let now = self.now();
        let chosen = self.balance.choose(&workers, now);
        let Some(transfer) = chosen.filter(|transfer| (transfer.from, transfer.to) == (from, to)) else {
            return Ok(());
        };
        let Some(request) = self.balance.pick(&running, transfer.max_sequences, now) else {
            metrics::rebalanced("none_fits");
            return Ok(());
        };
        let (from, to) = (&members[from].worker, &members[to].worker);
        let mut span = self.tracer.work("rebalance");
        span.set("kvik.request", request.id.clone());
        span.set("kvik.from", from.id.clone());
        span.set("kvik.to", to.id.clone());
        match source.move_sequence(&request.id, &MoveRequest { to: to.address.clone() }).await {
            Ok(_) => {
                metrics::rebalanced("moved");
                tracing::info!(request = %request.id, from = %from.id, to = %to.id, "moved a request to spread the load");
                self.leaving =
                    Some(Leaving { client: source, request: request.id.clone(), since: Instant::now() });
            }
            Err(error) => {
                span.fail("the request stays where it is");
                metrics::rebalanced("refused");
                tracing::info!(request = %request.id, from = %from.id, to = %to.id, %error, "a request stays where it is");
            }
        }
        Ok(())
    }

    /// Whether the request that was moved last is still on its way, so that it would be counted where it is no more.
    async fn is_leaving(&mut self) -> Result<bool, ClientError> {
        let Some(Leaving { client, request, since }) = self.leaving.take() else { return Ok(false) };
        if LEAVING_TIME < since.elapsed() {
            return Ok(false);
        }
        // A worker that is gone has nothing that leaves it.
        let Ok(running) = client.sequences().await else { return Ok(false) };
        if !running.sequences.iter().any(|running| running.id == request) {
            return Ok(false);
        }
        self.leaving = Some(Leaving { client, request, since });
        Ok(true)
    }

    fn client(&self, member: &Member) -> WorkerClient {
        WorkerClient::new(self.http.clone(), &member.worker.address).with_header(self.trust.cluster_header())
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}

/// A member with the load of its last heartbeat.
fn balanced(member: &Member) -> BalancedWorker {
    BalancedWorker {
        id: member.worker.id.clone(),
        model: member.worker.model.clone(),
        weight: member.ring_weight,
        is_ready: member.state == WorkerState::Ready,
        n_sequences: member.load.running.saturating_add(member.load.waiting),
    }
}

/// Sequences of requests.
fn n_sequences(running: &[RunningSequence]) -> u64 {
    running.iter().fold(0, |sum, request| sum.saturating_add(request.outputs))
}
