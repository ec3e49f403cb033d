//! `kvik eval`: what reuse costs in answers.

use std::fs::File;
use std::io::{BufReader, Write as _};

use anyhow::Context as _;
use kvik_bench::eval::{NotesEval, NotesOptions, Question};
use kvik_model::{CpuBackendOptions, EngineOptions};
use kvik_tokens::AddSpecial;

use super::bench::progress_bar;
use super::{open_model, print_json};
use crate::cli::eval::EvalNotesArguments;

/// Runs `kvik eval notes`.
pub(crate) fn notes(arguments: &EvalNotesArguments) -> anyhow::Result<()> {
    let path = &arguments.file;
    let file = File::open(path).with_context(|| format!("open questions {}", path.display()))?;
    let questions = Question::read_all(BufReader::new(file))
        .with_context(|| format!("read questions {}", path.display()))?;
    let model = open_model(arguments.model.as_deref())?;
    let mut backend = CpuBackendOptions::default();
    backend.kv_dtype = arguments.kv_dtype.into();
    let mut options = EngineOptions::default();
    options.reuses_prefixes = false;
    let priming = arguments.priming.as_deref().unwrap_or_default();
    options.segment_priming =
        model.tokenizer().encode(priming, AddSpecial::No).context("tokenize the priming context")?;
    let engine = model.cpu_engine(&backend, options).context("load the model")?;
    let options = NotesOptions::new(arguments.blend.clone(), arguments.codec.as_deref());
    let mut eval = NotesEval::new(model, engine, options.context("read the options")?);
    let progress = progress_bar(questions.len());
    for (idx, question) in questions.iter().enumerate() {
        eval.ask(question).with_context(|| format!("ask question {}", idx + 1))?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    let report = eval.report();
    if arguments.json {
        return print_json(&report);
    }
    let mut output = anstream::stdout().lock();
    writeln!(output, "right answers      {} of {}", report.right, report.of)
        .and_then(|()| writeln!(output, "recomputed tokens  {:.1} %", 100.0 * report.recomputed_share))
        .and_then(|()| {
            writeln!(output, "operations         {:.1} % of full prefill", 100.0 * report.flop_share)
        })
        .and_then(|()| writeln!(output, "first token        {:.1} ms", report.ttft_ms))
        .context("print the report")
}
