//! Requests that one engine begins and another one ends.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use kvik_model::{
    Begun, BegunOutput, CpuBackendOptions, Engine, EngineEvent, EngineOptions, GenerateRequest, Model,
    ModelError, RequestId, SamplingParams, SubmitOptions,
};
use kvik_tokens::AddSpecial;

const PROMPTS: [&str; 3] = [
    "Once upon a time there was a little girl who had a red ball and a blue ball and liked to play with",
    "Note 1: In Quarry there is a builder named Olga. Olga has a striped chair.\nQuestion: What is the job of Olga?\nAnswer:",
    "The sun",
];

/// What a client sees: by choice, tokens with their texts and the bits of their log probabilities, and the end.
type Seen = Vec<(u32, String)>;

fn engine(model: &Model, n_blocks: usize) -> Engine {
    let mut backend = CpuBackendOptions::default();
    backend.n_blocks = n_blocks;
    let mut options = EngineOptions::default();
    options.max_batched_tokens = 24;
    model.cpu_engine(&backend, options).unwrap()
}

fn samplings() -> Vec<SamplingParams> {
    let sampled = SamplingParams {
        temperature: 1.0,
        top_p: 0.95,
        seed: Some(11),
        repetition_penalty: 1.1,
        presence_penalty: 0.3,
        max_tokens: 24,
        ..SamplingParams::default()
    };
    let several = SamplingParams { n: 3, stop: vec!["the".to_owned(), ".".to_owned()], ..sampled.clone() };
    let greedy = SamplingParams { logprobs: Some(2), ignore_eos: true, ..SamplingParams::greedy(40) };
    vec![sampled, several, greedy]
}

fn seen(event: &EngineEvent) -> Option<(u32, String)> {
    match event {
        EngineEvent::Token(token) => {
            let bits = token.logprobs.as_ref().map(|at| at.chosen.to_bits());
            Some((token.choice, format!("{} {:?} {bits:?}", token.token, token.text)))
        }
        EngineEvent::Finished { choice, text, reason, usage, .. } => {
            let usage = (usage.prompt_tokens, usage.completion_tokens);
            Some((*choice, format!("{text:?} {} {usage:?}", reason.as_str())))
        }
        EngineEvent::Admitted { .. } => None,
        other => panic!("{other:?}"),
    }
}

/// The same events by choice: choices run side by side, in an order that a client must not rely on.
fn by_choice(events: &[EngineEvent]) -> Seen {
    let mut all: Seen = events.iter().filter_map(seen).collect();
    all.sort_by_key(|(choice, _)| *choice);
    all
}

fn begun(events: &[EngineEvent], n_choices: u32) -> Begun {
    let mut begun = Begun { outputs: vec![BegunOutput::default(); n_choices as usize], cached_tokens: None };
    for event in events {
        match event {
            EngineEvent::Token(token) => begun.outputs[token.choice as usize].tokens.push(token.token),
            EngineEvent::Finished { choice, .. } => begun.outputs[*choice as usize].is_ended = true,
            EngineEvent::Admitted { cached_tokens, .. } => begun.cached_tokens = Some(*cached_tokens),
            other => panic!("{other:?}"),
        }
    }
    begun
}

/// Copies all full blocks of all outputs of a running request to another engine; the blocks that are there then.
fn copy_blocks(from: &mut Engine, id: RequestId, to: &mut Engine, prompt: &[u32], begun: &Begun) -> usize {
    let mut n_blocks = 0;
    for choice in 0..begun.outputs.len() as u32 {
        let (stage, staged) = to.stage(prompt, None);
        let mut first_block = staged.n_blocks;
        while let Some(lent) = from.lend_blocks(id, choice, first_block, 2) {
            let mut kv = Vec::new();
            lent.read(0..lent.n_blocks(), &mut kv).unwrap();
            let staged = to.stage_blocks(stage, first_block, lent.tokens(), &kv).unwrap();
            assert_eq!(staged.n_blocks, first_block + lent.n_blocks());
            first_block = staged.n_blocks;
        }
        n_blocks += first_block;
    }
    n_blocks
}

#[test]
fn a_request_goes_on_in_another_engine_after_any_token_as_if_it_had_stayed() {
    let model = Model::bundled().unwrap();
    for (prompt, sampling) in PROMPTS.iter().zip(samplings()) {
        let prompt = model.tokenizer().encode(prompt, AddSpecial::Yes).unwrap();
        let n_choices = sampling.n;
        let request = GenerateRequest { prompt: prompt.clone(), sampling };
        let mut whole = engine(&model, 64);
        whole.submit(request.clone()).unwrap();
        let expected = by_choice(&whole.run_until_idle().unwrap());
        for moves_kv in [false, true] {
            // With KV at some places only: copies take most of the time.
            for n_steps in (0..usize::MAX).step_by(if moves_kv { 3 } else { 1 }) {
                let (mut source, mut destination) = (engine(&model, 64), engine(&model, 64));
                let id = source.submit(request.clone()).unwrap();
                let mut events = Vec::new();
                for _ in 0..n_steps {
                    source.step(&mut events).unwrap();
                }
                if !source.has_work() {
                    break;
                }
                let begun = begun(&events, n_choices);
                if moves_kv {
                    copy_blocks(&mut source, id, &mut destination, &prompt, &begun);
                }
                source.set_frozen(id, true);
                assert!(!source.has_work(), "a frozen request does not advance");
                let mut sampling = request.sampling.clone();
                sampling.seed = source.seed(id);
                let request = GenerateRequest { prompt: prompt.clone(), sampling };
                let prepared = destination.prepare(request, SubmitOptions::default());
                let known = destination.matched_tokens(&prepared);
                destination.submit_begun(prepared, &begun, None).unwrap();
                let before = destination.stats().n_computed_tokens;
                let rest = destination.run_until_idle().unwrap();
                if moves_kv && prompt.len() / 16 * 16 < prompt.len() && !begun.outputs[0].tokens.is_empty() {
                    assert_eq!(known, prompt.len() / 16 * 16);
                    let n_rows = destination.stats().n_computed_tokens - before;
                    // Of each output the tail of a block, and what it was still to say.
                    assert!(n_rows as usize <= n_choices as usize * (16 + 40), "{n_rows} rows");
                }
                events.extend(rest);
                assert_eq!(by_choice(&events), expected, "after {n_steps} steps, KV moved: {moves_kv}");
            }
        }
    }
}

