//! One output in the making: its tokens, its blocks, its text.

mod blocks;
mod incoming;

use std::any::Any;
use std::sync::Arc;

use kvik_tokens::TextStream;
use kvik_types::{BlockHash, CacheSalt, TokenId};

use super::blend_rows::{BlendUsage, Blended};
use super::hashes::BlockHashes;
use super::prefix::PrefixKv;
use super::request::{EngineEvent, FinishReason, PreparedRequest, RequestId, TokenEvent, Usage};
use crate::blend::Blend;
use crate::forward::RowPositions;
use crate::paging::{BLOCK_TOKENS, BlockId, BlockPool};
use crate::sampling::{SamplerInput, SamplingParams, TokenCounts, TokenLogprobs};

pub(super) use incoming::Incoming;

/// Names a sequence: its request and choice. Sequences are ordered by arrival.
pub(super) type SequenceKey = (RequestId, u32);

/// An output and the KV it stands on.
///
/// Invariant: `table` covers at least the first `n_computed` tokens, and their keys and values lie
/// there; the first `n_registered` blocks are registered or will never be.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: RequestId,
    choice: u32,
    sampling: SamplingParams,
    seed: u64,
    /// Prompt and output.
    tokens: Vec<TokenId>,
    n_prompt: usize,
    n_computed: usize,
    table: Vec<BlockId>,
    n_registered: usize,
    hashes: BlockHashes,
    /// Keeps its KV apart from that of requests with other salts or none.
    salt: Option<CacheSalt>,
    /// What the sink gets with it.
    attachment: Option<Arc<dyn Any + Send + Sync>>,
    /// KV that came in with the request, until all of it is copied or passed, or the sequence is preempted.
    prefix: Option<Arc<dyn PrefixKv>>,
    /// What of the prefix is being copied.
    incoming: Option<Incoming>,
    cached: Cached,
    /// Of these, tokens whose KV came in with the request.
    n_loaded: usize,
    /// Choices that still share this sequence, until the first token is chosen.
    n_forks: u32,
    counts: Option<TokenCounts>,
    text: Option<TextStream>,
    /// Name under which the sequence stays resident.
    name: Option<String>,
    /// Tokens that may still be chosen; `None`: no limit.
    credits: Option<u32>,
    /// Whether it waits to go on here or elsewhere.
    is_frozen: bool,
    /// Whether `table` was taken over from the resident of this name.
    has_resident: bool,
    /// Whether some of the KV in `table` came from outside; such blocks are never registered.
    is_foreign: bool,
    kind: Kind,
    phase: Phase,
}

/// How the prompt is computed.
#[derive(Debug, Clone)]
enum Kind {
    Plain,
    /// Put together from segments: approximate.
    Blended(Blended),
    /// Only its keys and values are wanted.
    Segment,
}

/// Prompt tokens whose KV was there at the first admission, or came in with the request since.
#[derive(Debug, Clone, Copy)]
enum Cached {
    Unknown,
    /// More may come.
    Counted(usize),
    /// They were reported.
    Told(usize),
}

/// How far an output has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Growing,
    Finished,
    /// Its logits were not finite: its KV is not offered.
    Failed,
}

/// The blocks of a prompt that may be found: at least its last token is computed, because its logits are needed.
pub(super) fn n_reusable_blocks(n_prompt_tokens: usize) -> usize {
    n_prompt_tokens.saturating_sub(1) / BLOCK_TOKENS
}

impl Sequence {
    pub(super) fn new(
        request: RequestId,
        prepared: PreparedRequest,
        seed: u64,
        text: Option<TextStream>,
        prefix: Option<Arc<dyn PrefixKv>>,
    ) -> Self {
        let PreparedRequest { request: generate, options, hashes, attachment } = prepared;
        Self {
            request,
            choice: 0,
            seed,
            n_prompt: generate.prompt.len(),
            counts: TokenCounts::try_new(&generate.sampling, &generate.prompt),
            n_forks: generate.sampling.n - 1,
            sampling: generate.sampling,
            tokens: generate.prompt,
            n_computed: 0,
            table: Vec::new(),
            n_registered: 0,
            hashes,
            salt: options.salt,
            attachment,
            prefix,
            incoming: None,
            cached: Cached::Unknown,
            n_loaded: 0,
            text,
            name: options.name,
            credits: options.credits,
            is_frozen: false,
            has_resident: false,
            is_foreign: false,
            kind: Kind::Plain,
            phase: Phase::Growing,
        }
    }

