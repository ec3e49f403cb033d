//! The task that owns the membership while this coordinator leads.
//!
//! All changes pass through it one by one: it applies a change, writes it down, publishes the
//! snapshot and only then answers. If a change cannot be written down, the lead is given up and the
//! membership with it, since the next leader may or may not know the change; the answer asks the caller to
//! try again.
//!
//! Changes are published at once; loads alone at most once a heartbeat interval, under the same
//! version. A process that stood still for longer than two intervals received no heartbeat, which is not the
//! members' fault: they get the time back.

use std::sync::Arc;
use std::time::Duration;

use kvik_proto::coordinator::{
    DeregisterRequest, HeartbeatRequest, RegisterRequest, RingConfig, Snapshot, WorkerInfo, WorkerLoad,
    WorkerState,
};
use kvik_proto::stores::{RegisterStoreRequest, StoreHeartbeatRequest, StoreInfo};
use kvik_runtime::shutdown::Shutdown;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::membership::{Change, MemberInfo, Membership, MembershipError};
use crate::metrics;
use crate::publish::Publisher;
use crate::state::{Role, StateBackend, StateError};

/// What the members and operators ask for.
#[derive(Debug)]
pub(crate) enum Command {
    Register(RegisterRequest, Reply<()>),
    Heartbeat(HeartbeatRequest, Reply<WorkerState>),
    Deregister(DeregisterRequest, Reply<()>),
    Drain(String, Reply<()>),
    RegisterStore(RegisterStoreRequest, Reply<()>),
    StoreHeartbeat(StoreHeartbeatRequest, Reply<WorkerState>),
    DeregisterStore(DeregisterRequest, Reply<()>),
}

/// Where the answer goes, with the term it was given in.
pub(crate) type Reply<T> = oneshot::Sender<Result<(T, u64), CommandError>>;

/// Why a command was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CommandError {
    Refused(MembershipError),
    /// Another coordinator leads, or will.
    NotLeader,
}

/// How the membership behaves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) heartbeat_interval: Duration,
    pub(crate) slow_start: Duration,
    pub(crate) ring: RingConfig,
}

/// The task's state.
#[derive(Debug)]
pub(crate) struct Leader<B> {
    backend: Arc<B>,
    settings: Settings,
    role: watch::Receiver<Role>,
    publisher: Publisher,
    /// Where time is counted from.
    origin: Instant,
    leadership: Option<Leadership>,
    /// The last term that was given up here; it does not come back.
    ended_term: Option<u64>,
}

/// A term in which this coordinator leads.
#[derive(Debug)]
struct Leadership {
    term: u64,
    membership: Membership<WorkerInfo>,
    stores: Membership<StoreInfo>,
    published_version: u64,
    has_new_loads: bool,
}

// === impl Leader ===

impl<B: StateBackend> Leader<B> {
    pub(crate) fn new(
        backend: Arc<B>,
        settings: Settings,
        role: watch::Receiver<Role>,
        publisher: Publisher,
    ) -> Self {
        Self {
            backend,
            settings,
            role,
            publisher,
            origin: Instant::now(),
            leadership: None,
            ended_term: None,
        }
    }

