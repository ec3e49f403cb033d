//! Times the operations of a store in memory: `cargo run --release -p kvik-store --example store_bench`.

#![expect(clippy::print_stdout, reason = "it prints what it measured")]

use std::time::{Duration, Instant};

use anyhow::Result;
use kvik_store::{Chain, ChunkFormat, Store, StoreOptions, Write};
use kvik_tier::{Arena, ArenaOptions, RamTier};
use kvik_types::{BlockSize, Dtype, Namespace};

/// A prompt of 128k tokens.
const N_CHUNKS: usize = 512;
const N_ROUNDS: usize = 200;
const N_THREADS: usize = 4;

fn main() -> Result<()> {
    for n_ranks in [1, 8] {
        let ram = RamTier::new(Arena::new(ArenaOptions::new(256 << 20))?);
        let store = Store::builder(StoreOptions::default(), ram).open()?;
        let namespace = Namespace {
            model: "bench".into(),
            dtype: Dtype::BF16,
            layout: "bench".into(),
            tenant: String::new(),
        };
        let block_tokens = BlockSize::try_new(16)?;
        let format = ChunkFormat { n_layers: 1, token_layer_bytes: 16, n_ranks, block_tokens };
        let space = store.space(&namespace, format)?;
        let tokens: Vec<u32> = (0..(N_CHUNKS * space.chunk_tokens()) as u32).collect();
        let chain = space.chain(&tokens);
        println!("{} tokens, {N_CHUNKS} chunks, {n_ranks} ranks", tokens.len());

        let begin = Instant::now();
        store_all(&store, &chain);
        let n_payloads = N_CHUNKS as u32 * u32::from(n_ranks);
        println!("  store, a payload of 4 KiB  {:>10.2?}", begin.elapsed() / n_payloads);
        println!("  hash                       {:>10.2?}", median(|| drop(space.chain(&tokens))));
        println!("  lookup                     {:>10.2?}", median(|| drop(store.lookup(&chain))));
        println!(
            "  hash and lookup            {:>10.2?}",
            median(|| drop(store.lookup(&space.chain(&tokens))))
        );
        println!("  retrieve and let go        {:>10.2?}", median(|| drop(store.retrieve(&chain, 0))));
        println!("  note a request             {:>10.2?}", median(|| store.note_request(&chain, None)));
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..N_THREADS {
                scope.spawn(|| (0..N_ROUNDS).for_each(|_| drop(store.lookup(&space.chain(&tokens)))));
            }
        });
        let per_lookup = begin.elapsed() / (N_ROUNDS * N_THREADS) as u32;
        println!("  hash and lookup, {N_THREADS} threads, one every  {per_lookup:.2?}");
        let stats = store.stats();
        println!("  directory, bytes a chunk   {:>10}", stats.directory_bytes / stats.n_entries.max(1));
    }
    Ok(())
}

fn store_all(store: &Store, chain: &Chain) {
    for chunk_idx in 0..chain.n_chunks() {
        for rank in 0..chain.space().format().n_ranks {
            if let Write::Slot(mut writer) = store.begin_write(chain, chunk_idx, rank) {
                writer.payload_mut().fill(1);
                writer.commit();
            }
        }
    }
}

fn median(mut work: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..N_ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            work();
            begin.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[N_ROUNDS / 2]
}
