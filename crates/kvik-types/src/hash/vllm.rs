//! vLLM's prefix-cache hashes.
//!
//! `hash = H(S((parent, tokens, extra)))` with `S` pickle or CBOR and `H` SHA-256 or XXH3-128. The
//! parent of the first block, `NONE_HASH`, is `H(S(seed))`. Extra keys stand for what changes the KV
//! without changing the tokens: an adapter, images, a salt, prompt embeddings.
//!
//! Pickle refers back to an *object* that it has met, so once a block's extra keys repeat a text,
//! its hash depends on which Python objects were shared inside the engine. Such a block is refused
//! with [`TypesError::NotReproducible`]; CBOR has no such rule.

use std::fmt;

use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use super::cbor::CborEncoder;
use super::pickle::Pickler;
use super::value::ValueSink;
use super::{HashChain, write_hex};
use crate::error::{Result, TypesError};
use crate::token::{BlockSize, TokenId};

/// Seed text of `NONE_HASH` in vLLM 0.32 when `PYTHONHASHSEED` is not set.
pub const VLLM_DEFAULT_SEED: &str = "vllm-none-hash";

/// Value of vLLM's `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum VllmAlgorithm {
    /// `sha256`, SHA-256 of the pickle; vLLM's default.
    #[default]
    Sha256,
    /// `sha256_cbor`, SHA-256 of canonical CBOR.
    Sha256Cbor,
    /// `xxhash`, XXH3-128 of the pickle.
    Xxhash,
    /// `xxhash_cbor`, XXH3-128 of canonical CBOR.
    XxhashCbor,
}

/// Where the parent of the first block comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum VllmSeed<'a> {
    /// What vLLM 0.32 does without `PYTHONHASHSEED`: [`VLLM_DEFAULT_SEED`] for the SHA-256 kinds.
    ///
    /// Random, and therefore not reproducible, for the XXH3 kinds.
    #[default]
    Default,
    /// The value of `PYTHONHASHSEED`.
    Text(&'a str),
    /// The parent itself, 16 or 32 bytes: a `NONE_HASH` that was read from an engine, or the hash of
    /// a block to go on from.
    Parent(&'a [u8]),
}

/// How a release of vLLM writes extra keys into the hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExtraKeyForm {
    /// 0.32: a tuple that starts with a tag, such as `("lora", name, path)`.
    #[default]
    Tagged,
    /// 0.20 to 0.28: bare values, and `(identifier, offset)` for multimodal items.
    UntaggedWithOffset,
    /// Up to 0.19: bare values only.
    Untagged,
}

/// Something besides the tokens that decides the KV of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExtraKey<'a> {
    /// The adapter of the request.
    Lora {
        /// Name of the adapter.
        name: &'a str,
        /// Where it was loaded from; only the tagged form has it.
        path: &'a str,
    },
    /// A multimodal item whose placeholder overlaps the block.
    Multimodal {
        /// Identifier of the item.
        identifier: &'a str,
        /// First placeholder token relative to the start of the block, negative if it lies before.
        offset: i64,
    },
    /// The salt of the request; vLLM puts it into the first block only.
    CacheSalt(&'a str),
    /// Digest of the prompt embeddings of the block.
    PromptEmbeds(&'a [u8]),
}

/// Hash of one block as vLLM keeps it: 32 bytes, or 16 for the XXH3 kinds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VllmHash {
    bytes: [u8; 32],
    n_bytes: u8,
}

/// Hash chain of vLLM.
#[derive(Clone, Debug)]
pub struct VllmChain {
    algorithm: VllmAlgorithm,
    extra_key_form: ExtraKeyForm,
    block_size: BlockSize,
    none_hash: VllmHash,
    parent: VllmHash,
    buffer: Vec<u8>,
}

/// Collects texts and bytes to find out whether one occurs twice.
#[derive(Default)]
struct RepeatFinder<'a> {
    texts: Vec<&'a str>,
    byte_strings: Vec<&'a [u8]>,
    repeated: Option<String>,
}

// === impl VllmAlgorithm ===

impl VllmAlgorithm {
    /// Every algorithm, in declaration order.
    pub const ALL: [Self; 4] = [Self::Sha256, Self::Sha256Cbor, Self::Xxhash, Self::XxhashCbor];

