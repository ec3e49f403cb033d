//! Outputs that are sent when all of them have ended.

use kvik_model::{BlendUsage, TokenLogprobs};
use kvik_proto::journal::MoveNotice;
use kvik_proto::openai::CachedTiers;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Refusal;
use crate::events::{Event, Usage};
use crate::generation::Generation;
use crate::running::{End, RunningGuard};

/// An output as far as it has come.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) finish_reason: &'static str,
    pub(super) usage: Usage,
}

/// For each prompt, its choices.
pub(super) type Outcomes = Vec<Vec<Outcome>>;

/// How the wait for all outputs ended.
#[derive(Debug)]
pub(super) enum Collected {
    Whole(Outcomes),
    /// It goes on elsewhere from here.
    Frozen(Outcomes, Option<MoveNotice>),
}

/// What of an output its tokens do not tell. Log probabilities are bits: as decimal numbers they might not come back.
#[derive(Debug, Serialize, Deserialize)]
struct Partial {
    text: String,
    logprobs: Vec<(u32, Vec<(u32, u32)>)>,
    finish_reason: String,
    prompt_tokens: usize,
    cached_tokens: usize,
    tiers: CachedTiers,
}

/// As many outputs that have not begun.
pub(super) fn empty_outcomes(n_prompts: usize, n_choices: usize) -> Outcomes {
    (0..n_prompts).map(|_| (0..n_choices).map(|_| Outcome::default()).collect()).collect()
}

/// Waits for all outputs, or until they are frozen. A worker that drains freezes those that can go on elsewhere.
pub(super) async fn collect(
    mut generation: Generation,
    mut outcomes: Outcomes,
    running: RunningGuard,
) -> Result<Collected, Refusal> {
    let mut has_asked = false;
    loop {
        let next = tokio::select! {
            biased;
            next = generation.next() => next,
            () = running.should_leave(), if running.can_move && !has_asked => {
                has_asked = true;
                running.freeze().await?;
                continue;
            }
        };
        let Some((part_idx, event)) = next else {
            running.note_end(End::Finished);
            return Ok(Collected::Whole(outcomes));
        };
        let Some(part) = outcomes.get_mut(part_idx) else { continue };
        match event {
            Event::Token(token) => {
                running.note_token();
                let Some(outcome) = part.get_mut(token.choice as usize) else { continue };
                outcome.text.push_str(&token.text);
                outcome.tokens.push(token.id);
                outcome.logprobs.extend(token.logprobs);
            }
            Event::Finished { choice, text, reason, usage } => {
                let Some(outcome) = part.get_mut(choice as usize) else { continue };
                outcome.text.push_str(&text);
                outcome.finish_reason = reason.as_str();
                outcome.usage = usage;
            }
            Event::Admitted { cached_tokens, tiers, .. } => {
                for outcome in part {
                    outcome.usage.cached_tokens = cached_tokens;
                    outcome.usage.tiers = tiers;
                }
            }
            Event::Rejected(error) => return Err(error.into()),
            Event::Failed(message) => return Err(Refusal::failed(message)),
            Event::Stopped(cause) => {
                running.note_end(End::Stopped);
                return Err(Refusal::unavailable(cause.message(), 1));
            }
            Event::Frozen(notice) => {
                running.note_end(if notice.is_some() { End::Migrated } else { End::Stopped });
                // The answer ends here before the gateway goes on with it: the ticket is the gateway's now.
                running.set_ticket(None);
                return Ok(Collected::Frozen(outcomes, notice));
            }
            Event::Accepted { .. } => {}
        }
    }
}

/// What the worker that goes on must know beside the tokens.
pub(super) fn write_partial(outcomes: &Outcomes) -> Value {
    let bits = |at: &TokenLogprobs| {
        (at.chosen.to_bits(), at.top.iter().map(|(token, logprob)| (*token, logprob.to_bits())).collect())
    };
    let partial = |outcome: &Outcome| Partial {
        text: outcome.text.clone(),
        logprobs: outcome.logprobs.iter().map(bits).collect(),
        finish_reason: outcome.finish_reason.to_owned(),
        prompt_tokens: outcome.usage.prompt_tokens,
        cached_tokens: outcome.usage.cached_tokens,
        tiers: outcome.usage.tiers,
    };
    let partials: Vec<Partial> = outcomes.iter().flatten().map(partial).collect();
    serde_json::to_value(partials).unwrap_or_default()
}

/// Outcomes from where another worker has left them; `tokens` has those of each output.
pub(super) fn read_partial(
    value: &Value,
    n_prompts: usize,
    n_choices: usize,
    tokens: impl Fn(u32) -> Vec<u32>,
) -> Result<Outcomes, Refusal> {
    let unreadable =
        || Refusal::field("partial", "not what a worker has written", "what a moved answer said");
    let partials: Vec<Partial> = Deserialize::deserialize(value).map_err(|_| unreadable())?;
    if partials.len() != n_prompts * n_choices {
        return Err(unreadable());
    }
    let mut outcomes = empty_outcomes(n_prompts, n_choices);
    let places = outcomes.iter_mut().flatten().enumerate();
    for ((number, outcome), partial) in places.zip(partials) {
        outcome.text = partial.text;
        outcome.tokens = tokens(number as u32);
        let logprobs = |(chosen, top): (u32, Vec<(u32, u32)>)| TokenLogprobs {
            chosen: f32::from_bits(chosen),
            top: top.into_iter().map(|(token, bits)| (token, f32::from_bits(bits))).collect(),
        };
        outcome.logprobs = partial.logprobs.into_iter().map(logprobs).collect();
        outcome.finish_reason = match partial.finish_reason.as_str() {
            "stop" => "stop",
            "length" => "length",
            _ => "",
        };
        outcome.usage = Usage {
            prompt_tokens: partial.prompt_tokens,
            cached_tokens: partial.cached_tokens,
            tiers: partial.tiers,
            completion_tokens: outcome.tokens.len(),
            blend: BlendUsage::default(),
        };
    }
    Ok(outcomes)
}
