//! Cost of hashing a prompt, for each family.
//!
//! `cargo bench -p kvik-types --bench hash_chains`
//!
//! Each iteration hashes a prompt of 4096 tokens in 256 blocks of 16. Criterion prints the time of
//! the whole prompt and, as `thrpt`, blocks a second: divide the time by 256, or take the inverse of
//! `thrpt`, for the time of one block (1 us a prompt is 3.9 ns a block).

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvik_types::hash::{
    HashChain, KvikChain, LlmdAlgorithm, LlmdChain, LmcacheChain, LmcacheHash, LmcacheServerChain,
    SglangChain, VllmAlgorithm, VllmChain, VllmSeed, block_hashes,
};
use kvik_types::{BlockSize, Dtype, Namespace};

const N_PROMPT_TOKENS: usize = 4096;
const N_BLOCK_TOKENS: usize = 16;

fn bench_chain<C: HashChain>(criterion: &mut Criterion, family: &str, mut chain: C) {
    // Spread over a vocabulary of 151936 so that numbers of one, two and four bytes all occur.
    let tokens: Vec<u32> =
        (0..N_PROMPT_TOKENS as u32).map(|i| i.wrapping_mul(2_654_435_761) % 151_936).collect();
    let mut group = criterion.benchmark_group(format!("hash_chain/{family}"));
    group.throughput(Throughput::Elements((N_PROMPT_TOKENS / N_BLOCK_TOKENS) as u64));
    group.bench_function("prompt_4096", |bencher| {
        bencher.iter(|| {
            chain.restart();
            block_hashes(&mut chain, black_box(&tokens)).last()
        });
    });
    group.finish();
}

fn bench_families(criterion: &mut Criterion) {
    let block_size = BlockSize::try_new(N_BLOCK_TOKENS).expect("16 is a block size");
    let namespace =
        Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "kv_2ltd".into(), tenant: String::new() };
    bench_chain(criterion, "kvik", KvikChain::new(&namespace, block_size));
    for algorithm in VllmAlgorithm::ALL {
        let chain = VllmChain::try_new(algorithm, block_size, VllmSeed::Text("0"))
            .expect("a text seeds every algorithm");
        bench_chain(criterion, &format!("vllm_{algorithm}"), chain);
    }
    bench_chain(criterion, "sglang", SglangChain::new(block_size));
    bench_chain(criterion, "sglang_bigrams", SglangChain::new(block_size).with_bigrams());
    bench_chain(criterion, "lmcache_server_blake3", LmcacheServerChain::new(block_size));
    bench_chain(criterion, "lmcache_sha256_cbor", LmcacheChain::new(block_size, LmcacheHash(0)));
    bench_chain(criterion, "llmd_cbor_fnv", LlmdChain::new(LlmdAlgorithm::CborFnv, block_size, "", "m"));
    bench_chain(criterion, "llmd_xxh64", LlmdChain::new(LlmdAlgorithm::Xxh64, block_size, "", "m"));
}

criterion_group!(benches, bench_families);
criterion_main!(benches);
