//! What every policy must hold to, checked against a model of the tree.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::collections::{BTreeMap, BTreeSet};

use kvik_store::policy::{Block, BlockId, Policy, PolicyKind, Request};
use proptest::prelude::*;

/// The chain of a path: each prefix is a block whose id is the path itself, read as a number.
fn chain(path: &[u64]) -> Vec<Block> {
    let mut id = 1;
    let mut blocks: Vec<Block> = (path.iter())
        .map(|step| {
            id = id * 4 + step;
            Block { bytes: 1 + step, recompute_us: 10 * (1 + id % 7), ..Block::full(BlockId(id)) }
        })
        .collect();
    if let Some(tail) = blocks.last_mut() {
        tail.is_full = tail.id.0 % 2 == 0;
    }
    blocks
}

fn parent(id: BlockId) -> Option<BlockId> {
    (id.0 >= 16).then_some(BlockId(id.0 / 4))
}

/// The resident blocks with their pins and sizes, as plainly as possible.
#[derive(Default)]
struct Forest {
    blocks: BTreeMap<BlockId, (u64, u32)>,
}

impl Forest {
    fn is_leaf(&self, id: BlockId) -> bool {
        self.blocks.get(&id).is_some_and(|(_, n_pins)| *n_pins == 0)
            && !self.blocks.keys().any(|other| parent(*other) == Some(id))
    }

    fn check(&self, policy: &dyn Policy) {
        assert_eq!(policy.tree().n_blocks(), self.blocks.len());
        assert_eq!(policy.tree().n_bytes(), self.blocks.values().map(|(bytes, _)| bytes).sum::<u64>());
    }
}

#[derive(Debug, Clone)]
enum Step {
    Use(Vec<u64>),
    Remove(Vec<u64>),
    Pin(Vec<u64>),
    Unpin(Vec<u64>),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let path = || prop::collection::vec(0..4_u64, 1..7);
    prop_oneof![
        8 => path().prop_map(Step::Use),
        1 => path().prop_map(Step::Remove),
        1 => path().prop_map(Step::Pin),
        1 => path().prop_map(Step::Unpin),
        2 => (0..100_000_u64).prop_map(Step::Pass),
    ]
}

