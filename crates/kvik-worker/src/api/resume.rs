//! Requests that have begun on another worker.

use std::collections::BTreeSet;

use kvik_model::{Begun, BegunOutput, BlendUsage};
use kvik_proto::journal::{JournalHead, OutputProgress, Progress};
use kvik_proto::moves::ResumeHead;
use kvik_proto::openai::CachedTiers;
use serde_json::Value;

use super::outcome::{Outcomes, empty_outcomes, read_partial};
use super::stream::Renderer;
use crate::engine_thread::BegunPart;
use crate::error::Refusal;
use crate::events::Usage;
use crate::plan::Plan;

/// Where a request is continued from.
#[derive(Debug)]
pub(super) struct Resumed {
    pub(super) head: JournalHead,
    progress: Progress,
    partial: Option<Value>,
}

impl Resumed {
    /// Reads how far the request has come; it must fit the plan of its body.
    pub(super) fn read(plan: &Plan, given: ResumeHead) -> Result<Self, Refusal> {
        let progress = Progress::parse(&given.progress)
            .map_err(|error| Refusal::invalid(format!("`progress`: {error}"), Some("progress")))?;
        let known: BTreeSet<u32> = progress.outputs.keys().copied().collect();
        if known.last().is_some_and(|last| plan.n_outputs() <= *last as usize) {
            let allowed = format!("outputs 0 to {}", plan.n_outputs().saturating_sub(1));
            return Err(Refusal::field("progress", "of an output that the request does not have", &allowed));
        }
        for (prompt, cached) in &progress.cached {
            let n_prompt = plan.prompts.get(*prompt as usize).map(Vec::len);
            let CachedTiers { engine, ram, nvme, peer, redis, object, lm, plugin } = cached.tiers;
            let largest =
                [cached.n_tokens, engine, ram, nvme, peer, redis, object, lm, plugin].into_iter().max();
            if n_prompt.is_none() || n_prompt < largest {
                let given = format!("{} cached tokens of prompt {prompt}", largest.unwrap_or_default());
                return Err(Refusal::field(
                    "progress",
                    given,
                    "prompts of the request, and at most their tokens",
                ));
            }
        }
        let longest = plan.sampling.max_tokens as usize;
        let is_over = |output: &&OutputProgress| {
            if output.is_ended { longest < output.tokens.len() } else { longest <= output.tokens.len() }
        };
        if let Some(output) = progress.outputs.values().find(is_over) {
            let given = format!("{} tokens of an output", output.tokens.len());
            let allowed = format!("less than `max_tokens`, {longest}, before the output ends");
            return Err(Refusal::field("progress", given, &allowed));
        }
        if given.head.seeds.len() != plan.prompts.len() {
            let allowed = format!("{}, one for each prompt", plan.prompts.len());
            return Err(Refusal::field("seeds", format!("{} numbers", given.head.seeds.len()), &allowed));
        }
        Ok(Self { head: given.head, progress, partial: given.partial })
    }

    /// How far the outputs of each prompt have come.
    pub(super) fn begun(&self, plan: &Plan) -> Vec<BegunPart> {
        let part = |part_idx: usize| {
            let output = |choice| {
                let output = self.progress.output(plan.output_number(part_idx, choice));
                BegunOutput { tokens: output.tokens, is_ended: output.is_ended }
            };
            let cached = self.progress.cached.get(&(part_idx as u32));
            BegunPart {
                outputs: Begun {
                    outputs: (0..plan.sampling.n).map(output).collect(),
                    cached_tokens: cached.map(|cached| cached.n_tokens),
                },
                tiers: cached.map(|cached| cached.tiers).unwrap_or_default(),
            }
        };
        (0..plan.prompts.len()).map(part).collect()
    }

    /// What was said besides the tokens.
    pub(super) fn partial(&self) -> Option<&Value> {
        self.partial.as_ref()
    }

    /// Tokens that the outputs have.
    pub(super) fn n_output_tokens(&self) -> usize {
        self.progress.outputs.values().map(|output| output.tokens.len()).sum()
    }

    /// Makes a renderer go on behind what was sent.
    pub(super) fn skip(&self, plan: &Plan, renderer: &mut impl Renderer) {
        for (part_idx, prompt) in plan.prompts.iter().enumerate() {
            for choice in 0..plan.sampling.n {
                let output = self.progress.output(plan.output_number(part_idx, choice));
                renderer.skip(part_idx, choice, &output.tokens);
                if output.is_ended {
                    let cached = self.progress.cached.get(&(part_idx as u32)).copied().unwrap_or_default();
                    let usage = Usage {
                        prompt_tokens: prompt.len(),
                        cached_tokens: cached.n_tokens,
                        tiers: cached.tiers,
                        completion_tokens: output.tokens.len(),
                        blend: BlendUsage::default(),
                    };
                    renderer.skip_end(choice, usage);
                }
            }
        }
    }

    /// The outputs of an answer without a stream, as far as they have come.
    pub(super) fn outcomes(&self, plan: &Plan) -> Result<Outcomes, Refusal> {
        let (n_prompts, n_choices) = (plan.prompts.len(), plan.sampling.n as usize);
        match &self.partial {
            Some(partial) => {
                read_partial(partial, n_prompts, n_choices, |number| self.progress.output(number).tokens)
            }
            None if self.progress.outputs.is_empty() => Ok(empty_outcomes(n_prompts, n_choices)),
            None => Err(Refusal::field("partial", "missing", "what the moved answer said")),
        }
    }
}
