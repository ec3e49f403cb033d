//! `kvik engines`: the controller of engines, and questions to one that runs.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use kvik_engines::{
    ControllerClient, ControllerOptions, ControllerStatus, EngineStatus, EnginesConfig, SleepMethod,
    default_state_folder, start_controller,
};
use kvik_runtime::terminal::{Align, Column, DIMMED, TITLE, Table};
use kvik_types::ByteSize;
use serde_json::json;

use super::{print_json, service};
use crate::cli::engines::{EnginesCheckArguments, EnginesCommand, EnginesUpArguments, StateArguments};
use crate::cli::services::ServiceArguments;

/// Runs one of the commands.
pub(crate) fn run(command: &EnginesCommand) -> anyhow::Result<()> {
    match command {
        EnginesCommand::Up(arguments) => up(arguments),
        EnginesCommand::Check(arguments) => check(arguments),
        EnginesCommand::Status(arguments) => {
            let status = ask(&arguments.state, async |client| client.status().await)?;
            if arguments.json {
                return print_json(&status);
            }
            write_status(&status).context("write to standard output")
        }
        EnginesCommand::Sleep(arguments) => {
            ask(&arguments.state, async |client| client.sleep(&arguments.model).await)?;
            say(&format!("{} is asleep", arguments.model))
        }
        EnginesCommand::Wake(arguments) => {
            ask(&arguments.state, async |client| client.wake(&arguments.model).await)?;
            say(&format!("{} is ready", arguments.model))
        }
        EnginesCommand::Reload(arguments) => {
            let changes = ask(&arguments.state, async |client| client.reload().await)?;
            if changes.is_empty() {
                return say("nothing has changed");
            }
            changes.iter().try_for_each(|change| say(change))
        }
        EnginesCommand::Stop(arguments) => {
            ask(&arguments.state, async |client| client.stop(arguments.leave_running).await)?;
            say(if arguments.leave_running {
                "the controller has ended; its engines go on"
            } else {
                "the controller and its engines have ended"
            })
        }
    }
}

fn folder(arguments: &StateArguments) -> PathBuf {
    arguments.state.clone().unwrap_or_else(default_state_folder)
}

fn read(path: &std::path::Path) -> anyhow::Result<(EnginesConfig, PathBuf)> {
    let program = std::env::current_exe().context("find the program of workers")?;
    let config = EnginesConfig::read(path, &program).context("read the configuration of engines")?;
    Ok((config, program))
}

fn up(arguments: &EnginesUpArguments) -> anyhow::Result<()> {
    let (config, program) = read(&arguments.config)?;
    let common = ServiceArguments {
        config: None,
        set: Vec::new(),
        log: arguments.log.clone(),
        log_format: arguments.log_format,
    };
    let options = ControllerOptions {
        config: std::path::absolute(&arguments.config).context("find the configuration of engines")?,
        state: folder(&arguments.state),
        program,
        leaves_running: arguments.leave_running,
    };
    service::run(&common, "info", async |shutdown| {
        for note in &config.notes {
            tracing::warn!("{note}");
        }
        let longest_stop = config.engines.iter().map(|engine| engine.stop_timeout).max().unwrap_or_default();
        let grace = Duration::from_secs(config.gateway.drain_grace_s) + 2 * longest_stop;
        let state = options.state.clone();
        let n_engines = config.engines.len();
        let controller = start_controller(options, config).await.context("start the engines")?;
        shutdown.listen_for_signals(grace);
        tracing::info!(address = %controller.address(), state = %state.display(), n_engines, "controller is ready");
        greet(&controller.status(), &state).context("write to standard output")?;
        controller.run(&shutdown).await;
        Ok(())
    })
}

/// Says where everything is.
fn greet(status: &ControllerStatus, state: &std::path::Path) -> std::io::Result<()> {
    let mut stdout = anstream::stdout().lock();
    writeln!(stdout, "{TITLE}kvik engines is up{TITLE:#}: {} models\n", status.engines.len())?;
    writeln!(stdout, "  gateway  {}", status.gateway)?;
    writeln!(stdout, "  state    {}", state.display())?;
    for engine in &status.engines {
        writeln!(stdout, "  {:<8} {} at {}, log {}", engine.name, engine.model, engine.url, engine.log)?;
    }
    let asked =
        if state == default_state_folder() { String::new() } else { format!(" --state {}", state.display()) };
    writeln!(stdout, "\n  kvik engines status{asked}")?;
    writeln!(stdout, "\n{DIMMED}Ctrl-C ends the engines; a second one kills them.{DIMMED:#}")?;
    stdout.flush()
}

