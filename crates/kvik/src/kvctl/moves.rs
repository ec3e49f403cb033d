//! `kvctl sequences`, `kvctl move` and `kvctl drain`: running requests, and workers that give theirs away.

use std::fs;
use std::io::{self, IsTerminal as _, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anstyle::Style;
use anyhow::{Context as _, bail};
use clap::Args;
use http::{HeaderName, HeaderValue};
use kvik_proto::client::{CoordinatorClient, HttpClient, TlsClientConfig, WorkerClient, http_client};
use kvik_proto::moves::{DrainReport, MoveRequest, RunningSequence};
use kvik_runtime::trust::client_header;
use serde::Serialize;

use super::Answer;

const BOLD: Style = Style::new().bold();
/// Columns of a bar.
const BAR_WIDTH: usize = 30;

/// How workers are reached.
#[derive(Debug, Args)]
pub(crate) struct FleetArguments {
    /// Base address of the coordinator that knows the workers by their ids
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    pub(crate) coordinator: String,

    /// PEM file of the authorities that sign the certificates [default: none, only http:// works]
    #[arg(long, value_name = "FILE")]
    pub(crate) authorities: Option<PathBuf>,

    /// File with the token [default: `KVIK_ADMIN_TOKEN`, then `KVIK_CLUSTER_TOKEN`, if set]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

/// Lists running requests.
#[derive(Debug, Args)]
pub(crate) struct SequencesArguments {
    /// Id or address of a worker [default: all that the coordinator knows]
    #[arg(value_name = "WORKER")]
    pub(crate) worker: Option<String>,

    #[command(flatten)]
    pub(crate) fleet: FleetArguments,
}

/// Moves a request.
#[derive(Debug, Args)]
pub(crate) struct MoveArguments {
    /// The request: its id in `kvctl sequences`, or its `seq_id`
    #[arg(value_name = "SEQ")]
    pub(crate) sequence: String,

    /// Id or address of the worker that takes it
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,

    #[command(flatten)]
    pub(crate) fleet: FleetArguments,
}

/// Drains a worker.
#[derive(Debug, Args)]
pub(crate) struct DrainArguments {
    /// Id or address of the worker
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,

    /// Time after which what still runs is ended, such as `270s` or `5m` [default: the worker's `drain_grace_s`]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) deadline: Option<Duration>,

    #[command(flatten)]
    pub(crate) fleet: FleetArguments,
}

/// Running requests and where they are.
#[derive(Debug, Serialize)]
pub(crate) struct SequencesAnswer {
    sequences: Vec<PlacedSequence>,
}

#[derive(Debug, Serialize)]
struct PlacedSequence {
    worker: String,
    #[serde(flatten)]
    sequence: RunningSequence,
}

/// A request that has moved.
#[derive(Debug, Serialize)]
pub(crate) struct MoveAnswer {
    sequence: String,
    from: String,
    to: String,
    seconds: f64,
}

/// A worker that has drained.
#[derive(Debug, Serialize)]
pub(crate) struct DrainAnswer {
    worker: String,
    seconds: f64,
    #[serde(flatten)]
    report: DrainReport,
}

/// A worker with its address.
#[derive(Debug, Clone)]
struct Worker {
    id: String,
    address: String,
}

/// Calls the services of a cluster.
struct Fleet {
    http: HttpClient,
    token: Option<(HeaderName, HeaderValue)>,
    coordinator: String,
    runtime: tokio::runtime::Runtime,
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("`{text}` is no time; allowed: a number of seconds, or with a unit such as 270s, 5m, 1h");
    let n_digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let number: u64 = text[..n_digits].parse().map_err(|_| wrong())?;
    let unit_s = match &text[n_digits..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    let seconds = number.saturating_mul(unit_s);
    if !(1..=86_400).contains(&seconds) {
        return Err(format!("`{text}` is out of range; allowed: 1s to 24h"));
    }
    Ok(Duration::from_secs(seconds))
}

/// Lists the running requests of one worker or of all.
///
/// # Errors
/// If the coordinator or a worker cannot be asked.
pub(crate) fn sequences(arguments: &SequencesArguments) -> anyhow::Result<SequencesAnswer> {
    let fleet = Fleet::new(&arguments.fleet)?;
    let workers = match &arguments.worker {
        Some(worker) => vec![fleet.worker(worker)?],
        None => fleet.workers()?,
    };
    Ok(SequencesAnswer { sequences: fleet.sequences(&workers)? })
}

/// Moves a request to another worker.
///
/// # Errors
/// If it is not found, or one of the workers refuses; it stays where it is then.
pub(crate) fn relocate(arguments: &MoveArguments) -> anyhow::Result<MoveAnswer> {
    let fleet = Fleet::new(&arguments.fleet)?;
    let to = fleet.worker(&arguments.worker)?;
    let workers = fleet.workers()?;
    let named = |placed: &PlacedSequence| {
        let PlacedSequence { sequence, .. } = placed;
        sequence.id == arguments.sequence || sequence.seq_id.as_ref() == Some(&arguments.sequence)
    };
    let running = fleet.sequences(&workers)?;
    let Some(found) = running.into_iter().find(named) else {
        bail!("no worker runs `{}`; `kvctl sequences` lists what runs", arguments.sequence);
    };
    if found.worker == to.id {
        bail!("`{}` runs on {} already", arguments.sequence, to.id);
    }
    let Some(from) = workers.into_iter().find(|worker| worker.id == found.worker) else {
        bail!("{} has left", found.worker);
    };
    let start = Instant::now();
    let request = MoveRequest { to: to.address };
    let moving = fleet.client(&from.address).move_sequence(&found.sequence.id, &request).await_on(&fleet);
    moving.with_context(|| format!("move {} from {}", found.sequence.id, from.id))?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(MoveAnswer { sequence: found.sequence.id, from: from.id, to: to.id, seconds })
}

/// Drains a worker and follows it to its end; `shows_progress` where a person looks.
///
/// # Errors
/// If the worker cannot be asked, or refuses.
pub(crate) fn drain(arguments: &DrainArguments, is_json: bool) -> anyhow::Result<DrainAnswer> {
    let fleet = Fleet::new(&arguments.fleet)?;
    let worker = fleet.worker(&arguments.worker)?;
    let shows_progress = !is_json && io::stderr().is_terminal();
    let start = Instant::now();
    let deadline_s = arguments.deadline.map(|deadline| deadline.as_secs());
    let report = fleet.runtime.block_on(async {
        let mut reports = fleet.client(&worker.address).drain(deadline_s).await?;
        let mut last = DrainReport::default();
        let mut n_most = 0;
        while let Some(report) = reports.next().await? {
            last = report;
            n_most = n_most.max(report.running + ended(&report));
            if shows_progress {
                // If standard error is gone, the drain goes on.
                let _ = show(&worker.id, &report, n_most, start.elapsed());
            }
        }
        anyhow::Ok(last)
    });
    if shows_progress {
        let _ = write!(anstream::stderr(), "\r\x1b[K");
    }
    let report = report.with_context(|| format!("drain {}", worker.id))?;
    if !report.is_over {
        bail!("{} ended before it had drained: {} requests ran", worker.id, report.running);
    }
    Ok(DrainAnswer { worker: worker.id, seconds: start.elapsed().as_secs_f64(), report })
}

fn ended(report: &DrainReport) -> u64 {
    report.migrated + report.replayed + report.finished + report.failed
}

fn show(worker: &str, report: &DrainReport, n_most: u64, elapsed: Duration) -> io::Result<()> {
    let n_full = if n_most == 0 { BAR_WIDTH } else { (ended(report) as usize * BAR_WIDTH) / n_most as usize };
    let (full, empty) = ("#".repeat(n_full.min(BAR_WIDTH)), ".".repeat(BAR_WIDTH - n_full.min(BAR_WIDTH)));
    let (running, seconds) = (report.running, elapsed.as_secs_f64());
    let mut stderr = anstream::stderr();
    write!(stderr, "\r\x1b[K{worker} drains [{full}{empty}] {running} running, {seconds:.1} s")?;
    stderr.flush()
}

// === impl Fleet ===

/// Waits for a call on the client's runtime.
trait AwaitOn: Future + Sized {
    fn await_on(self, fleet: &Fleet) -> Self::Output {
        fleet.runtime.block_on(self)
    }
}

impl<F: Future> AwaitOn for F {}

impl Fleet {
    fn new(arguments: &FleetArguments) -> anyhow::Result<Self> {
        let authorities_pem = match &arguments.authorities {
            Some(path) => fs::read(path).with_context(|| format!("read {}", path.display()))?,
            None => Vec::new(),
        };
        let http = http_client(&TlsClientConfig { authorities_pem, identity_pem: None })?;
        let token = client_header(arguments.token_file.as_deref())?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the client")?;
        Ok(Self { http, token, coordinator: arguments.coordinator.clone(), runtime })
    }

    fn client(&self, address: &str) -> WorkerClient {
        WorkerClient::new(self.http.clone(), address).with_header(self.token.clone())
    }

    /// All workers that the coordinator knows.
    fn workers(&self) -> anyhow::Result<Vec<Worker>> {
        let client =
            CoordinatorClient::new(self.http.clone(), &self.coordinator).with_header(self.token.clone());
        let snapshot = client.workers().await_on(self).context("ask the coordinator for its workers")?;
        let worker = |member: kvik_proto::coordinator::Member| Worker {
            id: member.worker.id,
            address: member.worker.address,
        };
        Ok(snapshot.members.into_iter().map(worker).collect())
    }

    /// A worker by its address, or by its id at the coordinator.
    fn worker(&self, name: &str) -> anyhow::Result<Worker> {
        if name.starts_with("http://") || name.starts_with("https://") {
            let address = name.trim_end_matches('/').to_owned();
            return Ok(Worker { id: address.clone(), address });
        }
        let workers = self.workers()?;
        let known: Vec<&str> = workers.iter().map(|worker| worker.id.as_str()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let found = workers.iter().find(|worker| worker.id == name).cloned();
        found.with_context(|| format!("the coordinator knows no worker `{name}`; it knows: {known}"))
    }

    fn sequences(&self, workers: &[Worker]) -> anyhow::Result<Vec<PlacedSequence>> {
        let mut all = Vec::new();
        for worker in workers {
            let running = self.client(&worker.address).sequences().await_on(self);
            let running = running.with_context(|| format!("ask {} for its requests", worker.id))?;
            all.extend(
                running
                    .sequences
                    .into_iter()
                    .map(|sequence| PlacedSequence { worker: worker.id.clone(), sequence }),
            );
        }
        Ok(all)
    }
}

impl Answer for SequencesAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        if self.sequences.is_empty() {
            return writeln!(output, "no request runs");
        }
        let width_of = |text: fn(&PlacedSequence) -> &str, title: &str| {
            self.sequences.iter().map(|placed| text(placed).len()).chain([title.len()]).max().unwrap_or(0)
        };
        let (worker, id) = ("Worker", "Request");
        let worker_width = width_of(|placed| &placed.worker, worker);
        let id_width = width_of(|placed| &placed.sequence.id, id);
        let (prompt, answer) = ("Prompt", "Answer");
        writeln!(
            output,
            "{BOLD}{worker:<worker_width$}  {id:<id_width$}  {prompt:>7}  {answer:>7}  State    Name{BOLD:#}"
        )?;
        for PlacedSequence { worker, sequence } in &self.sequences {
            let RunningSequence { id, prompt_tokens, output_tokens, .. } = sequence;
            let state = match (sequence.is_moving, sequence.can_move) {
                (true, _) => "moves",
                (false, true) => "runs",
                // It did not come through a gateway.
                (false, false) => "stays",
            };
            let name = sequence.seq_id.as_deref().unwrap_or("-");
            writeln!(
                output,
                "{worker:<worker_width$}  {id:<id_width$}  {prompt_tokens:>7}  {output_tokens:>7}  {state:<7}  {name}"
            )?;
        }
        Ok(())
    }
}

impl Answer for MoveAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let Self { sequence, from, to, seconds } = self;
        writeln!(output, "{sequence} has moved from {from} to {to} in {:.0} ms", seconds * 1e3)
    }
}

