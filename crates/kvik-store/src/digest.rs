//! Proof of the tokens that a chunk is of.
//!
//! The name of a chunk is a fast hash that can be made to collide. Its digest is BLAKE3 over the digest before
//! it and its own tokens, and the first one is over the namespace with the format of the chunks. With a key it
//! is BLAKE3 in its keyed mode, so that only a holder of the key can make a chunk that is accepted.

use std::fmt;

use kvik_tier::TokenDigest;
use kvik_types::{BlockHash, CacheSalt, Namespace, TokenId};

/// What is hashed before a namespace. Another way to compute digests gets another one.
const NAMESPACE_TAG: &[u8] = b"kvik-token-digest-2";

/// What is hashed before a salt.
const SALT_TAG: &[u8] = b"kvik-token-digest-salt-1";

/// What is hashed before a key that an engine gives a chunk.
const ENGINE_KEY_TAG: &[u8] = b"kvik-token-digest-engine-key-1";

/// What a secret becomes a key for, as BLAKE3 asks for it: unique and constant.
const KEY_CONTEXT: &str = "kvik 2026-11-16 token digests of the store";

/// Bytes of a token in a chunk all of whose tokens fit into them. No known vocabulary needs more, and a chunk of 256
/// such tokens takes 13 steps of BLAKE3 where four bytes a token take 18.
const NARROW_TOKEN_BYTES: usize = 3;

/// Bytes of a token in every other chunk.
const WIDE_TOKEN_BYTES: usize = 4;

/// The key of a deployment's digests. Its bytes are never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct DigestKey([u8; blake3::KEY_LEN]);

/// Computes the digests of one sequence, chunk by chunk.
#[derive(Debug)]
pub(crate) struct DigestChain<'a> {
    key: Option<&'a DigestKey>,
    last: TokenDigest,
    /// The tokens of a chunk as they are hashed, kept for the next one.
    buffer: Vec<u8>,
}

impl DigestKey {
    /// The key that follows from a secret of any length.
    pub fn from_secret(secret: &[u8]) -> Self {
        Self(blake3::derive_key(KEY_CONTEXT, secret))
    }

    /// Its bytes, for a client that computes digests itself. They are a secret.
    pub fn expose(&self) -> &[u8; blake3::KEY_LEN] {
        &self.0
    }

    /// The key that [`Self::expose`] gave.
    pub fn from_exposed(bytes: [u8; blake3::KEY_LEN]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for DigestKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("DigestKey")
    }
}

/// The digest before the first chunk of every sequence in a namespace, which names the format too.
pub(crate) fn root_digest(key: Option<&DigestKey>, namespace: &Namespace) -> TokenDigest {
    let mut hasher = hasher(key);
    hasher.update(NAMESPACE_TAG);
    hasher.update(&namespace.encode());
    TokenDigest(*hasher.finalize().as_bytes())
}

/// The parent of the first chunk of every sequence in a namespace, where digests are keyed.
pub(crate) fn keyed_seed(root: TokenDigest) -> BlockHash {
    let mut seed = [0; 16];
    seed.copy_from_slice(&root.0[..16]);
    BlockHash(seed)
}

/// The digest before the first chunk of a sequence with a salt: `root` itself without one.
pub(crate) fn salted_digest(
    key: Option<&DigestKey>,
    root: TokenDigest,
    salt: Option<&CacheSalt>,
) -> TokenDigest {
    let Some(salt) = salt else { return root };
    let mut hasher = hasher(key);
    hasher.update(SALT_TAG);
    hasher.update(&root.0);
    hasher.update(salt.as_str().as_bytes());
    TokenDigest(*hasher.finalize().as_bytes())
}

/// The name and the digest of a chunk that an engine has a key for, whatever comes before it. Neither says anything about
/// the other.
pub(crate) fn name_of_engine_key(
    key: Option<&DigestKey>,
    root: TokenDigest,
    engine_key: &[u8],
) -> (BlockHash, TokenDigest) {
    let mut hasher = hasher(key);
    hasher.update(ENGINE_KEY_TAG);
    hasher.update(&root.0);
    hasher.update(engine_key);
    let mut output = hasher.finalize_xof();
    let (mut name, mut digest) = (BlockHash([0; 16]), TokenDigest([0; 32]));
    output.fill(&mut digest.0);
    output.fill(&mut name.0);
    (name, digest)
}

