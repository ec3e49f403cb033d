//! What the parts of a controller share: the machine, the engines, the gateway, and the state on disk.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use kvik_gateway::Gateway;
use kvik_proto::client::HttpClient;
use kvik_runtime::shutdown::Shutdown;
use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::MemoryConfig;
use crate::engine::handle::{Command, EngineHandle};
use crate::engine::machine::{Machine, Order, Phase};
use crate::metrics;
use crate::state_folder::StateFolder;

/// The shared part of a controller.
#[derive(Debug)]
pub(crate) struct Supervisor {
    machine: Mutex<Machine>,
    engines: RwLock<Engines>,
    /// Set once, before the first engine is started.
    gateway: OnceLock<Gateway>,
    pub(crate) state: StateFolder,
    pub(crate) http: HttpClient,
    pub(crate) memory: RwLock<MemoryConfig>,
    /// Ends the tasks of engines; their processes stay.
    pub(crate) shutdown: Shutdown,
    /// Cancelled when processes have no more time to end.
    pub(crate) hurry: CancellationToken,
}

/// The engines by name and by model.
#[derive(Debug, Default)]
struct Engines {
    by_name: BTreeMap<String, Arc<EngineHandle>>,
    by_model: BTreeMap<String, Arc<EngineHandle>>,
}

impl Supervisor {
    pub(crate) fn new(
        machine: Machine,
        state: StateFolder,
        http: HttpClient,
        memory: MemoryConfig,
        shutdown: Shutdown,
    ) -> Self {
        Self {
            machine: Mutex::new(machine),
            engines: RwLock::default(),
            gateway: OnceLock::new(),
            state,
            http,
            memory: RwLock::new(memory),
            shutdown,
            hurry: CancellationToken::new(),
        }
    }

    pub(crate) fn set_gateway(&self, gateway: Gateway) {
        // A second one would be a second start, which there is not.
        let _ = self.gateway.set(gateway);
    }

    pub(crate) fn gateway(&self) -> Option<&Gateway> {
        self.gateway.get()
    }

    /// Changes the machine, gives the orders that follow, and wakes what waits for a change.
    pub(crate) fn act<T>(&self, change: impl FnOnce(&mut Machine, Instant) -> T) -> T {
        let now = Instant::now();
        let (value, orders, changed) = {
            let mut machine = self.machine.lock();
            let value = change(&mut machine, now);
            let orders = machine.schedule(now);
            (value, orders, machine.take_changed())
        };
        for (name, order) in orders {
            self.order(&name, order);
        }
        for name in changed {
            if let Some(engine) = self.find(&name) {
                metrics::phase(&name, self.phase(&name));
                engine.changed.notify_waiters();
            }
        }
        value
    }

    /// Looks at the machine, or changes a count that no order follows from.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&mut Machine, Instant) -> T) -> T {
        look(&mut self.machine.lock(), Instant::now())
    }

    /// Gives an order.
    pub(crate) fn order(&self, name: &str, order: Order) {
        if let Some(engine) = self.find(name) {
            engine.tell(Command::Order(order));
        }
    }

    pub(crate) fn phase(&self, name: &str) -> Option<Phase> {
        self.look(|machine, _| machine.engine(name).map(|engine| engine.phase))
    }

    /// The engine of this name.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<EngineHandle>> {
        self.engines.read().by_name.get(name).cloned()
    }

    /// The engine that serves `model`.
    pub(crate) fn find_model(&self, model: &str) -> Option<Arc<EngineHandle>> {
        self.engines.read().by_model.get(model).cloned()
    }

    /// The engine that an operator names, by its model or by its own name.
    pub(crate) fn find_any(&self, name: &str) -> Option<Arc<EngineHandle>> {
        self.find_model(name).or_else(|| self.find(name))
    }

    /// All engines, by name.
    pub(crate) fn engines(&self) -> Vec<Arc<EngineHandle>> {
        self.engines.read().by_name.values().cloned().collect()
    }

    pub(crate) fn insert(&self, engine: &Arc<EngineHandle>) {
        let mut engines = self.engines.write();
        engines.by_name.insert(engine.name().to_owned(), Arc::clone(engine));
        engines.by_model.insert(engine.config.model.clone(), Arc::clone(engine));
    }

    /// Forgets an engine; one of the same name or model that came after it stays.
    pub(crate) fn forget(&self, engine: &Arc<EngineHandle>) {
        let mut engines = self.engines.write();
        let Engines { by_name, by_model } = &mut *engines;
        for (map, key) in [(by_name, engine.name()), (by_model, engine.config.model.as_str())] {
            if map.get(key).is_some_and(|held| Arc::ptr_eq(held, engine)) {
                map.remove(key);
            }
        }
    }
}
