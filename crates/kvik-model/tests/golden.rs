//! The bundled model against the outputs of an independent float32 implementation.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::path::Path;

use kvik_model::{
    Backend, BlockId, CpuBackend, CpuBackendOptions, EngineEvent, EngineOptions, GenerateRequest, Logits,
    Model, RowPositions, SamplingParams, SequenceRows,
};
use kvik_tokens::AddSpecial;
use serde_json::Value;

/// Largest difference of a first-step logit from the reference.
const LOGIT_TOLERANCE: f32 = 0.002;
/// Where the two best logits are closer than this, another summation order may choose the other.
const SMALLEST_COMPARABLE_MARGIN: f64 = 0.01;

fn lines(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/kvik-tiny").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ids(line: &Value, field: &str) -> Vec<u32> {
    line[field].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn greedy_tokens_are_those_of_the_float32_reference() {
    let model = Model::bundled().unwrap();
    let mut engine = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    let mut n_compared = 0;
    for line in lines("golden.jsonl") {
        let prompt = model.tokenizer().encode(line["prompt"].as_str().unwrap(), AddSpecial::Yes).unwrap();
        assert_eq!(prompt, ids(&line, "prompt_ids"));
        if line["smallest_margin"].as_f64().unwrap() <= SMALLEST_COMPARABLE_MARGIN {
            continue;
        }
        let expected = ids(&line, "greedy_ids");
        let sampling = SamplingParams::greedy(expected.len() as u32);
        engine.submit(GenerateRequest { prompt, sampling }).unwrap();
        let (mut actual, mut text) = (Vec::new(), String::new());
        for event in engine.run_until_idle().unwrap() {
            match event {
                EngineEvent::Token(token) => {
                    actual.push(token.token);
                    text.push_str(&token.text);
                }
                EngineEvent::Finished { text: rest, .. } => text.push_str(&rest),
                EngineEvent::Admitted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(actual, expected, "{}", line["prompt"]);
        assert_eq!(text, line["greedy_text"].as_str().unwrap());
        n_compared += 1;
    }
    assert!(15 <= n_compared, "only {n_compared} lines have a comparable margin");
}

#[test]
fn first_step_logits_are_those_of_the_float32_reference() {
    let model = Model::bundled().unwrap();
    let options = CpuBackendOptions::default();
    let mut backend = CpuBackend::load(model.config().clone(), model.checkpoint(), &options).unwrap();
    let table: Vec<BlockId> = (0..256).map(BlockId::new).collect();
    for line in lines("golden.jsonl") {
        let tokens = ids(&line, "prompt_ids");
        let mut logits = Logits::default();
        let rows = SequenceRows {
            tokens: &tokens,
            positions: RowPositions::From(0),
            block_table: &table,
            n_logits: 1,
        };
        backend.forward(&[rows], &mut logits).unwrap();
        for pair in line["first_step_top8"].as_array().unwrap() {
            let (token, expected) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap() as f32);
            let actual = logits.row(0)[token];
            assert!(
                (actual - expected).abs() <= LOGIT_TOLERANCE,
                "token {token}: {actual} is not {expected}"
            );
        }
    }
}
