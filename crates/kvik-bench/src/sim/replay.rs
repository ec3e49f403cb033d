//! Runs a trace through a policy.

use kvik_store::policy::{Block, BlockId, PolicyKind, Request};

use super::{Contender, Outcome, TOKENS_PER_BLOCK, Trace};

/// Replays a trace through a policy in a cache of so many blocks.
///
/// Room is made after a request has been stored, so a request may compete with itself; between requests
/// the cache is never over its capacity. Blocks are of equal size and cost.
pub fn simulate(trace: &Trace, kind: PolicyKind, capacity_blocks: usize) -> Outcome {
    let mut policy = kind.build(capacity_blocks);
    let mut blocks = Vec::new();
    let (mut n_hit_blocks, mut n_stored_blocks) = (0, 0);
    for request in trace.requests() {
        let n_full_blocks = request.input_length / TOKENS_PER_BLOCK;
        blocks.clear();
        blocks.extend(
            request
                .hash_ids
                .iter()
                .zip(0..)
                .map(|(&id, index)| Block { is_full: index < n_full_blocks, ..Block::full(BlockId(id)) }),
        );
        let n_hits = blocks.iter().take_while(|block| policy.tree().contains(block.id)).count();
        n_hit_blocks += n_hits as u64;

        let now_ms = request.timestamp;
        let request = Request { blocks: &blocks, n_generated_tokens: Some(request.output_length) };
        policy.access(now_ms, &request);
        for index in n_hits..blocks.len() {
            let is_full_cache = policy.tree().n_blocks() >= capacity_blocks;
            if is_full_cache && !policy.admits(now_ms, &request, index) {
                break;
            }
            n_stored_blocks += u64::from(policy.insert(now_ms, &request, index));
        }
        while policy.tree().n_blocks() > capacity_blocks && policy.victim(now_ms).is_some() {}
    }
    Outcome {
        contender: Contender::Policy(kind),
        capacity_blocks,
        n_blocks: trace.n_blocks(),
        n_hit_blocks,
        n_stored_blocks: Some(n_stored_blocks),
    }
}
