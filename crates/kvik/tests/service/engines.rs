//! A controller with real engines: workers of kvik, and programs that misbehave.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Output;
use std::thread;

use kvik_memory::ledger::Ledger;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::{self, Answer};
use crate::process::{self, Process, eventually, free_address};

/// A controller, or several one after the other, on one file and one state folder.
pub(crate) struct Bed {
    folder: TempDir,
    pub(crate) process: Option<Process>,
    gateway: String,
}

/// An engine of the file: a worker of kvik with the bundled model under its own name.
pub(crate) fn worker(name: &str, more: &str) -> String {
    let address = free_address();
    let (_, port) = address.rsplit_once(':').unwrap();
    format!("  - {{name: {name}, kind: kvik, port: {port}, args: [--threads, 1, --kv-blocks, 128]{more}}}\n")
}

/// An engine of the file that is a shell script.
fn script(name: &str, script: &str, more: &str) -> String {
    let address = free_address();
    let (_, port) = address.rsplit_once(':').unwrap();
    format!("  - {{name: {name}, kind: command, port: {port}, command: [sh, -c, '{script}']{more}}}\n")
}

/// A file in kvik's form.
pub(crate) fn file(head: &str, engines: &[String]) -> String {
    format!("gateway: {{listen: '127.0.0.1:0'}}\n{head}\nengines:\n{}", engines.concat())
}

impl Bed {
    fn new(text: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let bed = Self { folder, process: None, gateway: String::new() };
        bed.write(text);
        bed
    }

