//! KV whose layers come one after the other while its prompt is computed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvik_model::{
    BLOCK_TOKENS, Backend, BlockId, BlockSource, CpuBackend, Engine, EngineOptions, GenerateRequest,
    KvImport, LayerProgress, Logits, PrefixKv, RequestId, Result, SequenceRows, SubmitOptions, WantedLogits,
};
use proptest::prelude::*;

use crate::inner_backend::by_inner;
use crate::support::shelf::ShelfKv;
use crate::support::{TestModel, backend_options, namespace};
use crate::{N_BLOCKS, assert_all_as_alone, assert_as_alone, greedy, only, run_all, shelf_of, tokens};

/// What becomes of the layers of a prefix.
#[derive(Debug, Clone, Copy)]
struct Fate {
    /// Layers that are there at the start.
    n_first: usize,
    /// Looks after which one more is there.
    looks_a_layer: usize,
    /// Layers that come at all.
    n_layers: usize,
    /// Blocks that are gone as soon as a layer behind the first ones, and behind layer 0, has come.
    n_gone: usize,
    /// Whether a layer comes as soon as a pass waits for it.
    comes_when_awaited: bool,
}

/// Blocks of which a layer at a time comes.
#[derive(Debug)]
struct Layered {
    kv: ShelfKv,
    fate: Fate,
    n_there: AtomicUsize,
    n_looks: AtomicUsize,
}

impl Layered {
    fn new(kv: ShelfKv, fate: Fate) -> Self {
        let n_there = AtomicUsize::new(fate.n_first.min(fate.n_layers));
        Self { kv, fate, n_there, n_looks: AtomicUsize::new(0) }
    }

    fn n_there(&self) -> usize {
        self.n_there.load(Ordering::Relaxed)
    }

    fn n_blocks(&self) -> usize {
        let is_shorter = self.fate.n_first.max(1) < self.n_there();
        self.kv.blocks.len() - if is_shorter { self.fate.n_gone.min(self.kv.blocks.len()) } else { 0 }
    }
}

impl BlockSource for Layered {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let is_there = layer_idx < self.n_there() && block_idx < self.n_blocks();
        is_there.then(|| self.kv.block(layer_idx, block_idx)).flatten()
    }

    fn layers(&self) -> LayerProgress {
        let n_looks = self.n_looks.fetch_add(1, Ordering::Relaxed) + 1;
        let n_come = self.fate.n_first + n_looks / self.fate.looks_a_layer;
        self.n_there.fetch_max(n_come.min(self.fate.n_layers), Ordering::Relaxed);
        // Those that do not come are given up some looks later.
        let has_ended = self.fate.n_layers + 4 <= n_come;
        LayerProgress { n_there: self.n_there(), has_ended }
    }

    fn wait_layer(&self, layer_idx: usize, _timeout: Duration) -> bool {
        if self.fate.comes_when_awaited {
            self.n_there.fetch_max((layer_idx + 1).min(self.fate.n_layers), Ordering::Relaxed);
        }
        layer_idx < self.n_there()
    }
}

impl PrefixKv for Layered {
    fn there_until(&self, token: usize) -> usize {
        token.max(self.n_blocks() * BLOCK_TOKENS)
    }
}

/// The real backend; a pass takes at least as long as a layer needs to come.
#[derive(Debug)]
struct Slow {
    inner: CpuBackend,
    pass_time: Duration,
}

impl Slow {
    fn wait(&self) {
        let begin = Instant::now();
        while begin.elapsed() < self.pass_time {
            std::hint::spin_loop();
        }
    }
}

impl Backend for Slow {
    by_inner! {
        config n_blocks forward_layers forward_watched place_kv copy_block kv_dtype export_kv import_kv
        kv_layout block_layer_bytes export_block pin_blocks import_block
    }

