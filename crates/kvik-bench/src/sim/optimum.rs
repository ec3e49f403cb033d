//! What a cache that knows the future would hit.

use std::collections::{BTreeSet, HashMap};

use super::{Contender, Outcome, Trace};

/// Replays a trace through Belady's optimum with bypass in a cache of so many blocks.
///
/// The block whose next use is farthest away leaves; of equals, the one deepest in its chain. A prefix is
/// used whenever what hangs on it is, so it never leaves first.
pub fn optimum(trace: &Trace, capacity_blocks: usize) -> Outcome {
    let next_uses = next_uses(trace);
    // Next use, depth, id.
    let mut by_next_use = BTreeSet::new();
    let mut resident: HashMap<u64, (usize, usize)> = HashMap::new();
    let mut n_hit_blocks = 0;
    for (request, next_uses) in trace.requests().iter().zip(next_uses) {
        n_hit_blocks += request.hash_ids.iter().take_while(|id| resident.contains_key(id)).count() as u64;
        for (depth, (&id, next_use)) in request.hash_ids.iter().zip(next_uses).enumerate() {
            if let Some((old_next_use, _)) = resident.insert(id, (next_use, depth)) {
                by_next_use.remove(&(old_next_use, depth, id));
            }
            by_next_use.insert((next_use, depth, id));
        }
        while by_next_use.len() > capacity_blocks
            && let Some((_, _, id)) = by_next_use.pop_last()
        {
            resident.remove(&id);
        }
    }
    Outcome {
        contender: Contender::Optimum,
        capacity_blocks,
        n_blocks: trace.n_blocks(),
        n_hit_blocks,
        n_stored_blocks: None,
    }
}

const NEVER: usize = usize::MAX;

/// For each block of each request, the number of the next request that uses it.
fn next_uses(trace: &Trace) -> Vec<Vec<usize>> {
    let mut upcoming = HashMap::new();
    let mut next_uses: Vec<Vec<usize>> = (trace.requests().iter().enumerate().rev())
        .map(|(number, request)| {
            let of_block = |&id: &u64| upcoming.insert(id, number).unwrap_or(NEVER);
            request.hash_ids.iter().map(of_block).collect()
        })
        .collect();
    next_uses.reverse();
    next_uses
}
