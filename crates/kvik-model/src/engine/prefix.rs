//! KV that comes in with a request.

use std::fmt;

/// KV of consecutive blocks of a prompt, from outside of the engine.
///
/// The implementation MUST give only bytes that a backend with the layout and the weights of this engine has
/// exported for exactly the prompt's tokens from its start to the end of the block.
pub trait PrefixKv: Send + fmt::Debug {
    /// Position of the first token; a multiple of [`BLOCK_TOKENS`](crate::BLOCK_TOKENS).
    fn first_token(&self) -> usize;

    /// Number of tokens from there; a multiple of [`BLOCK_TOKENS`](crate::BLOCK_TOKENS).
    fn n_tokens(&self) -> usize;

    /// The bytes of one block of one layer; `block_idx` counts from the start of the prompt.
    ///
    /// `None`, or another length than [`Engine::block_layer_bytes`](super::Engine::block_layer_bytes), ends the prefix before this block.
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]>;
}
