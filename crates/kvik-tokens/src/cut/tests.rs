use serde_json::{Value, json};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

use super::*;
use crate::testing::{
    KINDS, added, assembled, bundled_with, metaspace, open, sentence_piece_model, split_byte_level,
};
use crate::tokenizer::AddSpecial;

fn pairs_of(tokenizer: &Value) -> Vec<Pair> {
    open(tokenizer).incremental().map(|found| found.cut_rule.pairs.clone()).unwrap_or_default()
}

fn has_rule(tokenizer: &Value) -> bool {
    pairs_of(tokenizer).contains(&Pair::Space)
}

#[test]
fn kinds_with_a_proof_have_a_rule_and_others_none() {
    for kind in KINDS.iter() {
        assert_eq!(kind.tokenizer.incremental().is_some(), kind.has_rule, "{}", kind.name);
    }
}

#[test]
fn without_a_cut_the_tokens_of_a_prefix_need_not_begin_the_tokens() {
    let tokenizer = &KINDS[0].tokenizer;
    let tokens = |text: &str| tokenizer.encode(text, AddSpecial::No).unwrap();
    assert!(!tokens("the little").starts_with(&tokens("the lit")));
    assert!(tokens("the little").starts_with(&tokens("the")));
    let rule = &tokenizer.incremental().unwrap().cut_rule;
    assert_eq!(rule.at("the little", 3), Some(Cut { n_bytes: 3, seen_bytes: 4 }));
    for n_bytes in [0, 4, 7, 10, 11] {
        assert_eq!(rule.at("the little", n_bytes), None);
    }
}

#[test]
fn texts_without_spaces_are_cut_at_their_punctuation() {
    let text = "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002}\u{4f60}";
    let rule_of = |name: &str| {
        let kind = KINDS.iter().find(|kind| kind.name == name).unwrap();
        kind.tokenizer.incremental().unwrap().cut_rule.clone()
    };
    for name in ["bundled", "llama-3", "qwen-2", "gpt-4o", "deepseek-3"] {
        let cuts: Vec<usize> = (0..text.len()).filter(|at| rule_of(name).at(text, *at).is_some()).collect();
        assert_eq!(cuts, [6, 15], "{name}");
    }
    assert!(!(0..text.len()).any(|at| rule_of("compatibility composed").at(text, at).is_some()));
}

#[test]
fn cuts_are_the_last_of_their_stretches() {
    let rule = &KINDS[0].tokenizer.incremental().unwrap().cut_rule;
    //          0         1         2         3
    let text = "a bc d efghijklmnopqrstuvw x y zzz";
    let at = |start, distance| -> Vec<usize> {
        rule.cuts(text, start, distance).unwrap().iter().map(|cut| cut.n_bytes).collect()
    };
    assert_eq!(at(0, 8), [6, 30]);
    assert_eq!(at(6, 8), [30]);
    assert_eq!(at(0, 34), [30]);
    assert_eq!(at(0, 35), Vec::<usize>::new());
    // The space that shows the cut must lie in the stretch.
    assert_eq!(at(0, 6)[0], 4);
    assert_eq!(at(0, 7)[0], 6);
}

#[test]
fn a_text_with_a_long_part_without_cuts_is_not_cut() {
    let rule = &KINDS[0].tokenizer.incremental().unwrap().cut_rule;
    let text = format!("a b {} c d e f g h", "x".repeat(MAX_UNCUT_BYTES + 10));
    assert_eq!(rule.cuts(&text, 0, 4), None);
    let text = format!("a b {} c d e f g h", "x".repeat(MAX_UNCUT_BYTES - 10));
    assert!(rule.cuts(&text, 0, 4).is_some());
}

#[test]
fn added_tokens_across_a_cut_take_the_rule_away() {
    let with = |token: Value| bundled_with(json!({"added_tokens": [token]}));
    assert!(has_rule(&bundled_with(json!({"pre_tokenizer": split_byte_level(r"\s+")}))));
    assert!(has_rule(&with(added(4100, "one", &[]))));
    assert!(has_rule(&with(added(4100, " one", &[]))));
    assert!(!has_rule(&with(added(4100, " one", &["single_word"]))));
    // What goes across the one kind of cut does not go across the other.
    assert_eq!(pairs_of(&with(added(4100, "one two", &[]))), [Pair::Ideograph]);
    assert_eq!(pairs_of(&with(added(4100, "\u{4f60}\u{3002}", &[]))), [Pair::Space]);
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let mut tokenizer = assembled(&sentence_piece_model(), &replace, &Value::Null);
    assert!(has_rule(&tokenizer));
    tokenizer["added_tokens"] = json!([added(5000, "one two", &["normalized"])]);
    assert!(!has_rule(&tokenizer));
    tokenizer["added_tokens"] = json!([added(5000, "one", &["normalized", "rstrip"])]);
    assert!(!has_rule(&tokenizer));
}

