//! Tokenizers of all kinds, and texts that are hard for them.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use kvik_tokens::Tokenizer;

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// A tokenizer and whether its texts can be cut.
#[derive(Debug)]
pub struct Kind {
    /// What a failure calls it.
    pub name: &'static str,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Whether there are cuts.
    pub has_rule: bool,
}

/// All kinds.
pub static KINDS: LazyLock<Vec<Kind>> = LazyLock::new(kinds);

/// The folder of the bundled model.
pub fn bundled_model() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/kvik-tiny"))
}

/// The bundled tokenizer with some of its parts replaced.
pub fn bundled_with(parts: Value) -> Value {
    let mut tokenizer: Value =
        serde_json::from_slice(&fs::read(bundled_model().join("tokenizer.json")).unwrap()).unwrap();
    let Value::Object(parts) = parts else { panic!("parts are an object") };
    for (name, part) in parts {
        if name == "model" {
            for (field, value) in part.as_object().unwrap() {
                tokenizer["model"][field] = value.clone();
            }
        } else {
            tokenizer[name] = part;
        }
    }
    tokenizer
}

/// Opens what the other functions put together.
pub fn open(tokenizer: &Value) -> Arc<Tokenizer> {
    let config = json!({"bos_token": "<|bos|>", "add_bos_token": true});
    let config = config.to_string();
    Arc::new(
        Tokenizer::from_parts(tokenizer.to_string().as_bytes(), Some(config.as_bytes()), None, None).unwrap(),
    )
}

/// An entry of the added tokens.
pub fn added(id: u32, content: &str, flags: &[&str]) -> Value {
    let has = |flag| flags.contains(&flag);
    json!({"id": id, "content": content, "single_word": has("single_word"), "lstrip": has("lstrip"),
        "rstrip": has("rstrip"), "normalized": has("normalized"), "special": has("special")})
}

/// Added tokens that look at what is around them.
pub fn awkward_tokens() -> Value {
    json!([
        added(1, "<|bos|>", &["special"]),
        added(2, "<|user|>", &["special", "rstrip"]),
        added(3, "<|assistant|>", &["special", "lstrip"]),
        added(4, "<|system|>", &["special", "lstrip", "rstrip"]),
        added(4100, "  ", &[]),
        added(4101, "    ", &["normalized"]),
        added(4102, "word", &["single_word"]),
        added(4103, "<x>", &["normalized", "lstrip"]),
        added(4104, "\n\n", &["normalized"]),
        added(4105, "caf\u{e9}", &["normalized"]),
        added(4106, "\u{3002}\u{3002}", &[]),
        added(4107, "sep", &["rstrip"]),
    ])
}

/// A pre-tokenizer that splits by an expression and goes on with bytes.
pub fn split_byte_level(pattern: &str) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})
}

/// The bundled vocabulary as `SentencePiece` writes one: spaces as U+2581, what is missing as bytes.
pub fn sentence_piece_model() -> Value {
    let bundled = bundled_with(json!({}));
    let plain = |token: &str| {
        let token = token.replace('\u{120}', "\u{2581}").replace('\u{10a}', "\n");
        token.chars().all(|c| c.is_ascii() || c == '\u{2581}').then_some(token)
    };
    let mut pieces: Vec<(u64, String)> = bundled["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .filter_map(|(token, id)| Some((id.as_u64().unwrap(), plain(token)?)))
        .collect();
    pieces.sort();
    let mut vocab = Map::new();
    vocab.insert("<unk>".to_owned(), json!(0));
    for piece in (0..=255_u8).map(|byte| format!("<0x{byte:02X}>")).chain(pieces.into_iter().map(|(_, p)| p))
    {
        let id = vocab.len();
        vocab.entry(piece).or_insert(json!(id));
    }
    let merges: Vec<Value> = bundled["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|merge| {
            let (left, right) = match merge {
                Value::String(text) => text.split_once(' ')?,
                _ => (merge[0].as_str()?, merge[1].as_str()?),
            };
            let (left, right) = (plain(left)?, plain(right)?);
            let known =
                [&left, &right, &format!("{left}{right}")].iter().all(|token| vocab.contains_key(*token));
            known.then(|| json!([left, right]))
        })
        .collect();
    assert!(500 < merges.len());
    json!({"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "ignore_merges": false,
        "vocab": vocab, "merges": merges})
}

