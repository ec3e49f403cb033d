use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const N_DRAWS: u64 = 20_000;

fn input(params: &SamplingParams, n_generated: u64) -> SamplerInput<'_> {
    SamplerInput { params, counts: None, seed: 11, choice: 0, n_generated }
}

fn choose(logits: &[f32], params: &SamplingParams) -> TokenId {
    Sampler::default().sample(logits, input(params, 0)).0
}

/// Number of times each token was drawn.
fn draw(logits: &[f32], params: &SamplingParams) -> Vec<u64> {
    let mut sampler = Sampler::default();
    let mut counts = vec![0; logits.len()];
    for counter in 0..N_DRAWS {
        counts[sampler.sample(logits, input(params, counter)).0 as usize] += 1;
    }
    counts
}

fn support(logits: &[f32], params: &SamplingParams) -> BTreeSet<usize> {
    let counts = draw(logits, params);
    (0..logits.len()).filter(|&token| 0 < counts[token]).collect()
}

/// Asserts that the tokens are drawn in proportion to `weights`.
fn assert_frequencies(logits: &[f32], params: &SamplingParams, weights: &[f64]) {
    let total: f64 = weights.iter().sum();
    for (token, (&count, weight)) in draw(logits, params).iter().zip(weights).enumerate() {
        let expected = weight / total;
        let found = count as f64 / N_DRAWS as f64;
        // Five standard deviations of the mean of `N_DRAWS` draws.
        let tolerance = 5.0 * (expected * (1.0 - expected) / N_DRAWS as f64).sqrt();
        assert!((found - expected).abs() <= tolerance, "token {token}: {found} is not {expected}");
    }
}

fn params() -> SamplingParams {
    SamplingParams::default()
}

/// Logits of these probabilities, up to a constant.
fn logits_of(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() + 3.0).collect()
}

#[test]
fn greedy_takes_the_largest_logit_and_the_lowest_id_among_equals() {
    let greedy = SamplingParams::greedy(1);
    assert_eq!(choose(&[1.0, 3.0, 2.0, 3.0], &greedy), 1);
    assert_eq!(choose(&[-5.0; 7], &greedy), 0);
    assert_eq!(choose(&[0.0, -0.0, 0.0], &greedy), 0);
    assert_eq!(choose(&[f32::MIN, f32::MAX, f32::MAX], &greedy), 1);
    assert_eq!(choose(&[f32::MIN], &greedy), 0);
}

#[test]
fn tokens_are_drawn_as_often_as_their_probability_says() {
    let probabilities = [0.5, 0.25, 0.125, 0.1, 0.025];
    let weights = probabilities.map(f64::from);
    assert_frequencies(&logits_of(&probabilities), &params(), &weights);
}

#[test]
fn temperature_divides_the_logits() {
    let logits = [2.0, 1.0, 0.0, -1.0];
    for temperature in [0.25_f32, 0.7, 2.0, 50.0] {
        let warm = SamplingParams { temperature, ..params() };
        let weights = logits.map(|logit| (f64::from(logit) / f64::from(temperature)).exp());
        assert_frequencies(&logits, &warm, &weights);
    }
}

#[test]
fn a_small_temperature_is_nearly_greedy_and_does_not_overflow() {
    let cold = SamplingParams { temperature: 1e-30, ..params() };
    assert_eq!(support(&[88.0, 88.1, -1e30, 88.0], &cold), BTreeSet::from([1]));
    assert_eq!(support(&[5.0, 5.0], &cold), BTreeSet::from([0, 1]));
}

