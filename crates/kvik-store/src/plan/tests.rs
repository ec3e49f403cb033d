use proptest::prelude::*;

use super::*;

const CHUNK: usize = 256;

fn chunks(tiers: &[Option<usize>], n_bytes: u64) -> Vec<PlannedChunk> {
    let chunk = |(idx, tier): (usize, &Option<usize>)| PlannedChunk {
        tokens: idx * CHUNK..(idx + 1) * CHUNK,
        n_bytes,
        tier: *tier,
    };
    tiers.iter().enumerate().map(chunk).collect()
}

fn state(bytes_per_s: f64, latency_s: f64) -> TierState {
    TierState { speed: Some(TierSpeed { bytes_per_s, latency_s }), queued_bytes: 0 }
}

fn decide(tiers: &[Option<usize>], states: &[TierState], prefill: Option<PrefillSpeed>) -> Plan {
    let chunks = chunks(tiers, 1 << 20);
    let n_prompt_tokens = chunks.len() * CHUNK + 1;
    let (first_token, n_queued_tokens) = (0, 0);
    plan(&PlanInput {
        n_prompt_tokens,
        first_token,
        n_queued_tokens,
        chunks: &chunks,
        tiers: states,
        prefill,
        n_layers: 4,
        max_pass_tokens: usize::MAX,
    })
}

/// A chunk a tenth of a second.
const PREFILL: PrefillSpeed = PrefillSpeed { pass_s: 0.0, token_s: 0.1 / CHUNK as f64, attended_s: 0.0 };

#[test]
fn a_fast_tier_is_loaded_a_slow_one_is_not_and_between_them_both_meet() {
    let of = |bytes_per_s| decide(&[Some(0); 10], &[state(bytes_per_s, 0.0)], Some(PREFILL));
    let fast = of(1e10);
    assert_eq!((fast.decision, fast.n_chunks, fast.n_computed_chunks), (Decision::Load, 10, 0));
    let slow = of(1e5);
    assert_eq!((slow.decision, slow.n_chunks), (Decision::Compute, 0));
    // As fast as the engine: half of it each, in half of the time.
    let even = of(1e7 * 1.048_576);
    assert_eq!((even.decision, even.n_chunks, even.n_computed_chunks), (Decision::Meet, 10, 5));
    let times = even.times.unwrap();
    assert!((times.plan_s - 0.5).abs() < 0.01 && (times.load_all_s - 1.0).abs() < 0.01, "{times:?}");
}

#[test]
fn a_small_gain_is_no_reason_to_compute_while_chunks_load() {
    let times_as_fast = |factor: f64| {
        // Ten chunks of 1 MiB are computed in a second.
        decide(&[Some(0); 10], &[state(factor * 10.0 * f64::from(1 << 20), 0.0)], Some(PREFILL))
    };
    // Computing the first chunk meanwhile would save a tenth of the loads, and computing two of them a fifth.
    assert_eq!(times_as_fast(9.0).decision, Decision::Load);
    assert_eq!((times_as_fast(3.0).decision, times_as_fast(3.0).n_computed_chunks), (Decision::Meet, 2));
}

#[test]
fn layers_are_loaded_where_a_pass_behind_them_takes_as_long() {
    let chunks = chunks(&[Some(0); 4], 1 << 20);
    let decide = |n_behind: usize, n_layers, max_pass_tokens| {
        plan(&PlanInput {
            n_prompt_tokens: (4 + n_behind) * CHUNK,
            first_token: 0,
            n_queued_tokens: 0,
            chunks: &chunks,
            // A third of the time that computing them takes.
            tiers: &[state(30.0 * f64::from(1 << 20), 0.0)],
            prefill: Some(PREFILL),
            n_layers,
            max_pass_tokens,
        })
    };
    let plan = decide(2, 8, 4 * CHUNK);
    assert_eq!((plan.decision, plan.n_chunks, plan.n_computed_chunks), (Decision::Layers, 4, 0));
    let times = plan.times.unwrap();
    assert!((times.load_all_s - 0.333).abs() < 0.001 && (times.plan_s - 0.217).abs() < 0.001, "{times:?}");
    // Nothing to compute behind them, nothing to gain by passes that are short, and no layers.
    assert_ne!(decide(0, 8, 4 * CHUNK).decision, Decision::Layers);
    assert_ne!(decide(2, 8, 16).decision, Decision::Layers);
    assert_ne!(decide(2, 1, 4 * CHUNK).decision, Decision::Layers);
}

#[test]
fn a_gain_of_a_few_milliseconds_is_none() {
    // Half of the time of the better one would be saved.
    let of = |chunk_s: f64| {
        let speed = state(f64::from(1 << 20) / chunk_s, 0.0);
        decide(&[Some(0); 4], &[speed], Some(PrefillSpeed { token_s: chunk_s / CHUNK as f64, ..PREFILL }))
            .decision
    };
    assert_eq!(of(0.1), Decision::Meet);
    assert_ne!(of(0.004), Decision::Meet);
}

