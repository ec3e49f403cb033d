//! Engines that an earlier controller has left.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::config::EngineConfig;
use crate::process::{Process, find_marked};
use crate::supervisor::Supervisor;

/// Time for the end of a process that no engine of the file is started as.
const STRAY_GRACE: Duration = Duration::from_secs(30);

/// By name: the processes of engines that go on, and whether they sleep.
pub(crate) type Adopted = BTreeMap<String, (Process, bool)>;

/// Finds the processes that are engines of the file, and ends all others of this state folder: those of engines that are
/// started in another way now, that are not in the file any more, or that were not written down in time.
pub(crate) async fn adopt(supervisor: &Arc<Supervisor>, engines: &[EngineConfig]) -> Adopted {
    let mut adopted = Adopted::new();
    let mut strays = Vec::new();
    for record in supervisor.state.records() {
        let Some(process) = Process::find(&record.process) else {
            supervisor.state.forget(&record.name);
            continue;
        };
        let engine = engines.iter().find(|engine| engine.name == record.name);
        if engine.is_some_and(|engine| engine.digest() == record.digest) {
            adopted.insert(record.name, (process, record.is_asleep));
        } else {
            supervisor.state.forget(&record.name);
            strays.push((record.name, process));
        }
    }
    for (pid, name) in find_marked(&supervisor.state.mark_prefix()) {
        // Processes that an adopted engine has started carry its mark too.
        if !adopted.contains_key(&name) && !strays.iter().any(|(_, process)| process.id().pid == pid) {
            strays.extend(Process::find_by_pid(pid).map(|process| (name, process)));
        }
    }
    for (engine, process) in strays {
        tracing::info!(engine, pid = process.id().pid, "ending a process of an earlier controller");
        process.stop(STRAY_GRACE, &supervisor.hurry).await;
    }
    adopted
}
