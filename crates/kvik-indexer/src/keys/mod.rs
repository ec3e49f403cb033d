//! How blocks are named: from the tokens of a prompt to the keys of a book.
//!
//! An engine's own hashes are the keys where they can be computed from tokens alone. Elsewhere keys are those
//! of a chain of kvik's, and a bridge remembers which engine hash stands for which of them.

mod own;
mod recognize;

use std::str::FromStr;

use kvik_index::holders::BlockKey;
use kvik_types::hash::{
    ExtraKey, HashChain, KvikChain, SglangChain, SglangHash, VllmAlgorithm, VllmChain, VllmHash, VllmSeed,
    block_hashes,
};
use kvik_types::{BlockHash, BlockSize, CacheSalt, TokenId};

use crate::error::IndexerError;

pub use own::OwnKeys;
pub use recognize::recognize;

/// The function from tokens to block keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Keys {
    /// Which chain.
    pub kind: KeyKind,
    /// Tokens of a block.
    pub block_tokens: BlockSize,
}

/// A family of hash chains with all that decides its values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum KeyKind {
    /// vLLM's: the last eight bytes of each hash.
    Vllm {
        /// `--prefix-caching-hash-algo`.
        algorithm: VllmAlgorithm,
        /// `PYTHONHASHSEED`; `None` where it is not set.
        seed: Option<String>,
    },
    /// `SGLang`'s: the first eight bytes of each hash.
    Sglang,
    /// `SGLang`'s with a draft model: of pairs of each token and the next, so that a block is known only with the
    /// token behind it.
    SglangPairs,
    /// Those of a worker of kvik: the first eight bytes of each hash.
    Kvik {
        /// The parent of the first block.
        root: BlockHash,
    },
    /// kvik's chain for engines whose hashes cannot be computed; their feeds keep a bridge.
    Own,
}

impl Keys {
    /// Appends the keys of the whole blocks of a prompt.
    pub fn extend(&self, tokens: &[TokenId], keys: &mut Vec<BlockKey>) {
        self.extend_salted(tokens, None, keys);
    }

    /// Appends the keys of the whole blocks of a prompt whose request has a `cache_salt`.
    ///
    /// Appends nothing where the keys of salted blocks cannot be computed: in kvik's own keys, whose salts depend on
    /// how an engine's events were cut, and for salts that the engine refuses or hashes by object identity. vLLM's
    /// are those of 0.32; earlier releases write the salt in another form, so that the prompt is a miss.
    pub fn extend_salted(&self, tokens: &[TokenId], salt: Option<&str>, keys: &mut Vec<BlockKey>) {
        match &self.kind {
            KeyKind::Vllm { algorithm, seed } => {
                let seed = seed.as_deref().map_or(VllmSeed::Default, VllmSeed::Text);
                // A chain that cannot be computed has no keys: no worker matches the prompt.
                if let Ok(chain) = VllmChain::try_new(*algorithm, self.block_tokens, seed) {
                    extend_vllm(chain, tokens, salt, keys);
                }
            }
            KeyKind::Sglang => {
                extend(sglang_chain(SglangChain::new(self.block_tokens), salt), tokens, keys, sglang_key);
            }
            KeyKind::SglangPairs => {
                let chain = SglangChain::new(self.block_tokens).with_bigrams();
                extend(sglang_chain(chain, salt), tokens, keys, sglang_key);
            }
            KeyKind::Kvik { root } => {
                let Ok(salt) = salt.map(CacheSalt::try_new).transpose() else { return };
                let root = root.salted(salt.as_ref());
                extend(KvikChain::after(root, self.block_tokens), tokens, keys, kvik_key);
            }
            KeyKind::Own if salt.is_some() => {}
            KeyKind::Own => OwnKeys::new(self.block_tokens).extend(tokens, keys),
        }
    }

    /// A text that is equal for equal keys only; it names a book outside of this process.
    pub fn id(&self) -> String {
        let block_tokens = self.block_tokens.get();
        match &self.kind {
            KeyKind::Vllm { algorithm, seed: None } => format!("vllm:{algorithm}:{block_tokens}"),
            KeyKind::Vllm { algorithm, seed: Some(seed) } => {
                format!("vllm:{algorithm}:{block_tokens}:{seed}")
            }
            KeyKind::Sglang => format!("sglang:{block_tokens}"),
            KeyKind::SglangPairs => format!("sglang_pairs:{block_tokens}"),
            KeyKind::Kvik { root } => format!("kvik:{root}:{block_tokens}"),
            KeyKind::Own => format!("own:{block_tokens}"),
        }
    }
}

impl FromStr for Keys {
    type Err = IndexerError;

