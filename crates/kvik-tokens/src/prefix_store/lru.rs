//! Stretches of text, the least recently used leave first.

use std::collections::{BTreeMap, HashMap};
use std::mem;

use kvik_types::TokenId;
use parking_lot::Mutex;
use xxhash_rust::xxh64::Xxh64;

use super::{KnownPrefix, PrefixStore, TokenCut};
use crate::tokenizer::TokenizerKey;

/// Bytes of text in a stretch.
const STRETCH_BYTES: usize = 256;

/// Memory of an entry beside the bytes and tokens it points at: itself and its places in the two maps,
/// which keep some room free.
const ENTRY_BYTES: usize = 2 * (mem::size_of::<Stretch>() + mem::size_of::<u64>() * 3);

/// Prefixes as chains of stretches of 256 bytes.
///
/// A stretch is found by a chained XXH64 of all text up to its end, and then compared: its bytes, and which
/// stretch it follows. A last stretch that is not full is not kept.
#[derive(Debug)]
pub struct LruPrefixStore {
    max_bytes: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    stretches: HashMap<u64, Stretch>,
    /// Keys by the time of their last use.
    by_use: BTreeMap<u64, u64>,
    last_use: u64,
    last_id: u64,
    used_bytes: usize,
}

/// What a stretch follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parent {
    Beginning(TokenizerKey),
    /// The stretch with this id, which no other stretch ever gets.
    Stretch(u64),
}

#[derive(Debug)]
struct Stretch {
    id: u64,
    parent: Parent,
    text: Box<[u8]>,
    /// The last cut that is seen at the end of this stretch, counted from the beginning of the text.
    n_bytes: usize,
    n_tokens: usize,
    /// Tokens between the parent's cut and this one.
    tokens: Box<[TokenId]>,
    used: u64,
}

/// Hands out the stretches of a text with their keys.
struct Stretches<'a> {
    text: std::slice::ChunksExact<'a, u8>,
    key: u64,
}

// === impl LruPrefixStore ===

impl LruPrefixStore {
    /// An empty store that takes at most about `max_bytes` of memory.
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, inner: Mutex::new(Inner::default()) }
    }
}

impl PrefixStore for LruPrefixStore {
    fn find(&self, tokenizer: TokenizerKey, text: &str) -> KnownPrefix {
        let mut known = KnownPrefix::default();
        let mut parent = Parent::Beginning(tokenizer);
        let mut path = Vec::new();
        let mut inner = self.inner.lock();
        for (key, bytes) in Stretches::of(tokenizer, text) {
            let Some(stretch) = inner.get(key, parent, bytes) else { break };
            known.tokens.extend_from_slice(&stretch.tokens);
            known.n_bytes = stretch.n_bytes;
            parent = Parent::Stretch(stretch.id);
            path.push(key);
        }
        inner.touch(&path);
        known
    }

    fn add(&self, tokenizer: TokenizerKey, text: &str, tokens: &[TokenId], cuts: &[TokenCut]) {
        let mut parent = Parent::Beginning(tokenizer);
        let mut cuts = cuts.iter().peekable();
        let (mut n_bytes, mut n_tokens) = (0, 0);
        let mut path = Vec::new();
        let mut inner = self.inner.lock();
        for (stretch_idx, (key, bytes)) in Stretches::of(tokenizer, text).enumerate() {
            let stretch_end = (stretch_idx + 1) * STRETCH_BYTES;
            let n_parent_tokens = n_tokens;
            while let Some(cut) = cuts.next_if(|cut| cut.seen_bytes <= stretch_end) {
                if n_bytes < cut.n_bytes {
                    (n_bytes, n_tokens) = (cut.n_bytes, cut.n_tokens);
                }
            }
            path.push(key);
            if let Some(stretch) = inner.get(key, parent, bytes) {
                (n_bytes, n_tokens) = (stretch.n_bytes, stretch.n_tokens);
                parent = Parent::Stretch(stretch.id);
                continue;
            }
            let Some(new_tokens) = tokens.get(n_parent_tokens..n_tokens) else { return };
            let id = inner.insert(
                key,
                Stretch {
                    id: 0,
                    parent,
                    text: bytes.into(),
                    n_bytes,
                    n_tokens,
                    tokens: new_tokens.into(),
                    used: 0,
                },
            );
            parent = Parent::Stretch(id);
        }
        inner.touch(&path);
        inner.make_room(self.max_bytes);
    }

    fn cut_distance_bytes(&self) -> usize {
        STRETCH_BYTES
    }

    fn used_bytes(&self) -> usize {
        self.inner.lock().used_bytes
    }
}

// === impl Inner ===

impl Inner {
    fn get(&self, key: u64, parent: Parent, text: &[u8]) -> Option<&Stretch> {
        self.stretches.get(&key).filter(|stretch| stretch.parent == parent && *stretch.text == *text)
    }

    /// Puts a stretch in place of what was there, and returns its id.
    fn insert(&mut self, key: u64, stretch: Stretch) -> u64 {
        self.remove(key);
        self.last_id += 1;
        self.last_use += 1;
        self.used_bytes += stretch.cost_bytes();
        self.by_use.insert(self.last_use, key);
        self.stretches.insert(key, Stretch { id: self.last_id, used: self.last_use, ..stretch });
        self.last_id
    }

    fn remove(&mut self, key: u64) {
        if let Some(stretch) = self.stretches.remove(&key) {
            self.by_use.remove(&stretch.used);
            self.used_bytes -= stretch.cost_bytes();
        }
    }

    /// Marks a path as used; its beginning last, because nothing behind a missing stretch can be found.
    fn touch(&mut self, path: &[u64]) {
        for key in path.iter().rev() {
            if let Some(stretch) = self.stretches.get_mut(key) {
                self.by_use.remove(&stretch.used);
                self.last_use += 1;
                stretch.used = self.last_use;
                self.by_use.insert(self.last_use, *key);
            }
        }
    }

    fn make_room(&mut self, max_bytes: usize) {
        while max_bytes < self.used_bytes {
            let Some((_, key)) = self.by_use.first_key_value() else { return };
            self.remove(*key);
        }
    }
}

// === impl Stretch ===

impl Stretch {
    fn cost_bytes(&self) -> usize {
        ENTRY_BYTES + self.text.len() + mem::size_of_val(&*self.tokens)
    }
}

// === impl Stretches ===

impl<'a> Stretches<'a> {
    fn of(tokenizer: TokenizerKey, text: &'a str) -> Self {
        Self { text: text.as_bytes().chunks_exact(STRETCH_BYTES), key: tokenizer.0 }
    }
}

impl<'a> Iterator for Stretches<'a> {
    type Item = (u64, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = self.text.next()?;
        let mut hasher = Xxh64::new(0);
        hasher.update(&self.key.to_le_bytes());
        hasher.update(bytes);
        self.key = hasher.digest();
        Some((self.key, bytes))
    }
}
