//! What goes into the engine and what comes out.

use std::any::Any;
use std::sync::Arc;

use kvik_types::{CacheSalt, TokenId};

use super::blend_rows::BlendUsage;
use super::hashes::BlockHashes;
use crate::blend::ComputedSegment;
use crate::error::ModelError;
use crate::sampling::{SamplingParams, TokenLogprobs};

/// Names a request for the life of its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

/// A prompt and what to make of it.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// The prompt's tokens.
    pub prompt: Vec<TokenId>,
    /// How tokens are chosen and when an output ends.
    pub sampling: SamplingParams,
}

/// How a request is run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubmitOptions {
    /// Name under which the first choice stays resident after its end, and whose resident it
    /// continues. Default: none.
    pub name: Option<String>,
    /// Tokens that may be chosen until more are granted. Default: no limit.
    pub credits: Option<u32>,
    /// Keeps the KV apart from that of requests with other salts or none. Default: none.
    pub salt: Option<CacheSalt>,
}

/// A request whose prompt is hashed, by the engine that it is for.
#[derive(Debug)]
pub struct PreparedRequest {
    pub(super) request: GenerateRequest,
    pub(super) options: SubmitOptions,
    /// Of the blocks that the engine may have.
    pub(super) hashes: BlockHashes,
    pub(super) attachment: Option<Arc<dyn Any + Send + Sync>>,
}

impl PreparedRequest {
    /// The request.
    pub fn request(&self) -> &GenerateRequest {
        &self.request
    }

    /// Attaches what the sink gets with the ended sequences of this request; the engine does not look at it.
    pub fn attach(&mut self, attachment: Arc<dyn Any + Send + Sync>) {
        self.attachment = Some(attachment);
    }

    /// How it is run.
    pub fn options(&self) -> &SubmitOptions {
        &self.options
    }
}

/// Why an output ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the longest possible sequence.
    Length,
}

impl FinishReason {
    /// The reason as it is spelled on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A token of an output.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// The request.
    pub request: RequestId,
    /// Which of the request's choices, from 0.
    pub choice: u32,
    /// The token; an end token too.
    pub token: TokenId,
    /// Text that became final; often that of earlier tokens, and often empty.
    pub text: String,
    /// Log probabilities, if asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Tokens that a request used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens whose KV was there already.
    pub cached_tokens: usize,
    /// Of the cached tokens, those whose KV came in with the request.
    pub loaded_tokens: usize,
    /// Tokens of this output.
    pub completion_tokens: usize,
    /// Of the prompt's tokens, those that came from segments.
    pub blend: BlendUsage,
}

/// Something that happened to a request.
#[derive(Debug)]
#[non_exhaustive]
pub enum EngineEvent {
    /// A request was scheduled for the first time, and all KV that comes in with it has come; its first event, and the
    /// only one of its kind.
    Admitted {
        /// The request.
        request: RequestId,
        /// Prompt tokens whose KV was there already.
        cached_tokens: usize,
        /// Of these, tokens whose KV came in with the request.
        loaded_tokens: usize,
    },
    /// An output grew by a token.
    Token(TokenEvent),
    /// An output ended; its last event.
    Finished {
        /// The request.
        request: RequestId,
        /// Which of the request's choices, from 0.
        choice: u32,
        /// Text that was still held back.
        text: String,
        /// Why it ended.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
    /// A segment was computed; its last event.
    Segment {
        /// The request.
        request: RequestId,
        /// Its keys and values.
        segment: Box<ComputedSegment>,
    },
    /// A request could not go on; the last event of all its choices.
    Failed {
        /// The request.
        request: RequestId,
        /// What happened.
        error: ModelError,
    },
}