    /// Returns the name that vLLM's command line takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha256Cbor => "sha256_cbor",
            Self::Xxhash => "xxhash",
            Self::XxhashCbor => "xxhash_cbor",
        }
    }

    const fn uses_pickle(self) -> bool {
        matches!(self, Self::Sha256 | Self::Xxhash)
    }

    const fn uses_sha256(self) -> bool {
        matches!(self, Self::Sha256 | Self::Sha256Cbor)
    }

    fn seed_hash(self, seed: &str, buffer: &mut Vec<u8>) -> VllmHash {
        if self.uses_pickle() {
            let mut pickler = Pickler::new(buffer);
            pickler.text(seed);
            pickler.finish();
        } else {
            CborEncoder::new(buffer).text(seed);
        }
        self.digest(buffer)
    }

    fn digest(self, bytes: &[u8]) -> VllmHash {
        if self.uses_sha256() {
            VllmHash { bytes: Sha256::digest(bytes).into(), n_bytes: 32 }
        } else {
            VllmHash::from_16(xxh3_128(bytes).to_be_bytes())
        }
    }
}

impl fmt::Display for VllmAlgorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl std::str::FromStr for VllmAlgorithm {
    type Err = TypesError;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == text).ok_or_else(|| {
            TypesError::invalid(
                "prefix caching hash algorithm",
                &format!("`{text}`"),
                "sha256, sha256_cbor, xxhash, xxhash_cbor",
            )
        })
    }
}

// === impl ExtraKey ===

impl<'a> ExtraKey<'a> {
    /// Position of the key among the extra keys of a block.
    const fn rank(&self) -> usize {
        match self {
            Self::Lora { .. } => 0,
            Self::Multimodal { .. } => 1,
            Self::CacheSalt(_) => 2,
            Self::PromptEmbeds(_) => 3,
        }
    }

    fn send(&self, form: ExtraKeyForm, sink: &mut impl ValueSink<'a>) {
        let tagged = form == ExtraKeyForm::Tagged;
        let n_items = match self {
            Self::Lora { .. } | Self::Multimodal { .. } if tagged => 3,
            Self::Multimodal { .. } if form == ExtraKeyForm::UntaggedWithOffset => 2,
            _ if tagged => 2,
            _ => 1,
        };
        // A key of one item is the bare value.
        if n_items > 1 {
            sink.start_tuple(n_items);
        }
        if tagged {
            sink.text(["lora", "mm", "cache_salt", "prompt_embeds"][self.rank()]);
        }
        match *self {
            Self::Lora { name, path } => {
                sink.text(name);
                if tagged {
                    sink.text(path);
                }
            }
            Self::Multimodal { identifier, offset } => {
                sink.text(identifier);
                if form != ExtraKeyForm::Untagged {
                    sink.int(offset);
                }
            }
            Self::CacheSalt(salt) => sink.text(salt),
            Self::PromptEmbeds(digest) => sink.bytes(digest),
        }
        if n_items > 1 {
            sink.end_tuple(n_items);
        }
    }
}

/// Sends the tuple that vLLM hashes for one block.
fn send_block<'a>(
    sink: &mut impl ValueSink<'a>,
    parent: &'a [u8],
    tokens: &[TokenId],
    extra_keys: &[ExtraKey<'a>],
    form: ExtraKeyForm,
) {
    sink.start_tuple(3);
    sink.bytes(parent);
    sink.tokens(tokens);
    if extra_keys.is_empty() {
        sink.none();
    } else {
        sink.start_tuple(extra_keys.len());
        for rank in 0..4 {
            extra_keys.iter().filter(|key| key.rank() == rank).for_each(|key| key.send(form, sink));
        }
        sink.end_tuple(extra_keys.len());
    }
    sink.end_tuple(3);
}

// === impl VllmHash ===

impl VllmHash {
    /// Wraps the bytes of a hash; fails unless there are 16 or 32.
    pub fn try_new(bytes: &[u8]) -> Result<Self> {
        let mut hash = Self { bytes: [0; 32], n_bytes: bytes.len() as u8 };
        match bytes.len() {
            16 | 32 => hash.bytes[..bytes.len()].copy_from_slice(bytes),
            n_bytes => {
                return Err(TypesError::invalid(
                    "vLLM block hash",
                    &format!("{n_bytes} bytes long"),
                    "16 or 32 bytes",
                ));
            }
        }
        Ok(hash)
    }

    /// Returns the 16 or 32 bytes of the hash.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.n_bytes)]
    }

    /// Returns the number that stands for the block in KV events: the last 8 bytes, big endian.
    pub fn event_id(&self) -> u64 {
        self.as_bytes()
            .iter()
            .skip(usize::from(self.n_bytes) - 8)
            .fold(0, |id, byte| id << 8 | u64::from(*byte))
    }

    fn from_16(half: [u8; 16]) -> Self {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&half);
        Self { bytes, n_bytes: 16 }
    }
}

impl fmt::Display for VllmHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(self.as_bytes(), formatter)
    }
}