    /// A bed with a controller that is ready.
    #[track_caller]
    pub(crate) fn up(text: &str) -> Self {
        let mut bed = Self::new(text);
        bed.start(&[]);
        bed
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("engines.yaml")
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    fn write(&self, text: &str) {
        fs::write(self.config(), text).unwrap();
    }

    #[track_caller]
    pub(crate) fn start(&mut self, flags: &[&str]) {
        let mut command = process::kvik();
        command.args(["engines", "up", "--log-format", "json", "--config"]).arg(self.config());
        command.arg("--state").arg(self.state()).args(flags).stdout(std::process::Stdio::null());
        let mut process = Process::start(&mut command);
        process.logged("controller is ready")["address"].as_str().unwrap().clone_into(&mut self.gateway);
        self.process = Some(process);
    }

    /// Runs another command of `kvik engines`.
    pub(crate) fn ask(&self, arguments: &[&str]) -> Output {
        let mut command = process::kvik();
        command.arg("engines").args(arguments).arg("--state").arg(self.state());
        command.output().unwrap()
    }

    #[track_caller]
    fn status(&self) -> Vec<Value> {
        let output = self.ask(&["status", "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let status: Value = serde_json::from_slice(&output.stdout).unwrap();
        status["engines"].as_array().unwrap().clone()
    }

    #[track_caller]
    pub(crate) fn engine(&self, name: &str) -> Value {
        self.status().into_iter().find(|engine| engine["name"] == name).unwrap()
    }

    #[track_caller]
    pub(crate) fn state_of(&self, name: &str) -> String {
        self.engine(name)["state"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    pub(crate) fn pid(&self, name: &str) -> i64 {
        self.engine(name)["pid"].as_i64().unwrap()
    }

    /// Asks for a completion of a model.
    pub(crate) fn send(&self, model: &str, max_tokens: u32, stream: bool) -> Answer {
        complete(&self.gateway, model, max_tokens, stream)
    }

    /// The text of a short completion.
    #[track_caller]
    pub(crate) fn text(&self, model: &str) -> String {
        short_text(&self.gateway, model)
    }

    #[track_caller]
    fn stop(&mut self) {
        let mut process = self.process.take().unwrap();
        process.signal("TERM");
        assert_eq!(process.ended().code(), Some(0), "{}", process.logged_text());
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        // A test that fails leaves engines, which the next controller would find.
        if let Some(process) = &mut self.process {
            process.signal("KILL");
        }
        for (_, pid) in marked(&self.state()) {
            let _ = std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).status();
        }
    }
}

fn complete(address: &str, model: &str, max_tokens: u32, stream: bool) -> Answer {
    let body = json!({
        "model": model, "prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": true, "stream": stream,
    });
    http::send(address, "POST", "/v1/completions", Some(&body)).unwrap()
}

/// The text of a short completion.
#[track_caller]
fn short_text(address: &str, model: &str) -> String {
    let mut answer = complete(address, model, 4, false);
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{model}: {text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["model"], model);
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// The processes that a controller with this state folder has started and that live.
fn marked(state: &std::path::Path) -> Vec<(String, i64)> {
    let mark = format!("KVIK_ENGINE_OF={} ", fs::canonicalize(state).unwrap_or_default().display());
    let pids =
        fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: i64| {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let entry =
            environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(mark.as_bytes()))?;
        Some((String::from_utf8_lossy(entry).into_owned(), pid))
    })
    .collect()
}

pub(crate) fn is_alive(pid: i64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with('Z'))
}

#[track_caller]
fn assert_nothing_is_left(bed: &Bed) {
    let left = marked(&bed.state());
    assert!(left.is_empty(), "processes are left: {left:?}");
    let records: Vec<_> = fs::read_dir(bed.state().join("engines")).unwrap().collect();
    assert!(records.is_empty(), "{records:?}");
}

#[test]
fn twenty_models_of_which_two_are_awake_answer_all_requests() {
    let names: Vec<String> = (1..=20).map(|number| format!("m{number:02}")).collect();
    let engines: Vec<String> = names.iter().map(|name| worker(name, "")).collect();
    let mut bed = Bed::up(&file("max_awake: 2", &engines));
    let models = http::get_json(&bed.gateway, "/v1/models").unwrap();
    assert_eq!(models["data"].as_array().unwrap().len(), 20);
    assert_eq!(http::get_json(&bed.gateway, "/ready").unwrap()["status"], "ready");
    let expected = bed.text("m01");
    for name in &names {
        assert_eq!(bed.text(name), expected, "{name}");
        assert!(marked(&bed.state()).len() <= 2, "{:?}", marked(&bed.state()));
    }
    // All at once, too.
    let gateway = bed.gateway.as_str();
    thread::scope(|scope| {
        let asked: Vec<_> = names.iter().map(|name| scope.spawn(|| short_text(gateway, name))).collect();
        assert!(asked.into_iter().all(|asked| asked.join().unwrap() == expected));
    });
    let engines = bed.status();
    let n_awake = engines.iter().filter(|engine| engine["state"] == "ready").count();
    assert_eq!(n_awake, 2);
    for engine in &engines[2..] {
        assert_eq!(
            (&engine["total_requests"], &engine["failed_requests"]),
            (&json!(2), &json!(0)),
            "{engine}"
        );
        assert!(0.0 < engine["last_wake_seconds"].as_f64().unwrap(), "{engine}");
    }
    bed.stop();
    assert_nothing_is_left(&bed);
}

#[test]
fn a_controller_that_is_killed_leaves_its_engines_serving_and_the_next_one_takes_them_over() {
    let engines = [worker("a", ""), worker("b", ""), worker("c", "")];
    let mut bed = Bed::up(&file("max_awake: 2", &engines));
    let expected = bed.text("a");
    bed.text("b");
    let (a, b) = (bed.engine("a"), bed.engine("b"));
    bed.process.as_mut().unwrap().kill();
    // It serves without a controller.
    let address = a["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
    assert_eq!(complete(&address, "a", 4, false).status, 200);
    bed.start(&[]);
    eventually("both are ready", || {
        (bed.state_of("a") == "ready" && bed.state_of("b") == "ready").then_some(())
    });
    assert_eq!((bed.pid("a"), bed.pid("b")), (a["pid"].as_i64().unwrap(), b["pid"].as_i64().unwrap()));
    assert_eq!(bed.text("a"), expected);
    assert_eq!(bed.text("c"), expected);
    // A second controller has no place.
    let second = bed.ask(&["up", "--config", bed.config().to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("runs with the state folder"), "{stderr}");
    // An engine that is started in another way is not the one that runs, and one that is not in the file has no place.
    let before = bed.pid("a");
    bed.process.as_mut().unwrap().kill();
    bed.write(&file("", &[engines[0].replace("128", "256")]));
    bed.start(&[]);
    eventually("a is ready", || (bed.state_of("a") == "ready").then_some(()));
    assert_ne!(bed.pid("a"), before);
    assert!(!is_alive(before) && !is_alive(b["pid"].as_i64().unwrap()));
    assert_eq!(marked(&bed.state()).len(), 1);
    bed.stop();
    assert_nothing_is_left(&bed);
}

#[test]
fn engines_that_are_left_running_are_found_again() {
    let mut bed = Bed::up(&file("", &[worker("a", "")]));
    bed.text("a");
    let pid = bed.pid("a");
    let output = bed.ask(&["stop", "--leave-running"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(bed.process.take().unwrap().ended().code(), Some(0));
    assert!(is_alive(pid));
    bed.start(&[]);
    bed.text("a");
    assert_eq!(bed.pid("a"), pid);
    let output = bed.ask(&["stop"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(bed.process.take().unwrap().ended().code(), Some(0));
    assert_nothing_is_left(&bed);
    let stderr = String::from_utf8(bed.ask(&["status"]).stderr).unwrap();
    assert!(stderr.contains("no controller runs with the state folder"), "{stderr}");
}

#[test]
fn twenty_requests_at_once_wake_a_model_once() {
    let bed = Bed::up(&file("", &[worker("a", ", start: asleep")]));
    assert_eq!(bed.state_of("a"), "asleep");
    let gateway = bed.gateway.as_str();
    let texts: Vec<String> = thread::scope(|scope| {
        let asked: Vec<_> = (0..20).map(|_| scope.spawn(|| short_text(gateway, "a"))).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let engine = bed.engine("a");
    assert_eq!((&engine["wakes"], &engine["total_requests"]), (&json!(1), &json!(20)), "{engine}");
}

#[test]
fn a_stream_keeps_its_engine_awake_to_its_last_byte() {
    let engines = [worker("a", ", sleep: {after_idle_s: 0.05}"), worker("b", ", start: asleep")];
    let bed = Bed::up(&file("max_awake: 1\nturn_s: 0.1", &engines));
    let mut stream = bed.send("a", 400, true);
    assert_eq!(stream.status, 200);
    assert!(stream.event().unwrap().is_some());
    let pid = bed.pid("a");
    let gateway = bed.gateway.as_str();
    let (events, waited) = thread::scope(|scope| {
        let waits = scope.spawn(|| short_text(gateway, "b"));
        eventually("the other one waits", || (bed.state_of("a") == "giving_way").then_some(()));
        assert!(is_alive(pid));
        (stream.events().unwrap(), waits.join().unwrap())
    });
    // All tokens but the first came after the other model was asked for.
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert!(350 < events.len(), "{} events", events.len());
    assert!(!waited.is_empty());
    assert!(!is_alive(pid));
    // It sleeps when it is idle, too.
    bed.text("a");
    eventually("it sleeps", || (bed.state_of("a") == "asleep").then_some(()));
}

#[test]
fn an_engine_that_does_not_start_is_told_with_its_log_and_the_others_serve() {
    let engines = [
        worker("good", ""),
        script("crash", "echo no weights here >&2; exit 7", ", start: asleep"),
        script("mute", "echo loading; exec tail -f /dev/null", ", start: asleep, start_timeout_s: 0.3"),
        "  - {name: none, kind: command, port: 1, command: [/no/such/program], start: asleep}\n".to_owned(),
    ];
    let mut bed = Bed::up(&file("", &engines));
    for (model, words) in [
        ("crash", ["its process ended with exit code 7", "no weights here"]),
        ("mute", ["/health did not answer with a success within 0.3 s", "loading"]),
        ("none", ["the program /no/such/program is not there", "not there"]),
    ] {
        let mut answer = bed.send(model, 1, false);
        let text = answer.text().unwrap();
        assert_eq!(answer.status, 503, "{text}");
        assert!(answer.header("retry-after").is_some());
        // The log is for operators.
        assert!(text.contains(words[0]) && !text.contains("its log"), "{text}");
        assert_eq!(bed.state_of(model), "failed");
        let output = bed.ask(&["wake", model]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(words.iter().all(|words| stderr.contains(words)), "{stderr}");
        let (status, health) = http::get(&bed.gateway, &format!("/health/{model}")).unwrap();
        assert_eq!(status, 503, "{health}");
    }
    bed.text("good");
    assert_eq!(marked(&bed.state()).len(), 1, "{:?}", marked(&bed.state()));
    bed.stop();
    assert_nothing_is_left(&bed);
}

#[test]
fn an_engine_that_breaks_is_started_again() {
    let bed = Bed::up(&file("", &[worker("a", "")]));
    let expected = bed.text("a");
    let pid = bed.pid("a");
    let status = std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap();
    assert!(status.success());
    eventually("another process serves", || {
        let engine = bed.engine("a");
        // The state of a process that has just ended may not say so yet.
        let is_another = engine["restarts"] == 1 && engine["pid"] != pid;
        (engine["state"] == "ready" && is_another).then_some(())
    });
    assert_eq!(bed.text("a"), expected);
}

#[test]
fn a_port_in_use_is_named_and_nothing_is_started() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let engine = format!("  - {{name: b, kind: kvik, port: {port}}}\n");
    let bed = Bed::new(&file("", &[worker("a", ""), engine]));
    let output = bed.ask(&["up", "--config", bed.config().to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains(&format!("`engines[1].port` is {port}, which another process listens on")),
        "{stderr}"
    );
    assert_nothing_is_left(&bed);
    // The gateway's own.
    bed.write(&format!("gateway: {{listen: '127.0.0.1:{port}'}}\nengines:\n{}", worker("a", "")));
    let output = bed.ask(&["up", "--config", bed.config().to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&format!("listen on 127.0.0.1:{port}")), "{stderr}");
    assert_nothing_is_left(&bed);
}

#[test]
fn a_bad_file_is_refused_in_both_forms() {
    for (text, words) in [
        ("engines: [{name: a, kind: kvik, port: many}]", "`engines[0].port`"),
        ("engines: [{name: a, kind: kvik, port: 1, sleep: {method: nap}}]", "unknown variant `nap`"),
        (
            "instances: [{model: a, engine: tgi}]",
            "`instances[0].engine` is tgi; allowed: vllm, sglang, sgl or kvik",
        ),
        ("instances: {}", "`instances`"),
        ("engines: [", "engines.yaml"),
        ("gateway: {listen: 5}", "names no engine"),
    ] {
        let bed = Bed::new(text);
        for command in ["up", "check"] {
            let mut kvik = process::kvik();
            let output = kvik.args(["engines", command, "--config"]).arg(bed.config()).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(3), "{command} {text}: {stderr}");
            assert!(stderr.contains(words), "{command} {text}: {stderr}");
        }
    }
    let missing = process::kvik().args(["engines", "check", "--config", "/no/such.yaml"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(1));
}

#[test]
fn a_file_of_kvcached_runs_with_the_calls_of_its_controller() {
    let (first, second) = (free_address(), free_address());
    let port = |address: &str| address.rsplit_once(':').unwrap().1.to_owned();
    let bed = Bed::up(&format!(
        "kvcached: {{kvcached_log_level: WARNING}}\nrouter: {{enable_router: true, router_port: 0, router_host: localhost}}\n\
         instances:\n  - {{name: one, model: org/one, engine: kvik, engine_args: [\"--port={}\", \"--threads 1\"]}}\n  \
         - {{name: two, model: org/two, engine: kvik, engine_args: \"--port {} --threads 1\"}}\n",
        port(&first),
        port(&second)
    ));
    bed.text("org/one");
    bed.text("org/two");
    let get = |path: &str| http::get_json(&bed.gateway, path).unwrap();
    let post = |path: &str| {
        let mut answer = http::send(&bed.gateway, "POST", path, None).unwrap();
        (answer.status, answer.text().unwrap())
    };
    assert_eq!(get("/health/org/one")["status"], "healthy");
    assert_eq!(get("/traffic/stats/org/one")["total_requests"], 1);
    assert_eq!(get("/traffic/stats?window=30")["models"]["org/two"]["successful_requests"], 1);
    assert_eq!(get("/models/active")["models"].as_array().unwrap().len(), 2);
    assert_eq!(get("/models/idle?threshold=0")["models"].as_array().unwrap().len(), 2);
    assert_eq!(get("/sleep/candidates")["models"].as_array().unwrap().len(), 2);
    assert_eq!(post("/action/sleep/org/one").0, 200);
    assert_eq!(get("/sleep/status")["models"]["org/one"]["is_sleeping"], true);
    assert_eq!(get("/health/all")["models"]["org/one"]["status"], "sleeping");
    assert_eq!(post("/action/wakeup/org/one").0, 200);
    assert_eq!(get("/models")["models"]["org/one"]["state"], "ready");
    let (status, text) = post("/action/sleep/org/three");
    assert_eq!(status, 404, "{text}");
    // The same by the command line.
    for (command, state) in [("sleep", "asleep"), ("wake", "ready")] {
        let output = bed.ask(&[command, "org/two"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(bed.state_of("two"), state);
    }
    let table = String::from_utf8(bed.ask(&["status"]).stdout).unwrap();
    assert!(table.contains("org/two") && table.contains("ready"), "{table}");
}

#[test]
fn a_file_that_is_read_again_changes_engines_and_memory_in_place() {
    let memory = TempDir::new().unwrap();
    let head = format!("memory: {{dir: {}}}", memory.path().display());
    let limited = |size: &str| worker("a", &format!(", memory: {{max: {size}, weight: 2}}"));
    let first = limited("64MiB");
    let second = worker("b", "");
    let mut bed = Bed::up(&file(&head, &[first.clone(), second.clone()]));
    bed.text("b");
    bed.text("a");
    let policy = || {
        let snapshot = Ledger::open_existing(memory.path(), "host0").unwrap().unwrap().snapshot().unwrap();
        snapshot.groups.iter().find(|group| group.ipc_name == "a").unwrap().policy
    };
    assert_eq!((policy().max_bytes, policy().weight), (Some(64 << 20), 2));
    assert!(0 < bed.engine("a")["memory_held_bytes"].as_u64().unwrap());
    // The screen of memory knows the engines too.
    let mut top = process::kvik();
    top.args(["top", "--json", "-r", "0.1", "--engines"]).arg(bed.state()).arg("--dir").arg(memory.path());
    let top: Value = serde_json::from_slice(&top.output().unwrap().stdout).unwrap();
    assert_eq!(
        (&top["engines"][0]["model"], &top["engines"][1]["state"]),
        (&json!("a"), &json!("ready")),
        "{top}"
    );
    let (a, b) = (bed.pid("a"), bed.pid("b"));
    bed.write("engines: [");
    let refused = bed.ask(&["reload"]);
    assert_eq!(refused.status.code(), Some(1));
    let third = worker("c", ", start: asleep");
    bed.write(&file(&head, &[first.replace("64MiB", "96MiB"), third]));
    let output = bed.ask(&["reload"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for words in ["memory of a set", "c added", "b removed"] {
        assert!(stdout.contains(words), "{stdout}");
    }
    assert_eq!(policy().max_bytes, Some(96 << 20));
    assert_eq!(bed.pid("a"), a);
    eventually("the removed engine has ended", || (!is_alive(b)).then_some(()));
    assert_eq!(bed.text("c"), bed.text("a"));
    bed.text("a");
    // The same by a signal; and the weight of the busiest model grows to four times the configured one.
    let follows = head.replace('}', ", follows_traffic: true}");
    bed.write(&file(&follows, &[first.replace("64MiB", "128MiB")]));
    bed.process.as_ref().unwrap().signal("HUP");
    eventually("the limit has changed", || (policy().max_bytes == Some(128 << 20)).then_some(()));
    eventually("the weight follows the traffic", || (policy().weight == 8).then_some(()));
    let mut unknown = bed.send("b", 1, false);
    assert!(matches!(unknown.status, 404 | 503), "{}", unknown.text().unwrap());
    bed.stop();
    assert_nothing_is_left(&bed);
}
