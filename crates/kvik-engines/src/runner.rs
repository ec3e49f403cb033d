//! The task of one engine: does what the machine orders, and tells it what became of that.

use std::io;
use std::net::ToSocketAddrs as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use crate::calls::EngineCalls;
use crate::config::EngineConfig;
use crate::engine::handle::{Command, EngineHandle};
use crate::engine::machine::{Failure, Order, Phase};
use crate::metrics;
use crate::process::log_file::LogFile;
use crate::process::{MARK, Process, Start, kill_marked};
use crate::sleep::{NativeSleep, native};
use crate::state_folder::EngineRecord;
use crate::supervisor::Supervisor;

/// Time between two questions whether an engine that starts serves by now.
const START_INTERVAL: Duration = Duration::from_millis(50);
/// The same after the first seconds: other engines take minutes.
const LATER_INTERVAL: Duration = Duration::from_millis(500);
const LATER: Duration = Duration::from_secs(5);
/// Time between two looks at an engine that serves, and at its log.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Time for an answer to one of these questions.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);
/// Missing answers in a row after which an engine that has no request in flight is started again. One with requests may be
/// too busy to answer, and is watched by the gateway.
const MAX_SILENT: u32 = 6;
/// Lines of an engine's log in a message about its end.
const SHOWN_LINES: usize = 5;

/// The task's own state.
#[derive(Debug)]
pub(crate) struct Runner {
    supervisor: Arc<Supervisor>,
    engine: Arc<EngineHandle>,
    commands: UnboundedReceiver<Command>,
    /// Heard while something else was done.
    pending: Option<Command>,
    process: Option<Process>,
    /// Whether the process was put to sleep.
    is_asleep: bool,
    native: Option<Box<dyn NativeSleep>>,
    calls: EngineCalls,
    log: LogFile,
    n_silent: u32,
}

/// Why an engine does not serve.
enum NotServing {
    Failed(Failure),
    /// It is to end.
    Interrupted(Command),
}

/// What the task receives.
enum Heard {
    Command(Option<Command>),
    ProcessEnded,
    Check,
}

impl Runner {
    pub(crate) fn new(
        supervisor: Arc<Supervisor>,
        engine: Arc<EngineHandle>,
        commands: UnboundedReceiver<Command>,
        log: LogFile,
    ) -> Self {
        let calls = EngineCalls::new(supervisor.http.clone(), engine.config.url());
        let native = native(&engine.config.sleep);
        Self {
            supervisor,
            engine,
            commands,
            pending: None,
            process: None,
            is_asleep: false,
            native,
            calls,
            log,
            n_silent: 0,
        }
    }

    /// The engine that it is the task of.
    pub(crate) fn engine(&self) -> &Arc<EngineHandle> {
        &self.engine
    }

    /// Runs until the engine is retired or left.
    pub(crate) async fn run(mut self) {
        let ended = self.engine.ended.clone().drop_guard();
        loop {
            let heard = match self.pending.take() {
                Some(command) => Heard::Command(Some(command)),
                None => self.listen().await,
            };
            match heard {
                Heard::Command(None | Some(Command::Leave)) => break,
                Heard::Command(Some(Command::Order(Order::Stop) | Command::Retire)) => {
                    self.retire().await;
                    break;
                }
                Heard::Command(Some(Command::Order(Order::Wake))) => self.wake().await,
                Heard::Command(Some(Command::Order(Order::Sleep))) => self.fall_asleep().await,
                Heard::Command(Some(Command::Adopt { process, is_asleep })) => {
                    self.adopt(*process, is_asleep).await;
                }
                Heard::ProcessEnded => self.process_ended().await,
                Heard::Check => self.check().await,
            }
        }
        drop(ended);
    }