/// Asks the controller of a state folder.
fn ask<T>(
    state: &StateArguments,
    question: impl AsyncFnOnce(&ControllerClient) -> kvik_engines::Result<T>,
) -> anyhow::Result<T> {
    let client = ControllerClient::new(&folder(state));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(question(&client)).context("ask the controller")
}

fn say(text: &str) -> anyhow::Result<()> {
    writeln!(anstream::stdout(), "{text}").context("write to standard output")
}

fn check(arguments: &EnginesCheckArguments) -> anyhow::Result<()> {
    let (config, _) = read(&arguments.config)?;
    if arguments.json {
        let engines: Vec<_> = config
            .engines
            .iter()
            .map(|engine| {
                json!({
                    "name": engine.name, "model": engine.model, "kind": engine.kind.as_str(), "url": engine.url(),
                    "command": engine.command, "sleep": sleep_word(&engine.sleep),
                    "after_idle_seconds": engine.after_idle.map(|after| after.as_secs_f64()),
                })
            })
            .collect();
        return print_json(&json!({
            "engines": engines, "max_awake": config.max_awake, "gateway": config.gateway.listen,
            "notes": config.notes,
        }));
    }
    let mut table = Table::new(vec![
        Column::new("engine", Align::Left),
        Column::new("model", Align::Left),
        Column::new("kind", Align::Left),
        Column::new("address", Align::Left),
        Column::new("sleep", Align::Left),
        Column::new("command", Align::Left),
    ]);
    for engine in &config.engines {
        table.push([
            engine.name.clone(),
            engine.model.clone(),
            engine.kind.as_str().to_owned(),
            engine.url(),
            sleep_word(&engine.sleep).to_owned(),
            engine.command.join(" "),
        ]);
    }
    let mut stdout = anstream::stdout().lock();
    table.write(&mut stdout).context("write to standard output")?;
    for note in &config.notes {
        writeln!(stdout, "\n{DIMMED}{note}{DIMMED:#}").context("write to standard output")?;
    }
    Ok(())
}

fn sleep_word(sleep: &SleepMethod) -> &'static str {
    match sleep {
        SleepMethod::Stop => "stop",
        SleepMethod::Vllm(_) | SleepMethod::Sglang { .. } => "native",
        SleepMethod::Never => "never",
    }
}

fn write_status(status: &ControllerStatus) -> std::io::Result<()> {
    let mut stdout = anstream::stdout().lock();
    let (gateway, pid) = (&status.gateway, status.pid);
    writeln!(stdout, "{TITLE}{gateway}{TITLE:#}  {DIMMED}process {pid}, {}{DIMMED:#}\n", status.config)?;
    let right = |title| Column::new(title, Align::Right);
    let mut table = Table::new(vec![
        Column::new("engine", Align::Left),
        Column::new("model", Align::Left),
        Column::new("state", Align::Left),
        right("for"),
        right("pid"),
        right("in flight"),
        right("waiting"),
        right("requests"),
        right("req/s"),
        right("idle"),
        right("wakes"),
        right("last wake"),
        right("KV held"),
    ]);
    for engine in &status.engines {
        table.push(row(engine));
    }
    table.write(&mut stdout)?;
    for engine in &status.engines {
        if let Some(reason) = &engine.reason {
            writeln!(stdout, "\n  {TITLE}{}{TITLE:#}: {reason}", engine.name)?;
        }
    }
    stdout.flush()
}

fn row(engine: &EngineStatus) -> [String; 13] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    [
        engine.name.clone(),
        engine.model.clone(),
        engine.state.replace('_', " "),
        seconds(engine.state_seconds),
        or_dash(engine.pid.map(|pid| pid.to_string())),
        engine.in_flight.to_string(),
        engine.waiting.to_string(),
        engine.total_requests.to_string(),
        format!("{:.1}", engine.requests_per_second),
        seconds(engine.idle_seconds),
        engine.wakes.to_string(),
        or_dash(engine.last_wake_seconds.map(seconds)),
        or_dash(engine.memory_held_bytes.map(|bytes| ByteSize(bytes).to_string())),
    ]
}

/// A time for people.
fn seconds(seconds: f64) -> String {
    match seconds {
        short if short < 10.0 => format!("{short:.1} s"),
        short if short < 120.0 => format!("{short:.0} s"),
        long if long < 7200.0 => format!("{:.0} min", long / 60.0),
        long => format!("{:.1} h", long / 3600.0),
    }
}