/// The same vocabulary with a score for each piece.
pub fn unigram_model() -> Value {
    let model = sentence_piece_model();
    let mut pieces: Vec<(u64, &String)> =
        model["vocab"].as_object().unwrap().iter().map(|(piece, id)| (id.as_u64().unwrap(), piece)).collect();
    pieces.sort();
    let vocab: Vec<Value> =
        pieces.into_iter().map(|(id, piece)| json!([piece, -3.0 - id as f64 / 700.0])).collect();
    json!({"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": vocab})
}

/// A pre-tokenizer that makes spaces U+2581.
pub fn metaspace(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split})
}

/// A tokenizer of the given parts, with some added tokens.
pub fn assembled(model: &Value, normalizer: &Value, pre_tokenizer: &Value) -> Value {
    json!({"version": "1.0", "truncation": null, "padding": null, "decoder": null,
        "added_tokens": [
            added(5000, "<|bos|>", &["special"]), added(5001, "<|user|>", &["special", "rstrip"]),
            added(5002, "<|assistant|>", &["special", "lstrip"]), added(5003, "word", &["single_word"]),
            added(5004, "<x>", &["normalized"]), added(5005, "\u{2581}\u{2581}", &[]),
        ],
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<e>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [5000], "tokens": ["<|bos|>"]},
                "<e>": {"id": "<e>", "ids": [7, 8], "tokens": ["x", "y"]}}}})
}

fn kinds() -> Vec<Kind> {
    let kind = |name, tokenizer: &Value, has_rule| Kind { name, tokenizer: open(tokenizer), has_rule };
    let awkward = awkward_tokens();
    let (pieces, scored) = (sentence_piece_model(), unigram_model());
    let words = json!({"type": "WordLevel", "unk_token": "<unk>",
        "vocab": {"<unk>": 0, "the": 1, "hello": 2, "'": 3, "ll": 4, "word": 5, "don": 6, "\u{4f60}\u{597d}": 7}});
    let word_pieces = json!({"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"<unk>": 0, "hel": 1, "##lo": 2, "the": 3, "'": 4, "##l": 5, "1": 6, "##2": 7}});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let gemma_split = json!({"type": "Split", "pattern": {"String": " "},
        "behavior": "MergedWithPrevious", "invert": false});
    let deepseek = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": false},
        {"type": "Split", "pattern": {"Regex": "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+"},
            "behavior": "Isolated", "invert": false},
        {"type": "Split", "pattern": {"Regex": DEEPSEEK_3}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
    let digits = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true}, {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]});
    let removed = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": QWEN_2}, "behavior": "Removed", "invert": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
    let nfkc = json!({"normalizer": {"type": "NFKC"},
        "pre_tokenizer": split_byte_level(LLAMA_3), "added_tokens": awkward});
    let nfd = json!({"normalizer": {"type": "NFD"},
        "pre_tokenizer": split_byte_level(GPT_4O), "added_tokens": awkward});
    let qwen = json!({"normalizer": {"type": "NFC"},
        "pre_tokenizer": split_byte_level(QWEN_2), "added_tokens": awkward});
    let unproven = json!({"pre_tokenizer": split_byte_level(r"[^\n]+|\n+")});
    vec![
        kind("bundled", &bundled_with(json!({})), true),
        kind("gpt-2", &bundled_with(json!({"added_tokens": awkward})), true),
        kind(
            "llama-3",
            &bundled_with(json!({"pre_tokenizer": split_byte_level(LLAMA_3), "added_tokens": awkward})),
            true,
        ),
        kind(
            "llama-3, merges ignored",
            &bundled_with(
                json!({"pre_tokenizer": split_byte_level(LLAMA_3), "model": {"ignore_merges": true}}),
            ),
            true,
        ),
        kind("qwen-2", &bundled_with(qwen), true),
        kind(
            "gpt-4o",
            &bundled_with(json!({"pre_tokenizer": split_byte_level(GPT_4O), "added_tokens": awkward})),
            true,
        ),
        kind("deepseek-3", &bundled_with(json!({"pre_tokenizer": deepseek})), true),
        kind("digits", &bundled_with(json!({"pre_tokenizer": digits, "added_tokens": awkward})), true),
        kind("matches alone", &bundled_with(json!({"pre_tokenizer": removed})), true),
        kind("compatibility composed", &bundled_with(nfkc), true),
        kind("decomposed", &bundled_with(nfd), true),
        kind("metaspace words", &assembled(&pieces, &Value::Null, &metaspace("always", true)), true),
        kind("metaspace text", &assembled(&pieces, &Value::Null, &metaspace("first", false)), true),
        kind("gemma", &assembled(&pieces, &replace, &gemma_split), true),
        kind("replaced spaces", &assembled(&pieces, &replace, &Value::Null), true),
        kind("unigram words", &assembled(&scored, &Value::Null, &metaspace("first", true)), true),
        kind("unigram text", &assembled(&scored, &Value::Null, &metaspace("always", false)), false),
        kind("words", &assembled(&words, &Value::Null, &json!({"type": "Whitespace"})), true),
        kind(
            "word pieces",
            &assembled(&word_pieces, &Value::Null, &json!({"type": "BertPreTokenizer"})),
            true,
        ),
        kind(
            "white space",
            &assembled(&word_pieces, &Value::Null, &json!({"type": "WhitespaceSplit"})),
            true,
        ),
        kind("unproven", &bundled_with(unproven), false),
    ]
}

