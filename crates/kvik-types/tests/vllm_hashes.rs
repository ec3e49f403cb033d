//! vLLM's hashes against values of a running engine and of Python's own pickle and hashlib.
//!
//! In the comments `P(x)` is `pickle.dumps(x, protocol=5)`, `C(x)` the canonical CBOR of `x`, `S(b)`
//! is `hashlib.sha256(b).hexdigest()`, `N` is `hashlib.sha256(P("vllm-none-hash")).digest()` and `NC`
//! the same with `C`.

use kvik_types::hash::{
    ExtraKey, ExtraKeyForm, HashChain, VllmAlgorithm, VllmChain, VllmHash, VllmSeed, block_hashes,
};
use kvik_types::{BlockSize, TypesError};

/// Covers every size of number: one byte, two bytes, four bytes, and both ends of each.
const MIXED_TOKENS: [u32; 8] = [1, 255, 256, 65_535, 65_536, 151_644, 0, 2_147_483_647];
const LORA: ExtraKey<'_> = ExtraKey::Lora { name: "ad", path: "/p/ad" };
const IMAGE: ExtraKey<'_> = ExtraKey::Multimodal { identifier: "img0", offset: -3 };

fn chain(algorithm: VllmAlgorithm, n_block_tokens: usize) -> VllmChain {
    let block_size = BlockSize::try_new(n_block_tokens).expect("the tests ask for valid sizes");
    VllmChain::try_new(algorithm, block_size, VllmSeed::Default).expect("SHA-256 has a default seed")
}

fn sha256() -> VllmChain {
    chain(VllmAlgorithm::Sha256, 4)
}

fn sha256_cbor() -> VllmChain {
    chain(VllmAlgorithm::Sha256Cbor, 4)
}

/// The first 140 tokens of the request that the engine of the captured values was sent.
fn captured_prompt() -> Vec<u32> {
    (0..140).map(|i| 14 + 37 * i).collect()
}

/// Event ids published by vLLM 0.32.0 with its default algorithm and block size 32.
#[test]
fn a_running_engine_publishes_the_same_sha256_hashes() {
    let mut chain = chain(VllmAlgorithm::Sha256, 32);
    let prompt = captured_prompt();
    let ids: Vec<u64> = block_hashes(&mut chain, &prompt).map(|hash| hash.event_id()).collect();
    assert_eq!(
        ids,
        [
            2_786_084_689_494_507_184,
            4_175_781_858_406_334_657,
            18_188_074_108_689_896_700,
            17_743_802_201_581_893_541
        ]
    );
}

/// The same prompt with `cache_salt` set to `tenantA`; only the first block carries the salt.
#[test]
fn a_running_engine_publishes_the_same_salted_hashes() {
    let mut chain = chain(VllmAlgorithm::Sha256, 32);
    let prompt = captured_prompt();
    let first = chain.push_block_with_extra_keys(&prompt[..32], &[ExtraKey::CacheSalt("tenantA")]).unwrap();
    let second = chain.push_block(&prompt[32..64]);
    assert_eq!(first.event_id(), 1_834_678_426_285_349_134);
    assert_eq!(second.event_id(), 10_103_594_691_162_126_042);
}

/// Full digests of vLLM 0.32.0 with `--prefix-caching-hash-algo sha256_cbor` and block size 32.
#[test]
fn a_running_engine_computes_the_same_sha256_cbor_hashes() {
    let mut chain = chain(VllmAlgorithm::Sha256Cbor, 32);
    let prompt = captured_prompt();
    let digests: Vec<String> = block_hashes(&mut chain, &prompt).map(|hash| hash.to_string()).collect();
    assert_eq!(
        digests,
        [
            "602402067d0bb9752b4354526bbee5a4d15e63610a06ab3c615783b8ba5e9dcc",
            "65f375a93139f8f3fabd95ae7ca476039161f7f2a81b574021098358449e5285",
            "8c05fdd48b3e3fe264048ab64186e7e6380c97691680eba0d695f2c040fbc041",
            "983a280713d7e999e2c7d985ba14a9a48a507aece22679b016a8e9d928d462fc",
        ]
    );
}

