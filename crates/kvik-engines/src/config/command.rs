//! The command lines of engines.

use std::path::Path;

use super::{EngineKind, SleepMethod};

/// What a command line is made of.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) kind: EngineKind,
    pub(super) name: &'a str,
    pub(super) model: &'a str,
    /// A folder or the name of a repository; `None`: the model that kvik carries.
    pub(super) path: Option<&'a str>,
    pub(super) host: &'a str,
    pub(super) port: u16,
}

impl Launch<'_> {
    /// The program of a kind of engine with all that it must be told.
    pub(super) fn command(&self, program: &Path) -> Vec<String> {
        let Self { name, model, host, port, .. } = self;
        let port = port.to_string();
        let path = self.path.unwrap_or(model);
        let words: Vec<String> = match self.kind {
            EngineKind::Kvik => {
                let listen =
                    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
                let program = program.display().to_string();
                let served = format!("served_model_name={}", quoted(model));
                let mut words =
                    own([&program, "worker", "--listen", &listen, "--id", name, "--set", &served]);
                if let Some(path) = self.path {
                    words.extend(own(["--model", path]));
                }
                words
            }
            EngineKind::Vllm => {
                own(["vllm", "serve", path, "--host", host, "--port", &port, "--served-model-name", model])
            }
            EngineKind::Sglang => {
                let start = own(["python3", "-m", "sglang.launch_server", "--model-path", path]);
                let rest = own(["--host", host, "--port", &port, "--served-model-name", model]);
                start.into_iter().chain(rest).collect()
            }
            EngineKind::Command => Vec::new(),
        };
        words
    }

    /// A word of a command with `{name}`, `{model}`, `{path}`, `{host}` and `{port}` filled in.
    pub(super) fn fill(&self, word: &str) -> String {
        word.replace("{name}", self.name)
            .replace("{model}", self.model)
            .replace("{path}", self.path.unwrap_or(self.model))
            .replace("{host}", self.host)
            .replace("{port}", &self.port.to_string())
    }
}

/// A text that `--set` reads as text, whatever it looks like.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn own<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

/// The value of `--flag value` or `--flag=value` in a command line; the last one counts.
pub(super) fn flag_value<'a>(words: &'a [String], flag: &str) -> Option<&'a str> {
    let mut value = None;
    for (place, word) in words.iter().enumerate() {
        if word == flag {
            value = words.get(place + 1).map(String::as_str);
        } else if let Some(text) = word.strip_prefix(flag).and_then(|rest| rest.strip_prefix('=')) {
            value = Some(text);
        }
    }
    value
}

/// The flag and the variable without which an engine does not sleep by itself.
pub(super) fn sleep_switches(
    sleep: &SleepMethod,
) -> (Option<&'static str>, Option<(&'static str, &'static str)>) {
    match sleep {
        SleepMethod::Vllm(_) => (Some("--enable-sleep-mode"), Some(("VLLM_SERVER_DEV_MODE", "1"))),
        SleepMethod::Sglang { .. } => (Some("--enable-memory-saver"), None),
        SleepMethod::Stop | SleepMethod::Never => (None, None),
    }
}

/// Whether a command line lets an engine of `kind` sleep by itself.
pub(super) fn can_sleep(kind: EngineKind, words: &[String]) -> bool {
    let flag = match kind {
        EngineKind::Vllm => "--enable-sleep-mode",
        EngineKind::Sglang => "--enable-memory-saver",
        EngineKind::Kvik | EngineKind::Command => return false,
    };
    words.iter().any(|word| word == flag)
}