impl Answer for DrainAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let DrainReport { migrated, replayed, finished, failed, .. } = self.report;
        let Self { worker, seconds, .. } = self;
        writeln!(output, "{BOLD}{worker}{BOLD:#} has drained in {seconds:.1} s")?;
        writeln!(output, "  {migrated:>6}  went to other workers with their KV")?;
        writeln!(output, "  {finished:>6}  ended here")?;
        writeln!(output, "  {replayed:>6}  were left to go on elsewhere from their tokens")?;
        writeln!(output, "  {failed:>6}  were ended")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_and_bounds() {
        assert_eq!(parse_time("270s"), Ok(Duration::from_secs(270)));
        assert_eq!(parse_time("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_time("5m"), Ok(Duration::from_mins(5)));
        for wrong in ["", "s", "0", "25h", "1d", "-3", "99999999999999999999s", "1.5m"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn requests_are_a_table() {
        let mut output = Vec::new();
        SequencesAnswer { sequences: Vec::new() }.write_text(&mut output).unwrap();
        assert_eq!(output, b"no request runs\n");
        let sequence = RunningSequence {
            id: "seq-1".to_owned(),
            seq_id: Some("chat".to_owned()),
            path: "/v1/completions".to_owned(),
            prompt_tokens: 1200,
            output_tokens: 7,
            can_move: true,
            is_moving: false,
            outputs: 1,
            tokens_left: 93,
            moved_ms_ago: None,
        };
        let sequences = vec![PlacedSequence { worker: "worker-1".to_owned(), sequence }];
        let mut output = Vec::new();
        SequencesAnswer { sequences }.write_text(&mut output).unwrap();
        let text: String = anstream::adapter::strip_bytes(&output).into_vec().try_into().unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "Worker    Request   Prompt   Answer  State    Name");
        assert_eq!(lines[1], "worker-1  seq-1       1200        7  runs     chat");
    }
}
