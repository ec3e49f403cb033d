//! Requests that come and go at random while an engine that is too small for them runs.

use std::cell::RefCell;

use kvik_model::{BLOCK_TOKENS, Engine, EngineOptions, GenerateRequest, RequestId, SamplingParams};
use proptest::prelude::*;

use super::requests::{Outputs, alone, collect, engine, is_start_of};
use super::{TestModel, runner};

/// Tokens of the fixtures that are used here; all have at least 64.
const VOCAB_SIZE: u32 = 64;

/// A request and when it comes and goes, in steps of the engine.
#[derive(Debug, Clone)]
pub struct Visit {
    /// The request.
    pub request: GenerateRequest,
    /// Step before which it is submitted.
    pub arrival: usize,
    /// Step before which it is canceled.
    pub cancel: Option<usize>,
}

/// How the engine under test is set up.
#[derive(Debug, Clone)]
pub struct Setup {
    max_batched_tokens: usize,
    max_sequences: usize,
    n_spare_blocks: usize,
    reuses_prefixes: bool,
}

fn sampling_params() -> impl Strategy<Value = SamplingParams> {
    let choosing = (
        prop_oneof![2 => Just(0.0_f32), 3 => 0.5..3.0_f32],
        prop_oneof![Just(0_u32), 1..20_u32],
        prop_oneof![Just(1.0_f32), 0.3..1.0_f32],
        prop_oneof![Just(0.0_f32), 0.0..0.3_f32],
        any::<u64>(),
    );
    let penalties = (
        prop_oneof![2 => Just(1.0_f32), 1 => 0.8..1.5_f32],
        prop_oneof![2 => Just(0.0_f32), 1 => -1.0..1.0_f32],
        prop_oneof![2 => Just(0.0_f32), 1 => -1.0..1.0_f32],
    );
    let ending = (
        prop::collection::vec(0..VOCAB_SIZE, 0..3),
        any::<bool>(),
        prop_oneof![Just(None), (0..4_u32).prop_map(Some)],
        prop_oneof![3 => Just(1_u32), 1 => 2..4_u32],
        1..24_u32,
    );
    (choosing, penalties, ending).prop_map(|(choosing, penalties, ending)| SamplingParams {
        temperature: choosing.0,
        top_k: choosing.1,
        top_p: choosing.2,
        min_p: choosing.3,
        seed: Some(choosing.4),
        repetition_penalty: penalties.0,
        presence_penalty: penalties.1,
        frequency_penalty: penalties.2,
        stop_token_ids: ending.0,
        ignore_eos: ending.1,
        logprobs: ending.2,
        n: ending.3,
        max_tokens: ending.4,
        ..SamplingParams::default()
    })
}

/// Visits whose prompts share starts of random lengths with one another.
pub fn visits() -> impl Strategy<Value = Vec<Visit>> {
    let visit = (
        (0..=30_usize, prop::collection::vec(0..VOCAB_SIZE, 1..12)),
        sampling_params(),
        0..30_usize,
        prop_oneof![4 => Just(None), 1 => (0..30_usize).prop_map(Some)],
    );
    let stem = prop::collection::vec(0..VOCAB_SIZE, 30);
    (stem, prop::collection::vec(visit, 1..8)).prop_map(|(stem, visits)| {
        visits
            .into_iter()
            .map(|((n_shared, own), sampling, arrival, cancel_after)| Visit {
                request: GenerateRequest { prompt: [&stem[..n_shared], &own].concat(), sampling },
                arrival,
                cancel: cancel_after.map(|steps| arrival + steps),
            })
            .collect()
    })
}

fn setups() -> impl Strategy<Value = Setup> {
    (prop_oneof![1..8_usize, 1..=64_usize], 1..=8_usize, 0..6_usize, any::<bool>()).prop_map(
        |(max_batched_tokens, max_sequences, n_spare_blocks, reuses_prefixes)| Setup {
            max_batched_tokens,
            max_sequences,
            n_spare_blocks,
            reuses_prefixes,
        },
    )
}

impl Setup {
    /// An engine whose blocks hold the longest of `visits` and a few more, so that several of them
    /// are too many.
    pub fn engine(&self, model: &TestModel, visits: &[Visit]) -> Engine {
        let longest = visits
            .iter()
            .map(|visit| visit.request.prompt.len() + visit.request.sampling.max_tokens as usize)
            .max();
        let n_blocks = longest.unwrap_or(1).div_ceil(BLOCK_TOKENS) + self.n_spare_blocks;
        engine(model, n_blocks, self.options())
    }

    fn options(&self) -> EngineOptions {
        let mut options = EngineOptions::default();
        options.max_batched_tokens = self.max_batched_tokens;
        options.max_sequences = self.max_sequences;
        options.reuses_prefixes = self.reuses_prefixes;
        options
    }
}

