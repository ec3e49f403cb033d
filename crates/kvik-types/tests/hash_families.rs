//! The hashes of kvik, `SGLang`, `LMCache` and llm-d.
//!
//! In the comments `S` is SHA-256, `C` canonical CBOR, `LE(...)` tokens as u32 little endian.

use kvik_types::hash::{
    HashChain, KvikChain, LlmdAlgorithm, LlmdChain, LlmdKey, LmcacheChain, LmcacheHash, LmcacheServerChain,
    SglangChain, VllmAlgorithm, VllmChain, VllmSeed, block_hashes,
};
use kvik_types::{BlockHash, BlockSize, Dtype, Namespace};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_128;

fn block_size(n_tokens: usize) -> BlockSize {
    BlockSize::try_new(n_tokens).expect("the tests ask for valid sizes")
}

fn namespace(tenant: &str) -> Namespace {
    Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "kv_2ltd".into(), tenant: tenant.into() }
}

#[test]
fn a_kvik_block_hashes_its_parent_and_its_tokens() {
    let namespace = namespace("t");
    let mut chain = KvikChain::new(&namespace, block_size(2));
    let first = chain.push_block(&[1, 0x0102_0304]);
    let mut bytes = namespace.seed().as_bytes().to_vec();
    bytes.extend_from_slice(&[1, 0, 0, 0, 4, 3, 2, 1]);
    assert_eq!(first, BlockHash::from_u128(xxh3_128(&bytes)));
    let second = chain.push_block(&[5, 6]);
    let bytes = [&first.as_bytes()[..], &[5, 0, 0, 0, 6, 0, 0, 0]].concat();
    assert_eq!(second, BlockHash::from_u128(xxh3_128(&bytes)));
    assert_eq!(KvikChain::after(first, block_size(2)).push_block(&[5, 6]), second);
    chain.restart();
    assert_eq!(chain.push_block(&[1, 0x0102_0304]), first);
}

/// These are names of stored data: a change of any of them orphans every cache there is.
#[test]
fn kvik_hashes_are_pinned() {
    let mut chain = KvikChain::new(&namespace("t"), block_size(4));
    let hashes: Vec<String> =
        block_hashes(&mut chain, &[1, 2, 3, 4, 5, 6, 7, 8]).map(|hash| hash.to_string()).collect();
    assert_eq!(namespace("t").seed().to_string(), "217dc5088961237aeae6f82df9f9edff");
    assert_eq!(hashes, ["f8666ee2f3158d1e6de53999227043b6", "fb2fb0f85ba31b9fffb8a0616ca8bc2f"]);
}

/// `S(LE(1, 2, 3, 4))`, then `S(that || LE(5, 6, 7, 8))`.
#[test]
fn sglang_pages_match_python() {
    let mut chain = SglangChain::new(block_size(4));
    let hashes: Vec<_> = block_hashes(&mut chain, &[1, 2, 3, 4, 5, 6, 7, 8, 9]).collect();
    assert_eq!(hashes.len(), 2);
    assert_eq!(hashes[0].to_string(), "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72");
    assert_eq!(hashes[0].event_id(), -3_488_128_144_981_237_669);
    assert_eq!(hashes[1].to_string(), "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6");
}

/// `S(S(b"sglang-cache-salt-v1\0" + b"tenant") || LE(1, 2, 3, 4))`.
#[test]
fn a_salt_gives_the_first_sglang_page_a_parent() {
    let mut chain = SglangChain::new(block_size(4)).with_salt("tenant");
    let expected = "b9edec0625f311a98a19fae9a13d2c00d9b935bdf21e9a7e818b6c191b591e5f";
    assert_eq!(chain.push_block(&[1, 2, 3, 4]).to_string(), expected);
    chain.restart();
    assert_eq!(chain.push_block(&[1, 2, 3, 4]).to_string(), expected);
}

