//! The keys that chunks are sealed and opened with.

use std::fmt;

use ring::aead::{AES_256_GCM, LessSafeKey, UnboundKey};
use ring::error::Unspecified;
use ring::hkdf::{HKDF_SHA256, KeyType, Prk};

use crate::error::{Result, TierError};

/// Bytes of a key, which are twice as many digits in a file.
const KEY_BYTES: usize = 32;

/// What a key of a chunk is derived for. Another way to seal chunks gets another one.
const CHUNK_KEY_CONTEXT: &[u8] = b"kvik sealed chunk 1";

/// What the name of a key is derived for.
const KEY_ID_CONTEXT: &[u8] = b"kvik sealing key id 1";

/// Bytes of the random salt from which a chunk has its own key.
pub(crate) const SALT_BYTES: usize = 32;

/// Names a key without telling it: it is derived from the key, so two keys never have one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyId(pub [u8; 16]);

/// A key of a tenant. It is never printed.
pub struct SealingKey {
    id: KeyId,
    /// Keys are random and uniform, so that they need no extraction before they are expanded.
    expander: Prk,
}

/// The keys of a tenant: the first seals, and all of them open.
#[derive(Debug)]
pub struct KeyRing {
    first: SealingKey,
    others: Vec<SealingKey>,
}

/// The length of a key's name.
struct IdLength;

impl KeyType for IdLength {
    fn len(&self) -> usize {
        16
    }
}

// === impl SealingKey ===

impl SealingKey {
    /// The key with these bytes, which must be random.
    ///
    /// # Errors
    /// Never for keys of this length; the library's signature has one.
    pub fn try_new(bytes: &[u8; KEY_BYTES]) -> Result<Self> {
        let expander = Prk::new_less_safe(HKDF_SHA256, bytes);
        let mut id = [0; 16];
        let expanded = expander.expand(&[KEY_ID_CONTEXT], IdLength).and_then(|okm| okm.fill(&mut id));
        match expanded {
            Ok(()) => Ok(Self { id: KeyId(id), expander }),
            Err(Unspecified) => Err(TierError::invalid("encryption key", &"unusable", "32 random bytes")),
        }
    }

    /// Its name.
    pub fn id(&self) -> KeyId {
        self.id
    }

    /// The key of the one chunk that has this salt.
    pub(super) fn chunk_key(&self, salt: &[u8; SALT_BYTES]) -> Result<LessSafeKey, Unspecified> {
        let info: [&[u8]; 2] = [CHUNK_KEY_CONTEXT, salt];
        Ok(LessSafeKey::new(UnboundKey::from(self.expander.expand(&info, &AES_256_GCM)?)))
    }
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SealingKey").field("id", &self.id).finish_non_exhaustive()
    }
}

// === impl KeyRing ===

impl KeyRing {
    /// Reads keys from text: one a line, as 64 hexadecimal digits, the one that seals first. Empty lines and lines
    /// that begin with `#` count for nothing.
    ///
    /// # Errors
    /// If there is no key, or a line is none; the error names the line and repeats nothing of it.
    pub fn parse(text: &str) -> Result<Self> {
        let mut keys = Vec::new();
        for (line, line_number) in text.lines().map(str::trim).zip(1_usize..) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let Some(bytes) = parse_key(line) else {
                let place = format!("not a key in line {line_number}");
                return Err(TierError::invalid("encryption keys", &place, "64 hexadecimal digits a line"));
            };
            keys.push(SealingKey::try_new(&bytes)?);
        }
        let mut keys = keys.into_iter();
        match keys.next() {
            Some(first) => Ok(Self { first, others: keys.collect() }),
            None => {
                Err(TierError::invalid("encryption keys", &"without a key", "one key a line, at least one"))
            }
        }
    }

    /// The key that seals.
    pub fn sealing(&self) -> &SealingKey {
        &self.first
    }

    /// The key with this name.
    pub fn find(&self, id: KeyId) -> Option<&SealingKey> {
        std::iter::once(&self.first).chain(&self.others).find(|key| key.id == id)
    }

    /// Number of keys, at least 1.
    pub fn n_keys(&self) -> usize {
        1 + self.others.len()
    }
}

fn parse_key(digits: &str) -> Option<[u8; KEY_BYTES]> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if pairs.len() != KEY_BYTES || !rest.is_empty() {
        return None;
    }
    let mut key = [0; KEY_BYTES];
    for (byte, [high, low]) in key.iter_mut().zip(pairs) {
        let digit = |text: u8| char::from(text).to_digit(16);
        *byte = (digit(*high)? << 4 | digit(*low)?) as u8;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "1111111111111111111111111111111111111111111111111111111111111111";
    const TWO: &str = "2222222222222222222222222222222222222222222222222222222222222222";

    #[test]
    fn the_first_key_seals_and_all_of_them_are_found() {
        let ring = KeyRing::parse(&format!("# new\n{ONE}\n\n  {TWO}\r\n")).unwrap();
        assert_eq!(ring.n_keys(), 2);
        let one = KeyRing::parse(ONE).unwrap().sealing().id();
        let two = KeyRing::parse(&TWO.to_uppercase()).unwrap().sealing().id();
        assert_eq!(ring.sealing().id(), one);
        assert_ne!(one, two);
        assert!(ring.find(one).is_some() && ring.find(two).is_some());
        assert!(ring.find(KeyId([0; 16])).is_none());
    }

    #[test]
    fn what_is_no_key_is_refused_by_its_line_and_not_repeated() {
        for wrong in ["canary", &ONE[1..], &format!("{ONE}0"), &ONE.replace('1', "g"), &format!("{ONE} x")] {
            let message = KeyRing::parse(&format!("{ONE}\n{wrong}")).unwrap_err().to_string();
            assert!(message.contains("line 2") && !message.contains(wrong), "{message}");
        }
        for empty in ["", "\n# only a remark\n"] {
            let message = KeyRing::parse(empty).unwrap_err().to_string();
            assert!(message.contains("at least one"), "{message}");
        }
    }

    #[test]
    fn nothing_of_a_key_is_printed() {
        let shown = format!("{:?}", KeyRing::parse(&format!("{ONE}\n{TWO}")).unwrap());
        for secret in ["1111", "2222", "17, 17", "34, 34"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}