/// Plays `visits`, each taken to the engine by `submit`, and returns what came of them; the id of a visit is at
/// its index.
fn play(
    engine: &mut Engine,
    visits: &[Visit],
    submit: impl Fn(&mut Engine, &Visit) -> RequestId,
) -> Result<(Vec<RequestId>, Outputs), TestCaseError> {
    let mut ids: Vec<Option<RequestId>> = vec![None; visits.len()];
    let mut outputs = Outputs::new();
    // Every step computes a row of the oldest sequence or chooses a token, and neither is lost.
    let n_rows = |visit: &Visit| {
        let sampling = &visit.request.sampling;
        sampling.n as usize * (visit.request.prompt.len() + 2 * sampling.max_tokens as usize)
    };
    let most_steps = 30 + visits.iter().map(n_rows).sum::<usize>();
    for step in 0.. {
        prop_assert!(step <= most_steps, "no end after {step} steps");
        for (visit, id) in visits.iter().zip(&mut ids) {
            if visit.arrival == step {
                *id = Some(submit(engine, visit));
            }
            if visit.cancel == Some(step)
                && let Some(id) = *id
            {
                engine.cancel(id);
            }
        }
        let mut events = Vec::new();
        engine.step(&mut events).unwrap();
        collect(events, &mut outputs);
        if engine.is_idle() && ids.iter().all(Option::is_some) {
            break;
        }
    }
    Ok((ids.into_iter().flatten().collect(), outputs))
}

/// Plays `visits` on `engine` and compares what comes of each with what comes of it alone.
pub fn check_visits(model: &TestModel, engine: &mut Engine, visits: &[Visit]) -> Result<(), TestCaseError> {
    check_visits_by(model, engine, visits, |engine, visit| engine.submit(visit.request.clone()).unwrap())
}

/// As [`check_visits`], each visit taken to the engine by `submit`.
pub fn check_visits_by(
    model: &TestModel,
    engine: &mut Engine,
    visits: &[Visit],
    submit: impl Fn(&mut Engine, &Visit) -> RequestId,
) -> Result<(), TestCaseError> {
    let (ids, outputs) = play(engine, visits, submit)?;
    for (visit, id) in visits.iter().zip(ids) {
        for (choice, expected) in alone(model, None, &visit.request).iter().enumerate() {
            let actual = outputs.get(&(id, choice as u32));
            match actual {
                Some(actual) if actual.reason.is_some() => {
                    prop_assert_eq!(&actual.tokens, &expected.tokens);
                    prop_assert_eq!(&actual.logprobs, &expected.logprobs);
                    prop_assert_eq!(actual.reason, expected.reason);
                    prop_assert_eq!(actual.usage.completion_tokens, expected.usage.completion_tokens);
                    prop_assert_eq!(actual.usage.prompt_tokens, visit.request.prompt.len());
                    prop_assert!(actual.usage.cached_tokens < visit.request.prompt.len());
                }
                Some(part) => {
                    prop_assert!(visit.cancel.is_some(), "an output has no end");
                    prop_assert!(is_start_of(part, expected));
                }
                None => prop_assert!(visit.cancel.is_some(), "an output is missing"),
            }
        }
    }
    let pool = engine.pool_stats();
    prop_assert_eq!(pool.n_free, pool.n_blocks);
    prop_assert!(engine.is_idle());
    Ok(())
}

/// What happened in all schedules together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Times a sequence had to give its blocks back.
    pub n_preemptions: u64,
    /// Blocks copied on write.
    pub n_block_copies: u64,
    /// Prompt tokens found in the pool.
    pub n_cached_tokens: u64,
    /// Registered blocks whose place was taken.
    pub n_evicted: u64,
}

/// Plays random visits on a random engine, `n_cases` times.
///
/// # Panics
/// If what comes of a request is not what comes of it alone.
pub fn check_random_visits(model: &TestModel, n_cases: u32) -> Totals {
    let totals = RefCell::new(Totals::default());
    for_random_visits(model, n_cases, |setup, visits| {
        let mut engine = setup.engine(model, visits);
        check_visits(model, &mut engine, visits)?;
        let (stats, mut totals) = (engine.stats(), totals.borrow_mut());
        totals.n_preemptions += stats.n_preemptions;
        totals.n_block_copies += stats.n_block_copies;
        totals.n_cached_tokens += stats.n_cached_tokens;
        totals.n_evicted += engine.pool_stats().n_evicted;
        Ok(())
    });
    totals.into_inner()
}

/// Calls `check` with random visits and a random setup, `n_cases` times.
///
/// # Panics
/// If it fails.
pub fn for_random_visits(
    model: &TestModel,
    n_cases: u32,
    check: impl Fn(&Setup, &[Visit]) -> Result<(), TestCaseError>,
) {
    let outcome = runner(n_cases).run(&(setups(), visits()), |(setup, visits)| check(&setup, &visits));
    if let Err(error) = outcome {
        panic!("{}: {error}", model.name);
    }
}
