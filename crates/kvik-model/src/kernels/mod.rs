//! The arithmetic of the forward pass.
//!
//! Architecture invariant, on which everything that compares KV rests: **the value of an output
//! element depends on its inputs alone**. Not on how many rows are computed beside it, not on
//! the tile that computed it, not on the number of threads, not on the instruction set. Each
//! output of a matrix product is one chain of fused multiply-adds over `k` in rising order; each
//! attention output is one chain over the context in rising order. Tiles and threads only choose
//! which chains advance together.
//!
//! The only unsafe code of the crate lives here: SIMD intrinsics, unchecked indices in the inner
//! loops behind checks of the shapes, the sharing of output buffers between the threads of one
//! parallel section, blocks that are read while others are written, and the view of memory that a pool maps.

mod activation;
mod attention;
mod gemm;
mod logits;
mod math;
mod matrix;
mod norm;
mod pages;
mod plan;
mod rotary;
mod shared;
mod simd;
mod storage;
mod threads;

pub(crate) use activation::{gelu_tanh_rows, silu_gate_rows};
pub(crate) use attention::{AttentionShape, attend};
pub(crate) use gemm::{Combine, matmul};
pub(crate) use logits::summarize_logits;
pub(crate) use matrix::{MatrixSource, PackedMatrix, padded};
pub(crate) use norm::{layer_norm_row, rms_norm_row};
pub(crate) use pages::{KvElement, KvPages, KvRows, PageShape, PinnedBlocks};
pub(crate) use plan::{RowPlan, Span};
pub(crate) use rotary::RotaryTable;
pub(crate) use shared::for_each_chunk_mut;
pub use simd::Isa;
pub(crate) use threads::ThreadPool;
