//! More and longer schedules than every run can afford.

pub mod support;

use kvik_model::Isa;

use support::schedule::check_schedules;
use support::{KV_DTYPES, TestModel, all_backend_options, backend_options};

#[test]
fn many_schedules_of_every_architecture_give_the_logits_of_each_sequence_alone() {
    for name in [
        "mistral_sliding_window",
        "qwen2_sliding_layers",
        "qwen3",
        "gpt2",
        "llama_tied_odd_sizes",
        "llama_bf16_weights",
        "llama_f16_weights",
    ] {
        let model = TestModel::fixture(name);
        check_schedules(&model, &all_backend_options(40), 1500, 8, 31);
    }
}

#[test]
fn many_schedules_of_the_bundled_model_give_the_logits_of_each_sequence_alone() {
    let model = TestModel::bundled();
    let mut all_options = Vec::new();
    for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Scalar) {
        for (n_threads, kv_dtype) in (1..=3).zip(KV_DTYPES) {
            let mut options = backend_options(80);
            options.n_threads = n_threads;
            options.kv_dtype = kv_dtype;
            options.isa = isa;
            all_options.push(options);
        }
    }
    check_schedules(&model, &all_options, 60, 6, 180);
}
