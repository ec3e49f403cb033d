//! The questions about notes that come with the bundled model.

use std::collections::BTreeMap;

use kvik_model::{CpuBackendOptions, Engine, EngineOptions, GenerateRequest, Model, SamplingParams};
use kvik_tokens::AddSpecial;
use kvik_types::Dtype;

use super::bundled_folder;
use super::requests::run;

/// Right answers by the number of notes in the prompt.
pub type Score = BTreeMap<u64, usize>;

/// Asks all questions in one batch, keys and values kept in `kv_dtype`. An answer is right if the
/// greedy text starts with the expected one.
pub fn score(kv_dtype: Dtype) -> Score {
    let model = Model::bundled().unwrap();
    let mut backend = CpuBackendOptions::default();
    backend.kv_dtype = kv_dtype;
    score_of(&model, model.cpu_engine(&backend, EngineOptions::default()).unwrap())
}

/// As [`score`], of an engine of the bundled model.
pub fn score_of(model: &Model, mut engine: Engine) -> Score {
    let text = std::fs::read_to_string(bundled_folder().join("notes_qa.jsonl")).unwrap();
    let mut expected = BTreeMap::new();
    for line in text.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let answer = line["answer"].as_str().unwrap().to_owned();
        let n_answer = model.tokenizer().encode(&answer, AddSpecial::No).unwrap().len();
        let prompt = model.tokenizer().encode(line["prompt"].as_str().unwrap(), AddSpecial::Yes).unwrap();
        // The answer may come out as other tokens than it encodes to, and as more of them.
        let sampling = SamplingParams::greedy(n_answer as u32 + 4);
        let id = engine.submit(GenerateRequest { prompt, sampling }).unwrap();
        expected.insert(id, (line["notes"].as_u64().unwrap(), answer));
    }
    assert_eq!(expected.len(), 300);
    let mut score = Score::new();
    for ((request, _), output) in run(&mut engine) {
        let (n_notes, answer) = &expected[&request];
        *score.entry(*n_notes).or_default() += usize::from(output.text.starts_with(answer.as_str()));
    }
    score
}
