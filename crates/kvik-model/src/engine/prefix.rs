//! KV that comes in with a request.

use std::ops::Range;

use crate::forward::BlockSource;

/// KV of blocks of a prompt, from outside of the engine. Some of it may still be on its way.
///
/// The implementation MUST give only bytes that a backend with the layout and the weights of this engine has
/// exported for exactly the prompt's tokens from its start to the end of the block.
///
/// The engine computes a prompt from its front, so what is on its way should come from its back: the two meet, and what
/// arrives too late is computed. It looks for more before each pass, and drops the KV when nothing more can come.
///
/// A block that is `None`, or has another length than [`Engine::block_layer_bytes`](super::Engine::block_layer_bytes), ends the
/// prefix before it; where KV is copied in beside passes, before all blocks that were copied with it.
pub trait PrefixKv: BlockSource {
    /// Position up to which all KV from `token` on is there now; `token` or less where none is.
    ///
    /// `token` is a multiple of [`BLOCK_TOKENS`](crate::BLOCK_TOKENS), and of the answer only whole blocks count.
    fn there_until(&self, token: usize) -> usize;

    /// Position behind `token` to which the engine computes before it looks for more; `None` where nothing can come any more
    /// that lies at `token` or behind it.
    fn look_again_at(&self, token: usize) -> Option<usize> {
        let _ = token;
        None
    }

    /// Whether what lies at `token` is not there and will be before it could be computed: the engine waits for it, and
    /// asks again. The answer MUST turn to no after some time.
    fn is_due(&self, token: usize) -> bool {
        let _ = token;
        false
    }

    /// Tells that the engine has copied what it was given for these tokens.
    fn note_taken(&self, tokens: Range<usize>) {
        let _ = tokens;
    }
}
