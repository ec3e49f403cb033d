//! Blocks that come into memory which engines share.

use std::path::Path;
use std::time::{Duration, Instant};

use kvik_model::{
    BLOCK_TOKENS, CpuBackendOptions, Engine, EngineEvent, EngineOptions, GenerateRequest, MemoryGroup, Model,
};

use crate::support::requests::{Outputs, collect, run};
use crate::support::shelf::Shelf;
use crate::{greedy, only, submit_from};

/// An engine on a device of `n_pages` pages of 2 MiB in each layer.
fn sharing_engine(model: &Model, dir: &Path, n_pages: u64) -> Engine {
    let mut backend = CpuBackendOptions::default();
    backend.n_blocks = 4096;
    backend.memory = Some(MemoryGroup {
        ipc_name: "group".to_owned(),
        label: "test".to_owned(),
        limit_bytes: None,
        device_bytes: n_pages * ((model.config().n_layers as u64) << 21),
        page_bytes: None,
        is_preallocating: false,
        dir: dir.to_owned(),
    });
    model.cpu_engine(&backend, EngineOptions::default()).unwrap()
}

#[test]
fn what_fits_is_loaded_while_others_hold_the_memory_and_the_rest_is_computed_when_they_have_left() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..3000).map(|position| position * 7 % 500 + position % 3 + 4).collect();
    let shelf = Shelf::default();
    let mut own = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    own.set_kv_sink(shelf.sink());
    own.submit(greedy(&prompt, 4)).unwrap();
    let expected = only(run(&mut own));
    let mut first = sharing_engine(&model, dir.path(), 2);
    first.submit(greedy(&prompt[..100], 1)).unwrap();
    run(&mut first);
    let page_blocks = first.pool_stats().n_blocks;
    assert_eq!(2 * page_blocks, first.max_blocks());
    let mut second = sharing_engine(&model, dir.path(), 2);
    let id = submit_from(&mut second, greedy(&prompt, 4), shelf.prefix(&prompt, 0));
    let mut events = Vec::new();
    second.step(&mut events).unwrap();
    assert!(second.is_starved());
    let n_loaded = page_blocks * BLOCK_TOKENS;
    let is_admission = |event: &EngineEvent| {
        matches!(event, EngineEvent::Admitted { request, cached_tokens, loaded_tokens }
            if *request == id && *cached_tokens == n_loaded && *loaded_tokens == n_loaded)
    };
    assert!(matches!(&events[..], [event] if is_admission(event)), "{events:?}");
    drop(first);
    let deadline = Instant::now() + Duration::from_mins(1);
    while second.has_work() {
        second.step(&mut events).unwrap();
        assert!(Instant::now() < deadline, "no memory");
    }
    let mut outputs = Outputs::new();
    collect(events, &mut outputs);
    let output = only(outputs);
    assert_eq!((&output.tokens, &output.logprobs), (&expected.tokens, &expected.logprobs));
    assert_eq!(second.stats().n_computed_tokens as usize, prompt.len() - n_loaded + 3);
}

#[test]
fn shared_memory_takes_what_comes_in_and_answers_as_memory_of_its_own() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let shelf = Shelf::default();
    let requests: Vec<GenerateRequest> = (0..4)
        .map(|salt| {
            greedy(&(0..300).map(|position| (salt * 31 + position * 7) % 500 + 4).collect::<Vec<_>>(), 8)
        })
        .collect();
    let mut own = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    own.set_kv_sink(shelf.sink());
    for request in &requests {
        own.submit(request.clone()).unwrap();
    }
    let expected = run(&mut own);
    let deadline = Instant::now() + Duration::from_mins(1);
    for (request, expected) in requests.iter().zip(expected.values()) {
        // Engines of one page each: what one has left lies under the next one's blocks.
        let mut shared = sharing_engine(&model, dir.path(), 1);
        assert_eq!((shared.namespace(), shared.kv_layout()), (own.namespace(), own.kv_layout()));
        shared.set_kv_sink(shelf.sink());
        submit_from(&mut shared, request.clone(), shelf.prefix(&request.prompt, 0));
        let mut events = Vec::new();
        while shared.has_work() {
            shared.step(&mut events).unwrap();
            assert!(Instant::now() < deadline, "no memory");
        }
        let mut outputs = Outputs::new();
        collect(events, &mut outputs);
        let output = only(outputs);
        assert_eq!((&output.tokens, &output.logprobs), (&expected.tokens, &expected.logprobs));
        assert_eq!((output.usage.cached_tokens, output.usage.loaded_tokens), (288, 288));
    }
    assert_eq!(shelf.take_offers().len(), 8);
}
