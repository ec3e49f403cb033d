//! A file that is read again.

use super::{Controller, engine_rules, rules};
use crate::config::{EngineConfig, EnginesConfig};
use crate::error::Result;
use crate::memory;

impl Controller {
    /// Reads the file again: new engines are added, those that are not in it any more end after their requests, those
    /// that are started in another way are ended and started again, and all else changes in place. Says what has changed.
    ///
    /// # Errors
    /// If the file cannot be used; nothing has changed then.
    pub fn reload(&self) -> Result<Vec<String>> {
        let outcome = self.try_reload();
        match &outcome {
            Ok(changes) => tracing::info!(?changes, "configuration reloaded"),
            Err(error) => tracing::error!(%error, "failed to reload; the current configuration stays"),
        }
        outcome
    }

    fn try_reload(&self) -> Result<Vec<String>> {
        let options = &self.shared.options;
        let new = EnginesConfig::read(&options.config, &options.program)?;
        let supervisor = self.supervisor();
        let mut changes = Vec::new();
        for change in self.shared.gateway.gateway().reload(new.gateway.clone())? {
            changes.push(format!("gateway.{} changed", change.field));
        }
        *supervisor.memory.write() = new.memory.clone();
        supervisor.look(|machine, _| machine.set_rules(rules(&new)));
        let is_leaving = |name: &str| supervisor.look(|machine, _| machine.is_leaving(name));
        for (place, engine) in new.engines.iter().enumerate() {
            match supervisor.find(&engine.name) {
                None => {
                    changes.push(format!("{} added", engine.name));
                    Self::set_memory(&new, engine, &mut changes);
                    self.introduce(place, engine.clone());
                }
                Some(held) if is_same_process(&held.config, engine) && !is_leaving(&engine.name) => {
                    let before = held.memory.read().clone();
                    if before != engine.memory {
                        (*held.memory.write()).clone_from(&engine.memory);
                        Self::set_memory(&new, engine, &mut changes);
                    }
                    supervisor
                        .look(|machine, _| machine.set_engine_rules(&engine.name, engine_rules(engine)));
                }
                Some(_) => {
                    changes.push(format!("{} is started again", engine.name));
                    Self::set_memory(&new, engine, &mut changes);
                    self.shared.replacements.lock().insert(engine.name.clone(), (place, engine.clone()));
                    supervisor.look(|machine, now| machine.remove(&engine.name, now));
                }
            }
        }
        for held in supervisor.engines() {
            if !new.engines.iter().any(|engine| engine.name == held.name()) {
                changes.push(format!("{} removed", held.name()));
                self.shared.replacements.lock().remove(held.name());
                supervisor.look(|machine, now| machine.remove(held.name(), now));
            }
        }
        *self.shared.config.lock() = new;
        supervisor.act(|_, _| ());
        Ok(changes)
    }

    fn set_memory(config: &EnginesConfig, engine: &EngineConfig, changes: &mut Vec<String>) {
        let Some(place) = &engine.memory else { return };
        match memory::apply(&config.memory.dir, place) {
            Ok(()) => changes.push(format!("memory of {} set", engine.name)),
            Err(error) => {
                tracing::error!(engine = engine.name, %error, "failed to set the memory of an engine");
                changes.push(format!("memory of {} not set: {error}", engine.name));
            }
        }
    }
}

/// Whether an engine of the file can go on as the one that runs.
fn is_same_process(held: &EngineConfig, new: &EngineConfig) -> bool {
    let group = |config: &EngineConfig| {
        config.memory.as_ref().map(|memory| (memory.device.clone(), memory.group.clone()))
    };
    held.digest() == new.digest()
        && (held.kind, &held.sleep, &held.health_path) == (new.kind, &new.sleep, &new.health_path)
        && (held.start_timeout, held.stop_timeout) == (new.start_timeout, new.stop_timeout)
        && group(held) == group(new)
}
