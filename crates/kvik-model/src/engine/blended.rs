//! Prompts that are put together from segments, and segments that are computed.
//!
//! A blended sequence takes all its blocks at its admission, where its segments are placed and its selectors asked. From then
//! on it has rows at positions of their own until its prompt is done, and grows like any other afterwards.

use std::ops::Range;
use std::sync::Arc;

use kvik_types::TokenId;

use super::Engine;
use super::begun::Begun;
use super::blend_rows::BlendUsage;
use super::lost_device::lose;
use super::request::{EngineEvent, GenerateRequest, PreparedRequest, RequestId, SubmitOptions};
use super::sequence::Sequence;
use crate::blend::{Assembled, Blend, BlendSegment, BlendedPrompt, ComputedSegment, SegmentKv};
use crate::config::Position;
use crate::error::{ModelError, Result};
use crate::forward::LayerKv;
use crate::paging::BlockId;
use crate::sampling::SamplingParams;

impl Engine {
    /// Takes a request whose prompt is put together from segments; `begun` says how far another engine has come with it.
    ///
    /// Its KV is approximate: it is found by no other request and offered to no store.
    ///
    /// # Errors
    /// As [`Engine::submit`]; also if the segments do not lie in the prompt one behind the other, the request has a name, or
    /// the model's positions cannot be changed.
    pub fn submit_blended(
        &mut self,
        prepared: PreparedRequest,
        begun: Option<&Begun>,
        blend: Blend,
    ) -> Result<RequestId> {
        if prepared.options.name.is_some() {
            let allowed = "none: a sequence that goes on later must be exact";
            return Err(ModelError::request("seq_id", "a name for a blended prompt", allowed));
        }
        self.check_segments()?;
        blend.validate(prepared.request.prompt.len())?;
        let id = match begun {
            None => self.submit_prepared(prepared, None)?,
            Some(begun) => self.submit_begun(prepared, begun, None)?,
        };
        let blend = Arc::new(blend);
        for sequence in self.waiting.iter_mut().filter(|sequence| sequence.request == id) {
            sequence.set_blend(Arc::clone(&blend));
        }
        Ok(id)
    }

    /// Computes the keys and values of `tokens` behind the [priming context](Engine::segment_priming) alone; its only event after the
    /// admission is [`EngineEvent::Segment`].
    ///
    /// # Errors
    /// As [`Engine::submit`]; also if the model's positions cannot be changed.
    pub fn submit_segment(&mut self, tokens: &[TokenId]) -> Result<RequestId> {
        self.check_segments()?;
        if tokens.is_empty() {
            return Err(ModelError::request("segments", "no token", "at least one token in each"));
        }
        let prompt = [self.segment_priming(), tokens].concat();
        let request = GenerateRequest { prompt, sampling: SamplingParams::greedy(1) };
        let id = self.submit_with(request, SubmitOptions::default())?;
        if let Some(sequence) = self.waiting.back_mut() {
            sequence.set_segment();
        }
        Ok(id)
    }

    /// Tokens that stand before a segment while it is computed; see [`EngineOptions::segment_priming`](super::EngineOptions).
    pub fn segment_priming(&self) -> &[TokenId] {
        &self.options.segment_priming
    }

    fn check_segments(&self) -> Result<()> {
        match self.backend.config().position {
            Position::Rope(_) => Ok(()),
            Position::Learned => {
                let allowed = "none: this model's positions are learned and part of every key and value";
                Err(ModelError::request("segments", "given", allowed))
            }
        }
    }

    /// Puts the prompt of a sequence together; false if it has to wait for blocks. One that cannot be put together has failed.
    pub(super) fn assemble_or_fail(
        &mut self,
        sequence: &mut Sequence,
        events: &mut Vec<EngineEvent>,
    ) -> bool {
        match self.assemble(sequence) {
            Ok(is_assembled) => is_assembled,
            Err(error) => {
                events.push(EngineEvent::Failed { request: sequence.request, error });
                sequence.set_failed();
                true
            }
        }
    }

