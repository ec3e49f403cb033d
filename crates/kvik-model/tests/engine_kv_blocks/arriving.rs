//! KV that is still on its way when its request begins.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvik_model::{
    BLOCK_TOKENS, BlockSource, Engine, EngineEvent, EngineOptions, PrefixKv, RequestId, SubmitOptions,
};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::support::TestModel;
use crate::support::requests::{Outputs, alone, collect, engine};
use crate::support::shelf::ShelfKv;
use crate::{N_BLOCKS, assert_as_alone, greedy, only, shelf_of, tokens};

/// Tokens of a chunk, which arrives as a whole.
const CHUNK_TOKENS: usize = BLOCK_TOKENS;

/// What becomes of a chunk, by the number of times that the engine has asked.
#[derive(Debug, Clone, Copy)]
enum Fate {
    ArrivesAfter(usize),
    /// It is lost, and waited for until then.
    LostAfter(usize),
}

/// Chunks that arrive while the engine runs.
#[derive(Debug)]
struct Arriving {
    kv: ShelfKv,
    fates: Vec<Fate>,
    /// Whether the engine waits for the chunk that is next.
    waits: bool,
    n_asked: Arc<AtomicUsize>,
    taken: Arc<Mutex<Vec<Range<usize>>>>,
}

impl Arriving {
    fn is_there(&self, chunk_idx: usize) -> bool {
        let n_asked = self.n_asked.load(Ordering::Relaxed);
        matches!(self.fates.get(chunk_idx), Some(Fate::ArrivesAfter(after)) if *after <= n_asked)
    }

    fn is_pending(&self, chunk_idx: usize) -> bool {
        let n_asked = self.n_asked.load(Ordering::Relaxed);
        self.fates.get(chunk_idx).is_some_and(|fate| match fate {
            Fate::ArrivesAfter(after) | Fate::LostAfter(after) => n_asked < *after,
        })
    }
}

impl BlockSource for Arriving {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        self.kv.block(layer_idx, block_idx)
    }
}

impl PrefixKv for Arriving {
    fn there_until(&self, token: usize) -> usize {
        self.n_asked.fetch_add(1, Ordering::Relaxed);
        let first = token / CHUNK_TOKENS;
        let n_there = (first..self.fates.len()).take_while(|chunk_idx| self.is_there(*chunk_idx)).count();
        if n_there == 0 { token } else { (first + n_there) * CHUNK_TOKENS }
    }

    fn look_again_at(&self, token: usize) -> Option<usize> {
        let first = token / CHUNK_TOKENS;
        let mut more = first..self.fates.len();
        let comes = more.any(|chunk_idx| self.is_there(chunk_idx) || self.is_pending(chunk_idx));
        comes.then(|| (first + 1) * CHUNK_TOKENS)
    }

    fn is_due(&self, token: usize) -> bool {
        // A clock that only this advances: an engine that does not ask any more would wait for ever.
        let is_due = self.waits && self.is_pending(token / CHUNK_TOKENS);
        if is_due {
            self.n_asked.fetch_add(1, Ordering::Relaxed);
        }
        is_due
    }

    fn note_taken(&self, tokens: Range<usize>) {
        self.taken.lock().push(tokens);
    }
}

/// Steps until nothing is left to do, also while requests wait for KV.
fn run_all(engine: &mut Engine) -> Vec<EngineEvent> {
    let mut events = Vec::new();
    for _ in 0..100_000 {
        if engine.is_idle() {
            return events;
        }
        engine.step(&mut events).unwrap();
    }
    panic!("the engine does not end");
}

fn submit(engine: &mut Engine, prompt: &[u32], arriving: Arriving) -> RequestId {
    let prepared = engine.prepare(greedy(prompt, 4), SubmitOptions::default());
    engine.submit_prepared(prepared, Some(Arc::new(arriving))).unwrap()
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => (0_usize..12).prop_map(Fate::ArrivesAfter),
        1 => (0_usize..12).prop_map(Fate::LostAfter),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn outputs_are_the_same_to_the_bit_however_chunks_arrive(
        n_prompt in 20_u32..120,
        fates in proptest::collection::vec(fate(), 0..7),
        waits in any::<bool>(),
        n_known in 0_usize..40,
        n_blocks in 9_usize..16,
        max_batched_tokens in 1_usize..80,
    ) {
        let model = TestModel::fixture("qwen3");
        let prompt = tokens(n_prompt, 1);
        let shelf = shelf_of(&model, &prompt);
        let mut options = EngineOptions::default();
        options.max_batched_tokens = max_batched_tokens;
        let mut engine = engine(&model, n_blocks, options);
        engine.submit(greedy(&prompt[..n_known.min(n_prompt as usize)].iter().copied().chain([5]).collect::<Vec<_>>(), 2)).unwrap();
        run_all(&mut engine);
        let n_chunks = (n_prompt as usize - 1) / CHUNK_TOKENS;
        let taken = Arc::new(Mutex::new(Vec::new()));
        let arriving = Arriving {
            kv: shelf.prefix(&prompt, 0),
            fates: fates.into_iter().take(n_chunks).collect(),
            waits,
            n_asked: Arc::default(),
            taken: Arc::clone(&taken),
        };
        let other = greedy(&tokens(40, 9), 6);
        let other_id = engine.submit(other.clone()).unwrap();
        let id = submit(&mut engine, &prompt, arriving);
        let n_loaded_before = engine.stats().n_loaded_tokens;
        let events = run_all(&mut engine);
        let of_request = |event: &&EngineEvent| match event {
            EngineEvent::Admitted { request, .. } | EngineEvent::Finished { request, .. } => *request == id,
            EngineEvent::Token(token) => token.request == id,
            _ => false,
        };
        let first = events.iter().find(of_request).unwrap();
        let EngineEvent::Admitted { cached_tokens, loaded_tokens, .. } = *first else { panic!("{first:?}") };
        prop_assert_eq!(events.iter().filter(of_request).filter(|event| matches!(event, EngineEvent::Admitted { .. })).count(), 1);
        let mut outputs = Outputs::new();
        collect(events, &mut outputs);
        let output = outputs.remove(&(id, 0)).unwrap();
        assert_as_alone(&model, &greedy(&prompt, 4), &output);
        prop_assert_eq!(&outputs.remove(&(other_id, 0)).unwrap().tokens, &alone(&model, None, &other)[0].tokens);
        let n_taken: usize = taken.lock().iter().map(ExactSizeIterator::len).sum();
        prop_assert_eq!((output.usage.cached_tokens, output.usage.loaded_tokens), (cached_tokens, loaded_tokens));
        prop_assert_eq!((loaded_tokens, engine.stats().n_loaded_tokens - n_loaded_before), (n_taken, n_taken as u64));
        prop_assert_eq!(engine.pool_stats().n_free, n_blocks);
    }
}