    async fn listen(&mut self) -> Heard {
        let process = self.process.as_ref();
        let process_end = async {
            match process {
                Some(process) => process.ended().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = self.commands.recv() => Heard::Command(command),
            () = process_end => Heard::ProcessEnded,
            () = tokio::time::sleep(CHECK_INTERVAL), if process.is_some() => Heard::Check,
            () = self.supervisor.shutdown.stopping() => Heard::Command(Some(Command::Leave)),
        }
    }

    fn name(&self) -> &str {
        self.engine.name()
    }

    fn config(&self) -> &EngineConfig {
        &self.engine.config
    }

    /// Starts the process, or wakes the one that sleeps.
    async fn wake(&mut self) {
        let began = Instant::now();
        let outcome = match (&self.process, self.is_asleep) {
            (Some(_), true) => self.wake_process().await,
            (Some(_), false) => self.await_health().await,
            (None, _) => self.start().await,
        };
        self.conclude(outcome, began).await;
    }

    /// Takes over a process of an earlier controller.
    async fn adopt(&mut self, process: Process, is_asleep: bool) {
        let began = Instant::now();
        tracing::info!(engine = self.name(), pid = process.id().pid, is_asleep, "adopted an engine");
        *self.engine.pid.lock() = Some(process.id().pid);
        self.process = Some(process);
        self.is_asleep = is_asleep;
        if is_asleep {
            self.supervisor.act(|machine, now| machine.found_asleep(self.engine.name(), now));
            return;
        }
        let outcome = self.await_health().await;
        self.conclude(outcome, began).await;
    }

    /// Tells the machine and the gateway what became of a start.
    async fn conclude(&mut self, outcome: Result<(), NotServing>, began: Instant) {
        match outcome {
            Ok(()) => {
                self.n_silent = 0;
                self.publish(true);
                let wake = self.supervisor.act(|machine, now| {
                    machine.woke(self.engine.name(), now);
                    machine.engine(self.engine.name()).and_then(|engine| engine.last_wake)
                });
                metrics::woke(self.name(), wake);
                let seconds = began.elapsed().as_secs_f64();
                tracing::info!(engine = self.name(), model = self.config().model, seconds, "engine is ready");
            }
            Err(NotServing::Interrupted(command)) => self.pending = Some(command),
            Err(NotServing::Failed(failure)) => self.fail(failure).await,
        }
    }

    async fn start(&mut self) -> Result<(), NotServing> {
        self.spawn().map_err(|why| NotServing::Failed(short(why)))?;
        self.await_health().await
    }

    fn spawn(&mut self) -> Result<(), String> {
        let config = self.config();
        if !is_port_free(&config.host, config.port) {
            return Err(format!("port {} of {} is in use by another process", config.port, config.host));
        }
        let log = self.log.open();
        let log =
            log.map_err(|error| format!("its log {} cannot be opened: {error}", self.log.path().display()))?;
        let env: Vec<(String, String)> = config
            .env
            .iter()
            .map(|(name, value)| (name.clone(), value.clone()))
            .chain([(MARK.to_owned(), self.mark())])
            .collect();
        let program = config.command.first().cloned().unwrap_or_default();
        let started = Process::start(Start { command: &config.command, env: &env, log });
        let process = started.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("the program {program} is not there"),
            _ => format!("the program {program} cannot be started: {error}"),
        })?;
        let pid = process.id().pid;
        tracing::info!(engine = config.name, pid, log = %self.log.path().display(), "started an engine");
        *self.engine.pid.lock() = Some(pid);
        self.process = Some(process);
        self.is_asleep = false;
        self.write_record();
        Ok(())
    }

    async fn wake_process(&mut self) -> Result<(), NotServing> {
        let (Some(native), Some(process)) = (&self.native, &self.process) else {
            return Err(NotServing::Failed(short("its process cannot be woken".to_owned())));
        };
        tokio::select! {
            woke = native.resume(&self.calls) => {
                woke.map_err(|why| NotServing::Failed(short(format!("it did not wake: {why}"))))?;
            }
            () = process.ended() => return Err(self.end_of_process()),
            Some(command) = self.commands.recv() => return Err(NotServing::Interrupted(command)),
        }
        self.is_asleep = false;
        self.write_record();
        self.await_health().await
    }

    /// Waits until the engine serves.
    async fn await_health(&mut self) -> Result<(), NotServing> {
        let began = Instant::now();
        let deadline = began + self.config().start_timeout;
        loop {
            let Some(process) = &self.process else {
                return Err(NotServing::Failed(short("its process is not there".to_owned())));
            };
            let asking = async {
                if self.calls.is_good(&self.engine.config.health_path, HEALTH_TIMEOUT).await {
                    return true;
                }
                let interval = if began.elapsed() < LATER { START_INTERVAL } else { LATER_INTERVAL };
                tokio::time::sleep(interval).await;
                false
            };
            tokio::select! {
                // The end first: another process may answer at the address.
                biased;
                () = process.ended() => return Err(self.end_of_process()),
                Some(command) = self.commands.recv() => return Err(NotServing::Interrupted(command)),
                is_good = asking => if is_good { return Ok(()) },
                () = tokio::time::sleep_until(deadline) => {
                    let seconds = self.config().start_timeout.as_secs_f64();
                    let path = format!("{}{}", self.config().url(), self.config().health_path);
                    let reason = format!("{path} did not answer with a success within {seconds} s");
                    return Err(NotServing::Failed(self.with_log(reason)));
                }
            }
        }
    }

    /// Why an engine whose process has ended does not serve.
    fn end_of_process(&mut self) -> NotServing {
        let how = self.process.take().map_or("ended".to_owned(), |mut process| process.finish());
        NotServing::Failed(self.with_log(format!("its process {how}")))
    }

    /// A failure with the last lines of the engine's log.
    fn with_log(&self, summary: String) -> Failure {
        let lines = self.log.last_lines(SHOWN_LINES);
        let path = self.log.path().display();
        let detail = if lines.is_empty() {
            format!("its log {path} is empty")
        } else {
            format!("its log {path} ends with: {}", lines.join(" | "))
        };
        Failure { summary, detail: Some(detail) }
    }

    /// Ends what is left of an engine that does not serve.
    async fn fail(&mut self, failure: Failure) {
        self.publish(false);
        self.end_process().await;
        metrics::failed(self.name());
        let retry = self.supervisor.act(|machine, now| {
            machine.failed(self.engine.name(), failure.clone(), now);
            machine.engine(self.engine.name()).map(|engine| engine.n_failures)
        });
        tracing::error!(engine = self.name(), model = self.config().model, n_failures = retry, reason = %failure, "engine failed");
    }

    async fn process_ended(&mut self) {
        let NotServing::Failed(failure) = self.end_of_process() else { return };
        let was_asleep = std::mem::take(&mut self.is_asleep);
        if was_asleep {
            // Nothing is lost: the next request starts it.
            tracing::warn!(engine = self.name(), reason = %failure, "an engine that slept has ended");
            self.forget_process();
            return;
        }
        self.fail(failure).await;
    }

    /// Gives the memory of the engine back.
    async fn fall_asleep(&mut self) {
        self.publish(false);
        let Some(native) = &self.native else {
            self.end_process().await;
            self.slept();
            return;
        };
        if self.process.is_none() {
            self.slept();
            return;
        }
        // Written first: a controller that comes after this one wakes it, whatever became of the call.
        self.is_asleep = true;
        self.write_record();
        let released = tokio::select! {
            released = native.release(&self.calls) => released,
            // To end: what became of the call does not matter.
            Some(command) = self.commands.recv() => {
                self.pending = Some(command);
                return;
            }
        };
        match released {
            Ok(()) => self.slept(),
            Err(reason) => {
                let is_healthy = self.calls.is_good(&self.config().health_path, HEALTH_TIMEOUT).await;
                // One that fell asleep half way may lack its weights: only what wakes well serves again.
                let woke = match (&self.native, is_healthy) {
                    (Some(native), true) => native.resume(&self.calls).await.is_ok(),
                    _ => false,
                };
                if !woke {
                    self.end_process().await;
                    tracing::warn!(engine = self.name(), %reason, "an engine did not fall asleep, and was ended");
                    self.slept();
                    return;
                }
                tracing::warn!(engine = self.name(), %reason, "an engine did not fall asleep, and serves on");
                self.is_asleep = false;
                self.write_record();
                self.publish(true);
                self.supervisor.act(|machine, now| machine.sleep_failed(self.engine.name(), reason, now));
            }
        }
    }

    fn slept(&mut self) {
        tracing::info!(engine = self.name(), model = self.config().model, "engine is asleep");
        self.supervisor.act(|machine, now| machine.slept(self.engine.name(), now));
    }

    /// Looks whether an engine that serves still does, and at the length of its log.
    async fn check(&mut self) {
        if let Err(error) = self.log.rotate() {
            tracing::warn!(engine = self.name(), %error, "failed to shorten the log of an engine");
        }
        if self.supervisor.phase(self.name()) != Some(Phase::Ready) {
            return;
        }
        let is_good = self.calls.is_good(&self.config().health_path, HEALTH_TIMEOUT).await;
        self.n_silent = if is_good { 0 } else { self.n_silent.saturating_add(1) };
        let in_flight = self
            .supervisor
            .look(|machine, _| machine.engine(self.name()).map_or(0, |engine| engine.in_flight));
        if MAX_SILENT <= self.n_silent && in_flight == 0 {
            let failure = self.with_log(format!("{} gives no good answer", self.config().health_path));
            self.fail(failure).await;
        }
    }

    /// Ends the engine for good.
    async fn retire(&mut self) {
        self.publish(false);
        self.end_process().await;
        tracing::info!(engine = self.name(), "engine has ended");
        self.supervisor.act(|machine, _| machine.stopped(self.engine.name()));
    }

    async fn end_process(&mut self) {
        if let Some(process) = self.process.take() {
            let how = process.stop(self.config().stop_timeout, &self.supervisor.hurry).await;
            tracing::debug!(engine = self.name(), how, "the process of an engine was stopped");
        }
        // What has left the group of its process is found by its mark.
        kill_marked(&self.mark());
        self.is_asleep = false;
        self.forget_process();
    }

    /// What marks the processes of this engine.
    fn mark(&self) -> String {
        format!("{}{}", self.supervisor.state.mark_prefix(), self.name())
    }

    fn forget_process(&self) {
        *self.engine.pid.lock() = None;
        self.supervisor.state.forget(self.name());
    }

    /// Tells the gateway whether the engine takes requests.
    fn publish(&self, takes_requests: bool) {
        let config = self.config();
        // Another engine may serve the model by now.
        let is_its_engine =
            self.supervisor.find_model(&config.model).is_some_and(|held| Arc::ptr_eq(&held, &self.engine));
        if let Some(gateway) = self.supervisor.gateway().filter(|_| is_its_engine) {
            gateway.manage(&config.model, takes_requests.then(|| config.url()).as_deref());
        }
    }

    /// Writes down the process for the next controller.
    fn write_record(&self) {
        let Some(process) = &self.process else { return };
        let record = EngineRecord {
            name: self.name().to_owned(),
            process: process.id().clone(),
            digest: self.config().digest(),
            is_asleep: self.is_asleep,
        };
        if let Err(error) = self.supervisor.state.write(&record) {
            // The next controller finds the process by its mark, and ends it.
            tracing::warn!(engine = self.name(), %error, "failed to write down an engine");
        }
    }
}

/// Whether no process listens at an address.
pub(crate) fn is_port_free(host: &str, port: u16) -> bool {
    // A name that is not known is the engine's to report.
    let Ok(addresses) = (host, port).to_socket_addrs() else { return true };
    addresses.into_iter().all(|address| {
        std::net::TcpListener::bind(address)
            .map_or_else(|error| error.kind() != io::ErrorKind::AddrInUse, |_| true)
    })
}

/// A failure that says all there is.
fn short(summary: String) -> Failure {
    Failure { summary, detail: None }
}