impl fmt::Debug for VllmHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "VllmHash({self})")
    }
}

// === impl VllmChain ===

impl VllmChain {
    /// Builds a chain that stands before the first block.
    ///
    /// Extra keys take the tagged form unless [`with_extra_key_form`](Self::with_extra_key_form)
    /// says otherwise. Fails when the seed is random in vLLM or a given parent has another length
    /// than 16 or 32 bytes.
    pub fn try_new(algorithm: VllmAlgorithm, block_size: BlockSize, seed: VllmSeed<'_>) -> Result<Self> {
        let mut buffer = Vec::with_capacity(64 + 8 * block_size.get().min(4096));
        let none_hash = match seed {
            VllmSeed::Default if algorithm.uses_sha256() => {
                algorithm.seed_hash(VLLM_DEFAULT_SEED, &mut buffer)
            }
            VllmSeed::Default => {
                return Err(TypesError::NotReproducible {
                    reason: format!(
                        "vLLM draws the parent of the first block at random for {algorithm} unless PYTHONHASHSEED is set"
                    ),
                });
            }
            VllmSeed::Text(text) => algorithm.seed_hash(text, &mut buffer),
            VllmSeed::Parent(bytes) => VllmHash::try_new(bytes)?,
        };
        let extra_key_form = ExtraKeyForm::default();
        Ok(Self { algorithm, extra_key_form, block_size, none_hash, parent: none_hash, buffer })
    }

    /// Sets how extra keys are written. Default: [`ExtraKeyForm::Tagged`].
    #[must_use]
    pub fn with_extra_key_form(mut self, form: ExtraKeyForm) -> Self {
        self.extra_key_form = form;
        self
    }

    /// Returns the parent of the first block.
    pub fn none_hash(&self) -> VllmHash {
        self.none_hash
    }

    /// Appends a block that has extra keys and returns its hash.
    ///
    /// The keys are written in vLLM's order whatever order they come in; keys of one kind keep
    /// theirs. Without keys this is [`push_block`](HashChain::push_block). Fails, and leaves the
    /// chain as it is, when the algorithm pickles and a text or bytes value occurs twice.
    pub fn push_block_with_extra_keys(
        &mut self,
        tokens: &[TokenId],
        extra_keys: &[ExtraKey<'_>],
    ) -> Result<VllmHash> {
        if self.algorithm.uses_pickle() && !extra_keys.is_empty() {
            let mut finder = RepeatFinder::default();
            send_block(&mut finder, self.parent.as_bytes(), &[], extra_keys, self.extra_key_form);
            if let Some(repeated) = finder.repeated {
                return Err(TypesError::NotReproducible {
                    reason: format!(
                        "the extra keys repeat {repeated}, and pickle writes the second one by object identity"
                    ),
                });
            }
        }
        Ok(self.push(tokens, extra_keys))
    }

    fn push(&mut self, tokens: &[TokenId], extra_keys: &[ExtraKey<'_>]) -> VllmHash {
        self.buffer.clear();
        let parent = self.parent;
        if self.algorithm.uses_pickle() {
            let mut pickler = Pickler::new(&mut self.buffer);
            send_block(&mut pickler, parent.as_bytes(), tokens, extra_keys, self.extra_key_form);
            pickler.finish();
        } else {
            let mut encoder = CborEncoder::new(&mut self.buffer);
            send_block(&mut encoder, parent.as_bytes(), tokens, extra_keys, self.extra_key_form);
        }
        self.parent = self.algorithm.digest(&self.buffer);
        self.parent
    }
}

impl HashChain for VllmChain {
    type Hash = VllmHash;

    fn block_size(&self) -> BlockSize {
        self.block_size
    }

    fn push_block(&mut self, tokens: &[TokenId]) -> VllmHash {
        self.push(tokens, &[])
    }

    fn restart(&mut self) {
        self.parent = self.none_hash;
    }
}

// === impl RepeatFinder ===

impl<'a> ValueSink<'a> for RepeatFinder<'a> {
    fn start_tuple(&mut self, _n_items: usize) {}

    fn end_tuple(&mut self, _n_items: usize) {}

    fn none(&mut self) {}

    fn int(&mut self, _value: i64) {}

    fn text(&mut self, value: &'a str) {
        if self.texts.contains(&value) {
            self.repeated = Some(format!("`{value}`"));
        }
        self.texts.push(value);
    }

    fn bytes(&mut self, value: &'a [u8]) {
        if self.byte_strings.contains(&value) {
            self.repeated = Some("a bytes value".to_owned());
        }
        self.byte_strings.push(value);
    }
}
