//! Requests that another engine has begun, and their way there.
//!
//! What an engine says next depends on the tokens, the seed and the sampling of a request alone. So a request goes on
//! anywhere from its tokens, to the same output; KV that has gone ahead ([`staged`](super::staged)) only saves the work of
//! computing it again.

use std::ops::Range;
use std::sync::Arc;

use kvik_types::TokenId;

use super::lost_device::lose;
use super::request::{PreparedRequest, RequestId};
use super::sequence::Sequence;
use super::{Engine, PrefixKv};
use crate::error::{ModelError, Result};
use crate::forward::PinnedKv;
use crate::paging::BLOCK_TOKENS;

use super::ended::Loan;

/// An output that another engine has begun.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BegunOutput {
    /// Its tokens; they are not reported again.
    pub tokens: Vec<TokenId>,
    /// Whether it has ended: nothing is done for it then.
    pub is_ended: bool,
}

/// How far a request has come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Begun {
    /// For each choice.
    pub outputs: Vec<BegunOutput>,
    /// Prompt tokens that were cached at its first admission, if it was admitted.
    pub cached_tokens: Option<usize>,
}

/// Full blocks of a running sequence, as they are copied while it goes on.
pub struct LentBlocks {
    tokens: Vec<TokenId>,
    n_layers: usize,
    block_layer_bytes: usize,
    // Before the loan: what is pinned is not written until it is let go here.
    kv: Box<dyn PinnedKv>,
    _loan: Loan,
}

impl Engine {
    /// The seed of the random choices of a request that was not yet ended.
    pub fn seed(&self, id: RequestId) -> Option<u64> {
        let mut sequences = self.running.iter().chain(&self.waiting);
        sequences.find(|sequence| sequence.request == id).map(Sequence::seed)
    }

    /// Takes a request that another engine has begun, and goes on with it.
    ///
    /// Its sampling MUST have the seed that the other engine used. No event reports what was there before.
    ///
    /// # Errors
    /// As [`Engine::submit`], and if `begun` does not fit the request or has no output that goes on.
    pub fn submit_begun(
        &mut self,
        prepared: PreparedRequest,
        begun: &Begun,
        prefix: Option<Arc<dyn PrefixKv>>,
    ) -> Result<RequestId> {
        let (n_choices, n_prompt) = (prepared.request.sampling.n as usize, prepared.request.prompt.len());
        if begun.outputs.len() != n_choices || begun.outputs.iter().all(|output| output.is_ended) {
            let allowed = format!("{n_choices}, of which one goes on");
            return Err(ModelError::request("outputs", begun.outputs.len(), allowed));
        }
        let vocab_size = self.backend.config().vocab_size;
        let mut tokens = begun.outputs.iter().flat_map(|output| &output.tokens);
        if let Some(token) = tokens.find(|&&token| vocab_size <= token as usize) {
            return Err(ModelError::request("outputs", token, format!("token ids below {vocab_size}")));
        }
        let longest = self.max_sequence_tokens();
        let growing = begun.outputs.iter().filter(|output| !output.is_ended);
        let n_longest = growing.map(|output| n_prompt + output.tokens.len()).max().unwrap_or(0);
        if longest <= n_longest {
            let allowed = format!("sequences of less than {longest} tokens");
            return Err(ModelError::request(
                "outputs",
                format!("{n_longest} tokens with the prompt"),
                allowed,
            ));
        }
        let stop = prepared.request.sampling.stop.clone();
        let is_new = begun.outputs.iter().all(|output| output.tokens.is_empty() && !output.is_ended);
        let id = self.submit_prepared(prepared, prefix)?;
        if is_new {
            return Ok(id);
        }
        let Some(mut first) = self.waiting.pop_back() else { return Ok(id) };
        let _ = first.take_forks();
        let mut rest = Vec::new();
        for choice in 1..n_choices {
            let text = self.text_stream(&stop)?;
            rest.push(first.fork(choice as u32, text, &mut self.pool));
        }
        for (mut sequence, output) in std::iter::once(first).chain(rest).zip(&begun.outputs) {
            if output.is_ended {
                continue;
            }
            sequence.go_on_from(&output.tokens, begun.cached_tokens);
            self.waiting.push_back(sequence);
        }
        Ok(id)
    }

    /// Stops or goes on with all outputs of a request, between two steps; a frozen one may lose its blocks, and is computed
    /// again when it goes on.
    pub fn set_frozen(&mut self, id: RequestId, is_frozen: bool) {
        for sequence in self.running.iter_mut().chain(&mut self.waiting) {
            if sequence.request == id {
                sequence.set_frozen(is_frozen);
            }
        }
    }

    /// Whether the next step may compute tokens of an output: it was admitted, and waits neither frozen nor for credits.
    pub fn is_advancing(&self, id: RequestId, choice: u32) -> bool {
        self.running.iter().any(|sequence| sequence.key() == (id, choice) && !sequence.is_paused())
    }

    /// Lends the full blocks of an output from `first_block` on, at most `max_blocks`; `None` if there are none.
    ///
    /// Full blocks do not change while they are lent, though their sequence goes on.
    pub fn lend_blocks(
        &mut self,
        id: RequestId,
        choice: u32,
        first_block: usize,
        max_blocks: usize,
    ) -> Option<LentBlocks> {
        if self.lost_device.is_some() {
            return None;
        }
        let sequence = self.running.iter().find(|sequence| sequence.key() == (id, choice))?;
        let end_block = sequence.n_offered_blocks().min(first_block.saturating_add(max_blocks));
        if end_block <= first_block {
            return None;
        }
        let blocks = &sequence.table()[first_block..end_block];
        let pinned = self.backend.pin_blocks(blocks);
        let kv = pinned.inspect_err(|error| lose(&mut self.lost_device, error)).ok()?;
        Some(LentBlocks {
            tokens: sequence.computed_tokens()[first_block * BLOCK_TOKENS..end_block * BLOCK_TOKENS].to_vec(),
            n_layers: self.backend.config().n_layers,
            block_layer_bytes: self.backend.block_layer_bytes(),
            kv,
            _loan: self.loans.give(blocks, &mut self.pool),
        })
    }
}

impl LentBlocks {
    /// The tokens of the blocks.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Number of blocks; at least one.
    pub fn n_blocks(&self) -> usize {
        self.tokens.len() / BLOCK_TOKENS
    }

    /// Bytes of one block in all layers.
    pub fn block_bytes(&self) -> usize {
        self.n_layers * self.block_layer_bytes
    }

    /// Appends the bytes of some of the blocks: block by block, and of each all layers.
    ///
    /// # Errors
    /// If the device fails; what was appended is not KV then.
    ///
    /// # Panics
    /// If there are no such blocks.
    pub fn read(&self, blocks: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        out.reserve(blocks.len() * self.block_bytes());
        for block_idx in blocks {
            let start = out.len();
            out.resize(start + self.block_bytes(), 0);
            self.kv.read_blocks(0..self.n_layers, block_idx..block_idx + 1, &mut out[start..])?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for LentBlocks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("LentBlocks").field("n_blocks", &self.n_blocks()).finish_non_exhaustive()
    }
}
