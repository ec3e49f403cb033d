//! Engines that share memory: what one leaves, another takes, and no answers change.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvik_model::{
    BLOCK_TOKENS, CpuBackendOptions, Engine, EngineEvent, EngineOptions, GenerateRequest, MemoryGroup, Model,
    ModelError, RequestId, SamplingParams,
};

/// More than a test may ever take.
const DEADLINE: Duration = Duration::from_mins(5);

/// A page of the bundled model: 2 MiB in each of its layers.
fn page_bytes(model: &Model) -> u64 {
    (model.config().n_layers as u64) << 21
}

/// An engine of the group `ipc_name` on a device of `n_pages` pages.
fn engine(model: &Model, dir: &Path, ipc_name: &str, n_pages: u64) -> Engine {
    let mut backend = CpuBackendOptions::default();
    backend.n_blocks = 4096;
    backend.memory = Some(MemoryGroup {
        ipc_name: ipc_name.to_owned(),
        label: "test".to_owned(),
        limit_bytes: None,
        device_bytes: n_pages * page_bytes(model),
        page_bytes: None,
        is_preallocating: false,
        dir: dir.to_owned(),
    });
    model.cpu_engine(&backend, EngineOptions::default()).unwrap()
}

fn request(first_token: u32, n_prompt: u32, max_tokens: u32) -> GenerateRequest {
    let mut sampling = SamplingParams::greedy(max_tokens);
    sampling.ignore_eos = true;
    // Different prompts, so that each takes blocks of its own.
    let prompt = (0..n_prompt).map(|position| (first_token + position * 7) % 500 + 4).collect();
    GenerateRequest { prompt, sampling }
}

fn tokens_of(events: &[EngineEvent]) -> Vec<u32> {
    events
        .iter()
        .filter_map(|event| match event {
            EngineEvent::Token(event) => Some(event.token),
            EngineEvent::Failed { error, .. } => panic!("{error}"),
            _ => None,
        })
        .collect()
}

/// Steps `engine` until it is idle; `between` is called after each step.
fn run(engine: &mut Engine, mut between: impl FnMut()) -> Vec<u32> {
    let deadline = Instant::now() + DEADLINE;
    let mut events = Vec::new();
    while engine.has_work() {
        engine.step(&mut events).unwrap();
        between();
        if engine.is_starved() {
            std::thread::yield_now();
        }
        assert!(Instant::now() < deadline, "no memory in {DEADLINE:?}");
    }
    tokens_of(&events)
}

/// Fills the memory of `engine` with the prefixes of many requests.
fn fill(engine: &mut Engine, n_blocks: usize) {
    let mut first_token = 0;
    while engine.pool_stats().n_registered < n_blocks {
        engine.submit(request(first_token, 400, 1)).unwrap();
        run(engine, || ());
        first_token += 1;
    }
}

#[test]
fn an_engine_takes_memory_when_it_needs_it_and_answers_as_with_memory_of_its_own() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut shared = engine(&model, dir.path(), "group", 8);
    assert_eq!(shared.pool_stats().n_blocks, 0, "an engine that does nothing holds nothing");
    let mut own = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    for (first_token, n_prompt) in [(1, 5), (2, 300), (3, 480), (2, 300)] {
        shared.submit(request(first_token, n_prompt, 12)).unwrap();
        own.submit(request(first_token, n_prompt, 12)).unwrap();
        assert_eq!(run(&mut shared, || ()), run(&mut own, || ()));
    }
    assert_eq!(shared.stats().n_cached_tokens, own.stats().n_cached_tokens);
    assert!(shared.pool_stats().n_blocks > 0);
}

#[test]
fn memory_moves_to_the_engine_that_has_work_and_back() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut engines = [engine(&model, dir.path(), "group", 4), engine(&model, dir.path(), "group", 4)];
    let all_blocks = engines[0].max_blocks();
    fill(&mut engines[0], all_blocks - 64);
    assert_eq!(engines[0].pool_stats().n_blocks, all_blocks, "the first has all there is");
    let mut expected = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    for turn in 0..4 {
        let [first, second] = &mut engines;
        let (busy, idle) = if turn % 2 == 0 { (second, first) } else { (first, second) };
        let n_before = idle.pool_stats().n_blocks;
        let is_asked = Arc::new(AtomicBool::new(false));
        idle.set_memory_waker({
            let is_asked = Arc::clone(&is_asked);
            Box::new(move || is_asked.store(true, Ordering::SeqCst))
        });
        let first_token = 100 + turn;
        busy.submit(request(first_token, 450, 8)).unwrap();
        expected.submit(request(first_token, 450, 8)).unwrap();
        let tokens = run(busy, || {
            if is_asked.swap(false, Ordering::SeqCst) {
                idle.give_back_memory();
            }
        });
        assert_eq!(tokens, run(&mut expected, || ()));
        assert!(busy.pool_stats().n_blocks >= (450 / BLOCK_TOKENS));
        let n_after = idle.pool_stats().n_blocks;
        assert!(turn > 0 || n_after < n_before, "{n_before} blocks before, {n_after} after");
        // What is left in the engine that gave back is still right.
        idle.submit(request(first_token, 8, 4)).unwrap();
        expected.submit(request(first_token, 8, 4)).unwrap();
        assert_eq!(run(idle, || ()), run(&mut expected, || ()));
    }
}