/// `S(P(seed))` and `S(C(seed))`; confirmed by vLLM's own `init_none_hash`.
#[test]
fn the_first_parent_comes_from_the_seed() {
    for (algorithm, seed, expected) in [
        (
            VllmAlgorithm::Sha256,
            VllmSeed::Default,
            "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        ),
        (
            VllmAlgorithm::Sha256Cbor,
            VllmSeed::Default,
            "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        ),
        (
            VllmAlgorithm::Sha256,
            VllmSeed::Text("0"),
            "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
        ),
        (
            VllmAlgorithm::Sha256Cbor,
            VllmSeed::Text("0"),
            "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        ),
    ] {
        let chain = VllmChain::try_new(algorithm, BlockSize::try_new(8).unwrap(), seed).unwrap();
        assert_eq!(chain.none_hash().to_string(), expected, "{algorithm} {seed:?}");
    }
}

#[test]
fn a_given_parent_continues_another_chain() {
    for algorithm in [VllmAlgorithm::Sha256, VllmAlgorithm::Sha256Cbor] {
        let mut whole = chain(algorithm, 4);
        let first = whole.push_block(&[1, 2, 3, 4]);
        let block_size = BlockSize::try_new(4).unwrap();
        let mut rest = VllmChain::try_new(algorithm, block_size, VllmSeed::Parent(first.as_bytes())).unwrap();
        assert_eq!(rest.push_block(&[5, 6, 7, 8]), whole.push_block(&[5, 6, 7, 8]));
    }
    let error =
        VllmChain::try_new(VllmAlgorithm::Sha256, BlockSize::try_new(4).unwrap(), VllmSeed::Parent(&[0; 8]));
    assert_eq!(error.unwrap_err().to_string(), "`vLLM block hash` is 8 bytes long; allowed: 16 or 32 bytes");
}

/// `S(P((N, t, None)))`, then the same with that digest as the parent; `C` alike.
#[test]
fn blocks_of_mixed_tokens_match_python() {
    let mut pickled = chain(VllmAlgorithm::Sha256, 8);
    let mut cbor = chain(VllmAlgorithm::Sha256Cbor, 8);
    for (expected_pickled, expected_cbor) in [
        (
            "bf1dd603deaecf5d4a5305c81699be30bc5f3ce7c6339b4e3e07040eca52bd46",
            "2a0cefcbc7fd0df0031b46d417b96c5842f602379004932092874b4379214600",
        ),
        (
            "f003e55bc7d4c61381ef48faf4b47ffcb32b2d8f61aaa859470d42594ed44cf7",
            "e6340c25f84c43273eb910bd6fea6810c95a12d34cbf9a12b565cf972a74e2e0",
        ),
    ] {
        assert_eq!(pickled.push_block(&MIXED_TOKENS).to_string(), expected_pickled);
        assert_eq!(cbor.push_block(&MIXED_TOKENS).to_string(), expected_cbor);
    }
    pickled.restart();
    assert_eq!(pickled.push_block(&MIXED_TOKENS).event_id(), 0x3e07_040e_ca52_bd46);
}

/// `S(P((N, t, None)))` and `S(C((NC, t, None)))` for tuples with operations of their own in pickle.
#[test]
fn short_blocks_match_python() {
    for (tokens, expected_pickled, expected_cbor) in [
        (
            &[1][..],
            "67330f0b596ddd4c6e46729007387c80fdf871ce89333aaa8f11ed7ff290cbf0",
            "810fe9c3fb811ed512a13d4fb46b9136235c661a3cab0eb47ec42673d9a479fd",
        ),
        (
            &[1, 2],
            "786f9bbddcb5139e76c24f3ad8bb4e4b20647409291b3f2c769f6f0a874bb774",
            "d448b117d4cbfc4c3f313a1e0494645014cb9c9b678618457bf09471121a0304",
        ),
        (
            &[1, 2, 3],
            "d6a0584b5995a886add7c1f59433a9171ba6fdf4b936d0b68e6df127e2244c82",
            "e1af50ac0c00965b5980f03c1ec32a46e34ef9fcb43f2ee8b75f1d0f08813da7",
        ),
        (
            &[2_147_483_648, 4_294_967_295],
            "3072b688a5ff60f29236fc33895abde6f21dcfea7677258f58256a6c1741bc41",
            "a880a526e06f133f1905abbb0a6de629f5c5a2274077e02ee932e2158d6fe15b",
        ),
    ] {
        assert_eq!(sha256().push_block(tokens).to_string(), expected_pickled, "{tokens:?}");
        assert_eq!(sha256_cbor().push_block(tokens).to_string(), expected_cbor, "{tokens:?}");
    }
    // S(P((N, (), None))) and S(P((N, (1, 2, 3, 4), None)))
    assert_eq!(
        sha256().push_block(&[]).to_string(),
        "6b385b8167a0f2e87a4d0ef604c1a1398e533330e4b2ad529494414c5810ed15"
    );
    assert_eq!(
        sha256().push_block_with_extra_keys(&[1, 2, 3, 4], &[]).unwrap().to_string(),
        "52a7f141c60918f65779927090482b5a24adbe68c8613a211a1eb4e3edd9361a"
    );
}

/// `S(P((N, tuple(range(65536, 65536 + n)), None)))`; pickle starts a second frame from 64 KiB on.
#[test]
fn blocks_around_the_frame_size_of_pickle_match_python() {
    for (n_tokens, expected) in FRAME_VECTORS {
        let tokens: Vec<u32> = (65_536..65_536 + n_tokens).collect();
        assert_eq!(sha256().push_block(&tokens).to_string(), expected, "{n_tokens}");
    }
}

/// `S(P((N, (1, 2, 3, 4), (("cache_salt", "s" * n),))))` and with `("prompt_embeds", b"s" * n)`.
#[test]
fn large_texts_and_bytes_match_python() {
    for (n_bytes, expected_text, expected_bytes) in [
        (
            65_535,
            "cdc11a37e42ee720dcb2c7aa507c33171566c510bd661b4e2c5aca04f14b723c",
            "fc90685f80252c2d7757c1a6bd460447ffa67047d64fe4e5343a6d403a3c354a",
        ),
        (
            65_536,
            "bdfc1228d05eb55fc89ca28958875bccf947d1c8dca10e01404b42150ff05cd7",
            "54ccbc807e9225668bf99c77dc6fcd417d94444a9ab58c9c02b58a59cfa69bac",
        ),
    ] {
        let text = "s".repeat(n_bytes);
        let with_text =
            sha256().push_block_with_extra_keys(&[1, 2, 3, 4], &[ExtraKey::CacheSalt(&text)]).unwrap();
        let with_bytes = sha256()
            .push_block_with_extra_keys(&[1, 2, 3, 4], &[ExtraKey::PromptEmbeds(text.as_bytes())])
            .unwrap();
        assert_eq!(with_text.to_string(), expected_text, "{n_bytes}");
        assert_eq!(with_bytes.to_string(), expected_bytes, "{n_bytes}");
    }
}

/// `S(P((N, t, extra)))` and `S(C((NC, t, extra)))` with
/// `extra = (("lora", "ad", "/p/ad"), ("mm", "img0", -3), ("cache_salt", "s"))`; confirmed by vLLM 0.32.0.
#[test]
fn tagged_extra_keys_match_the_engine_in_any_order() {
    let salt = ExtraKey::CacheSalt("s");
    for keys in [[LORA, IMAGE, salt], [salt, IMAGE, LORA]] {
        let pickled =
            chain(VllmAlgorithm::Sha256, 8).push_block_with_extra_keys(&MIXED_TOKENS, &keys).unwrap();
        let cbor =
            chain(VllmAlgorithm::Sha256Cbor, 8).push_block_with_extra_keys(&MIXED_TOKENS, &keys).unwrap();
        assert_eq!(pickled.to_string(), "720a52bab89266a093282e73baf0459a2088a4007a71c79fd9e302d382f131d6");
        assert_eq!(cbor.to_string(), "77d10b06c57bcaa2a753db3845401e4fa0aa80d006223b6d043a8446897ceb97");
    }
}

/// `S(P((N, (1, 2, 3, 4), extra)))` and `S(C((NC, (1, 2, 3, 4), extra)))`, `extra` beside each.
#[test]
fn every_form_of_extra_keys_matches_python() {
    let other_image = ExtraKey::Multimodal { identifier: "img1", offset: 0 };
    let salt = ExtraKey::CacheSalt("salt");
    let long_salt = "s".repeat(300);
    for (form, keys, expected_pickled, expected_cbor) in [
        // ("salt",)
        (
            ExtraKeyForm::Untagged,
            &[salt][..],
            "4ef7e624e6f6d0219718dcb2041fcb597198dadea4051955c491b04e246bd7bd",
            "2b995b09f33e315e10a46f05e636d48db879987da0995964bb44d039256390e7",
        ),
        // ("ad", ("img0", -3), "salt")
        (
            ExtraKeyForm::UntaggedWithOffset,
            &[LORA, IMAGE, salt],
            "4adf5421c09266bd9c3e6ba6d62cb749f0afe1d6cbcaa432dd4aaec3aa758cb3",
            "b0cd81a50f6cdadfe418cdb9e2f9f25c56d47dc59dba17d6cb1875654fefb37d",
        ),
        // ("ad", "img0", "img1", "salt")
        (
            ExtraKeyForm::Untagged,
            &[LORA, IMAGE, other_image, salt],
            "cc840ece8457a447dc77edc9f6e80100b890d875ded53045191cb0f6b3e26a56",
            "82e68377ba8615188b902fec7fa051fc1ed75c040e98dad169005e1094b54b31",
        ),
        // (("cache_salt", "s" * 300),)
        (
            ExtraKeyForm::Tagged,
            &[ExtraKey::CacheSalt(&long_salt)],
            "8a16be6c58e06e0f2be7e6a5e34bd355d358e5d67eb7697cbf3e3a563c58668a",
            "23b23c55e78af377fb6a75e83eff3b2318c636c6bd82144e40b6f1fccaf84cf3",
        ),
        // (("prompt_embeds", b"e" * 300),)
        (
            ExtraKeyForm::Tagged,
            &[ExtraKey::PromptEmbeds(&[b'e'; 300])],
            "eb89ca96d3e968ffe0c811d231e91f0505152e1fa56dc91a8e780aadc67615ba",
            "00fb358add331a03cdeb591651421a4ab72b46d17119d0ffcb379fa749ff084f",
        ),
    ] {
        let mut pickled = sha256().with_extra_key_form(form);
        let mut cbor = sha256_cbor().with_extra_key_form(form);
        let pickled_hash = pickled.push_block_with_extra_keys(&[1, 2, 3, 4], keys).unwrap();
        let cbor_hash = cbor.push_block_with_extra_keys(&[1, 2, 3, 4], keys).unwrap();
        assert_eq!(pickled_hash.to_string(), expected_pickled, "{form:?} {keys:?}");
        assert_eq!(cbor_hash.to_string(), expected_cbor, "{form:?} {keys:?}");
    }
}

#[test]
fn a_repeated_text_is_refused_by_pickle_and_leaves_the_chain_alone() {
    let image = |identifier| ExtraKey::Multimodal { identifier, offset: 0 };
    for keys in [
        &[image("a"), image("b")][..],
        &[ExtraKey::Lora { name: "x", path: "x" }],
        &[ExtraKey::Lora { name: "x", path: "y" }, ExtraKey::CacheSalt("x")],
        &[ExtraKey::CacheSalt("cache_salt")],
        &[ExtraKey::PromptEmbeds(b"d"), ExtraKey::PromptEmbeds(b"d")],
    ] {
        let mut chain = sha256();
        let error = chain.push_block_with_extra_keys(&[1, 2, 3, 4], keys).unwrap_err();
        assert!(matches!(error, TypesError::NotReproducible { .. }), "{error}");
        assert_eq!(chain.push_block(&[1, 2, 3, 4]), sha256().push_block(&[1, 2, 3, 4]));
    }
    let parent = sha256().none_hash();
    let keys = [ExtraKey::PromptEmbeds(parent.as_bytes())];
    assert!(sha256().push_block_with_extra_keys(&[1], &keys).is_err());
}

/// `S(C((NC, (1, 2, 3, 4), (("mm", "a", 0), ("mm", "a", 9)))))`.
#[test]
fn a_repeated_text_is_no_obstacle_for_cbor() {
    let keys = [0, 9].map(|offset| ExtraKey::Multimodal { identifier: "a", offset });
    let hash = sha256_cbor().push_block_with_extra_keys(&[1, 2, 3, 4], &keys).unwrap();
    assert_eq!(hash.to_string(), "a9c02d84a5b459360763e6505ff614b99807c8b81acb2de5748b294b5b93011e");
}

#[test]
fn xxhash_needs_a_seed_because_the_engine_draws_one() {
    let block_size = BlockSize::try_new(4).unwrap();
    for algorithm in [VllmAlgorithm::Xxhash, VllmAlgorithm::XxhashCbor] {
        let error = VllmChain::try_new(algorithm, block_size, VllmSeed::Default).unwrap_err();
        assert!(matches!(error, TypesError::NotReproducible { .. }), "{error}");
        let mut chain = VllmChain::try_new(algorithm, block_size, VllmSeed::Text("0")).unwrap();
        assert_eq!(chain.none_hash().as_bytes().len(), 16);
        assert_eq!(chain.push_block(&[1, 2, 3, 4]).as_bytes().len(), 16);
    }
}

/// The bytes before hashing are those of the pickle and CBOR vectors above with a 16-byte parent:
/// `P((bytes(16), (1, 2), None))` and `C((bytes(16), (1, 2), None))`.
#[test]
fn xxhash_is_the_big_endian_xxh3_of_the_same_encodings() {
    let parent = [0; 16];
    for (algorithm, encoded) in [
        (
            VllmAlgorithm::Xxhash,
            [&b"\x80\x05\x95\x1d\0\0\0\0\0\0\0C\x10"[..], &parent, b"\x94K\x01K\x02\x86\x94N\x87\x94."]
                .concat(),
        ),
        (VllmAlgorithm::XxhashCbor, [&b"\x83\x50"[..], &parent, b"\x82\x01\x02\xf6"].concat()),
    ] {
        let block_size = BlockSize::try_new(2).unwrap();
        let mut chain = VllmChain::try_new(algorithm, block_size, VllmSeed::Parent(&parent)).unwrap();
        let expected = xxhash_rust::xxh3::xxh3_128(&encoded).to_be_bytes();
        assert_eq!(chain.push_block(&[1, 2]), VllmHash::try_new(&expected).unwrap(), "{algorithm}");
    }
    // XXH3-128 of nothing in canonical order, as `xxhsum -H2` prints it.
    assert_eq!(xxhash_rust::xxh3::xxh3_128(b""), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
}

#[test]
fn algorithms_read_back_the_names_of_the_command_line() {
    for algorithm in VllmAlgorithm::ALL {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
    }
    let message = "md5".parse::<VllmAlgorithm>().unwrap_err().to_string();
    assert!(message.contains("`md5`") && message.contains("sha256_cbor"), "{message}");
}

const FRAME_VECTORS: [(u32, &str); 5] = [
    (13_098, "54b3dc0b6af3511331df0333ef9675a8ecf921adc1966e9f8ad8dd8e8651b0af"),
    (13_099, "9cdf857a2cd01df9a864734a2d8e9bf8d63a1fb6ef355ee1f6a740a50d928431"),
    (13_100, "485b897a46394a13bb660091eb1b00374cecc875baedc2b505f7f536c84b8b83"),
    (13_101, "f22d589c8cf2bccd9572e9b35f73aa1ced8eec91d2ab492810eb829992ef3ec8"),
    (30_000, "53b78c9c21d65e0f9abeac5b0f9c77329d6baa790b5e6faaeb36e5d0e41a93de"),
];
