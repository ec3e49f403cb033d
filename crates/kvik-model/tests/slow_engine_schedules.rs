//! More random requests than every run can afford.

pub mod support;

use support::TestModel;
use support::visits::check_random_visits;

#[test]
fn many_schedules_of_requests_give_the_outputs_of_each_alone() {
    for name in ["mistral_sliding_window", "llama_tied_odd_sizes", "qwen3", "gpt2"] {
        let totals = check_random_visits(&TestModel::fixture(name), 3000);
        assert!(1000 < totals.n_preemptions, "{totals:?}");
    }
}
