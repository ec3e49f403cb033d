//! An entropy coder: range asymmetric numeral systems with static tables, thirty-two decoders side by side.
//!
//! Symbols are bytes and come in units of sixteen. A unit has one table; its sixteen symbols belong to sixteen
//! decoders. Units with an even number belong to one *chain* of sixteen, the others to a second one; each chain has words
//! of its own, so that two chains advance without waiting for each other.
//!
//! A stream is: the number of 16-bit words of each chain (two u32), the first states of each chain (32 u32), the words of
//! the first chain and those of the second, all little endian. States are below 2^32 and, between symbols, at least 2^16; a
//! decoder that ends has the state 2^16, with which its encoder began: a stream that ends otherwise was not written so.

mod decoder;
mod encoder;
mod table;

pub(crate) use decoder::Decoder;
pub(crate) use encoder::encode;
pub(crate) use table::{Frequencies, N_SYMBOLS};

use crate::element::LANES;

/// Chains of a stream.
const N_CHAINS: usize = 2;

/// Bytes before the words of a stream.
const STREAM_HEAD_BYTES: usize = N_CHAINS * (4 + 4 * LANES);

#[cfg(test)]
mod tests;
