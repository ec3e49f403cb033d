//! Which engine is awake: a state machine over all engines of a controller. It does nothing itself and reads no clock.
//!
//! ```text
//! asleep --wanted--> queued --room--> starting --healthy--> ready --idle or room needed--> falling asleep --> asleep
//!   ^                                    |                    |  \--others wait too long--> giving way --/
//!   +-- retry time over -- failed <------+--------------------+
//! ```
//!
//! What happens outside comes in by methods, and [`Machine::schedule`] then says what to do next: one order for an engine at a
//! time. Invariants:
//!
//! - An engine with a request in flight is ready or gives way: no order to sleep or stop is given to it, unless it is removed
//!   and its requests do not end in time.
//! - At most `max_awake` engines are between `starting` and `falling asleep`, unless more were adopted.
//! - A request that waits gets its turn: engines wake in the order in which they were first asked for, and an engine
//!   that is never idle gives way once another has waited for a turn.

mod schedule;

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// Time that an engine must have been ready for its failures to be forgotten.
const STEADY: Duration = Duration::from_secs(30);
/// Bounds of the time between a failure and the next start; it doubles with every failure.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_mins(1);
/// Time after which an engine that did not fall asleep is asked again.
const SLEEP_RETRY: Duration = Duration::from_secs(30);

/// What holds for all engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) max_awake: Option<usize>,
    pub(crate) max_starting: usize,
    pub(crate) turn: Duration,
    pub(crate) max_waiting: usize,
    pub(crate) wakes_on_request: bool,
}

/// What holds for one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EngineRules {
    pub(crate) sleeps: bool,
    pub(crate) after_idle: Option<Duration>,
    /// How long requests may go on after it was removed.
    pub(crate) drain: Duration,
}

/// Where an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It serves nothing and has given its memory back.
    Asleep,
    /// It is wanted, and waits for room.
    Queued,
    /// It starts or wakes.
    Starting,
    /// It serves.
    Ready,
    /// It finishes what it serves and then sleeps, for others.
    GivingWay,
    /// It gives its memory back.
    FallingAsleep,
    /// It ends for good.
    Stopping,
    /// It did not start or broke; it may be started again.
    Failed,
}

/// What an engine is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Start or wake.
    Wake,
    /// Give memory back.
    Sleep,
    /// End for good.
    Stop,
}

/// Whether a request is let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// It counts as in flight from now on.
    Entered,
    /// It has to wait for the next change.
    Wait,
    /// It cannot be served now.
    Refused { why: String, retry_after: Duration },
}

/// Why an engine does not serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What clients are told.
    pub(crate) summary: String,
    /// What operators get beside it, such as the last lines of the log.
    pub(crate) detail: Option<String>,
}

/// Why an engine is to be awake without a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    /// The file says so, or it was awake when it broke. Nothing sleeps for it: one that breaks again and again would
    /// put others to sleep each time.
    IfRoom,
    /// An operator says so.
    Now,
}

/// The engine that a request was counted for: one that is added later under the same name is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation(u64);

/// An engine in the machine.
#[derive(Debug, Clone)]
pub(crate) struct Engine {
    generation: Generation,
    pub(crate) rules: EngineRules,
    pub(crate) phase: Phase,
    /// When it came to its phase.
    pub(crate) since: Instant,
    /// Requests that were let in and have not ended.
    pub(crate) in_flight: usize,
    /// Requests that wait to be let in.
    pub(crate) waiting: usize,
    /// Whether it is to be awake without a request.
    want: Option<Want>,
    /// End of the last request, or when it became ready.
    pub(crate) last_used: Instant,
    /// Its place among all engines, in the order of the file.
    place: usize,
    /// Its turn among those that wait for room; those that were asked for at once have the same.
    ticket: u64,
    /// When it was first asked for since it was awake.
    asked_at: Option<Instant>,
    pub(crate) n_wakes: u64,
    /// From the request for it to its being ready.
    pub(crate) last_wake: Option<Duration>,
    pub(crate) n_failures: u32,
    pub(crate) n_restarts: u64,
    /// Why it failed last, or did not fall asleep.
    pub(crate) failure: Option<Failure>,
    retry_at: Instant,
    /// It does not sleep before.
    sleep_at: Instant,
    /// Set when it is removed.
    leaving_since: Option<Instant>,
}

