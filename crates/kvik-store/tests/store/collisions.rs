//! Two sequences whose chunks have the same names never get each other's KV.
//!
//! The collisions are real ones of XXH3-128, which takes inputs of more than 240 bytes in lanes of two tokens.
//! A lane adds the product of its two halves, each combined with a public secret, and its own value to another
//! lane's sum. A token that equals its part of the secret makes the product zero, so that two such lanes may
//! shift their other token against each other and leave every sum as it was.

use std::sync::Arc;

use kvik_store::{ChunkFormat, Clear, Commit, DigestKey, Store, StoreOptions, Write};
use kvik_tier::{
    Arena, ArenaOptions, Checksummed, NvmeOptions, NvmeTier, RamTier, RemoteOptions, Tier, TierKind,
    open_remote,
};
use kvik_types::BlockSize;

use crate::support::{Kind, TestTier, namespace, until};

const CHUNK_TOKENS: usize = 64;
const N_LAYERS: usize = 2;

/// The low halves of XXH3's secret for the third lane of the first stripe and of the second one. The parent's
/// hash takes the first two lanes of a chunk.
const SECRETS: [u32; 2] = [0xe96d_d4de, 0xa4a4_4072];

/// Two sequences of two chunks with the same names.
fn colliding_tokens() -> [Vec<u32>; 2] {
    let mut mine: Vec<u32> = (0..2 * CHUNK_TOKENS as u32).collect();
    // Lane 2 of stripe 0, and lane 2 of stripe 1: 16 tokens further on.
    mine[0] = SECRETS[0];
    mine[16] = SECRETS[1];
    let mut theirs = mine.clone();
    theirs[1] += 7;
    theirs[17] -= 7;
    [mine, theirs]
}

struct Pair {
    store: Store,
    mine: kvik_store::Chain,
    theirs: kvik_store::Chain,
}

impl Pair {
    fn new(local: Option<Arc<dyn Tier>>, remote: Option<Arc<dyn Tier>>) -> Self {
        Self::with_key(local, remote, None)
    }

    fn with_key(
        local: Option<Arc<dyn Tier>>,
        remote: Option<Arc<dyn Tier>>,
        digest_key: Option<DigestKey>,
    ) -> Self {
        let options = StoreOptions {
            chunk_tokens: BlockSize::try_new(CHUNK_TOKENS).unwrap(),
            digest_key,
            ..StoreOptions::default()
        };
        let ram = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        let mut builder = Store::builder(options, ram);
        if let Some(local) = local {
            builder = builder.local(local);
        }
        if let Some(remote) = remote {
            builder = builder.remote(remote);
        }
        let store = builder.open().unwrap();
        let format = ChunkFormat {
            n_layers: N_LAYERS as u32,
            token_layer_bytes: 32,
            n_ranks: 1,
            block_tokens: BlockSize::try_new(16).unwrap(),
        };
        let space = store.space(&namespace(""), format).unwrap();
        let [mine, theirs] = colliding_tokens().map(|tokens| space.chain(&tokens));
        for chunk_idx in 0..2 {
            assert_eq!(mine.key(chunk_idx, 0), theirs.key(chunk_idx, 0), "the names collide");
            assert_ne!(mine.digest(chunk_idx), theirs.digest(chunk_idx));
        }
        Self { store, mine, theirs }
    }

    /// Stores a chain, all bytes `fill`; returns how many chunks were stored.
    fn write(&self, chain: &kvik_store::Chain, fill: u8) -> usize {
        let written = (0..chain.n_chunks()).take_while(|chunk_idx| {
            match self.store.begin_write(chain, *chunk_idx, 0) {
                Write::Slot(mut writer) => {
                    writer.payload_mut().fill(fill);
                    writer.commit() == Commit::Stored
                }
                _ => false,
            }
        });
        written.count()
    }

    fn forget_memory(&self) {
        self.store.clear(&Clear { tiers: Some(vec![TierKind::Ram.into()]), ..Clear::default() });
    }

    fn flush(&self) {
        assert!(self.store.flush(std::time::Duration::from_secs(30)));
    }

    fn n_mismatches(&self, tier: TierKind) -> u64 {
        let stats = self.store.stats();
        stats.token_mismatches.iter().find(|(kind, _)| *kind == tier).map_or(0, |(_, count)| *count)
    }

    /// The chunks of a chain, each byte of which must be `fill`.
    fn read(&self, chain: &kvik_store::Chain, fill: u8) -> usize {
        let retrieved = self.store.retrieve(chain, 0);
        for chunk in retrieved.chunks() {
            assert!(chunk.payload(0).iter().all(|byte| *byte == fill), "another sequence's KV");
        }
        retrieved.chunks().len()
    }

    fn read_layers(&self, chain: &kvik_store::Chain, fill: u8) -> usize {
        let mut reader = self.store.retrieve_layers(chain, 0);
        while let Some(layer) = reader.next_layer() {
            for chunk_idx in 0..layer.n_chunks() {
                assert!(
                    layer.section(chunk_idx, 0).iter().all(|byte| *byte == fill),
                    "another sequence's KV"
                );
            }
        }
        reader.n_chunks()
    }
}

