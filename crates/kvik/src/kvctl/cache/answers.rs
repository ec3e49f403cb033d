//! What the verbs of `kvctl cache` print for people.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use kvik_proto::cache::{
    CacheHealth, CacheStats, ClearResponse, CompressStatus, LookupResponse, MoveResponse, PinResponse,
    PrefetchState, PrefetchStatus, SegmentsResponse, StoreResponse, TierOperation, TierReport,
};
use serde::Serialize;
use serde_json::Value;

use super::super::{Answer, size};

/// An answer of the worker as it came, for machines, and as text for people.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Shown<T>(pub(super) T);

/// A file that was written.
#[derive(Debug, Serialize)]
pub(super) struct FileAnswer {
    pub(super) file: String,
    pub(super) bytes: usize,
}

/// A move between workers that have one store: there is nothing to do.
#[derive(Debug, Serialize)]
pub(super) struct SameStore {
    pub(super) same_store: bool,
}

/// An answer whose kind does not matter any more.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Rendered {
    object: Value,
    #[serde(skip)]
    text: Vec<u8>,
}

impl Rendered {
    pub(super) fn of(answer: &impl Answer) -> anyhow::Result<Self> {
        let mut text = Vec::new();
        answer.write_text(&mut text)?;
        Ok(Self { object: serde_json::to_value(answer)?, text })
    }
}

impl Answer for Rendered {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        output.write_all(&self.text)
    }
}

impl Answer for Shown<LookupResponse> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let LookupResponse { prompt_tokens, cached_tokens, tiers, chunk_tokens } = &self.0;
        writeln!(output, "{cached_tokens} of {prompt_tokens} tokens, in chunks of {chunk_tokens}")?;
        for (tier, n_tokens) in tiers {
            writeln!(output, "  {tier:<8} {n_tokens:>8}")?;
        }
        Ok(())
    }
}

impl Answer for Shown<PrefetchStatus> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let PrefetchStatus { id, state, prompt_tokens, loaded_tokens } = &self.0;
        let state = match state {
            PrefetchState::Loading => "loading",
            PrefetchState::Done => "done",
            PrefetchState::Cancelled => "cancelled",
        };
        writeln!(output, "{id}: {state}, {loaded_tokens} of {prompt_tokens} tokens in memory")
    }
}

impl Answer for Shown<PinResponse> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "{} tokens", self.0.tokens)
    }
}

impl Answer for Shown<MoveResponse> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "{} chunks", self.0.chunks)
    }
}

impl Answer for Shown<ClearResponse> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        if self.0.chunks.is_empty() {
            return writeln!(output, "nothing was there");
        }
        for (tier, n_chunks) in &self.0.chunks {
            writeln!(output, "{tier:<8} {n_chunks:>8} chunks forgotten")?;
        }
        Ok(())
    }
}

impl Answer for Shown<CompressStatus> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let CompressStatus { state, reason, tier, codec, cold_chunks, seen_chunks, .. } = &self.0;
        if state == "idle" {
            return writeln!(output, "idle: no chunk was coded again since the start");
        }
        writeln!(
            output,
            "{state}: {seen_chunks} of {cold_chunks} cold chunks of {tier} seen, codec {codec}"
        )?;
        let CompressStatus { recoded_chunks, bytes_before, bytes_after, .. } = self.0;
        let [before, after] = [bytes_before, bytes_after].map(size::long);
        writeln!(output, "{recoded_chunks} chunks are smaller: {after} instead of {before}")?;
        reason.as_ref().map_or(Ok(()), |reason| writeln!(output, "{reason}"))
    }
}

impl Answer for Shown<StoreResponse> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "{} chunks stored, {} were there", self.0.stored_chunks, self.0.present_chunks)
    }
}

impl Answer for Shown<SegmentsResponse> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let SegmentsResponse { computed_segments, present_segments, refused_segments, tokens } = self.0;
        writeln!(
            output,
            "{computed_segments} segments computed, {present_segments} were there; {tokens} tokens"
        )?;
        if refused_segments > 0 {
            writeln!(output, "{refused_segments} segments refused: longer than the model's context")?;
        }
        Ok(())
    }
}

impl Answer for SameStore {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "nothing was moved: both workers have the same store")
    }
}

impl Answer for Shown<CacheHealth> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "{}", self.0.status)?;
        write_tiers(&self.0.tiers, output)?;
        write_operations(&self.0.tiers, output)
    }
}

impl Answer for Shown<CacheStats> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        write_tiers(&self.0.tiers, output)?;
        let counts = &self.0.counts;
        let width = counts.keys().map(String::len).max().unwrap_or(0);
        for (name, count) in counts {
            writeln!(output, "{name:<width$} {count:>14}")?;
        }
        Ok(())
    }
}

impl Answer for FileAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        if self.file == "-" {
            return Ok(());
        }
        writeln!(output, "{}: {}", self.file, size::long(self.bytes as u64))
    }
}

fn write_tiers(tiers: &[TierReport], output: &mut dyn Write) -> io::Result<()> {
    if tiers.is_empty() {
        return Ok(());
    }
    let width = name_width(tiers);
    writeln!(
        output,
        "{:<width$} {:<10} {:>10} {:>12} {:>12}",
        "Tier", "State", "Chunks", "Used", "Capacity"
    )?;
    for TierReport { tier, state, reason, chunks, used_bytes, capacity_bytes, .. } in tiers {
        let style = state_style(state);
        let chunks = chunks.map_or("-".to_owned(), |n_chunks| n_chunks.to_string());
        let [used, capacity] =
            [used_bytes, capacity_bytes].map(|n_bytes| n_bytes.map_or("-".to_owned(), size::long));
        write!(output, "{tier:<width$} {style}{state:<10}{style:#} {chunks:>10} {used:>12} {capacity:>12}")?;
        let gap = if reason.is_some() { "  " } else { "" };
        writeln!(output, "{gap}{}", reason.as_deref().unwrap_or_default())?;
    }
    Ok(())
}

/// What the tiers were asked, where anything counts that.
fn write_operations(tiers: &[TierReport], output: &mut dyn Write) -> io::Result<()> {
    let operations: Vec<_> = tiers
        .iter()
        .flat_map(|tier| tier.operations.iter().map(move |operation| (tier, operation)))
        .collect();
    if operations.is_empty() {
        return Ok(());
    }
    let width = name_width(tiers);
    writeln!(
        output,
        "{:<width$} {:<10} {:>10} {:>12} {:>10} {:>10}  Outcomes",
        "Tier", "Operation", "Calls", "Bytes", "p50", "p99"
    )?;
    for (TierReport { tier, .. }, operation) in operations {
        let TierOperation { operation, outcomes, bytes, calls, p50_us, p99_us } = operation;
        let (bytes, [p50, p99]) = (size::long(*bytes), [p50_us, p99_us].map(|micros| format!("{micros} us")));
        write!(output, "{tier:<width$} {operation:<10} {calls:>10} {bytes:>12} {p50:>10} {p99:>10} ")?;
        for (outcome, count) in outcomes.iter().filter(|(_, count)| **count > 0) {
            write!(output, " {outcome} {count}")?;
        }
        writeln!(output)?;
    }
    Ok(())
}

/// The width of the column with the names of tiers.
fn name_width(tiers: &[TierReport]) -> usize {
    tiers.iter().map(|tier| tier.tier.len()).max().unwrap_or(0).max(8)
}

fn state_style(state: &str) -> Style {
    let color = match state {
        "up" => AnsiColor::Green,
        "read_only" => AnsiColor::Yellow,
        _ => AnsiColor::Red,
    };
    color.on_default()
}