/// All engines.
#[derive(Debug)]
pub(crate) struct Machine {
    rules: Rules,
    engines: BTreeMap<String, Engine>,
    next_ticket: u64,
    n_generations: u64,
    /// Engines whose phase has changed since this was taken.
    changed: Vec<String>,
}

impl Machine {
    pub(crate) fn new(rules: Rules) -> Self {
        Self { rules, engines: BTreeMap::new(), next_ticket: 0, n_generations: 0, changed: Vec::new() }
    }

    pub(crate) fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    pub(crate) fn engine(&self, name: &str) -> Option<&Engine> {
        self.engines.get(name)
    }

    /// Adds an engine that sleeps, and is to be awake if it `is_wanted`.
    pub(crate) fn add(
        &mut self,
        name: &str,
        place: usize,
        rules: EngineRules,
        is_wanted: bool,
        now: Instant,
    ) {
        self.n_generations += 1;
        let engine = Engine {
            generation: Generation(self.n_generations),
            rules,
            phase: Phase::Asleep,
            since: now,
            in_flight: 0,
            waiting: 0,
            want: is_wanted.then_some(Want::IfRoom),
            last_used: now,
            place,
            ticket: 0,
            asked_at: None,
            n_wakes: 0,
            last_wake: None,
            n_failures: 0,
            n_restarts: 0,
            failure: None,
            retry_at: now,
            sleep_at: now,
            leaving_since: None,
        };
        self.engines.insert(name.to_owned(), engine);
        self.changed.push(name.to_owned());
    }

    /// Takes over an engine whose process lives and is about to be asked whether it serves.
    pub(crate) fn adopt(&mut self, name: &str, now: Instant) {
        self.change(name, Phase::Starting, now);
    }

    /// Changes what holds for an engine.
    pub(crate) fn set_engine_rules(&mut self, name: &str, rules: EngineRules) {
        if let Some(engine) = self.engines.get_mut(name) {
            engine.rules = rules;
        }
    }

    /// Lets an engine end once its requests have ended; it takes no more of them.
    pub(crate) fn remove(&mut self, name: &str, now: Instant) {
        if let Some(engine) = self.engines.get_mut(name) {
            engine.leaving_since.get_or_insert(now);
            self.changed.push(name.to_owned());
        }
    }

    /// Whether an engine takes no more requests because it was removed.
    pub(crate) fn is_leaving(&self, name: &str) -> bool {
        self.engines.get(name).is_some_and(|engine| engine.leaving_since.is_some())
    }

    /// Counts a request that wants an engine; `None` if too many wait for it.
    pub(crate) fn begin(&mut self, name: &str) -> Option<Generation> {
        let max_waiting = self.rules.max_waiting;
        let engine = self.engines.get_mut(name).filter(|engine| engine.waiting < max_waiting)?;
        engine.waiting += 1;
        Some(engine.generation)
    }

    /// Lets a request in that was counted by [`Self::begin`], if its engine is ready.
    pub(crate) fn enter(&mut self, name: &str, generation: Generation, now: Instant) -> Entry {
        let wakes_on_request = self.rules.wakes_on_request;
        let Some(engine) = self.of_generation(name, generation) else { return gone() };
        let refused = |why: String, until: Instant| {
            let retry_after = until.saturating_duration_since(now).max(Duration::from_secs(1));
            Entry::Refused { why, retry_after }
        };
        match engine.phase {
            _ if engine.leaving_since.is_some() => gone(),
            Phase::Ready => {
                engine.waiting = engine.waiting.saturating_sub(1);
                engine.in_flight += 1;
                Entry::Entered
            }
            Phase::Failed if now < engine.retry_at => {
                let why = engine.failure.as_ref().map_or("it failed", |failure| failure.summary.as_str());
                refused(format!("the engine of the model is not there: {why}"), engine.retry_at)
            }
            Phase::Asleep | Phase::Failed if !wakes_on_request && engine.want.is_none() => {
                refused("the engine of the model sleeps, and requests do not wake it".to_owned(), now)
            }
            _ => Entry::Wait,
        }
    }

