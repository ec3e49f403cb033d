//! Which worker takes a request, and when.
//!
//! Where the index knows a beginning of the prompt, the key is the prompt up to the first block that no worker has;
//! otherwise it is the request's [routing key](crate::request::routing_key).
//!
//! The key's place on the ring of the model's workers and the bound on their loads decide; see
//! [`kvik_index::ring`] and [`kvik_index::placement`].
//!
//! No bound is passed by two requests that choose at once, and none waits for another: a choice reads the loads, and its
//! own load is added only if that of the chosen worker is not above what the choice was made with; otherwise it is made
//! again. Requests that were placed elsewhere meanwhile only raise the bound. A choice that is made again means that
//! another request was placed, so all together always get on.

use std::sync::Arc;

use kvik_index::placement::{Request, choose, choose_named};
use kvik_index::ring::{Choice, Loads, Reason};

use crate::config::{GatewayConfig, PdProtocol, RoutingConfig};
use crate::upstream::backend::{Backend, BackendKind, LoadGuard};
use crate::upstream::fleet::{ModelGroup, Seat};

pub(crate) mod admission;
pub(crate) mod input;
pub(crate) mod lookup;
pub(crate) mod prediction;
pub(crate) mod retry;
pub(crate) mod under_way;

/// Members whose loads fit on the stack.
const MANY: usize = 64;

/// A request that needs a backend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) request: Request<'a>,
    /// Those of its tokens that its answer is expected to have.
    pub(crate) output_tokens: u64,
    /// Whether its key is the name of a sequence, which stays with the owner of the name.
    pub(crate) is_named: bool,
}

/// A chosen backend with the request's load on it.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) load: LoadGuard,
    pub(crate) reason: Reason,
}

/// Places a request, under a bound of its own if some backend has a part of its prompt, on a usable backend of `group`
/// other than the `excluded` ones; `None` if there is none.
pub(crate) fn place(
    group: &ModelGroup,
    wanted: Wanted<'_>,
    config: &RoutingConfig,
    excluded: &[Arc<Backend>],
) -> Option<Placed> {
    place_among(group, wanted, config, answering(group, excluded))
}

/// Places a request on one of the backends that are `allowed`.
pub(crate) fn place_among(
    group: &ModelGroup,
    wanted: Wanted<'_>,
    config: &RoutingConfig,
    allowed: impl Fn(&Seat) -> bool,
) -> Option<Placed> {
    loop {
        let choice = choose_among(group, wanted, config, &allowed)?;
        let backend = &group.seats[choice.member].backend;
        let n_tokens = wanted.request.left(choice.member);
        if let Some(load) = backend.try_load(choice.load, n_tokens, wanted.output_tokens) {
            return Some(Placed { load, reason: choice.reason });
        }
    }
}

/// Chooses one of the backends that are `allowed`, by the loads of now, and leaves them as they are.
pub(crate) fn choose_among(
    group: &ModelGroup,
    wanted: Wanted<'_>,
    config: &RoutingConfig,
    allowed: impl Fn(&Seat) -> bool,
) -> Option<Choice> {
    let Wanted { request, is_named, .. } = wanted;
    let mut on_stack = [0; MANY];
    let mut on_heap = Vec::new();
    let tokens = if group.seats.len() <= MANY {
        &mut on_stack[..group.seats.len()]
    } else {
        on_heap.resize(group.seats.len(), 0);
        on_heap.as_mut_slice()
    };
    for (tokens, seat) in tokens.iter_mut().zip(&group.seats) {
        *tokens = seat.backend.outstanding_tokens();
    }
    let is_usable = |member: usize| group.seats.get(member).is_some_and(&allowed);
    let is_known = request.matched_tokens.iter().any(|n_tokens| *n_tokens > 0.0);
    let load_factor = if is_known { config.kv_load_factor } else { group.load_factor };
    let loads = Loads { tokens, weights: &group.weights };
    if is_named {
        let floor = config.named_floor_tokens;
        choose_named(&group.ring, request, loads, load_factor, floor, is_usable)
    } else {
        choose(&group.ring, request, loads, load_factor, is_usable)
    }
}

/// Which backends may answer a request: usable ones other than the `excluded`. Those that only compute prompts may not
/// while another one can, and a server of `SGLang` for one part only while there is one for the other.
pub(crate) fn answering<'a>(
    group: &'a ModelGroup,
    excluded: &'a [Arc<Backend>],
) -> impl Fn(&Seat) -> bool + 'a {
    let is_free = move |seat: &Seat| {
        seat.is_usable() && !excluded.iter().any(|other| Arc::ptr_eq(other, &seat.backend))
    };
    let has_parts = group.has_parts();
    let prefills = |seat: &Seat| seat.is_usable() && seat.part.prefills_by(PdProtocol::Sglang);
    let has_partner = has_parts && group.seats.iter().any(prefills);
    let decodes = move |seat: &Seat| {
        is_free(seat) && seat.part.role.decodes() && (has_partner || seat.serves_whole_requests())
    };
    let has_decoder = has_parts && group.seats.iter().any(decodes);
    move |seat| match (has_parts, has_decoder) {
        (false, _) => is_free(seat),
        (true, true) => decodes(seat),
        (true, false) => is_free(seat) && seat.serves_whole_requests(),
    }
}

