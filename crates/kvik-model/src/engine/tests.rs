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