#[test]
fn top_k_keeps_the_k_most_likely_and_lower_ids_among_equals() {
    let logits = [1.0, 2.0, 1.5, 2.0, 1.0, 1.0];
    for (top_k, expected) in [
        (1, vec![1]),
        (2, vec![1, 3]),
        (3, vec![1, 2, 3]),
        (4, vec![0, 1, 2, 3]),
        (6, vec![0, 1, 2, 3, 4, 5]),
        (0, vec![0, 1, 2, 3, 4, 5]),
        (1000, vec![0, 1, 2, 3, 4, 5]),
    ] {
        let limited = SamplingParams { top_k, ..params() };
        assert_eq!(support(&logits, &limited), BTreeSet::from_iter(expected), "{top_k}");
    }
    let two = SamplingParams { top_k: 2, ..params() };
    assert_frequencies(&logits, &two, &[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn top_p_keeps_the_shortest_front_that_reaches_it() {
    let logits = logits_of(&[0.1, 0.4, 0.3, 0.2]);
    for (top_p, expected) in [
        (1e-6, vec![1]),
        (0.39, vec![1]),
        (0.41, vec![1, 2]),
        (0.69, vec![1, 2]),
        (0.71, vec![1, 2, 3]),
        (0.91, vec![0, 1, 2, 3]),
        (1.0, vec![0, 1, 2, 3]),
    ] {
        let limited = SamplingParams { top_p, ..params() };
        assert_eq!(support(&logits, &limited), BTreeSet::from_iter(expected), "{top_p}");
    }
    let limited = SamplingParams { top_p: 0.6, ..params() };
    assert_frequencies(&logits, &limited, &[0.0, 0.4, 0.3, 0.0]);
}

#[test]
fn min_p_keeps_what_is_likely_enough_beside_the_most_likely() {
    let logits = logits_of(&[0.05, 0.4, 0.3, 0.25]);
    for (min_p, expected) in [
        (0.0, vec![0, 1, 2, 3]),
        (0.12, vec![0, 1, 2, 3]),
        (0.13, vec![1, 2, 3]),
        (0.62, vec![1, 2, 3]),
        (0.63, vec![1, 2]),
        (0.76, vec![1]),
        (1.0, vec![1]),
    ] {
        let limited = SamplingParams { min_p, ..params() };
        assert_eq!(support(&logits, &limited), BTreeSet::from_iter(expected), "{min_p}");
    }
    // The ratio is that of the probabilities after temperature: 0.05 / 0.4 to the power of 1/4.
    for (min_p, expected) in [(0.59, vec![0, 1, 2, 3]), (0.6, vec![1, 2, 3])] {
        let limited = SamplingParams { min_p, temperature: 4.0, ..params() };
        assert_eq!(support(&logits, &limited), BTreeSet::from_iter(expected), "{min_p}");
    }
}

#[test]
fn top_p_counts_only_what_top_k_and_min_p_have_left() {
    let logits = logits_of(&[0.1, 0.4, 0.3, 0.2]);
    let limited = SamplingParams {
        top_k: 2,
        // 0.4 of 0.7 is 0.571.
        top_p: 0.56,
        ..params()
    };
    assert_eq!(support(&logits, &limited), BTreeSet::from([1]));
    let limited = SamplingParams {
        min_p: 0.45,
        // 0.4 and 0.3 of 0.9 are 0.777.
        top_p: 0.76,
        ..params()
    };
    assert_eq!(support(&logits, &limited), BTreeSet::from([1, 2]));
}

#[test]
fn penalties_follow_their_formulas() {
    let penalized = SamplingParams {
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..params()
    };
    let mut counts = TokenCounts::try_new(&penalized, &[0, 1, 1]).unwrap();
    counts.push(1);
    counts.push(2);
    counts.push(2);
    let mut logits = [4.0, -3.0, 1.0, 5.0, -6.0];
    counts.apply(&penalized, &mut logits);
    assert_eq!(logits.map(f32::to_bits), [2.0_f32, -6.75, -0.5, 5.0, -6.0].map(f32::to_bits));
}

#[test]
fn penalties_come_before_the_greedy_choice_and_do_not_change_logprobs() {
    let penalized = SamplingParams { presence_penalty: 2.0, logprobs: Some(1), ..SamplingParams::greedy(1) };
    let mut counts = TokenCounts::try_new(&penalized, &[]).unwrap();
    counts.push(0);
    let logits = [3.0, 2.0];
    let penalized_input = SamplerInput { counts: Some(&counts), ..input(&penalized, 0) };
    let (token, logprobs) = Sampler::default().sample(&logits, penalized_input);
    let logprobs = logprobs.unwrap();
    assert_eq!(token, 1);
    assert_eq!(logprobs.top[0].0, 0);
    assert!((logprobs.chosen + 1.313_261_7).abs() < 1e-6, "{}", logprobs.chosen);
}

#[test]
fn no_penalty_needs_no_counts() {
    assert!(TokenCounts::try_new(&params(), &[1, 2]).is_none());
}

#[test]
fn seed_choice_and_counter_each_change_the_draw() {
    let logits = [0.0; 1000];
    let base = input(&SamplingParams::default(), 3).seed;
    let sample = |seed, choice, n_generated| {
        let params = params();
        let input = SamplerInput { params: &params, counts: None, seed, choice, n_generated };
        Sampler::default().sample(&logits, input).0
    };
    let drawn = [(base, 0, 3), (base + 1, 0, 3), (base, 1, 3), (base, 0, 4)]
        .map(|(seed, choice, counter)| sample(seed, choice, counter));
    assert_eq!(BTreeSet::from(drawn).len(), 4);
    assert_eq!(sample(base, 0, 3), drawn[0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn logprobs_are_those_of_f64_and_their_exponentials_sum_to_one(
        logits in prop::collection::vec(-30.0..30.0_f32, 1..200),
        n_top in 0..40_u32,
    ) {
        let asked = SamplingParams { logprobs: Some(n_top), ..SamplingParams::greedy(1) };
        let (token, logprobs) = Sampler::default().sample(&logits, input(&asked, 0));
        let logprobs = logprobs.unwrap();
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let exact = |token: TokenId| f64::from(logits[token as usize]) - total.ln();
        prop_assert!((f64::from(logprobs.chosen) - exact(token)).abs() < 1e-5);
        prop_assert_eq!(logprobs.top.len(), logits.len().min(n_top as usize));
        for &(token, logprob) in &logprobs.top {
            prop_assert!((f64::from(logprob) - exact(token)).abs() < 1e-5);
        }
        let mut ranked: Vec<TokenId> = (0..logits.len() as TokenId).collect();
        ranked.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        let top: Vec<TokenId> = logprobs.top.iter().map(|&(token, _)| token).collect();
        prop_assert_eq!(&top[..], &ranked[..top.len()]);
        let all = TokenLogprobs::of(&logits, token, logits.len());
        let sum: f64 = all.top.iter().map(|&(_, logprob)| f64::from(logprob).exp()).sum();
        prop_assert!((sum - 1.0).abs() < 1e-5, "{}", sum);
    }

    /// Whatever the parameters, the token is one that the sets by definition contain.
    #[test]
    fn a_drawn_token_is_always_in_the_naive_candidate_set(
        logits in prop::collection::vec(-8.0..8.0_f32, 1..60),
        temperature in 0.1..4.0_f32,
        top_k in 0..40_u32,
        top_p in 0.05..1.0_f32,
        min_p in 0.0..0.9_f32,
        counter in any::<u64>(),
    ) {
        let asked = SamplingParams { temperature, top_k, top_p, min_p, ..params() };
        let (token, _) = Sampler::default().sample(&logits, input(&asked, counter));
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let weight = |token: usize| (f64::from(logits[token] - largest) / f64::from(temperature)).exp();
        let mut ranked: Vec<usize> = (0..logits.len()).filter(|&t| f64::from(min_p) * 0.999 <= weight(t)).collect();
        ranked.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if 0 < top_k {
            ranked.truncate(top_k as usize);
        }
        let total: f64 = ranked.iter().map(|&t| weight(t)).sum();
        let before: f64 = ranked.iter().take_while(|&&t| t != token as usize).map(|&t| weight(t)).sum();
        prop_assert!(ranked.contains(&(token as usize)));
        prop_assert!(before <= total * (f64::from(top_p) + 1e-3));
    }
}
