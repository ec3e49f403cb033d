//! What the engine's thread sends to the waiter of a request.

use std::time::Instant;

use kvik_model::{BlendUsage, FinishReason, ModelError, TokenLogprobs};
use kvik_proto::journal::MoveNotice;
use kvik_proto::openai::CachedTiers;
use tokio::sync::mpsc;

/// Something that happened to a request.
#[derive(Debug)]
pub(crate) enum Event {
    /// The engine took it; always the first event but for [`Event::Rejected`].
    Accepted {
        /// The seed of its random choices.
        seed: u64,
    },
    /// The engine refused it; the last event.
    Rejected(ModelError),
    /// Its prompt was admitted.
    Admitted {
        /// Prompt tokens whose KV was there already.
        cached_tokens: usize,
        /// Where they were.
        tiers: CachedTiers,
        /// When the step began that computes the first of it.
        at: Instant,
    },
    /// An output grew.
    Token(Token),
    /// An output ended.
    Finished {
        /// Which output, from 0.
        choice: u32,
        /// Text that was held back.
        text: String,
        reason: FinishReason,
        usage: Usage,
    },
    /// It cannot go on; the last event.
    Failed(String),
    /// The worker ends before it; the last event. Another worker could go on with it.
    Stopped(StopCause),
    /// It is frozen, after everything that was sent before; it goes on elsewhere, or here when it is thawed.
    Frozen(Option<MoveNotice>),
}

/// Why a worker ends before its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopCause {
    /// It was told to, or its engine panicked.
    Ended,
    /// Its device failed, with all KV that was on it.
    DeviceLost,
}

impl StopCause {
    /// What the client of such a request is told.
    pub(crate) fn message(self) -> &'static str {
        match self {
            Self::Ended => "the worker has ended",
            Self::DeviceLost => "the worker has lost its device and ends; try again",
        }
    }
}

/// Tokens that an output used.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    /// Of these, tokens whose KV was there already.
    pub(crate) cached_tokens: usize,
    /// The same by where they came from.
    pub(crate) tiers: CachedTiers,
    pub(crate) completion_tokens: usize,
    pub(crate) blend: BlendUsage,
}

/// A token of an output.
#[derive(Debug)]
pub(crate) struct Token {
    /// Which output, from 0.
    pub(crate) choice: u32,
    pub(crate) id: u32,
    /// Text that became final.
    pub(crate) text: String,
    pub(crate) logprobs: Option<TokenLogprobs>,
    /// Whether the next event is the end of the output.
    pub(crate) is_last: bool,
}

/// Where the events of a request go, with the prompt's place in the request.
pub(crate) type EventSender = mpsc::UnboundedSender<(usize, Event)>;

impl Usage {
    pub(crate) fn new(usage: kvik_model::Usage, tiers: CachedTiers) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            tiers,
            completion_tokens: usage.completion_tokens,
            blend: usage.blend,
        }
    }
}
