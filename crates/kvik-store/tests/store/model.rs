//! Random operations on a store with bad tiers, against a map that says what was ever committed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kvik_store::policy::PolicyKind;
use kvik_store::{Chain, Clear, Store, WriteBack};
use kvik_tier::conformance::MapTier;
use kvik_tier::{Checksummed, ChunkKey, FaultRates, Faulty, Tier, TierKind};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use crate::observer::Replay;
use crate::support::*;

/// Chains are a root that all share, one of some branches, and one of some leaves.
const N_BRANCHES: u32 = 3;
const N_LEAVES: u32 = 3;

#[derive(Debug, Clone)]
enum Operation {
    Store { chain: u32, n_chunks: usize },
    Retrieve { chain: u32, first_chunk: usize },
    Layers { chain: u32 },
    Pin { chain: u32 },
    Unpin { chain: u32 },
    Hold { chain: u32 },
    LetGo,
    ClearAll,
    ClearChain { chain: u32 },
    ClearRam,
    Relocate { chain: u32, to_disk: bool, keep_source: bool },
    Flush,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let chain = 0..N_BRANCHES * N_LEAVES;
    let operation = prop_oneof![
        8 => (chain.clone(), 1..=6usize).prop_map(|(chain, n_chunks)| Operation::Store { chain, n_chunks }),
        8 => (chain.clone(), 0..4usize)
            .prop_map(|(chain, first_chunk)| Operation::Retrieve { chain, first_chunk }),
        3 => chain.clone().prop_map(|chain| Operation::Layers { chain }),
        1 => chain.clone().prop_map(|chain| Operation::Pin { chain }),
        1 => chain.clone().prop_map(|chain| Operation::Unpin { chain }),
        2 => chain.clone().prop_map(|chain| Operation::Hold { chain }),
        2 => Just(Operation::LetGo),
        1 => Just(Operation::ClearAll),
        1 => chain.clone().prop_map(|chain| Operation::ClearChain { chain }),
        2 => Just(Operation::ClearRam),
        2 => (chain, any::<bool>(), any::<bool>()).prop_map(|(chain, to_disk, keep_source)| {
            Operation::Relocate { chain, to_disk, keep_source }
        }),
        2 => Just(Operation::Flush),
    ];
    prop::collection::vec(operation, 1..60)
}

fn chain_named(store: &Store, chain: u32) -> Chain {
    let (branch, leaf) = (chain / N_LEAVES, chain % N_LEAVES);
    let mut tokens = tokens_of(0, 8);
    tokens.extend(tokens_of(1 + branch, 8));
    tokens.extend(tokens_of(100 + leaf, 8));
    space_of(store, "", 2).chain(&tokens)
}

fn bad_tier(kind: TierKind, seed: u64, map: MapTier) -> Arc<dyn Tier> {
    let rates = FaultRates {
        fail: 40,
        fail_late: 40,
        lose: 30,
        tear: 30,
        shorten: 30,
        duplicate: 30,
        flip: 30,
        mix: 30,
        ..FaultRates::default()
    };
    Arc::new(Kind(kind, Checksummed::new(Faulty::new(map, rates, seed))))
}

/// What was committed and not cleared since: the most that may be found.
#[derive(Default)]
struct Model {
    committed: HashSet<ChunkKey>,
    /// A remote tier may still have what was cleared.
    has_remote: bool,
    n_pins: std::collections::HashMap<u32, usize>,
}

impl Model {
    fn longest(&self, chain: &Chain, first_chunk: usize) -> usize {
        let is_whole = |chunk_idx: &usize| {
            (0..2).all(|rank| self.committed.contains(&chain.key(*chunk_idx, rank).unwrap()))
        };
        (first_chunk..chain.n_chunks()).take_while(is_whole).count()
    }
}

/// In memory and on disk, a chunk's parent is there as long as the chunk is.
fn verify_parents(store: &Store) -> TestCaseResult {
    for chain in 0..N_BRANCHES * N_LEAVES {
        let chain = chain_named(store, chain);
        for chunk_idx in 1..chain.n_chunks() {
            let child = store.tiers_of(&chain, chunk_idx);
            let parent = store.tiers_of(&chain, chunk_idx - 1);
            // Reads of bad tiers make holes on disk; memory never has one.
            let is_orphan = child.contains(&TierKind::Ram) && !parent.contains(&TierKind::Ram);
            // The reclaiming thread may have worked in between.
            let is_still = store.tiers_of(&chain, chunk_idx).contains(&TierKind::Ram);
            prop_assert!(!(is_orphan && is_still), "chunk {} is in memory without its parent", chunk_idx);
        }
    }
    Ok(())
}

