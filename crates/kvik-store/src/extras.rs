//! What distinguishes sequences of the same tokens: adapters, images, and whatever else a model reads beside tokens.

use kvik_types::TokenId;

/// The first word of what is hashed behind the tokens of a chunk. No vocabulary has such a token, so no chunk of tokens
/// is hashed as this is.
const MARK: TokenId = TokenId::MAX;

/// Something beside the tokens that the KV from a token on depends on, such as the hash of an image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExtraKey {
    /// The first token whose KV depends on it.
    pub first_token: usize,
    /// What it is, such as a kind and a hash.
    pub key: Vec<u8>,
}

/// The extra keys of a sequence, in one order whatever the order in which they were given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ExtraKeys(Vec<ExtraKey>);

impl ExtraKeys {
    pub(crate) fn new(mut keys: Vec<ExtraKey>) -> Self {
        keys.sort_unstable();
        keys.dedup();
        Self(keys)
    }

    /// What is hashed behind the tokens of a chunk; `None` where it has no key of its own. Chunks behind it go on from
    /// its hash, and with that from its keys.
    ///
    /// Every key is preceded by its place and its length, so no two lists of keys give the same words.
    pub(crate) fn words_of(&self, first_token: usize, n_tokens: usize) -> Option<Vec<TokenId>> {
        let begin = self.0.partition_point(|extra| extra.first_token < first_token);
        let end = self.0.partition_point(|extra| extra.first_token < first_token + n_tokens);
        let keys = &self.0[begin..end];
        if keys.is_empty() {
            return None;
        }
        let mut words = vec![MARK, keys.len() as TokenId];
        for ExtraKey { first_token: place, key } in keys {
            words.extend([(place - first_token) as TokenId, key.len() as TokenId]);
            words.extend(key.chunks(size_of::<TokenId>()).map(|bytes| {
                let mut word = [0; size_of::<TokenId>()];
                word[..bytes.len()].copy_from_slice(bytes);
                TokenId::from_le_bytes(word)
            }));
        }
        Some(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extra(first_token: usize, key: &[u8]) -> ExtraKey {
        ExtraKey { first_token, key: key.to_vec() }
    }

    #[test]
    fn keys_are_hashed_with_the_chunk_that_they_begin_in() {
        let keys = ExtraKeys::new(vec![extra(7, b"image"), extra(0, b"adapter"), extra(7, b"image")]);
        assert_eq!(keys.words_of(0, 4).unwrap()[..4], [MARK, 1, 0, 7]);
        assert_eq!(
            keys.words_of(4, 4).unwrap(),
            [MARK, 1, 3, 5, u32::from_le_bytes(*b"imag"), u32::from(b'e')]
        );
        assert_eq!(keys.words_of(8, 4), None);
        assert_eq!(ExtraKeys::default().words_of(0, 4), None);
    }

    #[test]
    fn different_keys_have_different_words_however_they_are_cut() {
        let lists = [
            vec![extra(0, b"ab")],
            vec![extra(0, b"ab\0")],
            vec![extra(1, b"ab")],
            vec![extra(0, b"a"), extra(0, b"b")],
            vec![extra(0, b"a"), extra(1, b"b")],
            vec![extra(0, b"")],
        ];
        let words: Vec<_> =
            lists.into_iter().map(|keys| ExtraKeys::new(keys).words_of(0, 4).unwrap()).collect();
        for (idx, one) in words.iter().enumerate() {
            assert!(words[..idx].iter().all(|other| other != one), "{one:?}");
        }
    }
}
