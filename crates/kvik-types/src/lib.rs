//! Ids, sizes, token blocks, hash chains and KV layouts: the words that all parts of kvik share.
//!
//! The crate is pure: no I/O, no clock, no randomness, no async. Everything is a function of its
//! arguments, so every result can be pinned by a test.
//!
//! Parts:
//!
//! * [`TokenId`], [`BlockSize`], [`ByteSize`], [`Dtype`]: ids and quantities;
//! * [`Namespace`], [`CacheSalt`] and [`BlockHash`]: which caches may mix, and the name of a token block;
//! * [`hash`]: kvik's hash chain and those of vLLM, `SGLang`, `LMCache` and llm-d, byte exact;
//! * [`RedisUrl`] and [`redacted_url`]: addresses that may carry a login, and how they are printed;
//! * [`layout`]: KV layouts, the conversion between any two, and self-describing binary frames.
//!
//! Invariants:
//!
//! * A block's hash is a function of its namespace, of the request's salt and of every token up to its end,
//!   and of nothing else. Encodings are injective, so different inputs differ before they are hashed.
//! * An engine's hash is computed exactly or refused ([`TypesError::NotReproducible`]), never guessed.
//! * A conversion writes the bytes of mapped slots and no others; sizes are checked before the first one.
//! * No function panics on input, and decoders take any bytes.
//!
//! ```
//! use kvik_types::hash::{KvikChain, block_hashes};
//! use kvik_types::{BlockSize, Dtype, Namespace};
//!
//! let namespace = Namespace {
//!     model: "kvik-tiny".into(),
//!     dtype: Dtype::BF16,
//!     layout: "kv_2ltd/layers=4/heads=2/head_dim=32".into(),
//!     tenant: String::new(),
//! };
//! let mut chain = KvikChain::new(&namespace, BlockSize::try_new(16)?);
//! let tokens: Vec<u32> = (0..40).collect();
//!
//! // Two full blocks; the 8 tokens after them wait until their block is full.
//! let hashes: Vec<_> = block_hashes(&mut chain, &tokens).collect();
//! assert_eq!(hashes.len(), 2);
//! # Ok::<(), kvik_types::TypesError>(())
//! ```

#![forbid(unsafe_code)]

pub mod hash;
pub mod layout;

mod dtype;
mod error;
mod namespace;
mod salt;
mod token;
mod url;

pub use dtype::Dtype;
pub use error::{Result, TypesError};
pub use namespace::{BlockHash, Namespace};
pub use salt::CacheSalt;
pub use token::{BlockSize, ByteSize, TokenId};
pub use url::{HIDDEN, RedisEndpoint, RedisUrl, RedisUrlError, redacted_url};
