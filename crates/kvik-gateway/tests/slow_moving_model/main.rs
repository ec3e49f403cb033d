//! The search of `gateway/moving_model.rs`, with more that happens in one history.

#[path = "../gateway/moving_model.rs"]
mod moving_model;

use moving_model::{Bounds, search};

#[test]
fn two_faults_of_any_kind_in_one_move_lose_and_repeat_no_token() {
    let n_states = search(Bounds { moves: 1, faults: 2, doubled_calls: 1 });
    assert!(300_000 < n_states, "{n_states}");
}
