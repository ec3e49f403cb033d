//! What the verbs of `kvctl route` print for people.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use kvik_proto::route::{DisaggregationExplanation, RouteCandidate, RouteExplanation};
use serde::Serialize;

use super::super::Answer;

const BOLD: Style = Style::new().bold();
const CHOSEN: Style = AnsiColor::Green.on_default();
const UNUSABLE: Style = AnsiColor::Red.on_default();

/// An answer of the gateway as it came, for machines, and as text for people.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Shown<T>(pub(super) T);

impl Answer for Shown<RouteExplanation> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let RouteExplanation { model, prompt_tokens, is_exact, output_tokens, candidates, .. } = &self.0;
        let about = if *is_exact { "" } else { "about " };
        writeln!(output, "{model}: {about}{prompt_tokens} tokens, {output_tokens} expected in the answer")?;
        let width = candidates.iter().map(|candidate| candidate.worker.len()).max().unwrap_or(0).max(6);
        writeln!(
            output,
            "{BOLD}{:<width$} {:<8} {:<10} {:>12} {:>12} {:>12}{BOLD:#}",
            "Worker", "Role", "PD", "Cached", "Outstanding", "Cost"
        )?;
        for candidate in candidates {
            self.write_candidate(candidate, width, output)?;
        }
        match (&self.0.worker, &self.0.reason) {
            (Some(worker), Some(reason)) => {
                writeln!(output, "answered by {CHOSEN}{worker}{CHOSEN:#} ({reason})")?;
            }
            _ => writeln!(output, "{UNUSABLE}no worker can take it{UNUSABLE:#}")?,
        }
        self.0.disaggregation.as_ref().map_or(Ok(()), |parts| write_parts(parts, output))
    }
}

impl Shown<RouteExplanation> {
    fn write_candidate(
        &self,
        candidate: &RouteCandidate,
        width: usize,
        output: &mut dyn Write,
    ) -> io::Result<()> {
        let RouteCandidate { worker, role, pd, is_usable, cached_tokens, outstanding_tokens, cost, .. } =
            candidate;
        let is_chosen = self.0.worker.as_ref() == Some(worker);
        let style = match (is_chosen, is_usable) {
            (true, _) => CHOSEN,
            (false, true) => Style::new(),
            (false, false) => UNUSABLE,
        };
        let pd = pd.as_deref().unwrap_or("-");
        writeln!(
            output,
            "{style}{worker:<width$}{style:#} {role:<8} {pd:<10} {cached_tokens:>12} {outstanding_tokens:>12} {cost:>12.0}"
        )
    }
}

fn write_parts(parts: &DisaggregationExplanation, output: &mut dyn Write) -> io::Result<()> {
    let DisaggregationExplanation { protocol, decision, uncached_tokens, .. } = parts;
    match &parts.partner {
        Some(partner) => writeln!(output, "{protocol}: {decision} with {CHOSEN}{partner}{CHOSEN:#}")?,
        None => writeln!(output, "{protocol}: one engine does it all ({decision})")?,
    }
    if let Some(obstacle) = &parts.obstacle {
        writeln!(output, "  the request does not allow it: {obstacle}")?;
    }
    let threshold =
        parts.threshold_tokens.map_or("never pays".to_owned(), |tokens| format!("pays from {tokens}"));
    writeln!(output, "  {uncached_tokens} tokens are not cached; a transfer {threshold}")?;
    let DisaggregationExplanation { decode_tokens_per_s, transfer_tokens_per_s, .. } = parts;
    writeln!(
        output,
        "  the worker computes {decode_tokens_per_s:.0} and takes over {transfer_tokens_per_s:.0} tokens a second"
    )?;
    if let (Some(speed), Some(queue)) = (parts.prefill_tokens_per_s, parts.prefill_queue_tokens) {
        writeln!(
            output,
            "  the other engine computes {speed:.0} tokens a second and has {queue} to do before"
        )?;
    }
    Ok(())
}
