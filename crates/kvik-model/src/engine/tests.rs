use std::time::Duration;

use kvik_types::CacheSalt;

use super::hashes::N_HASHED;
use super::*;
use crate::{CpuBackendOptions, GenerateRequest, Model, SamplingParams};

#[test]
fn a_block_is_hashed_once_from_the_match_to_the_end_of_its_sequence() {
    let model = Model::bundled().unwrap();
    let backend = CpuBackendOptions { n_threads: 1, ..CpuBackendOptions::default() };
    let mut engine = model.cpu_engine(&backend, EngineOptions::default()).unwrap();
    let mut sampling = SamplingParams::greedy(20);
    sampling.ignore_eos = true;
    for salt in [None, Some(CacheSalt::try_new("a").unwrap())] {
        let before = N_HASHED.get();
        let request = GenerateRequest { prompt: (10..74).collect(), sampling: sampling.clone() };
        let prepared = engine.prepare(request, SubmitOptions { salt, ..SubmitOptions::default() });
        assert_eq!(engine.matched_tokens(&prepared), 0);
        engine.submit_prepared(prepared, None).unwrap();
        engine.run_until_idle().unwrap();
        // 64 tokens of the prompt and 19 of the output, whose last token is not computed.
        assert_eq!(N_HASHED.get() - before, 83 / BLOCK_TOKENS);
    }
}

#[test]
fn a_warm_up_says_how_fast_the_engine_is_and_leaves_nothing_behind() {
    let model = Model::bundled().unwrap();
    let backend = CpuBackendOptions { n_threads: 1, ..CpuBackendOptions::default() };
    let request = || {
        let sampling = SamplingParams { max_tokens: 12, ..SamplingParams::default() };
        GenerateRequest { prompt: (10..74).collect(), sampling }
    };
    let mut cold = model.cpu_engine(&backend, EngineOptions::default()).unwrap();
    let mut warm = model.cpu_engine(&backend, EngineOptions::default()).unwrap();
    let passes = warm.warm_up(Duration::from_mins(1)).unwrap();
    let n_tokens: Vec<usize> = passes.iter().map(|pass| pass.n_tokens).collect();
    assert_eq!(n_tokens, [64, 256, 512]);
    assert!(passes.iter().all(|pass| 0.0 < pass.seconds), "{passes:?}");
    assert_eq!(passes[1].n_attended, 256 * 257 / 2);
    assert_eq!((warm.stats(), warm.n_submitted), (cold.stats(), cold.n_submitted));
    assert_eq!(warm.pool_stats().n_registered, 0);
    assert_eq!(warm.pool_stats().n_free, cold.pool_stats().n_free);
    // The seed of a request without one is that of its number.
    let [of_cold, of_warm] = [&mut cold, &mut warm].map(|engine| {
        engine.submit(request()).unwrap();
        format!("{:?}", engine.run_until_idle().unwrap())
    });
    assert_eq!(of_warm, of_cold);
}

#[test]
fn a_warm_up_that_has_no_room_or_no_time_is_short() {
    let model = Model::bundled().unwrap();
    let backend = CpuBackendOptions { n_threads: 1, n_blocks: 3, ..CpuBackendOptions::default() };
    let mut small = model.cpu_engine(&backend, EngineOptions::default()).unwrap();
    assert_eq!(small.warm_up(Duration::from_mins(1)).unwrap(), []);
    let backend = CpuBackendOptions { n_blocks: 64, ..backend };
    let mut engine = model.cpu_engine(&backend, EngineOptions::default()).unwrap();
    assert_eq!(engine.warm_up(Duration::ZERO).unwrap().len(), 1);
}
