//! Random schedules with KV from outside, some of it damaged.

use std::cell::RefCell;

use crate::support::TestModel;
use crate::support::shelf::{Shelf, ShelfKv};
use crate::support::visits::{check_visits_by, for_random_visits};
use crate::{matched_tokens, submit_from};

/// Damages some prefixes, in a way that depends on `salt` alone.
fn damaged(mut kv: ShelfKv, salt: usize) -> ShelfKv {
    let n_blocks = kv.blocks.len();
    match salt % 7 {
        0 if 0 < n_blocks => kv.blocks[salt % n_blocks][0] = None,
        1 if 0 < n_blocks => kv.blocks[salt % n_blocks][1] = Some(vec![0xff; salt % 100]),
        2 => kv.n_tokens = salt % 48,
        3 => kv.n_tokens += 1000,
        _ => {}
    }
    kv
}

#[test]
fn any_schedule_with_any_kv_from_outside_gives_the_outputs_of_each_request_alone() {
    for name in ["mistral_sliding_window", "llama_tied_odd_sizes"] {
        let model = TestModel::fixture(name);
        let (n_loaded, n_offers, n_preemptions) = (RefCell::new(0), RefCell::new(0), RefCell::new(0));
        for_random_visits(&model, 100, |setup, visits| {
            let shelf = Shelf::default();
            // The second engine knows nothing but what the first has left on the shelf.
            for turn in 0..2 {
                let mut engine = setup.engine(&model, visits);
                engine.set_kv_sink(shelf.sink());
                check_visits_by(&model, &mut engine, visits, |engine, visit| {
                    let prompt = &visit.request.prompt;
                    if visit.arrival % 3 == turn {
                        engine.forget_prefixes();
                    }
                    let kv = damaged(shelf.prefix(prompt, matched_tokens(engine, prompt)), visit.arrival);
                    submit_from(engine, visit.request.clone(), kv)
                })?;
                *n_loaded.borrow_mut() += engine.stats().n_loaded_tokens;
                *n_preemptions.borrow_mut() += engine.stats().n_preemptions;
                assert!(engine.stats().n_loaded_tokens <= engine.stats().n_cached_tokens);
            }
            *n_offers.borrow_mut() += shelf.take_offers().len();
            Ok(())
        });
        // The schedules must be rough enough to mean something.
        let totals = (n_loaded.into_inner(), n_offers.into_inner(), n_preemptions.into_inner());
        assert!(1000 < totals.0 && 500 < totals.1 && 20 < totals.2, "{totals:?}");
    }
}
