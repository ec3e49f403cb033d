//! The engine: requests in, tokens out, many at a time.
//!
//! [`Engine::step`] is one turn: choose rows ([`scheduler`]), run the forward pass, register the
//! blocks that became full, choose tokens. A sequence that has to give its blocks back is computed
//! again later; because the forward pass is batch invariant and the choice of a token depends on
//! the sequence alone, the output is the same.

mod begun;
mod blend_rows;
mod blended;
mod ended;
mod hashes;
mod lost_device;
mod memory;
mod pass_times;
mod prefix;
mod request;
mod resident;
mod retire;
mod scheduler;
mod sequence;
mod staged;
mod step;
mod transfer;
mod warm_up;

pub use begun::{Begun, BegunOutput, LentBlocks};
pub use blend_rows::BlendUsage;
pub use ended::{EndedSequence, KvSink};
pub use prefix::PrefixKv;
pub use request::{
    EngineEvent, FinishReason, GenerateRequest, PreparedRequest, RequestId, SubmitOptions, TokenEvent, Usage,
};
pub use resident::SequenceKv;
pub use staged::{StageId, Staged};
pub use warm_up::TimedPass;

use std::collections::VecDeque;
use std::sync::Arc;

use kvik_tokens::{TextStream, TextStreamOptions, Tokenizer};
use kvik_types::hash::KvikChain;
use kvik_types::{BlockHash, BlockSize, Dtype, Namespace, TokenId};

use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::forward::{Backend, Logits};
use crate::paging::{BLOCK_TOKENS, BlockPool, PoolStats};
use crate::sampling::{Sampler, mix};

use ended::Loans;
use hashes::BlockHashes;
use pass_times::PassTimes;
use resident::Residents;
use sequence::{Sequence, n_reusable_blocks};
use staged::Stages;

/// How requests are batched.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineOptions {
    /// Most token rows in one forward pass; a longer prompt is computed in chunks. At least 1.
    /// Default: 512.
    pub max_batched_tokens: usize,
    /// Most sequences that are admitted at a time. At least 1. Default: 64.
    pub max_sequences: usize,
    /// Whether a prompt may start from blocks that earlier requests have left. Default: true.
    pub reuses_prefixes: bool,
    /// Tokens that stand before a segment while it is computed, and are dropped afterwards. Default: none, a segment is
    /// computed alone.
    pub segment_priming: Vec<TokenId>,
    /// Seed of requests that bring none; each gets another one derived from it. Default: 0.
    pub seed: u64,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_batched_tokens: 512,
            max_sequences: 64,
            reuses_prefixes: true,
            segment_priming: Vec::new(),
            seed: 0,
        }
    }
}

/// Counts of an engine since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EngineStats {
    /// Token rows computed, those of preempted sequences each time.
    pub n_computed_tokens: u64,
    /// Tokens that these rows looked at, themselves included: what attention costs is in proportion to it.
    pub n_attended_tokens: u64,
    /// Prompt tokens whose KV was there already.
    pub n_cached_tokens: u64,
    /// Of these, tokens whose KV came in with their request.
    pub n_loaded_tokens: u64,
    /// Tokens chosen.
    pub n_generated_tokens: u64,
    /// Times a sequence had to give its blocks back.
    pub n_preemptions: u64,
    /// Blocks copied because a sequence wrote to a shared one.
    pub n_block_copies: u64,
    /// Forward passes.
    pub n_steps: u64,
    /// Of these, passes that began before all layers of KV from outside had come.
    pub n_passes_ahead: u64,
}

/// Runs many requests on one backend.
#[derive(Debug)]
pub struct Engine {
    backend: Box<dyn Backend>,
    tokenizer: Option<Arc<Tokenizer>>,
    namespace: Namespace,
    /// The parent of the first block of every sequence without a salt.
    root: BlockHash,
    block_size: BlockSize,
    options: EngineOptions,
    pool: BlockPool,
    /// In order of arrival; a preempted sequence returns to its place.
    waiting: VecDeque<Sequence>,
    /// In order of arrival.
    running: Vec<Sequence>,
    residents: Residents,
    stages: Stages,
    kv_sink: Option<Box<dyn KvSink>>,
    /// Blocks of ended sequences that are being copied.
    loans: Loans,
    sampler: Sampler,
    logits: Logits,
    n_submitted: u64,
    /// Whether the last step could not run anything for want of memory.
    is_starved: bool,
    /// Why the device can no longer be used.
    lost_device: Option<String>,
    pass_times: PassTimes,
    stats: EngineStats,
}