    pub(super) fn key(&self) -> SequenceKey {
        (self.request, self.choice)
    }

    pub(super) fn sampling(&self) -> &SamplingParams {
        &self.sampling
    }

    pub(super) fn table(&self) -> &[BlockId] {
        &self.table
    }

    pub(super) fn n_computed(&self) -> usize {
        self.n_computed
    }

    /// Tokens that have KV when the next `n_rows` rows are computed.
    pub(super) fn n_covered(&self, n_rows: usize) -> usize {
        self.next_token() + n_rows
    }

    /// Tokens whose keys and values are not computed yet.
    pub(super) fn n_pending(&self) -> usize {
        self.placed().map_or(self.tokens.len() - self.next_token(), Blended::n_pending)
    }

    /// The next `n_rows` tokens to compute, and their positions.
    pub(super) fn pending(&self, n_rows: usize) -> (&[TokenId], RowPositions<'_>) {
        if let Some(blended) = self.placed() {
            return blended.pending(n_rows);
        }
        let next_token = self.next_token();
        (&self.tokens[next_token..next_token + n_rows], RowPositions::From(next_token))
    }

    /// The rows of a prompt whose segments lie in their places, while some are left.
    fn placed(&self) -> Option<&Blended> {
        self.blended().filter(|blended| 0 < blended.n_pending())
    }

    fn blended(&self) -> Option<&Blended> {
        if let Kind::Blended(blended) = &self.kind { Some(blended) } else { None }
    }

    /// Prompt and output.
    pub(super) fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub(super) fn prompt(&self) -> &[TokenId] {
        &self.tokens[..self.n_prompt]
    }

    pub(super) fn blend(&self) -> Option<&Arc<Blend>> {
        self.blended().map(|blended| &blended.blend)
    }

    pub(super) fn set_blend(&mut self, blend: Arc<Blend>) {
        self.kind = Kind::Blended(Blended::new(blend));
    }

    pub(super) fn set_segment(&mut self) {
        self.kind = Kind::Segment;
    }

    pub(super) fn is_segment(&self) -> bool {
        matches!(self.kind, Kind::Segment)
    }

    /// Whether its KV may be that of an exact prefix.
    pub(super) fn is_exact(&self) -> bool {
        matches!(self.kind, Kind::Plain)
    }

    /// Computes the tokens at the positions `rows`, which are not empty: all others were placed. Its blocks are never registered.
    pub(super) fn set_rows(&mut self, rows: Vec<u32>, usage: BlendUsage) {
        self.is_foreign = true;
        self.n_computed = rows.first().map_or(0, |&position| position as usize);
        let tokens = rows.iter().map(|&position| self.tokens[position as usize]).collect();
        if let Kind::Blended(blended) = &mut self.kind {
            blended.set_rows(rows, tokens, usage);
        }
    }

    pub(super) fn set_finished(&mut self) {
        self.phase = Phase::Finished;
    }

    pub(super) fn is_finished(&self) -> bool {
        self.phase != Phase::Growing
    }

    /// Ends the sequence because its logits were not finite.
    pub(super) fn set_failed(&mut self) {
        self.phase = Phase::Failed;
    }

    pub(super) fn is_named(&self, name: &str) -> bool {
        self.name.as_deref() == Some(name)
    }

