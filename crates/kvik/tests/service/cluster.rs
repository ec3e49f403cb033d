//! A coordinator, workers and a gateway, each a process.

use std::io;
use std::ops::Deref;

use serde_json::{Value, json};

use crate::http::{self, Answer};
use crate::process::{self, Process, eventually};

/// A role that runs.
#[derive(Debug)]
pub(crate) struct Role {
    pub(crate) process: Process,
    pub(crate) client: Client,
}

/// Talks to a role, from any thread.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    /// `host:port`.
    pub(crate) address: String,
}

/// How the roles of a test differ from the usual.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Settings {
    pub(crate) coordinator: &'static [&'static str],
    pub(crate) gateway: &'static [&'static str],
}

/// All roles, with the workers `worker-1` and `worker-2`.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) coordinator: Role,
    pub(crate) workers: Vec<Role>,
    pub(crate) gateway: Role,
}

/// What a stream gave.
#[derive(Debug)]
pub(crate) struct Ending {
    /// Texts joined.
    pub(crate) text: String,
    pub(crate) finish_reason: Option<String>,
    pub(crate) error: Option<Value>,
    pub(crate) is_done: bool,
}

/// Starts a role and waits until it says that it is ready.
#[track_caller]
pub(crate) fn start(role: &str, listen: &str, flags: &[&str], settings: &[&str]) -> Role {
    let mut command = process::kvik();
    command.args([role, "--log-format", "json", "--listen", listen]).args(flags);
    for setting in settings {
        command.args(["--set", setting]);
    }
    let mut process = Process::start(&mut command);
    let address = process.logged(&format!("{role} is ready"))["address"].as_str().unwrap().to_owned();
    Role { process, client: Client { address } }
}

/// Starts a coordinator that misses its workers quickly.
#[track_caller]
pub(crate) fn start_coordinator(listen: &str, settings: &[&str]) -> Role {
    let mut all = vec!["heartbeat_interval_ms=100", "slow_start_ms=0"];
    all.extend(settings);
    start("coordinator", listen, &[], &all)
}

/// Starts a worker on one thread.
#[track_caller]
pub(crate) fn start_worker(listen: &str, id: &str, coordinators: &[&str]) -> Role {
    let bases: Vec<String> = coordinators.iter().map(|address| format!("http://{address}")).collect();
    let mut flags = vec!["--id", id, "--threads", "1"];
    flags.extend(bases.iter().flat_map(|base| ["--coordinator", base]));
    start("worker", listen, &flags, &[])
}

/// Starts a gateway that misses its workers quickly.
#[track_caller]
pub(crate) fn start_gateway(listen: &str, coordinators: &[&str], settings: &[&str]) -> Role {
    let bases: Vec<String> = coordinators.iter().map(|address| format!("http://{address}")).collect();
    let flags: Vec<&str> = bases.iter().flat_map(|base| ["--coordinator", base.as_str()]).collect();
    let mut all = vec!["health.interval_ms=100", "health.timeout_ms=500"];
    all.extend(settings);
    start("gateway", listen, &flags, &all)
}

/// A request for exactly `max_tokens` tokens, the same every time.
pub(crate) fn completion(seq_id: &str, max_tokens: u32, stream: bool) -> Value {
    json!({
        "model": "kvik-tiny", "prompt": "Once upon a time", "seq_id": seq_id, "max_tokens": max_tokens,
        "temperature": 0, "ignore_eos": true, "stream": stream,
    })
}

/// Ids of the members that a coordinator tells.
pub(crate) fn member_ids(address: &str) -> Option<Vec<String>> {
    let snapshot = http::get_json(address, "/workers")?;
    let members = snapshot["members"].as_array().unwrap();
    Some(members.iter().map(|member| member["worker"]["id"].as_str().unwrap().to_owned()).collect())
}

impl Deref for Role {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Client {
    /// Asks for a completion and waits for its head.
    pub(crate) fn complete(&self, seq_id: &str, max_tokens: u32, stream: bool) -> io::Result<Answer> {
        let body = completion(seq_id, max_tokens, stream);
        http::send(&self.address, "POST", "/v1/completions", Some(&body))
    }

