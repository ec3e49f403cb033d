//! Namespaces and the identity of token blocks inside of them.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::xxh3_128;

use crate::dtype::Dtype;
use crate::error::{Result, TypesError};

/// First bytes of every encoded namespace; another version of the encoding gets other ones, so that
/// its hashes never meet these.
const ENCODING_TAG: &[u8] = b"kvik-namespace-1";

/// What must be equal for two caches to be mixed: model, element type, layout and tenant.
///
/// The namespace is the parent of the first block of every chain, so a change in any field gives
/// other hashes everywhere and a reader of the old data misses instead of reading it wrongly.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// Name and revision of the model, including an adapter if one is loaded.
    pub model: String,
    /// Element type of the cached tensors.
    pub dtype: Dtype,
    /// Layout fingerprint, as [`KvPlacement::fingerprint`](crate::layout::KvPlacement::fingerprint) gives it.
    pub layout: String,
    /// Whose cache it is; empty when everything is shared.
    pub tenant: String,
}

/// Identity of a token block: the hash of its namespace and of all tokens up to its end.
///
/// 128 bits of XXH3 in canonical (big endian) order. A name, not a proof: collisions can be constructed, so
/// what is found by it is proven by its tokens or by a digest of them before it is used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

// === impl Namespace ===

impl Namespace {
    /// Returns the bytes that stand for this namespace.
    ///
    /// The encoding is injective: every field is preceded by its length, so no two namespaces share
    /// an encoding however their fields are cut.
    pub fn encode(&self) -> Vec<u8> {
        let fields = [self.model.as_str(), self.dtype.name(), self.layout.as_str(), self.tenant.as_str()];
        let n_field_bytes: usize = fields.iter().map(|field| 8 + field.len()).sum();
        let mut encoded = Vec::with_capacity(ENCODING_TAG.len() + n_field_bytes);
        encoded.extend_from_slice(ENCODING_TAG);
        for field in fields {
            encoded.extend_from_slice(&(field.len() as u64).to_le_bytes());
            encoded.extend_from_slice(field.as_bytes());
        }
        encoded
    }

    /// Returns the parent of the first block of every chain in this namespace.
    pub fn seed(&self) -> BlockHash {
        BlockHash::from_u128(xxh3_128(&self.encode()))
    }
}

// === impl BlockHash ===

impl BlockHash {
    /// Wraps a 128-bit hash value.
    pub const fn from_u128(value: u128) -> Self {
        Self(value.to_be_bytes())
    }

    /// Returns the hash as a number.
    pub const fn to_u128(self) -> u128 {
        u128::from_be_bytes(self.0)
    }

    /// Returns the bytes in canonical order.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(self, formatter)
    }
}

impl fmt::LowerHex for BlockHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.to_u128())
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "BlockHash({self})")
    }
}

impl FromStr for BlockHash {
    type Err = TypesError;

    fn from_str(text: &str) -> Result<Self> {
        // `from_str_radix` alone would take a sign and fewer digits.
        if text.len() == 32
            && text.bytes().all(|byte| byte.is_ascii_hexdigit())
            && let Ok(value) = u128::from_str_radix(text, 16)
        {
            return Ok(Self::from_u128(value));
        }
        Err(TypesError::invalid("block hash", &format!("`{text}`"), "exactly 32 hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(model: &str, layout: &str, tenant: &str) -> Namespace {
        Namespace { model: model.into(), dtype: Dtype::BF16, layout: layout.into(), tenant: tenant.into() }
    }

    #[test]
    fn the_same_text_cut_differently_is_another_namespace() {
        let seeds = [
            namespace("ab", "c", "d").seed(),
            namespace("a", "bc", "d").seed(),
            namespace("a", "b", "cd").seed(),
            namespace("abcd", "", "").seed(),
            namespace("", "", "abcd").seed(),
        ];
        for (i, left) in seeds.iter().enumerate() {
            for right in &seeds[i + 1..] {
                assert_ne!(left, right);
            }
        }
    }

    #[test]
    fn every_field_changes_the_seed() {
        let base = namespace("m", "l", "t");
        assert_ne!(base.seed(), namespace("n", "l", "t").seed());
        assert_ne!(base.seed(), namespace("m", "k", "t").seed());
        assert_ne!(base.seed(), namespace("m", "l", "s").seed());
        assert_ne!(base.seed(), Namespace { dtype: Dtype::F16, ..base.clone() }.seed());
    }

    #[test]
    fn the_encoding_of_a_namespace_is_pinned() {
        let encoded = namespace("m", "", "t").encode();
        let expected = b"kvik-namespace-1\
            \x01\0\0\0\0\0\0\0m\
            \x04\0\0\0\0\0\0\0bf16\
            \0\0\0\0\0\0\0\0\
            \x01\0\0\0\0\0\0\0t";
        assert_eq!(encoded, expected);
    }

    #[test]
    fn a_block_hash_reads_back_what_it_prints() {
        let hash = BlockHash([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(hash.to_string(), "000102030405060708090a0b0c0d0eff");
        assert_eq!(format!("{hash:x}"), hash.to_string());
        assert_eq!(hash.to_string().parse(), Ok(hash));
        for text in ["", "+00102030405060708090a0b0c0d0eff", "00", "g00102030405060708090a0b0c0d0eff"] {
            assert!(text.parse::<BlockHash>().is_err(), "{text}");
        }
    }
}
