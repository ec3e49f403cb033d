//! The engines of a controller: asked for over its socket, and as lines of the screen.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvik_engines::{ControllerClient, EngineStatus, default_state_folder};
use tokio::runtime::Runtime;

use crate::size::compact;

/// Time for an answer; a controller that takes longer is shown as none.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Least width of the column of models.
const MIN_MODEL_WIDTH: usize = 8;

/// Asks the controller of a state folder.
#[derive(Debug)]
pub(crate) struct EnginesFeed {
    client: ControllerClient,
    /// `None` if it cannot be made; then there are no engines.
    runtime: Option<Runtime>,
}

/// A line of the screen about an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineLine {
    pub(crate) text: String,
    /// Whether it needs attention.
    pub(crate) is_failed: bool,
    /// Whether it serves nothing now.
    pub(crate) is_asleep: bool,
}

impl EnginesFeed {
    /// Asks at `state`, or where controllers keep their state.
    pub(crate) fn new(state: Option<&Path>) -> Self {
        let state = state.map_or_else(default_state_folder, PathBuf::from);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        Self { client: ControllerClient::new(&state), runtime: runtime.ok() }
    }

    /// The engines, by name; none where no controller answers.
    pub(crate) fn read(&self) -> Vec<EngineStatus> {
        let Some(runtime) = &self.runtime else { return Vec::new() };
        let asking = async { tokio::time::timeout(TIMEOUT, self.client.status()).await };
        match runtime.block_on(asking) {
            Ok(Ok(status)) => status.engines,
            Ok(Err(_)) | Err(_) => Vec::new(),
        }
    }
}

/// The title of the lines.
pub(crate) fn title(width: usize) -> String {
    let columns = ["STATE", "REQ/S", "RUN", "WAIT", "IDLE", "WAKES", "KV"].map(str::to_owned);
    line(" model", &columns, width)
}

/// A line for each engine, `width` columns wide: those that serve first.
pub(crate) fn lines(engines: &[EngineStatus], width: usize) -> Vec<EngineLine> {
    let mut engines: Vec<&EngineStatus> = engines.iter().collect();
    engines.sort_by_key(|engine| match engine.state.as_str() {
        "failed" => 0,
        "asleep" => 2,
        _ => 1,
    });
    let of = |engine: &&EngineStatus| {
        let columns = [
            engine.state.replace('_', " "),
            format!("{:.1}", engine.requests_per_second),
            engine.in_flight.to_string(),
            engine.waiting.to_string(),
            format!("{:.0}s", engine.idle_seconds),
            engine.wakes.to_string(),
            engine.memory_held_bytes.map_or("-".to_owned(), compact),
        ];
        EngineLine {
            text: line(&format!(" {}", engine.model), &columns, width),
            is_failed: engine.state == "failed",
            is_asleep: engine.state == "asleep",
        }
    };
    engines.iter().map(of).collect()
}

fn line(model: &str, columns: &[String; 7], width: usize) -> String {
    let [state, rate, running, waiting, idle, wakes, held] = columns;
    let rest = format!("{state:<15}{rate:>7}{running:>5}{waiting:>6}{idle:>8}{wakes:>7}{held:>8}");
    let model_width = width.saturating_sub(rest.chars().count()).max(MIN_MODEL_WIDTH);
    let model: String = model.chars().filter(|c| !c.is_control()).take(model_width - 1).collect();
    format!("{model:<model_width$}{rest}")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An engine with some traffic.
    pub(in super::super) fn engine(model: &str, state: &str) -> EngineStatus {
        let value = serde_json::json!({
            "name": model, "model": model, "kind": "kvik", "state": state, "state_seconds": 1.0, "url": "", "pid": null,
            "in_flight": 2, "waiting": 1, "total_requests": 9, "failed_requests": 0, "requests_per_second": 1.25,
            "idle_seconds": 3.4, "wakes": 5, "last_wake_seconds": null, "failures": 0, "restarts": 0, "reason": null,
            "log": "", "memory_group": null, "memory_held_bytes": 2 << 20, "memory_used_bytes": 0,
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn engines_that_need_a_look_come_first_and_those_that_sleep_last() {
        let engines = [engine("a", "asleep"), engine("b", "falling_asleep"), engine("c", "failed")];
        let lines = lines(&engines, 70);
        let texts: Vec<&str> = lines.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                " c            failed             1.2    2     1      3s      5   2.00M",
                " b            falling asleep     1.2    2     1      3s      5   2.00M",
                " a            asleep             1.2    2     1      3s      5   2.00M",
            ]
        );
        assert_eq!(title(70).len(), 70);
        assert!(lines[0].is_failed && lines[2].is_asleep && !lines[1].is_asleep);
    }

    #[test]
    fn a_long_name_is_cut_and_cannot_steer_the_terminal() {
        let lines = lines(&[engine("\u{1b}[31m/a/very/long/name/of/a/model", "ready")], 70);
        assert_eq!(lines[0].text.chars().count(), 70);
        assert!(!lines[0].text.contains('\u{1b}'));
    }

    #[test]
    fn without_a_controller_there_are_no_engines() {
        let folder = tempfile::tempdir().unwrap();
        assert!(EnginesFeed::new(Some(folder.path())).read().is_empty());
    }
}
