//! Requests on their way to an engine, which may sleep.

use std::pin::Pin;
use std::sync::Arc;

use kvik_gateway::{ModelUse, NotReady, Readiness};
use tokio::time::Instant;

use crate::engine::handle::EngineHandle;
use crate::engine::machine::{Entry, Generation};
use crate::supervisor::Supervisor;

/// Lets requests of the gateway in.
#[derive(Debug)]
pub(crate) struct EngineReadiness(pub(crate) Arc<Supervisor>);

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Too many wait; it is not counted.
    Outside,
    Waiting(Generation),
    Entered(Generation),
}

/// One request for an engine.
#[derive(Debug)]
struct EngineUse {
    supervisor: Arc<Supervisor>,
    engine: Arc<EngineHandle>,
    place: Place,
    begun: Instant,
    is_ended: bool,
}

impl Readiness for EngineReadiness {
    fn begin(&self, model: &str) -> Option<Box<dyn ModelUse>> {
        let engine = self.0.find_model(model)?;
        let begun = Instant::now();
        engine.traffic.lock().begin(begun);
        let counted = self.0.look(|machine, _| machine.begin(engine.name()));
        let place = counted.map_or(Place::Outside, Place::Waiting);
        let supervisor = Arc::clone(&self.0);
        Some(Box::new(EngineUse { supervisor, engine, place, begun, is_ended: false }))
    }
}

impl EngineUse {
    /// Asks to be let in; `None`: it has to wait.
    fn ask(&mut self, is_first: bool) -> Option<Result<(), NotReady>> {
        let generation = match self.place {
            Place::Outside => return Some(Err(self.too_many())),
            Place::Entered(_) => return Some(Ok(())),
            Place::Waiting(generation) => generation,
        };
        let name = self.engine.name();
        let entry = if is_first {
            self.supervisor.look(|machine, now| machine.enter(name, generation, now))
        } else {
            // What is missing is ordered with the question.
            self.supervisor.act(|machine, now| machine.enter(name, generation, now))
        };
        match entry {
            Entry::Entered => {
                self.place = Place::Entered(generation);
                Some(Ok(()))
            }
            Entry::Wait => None,
            Entry::Refused { why, retry_after } => {
                let message = format!("{}: {why}", self.engine.config.model);
                Some(Err(NotReady { message, retry_after_s: retry_after.as_secs().max(1), is_full: false }))
            }
        }
    }

    fn too_many(&self) -> NotReady {
        let message =
            format!("{}: too many requests wait for the engine of the model", self.engine.config.model);
        NotReady { message, retry_after_s: 1, is_full: true }
    }
}

impl ModelUse for EngineUse {
    fn try_enter(&mut self) -> bool {
        matches!(self.ask(true), Some(Ok(())))
    }

    fn enter(&mut self) -> Pin<Box<dyn Future<Output = Result<(), NotReady>> + Send + '_>> {
        Box::pin(async move {
            let engine = Arc::clone(&self.engine);
            loop {
                // Before the question: a change between the two is seen.
                let mut changed = std::pin::pin!(engine.changed.notified());
                changed.as_mut().enable();
                if let Some(outcome) = self.ask(false) {
                    return outcome;
                }
                changed.await;
            }
        })
    }

    fn end(&mut self, is_success: bool) {
        if !self.is_ended {
            self.is_ended = true;
            self.engine.traffic.lock().end(is_success, self.begun.elapsed());
        }
    }
}

impl Drop for EngineUse {
    fn drop(&mut self) {
        self.end(false);
        let (generation, has_entered) = match self.place {
            Place::Outside => return,
            Place::Waiting(generation) => (generation, false),
            Place::Entered(generation) => (generation, true),
        };
        let name = self.engine.name();
        let has_work = self.supervisor.look(|machine, now| machine.leave(name, generation, has_entered, now));
        if has_work {
            self.supervisor.act(|_, _| ());
        }
    }
}