    /// Asks for a short completion and names the worker that gave it.
    #[track_caller]
    pub(crate) fn served_by(&self, seq_id: &str) -> String {
        let mut answer = self.complete(seq_id, 4, false).unwrap();
        let body = answer.text().unwrap();
        assert_eq!(answer.status, 200, "{body}");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["usage"]["completion_tokens"], 4, "{body}");
        answer.worker()
    }

    /// Opens a stream and reads its first events.
    #[track_caller]
    pub(crate) fn open_stream(&self, seq_id: &str, max_tokens: u32) -> Answer {
        let mut answer = self.complete(seq_id, max_tokens, true).unwrap();
        if answer.status != 200 {
            let body = answer.text();
            panic!("{}: {body:?}", answer.status);
        }
        for _ in 0..3 {
            let event = answer.event().unwrap().unwrap();
            assert!(event.starts_with('{'), "{event}");
        }
        answer
    }

    /// The sum of a metric over all labels that contain `label`.
    pub(crate) fn metric(&self, name: &str, label: &str) -> Option<f64> {
        let (status, text) = http::get(&self.address, "/metrics").ok()?;
        assert_eq!(status, 200);
        let mut values = text.lines().filter_map(|line| {
            let (key, value) = line.rsplit_once(' ')?;
            let labels = key.strip_prefix(name)?;
            let is_whole_name = labels.is_empty() || labels.starts_with('{');
            (is_whole_name && labels.contains(label)).then(|| value.parse::<f64>().unwrap())
        });
        let first = values.next()?;
        Some(values.fold(first, |sum, value| sum + value))
    }

    /// Workers that a gateway would send requests to.
    pub(crate) fn usable_backends(&self) -> u64 {
        let ready = http::send(&self.address, "GET", "/ready", None).and_then(|mut answer| answer.text());
        let ready = ready.ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
        ready.and_then(|ready| ready["usable_backends"].as_u64()).unwrap_or(0)
    }

    /// Waits until a gateway has this many workers to send requests to.
    #[track_caller]
    pub(crate) fn wait_for_backends(&self, n_backends: u64) {
        eventually("the gateway has its workers", || (self.usable_backends() == n_backends).then_some(()));
    }
}

impl Cluster {
    /// Starts everything and waits until the gateway knows both workers.
    #[track_caller]
    pub(crate) fn start(settings: Settings) -> Self {
        let coordinator = start_coordinator("127.0.0.1:0", settings.coordinator);
        let workers = ["worker-1", "worker-2"]
            .map(|id| start_worker("127.0.0.1:0", id, &[&coordinator.address]))
            .into_iter()
            .collect();
        let gateway = start_gateway("127.0.0.1:0", &[&coordinator.address], settings.gateway);
        gateway.wait_for_backends(2);
        Self { coordinator, workers, gateway }
    }

    /// A sequence that belongs to this worker.
    #[track_caller]
    pub(crate) fn sequence_of(&self, worker: &str) -> String {
        let mut names = (0..1000).map(|number| format!("sequence-{number}"));
        let owned = names.find(|name| {
            let route = http::get_json(&self.coordinator.address, &format!("/route?seq_id={name}"));
            route.unwrap()["worker_id"] == worker
        });
        owned.unwrap_or_else(|| panic!("{worker} owns nothing"))
    }
}

impl Ending {
    /// Reads a stream to its proper end.
    #[track_caller]
    pub(crate) fn of(stream: &mut Answer) -> Self {
        let mut ending = Self { text: String::new(), finish_reason: None, error: None, is_done: false };
        for event in stream.events().unwrap() {
            assert!(!ending.is_done, "an event after the last: {event}");
            if event == "[DONE]" {
                ending.is_done = true;
                continue;
            }
            let mut event: Value = serde_json::from_str(&event).unwrap();
            if event.get("error").is_some() {
                ending.error = Some(event["error"].take());
            }
            ending.text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
            if let Some(reason) = event["choices"][0]["finish_reason"].as_str() {
                ending.finish_reason = Some(reason.to_owned());
            }
        }
        ending
    }

    /// Whether all tokens came.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_done && self.error.is_none() && self.finish_reason.as_deref() == Some("length")
    }
}
