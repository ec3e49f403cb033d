//! The configuration of a controller, from either of two forms of YAML.
//!
//! `own.rs` reads kvik's form (`engines`), `kvcached.rs` that of kvcached's controller (`instances`). Both give one
//! [`EnginesConfig`], which `check.rs` validates as a whole. `command.rs` makes the command lines, `words.rs` splits text
//! as a shell does.

mod check;
mod command;
mod kvcached;
mod own;
mod words;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvik_gateway::GatewayConfig;
use kvik_memory::ledger::Policy;
use kvik_runtime::config::Sources;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::{EnginesError, Result};

/// Largest file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// All that a controller is told.
#[derive(Debug, Clone)]
pub struct EnginesConfig {
    /// The engines in the order of their start.
    pub engines: Vec<EngineConfig>,
    /// How many may be awake at a time.
    pub max_awake: Option<usize>,
    /// How many may start at a time.
    pub max_starting: usize,
    /// Time that a request waits for room before an engine with requests gives way.
    pub turn: Duration,
    /// Most requests that wait for one engine.
    pub max_waiting: usize,
    /// Whether a request wakes an engine that sleeps.
    pub wakes_on_request: bool,
    /// How logs of engines are kept.
    pub logs: LogConfig,
    /// Elastic memory of the engines.
    pub memory: MemoryConfig,
    /// The gateway in front of them.
    pub gateway: GatewayConfig,
    /// What of the file has no effect, in words.
    pub notes: Vec<String>,
}

/// How logs of engines are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// The folder; `None`: `logs` in the state folder.
    pub folder: Option<PathBuf>,
    /// A log that grows beyond this is moved to a second file, which the next one replaces.
    pub max_bytes: u64,
}

/// Elastic memory of the engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryConfig {
    /// The folder of the ledgers.
    pub dir: PathBuf,
    /// Whether weights follow the traffic of the models.
    pub follows_traffic: bool,
}

/// What an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// A worker of kvik.
    Kvik,
    /// vLLM's server.
    Vllm,
    /// SGLang's server.
    Sglang,
    /// Another server with the `OpenAI` API.
    Command,
}

/// What an engine does when it sleeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SleepMethod {
    /// Its process ends, and another one is started.
    Stop,
    /// vLLM's sleep mode.
    Vllm(VllmSleep),
    /// SGLang's release of memory; the folder or name that weights are read from again.
    Sglang {
        /// Where the weights are.
        weights: String,
    },
    /// It never sleeps.
    Never,
}

/// How deep vLLM sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VllmSleep {
    /// Only KV is given back; weights stay.
    KvCache,
    /// Weights go to the memory of the host.
    Level1,
    /// Weights are dropped, and read again.
    Level2,
}

/// One engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Its path in the file, such as `engines[0]`.
    pub field: String,
    /// Its name in logs and files.
    pub name: String,
    /// The model that requests name.
    pub model: String,
    /// What it is.
    pub kind: EngineKind,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// What is added to the environment.
    pub env: BTreeMap<String, String>,
    /// Where it listens.
    pub host: String,
    /// Where it listens.
    pub port: u16,
    /// The path that answers with 200 when it can serve.
    pub health_path: String,
    /// Whether it is awake from the start; `None`: if there is room.
    pub starts_awake: Option<bool>,
    /// What it does when it sleeps.
    pub sleep: SleepMethod,
    /// It sleeps after so long without a request; `None`: only for others that need room.
    pub after_idle: Option<Duration>,
    /// Time from its start to its first good answer.
    pub start_timeout: Duration,
    /// Time for its end before it is killed.
    pub stop_timeout: Duration,
    /// Its place in a ledger.
    pub memory: Option<EngineMemory>,
}

/// An engine's place in the ledger of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineMemory {
    /// The device: `host0`, or `GPU-` and its UUID.
    pub device: String,
    /// The group.
    pub group: String,
    /// What the group may have.
    pub policy: Policy,
}

impl EnginesConfig {
    /// Reads `path`; `program` is what workers of kvik are started with.
    ///
    /// # Errors
    /// If the file cannot be read, or a field has a value that it cannot have; the error names it.
    pub fn read(path: &Path, program: &Path) -> Result<Self> {
        let n_bytes = std::fs::metadata(path).map_err(EnginesError::io("read", path))?.len();
        if MAX_FILE_BYTES < n_bytes {
            let reason = format!("{n_bytes} bytes; allowed: at most {MAX_FILE_BYTES}");
            return Err(EnginesError::InvalidFile { path: path.to_owned(), reason });
        }
        let text = std::fs::read_to_string(path).map_err(EnginesError::io("read", path))?;
        Self::parse(&text, path, program)
    }

