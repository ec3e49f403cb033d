//! Salts: what keeps the caches of requests apart that share model, layout and tokens.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::error::{Result, TypesError};
use crate::namespace::BlockHash;

/// First bytes of what is hashed; another version of the rule gets other ones.
const SEED_TAG: &[u8] = b"kvik-cache-salt-1";

/// The `cache_salt` of a request: KV is shared only by requests with the same salt, or by those without one.
///
/// Cloning is cheap. A salt is a secret of the clients that share it, so `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheSalt(Arc<str>);

impl CacheSalt {
    /// Most bytes of a salt: room for any token or key that clients derive one from, and little enough to be
    /// kept with every block.
    pub const MAX_BYTES: usize = 1024;

    /// Builds a salt from a text of 1 to [`Self::MAX_BYTES`] bytes.
    ///
    /// # Errors
    /// [`TypesError::InvalidValue`] for `cache_salt` if the text is empty or too long.
    pub fn try_new(text: &str) -> Result<Self> {
        if (1..=Self::MAX_BYTES).contains(&text.len()) {
            return Ok(Self(Arc::from(text)));
        }
        let value = format!("a text of {} bytes", text.len());
        Err(TypesError::invalid("cache_salt", &value, format!("1 to {} bytes", Self::MAX_BYTES)))
    }

    /// Returns the text of the salt.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for CacheSalt {
    type Err = TypesError;

    fn from_str(text: &str) -> Result<Self> {
        Self::try_new(text)
    }
}

impl fmt::Debug for CacheSalt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("CacheSalt(..)")
    }
}

impl BlockHash {
    /// Returns the parent of the first block of a salted chain, given `self` as that of the unsalted one.
    ///
    /// Without a salt that is `self`. With one it is the first 16 bytes of
    /// `SHA-256("kvik-cache-salt-1" || self (16 bytes, canonical order) || salt (UTF-8))`: no choice of salts
    /// makes the seeds of two of them meet.
    #[must_use]
    pub fn salted(self, salt: Option<&CacheSalt>) -> Self {
        let Some(salt) = salt else { return self };
        let digest =
            Sha256::new().chain_update(SEED_TAG).chain_update(self.0).chain_update(salt.as_str()).finalize();
        let mut seed = [0; 16];
        seed.copy_from_slice(&digest[..16]);
        Self(seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn salt(text: &str) -> CacheSalt {
        CacheSalt::try_new(text).unwrap()
    }

    #[test]
    fn a_salt_that_is_empty_or_too_long_is_refused_by_name() {
        assert_eq!(
            CacheSalt::try_new("").unwrap_err().to_string(),
            "`cache_salt` is a text of 0 bytes; allowed: 1 to 1024 bytes"
        );
        assert!(CacheSalt::try_new(&"s".repeat(1024)).is_ok());
        assert!(CacheSalt::try_new(&"s".repeat(1025)).unwrap_err().to_string().contains("1025 bytes"));
    }

    #[test]
    fn a_seed_depends_on_the_salt_and_on_the_namespace() {
        let roots = [BlockHash::from_u128(1), BlockHash::from_u128(2)];
        let salts = [None, Some(salt("a")), Some(salt("b"))];
        let mut seeds: Vec<BlockHash> =
            roots.iter().flat_map(|root| salts.iter().map(|salt| root.salted(salt.as_ref()))).collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), roots.len() * salts.len());
        assert_eq!(roots[0].salted(None), roots[0]);
    }

    #[test]
    fn the_seed_of_a_salt_is_pinned() {
        let seed = BlockHash::from_u128(1).salted(Some(&salt("tenant-a")));
        assert_eq!(seed.to_string(), "963dad2240583fec5461946da5fdf04d");
    }

    #[test]
    fn a_salt_is_not_printed() {
        assert_eq!(format!("{:?}", salt("tenant-a")), "CacheSalt(..)");
    }
}
