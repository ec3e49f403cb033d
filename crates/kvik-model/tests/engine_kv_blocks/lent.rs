//! Blocks of ended sequences that are copied while the engine goes on.

use std::sync::Arc;

use kvik_model::{EndedSequence, Engine, EngineOptions, KvSink};
use parking_lot::Mutex;

use crate::support::TestModel;
use crate::support::requests::{engine, run};
use crate::{N_BLOCKS, assert_as_alone, greedy, only, shelf_of, tokens};

/// Keeps what it is offered, as a copy that takes long.
#[derive(Debug, Clone, Default)]
struct SlowSink {
    held: Arc<Mutex<Vec<EndedSequence>>>,
    gives_up: bool,
}

impl KvSink for SlowSink {
    fn offer(&mut self, sequence: EndedSequence) {
        self.held.lock().push(sequence);
    }

    fn give_up(&mut self) {
        if self.gives_up {
            self.held.lock().clear();
        }
    }
}

/// All bytes of a sequence.
fn bytes_of(sequence: &EndedSequence) -> Vec<u8> {
    let mut all = Vec::new();
    let mut block = vec![0; sequence.block_layer_bytes()];
    for layer_idx in 0..sequence.n_layers() {
        for block_idx in 0..sequence.n_blocks() {
            sequence.read_block(layer_idx, block_idx, &mut block).unwrap();
            all.extend_from_slice(&block);
        }
    }
    all
}

fn engine_with(model: &TestModel, n_blocks: usize, gives_up: bool) -> (Engine, SlowSink) {
    let sink = SlowSink { gives_up, ..SlowSink::default() };
    let mut engine = engine(model, n_blocks, EngineOptions::default());
    engine.set_kv_sink(Box::new(sink.clone()));
    (engine, sink)
}

#[test]
fn steps_go_on_while_a_copy_is_under_way_and_its_blocks_are_not_reused() {
    let model = TestModel::fixture("qwen3");
    // Six blocks: three are lent, two run, and one is not enough for a third sequence.
    let (mut engine, sink) = engine_with(&model, 6, false);
    engine.submit(greedy(&tokens(40, 1), 9)).unwrap();
    run(&mut engine);
    let before = bytes_of(&sink.held.lock()[0]);
    assert_eq!((engine.pool_stats().n_free, sink.held.lock()[0].n_blocks()), (3, 3));

    let other = greedy(&tokens(20, 2), 10);
    engine.submit(other.clone()).unwrap();
    let waiting = greedy(&tokens(70, 3), 4);
    engine.submit(waiting.clone()).unwrap();
    let mut events = Vec::new();
    for _ in 0..30 {
        engine.step(&mut events).unwrap();
    }
    // The short one has ended; the long one waits for the blocks that are being copied.
    assert_eq!((engine.n_running(), engine.n_waiting(), sink.held.lock().len()), (0, 1, 2));
    assert!(engine.is_starved());
    assert_eq!(bytes_of(&sink.held.lock()[0]), before);

    // The shelf compares with what it gets from an engine alone.
    let mut shelf = shelf_of(&model, &sink.held.lock()[0].tokens()[..40]).sink();
    for sequence in std::mem::take(&mut *sink.held.lock()) {
        assert_eq!(sequence.n_bytes(), bytes_of(&sequence).len());
        shelf.offer(sequence);
    }
    assert_as_alone(&model, &waiting, &only(run(&mut engine)));
    sink.held.lock().clear();
    engine.rest();
    assert_eq!(engine.pool_stats().n_free, 6);
}

#[test]
fn a_running_sequence_that_needs_blocks_ends_copies_before_it_preempts() {
    let model = TestModel::fixture("qwen3");
    let (mut engine, sink) = engine_with(&model, 6, true);
    engine.submit(greedy(&tokens(40, 1), 9)).unwrap();
    run(&mut engine);
    assert_eq!(sink.held.lock().len(), 1);
    // Fits at its admission, and grows into what is lent.
    let growing = greedy(&tokens(40, 2), 40);
    engine.submit(growing.clone()).unwrap();
    assert_as_alone(&model, &growing, &only(run(&mut engine)));
    assert_eq!(engine.stats().n_preemptions, 0);
}

#[test]
fn ended_sequences_outlive_their_engine() {
    let model = TestModel::fixture("qwen3");
    let (mut engine, sink) = engine_with(&model, N_BLOCKS, false);
    engine.submit(greedy(&tokens(40, 1), 9)).unwrap();
    run(&mut engine);
    let before = bytes_of(&sink.held.lock()[0]);
    drop(engine);
    assert_eq!(bytes_of(&sink.held.lock()[0]), before);
}
