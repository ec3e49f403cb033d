//! The answers of the bundled model are as right as those of a float32 reference.

pub mod support;

use kvik_types::Dtype;

use support::notes_qa::{Score, score};

/// Right answers of a float32 reference by the number of notes, of 50 each: 252 of 300.
const REFERENCE: [(u64, usize); 6] = [(1, 50), (2, 45), (4, 41), (8, 42), (16, 40), (28, 34)];

/// One point of accuracy.
const TOLERANCE: usize = 3;

fn total(score: &Score) -> usize {
    score.values().sum()
}

fn assert_near_the_reference(score: &Score, tolerance: usize) {
    let reference = Score::from(REFERENCE);
    assert!(score.keys().eq(reference.keys()), "{score:?}");
    let difference = total(score).abs_diff(total(&reference));
    assert!(difference <= tolerance, "{score:?} is not {reference:?}");
}

#[test]
fn answers_with_f32_keys_and_values_are_within_one_point_of_the_reference() {
    let score = score(Dtype::F32);
    println!("f32: {} of 300, {score:?}", total(&score));
    assert_near_the_reference(&score, TOLERANCE);
}

#[test]
fn answers_with_f16_keys_and_values_are_within_one_point_of_the_reference() {
    let score = score(Dtype::F16);
    println!("f16: {} of 300, {score:?}", total(&score));
    assert_near_the_reference(&score, TOLERANCE);
}

/// Eight bits of mantissa may cost a little.
#[test]
fn answers_with_bf16_keys_and_values_are_within_two_points_of_the_reference() {
    let score = score(Dtype::BF16);
    println!("bf16: {} of 300, {score:?}", total(&score));
    assert_near_the_reference(&score, 2 * TOLERANCE);
}
