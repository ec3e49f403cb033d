//! What it costs to prove the tokens of a chunk.

use std::hint::black_box;
use std::time::Instant;

use anyhow::ensure;
use kvik_store::{ChunkFormat, Store, StoreOptions};
use kvik_tier::{Arena, ArenaOptions, ChunkKey, GetItem, NamespaceId, PutItem, RamTier, Tier, TokenDigest};
use kvik_types::hash::{HashChain, KvikChain};
use kvik_types::{BlockHash, BlockSize, Dtype, Namespace};

use super::MIB;
use crate::report::{Goal, Measurement};

/// 512 chunks of 256 tokens.
const PROMPT_TOKENS: u32 = 131_072;

const CHUNK_TOKENS: usize = 256;

/// Calls that are timed together, because one takes less than the clock can tell.
const N_CHECKS: usize = 10_000;

/// Chunks that are read in turn, so that the next one is not in the processor's caches: a sequence reads each of its
/// chunks once.
const N_CHUNKS: usize = 128;

/// Measures the digests of a prompt, and what they and their check are of the fastest get: one of 1 MiB from
/// memory.
pub(super) fn measure(is_quick: bool) -> anyhow::Result<Vec<Measurement>> {
    let n_repeats = if is_quick { 30 } else { 300 };
    let ram = RamTier::new(Arena::new(ArenaOptions::new(16 << 20))?);
    let store = Store::builder(StoreOptions::default(), ram).open()?;
    let namespace = Namespace {
        model: "bench".to_owned(),
        dtype: Dtype::BF16,
        layout: "bench".to_owned(),
        tenant: String::new(),
    };
    let block_tokens = BlockSize::try_new(16)?;
    let format = ChunkFormat { n_layers: 2, token_layer_bytes: 64, n_ranks: 1, block_tokens };
    let space = store.space(&namespace, format)?;
    let prompt: Vec<u32> =
        (0..PROMPT_TOKENS).map(|place| place.wrapping_mul(2_654_435_761) % 128_000).collect();
    let chunk_tokens = BlockSize::try_new(CHUNK_TOKENS)?;
    let (mut chain_ns, mut digest_ns) = (Vec::new(), Vec::new());
    for _ in 0..n_repeats {
        let both = timed(|| drop(black_box(space.chain(black_box(&prompt)).digests(usize::MAX))));
        let names = timed(|| {
            let mut names = KvikChain::after(space.root(), chunk_tokens);
            for tokens in black_box(&prompt).chunks(CHUNK_TOKENS) {
                black_box(names.push_block(tokens));
            }
        });
        chain_ns.push(both / f64::from(PROMPT_TOKENS));
        digest_ns.push((both - names).max(0.0) / f64::from(PROMPT_TOKENS));
    }
    let shares = measure_shares(&digest_ns)?;
    let rows = [
        Measurement::from_repeats("chain_names_and_digests".to_owned(), "ns/token", chain_ns),
        Measurement::from_repeats("digests".to_owned(), "ns/token", digest_ns),
        Measurement::from_repeats("digest_share_of_a_1MiB_ram_get".to_owned(), "%", shares)
            .map(|row| row.wanted(Goal::AtMost(3.0))),
    ];
    Ok(rows.into_iter().flatten().collect())
}

/// The digest of a chunk and its check, in percent of a get of the chunk.
fn measure_shares(digest_ns: &[f64]) -> anyhow::Result<Vec<f64>> {
    let ram = RamTier::new(Arena::new(ArenaOptions::new((2 * N_CHUNKS * MIB) as u64))?);
    let digest = TokenDigest([6; 32]);
    let chunk = vec![7; MIB];
    let parts = [&chunk[..]];
    let keys: Vec<ChunkKey> = (0..N_CHUNKS).map(|idx| chunk_key(idx as u8)).collect();
    for key in &keys {
        ram.put(&mut [PutItem::new(*key, &parts).for_tokens(digest)]);
    }
    let mut buffer = vec![1; MIB];
    let mut shares = Vec::with_capacity(digest_ns.len());
    for (digest_ns, key) in digest_ns.iter().zip(keys.iter().copied().cycle()) {
        let mut is_hit = false;
        let get_ns = timed(|| {
            let mut batch = [GetItem::whole(key, &mut buffer).for_tokens(digest)];
            ram.get(&mut batch);
            is_hit = batch[0].outcome.is_hit();
        });
        ensure!(is_hit, "a chunk in memory was not found");
        // With the look into the index, which a get without a digest has too.
        let checks_ns = timed(|| {
            for _ in 0..N_CHECKS {
                black_box(ram.is_for(black_box(&key), black_box(digest)));
            }
        });
        let cost_ns = digest_ns * CHUNK_TOKENS as f64 + checks_ns / N_CHECKS as f64;
        shares.push(100.0 * cost_ns / get_ns);
    }
    Ok(shares)
}

fn chunk_key(idx: u8) -> ChunkKey {
    ChunkKey { namespace: NamespaceId(BlockHash([5; 16])), chunk: BlockHash([idx; 16]), rank: 0 }
}

/// How long something takes, in nanoseconds.
fn timed(work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_secs_f64() * 1e9
}
