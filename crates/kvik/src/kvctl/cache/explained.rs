//! What `kvctl cache explain` prints for people.

use std::io::{self, Write};

use kvik_proto::cache::{ExplainResponse, ExplainedChunk, PredictedTimes, PrefillEstimate, TierEstimate};

use super::super::{Answer, size};
use super::answers::Shown;

impl Answer for Shown<ExplainResponse> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let ExplainResponse {
            prompt_tokens,
            planner,
            decision,
            reads,
            predicted,
            prefill,
            tiers,
            chunks,
            ..
        } = &self.0;
        let meaning = match decision.as_str() {
            "load" => "all that is stored is loaded before the rest is computed",
            "layers" => "all that is stored is loaded layer by layer, and the rest is computed meanwhile",
            "meet" => "the front is computed while the back loads",
            _ => "nothing is loaded from below memory",
        };
        writeln!(output, "{decision}: {meaning}")?;
        if planner != "auto" {
            writeln!(output, "not followed: store.planner is {planner}")?;
        } else if reads == "layers" && decision != "layers" {
            writeln!(output, "not followed: store.layerwise loads all chunks")?;
        }
        match predicted {
            Some(PredictedTimes { plan_ms, load_all_ms, compute_all_ms, load_layers_ms }) => {
                writeln!(
                    output,
                    "first token after {plan_ms:.1} ms; load all: {load_all_ms:.1} ms, compute all: {compute_all_ms:.1} ms"
                )?;
                writeln!(
                    output,
                    "chunks are read {}; load all by layers: {load_layers_ms:.1} ms",
                    if reads == "layers" { "layer by layer" } else { "whole" }
                )?;
            }
            None => writeln!(output, "no times: a tier or the engine was never measured")?,
        }
        if let Some(PrefillEstimate { pass_us, token_us, thousand_before_us }) = prefill {
            writeln!(
                output,
                "computing: {token_us:.1} us a token, {thousand_before_us:.1} us more for 1000 before it, {pass_us:.0} us a pass"
            )?;
        }
        write_tiers(tiers, output)?;
        let n_stored: usize = chunks.iter().map(|chunk| chunk.tokens).sum();
        writeln!(output, "{n_stored} of {prompt_tokens} tokens are stored")?;
        write_runs(chunks, output)
    }
}

fn write_tiers(tiers: &[TierEstimate], output: &mut dyn Write) -> io::Result<()> {
    for TierEstimate { tier, bytes_per_s, latency_ms, queued_bytes } in tiers {
        match (bytes_per_s, latency_ms) {
            (Some(bytes_per_s), Some(latency_ms)) => {
                let speed = size::long(*bytes_per_s as u64);
                let queued = size::long(*queued_bytes);
                writeln!(
                    output,
                    "{tier}: {speed}/s, {latency_ms:.1} ms before the first byte, {queued} queued"
                )?;
            }
            _ => writeln!(output, "{tier}: never read")?,
        }
    }
    Ok(())
}

/// Chunks that follow each other in one tier and have the same end are one line.
fn write_runs(chunks: &[ExplainedChunk], output: &mut dyn Write) -> io::Result<()> {
    for run in chunks.chunk_by(|one, next| (&one.tier, &one.action) == (&next.tier, &next.action)) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let (end, n_chunks) = (last.first_token + last.tokens, run.len());
        let bytes = size::long(run.iter().map(|chunk| chunk.bytes).sum());
        writeln!(
            output,
            "  {:>7} to {end:>7}  {:<8} {:<8} {n_chunks:>4} chunks, {bytes}",
            first.first_token, first.tier, first.action
        )?;
    }
    Ok(())
}
