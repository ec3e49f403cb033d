//! What a request of a generating path asks for, before anything is done for it.
//!
//! A plan is a function of the path, the body and the model. So a request that goes on here is planned from its body
//! again, and everything that its answer looks like is as it was.

use std::ops::Range;

use bytes::Bytes;
use kvik_model::{SamplingParams, Selectors};
use kvik_proto::openai::StreamOptions;
use kvik_types::CacheSalt;

use crate::error::Refusal;

/// A path whose requests generate outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GenerationPath {
    Completions,
    Chat,
    Generate,
    /// Begins a sequence that its client steps.
    Init,
}

/// The form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Whole,
    Stream { includes_usage: bool },
}

/// What a request asks for.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) path: GenerationPath,
    pub(crate) body: Bytes,
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) sampling: SamplingParams,
    pub(crate) seq_id: Option<String>,
    pub(crate) salt: Option<CacheSalt>,
    /// How the only prompt is put together.
    pub(crate) blend: Option<BlendPart>,
    pub(crate) form: Form,
    pub(crate) returns_tokens: bool,
    /// For each prompt: what stands before its outputs. Only completions have it.
    pub(crate) echoes: Vec<String>,
}

/// A prompt that is put together from segments.
#[derive(Debug, Clone)]
pub(crate) struct BlendPart {
    /// Where they are in the prompt, one behind the other.
    pub(crate) segments: Vec<Range<usize>>,
    pub(crate) selectors: Selectors,
}

/// How prompts are put together where their requests do not say.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlendDefaults {
    /// `None`: segments are not used then.
    pub(crate) selectors: Option<Selectors>,
    /// What stands between the parts of text prompts.
    pub(crate) separator: Option<String>,
    /// Segments with fewer tokens are computed.
    pub(crate) min_tokens: usize,
}

impl GenerationPath {
    pub(crate) const ALL: [Self; 4] = [Self::Completions, Self::Chat, Self::Generate, Self::Init];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Generate => "/inference/generate",
            Self::Init => kvik_proto::moves::INIT_PATH,
        }
    }

    /// The path with this name.
    pub(crate) fn of(name: &str) -> Result<Self, Refusal> {
        let path = Self::ALL.into_iter().find(|path| path.as_str() == name);
        let allowed = Self::ALL.map(Self::as_str).join(", ");
        path.ok_or_else(|| Refusal::field("path", format!("`{name}`"), &allowed))
    }
}

impl Plan {
    /// Outputs of all prompts.
    pub(crate) fn n_outputs(&self) -> usize {
        self.prompts.len().saturating_mul(self.sampling.n as usize)
    }

    /// The number of an output among all.
    pub(crate) fn output_number(&self, part_idx: usize, choice: u32) -> u32 {
        (part_idx as u32).wrapping_mul(self.sampling.n).wrapping_add(choice)
    }
}

impl Form {
    /// The form that the fields of a request ask for.
    pub(crate) fn of(stream: Option<bool>, options: Option<StreamOptions>) -> Result<Self, Refusal> {
        match (stream.unwrap_or(false), options) {
            (true, options) => {
                let includes_usage = options.is_some_and(|options| options.include_usage == Some(true));
                Ok(Self::Stream { includes_usage })
            }
            (false, None) => Ok(Self::Whole),
            (false, Some(_)) => {
                Err(Refusal::field("stream_options", "given without `stream`", "with `stream`: true"))
            }
        }
    }
}
