//! A tier that fails on purpose, for tests.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{Clock, SystemClock};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::random::SplitMix64;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierKind, TierStat};

/// How many of a thousand items or calls get a fault. All 0 by default.
#[derive(Debug, Clone, Default)]
pub struct FaultRates {
    /// Says that it failed, and was not done.
    pub fail: u32,
    /// Says that it failed, and was done.
    pub fail_late: u32,
    /// Takes up to [`FaultRates::max_delay`] longer.
    pub delay: u32,
    /// A put says that it is stored, and is not.
    pub lose: u32,
    /// A put keeps the first bytes and has zeros after them.
    pub tear: u32,
    /// A put keeps the first bytes and has none after them.
    pub shorten: u32,
    /// A put or get is done twice.
    pub duplicate: u32,
    /// A get has one bit flipped.
    pub flip: u32,
    /// A get has bytes of another chunk.
    pub mix: u32,
    /// The longest delay.
    pub max_delay: Duration,
}

/// Fails, delays, loses, tears, flips and mixes what it is asked.
///
/// Faults follow from the seed and the order of the items. An item gets one fault at most.
#[derive(Debug)]
pub struct Faulty<T> {
    inner: T,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rates: FaultRates,
    random: SplitMix64,
    /// What is to fail next whatever the rates are, and how often.
    next_failures: Option<(u64, TierError)>,
    /// Keys that were put, for bytes of others.
    seen_keys: Vec<ChunkKey>,
}

#[derive(Debug, Clone)]
enum Fault {
    None,
    Fail(TierError),
    FailLate(TierError),
    Duplicate,
    Lose,
    Tear(u64),
    Shorten(u64),
    Flip(u64),
    Mix(ChunkKey),
}

/// Enough for bytes of another chunk.
const MAX_SEEN_KEYS: usize = 64;

// === impl Faulty ===

impl<T: Tier> Faulty<T> {
    /// Gives `inner` the faults of a seed.
    pub fn new(inner: T, rates: FaultRates, seed: u64) -> Self {
        Self::with_clock(inner, rates, seed, Arc::new(SystemClock))
    }

    /// Gives `inner` the faults of a seed, and delays it by a clock of the caller.
    pub fn with_clock(inner: T, rates: FaultRates, seed: u64, clock: Arc<dyn Clock>) -> Self {
        let random = SplitMix64::new(seed);
        let state = State { rates, random, next_failures: None, seen_keys: Vec::new() };
        Self { inner, clock, state: Mutex::new(state) }
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// Sets the rates from now on.
    pub fn set_rates(&self, rates: FaultRates) {
        self.state.lock().rates = rates;
    }

    /// The next `n` items or calls without items fail with `error` and are not done; then the rates hold again.
    pub fn fail_next(&self, n: u64, error: TierError) {
        self.state.lock().next_failures = (n > 0).then_some((n, error));
    }

    /// Draws the fault of an item or call among those that `kinds` has, and lets its delay pass.
    fn draw(&self, kinds: fn(&mut State) -> Fault) -> Fault {
        let (delay, fault) = {
            let mut state = self.state.lock();
            let delay = state.draw_delay();
            (delay, state.draw_failure().unwrap_or_else(|| kinds(&mut state)))
        };
        if delay > Duration::ZERO {
            self.clock.pause(delay);
        }
        fault
    }

    /// Makes a call whose failure is an error.
    fn call<R>(&self, call: impl FnOnce(&T) -> Result<R>) -> Result<R> {
        match self.draw(|_| Fault::None) {
            Fault::Fail(error) => Err(error),
            Fault::FailLate(error) => call(&self.inner).and(Err(error)),
            _ => call(&self.inner),
        }
    }

    fn put_with(&self, item: &mut PutItem<'_>, fault: Fault) {
        match fault {
            Fault::Fail(error) => item.outcome = PutOutcome::Failed(error),
            Fault::FailLate(error) => {
                self.inner.put(slice::from_mut(item));
                item.outcome = PutOutcome::Failed(error);
            }
            Fault::Lose => item.outcome = PutOutcome::Stored,
            Fault::Tear(cut) | Fault::Shorten(cut) => {
                let mut bytes = item.parts.concat();
                let n_kept = cut as usize % bytes.len().max(1);
                match fault {
                    Fault::Tear(_) => bytes[n_kept..].fill(0),
                    _ => bytes.truncate(n_kept),
                }
                self.put_instead(item, &bytes);
            }
            Fault::Duplicate => {
                self.inner.put(slice::from_mut(item));
                self.inner.put(&mut [item.with_parts(item.parts)]);
            }
            Fault::None | Fault::Flip(_) | Fault::Mix(_) => self.inner.put(slice::from_mut(item)),
        }
    }

    fn put_instead(&self, item: &mut PutItem<'_>, bytes: &[u8]) {
        let parts = [bytes];
        let mut batch = [item.with_parts(&parts)];
        self.inner.put(&mut batch);
        let [PutItem { outcome, .. }] = batch;
        item.outcome = outcome;
    }

    fn get_with(&self, item: &mut GetItem<'_>, fault: Fault) {
        match fault {
            Fault::Fail(error) => item.outcome = GetOutcome::Failed(error),
            Fault::FailLate(error) => {
                self.inner.get(slice::from_mut(item));
                item.outcome = GetOutcome::Failed(error);
            }
            Fault::Flip(bit) => {
                self.inner.get(slice::from_mut(item));
                if item.outcome.is_hit() && item.n_bytes() > 0 {
                    let bit = bit as usize % (8 * item.n_bytes());
                    if let Some(byte) = item.head.iter_mut().chain(&mut *item.buffer).nth(bit / 8) {
                        *byte ^= 1 << (bit % 8);
                    }
                }
            }
            Fault::Mix(other) => {
                let key = std::mem::replace(&mut item.key, other);
                self.inner.get(slice::from_mut(item));
                item.key = key;
            }
            Fault::Duplicate => {
                self.inner.get(slice::from_mut(item));
                self.inner.get(slice::from_mut(item));
            }
            Fault::None | Fault::Lose | Fault::Tear(_) | Fault::Shorten(_) => {
                self.inner.get(slice::from_mut(item));
            }
        }
    }
}

impl<T: Tier> Tier for Faulty<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        self.state.lock().see(batch.iter().map(|item| item.key));
        let faults: Vec<Fault> = batch.iter().map(|_| self.draw(State::draw_put_fault)).collect();
        if faults.iter().all(|fault| matches!(fault, Fault::None)) {
            return self.inner.put(batch);
        }
        for (item, fault) in batch.iter_mut().zip(faults) {
            self.put_with(item, fault);
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        let faults: Vec<Fault> = batch.iter().map(|_| self.draw(State::draw_get_fault)).collect();
        if faults.iter().all(|fault| matches!(fault, Fault::None)) {
            return self.inner.get(batch);
        }
        for (item, fault) in batch.iter_mut().zip(faults) {
            self.get_with(item, fault);
        }
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.call(|inner| inner.contains(keys, present))
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.call(|inner| inner.delete(keys))
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.inner.visit_keys(visit);
    }

