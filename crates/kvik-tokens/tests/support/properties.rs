//! The properties that make a prefix store harmless, for texts that a caller makes up.

use std::path::PathBuf;

use kvik_tokens::prefix_store::{self, LruPrefixStore, PrefixStore, TriePrefixStore};
use kvik_tokens::{
    AddSpecial, Outcome, PoolConfig, PrefixStoreKind, TokenizeInput, TokenizeRequest, Tokenizer,
    TokenizersPool,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::kinds::{KINDS, any_text, bundled_model};

/// A text that begins like another one: how much of that, its own end, and whether it gets special tokens.
pub type Branch = (f64, String, bool);

/// Texts that part at random places.
pub fn any_branches() -> impl Strategy<Value = (String, Vec<Branch>)> {
    let branch = (0.0..1.0_f64, any_text(0..60), any::<bool>());
    (any_text(60..160), proptest::collection::vec(branch, 2..6))
}

/// A conversation that grows: what is added, and how often it is repeated.
pub fn any_growth() -> impl Strategy<Value = Vec<(String, usize)>> {
    proptest::collection::vec((any_text(0..80), 0..4_usize), 1..8)
}

/// Both sides of each cut join to the whole.
pub fn sides_of_cuts_join(text: &str) -> TestCaseResult {
    for kind in KINDS.iter().filter(|kind| kind.has_rule) {
        let tokens = |text: &str| kind.tokenizer.encode(text, AddSpecial::No).unwrap();
        let rule = &kind.tokenizer.incremental().unwrap().cut_rule;
        let whole = tokens(text);
        for cut in (0..text.len()).filter_map(|n_bytes| rule.at(text, n_bytes)) {
            let (left, right) = text.split_at(cut.n_bytes);
            let joined = [tokens(left), tokens(right)].concat();
            prop_assert_eq!(&joined, &whole, "{} at {} of {:?}", kind.name, cut.n_bytes, text);
        }
    }
    Ok(())
}

/// The tokens before a cut are the same for all texts that show it.
pub fn tokens_before_cuts_stay(shared: &str, ends: [&str; 2]) -> TestCaseResult {
    for kind in KINDS.iter().filter(|kind| kind.has_rule) {
        let rule = &kind.tokenizer.incremental().unwrap().cut_rule;
        let Some(cut) = (0..shared.len()).rev().find_map(|n_bytes| rule.at(shared, n_bytes)) else {
            continue;
        };
        let tokens = |text: &str| kind.tokenizer.encode(text, AddSpecial::No).unwrap();
        let expected = tokens(&shared[..cut.n_bytes]);
        for end in ends {
            let whole = tokens(&format!("{}{end}", &shared[..cut.seen_bytes]));
            prop_assert!(whole.starts_with(&expected), "{} {:?} {:?}", kind.name, shared, end);
        }
    }
    Ok(())
}

/// What a store knows begins the tokens of the text, and tokenizing with it gives exactly these; a small
/// store forgets in between.
pub fn stores_change_no_token(
    (shared, branches): &(String, Vec<Branch>),
    max_bytes: usize,
) -> TestCaseResult {
    for kind in KINDS.iter() {
        let stores: [Box<dyn PrefixStore>; 2] =
            [Box::new(LruPrefixStore::new(max_bytes)), Box::new(TriePrefixStore::new(max_bytes))];
        for store in stores {
            for (share, end, has_special) in branches {
                let n_shared_bytes = shared.floor_char_boundary((shared.len() as f64 * share) as usize);
                let text = format!("{}{end}", &shared[..n_shared_bytes]);
                let add_special = if *has_special { AddSpecial::Yes } else { AddSpecial::No };
                let known = store.find(kind.tokenizer.key(), &text);
                let plain = kind.tokenizer.encode(&text, AddSpecial::No).unwrap();
                prop_assert!(plain.starts_with(&known.tokens), "{} {:?}", kind.name, text);
                let encoded =
                    prefix_store::encode(&kind.tokenizer, store.as_ref(), &text, add_special).unwrap();
                let direct = kind.tokenizer.encode(&text, add_special).unwrap();
                prop_assert_eq!(encoded.tokens, direct, "{} {:?}", kind.name, text);
                prop_assert!(store.used_bytes() <= max_bytes);
            }
        }
    }
    Ok(())
}

/// A pool gives the tokens of the tokenizer, whichever store it has.
pub fn pools_change_no_token(growth: &[(String, usize)]) -> TestCaseResult {
    let tokenizer = Tokenizer::open(&bundled_model()).unwrap();
    let root: Option<PathBuf> = bundled_model().parent().map(Into::into);
    for prefix_store in [PrefixStoreKind::None, PrefixStoreKind::Lru, PrefixStoreKind::Trie] {
        let config = PoolConfig { prefix_store, root: root.clone(), ..PoolConfig::default() };
        let pool = TokenizersPool::try_new(config).unwrap();
        let mut text = String::new();
        for (part, n_repeats) in growth {
            text.push_str(&part.repeat(*n_repeats));
            let input = TokenizeInput::Text { text: text.clone(), add_special: AddSpecial::Yes };
            let request = TokenizeRequest { model: "kvik-tiny".to_owned(), input };
            let Outcome::Tokenized(tokenized) = pool.tokenize_blocking(request).unwrap() else {
                return Err(TestCaseError::fail("an idle pool is busy"));
            };
            prop_assert_eq!(tokenized.tokens, tokenizer.encode(&text, AddSpecial::Yes).unwrap());
            prop_assert_eq!(tokenized.n_text_bytes, text.len());
            prop_assert!(tokenized.n_known_bytes <= text.len());
        }
    }
    Ok(())
}
