//! Names and digests of chains, by whatever way they are made.

use kvik_tier::NamespaceId;
use kvik_types::{BlockSize, Dtype, Namespace};

use super::*;
use crate::format::ChunkFormat;
use crate::options::StoreOptions;

fn space(stores_tails: bool) -> Space {
    let namespace =
        Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: String::new() };
    let size = |n| BlockSize::try_new(n).unwrap();
    let format = ChunkFormat { n_layers: 1, token_layer_bytes: 1, n_ranks: 1, block_tokens: size(2) };
    let state = Arc::new(NamespaceState::new(NamespaceId::from(&namespace), 0));
    let options = StoreOptions { chunk_tokens: size(4), stores_tails, ..StoreOptions::default() };
    Space::new(state, format, &options, &namespace)
}

fn names(chain: &Chain) -> Vec<(Option<ChunkKey>, Option<TokenDigest>, usize, u64)> {
    let name =
        |idx| (chain.key(idx, 0), chain.digest(idx), chain.tokens_of(idx).len(), chain.blocks()[idx].id.0);
    (0..chain.n_chunks()).map(name).collect()
}

#[test]
fn a_chain_of_names_is_the_chain_of_the_tokens_without_them() {
    let tokens: Vec<u32> = (0..23).collect();
    for stores_tails in [false, true] {
        let space = space(stores_tails);
        for n_tokens in 0..tokens.len() {
            let chain = space.chain(&tokens[..n_tokens]);
            let sent = chain.names().to_vec();
            let named = space.named_chain(sent.clone(), chain.n_tokens()).unwrap();
            for n_chunks in 0..=chain.n_chunks() {
                let received = named.proven(chain.digests(n_chunks)).unwrap();
                assert_eq!(names(&received), names(&chain)[..n_chunks], "{n_tokens} {n_chunks}");
                assert_eq!(received.n_tokens(), chain.tokens_of(n_chunks).start);
                assert_eq!(names(&received.extended(&tokens)), names(&space.chain(&tokens)));
            }
            assert!(named.proven(vec![TokenDigest([0; 32]); chain.n_chunks() + 1]).is_none());
            assert!(space.named_chain(sent.clone(), chain.n_tokens() + 4).is_none());
            assert!(space.named_chain(sent, chain.n_tokens() + 1).is_none());
        }
    }
}

#[test]
fn digests_are_the_same_in_whatever_order_they_are_asked_for() {
    let tokens: Vec<u32> = (0..40).collect();
    let space = space(false);
    let all = space.chain(&tokens).digests(usize::MAX);
    assert_eq!(all.len(), 10);
    for first in 0..all.len() {
        let chain = space.chain(&tokens);
        assert_eq!(chain.digest(first), Some(all[first]));
        // What one has computed, the other one goes on from.
        assert_eq!(chain.extended(&tokens[..20]).digests(5), all[..5]);
        assert_eq!(chain.digest_up_to(99), all[9]);
        assert_eq!(chain.digests(usize::MAX), all);
    }
}

#[test]
fn an_extended_chain_is_the_chain_of_the_longer_sequence() {
    let tokens: Vec<u32> = (0..23).collect();
    let mut other = tokens.clone();
    other[5] = 99;
    for stores_tails in [false, true] {
        let space = space(stores_tails);
        for n_known in 0..tokens.len() {
            let known = space.chain(&tokens[..n_known]);
            for longer in [&tokens[..], &tokens[..9], &tokens[..0], &other] {
                assert_eq!(names(&known.extended(longer)), names(&space.chain(longer)), "{n_known}");
            }
        }
    }
}

#[test]
fn extra_keys_change_the_chunk_that_they_begin_in_and_all_behind_it() {
    let space = space(true);
    let tokens: Vec<u32> = (0..12).collect();
    let extra = |first_token, key: &[u8]| ExtraKey { first_token, key: key.to_vec() };
    let plain = names(&space.chain(&tokens));
    let image = space.chain_with_extras(&tokens, None, vec![extra(5, b"image")]);
    let other = space.chain_with_extras(&tokens, None, vec![extra(5, b"other")]);
    let (image_names, other_names) = (names(&image), names(&other));
    assert_eq!((image_names[0], other_names[0]), (plain[0], plain[0]));
    for idx in [1, 2] {
        let (key, digest, ..) = image_names[idx];
        for (other_key, other_digest, ..) in [plain[idx], other_names[idx]] {
            assert!(key != other_key && digest != other_digest, "{idx}");
        }
    }
    let longer: Vec<u32> = (0..16).collect();
    let whole = space.chain_with_extras(&longer, None, vec![extra(5, b"image")]);
    assert_eq!(names(&image.extended(&longer)), names(&whole));
}
