//! `SGLang`'s page hashes.
//!
//! `hash = SHA-256(parent (32 bytes, absent for the first page) || tokens (u32 little endian each))`.
//! With a salt the first page has the parent `SHA-256("sglang-cache-salt-v1\0" || salt)`. EAGLE
//! drafting keys the cache by bigrams: each position contributes its own token and the next one, so
//! a page reads one token beyond its end.

use std::fmt;

use sha2::{Digest, Sha256};

use super::{HashChain, fill_buffer, write_hex};
use crate::token::{BlockSize, TokenId};

const SALT_TAG: &[u8] = b"sglang-cache-salt-v1\0";

/// Hash of one page as `SGLang` keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SglangHash(pub [u8; 32]);

/// Hash chain of `SGLang`; a block is one page.
#[derive(Clone, Debug)]
pub struct SglangChain {
    page_size: BlockSize,
    bigrams: bool,
    first_parent: Option<SglangHash>,
    parent: Option<SglangHash>,
    buffer: Vec<u8>,
}

// === impl SglangHash ===

impl SglangHash {
    /// Returns the number that stands for the page in KV events: the first 8 bytes, big endian, signed.
    pub const fn event_id(&self) -> i64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        i64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for SglangHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, formatter)
    }
}

impl fmt::Debug for SglangHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SglangHash({self})")
    }
}

// === impl SglangChain ===

impl SglangChain {
    /// Builds a chain that stands before the first page of an unsalted sequence.
    pub fn new(page_size: BlockSize) -> Self {
        Self { page_size, bigrams: false, first_parent: None, parent: None, buffer: Vec::new() }
    }

    /// Starts the chain from the parent that `SGLang` derives from the request's salt.
    #[must_use]
    pub fn with_salt(mut self, salt: &str) -> Self {
        let digest = Sha256::new().chain_update(SALT_TAG).chain_update(salt).finalize();
        self.first_parent = Some(SglangHash(digest.into()));
        self.parent = self.first_parent;
        self
    }

    /// Hashes pairs of neighboring tokens, as `SGLang` does with EAGLE drafting.
    ///
    /// Each page then reads one token more than it is long.
    #[must_use]
    pub fn with_bigrams(mut self) -> Self {
        self.bigrams = true;
        self
    }
}

impl HashChain for SglangChain {
    type Hash = SglangHash;

    fn block_size(&self) -> BlockSize {
        self.page_size
    }

    fn window_tokens(&self) -> usize {
        self.page_size.get() + usize::from(self.bigrams)
    }

    fn push_block(&mut self, tokens: &[TokenId]) -> SglangHash {
        let parent = self.parent.as_ref().map_or(&[][..], |hash| &hash.0);
        if self.bigrams {
            self.buffer.clear();
            self.buffer.extend_from_slice(parent);
            for pair in tokens.windows(2) {
                self.buffer.extend_from_slice(&pair[0].to_le_bytes());
                self.buffer.extend_from_slice(&pair[1].to_le_bytes());
            }
        } else {
            fill_buffer(&mut self.buffer, parent, tokens, TokenId::to_le_bytes);
        }
        let hash = SglangHash(Sha256::digest(&self.buffer).into());
        self.parent = Some(hash);
        hash
    }

    fn restart(&mut self) {
        self.parent = self.first_parent;
    }
}
