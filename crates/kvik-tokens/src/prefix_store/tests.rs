use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::testing::KINDS;

const MIB: usize = 1 << 20;

fn stores(max_bytes: usize) -> [Arc<dyn PrefixStore>; 2] {
    [Arc::new(LruPrefixStore::new(max_bytes)), Arc::new(TriePrefixStore::new(max_bytes))]
}

/// Cuts every 50 bytes with a token each, for stores that are filled by hand.
fn even_cuts(n_bytes: usize) -> (Vec<u32>, Vec<TokenCut>) {
    let cuts = (1..=n_bytes / 50).map(|n_tokens| TokenCut {
        n_bytes: n_tokens * 50 - 1,
        seen_bytes: n_tokens * 50,
        n_tokens,
    });
    ((0..=n_bytes as u32 / 50).collect(), cuts.collect())
}

fn prose(n_words: usize) -> String {
    let words: Vec<String> = (0..n_words).map(|idx| format!("word{}", idx * 7919 % 1000)).collect();
    words.join(" ")
}

#[test]
fn a_known_beginning_is_not_tokenized_again() {
    let tokenizer = &KINDS[0].tokenizer;
    for store in stores(MIB) {
        let text = prose(200);
        let first = encode(tokenizer, store.as_ref(), &text, AddSpecial::Yes).unwrap();
        assert_eq!(first.n_known_bytes, 0);
        assert_eq!(first.tokens, tokenizer.encode(&text, AddSpecial::Yes).unwrap());
        let again = encode(tokenizer, store.as_ref(), &text, AddSpecial::Yes).unwrap();
        assert_eq!(again.tokens, first.tokens);
        let n_missing = text.len() - again.n_known_bytes;
        assert!(n_missing < 2 * store.cut_distance_bytes(), "{store:?} misses {n_missing}");
        // The tail that upstream stores drop is there.
        let longer = format!("{text}and a tail");
        let longer_encoded = encode(tokenizer, store.as_ref(), &longer, AddSpecial::No).unwrap();
        assert_eq!(longer_encoded.tokens, tokenizer.encode(&longer, AddSpecial::No).unwrap());
        assert!(text.len() - 2 * store.cut_distance_bytes() < longer_encoded.n_known_bytes);
    }
}

#[test]
fn tokenizers_do_not_share_what_they_know() {
    for store in stores(MIB) {
        let text = prose(200);
        encode(&KINDS[0].tokenizer, store.as_ref(), &text, AddSpecial::No).unwrap();
        let other = encode(&KINDS[2].tokenizer, store.as_ref(), &text, AddSpecial::No).unwrap();
        assert_eq!(other.n_known_bytes, 0);
        assert_ne!(KINDS[0].tokenizer.key(), KINDS[2].tokenizer.key());
    }
}

#[test]
fn a_tokenizer_without_a_rule_leaves_the_store_alone() {
    let kind = KINDS.iter().find(|kind| !kind.has_rule).unwrap();
    for store in stores(MIB) {
        let text = prose(200);
        for _ in 0..2 {
            let encoded = encode(&kind.tokenizer, store.as_ref(), &text, AddSpecial::Yes).unwrap();
            assert_eq!(encoded.tokens, kind.tokenizer.encode(&text, AddSpecial::Yes).unwrap());
            assert_eq!((encoded.n_known_bytes, store.used_bytes()), (0, 0));
        }
    }
}

#[test]
fn a_cut_counts_only_for_texts_that_show_it() {
    for store in stores(MIB) {
        let text = "x".repeat(600);
        let (tokens, cuts) = even_cuts(text.len());
        store.add(TokenizerKey(1), &text, &tokens, &cuts);
        let known = store.find(TokenizerKey(1), &text);
        assert!(450 < known.n_bytes && known.tokens == tokens[..known.tokens.len()], "{known:?}");
        assert_eq!(known.n_bytes + 1, known.tokens.len() * 50);
        assert_eq!(store.find(TokenizerKey(2), &text), KnownPrefix::default());
        // The byte that shows the cut at 299 is another one.
        let other = format!("{}y{}", "x".repeat(299), "x".repeat(300));
        let known = store.find(TokenizerKey(1), &other);
        assert!(known.n_bytes <= 249, "{known:?}");
    }
}

#[test]
fn the_trie_knows_where_texts_part_to_the_cut() {
    let store = TriePrefixStore::new(MIB);
    let texts = ["a", "b", "c"].map(|end| format!("{}{}", "x".repeat(320), end.repeat(300)));
    for text in &texts {
        let (tokens, cuts) = even_cuts(text.len());
        store.add(TokenizerKey(1), text, &tokens, &cuts);
    }
    for text in &texts {
        assert_eq!(store.find(TokenizerKey(1), text).n_bytes, 599);
    }
    assert_eq!(store.find(TokenizerKey(1), &format!("{}d", "x".repeat(320))).n_bytes, 299);
    assert_eq!(store.find(TokenizerKey(1), &"x".repeat(120)).n_bytes, 99);
}

#[test]
fn the_least_recently_used_prefix_leaves_first() {
    for store in stores(16 << 10) {
        let text_of = |name: usize| format!("{name:04}").repeat(300);
        let add = |name: usize| {
            let (tokens, cuts) = even_cuts(1200);
            store.add(TokenizerKey(1), &text_of(name), &tokens, &cuts);
            assert!(store.used_bytes() <= 16 << 10);
        };
        let knows = |name: usize| 0 < store.find(TokenizerKey(1), &text_of(name)).n_bytes;
        add(0);
        for name in 1..100 {
            add(name);
            assert!(knows(0), "{store:?} has lost what was used just now");
        }
        assert!(knows(99));
        assert!(!knows(1));
    }
}

#[test]
fn a_prefix_that_is_too_large_leaves_a_bounded_store() {
    for store in stores(4 << 10) {
        let (tokens, cuts) = even_cuts(100_000);
        store.add(TokenizerKey(1), &"x".repeat(100_000), &tokens, &cuts);
        assert!(store.used_bytes() <= 4 << 10);
        let known = store.find(TokenizerKey(1), &"x".repeat(100_000));
        assert_eq!(known.tokens, tokens[..known.tokens.len()]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // Stores alone, over an alphabet of two so that texts share much.
    #[test]
    fn stores_return_what_was_added_for_the_same_text(
        texts in proptest::collection::vec("[ab]{1,3}(x{60,400})?[ab]{0,300}", 1..12),
        max_bytes in prop_oneof![Just(3 << 10), Just(8 << 10), Just(MIB)],
    ) {
        for store in stores(max_bytes) {
            for text in &texts {
                // A token is a hash of the text that shows its cut, so a token of another text stands out.
                let (_, cuts) = even_cuts(text.len());
                let token = |cut: &TokenCut| xxhash_rust::xxh3::xxh3_64(&text.as_bytes()[..cut.seen_bytes]) as u32;
                let tokens: Vec<u32> = cuts.iter().map(token).collect();
                let known = store.find(TokenizerKey(7), text);
                prop_assert!(tokens.starts_with(&known.tokens), "{:?}", text);
                prop_assert!(known.tokens.is_empty() || known.n_bytes == known.tokens.len() * 50 - 1);
                store.add(TokenizerKey(7), text, &tokens, &cuts);
                prop_assert!(store.used_bytes() <= max_bytes);
                let known = store.find(TokenizerKey(7), text);
                prop_assert!(tokens.starts_with(&known.tokens));
                let is_roomy = max_bytes == MIB && store.cut_distance_bytes() == 64;
                prop_assert!(!is_roomy || known.tokens.len() == tokens.len());
            }
        }
    }
}
