//! How long it takes to say what of a long prompt is there.

use std::time::Instant;

use anyhow::ensure;
use kvik_store::{ChunkFormat, Store, StoreOptions, Write};
use kvik_tier::{Arena, ArenaOptions, RamTier};
use kvik_types::{BlockSize, Dtype, Namespace};

use crate::report::{Baseline, Goal, Measurement};

/// 512 chunks of 256 tokens.
const PROMPT_TOKENS: u32 = 131_072;

/// What LMCache 0.5.6 takes for as much: from a published measurement of its lookups of 100 000 tokens, 11 to
/// 13 ms, not of this run.
const LMCACHE_US: f64 = 12_000.0;

/// Measures the lookup of a prompt that is wholly there, with the hashing of its tokens.
pub(super) fn measure(is_quick: bool) -> anyhow::Result<Vec<Measurement>> {
    let ram = RamTier::new(Arena::new(ArenaOptions::new(256 << 20))?);
    let store = Store::builder(StoreOptions::default(), ram).open()?;
    let namespace = Namespace {
        model: "bench".to_owned(),
        dtype: Dtype::BF16,
        layout: "bench".to_owned(),
        tenant: String::new(),
    };
    let format =
        ChunkFormat { n_layers: 2, token_layer_bytes: 64, n_ranks: 1, block_tokens: BlockSize::try_new(16)? };
    let space = store.space(&namespace, format)?;
    let prompt: Vec<u32> =
        (0..PROMPT_TOKENS).map(|place| place.wrapping_mul(2_654_435_761) % 128_000).collect();
    let chain = space.chain(&prompt);
    for chunk_idx in 0..chain.n_chunks() {
        let Write::Slot(mut writer) = store.begin_write(&chain, chunk_idx, 0) else {
            anyhow::bail!("there is no room for chunk {chunk_idx}");
        };
        writer.payload_mut().fill(chunk_idx as u8);
        writer.commit();
    }
    let n_repeats = if is_quick { 50 } else { 1000 };
    let mut times_us = Vec::new();
    for _ in 0..n_repeats {
        let begin = Instant::now();
        let found = store.lookup(&space.chain(&prompt));
        times_us.push(begin.elapsed().as_secs_f64() * 1e6);
        ensure!(found.n_tokens == prompt.len(), "only {} tokens were found", found.n_tokens);
    }
    let stats = store.stats();
    let index_bytes = stats.directory_bytes as f64 / stats.n_entries.max(1) as f64;
    let lookup = Measurement::from_repeats("lookup_131072_tokens".to_owned(), "us", times_us).map(|result| {
        let baseline = Baseline::new("lmcache_0.5.6_earlier_100k_tokens", vec![LMCACHE_US]);
        result.compared_with(baseline, Some(Goal::AtMost(1000.0)))
    });
    let memory = Measurement::from_repeats("index_bytes_a_chunk".to_owned(), "B", vec![index_bytes]);
    Ok(lookup.into_iter().chain(memory).collect())
}