/// A text of many scripts and little mercy.
pub fn any_text(n_parts: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = String> {
    const PARTS: &[&str] = &[
        "the",
        "hello",
        "Hello",
        "hel",
        "lo",
        "don",
        "'t",
        "'ll",
        "'LL",
        "'re",
        "'",
        "I'",
        "word",
        "words",
        "sep",
        "WORD",
        " ",
        " ",
        " ",
        " ",
        "  ",
        "   ",
        "        ",
        "\n",
        "\n\n",
        " \n",
        "\r\n",
        "\t",
        "\u{a0}",
        "\u{3000}",
        "\u{2028}",
        "\u{85}",
        "\u{1680}",
        "\u{200b}",
        "\u{200d}",
        "1",
        "12",
        "123",
        "1234567",
        "\u{661}\u{662}",
        "\u{bd}",
        "3.14",
        ",",
        ".",
        "...",
        "!?",
        "/",
        "//",
        "#",
        "{",
        "}",
        "(",
        ");",
        "\"",
        "-",
        "_",
        "<",
        ">",
        "<|",
        "|>",
        "<|user|>",
        "<|bos|>",
        "<|assistant|>",
        "<|system|>",
        "<|us",
        "er|>",
        "<x>",
        "<x",
        "\u{2581}",
        "\u{2581}\u{2581}",
        "\u{120}",
        "caf\u{e9}",
        "cafe\u{301}",
        "\u{301}",
        "\u{308}",
        "\u{a8}",
        "\u{fb01}",
        "\u{fdfa}",
        "\u{1f600}",
        "\u{1f469}\u{200d}\u{1f4bb}",
        "\u{1f1e9}\u{1f1ea}",
        "\u{4f60}\u{597d}",
        "\u{4e16}\u{754c}",
        "\u{3002}",
        "\u{3002}\u{3002}",
        "\u{ff0c}",
        "\u{3001}",
        "\u{ff01}",
        "\u{300c}",
        "\u{300d}",
        "\u{304b}",
        "\u{3099}",
        "\u{304c}",
        "\u{30ab}\u{30bf}",
        "\u{d55c}\u{ad6d}",
        "\u{1100}\u{1161}",
        "\u{11a8}",
        "\u{ac00}",
        "\u{17f}",
        "\u{3a3}\u{3c2}",
        "\u{44f}",
        "\u{5d0}",
        "\u{7f}",
        "\0",
        "\u{fffd}",
        "\u{e000}",
    ];
    let part = prop_oneof![
        20 => proptest::sample::select(PARTS).prop_map(str::to_owned),
        2 => any::<char>().prop_map(String::from),
        2 => "[a-z]{1,8} ",
        1 => "[ \n]{1,12}",
    ];
    proptest::collection::vec(part, n_parts).prop_map(|parts| parts.concat())
}