/// Runs the steps, checks each answer, and returns the victims.
fn run(kind: PolicyKind, capacity: usize, steps: &[Step]) -> Vec<BlockId> {
    let mut policy = kind.build(capacity);
    let mut forest = Forest::default();
    let mut victims = Vec::new();
    let mut now_ms = 0;
    for step in steps {
        match step {
            Step::Use(path) => {
                let blocks = chain(path);
                let request = Request { blocks: &blocks, n_generated_tokens: Some(path.len() as u32 * 40) };
                policy.access(now_ms, &request);
                for (index, block) in blocks.iter().enumerate() {
                    let is_new = !forest.blocks.contains_key(&block.id);
                    assert_eq!(policy.insert(now_ms, &request, index), is_new, "{kind}: insert {block:?}");
                    forest.blocks.entry(block.id).or_insert((block.bytes, 0));
                }
                // Behind a missing parent nothing is inserted.
                let orphan = [Block::full(BlockId(3)), Block::full(BlockId(2))];
                assert!(!policy.insert(now_ms, &Request::new(&orphan), 1), "{kind}");
                assert!(!policy.insert(now_ms, &request, blocks.len()), "{kind}");
            }
            Step::Remove(path) => {
                let id = chain(path).last().unwrap().id;
                let expected = forest.is_leaf(id);
                assert_eq!(policy.remove(id), expected, "{kind}: remove {id:?}");
                if expected {
                    forest.blocks.remove(&id);
                }
            }
            Step::Pin(path) => {
                let id = chain(path).last().unwrap().id;
                let pinned = forest.blocks.get_mut(&id).map(|(_, n_pins)| *n_pins += 1);
                assert_eq!(policy.pin(id), pinned.is_some(), "{kind}: pin {id:?}");
            }
            Step::Unpin(path) => {
                let id = chain(path).last().unwrap().id;
                let pins = forest.blocks.get_mut(&id).filter(|(_, n_pins)| *n_pins > 0);
                let unpinned = pins.map(|(_, n_pins)| *n_pins -= 1);
                assert_eq!(policy.unpin(id), unpinned.is_some(), "{kind}: unpin {id:?}");
            }
            Step::Pass(ms) => now_ms += ms,
        }
        forest.check(policy.as_ref());
        while forest.blocks.len() > capacity {
            let Some(id) = policy.victim(now_ms) else {
                assert!(!forest.blocks.keys().any(|id| forest.is_leaf(*id)), "{kind}: a leaf was not found");
                break;
            };
            assert!(forest.is_leaf(id), "{kind}: {id:?} is no leaf");
            forest.blocks.remove(&id);
            victims.push(id);
        }
        forest.check(policy.as_ref());
    }
    let ids: BTreeSet<BlockId> = forest.blocks.keys().copied().collect();
    assert!(ids.iter().all(|id| policy.tree().contains(*id)), "{kind}");
    victims
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_policy_evicts_leaves_alone_and_loses_no_count(
        steps in prop::collection::vec(step(), 1..120),
        capacity in 0..30_usize,
    ) {
        for kind in PolicyKind::ALL {
            let victims = run(kind, capacity, &steps);
            prop_assert_eq!(victims, run(kind, capacity, &steps), "{} is not deterministic", kind);
        }
    }

    #[test]
    fn lru_equals_a_list_that_is_searched(
        paths in prop::collection::vec(prop::collection::vec(0..4_u64, 1..7), 1..80),
        capacity in 1..40_usize,
    ) {
        let mut policy = PolicyKind::Lru.build(capacity);
        // Least recent first.
        let mut list: Vec<BlockId> = Vec::new();
        for path in paths {
            let blocks = chain(&path);
            let request = Request::new(&blocks);
            policy.access(0, &request);
            for index in 0..blocks.len() {
                policy.insert(0, &request, index);
            }
            for block in blocks.iter().rev() {
                list.retain(|id| *id != block.id);
                list.push(block.id);
            }
            while list.len() > capacity {
                prop_assert_eq!(policy.victim(0), Some(list.remove(0)));
            }
        }
    }
}

#[test]
fn a_policy_is_found_by_its_name_and_no_other() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse::<PolicyKind>().unwrap(), kind);
    }
    assert!("LRU2".parse::<PolicyKind>().unwrap_err().to_string().contains("'LRU2'"));
}

#[test]
fn cost_keeps_what_takes_longer_to_compute_per_byte() {
    let mut policy = PolicyKind::Cost.build(2);
    let block = |id, bytes, recompute_us| Block { bytes, recompute_us, ..Block::full(BlockId(id)) };
    for block in [block(1, 100, 900), block(2, 100, 100), block(3, 1000, 2000)] {
        let chain = [block];
        policy.access(0, &Request::new(&chain));
        assert!(policy.insert(0, &Request::new(&chain), 0));
    }
    let order: Vec<u64> = std::iter::from_fn(|| policy.victim(0)).map(|id| id.0).collect();
    assert_eq!(order, [2, 3, 1]);
}

#[test]
fn kvik_lets_partly_full_tails_go_first() {
    let mut policy = PolicyKind::Kvik.build(100);
    for number in 0..50_u64 {
        let mut chain: Vec<Block> = (0..4).map(|depth| Block::full(BlockId(number * 10 + depth))).collect();
        chain[3].is_full = false;
        let request = Request::new(&chain);
        policy.access(number * 1000, &request);
        assert!((0..4).all(|index| policy.insert(number * 1000, &request, index)));
    }
    let victims: Vec<u64> = (0..50).map_while(|_| policy.victim(60_000)).map(|id| id.0 % 10).collect();
    assert_eq!(victims, [3; 50]);
}

