//! What an observer hears is exactly what the tiers have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvik_store::{ChunkChange, ChunkObserver, Clear, Space, Store};
use kvik_tier::{Tier as _, TierKind};
use kvik_types::BlockHash;
use parking_lot::Mutex;

use crate::support::*;

/// What the changes say, applied one by one. No change may say what was so before.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    state: Mutex<ReplayState>,
}

#[derive(Debug, Default)]
struct ReplayState {
    held: BTreeMap<BlockHash, BTreeSet<TierKind>>,
    parents: BTreeMap<BlockHash, BlockHash>,
    n_changes: u64,
    complaint: Option<String>,
}

impl ChunkObserver for Replay {
    fn changed(&self, changes: &[ChunkChange]) {
        let mut state = self.state.lock();
        for change in changes {
            let tiers = state.held.entry(change.hash).or_default();
            let is_new = if change.is_held { tiers.insert(change.tier) } else { tiers.remove(&change.tier) };
            if tiers.is_empty() {
                state.held.remove(&change.hash);
            }
            if let Some(parent) = change.parent {
                state.parents.insert(change.hash, parent);
            }
            state.n_changes += 1;
            if !is_new {
                state.complaint = Some(format!("told again: {change:?}"));
            }
        }
    }
}

impl Replay {
    pub(crate) fn start(store: &Store, space: &Space) -> Arc<Self> {
        let replay = Arc::new(Self::default());
        // For as long as the store lives.
        std::mem::forget(store.observe(space, Arc::clone(&replay) as Arc<dyn ChunkObserver>));
        replay
    }

    /// Compares with the store at a moment at which nothing changed.
    pub(crate) fn verify(&self, store: &Store, space: &Space) {
        until("nothing changes", || {
            let n_before = self.state.lock().n_changes;
            let mut held: BTreeMap<BlockHash, BTreeSet<TierKind>> = BTreeMap::new();
            store.visit_chunks(space, |hash, tiers| {
                held.insert(hash, tiers.iter().copied().collect());
            });
            let state = self.state.lock();
            assert_eq!(state.complaint, None);
            if state.n_changes != n_before {
                return false;
            }
            assert_eq!(state.held, held);
            true
        });
    }

    fn tiers_of(&self, hash: BlockHash) -> Vec<TierKind> {
        self.state.lock().held.get(&hash).into_iter().flatten().copied().collect()
    }
}

#[test]
fn a_chunk_is_told_when_its_last_rank_is_there_and_with_its_parent() {
    let disk = TestTier::new(TierKind::Nvme);
    let store = Setup::new(16).local(&disk).open();
    let space = space_of(&store, "", 2);
    let replay = Replay::start(&store, &space);
    let chain = space.chain(&tokens_of(1, 2 * CHUNK_TOKENS));
    let hashes: Vec<BlockHash> = (0..2).map(|chunk_idx| chain.key(chunk_idx, 0).unwrap().chunk).collect();

    disk.puts.close();
    let kvik_store::Write::Slot(writer) = store.begin_write(&chain, 0, 0) else { panic!("no room") };
    writer.commit();
    assert_eq!(replay.tiers_of(hashes[0]), []);
    assert_eq!(store_chain(&store, &chain), 2);
    assert_eq!(replay.tiers_of(hashes[0]), [TierKind::Ram]);
    assert_eq!(replay.state.lock().parents, BTreeMap::from([(hashes[1], hashes[0])]));

    disk.puts.open();
    flush(&store);
    assert_eq!(replay.tiers_of(hashes[1]), [TierKind::Ram, TierKind::Nvme]);
    forget_memory(&store);
    assert_eq!(replay.tiers_of(hashes[1]), [TierKind::Nvme]);
    replay.verify(&store, &space);
    store.clear(&Clear::default());
    assert_eq!(replay.state.lock().held, BTreeMap::new());
    replay.verify(&store, &space);
}

#[test]
fn chunks_that_are_found_at_the_start_are_told_first_and_those_of_other_spaces_never() {
    let disk = TestTier::new(TierKind::Nvme);
    let store = Setup::new(16).local(&disk).open();
    let chain = chain_of(&store, 1, 2);
    store_chain(&store, &chain);
    store_chain(&store, &space_of(&store, "other", 1).chain(&tokens_of(1, CHUNK_TOKENS)));
    flush(&store);
    drop(store);

    let store = Setup::new(16).local(&disk).open();
    let space = space_of(&store, "", 1);
    let replay = Replay::start(&store, &space);
    let expected: BTreeMap<_, _> = (0..2)
        .map(|chunk_idx| (chain.key(chunk_idx, 0).unwrap().chunk, BTreeSet::from([TierKind::Nvme])))
        .collect();
    assert_eq!(replay.state.lock().held, expected);
    replay.verify(&store, &space);

    // A chunk that the disk turns out not to have is lost.
    disk.delete(&[chain.key(0, 0).unwrap(), chain.key(1, 0).unwrap()]).unwrap();
    assert_eq!(retrieve_all(&store, &chain_of(&store, 1, 2)), 0);
    assert_eq!(replay.tiers_of(chain.key(0, 0).unwrap().chunk), []);
    replay.verify(&store, &space);
}

#[test]
fn a_remote_tier_is_told_as_long_as_a_local_tier_knows_of_the_chunk() {
    let remote = TestTier::new(TierKind::Redis);
    let store = Setup::new(16).remote(&remote).open();
    let space = space_of(&store, "", 1);
    let replay = Replay::start(&store, &space);
    let chain = chain_of(&store, 1, 1);
    store_chain(&store, &chain);
    flush(&store);
    let hash = chain.key(0, 0).unwrap().chunk;
    assert_eq!(replay.tiers_of(hash), [TierKind::Ram, TierKind::Redis]);
    forget_memory(&store);
    assert_eq!(replay.tiers_of(hash), []);
    replay.verify(&store, &space);
}
