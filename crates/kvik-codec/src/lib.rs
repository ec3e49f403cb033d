//! Codecs: KV made smaller for disks and networks, and back again layer by layer.
//!
//! A [`Codec`] turns the sections of a chunk into coded ones, each on its own, so that a reader decodes only the layers
//! it wants. [`encode`] puts a head before them that names the codec, the shape and the length of each coded layer;
//! [`CodedHead`] reads it. [`by_name`] finds a codec.
//!
//! The quantizers know the layout of the built-in engine and plain rows ([`ChunkLayout`]) and refuse any other by name:
//! what lies where decides which elements share a scale. [`by_name`]`("lossless")` takes any layout of f32, f16 or bf16.
//!
//! Invariants:
//!
//! * A lossless codec gives back the same bytes, also of NaN. A lossy one gives back a layer with a number that is not
//!   finite, or above 2^100, as it was; elsewhere what was finite stays finite.
//! * Coded bytes and decoded ones are the same on every instruction set.
//! * Any bytes can be decoded: to something of the shape, or to an error. Nothing here reads outside of them or panics.

#![deny(unsafe_code)]

#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod cachegen;
mod chunk;
mod codec;
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod element;
mod error;
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod fp8;
mod head;
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod int4;
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod int8;
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod lossless;
mod names;
mod none;
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod paged;
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod quantizer;
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod rans;
mod repack;
mod shape;
#[expect(unsafe_code, reason = "it uses the processor's vector instructions")]
#[expect(clippy::inline_always, reason = "kernels take on the instruction set of their caller")]
mod simd;

pub use chunk::{decode, decode_layer, encode, round_trip};
pub use codec::Codec;
pub use error::{CodecError, Result};
pub use head::{CodedHead, MAX_LAYERS, coded_head_bytes};
pub use names::{NAMES, by_id, by_name, by_name_on};
pub use shape::{ChunkLayout, ChunkShape};
pub use simd::Isa;