impl Engine {
    /// An engine without requests.
    ///
    /// `namespace` says what KV may be mixed with that of this engine. Without a tokenizer, events
    /// carry no text and stop strings are refused.
    ///
    /// # Errors
    /// If an option is out of its range.
    pub fn new(
        mut backend: Box<dyn Backend>,
        tokenizer: Option<Arc<Tokenizer>>,
        namespace: &Namespace,
        options: EngineOptions,
    ) -> Result<Self> {
        if options.max_batched_tokens == 0 {
            return Err(ModelError::request("max_batched_tokens", 0, "at least 1"));
        }
        if options.max_sequences == 0 {
            return Err(ModelError::request("max_sequences", 0, "at least 1"));
        }
        let block_size = BlockSize::try_new(BLOCK_TOKENS)
            .map_err(|error| ModelError::request("block size", BLOCK_TOKENS, error.to_string()))?;
        Ok(Self {
            pool: match backend.take_memory() {
                Some(memory) => BlockPool::with_memory(memory),
                None => BlockPool::new(backend.n_blocks()),
            },
            namespace: namespace.clone(),
            root: namespace.seed(),
            block_size,
            pass_times: PassTimes::new(backend.config()),
            backend,
            tokenizer,
            options,
            waiting: VecDeque::new(),
            running: Vec::new(),
            residents: Residents::default(),
            stages: Stages::default(),
            kv_sink: None,
            loans: Loans::default(),
            sampler: Sampler::default(),
            logits: Logits::default(),
            n_submitted: 0,
            is_starved: false,
            lost_device: None,
            stats: EngineStats::default(),
        })
    }

    /// Counts since the start.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// The state of the block pool.
    pub fn pool_stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// Whether no request is waiting or running.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Whether a step would advance a request: some may be waiting for credits, or for KV.
    pub fn has_work(&self) -> bool {
        let can_advance = |sequence: &Sequence| !sequence.is_paused() && !sequence.is_waiting_for_kv();
        self.running.iter().any(can_advance) || self.waiting.iter().any(|sequence| !sequence.is_paused())
    }

    /// Whether a request waits for KV from outside: look for work again soon.
    pub fn is_waiting_for_kv(&self) -> bool {
        self.running.iter().any(Sequence::is_waiting_for_kv)
    }

    /// The model that runs.
    pub fn config(&self) -> &ModelConfig {
        self.backend.config()
    }

    /// Type in which keys and values are kept.
    pub fn kv_dtype(&self) -> Dtype {
        self.backend.kv_dtype()
    }

    /// Number of sequences in the batch.
    pub fn n_running(&self) -> usize {
        self.running.len()
    }

    /// Number of sequences that wait for admission.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Tokens left to compute: of prompts, and of outputs as far as their limit.
    pub fn outstanding_tokens(&self) -> usize {
        let longest = self.max_sequence_tokens();
        self.running.iter().chain(&self.waiting).map(|sequence| sequence.n_outstanding(longest)).sum()
    }

    /// Tokens left to compute before the next token of each output.
    pub fn pending_tokens(&self) -> usize {
        let sequences = self.running.iter().chain(&self.waiting).filter(|sequence| !sequence.is_paused());
        sequences.map(Sequence::n_pending).sum()
    }

    /// Longest sequence, prompt and output together, that a request can have: the model's context,
    /// or the most that the pool could have if that is smaller.
    pub fn max_sequence_tokens(&self) -> usize {
        self.backend.config().max_positions.min(self.pool.limit_blocks().saturating_mul(BLOCK_TOKENS))
    }

    /// Tokens whose KV fits into all blocks that there can be.
    pub fn capacity_tokens(&self) -> u64 {
        (self.backend.n_blocks() as u64).saturating_mul(BLOCK_TOKENS as u64)
    }

    /// Forgets all prefixes that earlier requests have left.
    pub fn forget_prefixes(&mut self) {
        self.pool.forget_free();
    }

