//! Hashing with a secret, so that an outsider cannot choose keys that collide.

use std::hash::{BuildHasher, Hasher};

/// A secret number and the mixing that uses it.
#[derive(Debug, Clone, Copy)]
pub(super) struct HashKey {
    first: u64,
    second: u64,
}

/// Collects what is hashed word by word.
#[derive(Debug)]
pub(super) struct KeyedHasher {
    hash_key: HashKey,
    state: u64,
}

impl HashKey {
    pub(super) fn new(secret: u64) -> Self {
        // Odd constants with about as many ones as zeros; the secret moves both factors.
        let first = secret ^ 0xa076_1d64_78bd_642f;
        Self { first, second: multiply_fold(first, 0xe703_7ed1_a0b4_28db) | 1 }
    }

    /// 64 well-mixed bits of a word.
    pub(super) fn mix(self, word: u64) -> u64 {
        multiply_fold(word ^ self.first, self.second)
    }

    /// The 32 bits by which the table knows a key.
    pub(super) fn tag(self, key: u64) -> u32 {
        (self.mix(key) >> 32) as u32
    }
}

impl BuildHasher for HashKey {
    type Hasher = KeyedHasher;

    fn build_hasher(&self) -> KeyedHasher {
        KeyedHasher { hash_key: *self, state: self.second }
    }
}

impl Hasher for KeyedHasher {
    fn finish(&self) -> u64 {
        self.hash_key.mix(self.state)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.state = self.hash_key.mix(self.state.rotate_left(23) ^ word);
    }
}

/// The 128-bit product, its halves combined.
fn multiply_fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}