    /// Puts the prompt of a sequence together on blocks of its own; false if there are not enough of them now.
    fn assemble(&mut self, sequence: &mut Sequence) -> Result<bool> {
        let Some(blend) = sequence.blend().cloned() else { return Ok(true) };
        let n_tokens = sequence.tokens().len();
        for _ in 0..sequence.n_missing_blocks(n_tokens) {
            let Some(block) = self.pool.allocate() else { return Ok(false) };
            sequence.push_block(block);
        }
        let segments: Vec<Range<usize>> = blend
            .segments
            .iter()
            .filter(|segment| self.place(sequence.table(), segment.first_token, segment.kv.as_ref()))
            .map(BlendSegment::token_range)
            .collect();
        let prompt = BlendedPrompt { tokens: sequence.prompt(), segments: &segments };
        let mut is_selected = vec![false; prompt.tokens.len()];
        for selector in blend.selectors.as_slice() {
            let mut scores = Vec::new();
            if let Some(evidence) = selector.evidence().filter(|_| !segments.is_empty()) {
                let mut assembled = Assembled {
                    backend: self.backend.as_mut(),
                    tokens: prompt.tokens,
                    table: sequence.table(),
                    segments: &segments,
                    max_rows: self.options.max_batched_tokens,
                };
                scores = assembled.scores(evidence)?;
            }
            selector.select(&prompt, &scores, &mut is_selected);
        }
        let usage = BlendUsage {
            blended_tokens: segments.iter().map(Range::len).sum(),
            recomputed_tokens: is_selected.iter().filter(|&&is_selected| is_selected).count(),
        };
        let mut is_computed = vec![true; n_tokens];
        for segment in segments {
            is_computed[segment.clone()].copy_from_slice(&is_selected[segment]);
        }
        // Its logits are needed.
        if let Some(last) = is_computed.last_mut() {
            *last = true;
        }
        let rows: Vec<u32> = (0..n_tokens as u32).filter(|&at| is_computed[at as usize]).collect();
        sequence.set_rows(rows, usage);
        Ok(true)
    }

    /// Places a segment in all layers; false if a part of it is missing or has the wrong size. Its place has no meaning then.
    fn place(&mut self, table: &[BlockId], first_token: usize, kv: &dyn SegmentKv) -> bool {
        let token_bytes = self.token_layer_bytes();
        let turned_by = first_token as i64 - kv.first_position() as i64;
        (0..self.backend.config().n_layers).all(|layer_idx| {
            let mut n_placed = 0;
            let is_whole = (0..kv.n_parts()).all(|part_idx| {
                let Some(part) = kv.part(layer_idx, part_idx) else { return false };
                let n_tokens = part.keys.len() / token_bytes.max(1);
                let is_inside = n_placed + n_tokens <= kv.n_tokens();
                let first = first_token + n_placed;
                n_placed += n_tokens;
                is_inside && self.backend.place_kv(layer_idx, table, first, turned_by, part).is_ok()
            });
            is_whole && n_placed == kv.n_tokens()
        })
    }

    /// Bytes of the keys, or of the values, of one token in one layer.
    fn token_layer_bytes(&self) -> usize {
        let config = self.backend.config();
        config.n_kv_heads * config.head_dim * self.backend.kv_dtype().size_bytes()
    }

    /// Hands out what a segment's sequence has computed and ends it.
    pub(super) fn end_segment(&mut self, idx: usize, events: &mut Vec<EngineEvent>) {
        let sequence = &mut self.running[idx];
        let (tokens, table) = (sequence.tokens().to_vec(), sequence.table().to_vec());
        sequence.set_finished();
        let request = sequence.request;
        let n_layers = self.backend.config().n_layers;
        let first_position = self.options.segment_priming.len();
        let layers = (0..n_layers).map(|layer_idx| {
            let LayerKv { n_tokens, mut keys, mut values } =
                self.backend.export_kv(layer_idx, &table, tokens.len())?;
            let priming_bytes = keys.len() / n_tokens.max(1) * first_position;
            keys.drain(..priming_bytes);
            values.drain(..priming_bytes);
            Ok(LayerKv { n_tokens: n_tokens - first_position, keys, values })
        });
        let layers = match layers.collect::<Result<_>>() {
            Ok(layers) => layers,
            Err(error) => return lose(&mut self.lost_device, &error),
        };
        let tokens = tokens[first_position..].to_vec();
        let segment = Box::new(ComputedSegment { tokens, first_position, layers });
        events.push(EngineEvent::Segment { request, segment });
    }
}
