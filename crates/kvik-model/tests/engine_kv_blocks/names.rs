//! What kept KV is called: the layout of its bytes, and the namespace that it belongs to.

use kvik_model::{BLOCK_TOKENS, EngineOptions, LayerKv, Model};
use kvik_types::Dtype;
use xxhash_rust::xxh3::xxh3_64;

use crate::support::requests::{engine, run};
use crate::support::shelf::Shelf;
use crate::support::{KV_DTYPES, TestModel, bundled_folder};
use crate::{FIXTURES, engine_of_dtype, greedy, named, shelf_of, tokens};

/// The keys and values of a token and head in the bytes of a block, by what the name of the layout says.
fn unpacked(block: &[u8], element_bytes: usize, n_heads: usize, head_dim: usize) -> LayerKv {
    let element = |idx: usize| &block[idx * element_bytes..][..element_bytes];
    let mut kv = LayerKv { n_tokens: BLOCK_TOKENS, ..LayerKv::default() };
    for token in 0..BLOCK_TOKENS {
        for head in 0..n_heads {
            let keys = head * 2 * head_dim * BLOCK_TOKENS;
            let values = keys + head_dim * BLOCK_TOKENS;
            for dim in 0..head_dim {
                kv.keys.extend(element(keys + dim * BLOCK_TOKENS + token));
                kv.values.extend(element(values + token * head_dim + dim));
            }
        }
    }
    kv
}

#[test]
fn offered_bytes_are_the_exported_kv_in_the_order_that_the_layout_names() {
    let fixtures = FIXTURES.into_iter().map(TestModel::fixture).chain([TestModel::bundled()]);
    for (model, kv_dtype) in fixtures.zip(KV_DTYPES.into_iter().cycle()) {
        let shelf = Shelf::default();
        let mut engine = engine_of_dtype(&model, kv_dtype, 64);
        engine.set_kv_sink(shelf.sink());
        engine.submit_with(greedy(&tokens(40, 1), 3), named("a")).unwrap();
        run(&mut engine);
        let (n_heads, head_dim) = (model.config.n_kv_heads, model.config.head_dim);
        let layout = engine.kv_layout();
        let parts = [
            format!("/layers={}/heads={n_heads}/head_dim={head_dim}/block=16/", model.config.n_layers),
            format!("/{kv_dtype}_le/keys=head,dim,token/values=head,token,dim"),
        ];
        assert!(parts.iter().all(|part| layout.contains(part)), "{layout}");
        let exported = engine.export_kv("a", 0..model.config.n_layers).unwrap().unwrap();
        let [offer] = &shelf.take_offers()[..] else { panic!("not one offer") };
        assert_eq!(offer.tokens, exported.tokens[..32]);
        let element_bytes = kv_dtype.size_bytes();
        assert_eq!(engine.block_layer_bytes(), 2 * n_heads * head_dim * BLOCK_TOKENS * element_bytes);
        let part_bytes = BLOCK_TOKENS * n_heads * head_dim * element_bytes;
        for (block_idx, layers) in offer.blocks.iter().enumerate() {
            for (bytes, layer) in layers.iter().zip(&exported.layers) {
                let actual = unpacked(bytes.as_ref().unwrap(), element_bytes, n_heads, head_dim);
                let part = block_idx * part_bytes..(block_idx + 1) * part_bytes;
                assert_eq!(actual.keys, layer.keys[part.clone()], "{} {kv_dtype}", model.name);
                assert_eq!(actual.values, layer.values[part], "{} {kv_dtype}", model.name);
            }
        }
    }
}

#[test]
fn the_name_of_the_layout_stands_for_these_bytes() {
    let hashes = ["gpt2", "llama_tied_odd_sizes"].map(|name| {
        let model = TestModel::fixture(name);
        let shelf = shelf_of(&model, &tokens(40, 1));
        let offers = shelf.take_offers();
        let layers = offers[0].blocks.iter().flatten().flatten();
        xxh3_64(&layers.flatten().copied().collect::<Vec<u8>>())
    });
    let layout = engine(&TestModel::fixture("gpt2"), 1, EngineOptions::default()).kv_layout();
    let expected = "kvik_paged_1/layers=2/heads=4/head_dim=8/block=16/f32_le\
                    /keys=head,dim,token/values=head,token,dim";
    // KV that is kept somewhere outlives the program that has computed it.
    let advice = "the order or the arithmetic of KV has changed: count its version up, then change this test";
    assert_eq!(
        (layout.as_str(), hashes),
        (expected, [0xca82_fe2b_e3cf_d5f8, 0x006b_e2e8_5794_f1b8]),
        "{advice}"
    );
}

#[test]
fn a_folder_with_other_weights_or_another_configuration_is_another_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("kvik-tiny");
    std::fs::create_dir(&folder).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(bundled_folder().join(name), folder.join(name)).unwrap();
    }
    let open = || Model::open(&folder).unwrap();
    let original = open().namespace(Dtype::F32).unwrap();
    assert_eq!(original, Model::open(&bundled_folder()).unwrap().namespace(Dtype::F32).unwrap());
    assert_ne!(original, open().namespace(Dtype::F16).unwrap());
    let change = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = folder.join(name);
        let before = std::fs::read(&path).unwrap();
        let mut changed = before.clone();
        change(&mut changed);
        std::fs::write(&path, changed).unwrap();
        assert_ne!(open().namespace(Dtype::F32).unwrap(), original, "{name}");
        std::fs::write(&path, before).unwrap();
    };
    change("model.safetensors", &|bytes| *bytes.last_mut().unwrap() ^= 1);
    change("model.safetensors", &|bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x80;
    });
    change("config.json", &|bytes| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config["rms_norm_eps"] = 2e-5.into();
        *bytes = config.to_string().into_bytes();
    });
    assert_eq!(open().namespace(Dtype::F32).unwrap(), original);
}