#[test]
fn models_that_look_across_spaces_have_no_rule() {
    let text_of = |model: Value| assembled(&model, &Value::Null, &metaspace("first", false));
    assert!(has_rule(&text_of(sentence_piece_model())));
    let mut model = sentence_piece_model();
    model["vocab"]["e\u{2581}"] = json!(4900);
    model["merges"].as_array_mut().unwrap().insert(0, json!(["e", "\u{2581}"]));
    assert!(!has_rule(&text_of(model)));
    let mut model = sentence_piece_model();
    model["ignore_merges"] = json!(true);
    assert!(!has_rule(&text_of(model)));
    let mut model = sentence_piece_model();
    model["dropout"] = json!(0.1);
    assert!(!has_rule(&text_of(model)));
    assert!(!has_rule(&bundled_with(json!({"model": {"dropout": 0.5}}))));
}

#[test]
fn steps_without_a_reason_have_no_rule() {
    for normalizer in [
        json!({"type": "Prepend", "prepend": "\u{2581}"}),
        json!({"type": "Lowercase"}),
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "Replace", "pattern": {"String": "a"}, "content": "b"}),
        json!({"type": "Replace", "pattern": {"Regex": " "}, "content": "\u{2581}"}),
    ] {
        assert!(!has_rule(&bundled_with(json!({"normalizer": normalizer}))), "{normalizer}");
    }
    for pre_tokenizer in [
        Value::Null,
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
        json!({"type": "FixedLength", "length": 5}),
        json!({"type": "UnicodeScripts"}),
        json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
        split_byte_level(r"\S+|\s\S"),
        split_byte_level(r"\w+ ?|\s+|\W"),
        split_byte_level(r"(?<= )\w+|\s+|\S"),
        split_byte_level(r"\b\w+|\s+|\S"),
        split_byte_level(r"\w+(?= \w)|\s+|\S"),
        split_byte_level(r"(?:a|\s+(?!\S))b|\s+|\S"),
        split_byte_level(r"[^\n]+|\s+"),
        split_byte_level(r"\S*|\s+"),
    ] {
        assert!(!has_rule(&bundled_with(json!({"pre_tokenizer": pre_tokenizer}))), "{pre_tokenizer}");
    }
}

#[test]
fn the_space_pair_is_everything_but_white_space_and_a_space() {
    for character in '\0'..=char::MAX {
        assert_eq!(Pair::Space.is(character, ' '), !character.is_whitespace(), "{character:?}");
        assert!(!Pair::Space.is('a', character) || character == ' ');
    }
    assert!(Pair::Ideograph.after().iter().all(|after| !after.is_alphanumeric() && !after.is_whitespace()));
}

// What `stages` says of normalizers, for blocks with every kind of decomposition.
#[test]
fn normalizers_leave_a_pair_a_pair() {
    let blocks =
        ['\0'..='\u{33ff}', '\u{abf0}'..='\u{ac20}', '\u{f8f0}'..='\u{ffff}', '\u{1d400}'..='\u{1d800}'];
    for name in ["NFC", "NFD", "NFKC", "NFKD"] {
        let normalizer: NormalizerWrapper = serde_json::from_value(json!({"type": name})).unwrap();
        let normalized = |text: String| {
            let mut text = NormalizedString::from(text);
            normalizer.normalize(&mut text).unwrap();
            text.get().to_owned()
        };
        for character in blocks.iter().cloned().flatten().filter(|character| !character.is_whitespace()) {
            let alone = normalized(character.to_string());
            let last = alone.chars().next_back().unwrap();
            assert!(
                !last.is_whitespace() && (last != '\u{2581}' || character == last),
                "{name} {character:?}"
            );
            assert_eq!(normalized(format!("{character} a")), format!("{alone} a"), "{name} {character:?}");
            let is_ideograph = Pair::Ideograph.is(character, '\u{3002}') && name == "NFC";
            assert!(!is_ideograph || alone == character.to_string(), "{character:?}");
        }
    }
}