#[test]
fn blocks_that_come_without_a_request_are_residents_like_others() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(8);
        let first = chain(&[1, 2, 3]);
        for index in 0..3 {
            assert!(policy.insert(0, &Request::new(&first), index), "{kind}");
        }
        assert_eq!(policy.victim(1), Some(first[2].id), "{kind}");
        // The slot of the block that left is used again.
        let second = chain(&[1, 2, 0]);
        assert!(policy.insert(2, &Request::new(&second), 2), "{kind}");
        policy.access(3, &Request::new(&second));
        let rest: Vec<_> = std::iter::from_fn(|| policy.victim(4)).collect();
        assert_eq!(rest, [second[2].id, first[1].id, first[0].id], "{kind}");
    }
}

/// A cache of single blocks, each used once, of which those with even numbers are copies.
fn half_copies(kind: PolicyKind, n_blocks: u64) -> Box<dyn Policy> {
    let mut policy = kind.build(n_blocks as usize);
    for number in 0..n_blocks {
        let chain = [Block::full(BlockId(number))];
        policy.access(number, &Request::new(&chain));
        assert!(policy.insert(number, &Request::new(&chain), 0), "{kind}");
        assert!(policy.set_copy(BlockId(number), number % 2 == 0), "{kind}");
    }
    policy
}

#[test]
fn copies_leave_before_blocks_that_no_other_place_has() {
    for kind in PolicyKind::ALL {
        let mut policy = half_copies(kind, 40);
        assert_eq!(policy.tree().n_copies(), 20, "{kind}");
        assert!(policy.set_copy(BlockId(0), false) && !policy.set_copy(BlockId(99), true), "{kind}");
        let victims: Vec<u64> = std::iter::from_fn(|| policy.victim(1000)).map(|id| id.0).collect();
        assert!(victims[..19].iter().all(|number| number % 2 == 0 && *number != 0), "{kind}: {victims:?}");
        assert_eq!((victims.len(), policy.tree().n_copies()), (40, 0), "{kind}");
    }
}

#[test]
fn without_copies_victims_are_those_of_the_policy_alone() {
    for kind in PolicyKind::ALL {
        let mut policy = half_copies(kind, 40);
        let mut plain = half_copies(kind, 40);
        for number in 0..40 {
            assert!(policy.set_copy(BlockId(number), false), "{kind}");
            assert!(plain.set_copy(BlockId(number), true), "{kind}");
        }
        for _ in 0..40 {
            assert_eq!(
                policy.victim(1000),
                plain.victim(1000),
                "{kind}: where all are copies none is spared"
            );
        }
    }
}

#[test]
fn a_block_that_is_never_used_leaves_however_many_copies_come() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(100);
        let only = [Block::full(BlockId(1))];
        policy.access(0, &Request::new(&only));
        assert!(policy.insert(0, &Request::new(&only), 0), "{kind}");
        let mut leaves_after = None;
        for number in 2..20_000_u64 {
            let now_ms = number * 1000;
            let chain = [Block::full(BlockId(number))];
            policy.access(now_ms, &Request::new(&chain));
            assert!(policy.insert(now_ms, &Request::new(&chain), 0), "{kind}");
            assert!(policy.set_copy(BlockId(number), true), "{kind}");
            if policy.tree().n_blocks() > 100 && policy.victim(now_ms) == Some(BlockId(1)) {
                leaves_after = Some(number);
                break;
            }
        }
        assert!(leaves_after.is_some(), "{kind} keeps a dead block for ever");
    }
}

#[test]
fn a_copy_does_not_leave_before_what_hangs_on_it() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(8);
        let blocks = chain(&[1, 2, 3]);
        for index in 0..3 {
            assert!(policy.insert(0, &Request::new(&blocks), index), "{kind}");
        }
        assert!(policy.set_copy(blocks[0].id, true) && policy.set_copy(blocks[1].id, true), "{kind}");
        let order: Vec<BlockId> = std::iter::from_fn(|| policy.victim(1)).collect();
        assert_eq!(order, [blocks[2].id, blocks[1].id, blocks[0].id], "{kind}");
    }
}