#[test]
fn a_request_is_admitted_before_its_first_token_whenever_the_rest_of_its_kv_is_lost() {
    let model = TestModel::fixture("qwen3");
    let prompt = tokens(2 * CHUNK_TOKENS as u32 + 1, 1);
    let shelf = shelf_of(&model, &prompt);
    for lost_after in 0..12 {
        for max_batched_tokens in [1, 17, 18, 80] {
            let mut options = EngineOptions::default();
            options.max_batched_tokens = max_batched_tokens;
            let mut engine = engine(&model, N_BLOCKS, options);
            let arriving = Arriving {
                kv: shelf.prefix(&prompt, 0),
                fates: vec![Fate::ArrivesAfter(0), Fate::LostAfter(lost_after)],
                waits: true,
                n_asked: Arc::default(),
                taken: Arc::default(),
            };
            submit(&mut engine, &prompt, arriving);
            let events = run_all(&mut engine);
            assert!(matches!(events.first(), Some(EngineEvent::Admitted { .. })), "{lost_after}: {events:?}");
        }
    }
}

#[test]
fn the_front_is_computed_while_the_back_arrives_and_they_meet() {
    let model = TestModel::fixture("qwen3");
    let prompt = tokens(6 * CHUNK_TOKENS as u32 + 5, 1);
    let shelf = shelf_of(&model, &prompt);
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    let taken = Arc::new(Mutex::new(Vec::new()));
    // One chunk more before each pass, from the back.
    let fates = (0..6).map(|chunk_idx| Fate::ArrivesAfter(6 - chunk_idx)).collect();
    let (kv, n_asked) = (shelf.prefix(&prompt, 0), Arc::default());
    let id = submit(
        &mut engine,
        &prompt,
        Arriving { kv, fates, waits: false, n_asked, taken: Arc::clone(&taken) },
    );
    let events = run_all(&mut engine);
    assert!(
        matches!(events[0], EngineEvent::Admitted { request, cached_tokens: 48, loaded_tokens: 48 } if request == id),
        "{events:?}"
    );
    assert_eq!(taken.lock().as_slice(), std::slice::from_ref(&(3 * CHUNK_TOKENS..6 * CHUNK_TOKENS)));
    assert_eq!(engine.stats().n_computed_tokens as usize, 3 * CHUNK_TOKENS + 5 + 3);
    let mut outputs = Outputs::new();
    collect(events, &mut outputs);
    assert_as_alone(&model, &greedy(&prompt, 4), &only(outputs));
}

#[test]
fn a_request_that_waits_for_kv_holds_up_no_other_and_can_be_cancelled() {
    let model = TestModel::fixture("qwen3");
    let prompt = tokens(3 * CHUNK_TOKENS as u32 + 5, 1);
    let shelf = shelf_of(&model, &prompt);
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    let kv = shelf.prefix(&prompt, 0);
    let fates = vec![Fate::ArrivesAfter(usize::MAX); 3];
    let arriving = Arriving { kv, fates, waits: true, n_asked: Arc::default(), taken: Arc::default() };
    let waiting = submit(&mut engine, &prompt, arriving);
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    assert!(events.is_empty() && !engine.has_work() && engine.is_waiting_for_kv() && !engine.is_starved());
    let request = greedy(&tokens(40, 9), 6);
    engine.submit(request.clone()).unwrap();
    while engine.has_work() {
        engine.step(&mut events).unwrap();
    }
    let mut outputs = Outputs::new();
    collect(events, &mut outputs);
    assert_as_alone(&model, &request, &only(outputs));
    assert!(engine.is_waiting_for_kv());
    engine.cancel(waiting);
    assert!(engine.is_idle() && !engine.is_waiting_for_kv());
    assert_eq!(engine.pool_stats().n_free, N_BLOCKS);
}