    /// Notes that a request is gone, before or after it was let in; returns whether there may be something to do.
    pub(crate) fn leave(
        &mut self,
        name: &str,
        generation: Generation,
        has_entered: bool,
        now: Instant,
    ) -> bool {
        let Some(engine) = self.of_generation(name, generation) else { return false };
        if has_entered {
            engine.in_flight = engine.in_flight.saturating_sub(1);
            engine.last_used = now;
            engine.in_flight == 0
        } else {
            engine.waiting = engine.waiting.saturating_sub(1);
            engine.waiting == 0
        }
    }

    /// Asks for an engine to be awake.
    pub(crate) fn want(&mut self, name: &str, now: Instant) {
        if let Some(engine) = self.engines.get_mut(name) {
            let is_awake = matches!(engine.phase, Phase::Starting | Phase::Ready);
            engine.want = (!is_awake).then_some(Want::Now);
            engine.retry_at = engine.retry_at.min(now);
        }
    }

    /// Puts an engine to sleep that has no request.
    ///
    /// # Errors
    /// Why it does not sleep now.
    pub(crate) fn suspend(&mut self, name: &str, now: Instant) -> Result<Option<Order>, String> {
        let Some(engine) = self.engines.get_mut(name) else {
            return Err("there is no such engine".to_owned());
        };
        engine.want = None;
        match engine.phase {
            Phase::Asleep | Phase::FallingAsleep => Ok(None),
            Phase::Queued if engine.waiting == 0 => {
                self.change(name, Phase::Asleep, now);
                Ok(None)
            }
            Phase::Failed if engine.waiting == 0 => Ok(None),
            Phase::Ready if !engine.rules.sleeps => Err("its `sleep.method` is never".to_owned()),
            Phase::Ready if engine.in_flight == 0 && engine.waiting == 0 => {
                self.change(name, Phase::FallingAsleep, now);
                Ok(Some(Order::Sleep))
            }
            _ => Err(format!(
                "it is {} with {} requests in flight and {} that wait",
                engine.phase.as_str(),
                engine.in_flight,
                engine.waiting
            )),
        }
    }

    /// Notes that an engine serves.
    pub(crate) fn woke(&mut self, name: &str, now: Instant) {
        let Some(engine) = self.engines.get_mut(name) else { return };
        if engine.phase != Phase::Starting {
            return;
        }
        engine.want = None;
        engine.failure = None;
        engine.last_used = now;
        engine.n_wakes += 1;
        engine.last_wake = engine.asked_at.take().map(|asked_at| now.saturating_duration_since(asked_at));
        self.change(name, Phase::Ready, now);
    }

    /// Notes that an engine sleeps.
    pub(crate) fn slept(&mut self, name: &str, now: Instant) {
        if self.engines.get(name).is_some_and(|engine| engine.phase == Phase::FallingAsleep) {
            self.change(name, Phase::Asleep, now);
        }
    }

    /// Notes that an adopted engine sleeps with its process.
    pub(crate) fn found_asleep(&mut self, name: &str, now: Instant) {
        if self.engines.get(name).is_some_and(|engine| engine.phase == Phase::Starting) {
            self.change(name, Phase::Asleep, now);
        }
    }

    /// Notes that an engine did not fall asleep and serves on.
    pub(crate) fn sleep_failed(&mut self, name: &str, reason: String, now: Instant) {
        let Some(engine) = self.engines.get_mut(name) else { return };
        engine.failure = Some(Failure { summary: reason, detail: None });
        engine.sleep_at = now + SLEEP_RETRY;
        if engine.phase == Phase::FallingAsleep {
            self.change(name, Phase::Ready, now);
        }
    }