impl<'a> DigestChain<'a> {
    /// A chain that goes on after the chunk with the digest `last`.
    pub(crate) fn after(key: Option<&'a DigestKey>, last: TokenDigest) -> Self {
        Self { key, last, buffer: Vec::new() }
    }

    /// The digest of the next chunk.
    pub(crate) fn push_chunk(&mut self, tokens: &[TokenId]) -> TokenDigest {
        let bits = tokens.iter().fold(0, |bits, token| bits | token);
        let is_narrow = bits >> (8 * NARROW_TOKEN_BYTES) == 0;
        self.buffer.clear();
        self.buffer.extend_from_slice(&self.last.0);
        // The width comes before the tokens: two chunks of different widths never have the same bytes.
        if is_narrow {
            self.push_tokens::<NARROW_TOKEN_BYTES>(tokens);
        } else {
            self.push_tokens::<WIDE_TOKEN_BYTES>(tokens);
        }
        let digest = match self.key {
            None => blake3::hash(&self.buffer),
            Some(key) => blake3::keyed_hash(&key.0, &self.buffer),
        };
        self.last = TokenDigest(*digest.as_bytes());
        self.last
    }

    /// Appends the width and the low `WIDTH` bytes of each token.
    fn push_tokens<const WIDTH: usize>(&mut self, tokens: &[TokenId]) {
        self.buffer.push(WIDTH as u8);
        let begin = self.buffer.len();
        self.buffer.resize(begin + WIDTH * tokens.len(), 0);
        for (bytes, token) in self.buffer[begin..].chunks_exact_mut(WIDTH).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes()[..WIDTH]);
        }
    }
}

fn hasher(key: Option<&DigestKey>) -> blake3::Hasher {
    key.map_or_else(blake3::Hasher::new, |key| blake3::Hasher::new_keyed(&key.0))
}

#[cfg(test)]
mod tests {
    use kvik_types::Dtype;

    use super::*;

    fn namespace(tenant: &str) -> Namespace {
        Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: tenant.into() }
    }

    fn digests(key: Option<&DigestKey>, tenant: &str, chunks: &[&[TokenId]]) -> Vec<TokenDigest> {
        let mut chain = DigestChain::after(key, root_digest(key, &namespace(tenant)));
        chunks.iter().map(|tokens| chain.push_chunk(tokens)).collect()
    }

    #[test]
    fn a_digest_covers_the_key_the_namespace_and_all_tokens_before() {
        let key = DigestKey::from_secret(b"secret");
        let all = [
            digests(None, "", &[&[1, 2], &[3, 4]]),
            digests(None, "", &[&[1, 5], &[3, 4]]),
            digests(None, "", &[&[1, 2, 3], &[4]]),
            digests(None, "t", &[&[1, 2], &[3, 4]]),
            digests(Some(&key), "", &[&[1, 2], &[3, 4]]),
            digests(Some(&DigestKey::from_secret(b"other")), "", &[&[1, 2], &[3, 4]]),
        ];
        for (idx, one) in all.iter().enumerate() {
            for other in &all[idx + 1..] {
                assert_ne!(one[1], other[1]);
            }
        }
        assert_eq!(all[0], digests(None, "", &[&[1, 2], &[3, 4]]));
    }

    #[test]
    fn tokens_that_differ_in_any_byte_have_different_digests() {
        let chunks: [&[TokenId]; 7] = [
            &[1, 2, 3, 4],
            &[1, 2, 3, 4 | 1 << 16],
            &[1, 2, 3, 4 | 1 << 23],
            &[1, 2, 3, 4 | 1 << 24],
            &[1, 2, 3, 4 | 1 << 31],
            // The same bytes as the first, where four narrow tokens are three wide ones.
            &[0x0200_0001, 0x0003_0000, 0x0000_0400],
            &[1, 2, 3, 4, 0],
        ];
        let all: Vec<_> = chunks.iter().map(|chunk| digests(None, "", &[chunk])).collect();
        for (idx, one) in all.iter().enumerate() {
            assert!(all[idx + 1..].iter().all(|other| other != one), "chunk {idx} has the digest of another");
        }
    }

    #[test]
    fn a_key_does_not_show_its_bytes() {
        assert_eq!(format!("{:?}", DigestKey::from_secret(b"secret")), "DigestKey");
    }
}