/// `S(LE(1, 2, 2, 3, 3, 4, 4, 5))`, then `S(that || LE(5, 6, 6, 7, 7, 8, 8, 9))`.
#[test]
fn sglang_bigrams_look_one_token_ahead() {
    let mut chain = SglangChain::new(block_size(4)).with_bigrams();
    let hashes: Vec<String> =
        block_hashes(&mut chain, &[1, 2, 3, 4, 5, 6, 7, 8, 9]).map(|hash| hash.to_string()).collect();
    assert_eq!(
        hashes,
        [
            "f721fe42aac11dcbfd1a17f24cc5765a0d5b6bc264d1c0b6581d775a7344c11f",
            "c35ad698917936a474f7e55f3a4855eaee20585cd0bf156b1ae3a62666ba7220",
        ]
    );
    let mut chain = SglangChain::new(block_size(4)).with_bigrams();
    assert_eq!(block_hashes(&mut chain, &[1, 2, 3, 4]).len(), 0);
}

/// `S(C((first 8 bytes of NONE_HASH, (1, 2, 3, 4), ())))`, first 8 bytes, then a short chunk (5, 6).
#[test]
fn lmcache_chunks_match_python() {
    let vllm = VllmChain::try_new(VllmAlgorithm::Sha256Cbor, block_size(4), VllmSeed::Default).unwrap();
    let first_parent = LmcacheHash::from_vllm(&vllm.none_hash());
    assert_eq!(first_parent, LmcacheHash(11_230_124_004_819_357_437));
    let tokens = [1, 2, 3, 4, 5, 6];
    let mut chain = LmcacheChain::new(block_size(4), first_parent);
    let full: Vec<_> = block_hashes(&mut chain, &tokens).collect();
    assert_eq!(full, [LmcacheHash(5_919_234_735_220_982_235)]);
    assert_eq!(full[0].to_string(), "522558a1570001db");
    chain.restart();
    let with_partial: Vec<_> = chain.chunk_hashes_with_partial(&tokens).collect();
    assert_eq!(with_partial, [full[0], LmcacheHash(9_258_263_270_658_102_171)]);
    // S(C((0, (1, 2, 3, 4), ())))
    let mut without_vllm = LmcacheChain::new(block_size(4), LmcacheHash(0));
    assert_eq!(without_vllm.push_block(&[1, 2, 3, 4]), LmcacheHash(9_094_632_884_477_563_438));
}

