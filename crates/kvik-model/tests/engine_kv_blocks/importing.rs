//! KV that is copied in beside passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvik_model::{
    Backend, BlockId, BlockSource, CpuBackend, Engine, EngineOptions, KvImport, ModelError, Result,
};
use proptest::prelude::*;

use crate::inner_backend::by_inner;
use crate::support::requests::{Outputs, collect};
use crate::support::{TestModel, backend_options, namespace};
use crate::{N_BLOCKS, assert_all_as_alone, assert_as_alone, greedy, only, shelf_of, submit_from, tokens};

/// When copies end, and how.
#[derive(Debug, Default)]
struct Gate {
    is_open: AtomicBool,
    fails: AtomicBool,
    /// Looks at a copy that are answered with no, once the gate is open.
    n_looks: AtomicUsize,
    n_under_way: AtomicUsize,
}

/// The real backend, with copies that end when a gate opens.
#[derive(Debug)]
struct Gated {
    inner: CpuBackend,
    gate: Arc<Gate>,
}

#[derive(Debug)]
struct GatedImport(Arc<Gate>);

impl Drop for GatedImport {
    fn drop(&mut self) {
        self.0.n_under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

impl KvImport for GatedImport {
    fn is_done(&self) -> bool {
        let n_looks = &self.0.n_looks;
        self.0.is_open.load(Ordering::Relaxed)
            && n_looks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_err()
    }

    fn finish(self: Box<Self>) -> Result<()> {
        if self.0.fails.load(Ordering::Relaxed) {
            return Err(ModelError::Device { call: "copy", reason: "as the test asks".to_owned() });
        }
        Ok(())
    }
}

impl Backend for Gated {
    by_inner! {
        config n_blocks forward forward_layers forward_watched place_kv copy_block kv_dtype export_kv import_kv
        kv_layout block_layer_bytes export_block pin_blocks import_block
    }

    fn imports_beside_passes(&self) -> bool {
        true
    }

    fn start_import(
        &mut self,
        source: &Arc<dyn BlockSource>,
        blocks: &[(usize, BlockId)],
    ) -> Option<Box<dyn KvImport>> {
        let garbage = vec![0x3f; self.block_layer_bytes()];
        for &(block_idx, block) in blocks {
            for layer_idx in 0..self.config().n_layers {
                // A copy that fails may have written anything.
                let fails = self.gate.fails.load(Ordering::Relaxed);
                let bytes = if fails { &garbage } else { source.block(layer_idx, block_idx)? };
                self.inner.import_block(layer_idx, block, bytes).unwrap();
            }
        }
        self.gate.n_under_way.fetch_add(1, Ordering::Relaxed);
        Some(Box::new(GatedImport(Arc::clone(&self.gate))))
    }
}

fn gated_engine(model: &TestModel, n_blocks: usize, options: EngineOptions) -> (Engine, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    let inner = model.backend(&backend_options(n_blocks));
    let backend = Box::new(Gated { inner, gate: Arc::clone(&gate) });
    (Engine::new(backend, None, &namespace(), options).unwrap(), gate)
}

#[test]
fn others_go_on_while_kv_is_copied_in_and_its_request_goes_on_from_it() {
    let model = TestModel::fixture("qwen3");
    let (prompt, other) = (tokens(101, 1), greedy(&tokens(20, 2), 12));
    let shelf = shelf_of(&model, &prompt);
    let (mut engine, gate) = gated_engine(&model, N_BLOCKS, EngineOptions::default());
    let id = submit_from(&mut engine, greedy(&prompt, 4), shelf.prefix(&prompt, 0));
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    assert!(events.is_empty() && !engine.has_work() && engine.is_waiting_for_kv());
    let other_id = engine.submit(other.clone()).unwrap();
    while engine.has_work() {
        engine.step(&mut events).unwrap();
    }
    let mut outputs = Outputs::new();
    collect(std::mem::take(&mut events), &mut outputs);
    assert_eq!(outputs.keys().collect::<Vec<_>>(), [&(other_id, 0)]);
    assert_as_alone(&model, &other, &only(outputs));

    gate.is_open.store(true, Ordering::Relaxed);
    assert!(engine.has_work());
    let mut outputs = Outputs::new();
    collect(engine.run_until_idle().unwrap(), &mut outputs);
    let output = outputs.remove(&(id, 0)).unwrap();
    assert_as_alone(&model, &greedy(&prompt, 4), &output);
    assert_eq!((output.usage.loaded_tokens, engine.stats().n_loaded_tokens), (96, 96));
    assert_eq!(engine.pool_stats().n_free, N_BLOCKS);
    assert_eq!(gate.n_under_way.load(Ordering::Relaxed), 0);
}

#[test]
fn what_a_failed_copy_wrote_is_used_by_nothing() {
    let model = TestModel::fixture("qwen3");
    let prompt = tokens(101, 1);
    let shelf = shelf_of(&model, &prompt);
    let (mut engine, gate) = gated_engine(&model, N_BLOCKS, EngineOptions::default());
    gate.fails.store(true, Ordering::Relaxed);
    gate.is_open.store(true, Ordering::Relaxed);
    for n_cached in [0, 96] {
        submit_from(&mut engine, greedy(&prompt, 4), shelf.prefix(&prompt, 0));
        let mut outputs = Outputs::new();
        collect(engine.run_until_idle().unwrap(), &mut outputs);
        let output = only(outputs);
        assert_as_alone(&model, &greedy(&prompt, 4), &output);
        // The second finds what the first has computed.
        assert_eq!((output.usage.loaded_tokens, output.usage.cached_tokens), (0, n_cached));
    }
    assert_eq!(engine.pool_stats().n_free, N_BLOCKS);
}

#[test]
fn a_request_that_ends_while_its_kv_is_copied_gives_the_blocks_back() {
    let model = TestModel::fixture("qwen3");
    let prompt = tokens(101, 1);
    let shelf = shelf_of(&model, &prompt);
    let (mut engine, gate) = gated_engine(&model, N_BLOCKS, EngineOptions::default());
    let id = submit_from(&mut engine, greedy(&prompt, 4), shelf.prefix(&prompt, 0));
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    assert_eq!((engine.pool_stats().n_free, gate.n_under_way.load(Ordering::Relaxed)), (N_BLOCKS - 6, 1));
    engine.cancel(id);
    engine.step(&mut events).unwrap();
    assert_eq!((engine.pool_stats().n_free, gate.n_under_way.load(Ordering::Relaxed)), (N_BLOCKS, 0));
    assert!(engine.is_idle());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn outputs_are_the_same_to_the_bit_whenever_copies_end_and_memory_is_short(
        prompts in proptest::collection::vec((70_u32..115, 0_usize..12), 1..4),
        n_looks in 0_usize..12,
        n_blocks in 10_usize..24,
        max_batched_tokens in 1_usize..80,
    ) {
        let model = TestModel::fixture("qwen3");
        let mut options = EngineOptions::default();
        options.max_batched_tokens = max_batched_tokens;
        let (mut engine, gate) = gated_engine(&model, n_blocks, options);
        gate.n_looks.store(n_looks, Ordering::Relaxed);
        gate.is_open.store(true, Ordering::Relaxed);
        let requests = prompts.into_iter().zip(0..).map(|((n_tokens, n_steps), salt)| {
            let request = greedy(&tokens(n_tokens, salt), 8);
            let kv = shelf_of(&model, &request.prompt).prefix(&request.prompt, 0);
            (request, kv, n_steps)
        });
        assert_all_as_alone(&model, &mut engine, requests.collect(), |engine, request, kv| {
            submit_from(engine, request.clone(), kv)
        });
        prop_assert_eq!(engine.pool_stats().n_free, n_blocks);
        prop_assert_eq!(gate.n_under_way.load(Ordering::Relaxed), 0);
    }
}