    /// Takes a request; its events come from [`Engine::step`].
    ///
    /// An output ends at the longest possible sequence even if `max_tokens` allows more.
    ///
    /// # Errors
    /// [`ModelError::InvalidRequest`] if a field is out of its range, a token is not in the
    /// vocabulary or the prompt leaves no room for an output; nothing was taken then.
    pub fn submit(&mut self, request: GenerateRequest) -> Result<RequestId> {
        self.submit_with(request, SubmitOptions::default())
    }

    /// Takes a request that has a name or is stepped by its client.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit_with(&mut self, request: GenerateRequest, options: SubmitOptions) -> Result<RequestId> {
        let prepared = self.prepare(request, options);
        self.submit_prepared(prepared, None)
    }

    /// Hashes the prompt of a request, once for all that is done with it.
    pub fn prepare(&self, request: GenerateRequest, options: SubmitOptions) -> PreparedRequest {
        let root = self.root.salted(options.salt.as_ref());
        let mut hashes = BlockHashes::new(KvikChain::after(root, self.block_size));
        if self.options.reuses_prefixes {
            hashes.extend_to(n_reusable_blocks(request.prompt.len()), &request.prompt);
        }
        PreparedRequest { request, options, hashes, attachment: None }
    }

    /// Takes a request that this engine has prepared and that may bring KV of its prompt along.
    ///
    /// What of it lies behind the blocks that the engine has is copied and registered at the first admission,
    /// as far as there is room, and what comes later as soon as the computed part reaches it; `prefix` is dropped when no
    /// more of it can come, or when the request ends before.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit_prepared(
        &mut self,
        prepared: PreparedRequest,
        prefix: Option<Arc<dyn PrefixKv>>,
    ) -> Result<RequestId> {
        let request = &prepared.request;
        request.sampling.validate()?;
        let n_prompt = request.prompt.len();
        let longest = self.max_sequence_tokens();
        if n_prompt == 0 || longest <= n_prompt {
            let limit = if longest < self.backend.config().max_positions { "KV pool" } else { "context" };
            let allowed = format!("1 to {} tokens, by the {limit}", longest.saturating_sub(1));
            return Err(ModelError::request("prompt", format!("{n_prompt} tokens long"), allowed));
        }
        let vocab_size = self.backend.config().vocab_size;
        if let Some(token) = request.prompt.iter().find(|&&token| vocab_size <= token as usize) {
            return Err(ModelError::request("prompt", token, format!("token ids below {vocab_size}")));
        }
        let text = self.text_stream(&request.sampling.stop)?;
        let id = RequestId(self.n_submitted);
        let seed = request.sampling.seed.unwrap_or_else(|| mix(self.options.seed ^ mix(id.0)));
        self.n_submitted += 1;
        let sequence = Sequence::new(id, prepared, seed, text, prefix);
        self.waiting.push_back(sequence);
        Ok(id)
    }

    /// Lets a request that is stepped by its client choose `n` more tokens.
    pub fn grant(&mut self, id: RequestId, n: u32) {
        for sequence in self.running.iter_mut().chain(&mut self.waiting) {
            if sequence.request == id {
                sequence.grant(n);
            }
        }
    }

    /// Ends a request without further events and forgets it; does nothing if it has ended.
    pub fn cancel(&mut self, id: RequestId) {
        for sequence in self.take_running(id) {
            self.offer(&sequence);
            sequence.release(&mut self.pool);
        }
        self.waiting.retain(|sequence| sequence.request != id);
    }

    /// Takes the sequences of a request out of the running ones.
    fn take_running(&mut self, id: RequestId) -> Vec<Sequence> {
        self.running.extract_if(.., |sequence| sequence.request == id).collect()
    }

    fn text_stream(&self, stop: &[String]) -> Result<Option<TextStream>> {
        match &self.tokenizer {
            Some(tokenizer) => {
                let options = TextStreamOptions { stop: stop.to_vec(), ..TextStreamOptions::default() };
                Ok(Some(TextStream::try_new(Arc::clone(tokenizer), options)?))
            }
            None if stop.is_empty() => Ok(None),
            None => Err(ModelError::request("stop", format!("{stop:?}"), "nothing: there is no tokenizer")),
        }
    }
}

#[cfg(test)]
mod tests;
