//! Whole chains against values computed by other implementations of the hash functions: the Python
//! packages `xxhash` and `blake3`, and `pickle` of CPython.
//!
//! With `t` the tokens below, `H = xxhash.xxh3_128_digest` and `P = lambda x: pickle.dumps(x, 5)`:
//! `none = H(P("0"))`, `first = H(P((none, t, None)))`, `second = H(P((first, t, None)))`; CBOR likewise.

use kvik_types::hash::{
    HashChain, KvikChain, LlmdAlgorithm, LlmdChain, LmcacheServerChain, VllmAlgorithm, VllmChain, VllmSeed,
};
use kvik_types::{BlockSize, Dtype, Namespace};

const TOKENS: [u32; 8] = [1, 255, 256, 65535, 65536, 151_644, 0, 2_147_483_647];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

#[test]
fn vllm_xxhash_blocks_match_python() {
    let block_size = BlockSize::try_new(8).unwrap();
    let mut chain = VllmChain::try_new(VllmAlgorithm::Xxhash, block_size, VllmSeed::Text("0")).unwrap();
    assert_eq!(hex(chain.none_hash().as_bytes()), "6fb31cc38bba6066183f7f2104b9c051");
    assert_eq!(hex(chain.push_block(&TOKENS).as_bytes()), "0f9d4110cda0c62006f2c230956d4894");
    assert_eq!(hex(chain.push_block(&TOKENS).as_bytes()), "b61de6e83cb226d75d99c5d74f098e9b");
    let mut chain = VllmChain::try_new(VllmAlgorithm::XxhashCbor, block_size, VllmSeed::Text("0")).unwrap();
    assert_eq!(hex(chain.none_hash().as_bytes()), "1ebe36576dcb573f26b99533a20aaeca");
    assert_eq!(hex(chain.push_block(&TOKENS).as_bytes()), "730cea1712166e02d4306f2321b2a8eb");
}

#[test]
fn lmcache_server_chunks_match_python() {
    let mut chain = LmcacheServerChain::new(BlockSize::try_new(4).unwrap());
    let expected = [
        "7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b",
        "6309ed506b8721905753f5c73c070bb21c3aafbd9b474b1e231f41368b71123c",
        "98efc76eafb06cfe774c31ff151f300b61a614c27982a211bb8cdbd83a8c0e19",
    ];
    assert_eq!(hex(&chain.none_hash().0), expected[0]);
    assert_eq!(hex(&chain.push_block(&[1, 2, 3, 4]).0), expected[1]);
    assert_eq!(hex(&chain.push_block(&[5, 6, 7, 8]).0), expected[2]);
}

#[test]
fn kvik_blocks_match_python() {
    let namespace =
        Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: String::new() };
    assert_eq!(namespace.seed().to_string(), "a0663fccc887513052ced16592aa1f72");
    let mut chain = KvikChain::new(&namespace, BlockSize::try_new(4).unwrap());
    assert_eq!(chain.push_block(&[1, 2, 3, 4]).to_string(), "ee5ecd14e4d5ce7de801eb42fd78729b");
    assert_eq!(chain.push_block(&[5, 6, 7, 8]).to_string(), "3eb6a9d1e2801c9e0199525b549b1e27");
}

#[test]
fn llmd_xxh64_keys_match_python() {
    let mut chain = LlmdChain::new(LlmdAlgorithm::Xxh64, BlockSize::try_new(4).unwrap(), "", "m");
    assert_eq!(chain.root().0, 14_487_164_469_406_636_363);
    assert_eq!(chain.push_block(&[1, 2, 3, 4]).0, 6_079_057_133_344_773_006);
}