    fn flush(&self) -> Result<()> {
        self.call(Tier::flush)
    }

    fn stat(&self) -> TierStat {
        self.inner.stat()
    }
}

// === impl State ===

impl State {
    fn chance(&mut self, rate: impl FnOnce(&FaultRates) -> u32) -> bool {
        let rate = u64::from(rate(&self.rates));
        rate > 0 && self.random.below(1000) < rate
    }

    fn draw_delay(&mut self) -> Duration {
        if !self.chance(|rates| rates.delay) {
            return Duration::ZERO;
        }
        let max_nanos = self.rates.max_delay.as_nanos() as u64;
        Duration::from_nanos(self.random.below(max_nanos.saturating_add(1).max(1)))
    }

    fn draw_failure(&mut self) -> Option<Fault> {
        if let Some((n_left, error)) = &mut self.next_failures {
            let error = error.clone();
            *n_left -= 1;
            if *n_left == 0 {
                self.next_failures = None;
            }
            return Some(Fault::Fail(error));
        }
        let injected = || TierError::remote("ask a faulty tier", &"fault injected", true);
        if self.chance(|rates| rates.fail) {
            return Some(Fault::Fail(injected()));
        }
        self.chance(|rates| rates.fail_late).then(|| Fault::FailLate(injected()))
    }

    fn draw_put_fault(&mut self) -> Fault {
        if self.chance(|rates| rates.lose) {
            Fault::Lose
        } else if self.chance(|rates| rates.tear) {
            Fault::Tear(self.random.next_u64())
        } else if self.chance(|rates| rates.shorten) {
            Fault::Shorten(self.random.next_u64())
        } else if self.chance(|rates| rates.duplicate) {
            Fault::Duplicate
        } else {
            Fault::None
        }
    }

    fn draw_get_fault(&mut self) -> Fault {
        if self.chance(|rates| rates.flip) {
            Fault::Flip(self.random.next_u64())
        } else if !self.seen_keys.is_empty() && self.chance(|rates| rates.mix) {
            let key_idx = self.random.below(self.seen_keys.len() as u64) as usize;
            Fault::Mix(self.seen_keys[key_idx])
        } else if self.chance(|rates| rates.duplicate) {
            Fault::Duplicate
        } else {
            Fault::None
        }
    }

    fn see(&mut self, keys: impl Iterator<Item = ChunkKey>) {
        for key in keys {
            if self.seen_keys.len() < MAX_SEEN_KEYS && !self.seen_keys.contains(&key) {
                self.seen_keys.push(key);
            }
        }
    }
}
