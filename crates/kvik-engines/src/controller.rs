//! The life of a controller: start, adoption, reload, end.

mod reload;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvik_gateway::{Gateway, Management, Running as RunningGateway};
use kvik_proto::client::{TlsClientConfig, http_client};
use kvik_runtime::http::listen;
use kvik_runtime::shutdown::Shutdown;
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::adoption::{self, Adopted};
use crate::api;
use crate::config::{EngineConfig, EnginesConfig, LogConfig};
use crate::engine::handle::{Command, EngineHandle};
use crate::engine::machine::{EngineRules, Machine, Rules};
use crate::error::{EnginesError, Result};
use crate::memory;
use crate::process::Process;
use crate::process::log_file::LogFile;
use crate::readiness::EngineReadiness;
use crate::runner::{Runner, is_port_free};
use crate::state_folder::StateFolder;
use crate::status::{self, ControllerStatus};
use crate::supervisor::Supervisor;

/// Time between two looks at what time alone changes: idle engines, waits that took too long, pauses after failures.
const TICK: Duration = Duration::from_millis(50);
/// Time between two changes of weights by traffic.
const WEIGHTS_INTERVAL: Duration = Duration::from_secs(5);
/// The window of the rates that weights follow, in seconds.
const WEIGHTS_WINDOW_S: u64 = 60;

/// How a controller is started.
#[derive(Debug, Clone)]
pub struct ControllerOptions {
    /// The file that it reads, also again.
    pub config: PathBuf,
    /// Where it keeps what the next one needs to know.
    pub state: PathBuf,
    /// What workers of kvik are started with.
    pub program: PathBuf,
    /// Whether engines go on when it ends.
    pub leaves_running: bool,
}

/// A controller that runs; clones are the same one.
#[derive(Debug, Clone)]
pub struct Controller {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    supervisor: Arc<Supervisor>,
    options: ControllerOptions,
    config: Mutex<EnginesConfig>,
    /// By name: what takes the place of an engine that ends.
    replacements: Mutex<BTreeMap<String, (usize, EngineConfig)>>,
    gateway: RunningGateway,
    gateway_end: Shutdown,
    leaves_running: AtomicBool,
    /// Cancelled when it is to end.
    ending: CancellationToken,
    /// Cancelled when all engines have ended or were left.
    engines_ended: CancellationToken,
}

impl Controller {
    /// Starts all but the socket at which it is asked, which is returned.
    pub(crate) async fn start(
        options: ControllerOptions,
        config: EnginesConfig,
    ) -> Result<(Self, UnixListener)> {
        let state = StateFolder::lock(&options.state)?;
        // Before anything is ended or started for a gateway that cannot be.
        drop(listen(&config.gateway.listen).await?);
        let http = http_client(&TlsClientConfig::default())?;
        let machine = Machine::new(rules(&config));
        let supervisor =
            Arc::new(Supervisor::new(machine, state, http, config.memory.clone(), Shutdown::new()));
        let adopted = Self::prepare(&supervisor, &config).await?;
        // Known before the first request comes, which waits for them.
        let runners = register_all(&supervisor, &options, &config, adopted);
        let management = Management {
            readiness: Arc::new(EngineReadiness(Arc::clone(&supervisor))),
            models: config.engines.iter().map(|engine| engine.model.clone()).collect(),
            routes: api::routes(&supervisor),
            admin_routes: api::admin_routes(&supervisor),
        };
        let gateway_end = Shutdown::new();
        let gateway = Gateway::start_managed(config.gateway.clone(), &gateway_end, management).await?;
        let listener = match supervisor.state.listen() {
            Ok(listener) => listener,
            Err(error) => {
                gateway_end.finish().await;
                return Err(error);
            }
        };
        supervisor.set_gateway(gateway.gateway().clone());
        let shared = Shared {
            supervisor,
            leaves_running: AtomicBool::new(options.leaves_running),
            options,
            config: Mutex::new(config),
            replacements: Mutex::default(),
            gateway,
            gateway_end,
            ending: CancellationToken::new(),
            engines_ended: CancellationToken::new(),
        };
        let controller = Self { shared: Arc::new(shared) };
        for runner in runners {
            controller.launch(runner);
        }
        // In one step, so that they start in the order of the file.
        controller.supervisor().act(|_, _| ());
        controller.spawn_tasks();
        Ok((controller, listener))
    }

    /// Finds engines that live, ends those that are not wanted any more, and looks whether the others can listen.
    async fn prepare(supervisor: &Arc<Supervisor>, config: &EnginesConfig) -> Result<Adopted> {
        for engine in &config.engines {
            if let Some(place) = &engine.memory {
                memory::apply(&config.memory.dir, place)?;
            }
        }
        let adopted = adoption::adopt(supervisor, &config.engines).await;
        let waiting = config.engines.iter().filter(|engine| !adopted.contains_key(&engine.name));
        for engine in waiting {
            if !is_port_free(&engine.host, engine.port) {
                let (field, host) = (format!("{}.port", engine.field), engine.host.clone());
                return Err(EnginesError::PortInUse { field, host, port: engine.port });
            }
        }
        Ok(adopted)
    }

