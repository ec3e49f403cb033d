//! The built-in engine: a language model on the CPU, with paged KV and continuous batching.
//!
//! Parts, from the outside in: [`Model`] opens a folder; [`Engine`] batches requests over a
//! [`Backend`], which runs the forward pass; [`BlockPool`] keeps the books of the blocks that keys
//! and values lie in; sampling turns logits into tokens and `kvik-tokens` turns them into text.
//!
//! Invariants:
//! - Batch invariance: a row's logits and KV are the same to the bit whatever is computed beside
//!   it, however its prompt is cut into chunks, on any number of threads and any instruction set.
//! - The same seed gives the same text, whatever the batch, also after a preemption.
//! - Nothing panics on the bytes of a model folder or the fields of a request.
//! - `unsafe` lives in `kernels` and in `forward::cuda` alone.
//!
//! ```
//! use kvik_model::{EngineEvent, EngineOptions, CpuBackendOptions, GenerateRequest, Model, SamplingParams};
//! use kvik_tokens::AddSpecial;
//!
//! let model = Model::bundled()?;
//! let mut engine = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default())?;
//! let prompt = model.tokenizer().encode("Once upon a time", AddSpecial::Yes)?;
//! engine.submit(GenerateRequest { prompt, sampling: SamplingParams::greedy(8) })?;
//! let mut text = String::new();
//! for event in engine.run_until_idle()? {
//!     match event {
//!         EngineEvent::Token(token) => text.push_str(&token.text),
//!         EngineEvent::Finished { text: rest, .. } => text.push_str(&rest),
//!         _ => {}
//!     }
//! }
//! assert!(text.starts_with(","));
//! # Ok::<(), kvik_model::ModelError>(())
//! ```

#![deny(unsafe_code)]

mod blend;
mod bundled;
mod checkpoint;
mod config;
mod engine;
mod error;
mod forward;
#[expect(unsafe_code, reason = "SIMD intrinsics, unchecked inner loops and shared output buffers")]
#[expect(
    clippy::inline_always,
    reason = "a kernel takes on the instruction set of its caller only when inlined"
)]
#[expect(
    clippy::needless_range_loop,
    reason = "loops over constant bounds become registers; iterators hide that"
)]
#[expect(clippy::too_many_arguments, reason = "the operands of a kernel are its arguments")]
mod kernels;
mod model;
mod paging;
mod sampling;

pub use blend::{Blend, BlendSegment, ComputedSegment, SegmentKv, Selector, Selectors};
pub use checkpoint::{Checkpoint, Header, Tensor, TensorInfo, TensorPlace, WeightDtype, parse_header};
pub use config::{Activation, Architecture, ModelConfig, Norm, Position, RopeConfig, RopeScaling};
pub use engine::{
    Begun, BegunOutput, BlendUsage, EndedSequence, Engine, EngineEvent, EngineOptions, EngineStats,
    FinishReason, GenerateRequest, KvSink, LentBlocks, PrefixKv, PreparedRequest, RequestId, SequenceKv,
    StageId, Staged, SubmitOptions, TimedPass, TokenEvent, Usage,
};
pub use error::{ModelError, Result};
pub use forward::{
    Backend, BlockImport, BlockSource, ChosenToken, CpuBackend, CpuBackendOptions, CudaBackend,
    CudaBackendOptions, DeviceMonitor, DeviceName, DeviceUsage, FileBlocks, FileRead, FileReads, KvFile,
    KvImport, KvSharing, KvSize, LayerKv, LayerProgress, Logits, PinnedKv, RowPositions, SegmentPart,
    SequenceRows, WantedLogits, WantedRow,
};
pub use kernels::Isa;
pub use model::{BackendOptions, Model};
pub use paging::{
    BLOCK_TOKENS, BlockChange, BlockId, BlockMemory, BlockPool, ElasticMemory, FixedMemory, MemoryGroup,
    Need, PoolStats,
};
pub use sampling::{SamplingParams, TokenDraw, TokenLogprobs};