    /// Notes that the process of an engine ended, or never served.
    pub(crate) fn failed(&mut self, name: &str, failure: Failure, now: Instant) {
        let Some(engine) = self.engines.get_mut(name) else { return };
        match engine.phase {
            // It was going to end, or holds nothing that could be lost.
            Phase::Stopping => return,
            Phase::FallingAsleep => {
                self.change(name, Phase::Asleep, now);
                return;
            }
            Phase::Asleep | Phase::Queued => {
                engine.failure = Some(failure);
                return;
            }
            Phase::Ready | Phase::GivingWay => {
                let was_steady = STEADY <= now.saturating_duration_since(engine.since);
                engine.n_failures = if was_steady { 0 } else { engine.n_failures + 1 };
                engine.n_restarts += 1;
                // It was awake and is to be so again.
                engine.want = Some(Want::IfRoom);
            }
            Phase::Starting | Phase::Failed => engine.n_failures += 1,
        }
        engine.failure = Some(failure);
        engine.retry_at = now + backoff(engine.n_failures);
        engine.asked_at = None;
        self.change(name, Phase::Failed, now);
    }

    /// Notes that an engine has ended for good; it is forgotten.
    pub(crate) fn stopped(&mut self, name: &str) {
        self.engines.remove(name);
        self.changed.push(name.to_owned());
    }

    /// The engines whose phase has changed since the last call.
    pub(crate) fn take_changed(&mut self) -> Vec<String> {
        std::mem::take(&mut self.changed)
    }

    /// Whether one more may be awake.
    pub(crate) fn has_room(&self) -> bool {
        self.rules.max_awake.is_none_or(|max_awake| self.count(Phase::holds_room) < max_awake)
    }

    fn of_generation(&mut self, name: &str, generation: Generation) -> Option<&mut Engine> {
        self.engines.get_mut(name).filter(|engine| engine.generation == generation)
    }

    fn first_queued(&self) -> Option<String> {
        let queued = self.engines.iter().filter(|(_, engine)| engine.phase == Phase::Queued);
        // Those that others sleep for come first.
        queued
            .min_by_key(|(_, engine)| (!engine.is_pressing(), engine.ticket, engine.place))
            .map(|(name, _)| name.clone())
    }

    fn count(&self, is_counted: impl Fn(Phase) -> bool) -> usize {
        self.engines.values().filter(|engine| is_counted(engine.phase)).count()
    }

    fn change(&mut self, name: &str, phase: Phase, now: Instant) {
        if let Some(engine) = self.engines.get_mut(name) {
            engine.phase = phase;
            engine.since = now;
            self.changed.push(name.to_owned());
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.summary)?;
        self.detail.iter().try_for_each(|detail| write!(formatter, "; {detail}"))
    }
}

impl Engine {
    /// Whether others sleep for it.
    fn is_pressing(&self) -> bool {
        0 < self.waiting || self.want == Some(Want::Now)
    }

    fn may_sleep(&self, now: Instant) -> bool {
        self.phase == Phase::Ready && self.rules.sleeps && self.sleep_at <= now
    }
}

impl Phase {
    /// Whether it counts as awake.
    pub(crate) fn holds_room(self) -> bool {
        matches!(self, Self::Starting | Self::Ready | Self::GivingWay | Self::FallingAsleep | Self::Stopping)
    }

    /// The word for it in reports.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Asleep => "asleep",
            Self::Queued => "queued",
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::GivingWay => "giving_way",
            Self::FallingAsleep => "falling_asleep",
            Self::Stopping => "stopping",
            Self::Failed => "failed",
        }
    }
}

/// Time between a failure and the next start.
fn backoff(n_failures: u32) -> Duration {
    match n_failures.checked_sub(1) {
        // An engine that served for long is started again at once.
        None => Duration::ZERO,
        Some(doublings) => FIRST_BACKOFF.saturating_mul(1 << doublings.min(16)).min(MAX_BACKOFF),
    }
}

fn gone() -> Entry {
    Entry::Refused {
        why: "the engine of the model was removed".to_owned(),
        retry_after: Duration::from_secs(1),
    }
}

#[cfg(test)]
mod tests;