#[test]
fn a_collision_in_memory_is_a_miss_and_the_second_writer_is_refused() {
    let pair = Pair::new(None, None);
    assert_eq!(pair.write(&pair.mine, 1), 2);
    assert!(matches!(pair.store.begin_write(&pair.theirs, 0, 0), Write::Collision));
    assert_eq!((pair.read(&pair.theirs, 2), pair.read_layers(&pair.theirs, 2)), (0, 0));
    assert_eq!((pair.read(&pair.mine, 1), pair.read_layers(&pair.mine, 1)), (2, 2));
    assert_eq!(pair.store.pin(&pair.theirs), 0);
    assert!(pair.n_mismatches(TierKind::Ram) >= 2);
}

#[test]
fn of_two_writers_at_a_time_the_second_commit_is_dropped() {
    let pair = Pair::new(None, None);
    let Write::Slot(mut first) = pair.store.begin_write(&pair.mine, 0, 0) else { panic!() };
    let Write::Slot(mut second) = pair.store.begin_write(&pair.theirs, 0, 0) else { panic!() };
    first.payload_mut().fill(1);
    second.payload_mut().fill(2);
    assert_eq!(second.commit(), Commit::Stored);
    assert_eq!(first.commit(), Commit::Collision);
    assert_eq!((pair.read(&pair.mine, 1), pair.read(&pair.theirs, 2)), (0, 1));
}

/// Writes one sequence to a tier and reads the other one, whole and by layers.
fn a_lower_tier_misses(pair: &Pair, tier: TierKind) {
    assert_eq!(pair.write(&pair.mine, 1), 2);
    pair.flush();
    pair.forget_memory();
    assert_eq!(pair.read_layers(&pair.theirs, 2), 0);
    assert!(pair.n_mismatches(tier) > 0);
    assert_eq!(pair.read(&pair.theirs, 2), 0);
    // What did not match was deleted, so the name is free. A chunk behind it may not have been read.
    assert_eq!(pair.write(&pair.theirs, 2), 2);
    pair.flush();
    pair.forget_memory();
    assert!(pair.read(&pair.theirs, 2) > 0);
    pair.forget_memory();
    assert_eq!(pair.read(&pair.mine, 1), 0);
}

#[test]
fn a_collision_on_disk_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let nvme = NvmeTier::open(&NvmeOptions::new(dir.path(), 64 << 20)).unwrap();
    a_lower_tier_misses(&Pair::new(Some(Arc::new(Checksummed::new(nvme))), None), TierKind::Nvme);
}

#[test]
fn a_collision_in_an_object_store_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}", dir.path().display()).parse().unwrap();
    let options = RemoteOptions::default();
    let tier = open_remote(&url, &options).unwrap();
    a_lower_tier_misses(&Pair::new(None, Some(Arc::new(Checksummed::new(tier)))), TierKind::Object);
}

#[test]
fn a_collision_in_a_tier_that_is_called_redis_is_a_miss() {
    let tier = Checksummed::new(Kind(TierKind::Redis, kvik_tier::conformance::MapTier::new()));
    a_lower_tier_misses(&Pair::new(None, Some(Arc::new(tier))), TierKind::Redis);
}

#[test]
fn a_read_for_one_sequence_is_not_joined_by_the_other() {
    let tier = TestTier::new(TierKind::Redis);
    let proven = Checksummed::new(Arc::clone(&tier));
    let pair = Pair::new(None, Some(Arc::new(proven)));
    assert_eq!(pair.write(&pair.mine, 1), 2);
    pair.flush();
    pair.forget_memory();
    assert_eq!(pair.store.lookup(&pair.mine).n_chunks, 2);
    tier.after_gets.close();
    let first = pair.store.prefetch(&pair.mine, 0);
    until("the first read has its bytes", || tier.after_gets.n_waiting() > 0);
    let second = pair.store.prefetch(&pair.theirs, 0);
    tier.after_gets.open();
    let timeout = std::time::Duration::from_secs(30);
    assert_eq!(second.wait(timeout).chunks().len(), 0);
    for chunk in first.wait(timeout).chunks() {
        assert!(chunk.payload(0).iter().all(|byte| *byte == 1));
    }
    assert_eq!(pair.store.stats().n_joined_flights, 0);
}

#[test]
fn stores_with_different_keys_share_a_disk_and_neither_finds_nor_deletes_each_others_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let secrets: [Option<&[u8]>; 3] = [None, Some(b"a secret"), Some(b"another secret")];
    let open = |secret: Option<&[u8]>| {
        let nvme = NvmeTier::open(&NvmeOptions::new(dir.path(), 64 << 20)).unwrap();
        let key = secret.map(DigestKey::from_secret);
        Pair::with_key(Some(Arc::new(Checksummed::new(nvme))), None, key)
    };
    for (secret, fill) in secrets.into_iter().zip(1..) {
        let pair = open(secret);
        assert_eq!(pair.read(&pair.mine, fill), 0, "{secret:?}");
        assert_eq!(pair.write(&pair.mine, fill), 2);
        pair.flush();
        assert_eq!(pair.n_mismatches(TierKind::Nvme), 0);
    }
    for (secret, fill) in secrets.into_iter().zip(1..) {
        let pair = open(secret);
        assert!(pair.read(&pair.mine, fill) > 0, "{secret:?}");
    }
}
