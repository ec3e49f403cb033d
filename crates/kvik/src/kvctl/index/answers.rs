//! What the verbs of `kvctl index` print for people.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use kvik_proto::index::{BookStats, IndexStats, ModelStats, ScoreResponse, SourceStats};
use serde::Serialize;

use super::super::Answer;

const BOLD: Style = Style::new().bold();
const BEST: Style = AnsiColor::Green.on_default();
const DOUBTFUL: Style = AnsiColor::Yellow.on_default();

/// An answer of the gateway as it came, for machines, and as text for people.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Shown<T>(pub(super) T);

impl Answer for Shown<IndexStats> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let IndexStats { backend, models, counters } = &self.0;
        let noun = if models.len() == 1 { "model" } else { "models" };
        writeln!(output, "kept in {backend}, {} {noun}", models.len())?;
        for model in models {
            write_model(model, output)?;
        }
        let width = counters.keys().map(String::len).max().unwrap_or(0);
        for (name, count) in counters {
            writeln!(output, "{name:<width$} {count:>14}")?;
        }
        Ok(())
    }

    fn warnings(&self) -> Vec<String> {
        let models = self.0.models.iter();
        let blind = models.filter(|model| !model.has_tokenizer && !model.books.is_empty());
        let mut warnings: Vec<String> = blind
            .map(|model| {
                format!(
                    "{}: no tokenizer, so only prompts given as tokens are looked up; set index.tokenizers.models",
                    model.model
                )
            })
            .collect();
        if self.0.models.iter().all(|model| model.books.iter().all(|book| book.sources.is_empty())) {
            warnings.push("no engine has told of any block yet".to_owned());
        }
        warnings
    }
}

impl Answer for Shown<ScoreResponse> {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let ScoreResponse { scorer, prompt_tokens, scores, matched_tokens, matched_by_tier, best, .. } =
            &self.0;
        if scores.is_empty() {
            return writeln!(output, "no worker has any of the {prompt_tokens} tokens");
        }
        let width = scores.keys().map(String::len).max().unwrap_or(0).max(6);
        let score_width = scorer.len().max(12);
        writeln!(
            output,
            "{BOLD}{:<width$} {scorer:>score_width$} {:>14}  Tiers{BOLD:#}",
            "Worker", "Tokens"
        )?;
        for (worker, score) in scores {
            let style = if best.as_ref() == Some(worker) { BEST } else { Style::new() };
            let n_tokens = matched_tokens.get(worker).copied().unwrap_or(0);
            let tokens = format!("{n_tokens} / {prompt_tokens}");
            let tiers = matched_by_tier.get(worker).into_iter().flatten();
            let tiers: Vec<String> = tiers.map(|(tier, n_tokens)| format!("{tier} {n_tokens}")).collect();
            let tiers = tiers.join(", ");
            writeln!(
                output,
                "{style}{worker:<width$}{style:#} {score:>score_width$.2} {tokens:>14}  {tiers}"
            )?;
        }
        Ok(())
    }
}

fn write_model(model: &ModelStats, output: &mut dyn Write) -> io::Result<()> {
    writeln!(output, "\n{BOLD}{}{BOLD:#}", model.model)?;
    for BookStats { keys, block_tokens, sources } in &model.books {
        writeln!(output, "  {keys}: blocks of {block_tokens} tokens")?;
        let width = sources.iter().map(|source| source.worker.len()).max().unwrap_or(0).max(6);
        writeln!(
            output,
            "    {:<width$} {:>4} {:>20} {:>12} {:>10}",
            "Worker", "Rank", "Epoch", "Batch", "Blocks"
        )?;
        for SourceStats { worker, rank, epoch, due_sequence, is_unsure, n_blocks } in sources {
            let [epoch, due, blocks] = [*epoch, *due_sequence, *n_blocks]
                .map(|number| number.map_or("-".to_owned(), |number| number.to_string()));
            write!(output, "    {worker:<width$} {rank:>4} {epoch:>20} {due:>12} {blocks:>10}")?;
            if *is_unsure {
                write!(output, "  {DOUBTFUL}events missing{DOUBTFUL:#}")?;
            }
            writeln!(output)?;
        }
    }
    Ok(())
}