    /// Lets the task of an engine run.
    fn launch(&self, runner: Runner) {
        let (controller, engine) = (self.clone(), Arc::clone(runner.engine()));
        self.supervisor().shutdown.spawn(async move {
            runner.run().await;
            controller.engine_ended(&engine);
        });
    }

    /// Forgets an engine, and adds the one that takes its place.
    fn engine_ended(&self, engine: &Arc<EngineHandle>) {
        let supervisor = self.supervisor();
        supervisor.forget(engine);
        if self.shared.ending.is_cancelled() {
            return;
        }
        let replacement = self.shared.replacements.lock().remove(engine.name());
        let model = &engine.config.model;
        if let Some(gateway) = supervisor.gateway().filter(|_| supervisor.find_model(model).is_none()) {
            gateway.unmanage(model);
        }
        if let Some((place, config)) = replacement {
            self.introduce(place, config);
        }
    }

    /// Adds an engine while others run.
    fn introduce(&self, place: usize, config: EngineConfig) {
        if let Some(gateway) = self.supervisor().gateway() {
            gateway.manage(&config.model, None);
        }
        let is_wanted = match config.starts_awake {
            _ if !config.sleeps() => true,
            Some(is_wanted) => is_wanted,
            None => self.supervisor().look(|machine, _| machine.has_room()),
        };
        let logs = self.shared.config.lock().logs.clone();
        let register = Register { supervisor: self.supervisor(), logs: &logs, options: &self.shared.options };
        let runner = register.engine(place, config, is_wanted, None);
        self.launch(runner);
        self.supervisor().act(|_, _| ());
    }

    fn spawn_tasks(&self) {
        let shutdown = &self.supervisor().shutdown;
        let (controller, ending) = (self.clone(), shutdown.clone());
        shutdown.spawn(async move {
            let mut ticks = tokio::time::interval(TICK);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    _ = ticks.tick() => controller.supervisor().act(|_, _| ()),
                    () = ending.stopping() => return,
                }
            }
        });
        let (controller, ending) = (self.clone(), shutdown.clone());
        shutdown.spawn(async move {
            loop {
                tokio::select! {
                    () = tokio::time::sleep(WEIGHTS_INTERVAL) => {}
                    () = ending.stopping() => return,
                }
                let controller = controller.clone();
                // Changes of a ledger wait for its lock.
                let following = tokio::task::spawn_blocking(move || controller.follow_traffic());
                if let Err(error) = following.await {
                    tracing::error!(%error, "failed to follow the traffic");
                }
            }
        });
        let (controller, ending) = (self.clone(), shutdown.clone());
        shutdown.spawn(async move {
            let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
            loop {
                tokio::select! {
                    _ = hangup.recv() => {
                        // Logged with its outcome.
                        let _ = controller.reload();
                    }
                    () = ending.stopping() => return,
                }
            }
        });
    }

    /// Sets the weights of groups by the traffic of their models.
    fn follow_traffic(&self) {
        let supervisor = self.supervisor();
        let config = supervisor.memory.read().clone();
        if !config.follows_traffic {
            return;
        }
        let now = Instant::now();
        let rates: Vec<_> = supervisor
            .engines()
            .into_iter()
            .filter_map(|engine| {
                let rate = engine.traffic.lock().report(WEIGHTS_WINDOW_S, now).requests_per_second;
                let memory = engine.memory.read().clone()?;
                Some((memory, rate))
            })
            .collect();
        let max_rate = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        for (place, rate) in rates {
            let weight = memory::weight(place.policy.weight, rate, max_rate);
            if let Err(error) = memory::set_weight(&config.dir, &place, weight) {
                tracing::warn!(group = place.group, %error, "failed to set a weight");
            }
        }
    }

    /// What it and its engines do.
    pub fn status(&self) -> ControllerStatus {
        ControllerStatus {
            pid: std::process::id(),
            gateway: format!("http://{}", self.address()),
            config: self.shared.options.config.display().to_string(),
            engines: status::engines(self.supervisor()),
        }
    }

    /// Where its gateway listens.
    pub fn address(&self) -> SocketAddr {
        self.shared.gateway.address()
    }

    pub(crate) fn supervisor(&self) -> &Arc<Supervisor> {
        &self.shared.supervisor
    }

    /// Asks it to end, and waits until its engines have ended or were left.
    pub(crate) async fn stop(&self, leaves_running: bool) {
        if leaves_running {
            // Relaxed: read by the task that the cancellation wakes.
            self.shared.leaves_running.store(true, Ordering::Relaxed);
        }
        self.shared.ending.cancel();
        self.shared.engines_ended.cancelled().await;
    }

    /// Serves until `shutdown` drains or an operator stops it; then lets requests finish, and ends the engines, the last
    /// one of the file first, unless they are to go on. When `shutdown` stops, what is left is killed.
    pub async fn run(&self, shutdown: &Shutdown) {
        let shared = &self.shared;
        tokio::select! {
            () = shutdown.draining() => {}
            () = shared.ending.cancelled() => shutdown.drain(),
        }
        shared.ending.cancel();
        shared.gateway_end.drain();
        tokio::select! {
            () = shared.gateway.finished() => {}
            () = shutdown.stopping() => {}
        }
        shared.gateway_end.finish().await;
        let leaves_running = shared.leaves_running.load(Ordering::Relaxed);
        tokio::select! {
            () = self.end_engines(leaves_running) => {}
            () = shutdown.stopping() => {
                self.supervisor().hurry.cancel();
                self.end_engines(leaves_running).await;
            }
        }
        shared.engines_ended.cancel();
        self.supervisor().shutdown.finish().await;
        let _ = std::fs::remove_file(crate::state_folder::socket_path(&shared.options.state));
    }

    async fn end_engines(&self, leaves_running: bool) {
        let supervisor = self.supervisor();
        let names: Vec<String> =
            self.shared.config.lock().engines.iter().map(|engine| engine.name.clone()).collect();
        let place = |name: &str| names.iter().position(|known| known == name);
        let mut engines = supervisor.engines();
        engines.sort_by_key(|engine| std::cmp::Reverse(place(engine.name())));
        for engine in engines {
            engine.tell(if leaves_running { Command::Leave } else { Command::Retire });
            engine.ended.cancelled().await;
        }
    }
}

