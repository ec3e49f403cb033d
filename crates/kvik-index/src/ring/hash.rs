//! Where keys lie on the ring.

use md5::{Digest as _, Md5};
use xxhash_rust::xxh3::xxh3_64;

/// The function that places keys and virtual nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RingHash {
    /// XXH3 with 64 bits and seed 0; positions 0 to 2^64 - 1.
    Xxh3,
    /// The first four bytes of MD5 read as a big-endian number; positions 0 to 2^32 - 1.
    Md5,
}

impl RingHash {
    /// Returns the position of `key`.
    pub fn position(self, key: &[u8]) -> u64 {
        match self {
            Self::Xxh3 => xxh3_64(key),
            Self::Md5 => {
                let digest = Md5::digest(key);
                u64::from(u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]]))
            }
        }
    }

    /// Returns the number of positions.
    pub(super) fn circle(self) -> u128 {
        match self {
            Self::Xxh3 => 1 << 64,
            Self::Md5 => 1 << 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn md5_positions_are_those_of_pythons_hashlib() {
        // int.from_bytes(hashlib.md5(key).digest()[:4], "big")
        let expected: [(&[u8], u64); 3] =
            [(b"", 3_558_706_393), (b"a", 214_005_177), (b"seq-1", 1_609_992_677)];
        for (key, position) in expected {
            assert_eq!(RingHash::Md5.position(key), position);
        }
    }

    #[test]
    fn xxh3_positions_are_those_of_the_reference_implementation() {
        assert_eq!(RingHash::Xxh3.position(b""), 0x2d06_8005_38d3_94c2);
    }
}