/// Places a request on the worker at `base`, whatever its load is; `None` if it is not usable.
pub(crate) fn place_at(group: &ModelGroup, wanted: Wanted<'_>, base: &str) -> Option<Placed> {
    let is_there = |seat: &&Seat| seat.backend.base == base && seat.is_usable();
    let (member, seat) = group.seats.iter().enumerate().find(|(_, seat)| is_there(seat))?;
    let load = seat.backend.try_load(u64::MAX, wanted.request.left(member), wanted.output_tokens)?;
    Some(Placed { load, reason: Reason::Holder })
}

/// Places a request on a worker of kvik outside of `left`; `None` if no worker is usable.
pub(crate) fn place_worker(
    group: &ModelGroup,
    wanted: Wanted<'_>,
    config: &GatewayConfig,
    left: &[Arc<Backend>],
) -> Option<Placed> {
    let others = group.seats.iter().map(|seat| &seat.backend);
    let mut excluded: Vec<Arc<Backend>> =
        others.filter(|backend| backend.kind != BackendKind::Worker).map(Arc::clone).collect();
    excluded.extend(left.iter().map(Arc::clone));
    place(group, wanted, &config.routing, &excluded)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use kvik_index::ring::{Ring, RingHash};

    use super::*;
    use crate::config::Role;
    use crate::upstream::fleet::{Part, Transfer};

    fn wanted(tokens: u64) -> Wanted<'static> {
        let request = Request { key: b"k", tokens, matched_tokens: &[] };
        Wanted { request, output_tokens: tokens / 10, is_named: false }
    }

    fn group(n_backends: usize) -> ModelGroup {
        let ids: Vec<(String, f64)> = (0..n_backends).map(|number| (format!("w{number:02}"), 1.0)).collect();
        let ring = Ring::build(RingHash::Xxh3, 160, &ids).unwrap();
        let seat = |(id, _): &(String, f64)| Seat {
            backend: Arc::new(Backend::new(id.clone(), BackendKind::Worker, 1, "http://127.0.0.1:1")),
            takes_requests: true,
            part: Part::default(),
        };
        ModelGroup {
            is_managed: false,
            model: "m".to_owned(),
            seats: ids.iter().map(seat).collect(),
            weights: vec![1.0; n_backends],
            ring,
            load_factor: 0.25,
        }
    }

    fn outstanding(group: &ModelGroup) -> Vec<u64> {
        group.seats.iter().map(|seat| seat.backend.outstanding_tokens()).collect()
    }

    #[test]
    fn equal_keys_go_to_one_worker_and_its_bound_sends_the_rest_on() {
        let (group, config) = (group(4), RoutingConfig::default());
        let mut held = vec![place(&group, wanted(100), &config, &[]).unwrap()];
        assert_eq!(held[0].reason, Reason::Owner);
        let owner = Arc::clone(&held[0].load.backend);
        for _ in 0..40 {
            held.push(place(&group, wanted(100), &config, &[]).unwrap());
            let loads = outstanding(&group);
            // A request does not split: where none has room the least loaded one takes it.
            let bound = (1.25 * loads.iter().sum::<u64>() as f64 / 4.0).ceil() as u64 + 100;
            assert!(loads.iter().all(|load| *load <= bound));
        }
        assert!(held.iter().any(|placed| placed.reason == Reason::Bound));
        drop(held);
        assert!(outstanding(&group).iter().all(|load| *load == 0));
        let excluded = [owner];
        let elsewhere = place(&group, wanted(100), &config, &excluded).unwrap();
        assert!(!Arc::ptr_eq(&elsewhere.load.backend, &excluded[0]));
    }

    #[test]
    fn no_bound_is_passed_by_requests_that_choose_at_once() {
        let (group, config) = (group(4), RoutingConfig::default());
        let start = std::sync::Barrier::new(8);
        let held: Vec<Placed> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        let placed = (0..500).map(|_| place(&group, wanted(100), &config, &[]).unwrap());
                        placed.collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let loads = outstanding(&group);
        assert_eq!(loads.iter().sum::<u64>(), 400_000);
        assert_eq!(held.len(), 4000);
        // Nothing has ended, so the last bound is the largest; one request may go where none had room.
        assert!(loads.iter().all(|load| *load <= 125_000 + 100), "{loads:?}");
        drop(held);
        assert!(outstanding(&group).iter().all(|load| *load == 0));
    }

    #[test]
    fn a_named_sequence_stays_with_its_owner_beside_a_few_other_streams() {
        let (group, config) = (group(4), RoutingConfig::default());
        let named = Wanted { is_named: true, ..wanted(500) };
        let first = place(&group, named, &config, &[]).unwrap();
        assert_eq!(first.reason, Reason::Owner);
        let owner = Arc::clone(&first.load.backend);
        let streams: Vec<_> = (0..4).map(|_| owner.load(800, 256)).collect();
        let next = place(&group, named, &config, &[]).unwrap();
        assert!(Arc::ptr_eq(&next.load.backend, &owner), "{:?}", next.reason);
        drop((streams, next));
        // Beyond the work that may wait it moves, to the holder of its KV.
        let _busy = owner.load(config.named_floor_tokens, 1);
        let holder = group.seats.iter().rposition(|seat| !Arc::ptr_eq(&seat.backend, &owner)).unwrap();
        let mut matched_tokens = vec![0.0; 4];
        matched_tokens[holder] = 400.0;
        let request = Request { matched_tokens: &matched_tokens, ..named.request };
        let moved = place(&group, Wanted { request, ..named }, &config, &[]).unwrap();
        assert!(Arc::ptr_eq(&moved.load.backend, &group.seats[holder].backend));
        assert_eq!(moved.reason, Reason::Holder);
    }

    #[test]
    fn a_placement_takes_less_than_a_millisecond_beside_a_thousand_running_prompts() {
        let (group, config) = (group(8), RoutingConfig::default());
        let held: Vec<_> = (0..1024).map(|_| place(&group, wanted(8192), &config, &[]).unwrap()).collect();
        let times = (0..50).map(|_| {
            let start = Instant::now();
            let placed = place(&group, wanted(8192), &config, &[]);
            let elapsed = start.elapsed();
            assert!(placed.is_some());
            elapsed
        });
        // The quickest of several: the machine may be busy with something else.
        let quickest = times.min().unwrap();
        assert!(quickest < Duration::from_millis(1), "{quickest:?} beside {}", held.len());
    }

    /// A group whose backends have these parts.
    fn group_of(parts: &[(Role, Option<PdProtocol>)]) -> ModelGroup {
        let mut group = group(parts.len());
        for (seat, (role, protocol)) in group.seats.iter_mut().zip(parts) {
            let transfer = |protocol| Arc::new(Transfer { protocol, host: String::new(), port: 0 });
            seat.part = Part { role: *role, transfer: protocol.map(transfer) };
        }
        group
    }

    /// The numbers of the backends that may answer.
    fn answerers(group: &ModelGroup, excluded: &[usize]) -> Vec<usize> {
        let excluded: Vec<_> =
            excluded.iter().map(|number| Arc::clone(&group.seats[*number].backend)).collect();
        let may_answer = answering(group, &excluded);
        (0..group.seats.len()).filter(|number| may_answer(&group.seats[*number])).collect()
    }

    #[test]
    fn a_backend_for_prompts_answers_only_if_no_other_can() {
        let nixl = Some(PdProtocol::NixlPull);
        let group = group_of(&[(Role::Prefill, nixl), (Role::Decode, nixl), (Role::Both, nixl)]);
        assert_eq!(answerers(&group, &[]), [1, 2]);
        assert_eq!(answerers(&group, &[1]), [2]);
        assert_eq!(answerers(&group, &[1, 2]), [0]);
        let placed = place(&group, wanted(1), &RoutingConfig::default(), &[]).unwrap();
        assert!(!Arc::ptr_eq(&placed.load.backend, &group.seats[0].backend));
    }

    #[test]
    fn a_server_of_sglang_for_one_part_never_answers_alone() {
        let sglang = Some(PdProtocol::Sglang);
        let group = group_of(&[(Role::Prefill, sglang), (Role::Decode, sglang), (Role::Both, None)]);
        assert_eq!(answerers(&group, &[]), [1, 2]);
        assert_eq!(answerers(&group, &[2]), [1]);
        assert_eq!(answerers(&group, &[1, 2]), [0_usize; 0]);
        let alone = group_of(&[(Role::Decode, sglang), (Role::Both, None)]);
        assert_eq!(answerers(&alone, &[]), [1]);
        assert_eq!(answerers(&alone, &[1]), [0_usize; 0]);
    }

    #[test]
    fn more_backends_than_fit_on_the_stack_work_too() {
        assert!(place(&group(MANY + 9), wanted(1), &RoutingConfig::default(), &[]).is_some());
    }
}