    /// Serves `commands` until the service stops.
    pub(crate) async fn run(mut self, mut commands: mpsc::Receiver<Command>, shutdown: Shutdown) {
        let mut beat = tokio::time::interval(self.settings.heartbeat_interval);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut woke = Instant::now();
        loop {
            self.follow_role().await;
            let deadline = self.next_deadline();
            let command = tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => Some(command),
                    None => return,
                },
                changed = self.role.changed() => match changed {
                    Ok(()) => None,
                    Err(_) => return,
                },
                _ = beat.tick() => {
                    self.publish_loads();
                    None
                }
                () = sleep_until(deadline) => None,
                () = shutdown.stopping() => return,
            };
            let pause = woke.elapsed();
            woke = Instant::now();
            if 2 * self.settings.heartbeat_interval < pause
                && let Some(leadership) = &mut self.leadership
            {
                tracing::warn!(
                    pause_ms = pause.as_millis() as u64,
                    "event loop stalled; extending heartbeats"
                );
                leadership.membership.excuse(pause);
                leadership.stores.excuse(pause);
            }
            match command {
                Some(command) => self.handle(command).await,
                None => self.advance().await,
            }
        }
    }

    /// Begins and ends leaderships as the role says.
    async fn follow_role(&mut self) {
        let role = self.role.borrow_and_update().clone();
        let now = Instant::now();
        let held = self.leadership.as_ref().map(|leadership| leadership.term);
        match role {
            Role::Leader { term, .. } if held == Some(term) => {
                // The renewal is late, and the term may be over for all others.
                if !role.leads(now) {
                    tracing::warn!(term, "the lead was not renewed in time");
                    self.give_up(term).await;
                }
            }
            Role::Leader { term, .. } => {
                self.leadership = None;
                if role.leads(now) && self.ended_term != Some(term) {
                    self.begin(term).await;
                }
            }
            Role::Follower { .. } => self.leadership = None,
        }
    }

    async fn begin(&mut self, term: u64) {
        let loaded = async {
            let workers = self.backend.load::<WorkerInfo>(term).await?;
            let stores = self.backend.load::<StoreInfo>(term).await?;
            Ok::<_, StateError>((workers, stores))
        };
        let (records, store_records) = match loaded.await {
            Ok(records) => records,
            Err(error) => {
                tracing::warn!(term, %error, "failed to take over the members");
                self.give_up(term).await;
                return;
            }
        };
        let held = self.publisher.current();
        let load_of = |id: &str| {
            let members = &held.as_ref()?.snapshot.members;
            members.iter().find(|member| member.worker.id == id).map(|member| member.load)
        };
        let mut membership = Membership::new(self.settings.heartbeat_interval, self.settings.slow_start);
        tracing::info!(term, workers = records.len(), stores = store_records.len(), "took over the members");
        membership.restore(records, load_of, self.now());
        // A daemon takes no requests, so nothing of it has to start slowly.
        let mut stores = Membership::new(self.settings.heartbeat_interval, Duration::ZERO);
        stores.restore(store_records, |_| None, self.now());
        self.leadership =
            Some(Leadership { term, membership, stores, published_version: 0, has_new_loads: false });
        self.settle().await;
    }

    async fn handle(&mut self, command: Command) {
        let now = self.now();
        let is_leader = self.role.borrow().leads(Instant::now());
        match command {
            Command::Register(request, reply) => {
                let outcome = self.leadership.as_mut().filter(|_| is_leader).map(|leadership| {
                    leadership.has_new_loads = true;
                    leadership.membership.register(request.worker, request.load, request.state, now)
                });
                self.answer(outcome, reply).await;
            }
            Command::Heartbeat(request, reply) => {
                let outcome = self.leadership.as_mut().filter(|_| is_leader).map(|leadership| {
                    metrics::heartbeat();
                    leadership.has_new_loads = true;
                    leadership.membership.heartbeat(&request.id, request.epoch, request.load, now)
                });
                self.answer(outcome, reply).await;
            }
            Command::Deregister(request, reply) => {
                let outcome = self.leadership.as_mut().filter(|_| is_leader).map(|leadership| {
                    leadership.membership.deregister(&request.id, request.epoch, now);
                    Ok(())
                });
                self.answer(outcome, reply).await;
            }
            Command::Drain(id, reply) => {
                let leadership = self.leadership.as_mut().filter(|_| is_leader);
                let outcome = leadership.map(|leadership| leadership.membership.drain(&id, now));
                self.answer(outcome, reply).await;
            }
            Command::RegisterStore(request, reply) => {
                let outcome = self.leadership.as_mut().filter(|_| is_leader).map(|leadership| {
                    let (load, state) = (WorkerLoad::default(), WorkerState::Ready);
                    leadership.stores.register(request.store, load, state, now)
                });
                self.answer(outcome, reply).await;
            }
            Command::StoreHeartbeat(request, reply) => {
                let outcome = self.leadership.as_mut().filter(|_| is_leader).map(|leadership| {
                    metrics::heartbeat();
                    leadership.stores.heartbeat(&request.id, request.epoch, WorkerLoad::default(), now)
                });
                self.answer(outcome, reply).await;
            }
            Command::DeregisterStore(request, reply) => {
                let outcome = self.leadership.as_mut().filter(|_| is_leader).map(|leadership| {
                    leadership.stores.deregister(&request.id, request.epoch, now);
                    Ok(())
                });
                self.answer(outcome, reply).await;
            }
        }
    }

    /// Settles what a command did, then answers it; `None`: this is no leader.
    async fn answer<T>(&mut self, outcome: Option<Result<T, MembershipError>>, reply: Reply<T>) {
        self.settle().await;
        let answer = match (outcome, &self.leadership) {
            (Some(Ok(value)), Some(leadership)) => Ok((value, leadership.term)),
            (Some(Err(error)), Some(_)) => Err(CommandError::Refused(error)),
            _ => Err(CommandError::NotLeader),
        };
        // A caller that is gone asks again.
        let _ = reply.send(answer);
    }

    async fn advance(&mut self) {
        let now = self.now();
        if let Some(leadership) = &mut self.leadership {
            leadership.membership.advance(now);
            leadership.stores.advance(now);
        }
        self.settle().await;
    }

    /// Writes down and publishes what changed.
    async fn settle(&mut self) {
        let Some(leadership) = &mut self.leadership else { return };
        let changes = leadership.membership.take_changes();
        let store_changes = leadership.stores.take_changes();
        let version = leadership.version();
        let is_new = leadership.published_version != version;
        leadership.published_version = version;
        let term = leadership.term;
        if !self.write_down(term, &changes).await || !self.write_down(term, &store_changes).await {
            return;
        }
        if is_new {
            self.publish();
        }
    }

    /// Writes changes down and reports them; where that fails, the lead is given up.
    async fn write_down<I: MemberInfo>(&mut self, term: u64, changes: &[Change<I>]) -> bool {
        if !changes.is_empty()
            && let Err(error) = self.backend.write(term, changes).await
        {
            tracing::warn!(term, %error, "failed to write down a change; giving up the lead");
            self.give_up(term).await;
            return false;
        }
        changes.iter().for_each(report);
        true
    }

    async fn give_up(&mut self, term: u64) {
        self.leadership = None;
        self.ended_term = Some(term);
        self.backend.resign().await;
    }

    fn publish_loads(&mut self) {
        if self.leadership.as_ref().is_some_and(|leadership| leadership.has_new_loads) {
            self.publish();
        }
    }

    fn publish(&mut self) {
        let Some(leadership) = &mut self.leadership else { return };
        leadership.has_new_loads = false;
        self.publisher.offer(Snapshot {
            incarnation: self.backend.incarnation(),
            term: leadership.term,
            version: leadership.published_version,
            ring: self.settings.ring,
            members: leadership.membership.members(),
            stores: leadership.stores.stores(),
        });
    }

    fn next_deadline(&self) -> Option<Instant> {
        let leadership = self.leadership.as_ref()?;
        let due = [leadership.membership.next_deadline(), leadership.stores.next_deadline()];
        Some(self.origin + due.into_iter().flatten().min()?)
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}

// === impl Leadership ===

impl Leadership {
    /// Counts the changes of both lists.
    fn version(&self) -> u64 {
        self.membership.version() + self.stores.version()
    }
}

fn report<I: MemberInfo>(change: &Change<I>) {
    let kind = I::FOLDER;
    match change {
        Change::Put(record) => {
            let info = &record.info;
            tracing::info!(kind, member = info.id(), epoch = info.epoch(), state = ?record.state, "member changed");
        }
        Change::Delete(id) => tracing::info!(kind, member = %id, "member left"),
        Change::Expire(id) => {
            metrics::expired();
            tracing::warn!(kind, member = %id, "member missed its heartbeats");
        }
    }
}

/// Waits until `deadline`; for ever without one. The timer counts in milliseconds.
async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
