//! What operators do with an engine: put it to sleep, wake it.

use std::sync::Arc;

use crate::engine::handle::EngineHandle;
use crate::engine::machine::Phase;
use crate::supervisor::Supervisor;

/// Wakes an engine, and waits until it serves. Cancel safe.
///
/// # Errors
/// Why it does not serve.
pub(crate) async fn wake(supervisor: &Supervisor, engine: &Arc<EngineHandle>) -> Result<(), String> {
    supervisor.act(|machine, now| machine.want(engine.name(), now));
    settle(supervisor, engine, |phase, reason| match phase {
        None => Some(Err("it was removed".to_owned())),
        Some(Phase::Ready) => Some(Ok(())),
        Some(Phase::Failed) => Some(Err(reason.unwrap_or_else(|| "it failed".to_owned()))),
        Some(_) => None,
    })
    .await
}

/// Puts an engine without requests to sleep, and waits until it sleeps. Cancel safe.
///
/// # Errors
/// Why it does not sleep.
pub(crate) async fn sleep(supervisor: &Supervisor, engine: &Arc<EngineHandle>) -> Result<(), String> {
    let order = supervisor.act(|machine, now| machine.suspend(engine.name(), now))?;
    if let Some(order) = order {
        supervisor.order(engine.name(), order);
    }
    settle(supervisor, engine, |phase, reason| match phase {
        None => Some(Err("it was removed".to_owned())),
        Some(Phase::FallingAsleep) => None,
        Some(Phase::Ready) => Some(Err(reason.unwrap_or_else(|| "it woke again".to_owned()))),
        // Asleep, or wanted again since.
        Some(_) => Some(Ok(())),
    })
    .await
}

/// Waits for a phase that is an answer.
async fn settle(
    supervisor: &Supervisor,
    engine: &Arc<EngineHandle>,
    answer: impl Fn(Option<Phase>, Option<String>) -> Option<Result<(), String>>,
) -> Result<(), String> {
    loop {
        // Before the look: a change between the two is seen.
        let mut changed = std::pin::pin!(engine.changed.notified());
        changed.as_mut().enable();
        let (phase, reason) = supervisor.look(|machine, _| {
            let state = machine.engine(engine.name());
            (
                state.map(|state| state.phase),
                state.and_then(|state| state.failure.as_ref()).map(ToString::to_string),
            )
        });
        if let Some(outcome) = answer(phase, reason) {
            return outcome;
        }
        tokio::select! {
            () = changed => {}
            () = engine.ended.cancelled() => return Err("it was removed".to_owned()),
        }
    }
}
