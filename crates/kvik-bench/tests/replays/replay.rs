//! Replays whose course can be told beforehand.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

use kvik_bench::replay::{
    Policy, ReplayConfig, ReplayOutcome, ReplayRequest, named_affinity, run, saturation,
};

fn request(arrival_us: u64, prompt_tokens: u64, blocks: impl IntoIterator<Item = u64>) -> ReplayRequest {
    ReplayRequest { arrival_us, prompt_tokens, output_tokens: 10, blocks: blocks.into_iter().collect() }
}

/// Conversations of five turns on one of four system prompts, all interleaved.
fn conversations(n: u64) -> Vec<ReplayRequest> {
    let mut requests = Vec::new();
    for turn in 1..=5 {
        for conversation in 0..n {
            let system = [conversation % 4, 10 + conversation % 4];
            let own = (0..2 * turn).map(|block| 1_000 + conversation * 100 + block);
            let arrival_us = (turn * n + conversation) * 200_000;
            requests.push(request(
                arrival_us,
                (2 + 2 * turn) * 512 + 7,
                system.into_iter().chain(own).chain([1 << 40 | turn << 20 | conversation]),
            ));
        }
    }
    requests
}

fn play(requests: &[ReplayRequest], policy: Policy, speed: f64) -> ReplayOutcome {
    run(requests, policy, speed, &ReplayConfig::default()).unwrap()
}

fn is_near(value: f64, expected: f64) -> bool {
    (value - expected).abs() < 1e-5
}

#[test]
fn a_prompt_takes_its_fixed_time_and_its_tokens() {
    let config = ReplayConfig { n_workers: 1, ..ReplayConfig::default() };
    let prompts = [request(0, 1_024, [1, 2]), request(5_000_000, 1_024, [1, 2])];
    let first = run(&prompts[..1], Policy::Kv, 1.0, &config).unwrap();
    assert!(is_near(first.ttft_mean_s, 0.020 + 1_024.0 / 8_000.0), "{first:?}");
    let both = run(&prompts, Policy::Kv, 1.0, &config).unwrap();
    assert_eq!(both.hit_tokens, 1_023, "the last token is computed");
    assert!(is_near(both.prefill_s, 0.020 + 1_024.0 / 8_000.0 + 0.020 + 1.0 / 8_000.0), "{both:?}");
}

#[test]
fn a_prompt_waits_for_those_before_it() {
    let config = ReplayConfig { n_workers: 1, ..ReplayConfig::default() };
    let prompts = [request(0, 8_000, [1; 0]), request(0, 8_000, [2; 0])];
    let outcome = run(&prompts, Policy::RoundRobin, 1.0, &config).unwrap();
    assert!(is_near(outcome.ttft_mean_s, 1.02 * 1.5), "{outcome:?}");
}

#[test]
fn a_prompt_that_is_not_full_at_its_end_is_not_found_whole() {
    let config = ReplayConfig { n_workers: 1, ..ReplayConfig::default() };
    let prompts = [request(0, 1_000, [1, 2]), request(5_000_000, 1_000, [1, 2])];
    assert_eq!(run(&prompts, Policy::Kv, 1.0, &config).unwrap().hit_tokens, 512);
}

#[test]
fn a_prompt_under_way_draws_others_that_begin_with_it() {
    let prompts: Vec<_> =
        (0..3).map(|number| request(number * 1_000, 5_121, (0..10).chain([100 + number]))).collect();
    // The mean load of eight workers says little while there are three requests.
    let config = ReplayConfig { kv_load_factor: 10.0, ..ReplayConfig::default() };
    let outcome = run(&prompts, Policy::Kv, 1.0, &config).unwrap();
    assert_eq!(outcome.n_placed.iter().max(), Some(&3), "computed once, waited for twice");
    assert_eq!(outcome.hit_tokens, 2 * 5_120);
}

#[test]
fn every_request_is_placed_and_equal_replays_are_equal() {
    let requests = conversations(60);
    for policy in Policy::ALL {
        let outcome = play(&requests, policy, 3.0);
        assert_eq!(outcome.n_placed.iter().sum::<usize>(), requests.len(), "{policy:?}");
        assert_eq!(outcome, play(&requests, policy, 3.0), "{policy:?}");
    }
}

#[test]
fn placing_by_kv_answers_sooner_and_computes_less() {
    let requests = conversations(60);
    let kv = play(&requests, Policy::Kv, 3.0);
    for policy in [Policy::RoundRobin, Policy::LeastLoaded, Policy::RingByPrefix, Policy::RingBySession] {
        let other = play(&requests, policy, 3.0);
        assert!(kv.hit_tokens > other.hit_tokens, "{policy:?}: {other:?}\n{kv:?}");
        assert!(kv.ttft_mean_s < other.ttft_mean_s, "{policy:?}: {other:?}\n{kv:?}");
    }
}

#[test]
fn saturation_is_where_workers_are_always_busy() {
    // No two prompts have anything in common: 1.02 s each on 8 workers, one every second.
    let requests: Vec<_> = (0..101)
        .map(|number| request(number * 1_000_000, 8_000, (0..16).map(|block| number * 16 + block)))
        .collect();
    let found = saturation(&requests, Policy::RoundRobin, &ReplayConfig::default()).unwrap();
    let expected = 100.0 * 8.0 / (101.0 * 1.02);
    assert!((found / expected - 1.0).abs() < 0.005, "{found} instead of {expected}");
}

#[test]
fn named_conversations_stay_with_their_owners_at_seventy_percent_load() {
    let affinity = named_affinity(0.7, &ReplayConfig::default()).unwrap();
    assert_eq!(affinity.n_turns, 8000);
    assert!((affinity.load - 0.7).abs() < 0.02, "{affinity:?}");
    assert!(affinity.owner_share >= 0.99, "{affinity:?}");
    assert!(affinity.max_load_over_bound <= 1.0, "{affinity:?}");
}
