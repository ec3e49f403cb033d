//! A verb on all workers that a coordinator lists.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};

use anstyle::{AnsiColor, Style};
use anyhow::{Context as _, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kvik_proto::coordinator::WorkerInfo;
use serde::Serialize;

use super::super::prompt::PromptArguments;
use super::super::{Answer, print};
use super::answers::{Rendered, Shown};
use super::arguments::{CacheArguments, CacheVerb};
use super::{Connector, run_verb};

const NAME: Style = Style::new().bold();
const FAILED: Style = AnsiColor::Red.on_default();

/// What came of a verb, worker by worker.
#[derive(Debug, Serialize)]
struct NodeAnswers {
    nodes: Vec<NodeAnswer>,
}

/// What came of a verb on one worker: an answer, an error, or nothing where it was left out.
#[derive(Debug, Serialize)]
struct NodeAnswer {
    worker: String,
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<Rendered>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Whether the journal says that it was done before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    done_before: bool,
}

/// Workers on which a verb is done, in a file with one name a line.
#[derive(Debug)]
struct Journal {
    path: Option<PathBuf>,
    done: BTreeSet<String>,
}

/// Does the verb on one worker after the other and prints all answers. A worker that fails does not stop the others.
///
/// # Errors
/// If the verb is not one for all workers, the coordinator cannot be asked, or a worker failed.
pub(super) async fn run(
    arguments: &CacheArguments,
    connector: &Connector,
    is_json: bool,
) -> anyhow::Result<()> {
    let verb = &arguments.verb;
    check_verb(verb)?;
    let fleet = &arguments.fleet;
    let coordinator = connector.coordinator(&fleet.coordinator);
    let members = coordinator.workers().await.context("ask the coordinator for its workers")?.members;
    let workers: Vec<WorkerInfo> = members.into_iter().map(|member| member.worker).collect();
    if workers.is_empty() {
        bail!("the coordinator at {} lists no worker", fleet.coordinator);
    }
    let mut journal = Journal::open(if fleet.dry_run { None } else { fleet.journal.as_deref() })?;
    let progress = progress(workers.len());
    let mut nodes = Vec::with_capacity(workers.len());
    for worker in workers {
        progress.set_message(worker.id.clone());
        let WorkerInfo { id, address, .. } = worker;
        let done_before = journal.done.contains(&id);
        let mut node = NodeAnswer { worker: id, address, answer: None, error: None, done_before };
        if !node.done_before {
            let done = if fleet.dry_run {
                look(verb, connector, &node.address).await
            } else {
                run_verb(verb, connector, &node.address).await.map(Some)
            };
            match done {
                Ok(answer) => {
                    journal.note(&node.worker)?;
                    node.answer = answer;
                }
                Err(error) => node.error = Some(format!("{error:#}")),
            }
        }
        nodes.push(node);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let n_failed = nodes.iter().filter(|node| node.error.is_some()).count();
    let n_nodes = nodes.len();
    print(&NodeAnswers { nodes }, is_json)?;
    if n_failed > 0 {
        bail!("{n_failed} of {n_nodes} workers failed");
    }
    Ok(())
}

/// Refuses verbs that are about one worker.
fn check_verb(verb: &CacheVerb) -> anyhow::Result<()> {
    let name = match verb {
        CacheVerb::Explain(_) => "explain",
        CacheVerb::Compress(_) => "compress",
        CacheVerb::PrefetchStatus(_) => "prefetch-status",
        CacheVerb::Cancel(_) => "cancel",
        CacheVerb::Retrieve(_) => "retrieve",
        CacheVerb::Store(_) => "store",
        CacheVerb::Add(_) => "add",
        CacheVerb::Move(relocation) if relocation.to_worker.is_some() => "move --to-worker",
        _ => return Ok(()),
    };
    bail!(
        "`--all-nodes` is given with {name}; allowed: lookup, prefetch, pin, unpin, move --from --to, clear, health, stats"
    )
}

/// What a worker has of the prompt that the verb is about; nothing for a verb without one.
async fn look(verb: &CacheVerb, connector: &Connector, address: &str) -> anyhow::Result<Option<Rendered>> {
    let prompt: &PromptArguments = match verb {
        CacheVerb::Lookup(prompt) | CacheVerb::Pin(prompt) | CacheVerb::Unpin(prompt) => prompt,
        CacheVerb::Prefetch(prefetch) => &prefetch.prompt,
        CacheVerb::Move(relocation) => &relocation.prompt,
        CacheVerb::Clear(clear) if !clear.all => &clear.prompt,
        _ => return Ok(None),
    };
    let found = connector.worker(address).lookup(&prompt.read()?).await?;
    Rendered::of(&Shown(found)).map(Some)
}

fn progress(n_workers: usize) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    let progress = ProgressBar::new(n_workers as u64);
    match style {
        Ok(style) => progress.with_style(style),
        Err(_) => progress,
    }
}

// === impl Journal ===

impl Journal {
    fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self { path: None, done: BTreeSet::new() }) };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        // A line that was not written to its end names no worker, and the next one must not go on from it.
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        if whole.len() < text.len() {
            fs::write(path, whole).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(Self { path: Some(path.to_owned()), done: whole.lines().map(str::to_owned).collect() })
    }

    /// Notes that the verb is done on a worker, durably.
    fn note(&mut self, worker: &str) -> anyhow::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let write = || {
            let mut file = fs::OpenOptions::new().create(true).append(true).open(path)?;
            writeln!(file, "{worker}")?;
            file.sync_data()
        };
        write().with_context(|| format!("write {}", path.display()))?;
        self.done.insert(worker.to_owned());
        Ok(())
    }
}

impl Answer for NodeAnswers {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        for NodeAnswer { worker, address, answer, error, done_before } in &self.nodes {
            writeln!(output, "{NAME}{worker}{NAME:#}  {address}")?;
            if let Some(answer) = answer {
                answer.write_text(output)?;
            }
            if let Some(error) = error {
                writeln!(output, "{FAILED}failed{FAILED:#}: {error}")?;
            }
            if *done_before {
                writeln!(output, "done before")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_names_what_is_done_and_no_half_written_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let mut journal = Journal::open(Some(&path)).unwrap();
        journal.note("w1").unwrap();
        journal.note("w2").unwrap();
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str("w3");
        fs::write(&path, text).unwrap();
        let mut journal = Journal::open(Some(&path)).unwrap();
        assert!(journal.done.iter().eq(["w1", "w2"]));
        journal.note("w4").unwrap();
        assert!(Journal::open(Some(&path)).unwrap().done.iter().eq(["w1", "w2", "w4"]));
        assert!(Journal::open(Some(folder.path())).is_err(), "a folder is no journal");
    }
}