    fn forward(&mut self, sequences: &[SequenceRows<'_>], logits: &mut Logits) -> Result<()> {
        self.wait();
        self.inner.forward(sequences, logits)
    }

    fn start_import(
        &mut self,
        source: &Arc<dyn BlockSource>,
        blocks: &[(usize, BlockId)],
    ) -> Option<Box<dyn KvImport>> {
        self.inner.start_import(source, blocks)
    }

    fn forward_arriving(
        &mut self,
        sequences: &[SequenceRows<'_>],
        imports: &[&dyn KvImport],
        wanted: WantedLogits<'_>,
        logits: &mut Logits,
    ) -> Result<()> {
        self.inner.forward_arriving(sequences, imports, wanted, logits)
    }
}

fn slow_engine(model: &TestModel, n_blocks: usize, pass_time: Duration, options: EngineOptions) -> Engine {
    let inner = model.backend(&backend_options(n_blocks));
    let backend = Box::new(Slow { inner, pass_time });
    let mut engine = Engine::new(backend, None, &namespace(), options).unwrap();
    // From now on it knows what a pass takes.
    engine.submit(greedy(&[1, 2, 3], 1)).unwrap();
    engine.run_until_idle().unwrap();
    engine
}

/// The blocks of `prompt`, whose layers have this fate.
fn layered_prefix(model: &TestModel, prompt: &[u32], fate: Fate) -> Layered {
    Layered::new(shelf_of(model, prompt).prefix(prompt, 0), fate)
}

fn submit(engine: &mut Engine, request: &GenerateRequest, layered: Layered) -> RequestId {
    let prepared = engine.prepare(request.clone(), SubmitOptions::default());
    engine.submit_prepared(prepared, Some(Arc::new(layered))).unwrap()
}

/// Runs prompts, each with a prefix of this fate, until a pass has begun before all layers were there; returns the loaded
/// tokens of the last. Whether one does depends on the clock, what it computes does not.
fn run_ahead(model: &TestModel, fate: Fate) -> usize {
    let mut engine = slow_engine(model, N_BLOCKS, Duration::from_millis(50), EngineOptions::default());
    for seed in 1..50 {
        let request = greedy(&tokens(101, seed), 4);
        submit(&mut engine, &request, layered_prefix(model, &request.prompt, fate));
        let output = only(run_all(&mut engine, Vec::new()));
        assert_as_alone(model, &request, &output);
        assert_eq!(engine.pool_stats().n_free, N_BLOCKS);
        if 0 < engine.stats().n_passes_ahead {
            return output.usage.loaded_tokens;
        }
    }
    panic!("no pass begins before all layers are there");
}

fn n_layers(model: &TestModel) -> usize {
    model.backend(&backend_options(8)).config().n_layers
}

/// Tokens that a prompt takes from a prefix whose layers come slowly, all but `n_missing` of them.
fn tokens_loaded_ahead(n_missing: usize, n_gone: usize) -> usize {
    let model = TestModel::fixture("qwen3");
    let n_layers = n_layers(&model) - n_missing;
    run_ahead(&model, Fate { n_first: 0, looks_a_layer: 16, n_layers, n_gone, comes_when_awaited: true })
}

#[test]
fn a_prompt_is_computed_while_layers_of_its_prefix_come() {
    assert_eq!(tokens_loaded_ahead(0, 0), 96);
}

#[test]
fn a_layer_that_does_not_come_means_computing() {
    assert_eq!(tokens_loaded_ahead(1, 0), 0);
}

#[test]
fn a_prefix_that_loses_its_end_in_a_later_layer_is_used_without_it() {
    assert_eq!(tokens_loaded_ahead(0, 2), 64);
}

#[test]
fn layers_that_were_there_before_say_nothing_of_those_that_come() {
    let model = TestModel::fixture("qwen3");
    let mut engine = slow_engine(&model, N_BLOCKS, Duration::from_millis(50), EngineOptions::default());
    let request = greedy(&tokens(101, 1), 4);
    let n_layers = n_layers(&model);
    // The others come only if they are waited for with patience.
    let fate = Fate { n_first: 1, looks_a_layer: 500, n_layers, n_gone: 0, comes_when_awaited: false };
    submit(&mut engine, &request, layered_prefix(&model, &request.prompt, fate));
    let output = only(run_all(&mut engine, Vec::new()));
    assert_as_alone(&model, &request, &output);
    assert_eq!(output.usage.loaded_tokens, 96, "a pass has begun too early");
}

fn fate(n_layers: usize) -> impl Strategy<Value = Fate> {
    (0..=n_layers, 1_usize..8, 0_usize..4, any::<bool>(), prop::bool::weighted(0.3)).prop_map(
        move |(n_first, looks_a_layer, n_gone, comes_when_awaited, is_short)| Fate {
            n_first: n_first.min(n_layers - usize::from(is_short)),
            looks_a_layer,
            n_layers: n_layers - usize::from(is_short),
            n_gone,
            comes_when_awaited,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn outputs_are_the_same_to_the_bit_however_layers_come(
        prompts in prop::collection::vec((70_u32..115, fate(2), 0_usize..6), 1..4),
        n_blocks in 10_usize..24,
        max_batched_tokens in 1_usize..80,
        pass_us in 0_u64..3000,
    ) {
        let model = TestModel::fixture("qwen3");
        let mut options = EngineOptions::default();
        options.max_batched_tokens = max_batched_tokens;
        let mut engine = slow_engine(&model, n_blocks, Duration::from_micros(pass_us), options);
        let requests = prompts.into_iter().zip(0..).map(|((n_tokens, fate, n_steps), salt)| {
            let request = greedy(&tokens(n_tokens, salt), 4);
            let layered = layered_prefix(&model, &request.prompt, fate);
            (request, layered, n_steps)
        });
        assert_all_as_alone(&model, &mut engine, requests.collect(), submit);
        prop_assert_eq!(engine.pool_stats().n_free, n_blocks);
    }
}