#[test]
fn a_dead_engine_leaves_its_memory_to_the_others() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut first = engine(&model, dir.path(), "group", 2);
    let n_blocks = first.max_blocks();
    fill(&mut first, n_blocks - 64);
    let mut second = engine(&model, dir.path(), "group", 2);
    drop(first);
    fill(&mut second, n_blocks - 64);
    assert_eq!(second.pool_stats().n_blocks, n_blocks);
}

#[test]
fn a_request_that_gets_no_memory_fails_alone_and_says_so() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut first = engine(&model, dir.path(), "group", 1);
    let n_blocks = first.max_blocks();
    fill(&mut first, n_blocks - 64);
    // The first engine never gives back: it does not run.
    let mut second = engine(&model, dir.path(), "group", 1);
    second.submit(request(1, 64, 4)).unwrap();
    let mut events = Vec::new();
    second.step(&mut events).unwrap();
    assert!(second.is_starved());
    second.fail_starved(&mut events);
    assert!(
        matches!(events.last(), Some(EngineEvent::Failed { error: ModelError::NoMemory { .. }, .. })),
        "{events:?}"
    );
    assert!(!second.has_work());
    first.give_back_memory();
    drop(first);
    second.submit(request(1, 64, 4)).unwrap();
    assert_eq!(run(&mut second, || ()).len(), 4);
}

/// Both begin on a page of their own, and need a second one that the other has.
#[test]
fn two_requests_that_need_more_than_half_of_the_memory_are_both_answered() {
    let model = Model::bundled().unwrap();
    for names in [["one", "other"], ["group", "group"]] {
        let dir = tempfile::tempdir().unwrap();
        let mut engines = names.map(|name| engine(&model, dir.path(), name, 2));
        let page_tokens = engines[0].max_blocks() / 2 * BLOCK_TOKENS;
        let n_prompt = u32::try_from(page_tokens).unwrap() - 40;
        let requests = [request(1, n_prompt, 80), request(2, n_prompt, 80)];
        let mut own = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
        let expected = requests.clone().map(|request| {
            own.submit(request).unwrap();
            run(&mut own, || ())
        });
        for (engine, request) in engines.iter_mut().zip(requests) {
            engine.submit(request).unwrap();
        }
        assert_eq!(run_both(&mut engines), expected.map(|tokens| vec![tokens]));
    }
}

/// Steps engines in turn until all of them are idle; returns what each has answered, request by request.
fn run_both(engines: &mut [Engine; 2]) -> [Vec<Vec<u32>>; 2] {
    let mut events = [Vec::new(), Vec::new()];
    let deadline = Instant::now() + DEADLINE;
    while engines.iter().any(Engine::has_work) {
        for (engine, events) in engines.iter_mut().zip(&mut events) {
            if engine.has_work() {
                engine.step(events).unwrap();
            } else {
                engine.rest();
            }
        }
        std::thread::yield_now();
        assert!(Instant::now() < deadline, "they wait for each other");
    }
    events.map(|events| {
        let mut by_request: BTreeMap<RequestId, Vec<EngineEvent>> = BTreeMap::new();
        for event in events {
            if let EngineEvent::Token(token) = &event {
                by_request.entry(token.request).or_default().push(event);
            }
        }
        by_request.values().map(|events| tokens_of(events)).collect()
    })
}

#[test]
fn several_requests_that_each_need_more_than_half_of_the_memory_are_all_answered() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut engines = ["one", "other"].map(|name| engine(&model, dir.path(), name, 3));
    let page_tokens = engines[0].max_blocks() / 3 * BLOCK_TOKENS;
    let n_prompt = u32::try_from(page_tokens).unwrap() + 50;
    let mut own = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    for round in 0..3 {
        // The second time, each finds some of what it has computed before.
        let requests =
            [[1, 2], [3, 4]].map(|firsts| firsts.map(|first| request(first + round % 2, n_prompt, 4)));
        let expected = requests.clone().map(|requests| {
            let answers = requests.map(|request| {
                own.submit(request).unwrap();
                run(&mut own, || ())
            });
            answers.to_vec()
        });
        for (engine, requests) in engines.iter_mut().zip(requests) {
            for request in requests {
                engine.submit(request).unwrap();
            }
        }
        assert_eq!(run_both(&mut engines), expected, "round {round}");
    }
}

#[test]
fn a_bad_name_is_refused_with_what_is_allowed() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut backend = CpuBackendOptions::default();
    backend.memory = Some(MemoryGroup {
        ipc_name: "../escape".to_owned(),
        label: "test".to_owned(),
        limit_bytes: None,
        device_bytes: 1 << 30,
        page_bytes: None,
        is_preallocating: false,
        dir: dir.path().to_owned(),
    });
    let error = model.cpu_engine(&backend, EngineOptions::default()).unwrap_err().to_string();
    assert!(error.contains("`ipc_name`") && error.contains("letters"), "{error}");
    let leads_out = |name: &std::ffi::OsStr| name.to_string_lossy().contains("escape");
    let files = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!files.into_iter().any(|name| leads_out(&name)));
}
