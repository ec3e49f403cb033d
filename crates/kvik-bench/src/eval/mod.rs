//! What reuse costs in answers: questions over notes, with the notes' KV computed in full, blended or coded.

mod coded;
mod flops;
mod question;

pub use question::Question;

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_codec::{Codec, CodecError};
use kvik_model::{
    Blend, BlendSegment, BlendUsage, ComputedSegment, Engine, EngineEvent, GenerateRequest, Model,
    ModelError, SamplingParams, Selector, Selectors, SubmitOptions,
};
use kvik_tokens::AddSpecial;
use kvik_types::TokenId;
use serde::Serialize;

use coded::coded;
use flops::Flops;

/// Tokens that an answer may take beyond those of the right one: another may be longer before it differs.
const SPARE_ANSWER_TOKENS: u32 = 2;

/// What an evaluation cannot do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// The model refused something.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The codec refused something.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The tokenizer refused something.
    #[error(transparent)]
    Tokens(#[from] kvik_tokens::TokensError),
    /// The questions could not be read.
    #[error("read questions")]
    Io(#[from] io::Error),
    /// A line is not a question.
    #[error("line {line} is not a question: allowed: an object with `prompt` and `answer`")]
    InvalidQuestion {
        /// Its number, from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// There is nothing to evaluate.
    #[error("no question in the file: allowed: one JSON object a line with `prompt` and `answer`")]
    NoQuestion,
}

/// How the notes of a prompt are computed.
#[derive(Debug, Default)]
pub struct NotesOptions {
    /// Every note alone, with the tokens computed again that these choose; `None`: the prompt as a whole.
    pub blend: Option<Selectors>,
    /// What the KV of notes has been coded by before it is used. Without `blend`, all that stands before the question is
    /// computed as a whole, coded, and used as its prefix.
    pub codec: Option<Box<dyn Codec>>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NotesReport {
    /// Answers that begin as they should.
    pub right: usize,
    /// Questions.
    pub of: usize,
    /// Tokens of notes that were computed with all that stands before them; mean over the questions.
    pub recomputed_share: f64,
    /// Operations from the request to the first token, of those of full prefill; mean over the questions.
    pub flop_share: f64,
    /// Median time from the request to the first token, with all segments in memory.
    pub ttft_ms: f64,
}

/// An evaluation under way.
#[derive(Debug)]
pub struct NotesEval {
    engine: Engine,
    model: Model,
    options: NotesOptions,
    segments: HashMap<Vec<TokenId>, Arc<ComputedSegment>>,
    n_right: usize,
    shares: Vec<(f64, f64)>,
    first_tokens: Vec<Duration>,
}

/// A prompt in tokens.
#[derive(Debug)]
struct Prompt {
    tokens: Vec<TokenId>,
    notes: Vec<Range<usize>>,
}

/// What the engine made of a prompt.
#[derive(Debug, Default)]
struct Answer {
    text: String,
    first_token: Duration,
    blend: BlendUsage,
}

impl NotesOptions {
    /// With the codec of this name.
    ///
    /// # Errors
    /// If there is no such codec.
    pub fn new(blend: Option<Selectors>, codec: Option<&str>) -> Result<Self, EvalError> {
        Ok(Self { blend, codec: codec.map(kvik_codec::by_name).transpose()? })
    }
}

impl NotesEval {
    /// Begins an evaluation on an engine of `model` without prefix reuse.
    pub fn new(model: Model, engine: Engine, options: NotesOptions) -> Self {
        let (segments, shares, first_tokens) = (HashMap::new(), Vec::new(), Vec::new());
        Self { engine, model, options, segments, n_right: 0, shares, first_tokens }
    }

    /// Asks one question; says whether its answer is right.
    ///
    /// # Errors
    /// If the model refuses the prompt.
    pub fn ask(&mut self, question: &Question) -> Result<bool, EvalError> {
        let prompt = self.tokenize(question)?;
        let blend = match self.options.blend.clone() {
            None if self.options.codec.is_none() => None,
            None => Some(Blend { segments: self.prefix_of(&prompt)?, selectors: Selectors::default() }),
            Some(selectors) => Some(Blend { segments: self.segments_of(&prompt)?, selectors }),
        };
        let n_answer = self.model.tokenizer().encode(&question.answer, AddSpecial::No)?.len() as u32;
        let sampling = SamplingParams::greedy(n_answer + SPARE_ANSWER_TOKENS);
        let answer = self.run(&prompt, sampling, blend)?;
        let is_right = answer.text.starts_with(&question.answer);
        self.n_right += usize::from(is_right);
        self.first_tokens.push(answer.first_token);
        self.shares.push(self.shares_of(&prompt, answer.blend));
        Ok(is_right)
    }

    /// What came of the questions that were asked.
    pub fn report(&self) -> NotesReport {
        let of = self.shares.len();
        let mean =
            |share: fn(&(f64, f64)) -> f64| self.shares.iter().map(share).sum::<f64>() / of.max(1) as f64;
        let mut first_tokens = self.first_tokens.clone();
        first_tokens.sort_unstable();
        let median = first_tokens.get(of / 2).copied().unwrap_or_default();
        NotesReport {
            right: self.n_right,
            of,
            recomputed_share: mean(|shares| shares.0),
            flop_share: mean(|shares| shares.1),
            ttft_ms: median.as_secs_f64() * 1e3,
        }
    }

    /// Each part on its own, so that a note has the same tokens in every prompt.
    fn tokenize(&self, question: &Question) -> Result<Prompt, EvalError> {
        let tokenizer = self.model.tokenizer();
        let mut prompt = Prompt { tokens: Vec::new(), notes: Vec::new() };
        let mut end = 0;
        let push = |prompt: &mut Prompt, text: &str| -> Result<Range<usize>, EvalError> {
            let start = prompt.tokens.len();
            let special = if start == 0 { AddSpecial::Yes } else { AddSpecial::No };
            prompt.tokens.extend(tokenizer.encode(text, special)?);
            Ok(start..prompt.tokens.len())
        };
        for note in question.notes() {
            push(&mut prompt, &question.prompt[end..note.start])?;
            let range = push(&mut prompt, &question.prompt[note.clone()])?;
            prompt.notes.push(range);
            end = note.end;
        }
        push(&mut prompt, &question.prompt[end..])?;
        Ok(prompt)
    }

    fn segments_of(&mut self, prompt: &Prompt) -> Result<Vec<BlendSegment>, EvalError> {
        let notes = prompt.notes.iter();
        notes
            .map(|note| {
                let kv = self.segment(&prompt.tokens[note.clone()])?;
                Ok(BlendSegment { first_token: note.start, kv })
            })
            .collect()
    }

    /// All that stands before the question, as one segment at the start: exact but for the codec.
    fn prefix_of(&mut self, prompt: &Prompt) -> Result<Vec<BlendSegment>, EvalError> {
        let Some(end) = prompt.notes.last().map(|note| note.end) else { return Ok(Vec::new()) };
        Ok(vec![BlendSegment { first_token: 0, kv: self.segment(&prompt.tokens[..end])? }])
    }

    /// The KV of a segment, computed once.
    fn segment(&mut self, tokens: &[TokenId]) -> Result<Arc<ComputedSegment>, EvalError> {
        if let Some(segment) = self.segments.get(tokens) {
            return Ok(Arc::clone(segment));
        }
        self.engine.submit_segment(tokens)?;
        let mut computed = ComputedSegment { tokens: tokens.to_vec(), first_position: 0, layers: Vec::new() };
        for event in self.engine.run_until_idle()? {
            match event {
                EngineEvent::Segment { segment, .. } => computed = *segment,
                EngineEvent::Failed { error, .. } => return Err(error.into()),
                _ => {}
            }
        }
        if let Some(codec) = &self.options.codec {
            computed = coded(codec.as_ref(), self.model.config(), self.engine.kv_dtype(), &computed)?;
        }
        let computed = Arc::new(computed);
        self.segments.insert(tokens.to_vec(), Arc::clone(&computed));
        Ok(computed)
    }

    fn run(
        &mut self,
        prompt: &Prompt,
        sampling: SamplingParams,
        blend: Option<Blend>,
    ) -> Result<Answer, EvalError> {
        let request = GenerateRequest { prompt: prompt.tokens.clone(), sampling };
        let began = Instant::now();
        let prepared = self.engine.prepare(request, SubmitOptions::default());
        match blend {
            None => self.engine.submit_prepared(prepared, None)?,
            Some(blend) => self.engine.submit_blended(prepared, None, blend)?,
        };
        let mut answer = Answer::default();
        let mut events = Vec::new();
        while self.engine.has_work() {
            self.engine.step(&mut events)?;
            for event in events.drain(..) {
                match event {
                    EngineEvent::Token(token) => {
                        if answer.first_token.is_zero() {
                            answer.first_token = began.elapsed();
                        }
                        answer.text.push_str(&token.text);
                    }
                    EngineEvent::Finished { text, usage, .. } => {
                        answer.text.push_str(&text);
                        answer.blend = usage.blend;
                    }
                    EngineEvent::Failed { error, .. } => return Err(error.into()),
                    _ => {}
                }
            }
        }
        Ok(answer)
    }

    /// The shares of tokens and of operations that were computed.
    fn shares_of(&self, prompt: &Prompt, usage: BlendUsage) -> (f64, f64) {
        if self.options.blend.is_none() && self.options.codec.is_none() {
            return (1.0, 1.0);
        }
        let selectors = self.options.blend.clone().unwrap_or_default();
        let flops = Flops::of(self.model.config());
        let n_tokens = prompt.tokens.len();
        let is_note = |position: usize| prompt.notes.iter().any(|note| note.contains(&position));
        let rows_of = |is_wanted: &dyn Fn(usize) -> bool| -> f64 {
            (0..n_tokens)
                .filter(|&position| is_wanted(position))
                .map(|position| flops.row(position + 1))
                .sum()
        };
        let (all, notes) = (rows_of(&|_| true), rows_of(&is_note));
        let outside = all - notes;
        let recomputed = usage.recomputed_tokens as f64 / usage.blended_tokens.max(1) as f64;
        let end = prompt.notes.last().map_or(0, |note| note.end);
        let n_layers = self.model.config().n_layers as f64;
        let evidence: f64 = selectors
            .as_slice()
            .iter()
            .map(|selector| match selector {
                Selector::Deviation { layer_idx, .. } => {
                    rows_of(&|position| position < end) * (*layer_idx as f64 + 1.0).min(n_layers) / n_layers
                }
                Selector::Attention { .. } => outside,
                _ => 0.0,
            })
            .sum();
        let blended = outside + notes * recomputed + evidence + flops.logits;
        (recomputed, blended / (all + flops.logits))
    }
}
