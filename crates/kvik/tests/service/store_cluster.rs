//! Store daemons of a cluster that find each other by a coordinator and ask the index, all of them processes.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::cluster::{Client, Role, start, start_coordinator};
use crate::http;
use crate::process::{self, Process, eventually};

/// Two chunks and some.
const PROMPT_TOKENS: u32 = 600;

/// A node: its daemon, and a worker that is attached to it.
struct Node {
    daemon: Process,
    metrics: String,
    address: String,
    worker: Role,
}

impl Node {
    #[track_caller]
    fn start(folder: &Path, name: &str, coordinator: &Role, index: &Role) -> Self {
        let socket = folder.join(name).join("store.sock");
        let coordinator = format!("http://{}", coordinator.address);
        let mut command = process::kvik();
        command.args(["store", "serve", "--log-format", "json", "--ram", "64MiB"]);
        command.args(["--metrics", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--coordinator", &coordinator]);
        // A busy machine is no dead peer.
        command.args(["--set", "peer.lookup_timeout_ms=5000", "--set", "peer.response_timeout_ms=5000"]);
        command.args(["--set", &format!("peer.index=http://{}", index.address)]);
        command.arg("--socket").arg(&socket);
        let mut daemon = Process::start(&mut command);
        let ready = daemon.logged("store daemon is ready");
        let text = |field: &str| ready[field].as_str().unwrap().to_owned();
        let (metrics, address) = (text("metrics"), text("peers"));
        let setting = format!("store.daemon={}", socket.display());
        let flags = ["--id", name, "--threads", "1", "--coordinator", &coordinator];
        let worker = start("worker", "127.0.0.1:0", &flags, &[&setting, "store.load_timeout_ms=30000"]);
        Self { daemon, metrics, address, worker }
    }

    /// The sum of the metrics that begin with a text; 0 where there is none.
    fn metric(&self, start: &str) -> u64 {
        let text = http::send(&self.metrics, "GET", "/metrics", None).unwrap().text().unwrap();
        let values = text.lines().filter(|line| line.starts_with(start));
        values.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    }

    fn hints(&self, outcome: &str) -> u64 {
        self.metric(&format!("kvik_node_peer_hints_total{{tenant=\"\",outcome=\"{outcome}\"}}"))
    }
}

fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|position| 100 + (position * 7 + number * 131) % 3000).collect()
}

/// The likeliest tokens after a prompt, and where its KV came from.
#[track_caller]
fn complete(worker: &Client, prompt: &[u32]) -> (Value, Value) {
    let body = json!({ "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3 });
    let mut answer = http::send(&worker.address, "POST", "/v1/completions", Some(&body)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let details = &answer["usage"]["prompt_tokens_details"];
    (answer["choices"].clone(), details["cached_tokens_by_tier"].clone())
}

fn kvctl(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kvctl")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn get(role: &Role, path: &str) -> Value {
    let text = http::send(&role.address, "GET", path, None).unwrap().text().unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Waits until the index knows that a worker's daemon has so many chunks.
#[track_caller]
fn wait_until_known(index: &Role, worker: &str, n_chunks: u64) {
    eventually("the index knows the chunks", || {
        let stats = get(index, "/index/stats");
        let models = stats["models"].as_array()?.iter();
        let books = models.filter_map(|model| model["books"].as_array()).flatten();
        let books = books.filter(|book| book["block_tokens"] == 256);
        let mut sources = books.filter_map(|book| book["sources"].as_array()).flatten();
        let source = sources.find(|source| source["worker"] == worker)?;
        (source["n_blocks"].as_u64()? >= n_chunks).then_some(())
    });
}

#[test]
fn daemons_of_a_cluster_find_each_other_and_read_from_the_node_that_the_index_names() {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = start_coordinator("127.0.0.1:0", &[]);
    let base = format!("http://{}", coordinator.address);
    let mut index = start("indexer", "127.0.0.1:0", &["--coordinator", &base], &[]);
    let [mut first, second, third] =
        ["w1", "w2", "w3"].map(|name| Node::start(folder.path(), name, &coordinator, &index));
    let listed = eventually("all stores and their workers are listed", || {
        let listed = get(&coordinator, "/stores");
        let n_stores = listed["stores"].as_array()?.len();
        (n_stores == 3 && listed["workers"].as_object()?.len() == 3).then_some(listed)
    });
    assert_eq!(listed["workers"]["w1"], json!(first.address));
    let workers = get(&coordinator, "/workers");
    assert_eq!(workers["members"].as_array().unwrap().len(), 3, "no daemon is a worker: {workers}");
    let ring = get(&coordinator, "/ring");
    assert_eq!(ring["members"].as_array().unwrap().len(), 3);

    let table = kvctl(&["stores", "--coordinator", &base]);
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(table.starts_with("Store") && table.contains(&second.address), "{table}");
    let list: Value = serde_json::from_str(&kvctl(&["--json", "stores", "--coordinator", &base])).unwrap();
    assert_eq!(list["stores"][0]["memory_bytes"], json!(64 << 20));

    let (expected, tiers) = complete(&first.worker.client, &prompt(1));
    assert_eq!(tiers, Value::Null);
    wait_until_known(&index, "w1", 2);
    assert_eq!(complete(&second.worker.client, &prompt(1)), (expected.clone(), json!({"peer": 512})));
    assert!(second.hints("right") >= 1, "the index named the node");
    assert_eq!(second.hints("wrong"), 0);

    // A node that dies leaves the list; one that ends takes itself off it.
    first.daemon.kill();
    eventually("the dead node is not listed", || {
        let listed = get(&coordinator, "/stores");
        (listed["stores"].as_array()?.len() == 2 && listed["workers"].get("w1").is_none()).then_some(())
    });
    index.process.kill();
    assert_eq!(
        complete(&third.worker.client, &prompt(1)),
        (expected, json!({"peer": 512})),
        "without an index"
    );
}
