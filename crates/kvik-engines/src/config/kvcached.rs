//! The form of kvcached's controller, read as it is.
//!
//! What that controller leaves to its user is done here: a host and a port are found in the arguments of an engine, or
//! are given to it. Fields without a meaning are noted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvik_memory::ledger::DEFAULT_DIR;
use kvik_runtime::config::variable;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::command::{Launch, can_sleep, flag_value};
use super::own::{
    DEFAULT_LOG_BYTES, STOP_TIMEOUT_S, Text, default_health_path, default_start_timeout_s, seconds,
};
use super::words::split;
use super::{
    EngineConfig, EngineKind, EnginesConfig, LogConfig, MemoryConfig, SleepMethod, VllmSleep, gateway_config,
    typed,
};
use crate::error::{EnginesError, Result};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    kvcached: Option<BTreeMap<String, Text>>,
    router: Option<Router>,
    sleep_manager: Option<SleepManager>,
    launch_delay_seconds: Option<Value>,
    instances: Vec<Instance>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Router {
    #[serde(default, rename = "enable_router")]
    is_enabled: bool,
    #[serde(rename = "router_port")]
    port: Option<u16>,
    #[serde(rename = "router_host")]
    host: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SleepManager {
    idle_threshold_seconds: Option<f64>,
    check_interval_seconds: Option<Value>,
    #[serde(default)]
    auto_sleep_enabled: bool,
    wakeup_on_request: Option<bool>,
    min_sleep_duration: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Instance {
    name: Option<String>,
    model: String,
    engine: String,
    #[serde(default)]
    using_venv: bool,
    venv_path: Option<PathBuf>,
    #[serde(default)]
    kvcached_env: Vec<Text>,
    #[serde(default)]
    engine_env: Vec<Text>,
    #[serde(alias = "args")]
    engine_args: Option<Arguments>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Arguments {
    Line(String),
    Words(Vec<Text>),
}

/// Time without a request after which an engine sleeps, if that is on and not set, in seconds.
const IDLE_THRESHOLD_S: f64 = 300.0;
/// The first port that is given to an engine whose arguments name none.
const FIRST_PORT: u16 = 12_346;

/// Reads a document that has `instances`.
pub(super) fn read(document: Value, path: &Path, program: &Path) -> Result<EnginesConfig> {
    let file: File = typed(document)?;
    let mut notes = Vec::new();
    let mut note = |is_set: bool, text: &str| {
        if is_set {
            notes.push(text.to_owned());
        }
    };
    let manager = file.sleep_manager.unwrap_or_default();
    note(
        file.launch_delay_seconds.is_some(),
        "`launch_delay_seconds` has no effect: `max_starting` of kvik's own form bounds how many engines start at a time",
    );
    note(
        manager.check_interval_seconds.is_some(),
        "`sleep_manager.check_interval_seconds` has no effect: idle engines are seen at once",
    );
    note(
        manager.min_sleep_duration.is_some(),
        "`sleep_manager.min_sleep_duration` has no effect: a request never waits for the end of a sleep",
    );
    let router = file.router.unwrap_or_default();
    let listen = if router.is_enabled {
        let host = router.host.unwrap_or_else(|| "127.0.0.1".to_owned());
        let host = if host == "localhost" { "127.0.0.1".to_owned() } else { host };
        format!("{host}:{}", router.port.unwrap_or(8080))
    } else {
        note(true, "without `router.enable_router` the gateway listens on a free port of loopback");
        "127.0.0.1:0".to_owned()
    };
    let after_idle = manager
        .auto_sleep_enabled
        .then(|| manager.idle_threshold_seconds.unwrap_or(IDLE_THRESHOLD_S))
        .map(|after_s| seconds("sleep_manager.idle_threshold_seconds", after_s))
        .transpose()?;
    let shared = file.kvcached.unwrap_or_default();
    let shared: BTreeMap<String, String> =
        shared.into_iter().map(|(name, value)| (name.to_uppercase(), value.0)).collect();
    let mut engines = Vec::new();
    for (place, instance) in file.instances.into_iter().enumerate() {
        let port = FIRST_PORT.saturating_add(place as u16);
        let engine = instance.resolve(format!("instances[{place}]"), &shared, port, program)?;
        engines.push(EngineConfig { after_idle, ..engine });
    }
    let flags = Map::from_iter([("listen".to_owned(), json!(listen))]);
    Ok(EnginesConfig {
        engines,
        max_awake: None,
        max_starting: 4,
        turn: seconds("turn_s", 5.0)?,
        max_waiting: 1024,
        wakes_on_request: manager.wakeup_on_request.unwrap_or(true),
        logs: LogConfig { folder: None, max_bytes: DEFAULT_LOG_BYTES },
        memory: MemoryConfig { dir: PathBuf::from(DEFAULT_DIR), follows_traffic: false },
        gateway: gateway_config(&Value::Null, Value::Object(flags), path)?,
        notes,
    })
}

impl Instance {
    fn resolve(
        self,
        field: String,
        shared: &BTreeMap<String, String>,
        free_port: u16,
        program: &Path,
    ) -> Result<EngineConfig> {
        let inner = |name: &str| format!("{field}.{name}");
        let kind = match self.engine.to_lowercase().as_str() {
            "vllm" => EngineKind::Vllm,
            "sglang" | "sgl" => EngineKind::Sglang,
            "kvik" => EngineKind::Kvik,
            _ => {
                return Err(EnginesError::invalid(
                    inner("engine"),
                    &self.engine,
                    "vllm, sglang, sgl or kvik",
                ));
            }
        };
        let name = self
            .name
            .clone()
            .unwrap_or_else(|| self.model.rsplit('/').next().unwrap_or(&self.model).to_owned());
        let mut args = Vec::new();
        let lines = match self.engine_args {
            None => Vec::new(),
            Some(Arguments::Line(line)) => vec![line],
            Some(Arguments::Words(words)) => words.into_iter().map(|word| word.0).collect(),
        };
        for line in lines {
            let words = split(&line);
            args.extend(words.ok_or_else(|| {
                EnginesError::invalid(inner("engine_args"), format!("{line:?}"), "text with closed quotes")
            })?);
        }
        let host = flag_value(&args, "--host").unwrap_or("127.0.0.1").to_owned();
        let host = if host == "0.0.0.0" || host == "localhost" { "127.0.0.1".to_owned() } else { host };
        let given_port = flag_value(&args, "--port");
        let port = match given_port {
            None => free_port,
            Some(text) => text.parse().map_err(|_| {
                EnginesError::invalid(inner("engine_args"), format!("--port {text}"), "1 to 65535")
            })?,
        };
        let has_port = given_port.is_some();
        let mut env = shared.clone();
        for (list, variables) in [("kvcached_env", &self.kvcached_env), ("engine_env", &self.engine_env)] {
            for variable in variables {
                let Some((name, value)) = variable.0.split_once('=') else {
                    return Err(EnginesError::invalid(inner(list), "a text without `=`", "NAME=VALUE"));
                };
                env.insert(name.trim().to_owned(), value.to_owned());
            }
        }
        let venv = match (self.using_venv, self.venv_path) {
            (false, _) => None,
            (true, Some(path)) => Some(std::path::absolute(&path).unwrap_or(path)),
            (true, None) => {
                let allowed = "the folder of a virtual environment, where `using_venv` is true";
                return Err(EnginesError::invalid(inner("venv_path"), "missing", allowed));
            }
        };
        if let Some(venv) = &venv {
            let bin = venv.join("bin").display().to_string();
            let path = variable("PATH").map_or(bin.clone(), |path| format!("{bin}:{path}"));
            env.insert("PATH".to_owned(), path);
            env.insert("VIRTUAL_ENV".to_owned(), venv.display().to_string());
        }
        let python = venv.map_or("python3".to_owned(), |venv| venv.join("bin/python").display().to_string());
        let path = self.model;
        let mut command = match kind {
            EngineKind::Kvik => {
                // Arguments of a worker name one address.
                args = without_flags(&args, &["--host", "--port"]);
                let folder = Path::new(&path).is_dir().then_some(path.as_str());
                Launch { kind, name: &name, model: &path, path: folder, host: &host, port }.command(program)
            }
            EngineKind::Sglang => own([&python, "-m", "sglang.launch_server", "--model-path", &path]),
            EngineKind::Vllm | EngineKind::Command => {
                own([&python, "-m", "vllm.entrypoints.openai.api_server", "--model", &path])
            }
        };
        command.extend(args);
        if !has_port && kind != EngineKind::Kvik {
            command.extend(own(["--port", &port.to_string()]));
        }
        let sleep = match kind {
            EngineKind::Vllm if can_sleep(kind, &command) => {
                env.entry("VLLM_SERVER_DEV_MODE".to_owned()).or_insert_with(|| "1".to_owned());
                SleepMethod::Vllm(VllmSleep::Level1)
            }
            EngineKind::Sglang if can_sleep(kind, &command) => SleepMethod::Sglang { weights: path.clone() },
            _ => SleepMethod::Stop,
        };
        // What requests must name for the engine to know it.
        let model = flag_value(&command, "--served-model-name").unwrap_or(&path).to_owned();
        Ok(EngineConfig {
            name,
            model,
            kind,
            command,
            env,
            host,
            port,
            health_path: default_health_path(kind).to_owned(),
            starts_awake: None,
            sleep,
            after_idle: None,
            start_timeout: seconds("start_timeout_s", default_start_timeout_s(kind))?,
            stop_timeout: seconds("stop_timeout_s", STOP_TIMEOUT_S)?,
            memory: None,
            field,
        })
    }
}

/// A command line without these flags and their values.
fn without_flags(words: &[String], flags: &[&str]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if flags.contains(&word.as_str()) {
            words.next();
        } else if !flags.iter().any(|flag| word.starts_with(&format!("{flag}="))) {
            kept.push(word.clone());
        }
    }
    kept
}

fn own<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn parse(text: &str) -> Result<EnginesConfig> {
        EnginesConfig::parse(text, Path::new("engines.yaml"), Path::new("/bin/kvik"))
    }

    const EXAMPLE: &str = "\
kvcached:
  kvcached_gpu_utilization: 0.95
  kvcached_page_prealloc_enabled: true
router:
  enable_router: true
  router_port: 8090
  router_host: localhost
sleep_manager:
  idle_threshold_seconds: 120
  check_interval_seconds: 60
  auto_sleep_enabled: true
  wakeup_on_request: true
  min_sleep_duration: 80
instances:
  - name: instance1
    model: meta-llama/Llama-3.2-1B
    engine: vllm
    using_venv: true
    venv_path: /opt/venv
    kvcached_env:
      - \"ENABLE_KVCACHED=true\"
      - \"KVCACHED_IPC_NAME=VLLM\"
    engine_env:
      - \"VLLM_ATTENTION_BACKEND=FLASH_ATTN\"
    engine_args:
      - \"--host=localhost\"
      - \"--port=12346\"
      - \"--gpu-memory-utilization 0.5\"
      - \"--enable-sleep-mode\"
  - model: Qwen/Qwen3-0.6B
    engine: sgl
    engine_args: \"--mem-fraction-static 0.5 --port 30000 --served-model-name qwen\"
";

    #[test]
    fn the_example_of_kvcached_is_read_as_it_is() {
        let config = parse(EXAMPLE).unwrap();
        assert_eq!(config.gateway.listen, "127.0.0.1:8090");
        assert_eq!(config.notes.len(), 2, "{:?}", config.notes);
        let [vllm, sglang] = config.engines.as_slice() else { panic!("{config:?}") };
        assert_eq!(
            vllm.command.join(" "),
            "/opt/venv/bin/python -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-3.2-1B \
             --host=localhost --port=12346 --gpu-memory-utilization 0.5 --enable-sleep-mode"
        );
        assert_eq!(vllm.url(), "http://127.0.0.1:12346");
        assert_eq!(vllm.after_idle, Some(Duration::from_mins(2)));
        assert_eq!(vllm.sleep, SleepMethod::Vllm(VllmSleep::Level1));
        for (name, value) in [
            ("KVCACHED_GPU_UTILIZATION", "0.95"),
            ("KVCACHED_PAGE_PREALLOC_ENABLED", "true"),
            ("KVCACHED_IPC_NAME", "VLLM"),
            ("VLLM_ATTENTION_BACKEND", "FLASH_ATTN"),
            ("VLLM_SERVER_DEV_MODE", "1"),
            ("VIRTUAL_ENV", "/opt/venv"),
        ] {
            assert_eq!(vllm.env[name], value, "{name}");
        }
        assert!(vllm.env["PATH"].starts_with("/opt/venv/bin"));
        assert_eq!((sglang.name.as_str(), sglang.model.as_str(), sglang.port), ("Qwen3-0.6B", "qwen", 30000));
        assert_eq!(
            sglang.command[..5].join(" "),
            "python3 -m sglang.launch_server --model-path Qwen/Qwen3-0.6B"
        );
        assert_eq!(sglang.sleep, SleepMethod::Stop);
    }

    #[test]
    fn an_engine_without_a_port_gets_one_and_a_worker_of_kvik_its_own_flags() {
        let text = "instances: [{model: a, engine: vllm}, {model: b, engine: kvik, engine_args: [--port=7, --threads 1]}]";
        let config = parse(text).unwrap();
        assert!(config.engines[0].command.join(" ").ends_with("--model a --port 12346"));
        let expected = "/bin/kvik worker --listen 127.0.0.1:7 --id b --set served_model_name='b' --threads 1";
        assert_eq!(config.engines[1].command.join(" "), expected);
        assert_eq!(config.gateway.listen, "127.0.0.1:0");
    }

    #[test]
    fn a_bad_field_is_named_with_what_is_allowed() {
        for (text, words) in [
            ("instances: 3", "`instances`"),
            ("instances: [{model: a}]", "missing field `engine`"),
            (
                "instances: [{model: a, engine: tgi}]",
                "`instances[0].engine` is tgi; allowed: vllm, sglang, sgl or kvik",
            ),
            (
                "instances: [{model: a, engine: vllm, using_venv: true}]",
                "`instances[0].venv_path` is missing",
            ),
            ("instances: [{model: a, engine: vllm, engine_env: [A]}]", "`instances[0].engine_env`"),
            (
                "instances: [{model: a, engine: vllm, engine_args: ['--port=x']}]",
                "is --port x; allowed: 1 to 65535",
            ),
            ("instances: [{model: a, engine: vllm, engine_args: [\"'\"]}]", "closed quotes"),
            ("instances: [{model: a, engine: vllm}]\nsleep_managr: {}", "unknown field `sleep_managr`"),
            (
                "instances: [{model: a, engine: vllm}, {model: a, engine: sgl, name: b}]",
                "`instances[1].model` is a",
            ),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}\n{message}\n{words}");
        }
    }
}