#[test]
fn a_frozen_request_that_lost_its_blocks_goes_on_as_if_nothing_had_been() {
    let model = Model::bundled().unwrap();
    let prompt = model.tokenizer().encode(PROMPTS[0], AddSpecial::Yes).unwrap();
    let request = GenerateRequest { prompt, sampling: samplings()[2].clone() };
    let mut alone = engine(&model, 8);
    alone.submit(request.clone()).unwrap();
    let expected = by_choice(&alone.run_until_idle().unwrap());
    let mut engine = engine(&model, 8);
    let id = engine.submit(request.clone()).unwrap();
    let mut events = Vec::new();
    for _ in 0..9 {
        engine.step(&mut events).unwrap();
    }
    engine.set_frozen(id, true);
    // Needs nearly all blocks.
    let other = model.tokenizer().encode(&PROMPTS[1].repeat(4)[..380], AddSpecial::Yes).unwrap();
    let other = GenerateRequest { prompt: other, sampling: SamplingParams::greedy(4) };
    engine.submit(other).unwrap();
    engine.run_until_idle().unwrap();
    assert_eq!(engine.stats().n_preemptions, 1);
    engine.set_frozen(id, false);
    events.extend(engine.run_until_idle().unwrap());
    assert_eq!(by_choice(&events), expected);
}

#[test]
fn staged_blocks_are_let_go_when_running_sequences_need_them() {
    let model = Model::bundled().unwrap();
    let prompt = model.tokenizer().encode(PROMPTS[0], AddSpecial::Yes).unwrap();
    let request = GenerateRequest { prompt: prompt.clone(), sampling: samplings()[2].clone() };
    let (mut source, mut destination) = (engine(&model, 64), engine(&model, 8));
    let id = source.submit(request.clone()).unwrap();
    let mut events = Vec::new();
    for _ in 0..30 {
        source.step(&mut events).unwrap();
    }
    let so_far = begun(&events, 1);
    let n_blocks = copy_blocks(&mut source, id, &mut destination, &prompt, &so_far);
    assert!(1 < n_blocks && destination.n_staged() == 1);
    let free = destination.pool_stats().n_free;
    assert_eq!(free, 8 - n_blocks);
    let other = model.tokenizer().encode(&PROMPTS[1].repeat(4)[..380], AddSpecial::Yes).unwrap();
    assert!(free * 16 < other.len());
    destination.submit(GenerateRequest { prompt: other, sampling: SamplingParams::greedy(4) }).unwrap();
    destination.run_until_idle().unwrap();
    assert_eq!(destination.n_staged(), 0);
    assert_eq!(destination.pool_stats().n_free, 8);
    let prepared = destination.prepare(request.clone(), SubmitOptions::default());
    destination.submit_begun(prepared, &so_far, None).unwrap();
    events.extend(destination.run_until_idle().unwrap());
    events.retain(|event| !matches!(event, EngineEvent::Admitted { .. }));
    let mut alone = engine(&model, 64);
    alone.submit(request).unwrap();
    assert_eq!(by_choice(&events), by_choice(&alone.run_until_idle().unwrap()));
}

#[test]
fn blocks_with_a_gap_before_them_or_of_a_wrong_length_are_not_taken() {
    let model = Model::bundled().unwrap();
    let mut engine = engine(&model, 8);
    let block_bytes = engine.config().n_layers * engine.block_layer_bytes();
    let (stage, staged) = engine.stage(&[1; 40], None);
    assert_eq!(staged.n_blocks, 0);
    let gap = engine.stage_blocks(stage, 1, &[1; 16], &vec![0; block_bytes]).unwrap();
    assert_eq!(gap.n_blocks, 0);
    for (tokens, n_bytes) in
        [(vec![1; 16], block_bytes - 1), (vec![1; 15], block_bytes), (vec![1; 32], block_bytes)]
    {
        let error = engine.stage_blocks(stage, 0, &tokens, &vec![0; n_bytes]).unwrap_err();
        assert!(matches!(error, ModelError::InvalidRequest { .. }), "{error}");
    }
    assert!(engine.stage_blocks(stage, 0, &[u32::MAX; 16], &vec![0; block_bytes]).is_err());
    assert!(engine.stage_blocks(stage, usize::MAX, &[1; 16], &vec![0; block_bytes]).is_err());
    engine.unstage(stage);
    assert!(engine.stage_blocks(stage, 0, &[1; 16], &vec![0; block_bytes]).is_err());
    assert_eq!(engine.pool_stats().n_free, 8);
}