#[test]
fn a_prompt_is_cut_only_as_often_as_its_passes_are_cheap() {
    // Ten chunks a second either way: half of them each, in half of the time.
    let of = |pass_s| {
        let speed = state(10.0 * f64::from(1 << 20), 0.0);
        decide(&[Some(0); 10], &[speed], Some(PrefillSpeed { pass_s, ..PREFILL }))
    };
    let cheap = of(0.01);
    assert_eq!(
        (cheap.decision, PrefillSpeed { pass_s: 0.01, ..PREFILL }.piece_tokens()),
        (Decision::Meet, CHUNK)
    );
    // A pass costs as much as two chunks: pieces of twenty chunks are more than there are.
    let dear = PrefillSpeed { pass_s: 0.2, ..PREFILL };
    assert_eq!(dear.piece_tokens(), 20 * CHUNK);
    let plan = of(0.2);
    assert!(plan.n_computed_chunks < cheap.n_computed_chunks, "{plan:?}");
    // And one that costs more than it saves is not made.
    assert_eq!(of(1.0).decision, Decision::Load);
}

#[test]
fn what_lies_in_memory_is_not_computed_and_a_slow_back_is() {
    let tiers = [None, None, Some(0), Some(0), Some(1), Some(1)];
    let plan = decide(&tiers, &[state(1e10, 0.0), state(1e4, 0.0)], Some(PREFILL));
    assert_eq!((plan.decision, plan.n_chunks, plan.n_computed_chunks), (Decision::Load, 4, 0));
    assert!((plan.times.unwrap().plan_s - 0.2).abs() < 0.01, "{plan:?}");
    let in_memory = decide(&[None; 3], &[], Some(PREFILL));
    assert_eq!((in_memory.decision, in_memory.n_chunks), (Decision::Load, 3));
}

#[test]
fn what_was_never_measured_is_tried_while_the_engine_computes() {
    for (states, prefill) in [
        (vec![TierState::default()], Some(PREFILL)),
        (vec![state(1e6, 0.0)], None),
        (Vec::new(), Some(PREFILL)),
    ] {
        let plan = decide(&[Some(0); 4], &states, prefill);
        assert_eq!((plan.decision, plan.n_chunks, plan.times), (Decision::Meet, 4, None));
    }
    assert_eq!(decide(&[], &[], None).decision, Decision::Compute);
}

#[test]
fn prompts_that_are_computed_before_leave_time_to_load() {
    let chunks = chunks(&[Some(0); 4], 1 << 20);
    let (tiers, prefill) = ([state(3e6, 0.0)], Some(PREFILL));
    let of = |n_queued_tokens| {
        plan(&PlanInput {
            n_prompt_tokens: 4 * CHUNK + 1,
            first_token: 0,
            n_queued_tokens,
            chunks: &chunks,
            tiers: &tiers,
            prefill,
            n_layers: 4,
            max_pass_tokens: usize::MAX,
        })
    };
    assert_eq!(of(0).decision, Decision::Meet);
    assert_eq!(of(100 * CHUNK).decision, Decision::Load);
}

proptest! {
    #[test]
    fn a_plan_is_predicted_to_be_no_slower_than_loading_or_computing_everything(
        tiers in proptest::collection::vec(prop_oneof![Just(None), Just(Some(0)), Just(Some(1))], 1..40),
        speeds in [(4.0_f64..10.0, 0.0_f64..0.3), (4.0_f64..10.0, 0.0_f64..0.3)],
        queued in [0_u64..1 << 30, 0_u64..1 << 30],
        (pass_s, token_s) in (0.0_f64..1.0, 1e-6_f64..1e-2),
        attended_s in 0.0_f64..1e-6,
        n_queued_tokens in 0_usize..10_000,
        n_more in 1_usize..500,
        n_layers in 1_usize..100,
        max_pass_tokens in 1_usize..1000,
    ) {
        let chunks = chunks(&tiers, 2 << 20);
        let states: Vec<TierState> = speeds.iter().zip(queued).map(|((power, latency_s), queued_bytes)| {
            TierState { queued_bytes, ..state(10_f64.powf(*power), *latency_s) }
        }).collect();
        let input = PlanInput {
            n_prompt_tokens: chunks.len() * CHUNK + n_more,
            first_token: 0,
            n_queued_tokens,
            chunks: &chunks,
            tiers: &states,
            prefill: Some(PrefillSpeed { pass_s, token_s, attended_s }),
            n_layers,
            max_pass_tokens,
        };
        let plan = plan(&input);
        let PlanTimes { plan_s, load_all_s, compute_all_s, load_layers_s } = plan.times.unwrap();
        // Layers overlap loads with the computation of what is not stored, and nothing more.
        let tail_s = input.prefill.unwrap().seconds(input.first_unchunked()..input.n_prompt_tokens);
        prop_assert!(load_layers_s <= load_all_s + 1e-9, "{:?}", plan);
        prop_assert!(load_all_s - load_layers_s <= tail_s + 1e-9, "{:?}", plan);
        prop_assert!(n_layers > 1 || (load_all_s - load_layers_s).abs() < 1e-9, "{:?}", plan);
        prop_assert!(plan_s <= 1.05 * load_all_s.min(compute_all_s), "{:?}", plan);
        prop_assert!(plan.n_chunks <= chunks.len() && plan.n_computed_chunks <= chunks.len());
        prop_assert!(plan.decision == Decision::Compute || plan.n_computed_chunks <= plan.n_chunks);
    }
}
