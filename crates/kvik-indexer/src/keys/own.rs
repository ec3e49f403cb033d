//! kvik's chain for engines whose hashes cannot be computed from tokens.
//!
//! `key = XXH3-64(parent (u64 little endian) || tokens (u32 little endian each), seed 0)`; the parent of the first
//! block is 0, or the salt of what else decides the KV: adapter, images, a cache salt.

use kvik_index::holders::{BlockKey, OwnChain};
use kvik_proto::events::{BlocksStored, ExtraKey};
use kvik_types::{BlockSize, TokenId};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// The chain, for blocks that are decided by their tokens or by something else beside them.
#[derive(Debug, Clone, Copy)]
pub struct OwnKeys {
    block_tokens: BlockSize,
    salt: u64,
}

impl OwnKeys {
    /// The chain of plain prompts.
    pub fn new(block_tokens: BlockSize) -> Self {
        Self { block_tokens, salt: 0 }
    }

    /// The chain of the blocks of an event. What is more than tokens salts all of them, so that no plain
    /// prompt has their keys; so do pairs, which need more than their own tokens.
    pub fn of_event(block_tokens: BlockSize, event: &BlocksStored) -> Self {
        if event.is_plain() && !event.is_paired {
            return Self::new(block_tokens);
        }
        let mut hasher = Xxh3::new();
        hasher.update(&[u8::from(event.is_paired)]);
        if let Some(name) = &event.lora_name {
            update(&mut hasher, b'l', name.as_bytes());
        }
        if let Some(salt) = &event.salt {
            update(&mut hasher, b's', salt.as_bytes());
        }
        for keys in &event.extra_keys {
            hasher.update(b"[");
            for key in keys {
                update_key(&mut hasher, key);
            }
        }
        // Never the salt of plain prompts.
        Self { block_tokens, salt: hasher.digest() | 1 }
    }

    /// Appends the keys of the whole blocks of a prompt.
    pub fn extend(&self, tokens: &[TokenId], keys: &mut Vec<BlockKey>) {
        let mut parent = None;
        for block in tokens.chunks_exact(self.block_tokens.get()) {
            let key = self.key(parent, block);
            parent = Some(key);
            keys.push(key);
        }
    }
}

impl OwnChain for OwnKeys {
    fn block_tokens(&self) -> usize {
        self.block_tokens.get()
    }

    fn key(&self, parent: Option<BlockKey>, tokens: &[u32]) -> BlockKey {
        let mut bytes = [0; 8 + 4 * 64];
        let parent = parent.map_or(self.salt, |parent| parent.0 ^ self.salt);
        if tokens.len() <= 64 {
            bytes[..8].copy_from_slice(&parent.to_le_bytes());
            for (place, token) in bytes[8..].chunks_exact_mut(4).zip(tokens) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            return BlockKey(xxh3_64(&bytes[..8 + 4 * tokens.len()]));
        }
        let mut hasher = Xxh3::new();
        hasher.update(&parent.to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        BlockKey(hasher.digest())
    }
}

fn update(hasher: &mut Xxh3, tag: u8, bytes: &[u8]) {
    hasher.update(&[tag]);
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn update_key(hasher: &mut Xxh3, key: &ExtraKey) {
    match key {
        ExtraKey::Text(text) => update(hasher, b't', text.as_bytes()),
        ExtraKey::Bytes(bytes) => update(hasher, b'b', bytes),
        ExtraKey::Number(number) => update(hasher, b'n', &number.to_le_bytes()),
        ExtraKey::List(keys) => {
            update(hasher, b'[', &(keys.len() as u64).to_le_bytes());
            for key in keys {
                update_key(hasher, key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_tokens(n_tokens: usize) -> BlockSize {
        BlockSize::try_new(n_tokens).unwrap()
    }

    #[test]
    fn long_and_short_blocks_are_hashed_alike() {
        let tokens: Vec<u32> = (0..64).collect();
        let keys = OwnKeys::new(block_tokens(64));
        let mut hasher = Xxh3::new();
        hasher.update(&0_u64.to_le_bytes());
        for token in &tokens {
            hasher.update(&token.to_le_bytes());
        }
        assert_eq!(keys.key(None, &tokens), BlockKey(hasher.digest()));
    }

    #[test]
    fn what_is_more_than_tokens_has_other_keys() {
        let plain = BlocksStored::default();
        let adapter = BlocksStored { lora_name: Some("a".to_owned()), ..BlocksStored::default() };
        let salted = BlocksStored {
            extra_keys: vec![vec![ExtraKey::Text("a".to_owned())]],
            ..BlocksStored::default()
        };
        let other = BlocksStored { salt: Some("a".to_owned()), ..BlocksStored::default() };
        let paired = BlocksStored { is_paired: true, ..BlocksStored::default() };
        let size = block_tokens(4);
        let key = |event: &BlocksStored| OwnKeys::of_event(size, event).key(None, &[1, 2, 3, 4]);
        assert_eq!(key(&plain), OwnKeys::new(size).key(None, &[1, 2, 3, 4]));
        assert_ne!(key(&plain), key(&adapter));
        assert_ne!(key(&adapter), key(&salted));
        assert_ne!(key(&plain), key(&salted));
        assert_ne!(key(&plain), key(&other));
        assert_ne!(key(&adapter), key(&other));
        assert_ne!(key(&plain), key(&paired));
    }
}
