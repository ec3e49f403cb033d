//! Every decorator is a tier, alone and on top of others, and does what it is for.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod breaker;
mod checksummed;
mod coded;
mod encrypted;
mod faulty;
mod metered;
mod recode;
mod retry;
mod shares;
mod suite;
mod throttled;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_tier::conformance::{ManualClock, content, content_key};
use kvik_tier::{
    Clock, FaultRates, Faulty, GetItem, GetOutcome, Metered, PutItem, PutOutcome, Tier, TierError, TierExt,
};

/// A failure that may pass.
fn transient() -> TierError {
    TierError::remote("ask a test", &"told to fail", true)
}

/// A failure that stays.
fn permanent() -> TierError {
    TierError::remote("ask a test", &"told to fail", false)
}

fn put(tier: &dyn Tier, chunk_idx: u64, n_bytes: usize) -> PutOutcome {
    let key = content_key(chunk_idx);
    tier.put_one(key, &content(key, n_bytes))
}

fn get(tier: &dyn Tier, chunk_idx: u64, n_bytes: usize) -> GetOutcome {
    let mut buffer = vec![0; n_bytes];
    let outcome = tier.get_one(content_key(chunk_idx), &mut buffer);
    if outcome.is_hit() {
        assert!(buffer == content(content_key(chunk_idx), n_bytes), "a hit with other bytes");
    }
    outcome
}

fn put_batch(tier: &dyn Tier, chunk_idxs: std::ops::Range<u64>, n_bytes: usize) -> Vec<PutOutcome> {
    let chunks: Vec<Vec<u8>> = chunk_idxs.clone().map(|idx| content(content_key(idx), n_bytes)).collect();
    let parts: Vec<[&[u8]; 1]> = chunks.iter().map(|chunk| [chunk.as_slice()]).collect();
    let mut batch: Vec<PutItem<'_>> =
        chunk_idxs.zip(&parts).map(|(idx, parts)| PutItem::new(content_key(idx), parts)).collect();
    tier.put(&mut batch);
    batch.into_iter().map(|item| item.outcome).collect()
}

fn get_batch(tier: &dyn Tier, chunk_idxs: std::ops::Range<u64>, n_bytes: usize) -> Vec<GetOutcome> {
    let mut buffers: Vec<Vec<u8>> = chunk_idxs.clone().map(|_| vec![0; n_bytes]).collect();
    let mut batch: Vec<GetItem<'_>> = chunk_idxs
        .clone()
        .zip(&mut buffers)
        .map(|(idx, buffer)| GetItem::whole(content_key(idx), buffer))
        .collect();
    tier.get(&mut batch);
    let outcomes: Vec<GetOutcome> = batch.into_iter().map(|item| item.outcome).collect();
    for ((outcome, buffer), idx) in outcomes.iter().zip(&buffers).zip(chunk_idxs) {
        assert!(!outcome.is_hit() || *buffer == content(content_key(idx), n_bytes), "a hit with other bytes");
    }
    outcomes
}

/// How many calls and items of an operation reached a tier.
fn asked<T: Tier>(metered: &Metered<T>, operation: &str) -> (u64, u64) {
    let metrics = metered.snapshot();
    let metrics = metrics.operation(operation).unwrap();
    (metrics.latencies.n_calls(), metrics.outcomes.iter().map(|(_, count)| count).sum())
}

/// A tier each of whose items calls `hook` while it is under way.
fn interrupted<T: Tier>(inner: T, hook: impl Fn() + Send + Sync + 'static) -> Faulty<T> {
    let rates = FaultRates { delay: 1000, max_delay: Duration::from_secs(1), ..FaultRates::default() };
    Faulty::with_clock(
        inner,
        rates,
        1,
        Arc::new(HookClock { clock: ManualClock::new(), hook: Box::new(hook) }),
    )
}

/// A clock that calls a hook instead of pausing.
struct HookClock {
    clock: ManualClock,
    hook: Box<dyn Fn() + Send + Sync>,
}

impl Clock for HookClock {
    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn pause(&self, _duration: Duration) {
        (self.hook)();
    }
}

impl std::fmt::Debug for HookClock {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("HookClock")
    }
}