#[test]
fn the_lmcache_server_hashes_big_endian_tokens_with_blake3() {
    let mut chain = LmcacheServerChain::new(block_size(2));
    let none_hash = blake3::hash(&[0; 12]);
    assert_eq!(chain.none_hash().0, *none_hash.as_bytes());
    let bytes = [&none_hash.as_bytes()[..], &[0, 0, 0, 1, 1, 2, 3, 4]].concat();
    let first = chain.push_block(&[1, 0x0102_0304]);
    assert_eq!(first.0, *blake3::hash(&bytes).as_bytes());
    let bytes = [&first.0[..], &[0, 0, 0, 5, 0, 0, 0, 6]].concat();
    assert_eq!(chain.push_block(&[5, 6]).0, *blake3::hash(&bytes).as_bytes());
    // BLAKE3 of nothing, from its published test vectors.
    assert_eq!(
        blake3::hash(b"").to_string(),
        "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    );
}

/// FNV-1a-64 of `C([fnv(""), None, "m"])`, then of `C([key, (1, 2, 3, 4), None])` and so on.
#[test]
fn llmd_keys_over_cbor_match_python() {
    let mut chain = LlmdChain::new(LlmdAlgorithm::CborFnv, block_size(4), "", "m");
    assert_eq!(chain.root(), LlmdKey(11_374_735_546_233_341_228));
    let keys: Vec<_> = block_hashes(&mut chain, &[1, 2, 3, 4, 5, 6, 7, 8]).collect();
    assert_eq!(keys, [LlmdKey(14_686_617_092_727_577_033), LlmdKey(9_856_792_211_163_113_858)]);
    chain.restart();
    // C([root, (1, 2, 3, 4), [{"Hash": "img0"}, {"Hash": "img1"}]])
    let key = chain.push_block_with_multimodal(&[1, 2, 3, 4], &["img0", "img1"]);
    assert_eq!(key, LlmdKey(17_242_907_225_377_748_498));
    let seeded = LlmdChain::new(LlmdAlgorithm::CborFnv, block_size(4), "seed", "m");
    assert_eq!(seeded.root(), LlmdKey(7_295_406_877_500_715_137));
}

/// A plain Python XXH64 over `struct.pack("<QQ", xxh64(b""), 1) + b"m"`, then over
/// `struct.pack("<Q", root) + LE(1, 2, 3, 4)`, then with `struct.pack("<Q", 4) + b"img0"` behind it.
#[test]
fn llmd_keys_with_xxh64_match_python() {
    let mut chain = LlmdChain::new(LlmdAlgorithm::Xxh64, block_size(4), "", "m");
    assert_eq!(chain.root(), LlmdKey(14_487_164_469_406_636_363));
    assert_eq!(chain.push_block(&[1, 2, 3, 4]), LlmdKey(6_079_057_133_344_773_006));
    chain.restart();
    assert_eq!(
        chain.push_block_with_multimodal(&[1, 2, 3, 4], &["img0"]),
        LlmdKey(13_982_534_214_364_561_768)
    );
}

/// Checks on one chain what a reader of any family relies on.
fn check_chain<C: HashChain + Clone>(fresh: &C, tokens: &[u32], changed: usize) -> Result<(), TestCaseError>
where
    C::Hash: std::fmt::Debug,
{
    let n_block_tokens = fresh.block_size().get();
    let hashes: Vec<_> = block_hashes(&mut fresh.clone(), tokens).collect();
    let n_full = (tokens.len() + n_block_tokens).saturating_sub(fresh.window_tokens()) / n_block_tokens;
    prop_assert_eq!(hashes.len(), n_full);
    prop_assert_eq!(block_hashes(&mut fresh.clone(), tokens).len(), n_full);

    let mut other_tokens = tokens.to_vec();
    other_tokens[changed] ^= 1;
    let other_hashes: Vec<_> = block_hashes(&mut fresh.clone(), &other_tokens).collect();
    for (block, (hash, other_hash)) in hashes.iter().zip(&other_hashes).enumerate() {
        let n_tokens_read = block * n_block_tokens + fresh.window_tokens();
        prop_assert_eq!(hash == other_hash, changed >= n_tokens_read, "block {}", block);
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_block_hash_depends_on_every_token_up_to_its_end_and_on_no_other(
        tokens in prop::collection::vec(any::<u32>(), 1..70),
        n_block_tokens in 1usize..20,
        changed in any::<prop::sample::Index>(),
    ) {
        let size = block_size(n_block_tokens);
        let changed = changed.index(tokens.len());
        check_chain(&KvikChain::new(&namespace("t"), size), &tokens, changed)?;
        for algorithm in VllmAlgorithm::ALL {
            check_chain(&VllmChain::try_new(algorithm, size, VllmSeed::Text("0")).unwrap(), &tokens, changed)?;
        }
        check_chain(&SglangChain::new(size), &tokens, changed)?;
        check_chain(&SglangChain::new(size).with_bigrams(), &tokens, changed)?;
        check_chain(&LmcacheChain::new(size, LmcacheHash(7)), &tokens, changed)?;
        check_chain(&LmcacheServerChain::new(size), &tokens, changed)?;
        check_chain(&LlmdChain::new(LlmdAlgorithm::CborFnv, size, "", "m"), &tokens, changed)?;
        check_chain(&LlmdChain::new(LlmdAlgorithm::Xxh64, size, "", "m"), &tokens, changed)?;
    }

    #[test]
    fn chains_of_different_tenants_never_meet(tokens in prop::collection::vec(any::<u32>(), 1..40)) {
        let hashes_of = |tenant| {
            let mut chain = KvikChain::new(&namespace(tenant), block_size(4));
            block_hashes(&mut chain, &tokens).collect::<Vec<_>>()
        };
        for (left, right) in hashes_of("a").iter().zip(&hashes_of("b")) {
            prop_assert_ne!(left, right);
        }
    }
}
