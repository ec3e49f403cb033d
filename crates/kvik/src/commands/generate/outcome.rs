//! What came of a request, for people and as JSON.

use std::time::{Duration, Instant};

use kvik_model::{EngineEvent, FinishReason, Model, ModelError, SamplingParams, TokenLogprobs, Usage};
use kvik_tokens::Tokenizer;
use kvik_types::TokenId;
use serde::Serialize;

/// One output of the request.
#[derive(Debug, Default)]
pub(super) struct Choice {
    pub(super) token_ids: Vec<TokenId>,
    pub(super) text: String,
    pub(super) logprobs: Vec<TokenLogprobs>,
    /// `None` until the output has ended.
    pub(super) finish_reason: Option<FinishReason>,
}

/// All outputs of the request and when their tokens came.
#[derive(Debug)]
pub(super) struct Outcome {
    choices: Vec<Choice>,
    usage: Usage,
    submitted: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Tokens that came after those of the first step.
    n_later_tokens: usize,
}

/// The object that `--json` prints.
///
/// The fields of one output are those of the first; with `--n` above 1, `choices` has all.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    model: &'a str,
    prompt_ids: &'a [TokenId],
    #[serde(flatten)]
    first: Option<ChoiceReport<'a>>,
    prompt_tokens: usize,
    cached_tokens: usize,
    /// `null` if no random choice was made and none was given.
    seed: Option<u64>,
    timings: Timings,
    #[serde(skip_serializing_if = "Option::is_none")]
    choices: Option<Vec<ChoiceReport<'a>>>,
}

#[derive(Debug, Serialize)]
struct ChoiceReport<'a> {
    token_ids: &'a [TokenId],
    text: &'a str,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<StepReport>>,
}

#[derive(Debug, Serialize)]
struct StepReport {
    #[serde(flatten)]
    chosen: TokenReport,
    top: Vec<TokenReport>,
}

#[derive(Debug, Serialize)]
struct TokenReport {
    token_id: TokenId,
    /// As the vocabulary writes it.
    token: Option<String>,
    logprob: f32,
}

#[derive(Debug, Serialize)]
struct Timings {
    /// From submission to the first token.
    ttft_ms: f64,
    /// Of all outputs together after the first token; `null` if there were no more.
    tokens_per_s: Option<f64>,
}

// === impl Outcome ===

impl Outcome {
    pub(super) fn new(n_choices: u32, submitted: Instant) -> Self {
        Self {
            choices: (0..n_choices).map(|_| Choice::default()).collect(),
            usage: Usage::default(),
            submitted,
            first_token: None,
            last_token: None,
            n_later_tokens: 0,
        }
    }

    pub(super) fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// Takes an event that came at `now`; returns the choice that it belongs to and its new text.
    pub(super) fn take(&mut self, event: EngineEvent, now: Instant) -> Result<(u32, String), ModelError> {
        let (choice_idx, text) = match event {
            EngineEvent::Token(token) => {
                let first_token = *self.first_token.get_or_insert(now);
                self.n_later_tokens += usize::from(first_token < now);
                self.last_token = Some(now);
                if let Some(choice) = self.choices.get_mut(token.choice as usize) {
                    choice.token_ids.push(token.token);
                    choice.logprobs.extend(token.logprobs);
                }
                (token.choice, token.text)
            }
            EngineEvent::Finished { choice: choice_idx, text, reason, usage, .. } => {
                self.usage = usage;
                if let Some(choice) = self.choices.get_mut(choice_idx as usize) {
                    choice.finish_reason = Some(reason);
                }
                (choice_idx, text)
            }
            EngineEvent::Failed { error, .. } => return Err(error),
            // Kinds of events that do not exist yet carry no text of an output.
            _ => (0, String::new()),
        };
        if let Some(choice) = self.choices.get_mut(choice_idx as usize) {
            choice.text.push_str(&text);
        }
        Ok((choice_idx, text))
    }

    /// The statistics in one line.
    pub(super) fn summary(&self, seed: Option<u64>) -> String {
        let n_tokens: usize = self.choices.iter().map(|choice| choice.token_ids.len()).sum();
        let speed = self.tokens_per_s().map_or_else(String::new, |speed| format!(", {speed:.1} tokens/s"));
        let seed = seed.map_or_else(String::new, |seed| format!(", seed {seed}"));
        format!(
            "{n_tokens} tokens, {:.1} ms to first{speed}, prompt {}, cached {}{seed}",
            milliseconds(self.time_to_first_token()),
            self.usage.prompt_tokens,
            self.usage.cached_tokens
        )
    }

    fn time_to_first_token(&self) -> Duration {
        self.first_token.map_or(Duration::ZERO, |first| first.duration_since(self.submitted))
    }

    fn tokens_per_s(&self) -> Option<f64> {
        let elapsed = self.last_token?.duration_since(self.first_token?).as_secs_f64();
        (0.0 < elapsed).then(|| self.n_later_tokens as f64 / elapsed)
    }
}

// === impl Report ===

impl<'a> Report<'a> {
    pub(super) fn new(
        model: &'a Model,
        prompt_ids: &'a [TokenId],
        sampling: &SamplingParams,
        outcome: &'a Outcome,
    ) -> Self {
        let report = |choice: &'a Choice| {
            let logprobs = sampling.logprobs.map(|_| choice.steps(model.tokenizer()));
            ChoiceReport {
                token_ids: &choice.token_ids,
                text: &choice.text,
                finish_reason: choice.finish_reason.map(FinishReason::as_str),
                logprobs,
            }
        };
        Self {
            model: model.name(),
            prompt_ids,
            first: outcome.choices.first().map(report),
            prompt_tokens: outcome.usage.prompt_tokens,
            cached_tokens: outcome.usage.cached_tokens,
            seed: sampling.seed,
            timings: Timings {
                ttft_ms: rounded(milliseconds(outcome.time_to_first_token())),
                tokens_per_s: outcome.tokens_per_s().map(rounded),
            },
            choices: (1 < outcome.choices.len()).then(|| outcome.choices.iter().map(report).collect()),
        }
    }
}

// === impl Choice ===

impl Choice {
    fn steps(&self, tokenizer: &Tokenizer) -> Vec<StepReport> {
        let token_report = |token_id: TokenId, logprob: f32| TokenReport {
            token_id,
            token: tokenizer.token_text(token_id),
            logprob,
        };
        self.token_ids
            .iter()
            .zip(&self.logprobs)
            .map(|(&token_id, logprobs)| StepReport {
                chosen: token_report(token_id, logprobs.chosen),
                top: logprobs.top.iter().map(|&(id, logprob)| token_report(id, logprob)).collect(),
            })
            .collect()
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// To a thousandth: more digits of a time say nothing.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
