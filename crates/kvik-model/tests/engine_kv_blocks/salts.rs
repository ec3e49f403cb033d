//! Salts keep the KV of requests apart that have the same tokens.

use kvik_model::{Engine, EngineOptions, SubmitOptions};
use kvik_types::CacheSalt;

use crate::support::TestModel;
use crate::support::requests::{engine, run};
use crate::{N_BLOCKS, greedy, tokens};

fn salted(name: Option<&str>, salt: Option<&str>) -> SubmitOptions {
    SubmitOptions {
        name: name.map(str::to_owned),
        salt: salt.map(|salt| CacheSalt::try_new(salt).unwrap()),
        ..SubmitOptions::default()
    }
}

/// Runs `prompt` and says how many of its tokens the engine had.
fn cached(engine: &mut Engine, prompt: &[u32], options: SubmitOptions) -> u64 {
    let before = engine.stats().n_cached_tokens;
    engine.submit_with(greedy(prompt, 2), options).unwrap();
    run(engine);
    engine.stats().n_cached_tokens - before
}

#[test]
fn a_prompt_finds_blocks_of_its_own_salt_alone() {
    let model = TestModel::fixture("qwen3");
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    let prompt = tokens(40, 1);
    for salt in [Some("a"), Some("b"), None] {
        assert_eq!(cached(&mut engine, &prompt, salted(None, salt)), 0, "{salt:?}");
        assert_eq!(cached(&mut engine, &prompt, salted(None, salt)), 32, "{salt:?}");
    }
}

#[test]
fn a_named_sequence_is_continued_with_its_own_salt_alone() {
    let model = TestModel::fixture("qwen3");
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    let prompt = tokens(40, 1);
    assert_eq!(cached(&mut engine, &prompt, salted(Some("talk"), Some("a"))), 0);
    assert_eq!(cached(&mut engine, &prompt, salted(Some("talk"), Some("a"))), 39);
    assert_eq!(cached(&mut engine, &prompt, salted(Some("talk"), Some("b"))), 0);
    assert_eq!(cached(&mut engine, &prompt, salted(Some("talk"), None)), 0);
    assert_eq!(cached(&mut engine, &prompt, salted(Some("talk"), None)), 39);
}

#[test]
fn kv_that_is_taken_out_and_put_back_keeps_its_salt() {
    let model = TestModel::fixture("qwen3");
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    let prompt = tokens(40, 1);
    cached(&mut engine, &prompt, salted(Some("talk"), Some("a")));
    let kv = engine.export_kv("talk", 0..engine.config().n_layers).unwrap().unwrap();
    engine.import_kv("other", &kv).unwrap();
    engine.import_kv("third", &kv).unwrap();
    assert_eq!(cached(&mut engine, &prompt, salted(Some("other"), None)), 0);
    assert_eq!(cached(&mut engine, &prompt, salted(Some("third"), Some("a"))), 39);
}
