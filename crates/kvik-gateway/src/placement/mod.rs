//! Which worker takes a request, and when.
//!
//! Where the index knows a beginning of the prompt, the key is the prompt up to the first block that no worker has;
//! otherwise it is the request's [routing key](crate::request::routing_key).
//!
//! The key's place on the ring of the model's workers and the bound on their loads decide; see
//! [`kvik_index::ring`]. The choice and the load that follows from it are one step under one lock,
//! so that no bound is passed by two requests that choose at once.

use std::sync::Arc;

use kvik_index::placement::{Request, choose};
use kvik_index::ring::{Loads, Reason};
use parking_lot::Mutex;

use crate::upstream::backend::{Backend, LoadGuard};
use crate::upstream::fleet::ModelGroup;

pub(crate) mod admission;
pub(crate) mod lookup;
pub(crate) mod prediction;
pub(crate) mod retry;
pub(crate) mod under_way;

/// Members whose loads fit on the stack.
const MANY: usize = 64;
/// Makes a choice and its load one step.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    lock: Mutex<()>,
}

/// A chosen backend with the request's load on it.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) load: LoadGuard,
    pub(crate) reason: Reason,
}

impl Placement {
    /// Places a request, under a bound of its own if somebody has a part of its prompt, on a usable backend of `group`
    /// other than the `excluded` ones; `None` if there is none. `output_tokens` are those of its tokens that its answer
    /// is expected to have.
    pub(crate) fn place(
        &self,
        group: &ModelGroup,
        request: Request<'_>,
        output_tokens: u64,
        kv_load_factor: f64,
        excluded: &[Arc<Backend>],
    ) -> Option<Placed> {
        let mut on_stack = [0; MANY];
        let mut on_heap = Vec::new();
        let tokens = if group.seats.len() <= MANY {
            &mut on_stack[..group.seats.len()]
        } else {
            on_heap.resize(group.seats.len(), 0);
            on_heap.as_mut_slice()
        };
        let is_usable = |member: usize| {
            group.seats.get(member).is_some_and(|seat| {
                seat.is_usable() && !excluded.iter().any(|other| Arc::ptr_eq(other, &seat.backend))
            })
        };
        let _one_at_a_time = self.lock.lock();
        for (tokens, seat) in tokens.iter_mut().zip(&group.seats) {
            *tokens = seat.backend.outstanding_tokens();
        }
        let loads = Loads { tokens, weights: &group.weights };
        let is_known = request.matched_tokens.iter().any(|n_tokens| *n_tokens > 0.0);
        let load_factor = if is_known { kv_load_factor } else { group.load_factor };
        let choice = choose(&group.ring, request, loads, load_factor, is_usable)?;
        let load = group.seats[choice.member].backend.load(request.left(choice.member), output_tokens);
        Some(Placed { load, reason: choice.reason })
    }
}

#[cfg(test)]
mod tests {
    use kvik_index::ring::{Ring, RingHash};

    use super::*;
    use crate::upstream::backend::BackendKind;
    use crate::upstream::fleet::Seat;

    fn request(tokens: u64) -> Request<'static> {
        Request { key: b"k", tokens, matched_tokens: &[] }
    }

    fn group(n_backends: usize) -> ModelGroup {
        let ids: Vec<(String, f64)> = (0..n_backends).map(|number| (format!("w{number:02}"), 1.0)).collect();
        let ring = Ring::build(RingHash::Xxh3, 160, &ids).unwrap();
        let seat = |(id, _): &(String, f64)| Seat {
            backend: Arc::new(Backend::new(id.clone(), BackendKind::Worker, 1, "http://127.0.0.1:1")),
            takes_requests: true,
        };
        ModelGroup {
            model: "m".to_owned(),
            seats: ids.iter().map(seat).collect(),
            weights: vec![1.0; n_backends],
            ring,
            load_factor: 0.25,
        }
    }

    #[test]
    fn equal_keys_go_to_one_worker_and_its_bound_sends_the_rest_on() {
        let (group, placement) = (group(4), Placement::default());
        let mut held = vec![placement.place(&group, request(100), 10, 1.0, &[]).unwrap()];
        assert_eq!(held[0].reason, Reason::Owner);
        let owner = Arc::clone(&held[0].load.backend);
        for _ in 0..40 {
            held.push(placement.place(&group, request(100), 10, 1.0, &[]).unwrap());
            let total: u64 = group.seats.iter().map(|seat| seat.backend.outstanding_tokens()).sum();
            for seat in &group.seats {
                // A request does not split: where none has room the least loaded one takes it.
                let bound = (1.25 * total as f64 / 4.0).ceil() as u64 + 100;
                assert!(seat.backend.outstanding_tokens() <= bound);
            }
        }
        assert!(held.iter().any(|placed| placed.reason == Reason::Bound));
        drop(held);
        assert!(group.seats.iter().all(|seat| seat.backend.outstanding_tokens() == 0));
        let excluded = [owner];
        let elsewhere = placement.place(&group, request(100), 10, 1.0, &excluded).unwrap();
        assert!(!Arc::ptr_eq(&elsewhere.load.backend, &excluded[0]));
    }

    #[test]
    fn more_backends_than_fit_on_the_stack_work_too() {
        let (group, placement) = (group(MANY + 9), Placement::default());
        assert!(placement.place(&group, request(1), 1, 1.0, &[]).is_some());
    }
}
