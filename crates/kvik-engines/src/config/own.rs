//! kvik's form of the file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvik_memory::ledger::{DEFAULT_DIR, Policy};
use kvik_types::ByteSize;
use serde::Deserialize;
use serde_json::Value;

use super::command::{Launch, can_sleep, sleep_switches};
use super::{
    EngineConfig, EngineKind, EngineMemory, EnginesConfig, LogConfig, MemoryConfig, SleepMethod, VllmSleep,
    gateway_config, typed,
};
use crate::error::{EnginesError, Result};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    gateway: Value,
    max_awake: Option<usize>,
    #[serde(default = "max_starting")]
    max_starting: usize,
    #[serde(default = "turn_s")]
    turn_s: f64,
    #[serde(default = "max_waiting")]
    max_waiting: usize,
    #[serde(default = "yes")]
    wakes_on_request: bool,
    #[serde(default)]
    logs: Logs,
    #[serde(default)]
    memory: Memory,
    engines: Vec<Engine>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Logs {
    folder: Option<PathBuf>,
    max_bytes: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Memory {
    dir: Option<PathBuf>,
    #[serde(default)]
    follows_traffic: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Engine {
    name: String,
    model: Option<String>,
    kind: Kind,
    path: Option<String>,
    #[serde(default = "loopback")]
    host: String,
    port: u16,
    #[serde(default)]
    command: Vec<Text>,
    #[serde(default)]
    args: Vec<Text>,
    #[serde(default)]
    env: BTreeMap<String, Text>,
    health_path: Option<String>,
    #[serde(default)]
    start: Start,
    #[serde(default)]
    sleep: Sleep,
    start_timeout_s: Option<f64>,
    stop_timeout_s: Option<f64>,
    memory: Option<Group>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Kvik,
    Vllm,
    Sglang,
    Command,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Start {
    #[default]
    Auto,
    Awake,
    Asleep,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sleep {
    #[serde(default)]
    method: Method,
    level: Option<Level>,
    after_idle_s: Option<f64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Method {
    #[default]
    Auto,
    Stop,
    Native,
    Never,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Level {
    KvCache,
    Weights,
    All,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    #[serde(rename = "group")]
    name: Option<String>,
    #[serde(default = "host_device")]
    device: String,
    min: Option<Size>,
    max: Option<Size>,
    #[serde(default = "one")]
    weight: u32,
    #[serde(default)]
    priority: u32,
}

/// A scalar as text: variables and arguments may be written without quotes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub(super) struct Text(pub(super) String);

/// A number of bytes, with or without a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
struct Size(u64);

impl TryFrom<Value> for Text {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        match value {
            Value::String(text) => Ok(Self(text)),
            Value::Bool(_) | Value::Number(_) => Ok(Self(value.to_string())),
            Value::Null | Value::Array(_) | Value::Object(_) => Err("allowed: a text or a number"),
        }
    }
}

impl TryFrom<Value> for Size {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        let text = Text::try_from(value)?.0;
        let size = text.parse::<ByteSize>();
        size.map(|size| Self(size.0)).map_err(|_| format!("{text:?}; allowed: bytes, or a size such as 2GiB"))
    }
}

fn max_starting() -> usize {
    4
}

fn turn_s() -> f64 {
    5.0
}

fn max_waiting() -> usize {
    1024
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

fn loopback() -> String {
    "127.0.0.1".to_owned()
}

fn host_device() -> String {
    "host0".to_owned()
}

/// Reads a document that has `engines`.
pub(super) fn read(document: Value, path: &Path, program: &Path) -> Result<EnginesConfig> {
    let file: File = typed(document)?;
    let memory = MemoryConfig {
        dir: file.memory.dir.unwrap_or_else(|| PathBuf::from(DEFAULT_DIR)),
        follows_traffic: file.memory.follows_traffic,
    };
    let mut engines = Vec::new();
    for (place, engine) in file.engines.into_iter().enumerate() {
        engines.push(engine.resolve(format!("engines[{place}]"), &memory, program)?);
    }
    Ok(EnginesConfig {
        engines,
        max_awake: file.max_awake,
        max_starting: file.max_starting,
        turn: seconds("turn_s", file.turn_s)?,
        max_waiting: file.max_waiting,
        wakes_on_request: file.wakes_on_request,
        logs: LogConfig {
            folder: file.logs.folder,
            max_bytes: file.logs.max_bytes.map_or(DEFAULT_LOG_BYTES, |size| size.0),
        },
        memory,
        gateway: gateway_config(&file.gateway, Value::Null, path)?,
        notes: Vec::new(),
    })
}

/// Size at which a log is moved, unless it is set.
pub(super) const DEFAULT_LOG_BYTES: u64 = 16 << 20;

impl Engine {
    fn resolve(self, field: String, memory: &MemoryConfig, program: &Path) -> Result<EngineConfig> {
        let inner = |name: &str| format!("{field}.{name}");
        let kind = match self.kind {
            Kind::Kvik => EngineKind::Kvik,
            Kind::Vllm => EngineKind::Vllm,
            Kind::Sglang => EngineKind::Sglang,
            Kind::Command => EngineKind::Command,
        };
        let model = self.model.clone().unwrap_or_else(|| self.name.clone());
        let launch = Launch {
            kind,
            name: &self.name,
            model: &model,
            path: self.path.as_deref(),
            host: &self.host,
            port: self.port,
        };
        let mut command = if self.command.is_empty() {
            launch.command(program)
        } else {
            self.command.iter().map(|word| launch.fill(&word.0)).collect()
        };
        command.extend(self.args.iter().map(|word| launch.fill(&word.0)));
        if self.args.iter().any(|word| word.0.split('=').next() == Some("--served-model-name")) {
            let allowed = "`model`, which says what requests name";
            return Err(EnginesError::invalid(inner("args"), "--served-model-name", allowed));
        }
        let weights = self.path.clone().unwrap_or_else(|| model.clone());
        let sleep = self.sleep.method(&field, kind, &command, weights)?;
        let mut env = BTreeMap::new();
        let (flag, variable) = sleep_switches(&sleep);
        command.extend(flag.filter(|flag| !command.iter().any(|word| word == flag)).map(str::to_owned));
        env.extend(variable.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let group = self.memory.map(|group| group.resolve(&self.name));
        if let Some(group) = &group {
            env.insert("ENABLE_KVCACHED".to_owned(), "true".to_owned());
            env.insert("KVCACHED_IPC_NAME".to_owned(), group.group.clone());
            if kind == EngineKind::Kvik && memory.dir != Path::new(DEFAULT_DIR) {
                command.extend(["--set".to_owned(), format!("memory.dir={}", memory.dir.display())]);
            }
        }
        env.extend(self.env.into_iter().map(|(name, value)| (name, value.0)));
        let start_timeout_s = self.start_timeout_s.unwrap_or(default_start_timeout_s(kind));
        Ok(EngineConfig {
            starts_awake: match self.start {
                Start::Auto => None,
                Start::Awake => Some(true),
                Start::Asleep => Some(false),
            },
            after_idle: self
                .sleep
                .after_idle_s
                .map(|after_s| seconds(&inner("sleep.after_idle_s"), after_s))
                .transpose()?,
            start_timeout: seconds(&inner("start_timeout_s"), start_timeout_s)?,
            stop_timeout: seconds(&inner("stop_timeout_s"), self.stop_timeout_s.unwrap_or(STOP_TIMEOUT_S))?,
            health_path: self.health_path.unwrap_or_else(|| default_health_path(kind).to_owned()),
            name: self.name,
            model,
            kind,
            command,
            env,
            host: self.host,
            port: self.port,
            sleep,
            memory: group,
            field,
        })
    }
}

impl Sleep {
    /// What sleep means for an engine of `kind` with this command line.
    fn method(
        &self,
        field: &str,
        kind: EngineKind,
        command: &[String],
        weights: String,
    ) -> Result<SleepMethod> {
        let is_native = match self.method {
            Method::Never => return Ok(SleepMethod::Never),
            Method::Stop => false,
            Method::Auto => can_sleep(kind, command),
            Method::Native => true,
        };
        if self.level.is_some() && !(is_native && kind == EngineKind::Vllm) {
            let allowed = "none: only vLLM's own sleep has levels";
            return Err(EnginesError::invalid(format!("{field}.sleep.level"), "set", allowed));
        }
        match kind {
            _ if !is_native => Ok(SleepMethod::Stop),
            EngineKind::Vllm => Ok(SleepMethod::Vllm(match self.level.unwrap_or(Level::Weights) {
                Level::KvCache => VllmSleep::KvCache,
                Level::Weights => VllmSleep::Level1,
                Level::All => VllmSleep::Level2,
            })),
            EngineKind::Sglang => Ok(SleepMethod::Sglang { weights }),
            EngineKind::Kvik | EngineKind::Command => {
                let allowed = "auto, stop or never for this kind of engine";
                Err(EnginesError::invalid(format!("{field}.sleep.method"), "native", allowed))
            }
        }
    }
}

impl Group {
    fn resolve(self, name: &str) -> EngineMemory {
        EngineMemory {
            device: self.device,
            group: self.name.unwrap_or_else(|| name.replace('.', "_")),
            policy: Policy {
                min_bytes: self.min.map_or(0, |size| size.0),
                max_bytes: self.max.map(|size| size.0),
                weight: self.weight,
                priority: self.priority,
            },
        }
    }
}

/// Time for an engine's end, in seconds.
pub(super) const STOP_TIMEOUT_S: f64 = 30.0;

/// Time from an engine's start to its first good answer, in seconds: others read their weights from a network and compile.
pub(super) fn default_start_timeout_s(kind: EngineKind) -> f64 {
    match kind {
        EngineKind::Kvik => 120.0,
        EngineKind::Vllm | EngineKind::Sglang | EngineKind::Command => 900.0,
    }
}

/// The path that says that an engine can serve.
pub(super) fn default_health_path(kind: EngineKind) -> &'static str {
    if kind == EngineKind::Kvik { "/ready" } else { "/health" }
}

/// A time of the file.
pub(super) fn seconds(field: &str, value_s: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(value_s)
        .map_err(|_| EnginesError::invalid(field, value_s, "0.001 to 31536000 seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<EnginesConfig> {
        EnginesConfig::parse(text, Path::new("engines.yaml"), Path::new("/bin/kvik"))
    }

    #[test]
    fn a_small_file_has_all_defaults() {
        let config = parse("engines: [{name: a, kind: kvik, port: 8101}]").unwrap();
        let engine = &config.engines[0];
        let expected = "/bin/kvik worker --listen 127.0.0.1:8101 --id a --set served_model_name='a'";
        assert_eq!(engine.command.join(" "), expected);
        assert_eq!((engine.model.as_str(), engine.health_path.as_str()), ("a", "/ready"));
        assert_eq!((engine.sleep.clone(), engine.after_idle), (SleepMethod::Stop, None));
        assert_eq!((config.max_awake, config.max_waiting), (None, 1024));
        assert_eq!(config.gateway.listen, "127.0.0.1:8080");
    }

    #[test]
    fn engines_of_other_projects_get_their_flags() {
        let text = "max_awake: 1\nengines:\n\
            - {name: v, kind: vllm, path: org/v, port: 1, args: [--dtype, bfloat16], sleep: {method: native, level: all}}\n\
            - {name: s, kind: sglang, path: org/s, model: big, port: 2, args: [--enable-memory-saver]}\n\
            - {name: c, kind: command, port: 3, command: [serve, '{model}', '{host}:{port}'], env: {A: 1, B: true}}\n";
        let config = parse(text).unwrap();
        let [vllm, sglang, other] = config.engines.as_slice() else { panic!("{config:?}") };
        let expected = "vllm serve org/v --host 127.0.0.1 --port 1 --served-model-name v --dtype bfloat16 --enable-sleep-mode";
        assert_eq!(vllm.command.join(" "), expected);
        assert_eq!(vllm.env["VLLM_SERVER_DEV_MODE"], "1");
        assert_eq!(vllm.sleep, SleepMethod::Vllm(VllmSleep::Level2));
        assert_eq!(sglang.sleep, SleepMethod::Sglang { weights: "org/s".to_owned() });
        assert_eq!(sglang.model, "big");
        assert_eq!(other.command, ["serve", "c", "127.0.0.1:3"]);
        assert_eq!((other.env["A"].as_str(), other.env["B"].as_str()), ("1", "true"));
        assert_eq!(other.sleep, SleepMethod::Stop);
    }

    #[test]
    fn memory_names_a_group_and_its_limits() {
        let text = "memory: {dir: /tmp/m}\nengines: [{name: a.b, kind: kvik, port: 1, memory: {max: 2GiB, weight: 3}}]";
        let config = parse(text).unwrap();
        let engine = &config.engines[0];
        let memory = engine.memory.as_ref().unwrap();
        assert_eq!((memory.group.as_str(), memory.device.as_str()), ("a_b", "host0"));
        assert_eq!((memory.policy.max_bytes, memory.policy.weight), (Some(2 << 30), 3));
        assert_eq!(engine.env["KVCACHED_IPC_NAME"], "a_b");
        assert!(engine.command.join(" ").ends_with("--set memory.dir=/tmp/m"), "{:?}", engine.command);
    }

    #[test]
    fn a_bad_field_is_named_with_what_is_allowed() {
        let engine = "name: a, kind: kvik, port: 1";
        for (text, words) in [
            ("", "names no engine; allowed: a list of `engines`"),
            ("a: [", "engines.yaml"),
            ("engines: []", "`engines` is 0; allowed: 1 to 256"),
            (
                "engines: 3",
                "`engines` is not what it should be; allowed: invalid type: integer `3`, expected a sequence",
            ),
            ("engines: [{name: a}]", "`engines[0]` is not what it should be; allowed: missing field `kind`"),
            (
                "engines: [{name: a, kind: tgi, port: 1}]",
                "unknown variant `tgi`, expected one of `kvik`, `vllm`",
            ),
            ("engines: [{name: a, kind: kvik, port: 99999}]", "`engines[0].port`"),
            ("engines: [{name: a, kind: kvik, prt: 1}]", "unknown field `prt`"),
            (
                "engines: [{name: a b, kind: kvik, port: 1}]",
                "`engines[0].name` is \"a b\"; allowed: 1 to 64 letters",
            ),
            ("engines: [{name: a, kind: kvik, port: 0}]", "`engines[0].port` is 0; allowed: 1 to 65535"),
            ("engines: [{name: a, kind: command, port: 1}]", "`engines[0].command` is empty"),
            ("max_awake: 0\nengines: [{E}]", "`max_awake` is 0; allowed: 1 or more"),
            ("max_awke: 1\nengines: [{E}]", "unknown field `max_awke`"),
            ("engines: [{E}, {E}]", "`engines[1].name` is a; allowed: each name once"),
            (
                "engines: [{E}, {name: b, model: a, kind: kvik, port: 2}]",
                "`engines[1].model` is a; allowed: each model once",
            ),
            (
                "engines: [{E}, {name: b, kind: kvik, port: 1}]",
                "`engines[1].port` is 1; allowed: each port once",
            ),
            (
                "engines: [{E, sleep: {method: native}}]",
                "`engines[0].sleep.method` is native; allowed: auto, stop or never",
            ),
            ("engines: [{E, sleep: {level: all}}]", "`engines[0].sleep.level` is set; allowed: none"),
            ("engines: [{E, sleep: {after_idle_s: -1}}]", "`engines[0].sleep.after_idle_s` is -1; allowed"),
            ("engines: [{E, memory: {max: 1, min: 2}}]", "`engines[0].memory.min` is 2; allowed: at most"),
            (
                "engines: [{E, args: [--served-model-name=b]}]",
                "`engines[0].args` is --served-model-name; allowed: `model`",
            ),
            ("engines: [{E, memory: {max: lots}}]", "`engines[0].memory.max`"),
            ("engines: [{E, memory: {weight: 0}}]", "`engines[0].memory.weight` is 0; allowed: 1 or more"),
            ("engines: [{E, memory: {group: kvik_x}}]", "`engines[0].memory.group` is \"kvik_x\""),
            (
                "max_awake: 1\nengines: [{E, sleep: {method: never}}, {name: b, kind: kvik, port: 2}]",
                "`max_awake` is 1; allowed: 2 or more",
            ),
            ("gateway: {listn: x}\nengines: [{E}]", "listn"),
            (
                "gateway: {backends: [{url: 'http://127.0.0.1:1'}]}\nengines: [{E}]",
                "`gateway.backends` is http://127.0.0.1:1",
            ),
            ("engines: [{E}]\ninstances: []", "has `engines` and `instances`"),
        ] {
            let message = parse(&text.replace('E', engine)).unwrap_err().to_string();
            assert!(message.contains(words), "{text}\n{message}\n{words}");
        }
    }
}
