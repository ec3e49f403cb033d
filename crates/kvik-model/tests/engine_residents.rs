//! Named sequences: what stays after their end, what a client steps, what goes out and in.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use kvik_model::{
    CpuBackendOptions, Engine, EngineEvent, EngineOptions, GenerateRequest, Model, ModelError,
    SamplingParams, SubmitOptions, Usage,
};
use kvik_tokens::AddSpecial;

const PROMPT: &str = "Once upon a time there was a little dog who had a red ball and a";

fn engine(model: &Model, n_blocks: usize) -> Engine {
    let mut backend = CpuBackendOptions::default();
    backend.n_blocks = n_blocks;
    model.cpu_engine(&backend, EngineOptions::default()).unwrap()
}

fn named(name: &str) -> SubmitOptions {
    SubmitOptions { name: Some(name.to_owned()), ..SubmitOptions::default() }
}

fn request(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let mut sampling = SamplingParams::greedy(max_tokens);
    sampling.ignore_eos = true;
    GenerateRequest { prompt: prompt.to_vec(), sampling }
}

/// The tokens of all events, and the usage of the last output that ended.
fn outcome(events: &[EngineEvent]) -> (Vec<u32>, Usage) {
    let mut tokens = Vec::new();
    let mut last_usage = Usage::default();
    for event in events {
        match event {
            EngineEvent::Token(event) => tokens.push(event.token),
            EngineEvent::Finished { usage, .. } => last_usage = *usage,
            EngineEvent::Admitted { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    (tokens, last_usage)
}

fn generate(
    engine: &mut Engine,
    prompt: &[u32],
    max_tokens: u32,
    options: SubmitOptions,
) -> (Vec<u32>, Usage) {
    engine.submit_with(request(prompt, max_tokens), options).unwrap();
    outcome(&engine.run_until_idle().unwrap())
}

fn prompt(model: &Model) -> Vec<u32> {
    model.tokenizer().encode(PROMPT, AddSpecial::Yes).unwrap()
}

#[test]
fn the_next_turn_of_a_named_sequence_computes_only_what_is_new() {
    let model = Model::bundled().unwrap();
    let mut engine = engine(&model, 64);
    let first = prompt(&model);
    let (output, _) = generate(&mut engine, &first, 7, named("a"));
    // Not a whole number of blocks: only a resident can know the last, partly filled one.
    let n_resident = first.len() + output.len() - 1;
    assert_ne!(n_resident % 16, 0);
    assert_eq!(engine.resident_tokens("a").unwrap().len(), n_resident);
    let mut second = [first.as_slice(), &output].concat();
    second.extend(model.tokenizer().encode(" The end. And then", AddSpecial::No).unwrap());
    let (continued, usage) = generate(&mut engine, &second, 9, named("a"));
    assert_eq!(usage.cached_tokens, n_resident);
    let mut fresh = self::engine(&model, 64);
    let (expected, usage) = generate(&mut fresh, &second, 9, SubmitOptions::default());
    assert_eq!((continued, usage.cached_tokens), (expected, 0));
}

#[test]
fn a_resident_that_parts_from_the_prompt_inside_a_block_is_used_up_to_there_and_not_changed_for_others() {
    let model = Model::bundled().unwrap();
    let mut engine = engine(&model, 64);
    let first: Vec<u32> = (0..40).map(|idx| 100 + idx * 3).collect();
    generate(&mut engine, &first, 4, named("a"));
    let mut second = first.clone();
    second.truncate(23);
    second.extend([7, 8, 9, 10]);
    let (tokens, usage) = generate(&mut engine, &second, 6, named("a"));
    assert_eq!(usage.cached_tokens, 23);
    let mut fresh = self::engine(&model, 64);
    assert_eq!(tokens, generate(&mut fresh, &second, 6, SubmitOptions::default()).0);
    // The registered block in which the two part still belongs to the first prompt.
    let (again, usage) = generate(&mut engine, &first, 6, SubmitOptions::default());
    assert!(32 <= usage.cached_tokens);
    assert_eq!(again, generate(&mut fresh, &first, 6, SubmitOptions::default()).0);
}

#[test]
fn residents_give_way_to_running_sequences_oldest_first() {
    let model = Model::bundled().unwrap();
    let mut engine = engine(&model, 8);
    let prompts: Vec<Vec<u32>> =
        (0..3).map(|idx| (0..30).map(|token| 50 + idx * 40 + token).collect()).collect();
    for (idx, prompt) in prompts.iter().enumerate() {
        generate(&mut engine, prompt, 3, named(&format!("s{idx}")));
    }
    assert_eq!((engine.n_residents(), engine.pool_stats().n_free), (3, 2));
    generate(&mut engine, &(300..360).collect::<Vec<u32>>(), 3, SubmitOptions::default());
    assert!(engine.resident_tokens("s0").is_none());
    assert!(engine.resident_tokens("s2").is_some());
    assert_eq!(engine.stats().n_preemptions, 0);
}

#[test]
fn a_sequence_with_credits_advances_by_what_was_granted_and_gives_the_same_tokens() {
    let model = Model::bundled().unwrap();
    let mut engine = engine(&model, 64);
    let prompt = prompt(&model);
    let (expected, _) = generate(&mut engine, &prompt, 10, SubmitOptions::default());
    let options = SubmitOptions { credits: Some(1), ..SubmitOptions::default() };
    let id = engine.submit_with(request(&prompt, 10), options).unwrap();
    let mut tokens = outcome(&engine.run_until_idle().unwrap()).0;
    assert_eq!(tokens.len(), 1);
    for n in [1, 3, 2, 9] {
        engine.grant(id, n);
        tokens.extend(outcome(&engine.run_until_idle().unwrap()).0);
        assert_eq!(tokens.len(), (tokens.len()).min(10));
    }
    assert_eq!(tokens, expected);
    assert!(engine.is_idle());
}

#[test]
fn sequences_that_wait_for_credits_neither_block_others_nor_lose_their_place() {
    let model = Model::bundled().unwrap();
    let mut backend = CpuBackendOptions::default();
    backend.n_blocks = 6;
    let mut options = EngineOptions::default();
    options.max_sequences = 2;
    let mut engine = model.cpu_engine(&backend, options).unwrap();
    let prompts: Vec<Vec<u32>> =
        (0..3).map(|idx| (0..40).map(|token| 50 + idx * 40 + token).collect()).collect();
    let mut fresh = self::engine(&model, 64);
    let expected: Vec<Vec<u32>> =
        prompts.iter().map(|prompt| generate(&mut fresh, prompt, 5, SubmitOptions::default()).0).collect();
    let mut ids = Vec::new();
    let mut outputs = vec![Vec::new(); 3];
    // Two blocks of three sequences do not fit: a waiting sequence is preempted for one that may advance.
    for prompt in &prompts {
        let options = SubmitOptions { credits: Some(1), ..SubmitOptions::default() };
        ids.push(engine.submit_with(request(prompt, 5), options).unwrap());
    }
    for _ in 0..5 {
        for event in engine.run_until_idle().unwrap() {
            if let EngineEvent::Token(event) = event {
                let idx = ids.iter().position(|&id| id == event.request).unwrap();
                outputs[idx].push(event.token);
            }
        }
        for &id in &ids {
            engine.grant(id, 1);
        }
    }
    assert_eq!(outputs, expected);
    assert!(0 < engine.stats().n_preemptions);
    assert_eq!(engine.pool_stats().n_free, 6);
}

#[test]
fn exported_kv_continues_in_another_engine_to_the_same_bits() {
    let model = Model::bundled().unwrap();
    let prompt = prompt(&model);
    let mut source = engine(&model, 64);
    let (output, _) = generate(&mut source, &prompt, 5, named("moving"));
    let n_layers = model.config().n_layers;
    let kv = source.export_kv("moving", 0..n_layers).unwrap().unwrap();
    let mut destination = engine(&model, 64);
    destination.import_kv("moving", &kv).unwrap();
    let next: Vec<u32> = prompt.iter().chain(&output).copied().collect();
    let (moved, usage) = generate(&mut destination, &next, 20, named("moving"));
    assert_eq!(usage.cached_tokens, kv.tokens.len());
    let (stayed, _) = generate(&mut source, &next, 20, named("moving"));
    assert_eq!(moved, stayed);
    let [moved, kept] =
        [&mut destination, &mut source].map(|engine| engine.export_kv("moving", 0..n_layers).unwrap());
    assert_eq!(moved, kept);
}

#[test]
fn imported_kv_is_found_by_name_alone() {
    let model = Model::bundled().unwrap();
    let prompt: Vec<u32> = (0..50).map(|token| token + 60).collect();
    let mut source = engine(&model, 64);
    generate(&mut source, &prompt, 2, named("a"));
    let mut kv = source.export_kv("a", 0..model.config().n_layers).unwrap().unwrap();
    // Foreign KV that is wrong must reach only requests that asked for it.
    kv.layers.iter_mut().for_each(|layer| layer.values.fill(0));
    let mut destination = engine(&model, 64);
    destination.import_kv("a", &kv).unwrap();
    let (_, usage) = generate(&mut destination, &prompt, 20, named("a"));
    assert_eq!(usage.cached_tokens, prompt.len() - 1);
    let (tokens, usage) = generate(&mut destination, &prompt, 20, SubmitOptions::default());
    assert_eq!(usage.cached_tokens, 0);
    assert_eq!(tokens, generate(&mut source, &prompt, 20, SubmitOptions::default()).0);
}

#[test]
fn kv_that_does_not_fit_the_model_is_refused_and_nothing_is_held() {
    let model = Model::bundled().unwrap();
    let mut source = engine(&model, 64);
    generate(&mut source, &(60..90).collect::<Vec<u32>>(), 2, named("a"));
    let kv = source.export_kv("a", 0..model.config().n_layers).unwrap().unwrap();
    let mut destination = engine(&model, 4);
    let mut short = kv.clone();
    short.layers.pop();
    assert!(destination.import_kv("a", &short).unwrap_err().to_string().contains("`layers`"));
    let mut truncated = kv.clone();
    truncated.layers[3].keys.pop();
    assert!(destination.import_kv("a", &truncated).unwrap_err().to_string().contains("`k`"));
    let mut foreign = kv.clone();
    foreign.tokens[0] = 1_000_000;
    assert!(destination.import_kv("a", &foreign).unwrap_err().to_string().contains("`token_ids`"));
    assert_eq!(destination.pool_stats().n_free, 4);
    destination.import_kv("a", &kv).unwrap();
    assert!(destination.forget_resident("a"));
    assert_eq!(destination.pool_stats().n_free, 4);
}

#[test]
fn kv_waits_for_the_room_that_running_sequences_hold() {
    let model = Model::bundled().unwrap();
    let mut source = engine(&model, 64);
    let tokens: Vec<u32> = (60..100).collect();
    generate(&mut source, &tokens, 1, named("a"));
    let kv = source.export_kv("a", 0..source.config().n_layers).unwrap().unwrap();
    let mut destination = engine(&model, 4);
    let running = destination.submit(request(&(200..230).collect::<Vec<_>>(), 20)).unwrap();
    destination.step(&mut Vec::new()).unwrap();
    let error = destination.import_kv("a", &kv).unwrap_err();
    assert!(matches!(error, ModelError::NoRoom { n_blocks: 3, n_free: 2 }), "{error}");
    destination.cancel(running);
    destination.import_kv("a", &kv).unwrap();
    assert_eq!(destination.resident_tokens("a"), Some(kv.tokens.as_slice()));
}

#[test]
fn a_resident_survives_a_turn_that_has_to_wait_for_room() {
    let model = Model::bundled().unwrap();
    let mut engine = engine(&model, 8);
    let first: Vec<u32> = (60..85).collect();
    let (output, _) = generate(&mut engine, &first, 2, named("a"));
    let n_resident = engine.resident_tokens("a").unwrap().len();
    // Five of the six free blocks; the next turn needs four more than its resident has.
    let long: Vec<u32> = (200..270).collect();
    engine.submit(request(&long, 8)).unwrap();
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    let mut second = [first.as_slice(), &output].concat();
    second.extend(300..350);
    let id = engine.submit_with(request(&second, 3), named("a")).unwrap();
    engine.step(&mut events).unwrap();
    assert_eq!((engine.n_waiting(), engine.resident_tokens("a").map(<[u32]>::len)), (1, Some(n_resident)));
    let events = engine.run_until_idle().unwrap();
    let usage = events.iter().find_map(|event| match event {
        EngineEvent::Finished { request, usage, .. } if *request == id => Some(*usage),
        _ => None,
    });
    assert_eq!(usage.unwrap().cached_tokens, n_resident);
    assert_eq!(engine.pool_stats().n_free + engine.n_resident_blocks(), 8);
}