    pub(super) fn salt(&self) -> Option<&CacheSalt> {
        self.salt.as_ref()
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether the sequence has to wait, frozen or for credits, before it may advance.
    pub(super) fn is_paused(&self) -> bool {
        self.is_frozen || self.credits == Some(0)
    }

    pub(super) fn set_frozen(&mut self, is_frozen: bool) {
        self.is_frozen = is_frozen;
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// Goes on from tokens that another engine has chosen, and reported; at its admission there `n_cached` tokens of the
    /// prompt were cached.
    pub(super) fn go_on_from(&mut self, tokens: &[TokenId], n_cached: Option<usize>) {
        // Of the other choices nothing is reported but their own tokens.
        let n_cached = if self.choice == 0 { n_cached } else { Some(0) };
        self.cached = n_cached.map_or(Cached::Unknown, Cached::Told);
        for &token in tokens {
            self.tokens.push(token);
            if let Some(counts) = &mut self.counts {
                counts.push(token);
            }
            if let Some(text) = &mut self.text {
                text.push(token);
            }
        }
    }

    pub(super) fn grant(&mut self, n: u32) {
        self.credits = self.credits.map(|credits| credits.saturating_add(n));
    }

    /// The tokens whose keys and values lie in the table.
    pub(super) fn computed_tokens(&self) -> &[TokenId] {
        &self.tokens[..self.n_computed]
    }

    /// Tokens left to compute: of the prompt, and of the output as far as its limit.
    pub(super) fn n_outstanding(&self, longest: usize) -> usize {
        let end = longest.min(self.n_prompt.saturating_add(self.sampling.max_tokens as usize));
        end.saturating_sub(self.n_computed)
    }

    /// Number of further choices to fork off.
    pub(super) fn n_forks(&self) -> u32 {
        self.n_forks
    }

    /// Number of further choices to fork off, once.
    pub(super) fn take_forks(&mut self) -> u32 {
        std::mem::take(&mut self.n_forks)
    }

    pub(super) fn n_prompt(&self) -> usize {
        self.n_prompt
    }

    /// The hashes of its full blocks.
    pub(super) fn hashes(&self) -> &[BlockHash] {
        self.hashes.as_slice()
    }

    pub(super) fn attachment(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.attachment.clone()
    }

    /// Another choice of the same request, on the same blocks.
    pub(super) fn fork(&self, choice: u32, text: Option<TextStream>, pool: &mut BlockPool) -> Self {
        for &block in &self.table {
            pool.retain(block);
        }
        Self {
            request: self.request,
            choice,
            sampling: self.sampling.clone(),
            seed: self.seed,
            tokens: self.tokens.clone(),
            n_prompt: self.n_prompt,
            n_computed: self.n_computed,
            table: self.table.clone(),
            n_registered: self.n_registered,
            hashes: self.hashes.clone(),
            salt: self.salt.clone(),
            attachment: self.attachment.clone(),
            prefix: None,
            incoming: None,
            cached: self.cached,
            n_loaded: self.n_loaded,
            n_forks: 0,
            counts: self.counts.clone(),
            text,
            name: None,
            credits: self.credits,
            is_frozen: self.is_frozen,
            has_resident: false,
            is_foreign: self.is_foreign,
            kind: self.kind.clone(),
            phase: Phase::Growing,
        }
    }

    pub(super) fn sampler_input(&self) -> SamplerInput<'_> {
        SamplerInput {
            params: &self.sampling,
            counts: self.counts.as_ref(),
            seed: self.seed,
            choice: self.choice,
            n_generated: (self.tokens.len() - self.n_prompt) as u64,
        }
    }

    /// Appends a chosen token and reports it; ends the sequence where that is its end.
    pub(super) fn push_token(
        &mut self,
        token: TokenId,
        logprobs: Option<TokenLogprobs>,
        is_end_token: bool,
        longest: usize,
        events: &mut Vec<EngineEvent>,
    ) {
        self.tokens.push(token);
        self.credits = self.credits.map(|credits| credits.saturating_sub(1));
        if let Some(counts) = &mut self.counts {
            counts.push(token);
        }
        let delta = self.text.as_mut().map(|text| text.push(token)).unwrap_or_default();
        let is_stop = delta.stopped.is_some()
            || self.sampling.stop_token_ids.contains(&token)
            || (is_end_token && !self.sampling.ignore_eos);
        let (request, choice) = self.key();
        events.push(EngineEvent::Token(TokenEvent { request, choice, token, text: delta.text, logprobs }));
        let n_generated = self.tokens.len() - self.n_prompt;
        let is_longest = self.sampling.max_tokens as usize <= n_generated || longest <= self.tokens.len();
        if !is_stop && !is_longest {
            return;
        }
        self.phase = Phase::Finished;
        let text = self.text.as_mut().map(TextStream::finish).unwrap_or_default();
        let stopped_late = self.text.as_ref().is_some_and(|text| text.stopped().is_some());
        let reason = if is_stop || stopped_late { FinishReason::Stop } else { FinishReason::Length };
        let usage = Usage {
            prompt_tokens: self.n_prompt,
            cached_tokens: match self.cached {
                Cached::Unknown => 0,
                Cached::Counted(n_cached) | Cached::Told(n_cached) => n_cached,
            },
            loaded_tokens: self.n_loaded,
            completion_tokens: n_generated,
            blend: self.blended().map(|blended| blended.usage).unwrap_or_default(),
        };
        events.push(EngineEvent::Finished { request, choice, text, reason, usage });
    }
}