fn run(
    store: &Store,
    model: &mut Model,
    held: &mut Vec<(kvik_store::Retrieved, Chain)>,
    operation: &Operation,
) -> TestCaseResult {
    match *operation {
        Operation::Store { chain, n_chunks } => {
            let chain = chain_named(store, chain);
            store.note_request(&chain, None);
            for chunk_idx in 0..n_chunks.min(chain.n_chunks()) {
                if !store_chunk(store, &chain, chunk_idx) {
                    break;
                }
                model.committed.extend((0..2).map(|rank| chain.key(chunk_idx, rank).unwrap()));
            }
        }
        Operation::Retrieve { chain, first_chunk } => {
            let chain = chain_named(store, chain);
            let n_known = store.lookup_local(&chain).n_chunks;
            prop_assert!(n_known <= model.longest(&chain, 0));
            let n_chunks = verify(&store.retrieve(&chain, first_chunk), &chain, first_chunk);
            prop_assert!(n_chunks <= model.longest(&chain, first_chunk));
        }
        Operation::Layers { chain } => {
            let chain = chain_named(store, chain);
            let mut reader = store.retrieve_layers(&chain, 0);
            while let Some(layer) = reader.next_layer() {
                prop_assert!(layer.n_chunks() <= model.longest(&chain, 0));
                for chunk_idx in 0..layer.n_chunks() {
                    let payload = content(chain.key(chunk_idx, 1).unwrap(), PAYLOAD_BYTES);
                    let start = layer.idx() * SECTION_BYTES;
                    prop_assert!(layer.section(chunk_idx, 1) == &payload[start..start + SECTION_BYTES]);
                }
            }
        }
        Operation::Pin { chain } => {
            let n_tokens = store.pin(&chain_named(store, chain));
            prop_assert!(n_tokens <= CHUNK_TOKENS * model.longest(&chain_named(store, chain), 0));
            *model.n_pins.entry(chain).or_default() += 1;
        }
        Operation::Unpin { chain } => {
            let n_pins = model.n_pins.entry(chain).or_default();
            prop_assert_eq!(store.unpin(&chain_named(store, chain)), *n_pins > 0);
            *n_pins = n_pins.saturating_sub(1);
        }
        Operation::Hold { chain } => {
            let chain = chain_named(store, chain);
            held.push((store.retrieve(&chain, 0), chain));
        }
        Operation::LetGo => held.truncate(held.len() / 2),
        Operation::ClearAll => {
            store.clear(&Clear::default());
            if !model.has_remote {
                model.committed.clear();
            }
        }
        Operation::ClearChain { chain } => {
            store.clear(&Clear { chain: Some(chain_named(store, chain)), ..Clear::default() });
        }
        Operation::ClearRam => forget_memory(store),
        Operation::Relocate { chain, to_disk, keep_source } => {
            let chain = chain_named(store, chain);
            let (from, to) =
                if to_disk { (TierKind::Ram, TierKind::Nvme) } else { (TierKind::Nvme, TierKind::Ram) };
            prop_assert!(store.relocate(&chain, from, to, keep_source) <= model.longest(&chain, 0));
        }
        Operation::Flush => {
            // A flush may be told to fail.
            let _ = store.flush(Duration::from_secs(30));
        }
    }
    for (retrieved, chain) in held.iter() {
        verify(retrieved, chain, 0);
    }
    verify_parents(store)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_right_and_no_hit_is_longer_than_what_was_committed(
        operations in operations(),
        seed in any::<u64>(),
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        is_on_reuse in any::<bool>(),
        has_remote in any::<bool>(),
        n_slots in 8..40u64,
    ) {
        let disk = MapTier::with_capacity_bytes(16 * (4096 + PAYLOAD_BYTES as u64));
        let mut setup = Setup::new(n_slots)
            .with(|options| {
                options.policy = policy;
                options.ram_free_share = 0.1;
                options.batch_bytes = 3 * PAYLOAD_BYTES as u64;
                options.write_back = if is_on_reuse { WriteBack::OnReuse } else { WriteBack::OnStore };
            })
            .local_dyn(bad_tier(TierKind::Nvme, seed, disk));
        if has_remote {
            setup = setup.remote_dyn(bad_tier(TierKind::Redis, !seed, MapTier::new()));
        }
        let store = setup.open();
        let space = space_of(&store, "", 2);
        let replay = Replay::start(&store, &space);
        let (mut model, mut held) = (Model { has_remote, ..Model::default() }, Vec::new());
        for operation in &operations {
            run(&store, &mut model, &mut held, operation)?;
            replay.verify(&store, &space);
        }
        drop(held);
        let stat = store.health()[0].1.clone();
        prop_assert!(stat.used_bytes.unwrap() >= stat.n_chunks.unwrap() * SLOT_BYTES);
        // All memory comes back.
        for (chain, n_pins) in &model.n_pins {
            for _ in 0..*n_pins {
                prop_assert!(store.unpin(&chain_named(&store, *chain)));
            }
        }
        let _ = store.flush(Duration::from_secs(30));
        store.clear(&Clear::default());
        until("all memory is free", || store.health()[0].1.used_bytes == Some(0));
        prop_assert_eq!(store.stats().n_entries, 0);
        replay.verify(&store, &space);
    }
}
