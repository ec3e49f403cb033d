//! What holds for a configuration as a whole.

use std::time::Duration;

use super::{EngineConfig, EnginesConfig};
use crate::error::{EnginesError, Result};

/// Most engines of one controller.
const MAX_ENGINES: usize = 256;
/// Longest time that can be configured.
const MAX_TIME: Duration = Duration::from_hours(365 * 24);

impl EnginesConfig {
    /// Refuses what cannot work, by the field's name.
    pub(super) fn check(&self) -> Result<()> {
        let n_engines = self.engines.len();
        if !(1..=MAX_ENGINES).contains(&n_engines) {
            return Err(EnginesError::invalid("engines", n_engines, format!("1 to {MAX_ENGINES} engines")));
        }
        for (place, engine) in self.engines.iter().enumerate() {
            engine.check()?;
            let before = &self.engines[..place];
            let field = |name: &str| format!("{}.{name}", engine.field);
            if before.iter().any(|other| other.name == engine.name) {
                return Err(EnginesError::invalid(field("name"), &engine.name, "each name once"));
            }
            if before.iter().any(|other| other.model == engine.model) {
                let allowed = "each model once: one engine serves a model";
                return Err(EnginesError::invalid(field("model"), &engine.model, allowed));
            }
            if before.iter().any(|other| other.port == engine.port) {
                return Err(EnginesError::invalid(field("port"), engine.port, "each port once"));
            }
            if self.gateway.backends.iter().any(|backend| backend.url.trim_end_matches('/') == engine.url()) {
                let allowed = "addresses of engines that are not under `engines`";
                return Err(EnginesError::invalid("gateway.backends", engine.url(), allowed));
            }
        }
        self.check_room()?;
        for (field, value, range) in [
            ("max_starting", self.max_starting, 1..=MAX_ENGINES),
            ("max_waiting", self.max_waiting, 1..=1_000_000),
        ] {
            if !range.contains(&value) {
                let allowed = format!("{} to {}", range.start(), range.end());
                return Err(EnginesError::invalid(field, value, allowed));
            }
        }
        if self.turn < Duration::from_millis(1) || MAX_TIME < self.turn {
            return Err(EnginesError::invalid("turn_s", self.turn.as_secs_f64(), "0.001 to 31536000"));
        }
        if self.logs.max_bytes < 4096 {
            return Err(EnginesError::invalid("logs.max_bytes", self.logs.max_bytes, "4096 or more"));
        }
        Ok(self.gateway.validate()?)
    }

    fn check_room(&self) -> Result<()> {
        let Some(max_awake) = self.max_awake else { return Ok(()) };
        if max_awake == 0 {
            return Err(EnginesError::invalid("max_awake", 0, "1 or more"));
        }
        let n_sleepless = self.engines.iter().filter(|engine| !engine.sleeps()).count();
        let n_needed = n_sleepless + usize::from(n_sleepless < self.engines.len());
        if max_awake < n_needed {
            let allowed = format!(
                "{n_needed} or more: {n_sleepless} engines never sleep, and the others need room beside them"
            );
            return Err(EnginesError::invalid("max_awake", max_awake, allowed));
        }
        let n_awake = self.engines.iter().filter(|engine| engine.starts_awake == Some(true)).count();
        if max_awake < n_awake {
            let allowed = format!("{n_awake} or more: so many engines have `start: awake`");
            return Err(EnginesError::invalid("max_awake", max_awake, allowed));
        }
        Ok(())
    }
}

impl EngineConfig {
    fn check(&self) -> Result<()> {
        let field = |name: &str| format!("{}.{name}", self.field);
        if !is_name(&self.name) {
            let allowed = "1 to 64 letters, digits, `.`, `_` and `-`, not beginning with `.` or `-`";
            return Err(EnginesError::invalid(field("name"), shown(&self.name), allowed));
        }
        let is_model = !self.model.is_empty()
            && self.model.len() <= 256
            && !self.model.chars().any(|c| c.is_control() || c.is_whitespace());
        if !is_model {
            let allowed = "1 to 256 bytes without white space";
            return Err(EnginesError::invalid(field("model"), shown(&self.model), allowed));
        }
        if self.port == 0 {
            return Err(EnginesError::invalid(field("port"), 0, "1 to 65535"));
        }
        if self.host.is_empty() || self.host.chars().any(|c| c.is_whitespace() || matches!(c, '/' | '@')) {
            return Err(EnginesError::invalid(field("host"), shown(&self.host), "a host name or an address"));
        }
        if self.command.first().is_none_or(String::is_empty) {
            let allowed = "the program and its arguments; needed for `kind: command`";
            return Err(EnginesError::invalid(field("command"), "empty", allowed));
        }
        if !self.health_path.starts_with('/') || self.health_path.chars().any(char::is_whitespace) {
            let allowed = "a path such as /health";
            return Err(EnginesError::invalid(field("health_path"), shown(&self.health_path), allowed));
        }
        for (name, value) in &self.env {
            let is_variable = !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0');
            if !is_variable {
                let allowed = "names without `=`, and no zero bytes";
                return Err(EnginesError::invalid(field("env"), shown(name), allowed));
            }
        }
        if self.command.iter().any(|word| word.contains('\0')) {
            return Err(EnginesError::invalid(
                field("args"),
                "a text with a zero byte",
                "text without zero bytes",
            ));
        }
        let times =
            [("start_timeout_s", Some(self.start_timeout)), ("stop_timeout_s", Some(self.stop_timeout))];
        for (name, time) in times.into_iter().chain([("sleep.after_idle_s", self.after_idle)]) {
            if time.is_some_and(|time| time < Duration::from_millis(1) || MAX_TIME < time) {
                let value = time.unwrap_or_default().as_secs_f64();
                return Err(EnginesError::invalid(field(name), value, "0.001 to 31536000"));
            }
        }
        if self.starts_awake == Some(false) && !self.sleeps() {
            let allowed = "awake, where `sleep.method` is never";
            return Err(EnginesError::invalid(field("start"), "asleep", allowed));
        }
        match &self.memory {
            Some(memory) if !is_group(&memory.group) => {
                let allowed = "1 to 64 letters, digits, `_` and `-`, not beginning with kvik_";
                Err(EnginesError::invalid(field("memory.group"), shown(&memory.group), allowed))
            }
            Some(memory) if memory.policy.weight == 0 => {
                Err(EnginesError::invalid(field("memory.weight"), 0, "1 or more"))
            }
            Some(memory) if memory.policy.max_bytes.is_some_and(|max| max < memory.policy.min_bytes) => {
                let allowed = "at most `memory.max`";
                Err(EnginesError::invalid(field("memory.min"), memory.policy.min_bytes, allowed))
            }
            _ => Ok(()),
        }
    }
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
        && !name.starts_with(['.', '-'])
}

fn is_group(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        && !name.starts_with("kvik_")
}

/// A text of the file as it may be printed.
fn shown(text: &str) -> String {
    let shown: String = text.chars().take(100).flat_map(char::escape_debug).collect();
    format!("\"{shown}\"")
}