    fn parse(text: &str, path: &Path, program: &Path) -> Result<Self> {
        let invalid = |reason: String| EnginesError::InvalidFile { path: path.to_owned(), reason };
        // Without the lines around the place: they may have a secret.
        let document: Value = serde_saphyr::from_str(text)
            .map_err(|error: serde_saphyr::Error| invalid(error.without_snippet().to_string()))?;
        let has = |name| document.get(name).is_some();
        let config = match (has("engines"), has("instances")) {
            (true, false) => own::read(document, path, program)?,
            (false, true) => kvcached::read(document, path, program)?,
            (true, true) => {
                return Err(invalid("has `engines` and `instances`; allowed: one of the two".to_owned()));
            }
            (false, false) => {
                let allowed = "a list of `engines`, or `instances` in the form of kvcached's controller";
                return Err(invalid(format!("names no engine; allowed: {allowed}")));
            }
        };
        config.check()?;
        Ok(config)
    }
}

impl EngineConfig {
    /// The base of its addresses.
    pub fn url(&self) -> String {
        // An engine that listens on all addresses is reached on loopback.
        let host = match self.host.as_str() {
            "0.0.0.0" => "127.0.0.1".to_owned(),
            "::" => "[::1]".to_owned(),
            host if host.contains(':') => format!("[{host}]"),
            host => host.to_owned(),
        };
        format!("http://{host}:{}", self.port)
    }

    /// A digest of what its process was started with: a process with another one is not this engine.
    pub fn digest(&self) -> String {
        let text = json!([self.command, self.env, self.host, self.port, self.model]).to_string();
        Sha256::digest(text.as_bytes()).iter().fold(String::new(), |mut digest, byte| {
            // A string takes all that is written to it.
            let _ = write!(digest, "{byte:02x}");
            digest
        })
    }

    /// Whether it may sleep.
    pub fn sleeps(&self) -> bool {
        self.sleep != SleepMethod::Never
    }
}

impl EngineKind {
    /// The word for it in files and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvik => "kvik",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Command => "command",
        }
    }
}

/// Reads a part of a document; an error names the field by its path.
fn typed<T: serde::de::DeserializeOwned>(document: Value) -> Result<T> {
    serde_path_to_error::deserialize(document).map_err(|error| {
        let field = error.path().to_string();
        let field = if field == "." { "the file".to_owned() } else { field };
        EnginesError::invalid(field, "not what it should be", error.into_inner().to_string())
    })
}

/// The gateway's configuration from its section, the environment and `flags`.
fn gateway_config(section: &Value, flags: Value, path: &Path) -> Result<GatewayConfig> {
    let mut sources = Sources::read(None)?.with_flags(flags);
    sources.file = Some((path.display().to_string(), json!({ "gateway": section })));
    Ok(sources.load::<GatewayConfig>("gateway")?.value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VALID: &str = "max_awake: 2\nengines:\n  - {name: a, kind: vllm, port: 1, args: [x], env: {A: 1}, \
        sleep: {method: native, after_idle_s: 1}, memory: {max: 1GiB}}\n";
    const KVCACHED: &str = "kvcached: {a: 1}\nrouter: {enable_router: true}\ninstances:\n  \
        - {model: a, engine: vllm, engine_env: [A=1], engine_args: ['--port=1']}\n";

    fn parse(text: &str) -> Result<EnginesConfig> {
        EnginesConfig::parse(text, Path::new("engines.yaml"), Path::new("/bin/kvik"))
    }

    #[test]
    fn the_base_of_an_address_can_be_called() {
        let mut engine = parse(VALID).unwrap().engines.remove(0);
        for (host, url) in [
            ("localhost", "http://localhost:1"),
            ("0.0.0.0", "http://127.0.0.1:1"),
            ("::", "http://[::1]:1"),
            ("fe80::1", "http://[fe80::1]:1"),
        ] {
            host.clone_into(&mut engine.host);
            assert_eq!(engine.url(), url);
        }
    }

    #[test]
    fn a_digest_tells_how_a_process_is_started() {
        let engine = parse(VALID).unwrap().engines.remove(0);
        let mut other = engine.clone();
        other.after_idle = None;
        assert_eq!(engine.digest(), other.digest());
        other.env.insert("B".to_owned(), "2".to_owned());
        assert_ne!(engine.digest(), other.digest());
    }

    proptest! {
        #[test]
        fn no_text_is_more_than_an_error(text in ".{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn no_change_of_a_good_file_is_more_than_an_error(
            is_kvcached: bool,
            at in 0..200_usize,
            n_removed in 0..20_usize,
            inserted in "[ -~\n]{0,10}",
        ) {
            let good = if is_kvcached { KVCACHED } else { VALID };
            let start = at.min(good.len());
            let end = (start + n_removed).min(good.len());
            let _ = parse(&format!("{}{inserted}{}", &good[..start], &good[end..]));
        }
    }
}