    /// Reads what [`Keys::id`] wrote.
    fn from_str(id: &str) -> Result<Self, IndexerError> {
        let mut parts = id.splitn(4, ':');
        let mut next = || parts.next();
        let parsed = match (next(), next(), next(), next()) {
            (Some("vllm"), Some(algorithm), Some(size), seed) => algorithm
                .parse()
                .ok()
                .map(|algorithm| (KeyKind::Vllm { algorithm, seed: seed.map(str::to_owned) }, size)),
            (Some("sglang"), Some(size), None, None) => Some((KeyKind::Sglang, size)),
            (Some("sglang_pairs"), Some(size), None, None) => Some((KeyKind::SglangPairs, size)),
            (Some("kvik"), Some(root), Some(size), None) => {
                root.parse().ok().map(|root| (KeyKind::Kvik { root }, size))
            }
            (Some("own"), Some(size), None, None) => Some((KeyKind::Own, size)),
            _ => None,
        };
        let block_tokens = |size: &str| size.parse().ok().and_then(|size| BlockSize::try_new(size).ok());
        parsed
            .and_then(|(kind, size)| Some(Self { kind, block_tokens: block_tokens(size)? }))
            .ok_or_else(|| IndexerError::invalid("keys", id, "FAMILY:...:TOKENS of a block"))
    }
}

/// vLLM has the salt in the extra keys of the first block only.
fn extend_vllm(mut chain: VllmChain, tokens: &[TokenId], salt: Option<&str>, keys: &mut Vec<BlockKey>) {
    let mut rest = tokens;
    if let Some(salt) = salt {
        let Some((first, others)) = tokens.split_at_checked(chain.block_size().get()) else { return };
        let Ok(hash) = chain.push_block_with_extra_keys(first, &[ExtraKey::CacheSalt(salt)]) else { return };
        keys.push(BlockKey(hash.event_id()));
        rest = others;
    }
    extend(chain, rest, keys, VllmHash::event_id);
}

fn sglang_chain(chain: SglangChain, salt: Option<&str>) -> SglangChain {
    match salt {
        Some(salt) => chain.with_salt(salt),
        None => chain,
    }
}

/// The key of a page of `SGLang`'s chains.
fn sglang_key(hash: &SglangHash) -> u64 {
    hash.event_id().cast_unsigned()
}

/// The key of a block of kvik's chain.
fn kvik_key(hash: &BlockHash) -> u64 {
    (hash.to_u128() >> 64) as u64
}

fn extend<C: HashChain>(
    mut chain: C,
    tokens: &[TokenId],
    keys: &mut Vec<BlockKey>,
    id: impl Fn(&C::Hash) -> u64,
) {
    keys.extend(block_hashes(&mut chain, tokens).map(|hash| BlockKey(id(&hash))));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_back_and_anything_else_is_refused() {
        let block_tokens = BlockSize::try_new(16).unwrap();
        let algorithm = VllmAlgorithm::Sha256Cbor;
        for kind in [
            KeyKind::Vllm { algorithm, seed: None },
            KeyKind::Vllm { algorithm, seed: Some(String::new()) },
            KeyKind::Vllm { algorithm, seed: Some("a:b:c".to_owned()) },
            KeyKind::Sglang,
            KeyKind::SglangPairs,
            KeyKind::Kvik { root: BlockHash([7; 16]) },
            KeyKind::Own,
        ] {
            let keys = Keys { kind, block_tokens };
            assert_eq!(keys.id().parse::<Keys>().unwrap(), keys);
        }
        for wrong in ["", "vllm", "vllm:md5:16", "own:0", "own:x", "own:16:17", "kvik:zz:16", "sglang:-1"] {
            assert!(wrong.parse::<Keys>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_salt_gives_every_block_another_key_and_equal_salts_the_same() {
        let tokens: Vec<u32> = (0..48).collect();
        for id in [
            "vllm:sha256:16",
            "vllm:sha256_cbor:16",
            "sglang:16",
            "sglang_pairs:16",
            "kvik:00000000000000000000000000000001:16",
        ] {
            let keys: Keys = id.parse().unwrap();
            let of = |salt: Option<&str>| {
                let mut found = Vec::new();
                keys.extend_salted(&tokens, salt, &mut found);
                found
            };
            let (plain, one, other) = (of(None), of(Some("a")), of(Some("b")));
            assert!(!plain.is_empty(), "{id}");
            assert_eq!(one, of(Some("a")), "{id}");
            for [left, right] in [[&plain, &one], [&plain, &other], [&one, &other]] {
                assert_eq!(left.len(), right.len(), "{id}");
                assert!(left.iter().zip(right).all(|(left, right)| left != right), "{id}");
            }
        }
        let own: Keys = "own:16".parse().unwrap();
        let mut found = Vec::new();
        own.extend_salted(&tokens, Some("a"), &mut found);
        assert_eq!(found, []);
    }

    #[test]
    fn the_keys_of_a_prompt_are_those_of_its_whole_blocks() {
        let tokens: Vec<u32> = (0..35).collect();
        let keys = Keys { kind: KeyKind::Own, block_tokens: BlockSize::try_new(16).unwrap() };
        let (mut all, mut first) = (Vec::new(), Vec::new());
        keys.extend(&tokens, &mut all);
        keys.extend(&tokens[..16], &mut first);
        assert_eq!((all.len(), &all[..1]), (2, &first[..]));
    }
}