/// Makes engines known.
struct Register<'a> {
    supervisor: &'a Arc<Supervisor>,
    logs: &'a LogConfig,
    options: &'a ControllerOptions,
}

impl Register<'_> {
    /// Makes an engine known, with the process of it that was found and whether that sleeps; the caller runs its task and
    /// lets the machine act.
    fn engine(
        &self,
        place: usize,
        config: EngineConfig,
        is_wanted: bool,
        found: Option<(Process, bool)>,
    ) -> Runner {
        let folder = self.logs.folder.clone().unwrap_or_else(|| self.options.state.join("logs"));
        if let Err(error) = std::fs::create_dir_all(&folder) {
            tracing::warn!(folder = %folder.display(), %error, "failed to make the folder of logs");
        }
        let log = LogFile::new(folder.join(format!("{}.log", config.name)), self.logs.max_bytes);
        let rules = engine_rules(&config);
        let (engine, commands) = EngineHandle::new(config, log.path().to_owned(), Instant::now());
        let engine = Arc::new(engine);
        self.supervisor.look(|machine, now| {
            machine.add(engine.name(), place, rules, is_wanted, now);
            if found.is_some() {
                machine.adopt(engine.name(), now);
            }
        });
        self.supervisor.insert(&engine);
        if let Some((process, is_asleep)) = found {
            engine.tell(Command::Adopt { process: Box::new(process), is_asleep });
        }
        Runner::new(Arc::clone(self.supervisor), engine, commands, log)
    }
}

/// Makes all engines of the file known.
fn register_all(
    supervisor: &Arc<Supervisor>,
    options: &ControllerOptions,
    config: &EnginesConfig,
    mut adopted: Adopted,
) -> Vec<Runner> {
    let n_adopted = adopted.values().filter(|(_, is_asleep)| !is_asleep).count();
    let needs_room = |engine: &&EngineConfig| engine.starts_awake == Some(true) || !engine.sleeps();
    let is_new = |engine: &&EngineConfig| !adopted.contains_key(&engine.name);
    let n_fixed = config.engines.iter().filter(needs_room).filter(is_new).count();
    let mut n_free =
        config.max_awake.map_or(usize::MAX, |max_awake| max_awake.saturating_sub(n_adopted + n_fixed));
    let register = Register { supervisor, logs: &config.logs, options };
    let mut runners = Vec::new();
    for (place, engine) in config.engines.iter().enumerate() {
        let found = adopted.remove(&engine.name);
        let is_wanted = match engine.starts_awake {
            _ if found.is_some() => false,
            _ if needs_room(&engine) => true,
            Some(is_wanted) => is_wanted,
            None => {
                let has_room = 0 < n_free;
                n_free = n_free.saturating_sub(1);
                has_room
            }
        };
        runners.push(register.engine(place, engine.clone(), is_wanted, found));
    }
    runners
}

fn rules(config: &EnginesConfig) -> Rules {
    Rules {
        max_awake: config.max_awake,
        max_starting: config.max_starting,
        turn: config.turn,
        max_waiting: config.max_waiting,
        wakes_on_request: config.wakes_on_request,
    }
}

fn engine_rules(config: &EngineConfig) -> EngineRules {
    EngineRules { sleeps: config.sleeps(), after_idle: config.after_idle, drain: config.stop_timeout }
}
