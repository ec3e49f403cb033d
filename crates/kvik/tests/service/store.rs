//! A worker with a store, as a process, and `kvctl cache` beside it.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::cluster::{self, Client, Role};
use crate::compress_kills::kill_compressions;
use crate::http;
use crate::process::{self, Process, eventually};

/// Two chunks and some.
const PROMPT_TOKENS: u32 = 600;

/// A worker that loads all chunks: how many the planner would compute instead depends on the machine's load.
#[track_caller]
fn start_worker(folder: &Path) -> Role {
    start_planning_worker(folder, "load_all")
}

#[track_caller]
fn start_planning_worker(folder: &Path, planner: &str) -> Role {
    let mut command = process::kvik();
    command.args(["worker", "--log-format", "json", "--listen", "127.0.0.1:0", "--threads", "1"]);
    command.args(["--ram", "64MiB", "--nvme"]).arg(format!("{}:256MiB", folder.display()));
    command.arg("--set").arg(format!("store.planner={planner}"));
    let mut process = Process::start(&mut command);
    let address = process.logged("worker is ready")["address"].as_str().unwrap().to_owned();
    Role { process, client: Client { address } }
}

fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|position| 100 + (position * 7 + number * 131) % 3000).collect()
}

/// The likeliest tokens after a prompt, and where its KV came from.
#[track_caller]
fn complete(worker: &Client, prompt: &[u32]) -> (Value, Value) {
    let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3});
    let mut answer = http::send(&worker.address, "POST", "/v1/completions", Some(&body)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let details = &answer["usage"]["prompt_tokens_details"];
    (answer["choices"].clone(), details["cached_tokens_by_tier"].clone())
}

/// Runs `kvctl --json cache ...`; its answer, or what it said on standard error.
pub(crate) fn kvctl(worker: &Client, arguments: &[&str]) -> Result<Value, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_kvctl"))
        .args(["--json", "cache", "--worker", &format!("http://{}", worker.address)])
        .args(arguments)
        .output()
        .unwrap();
    if output.status.success() {
        return Ok(serde_json::from_slice(&output.stdout).unwrap());
    }
    Err(String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_killed_worker_starts_again_with_its_disk_warm() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = start_worker(folder.path());
    let (expected, tiers) = complete(&worker.client, &prompt(1));
    assert_eq!(tiers, Value::Null);
    eventually("the chunks are on the disk", || {
        let stats = kvctl(&worker.client, &["stats"]).unwrap();
        (stats["counts"]["written_chunks_nvme"] == 2).then_some(())
    });
    worker.process.kill();

    let worker = start_worker(folder.path());
    assert_eq!(complete(&worker.client, &prompt(1)), (expected, json!({"nvme": 512})));
}

#[test]
fn kvctl_looks_into_the_store_of_a_worker_and_carries_kv_to_another() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let worker = start_worker(folders[0].path());
    let (expected, _) = complete(&worker.client, &prompt(2));
    let tokens: Vec<String> = prompt(2).iter().map(u32::to_string).collect();
    let tokens = ["--token-ids", &tokens.join(",")];
    eventually("the KV of the ended sequence is in memory", || {
        let lookup = kvctl(&worker.client, &["lookup", tokens[0], tokens[1]]).unwrap();
        (lookup["cached_tokens"] == 512 && lookup["tiers"] == json!({"ram": 512})).then_some(())
    });
    assert_eq!(kvctl(&worker.client, &["health"]).unwrap()["status"], "ok");

    let file = folders[0].path().join("kv.safetensors");
    let file = file.to_str().unwrap();
    kvctl(&worker.client, &["retrieve", tokens[0], tokens[1], "-o", file]).unwrap();
    let other = start_worker(folders[1].path());
    let stored = kvctl(&other.client, &["store", file]).unwrap();
    assert_eq!(stored, json!({"stored_chunks": 2, "present_chunks": 0}));
    assert_eq!(complete(&other.client, &prompt(2)), (expected, json!({"ram": 512})));

    let moved = kvctl(&worker.client, &["move", tokens[0], tokens[1], "--from", "ram", "--to", "disk"]);
    assert!(
        moved.as_ref().is_err_and(|error| error.contains("`to` is disk; allowed: ram, nvme")),
        "{moved:?}"
    );
    kvctl(&worker.client, &["clear", "--all"]).unwrap();
    assert_eq!(kvctl(&worker.client, &["lookup", tokens[0], tokens[1]]).unwrap()["cached_tokens"], 0);
}

#[test]
fn kvctl_explains_what_would_be_loaded_and_says_what_cannot_be_compressed() {
    let folder = tempfile::tempdir().unwrap();
    let worker = start_planning_worker(folder.path(), "auto");
    complete(&worker.client, &prompt(3));
    let tokens: Vec<String> = prompt(3).iter().map(u32::to_string).collect();
    let explain = ["explain", "--token-ids", &tokens.join(",")];
    let answer = eventually("the KV of the ended sequence is in memory", || {
        let answer = kvctl(&worker.client, &explain).unwrap();
        (answer["chunks"].as_array().unwrap().len() == 2).then_some(answer)
    });
    assert_eq!((&answer["decision"], &answer["planner"]), (&json!("load"), &json!("auto")));
    assert_eq!(answer["chunks"][1]["action"], "load");
    assert!(answer["predicted"]["plan_ms"].as_f64().unwrap() > 0.0, "{answer}");
    let output = Command::new(env!("CARGO_BIN_EXE_kvctl"))
        .args(["cache", "--worker", &format!("http://{}", worker.client.address)])
        .args(explain)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for line in ["load: all that is stored is loaded", "nvme: never read", "512 of 600 tokens are stored"] {
        assert!(text.contains(line), "{text}");
    }
    let refused = kvctl(&worker.client, &["compress", "--codec", "lossless"]).unwrap_err();
    assert!(refused.contains("`tier` is nvme; allowed: a tier with a codec"), "{refused}");
    assert_eq!(kvctl(&worker.client, &["compress", "--status"]).unwrap()["state"], "idle");
}

#[test]
fn a_worker_that_is_killed_while_it_compresses_its_disk_loses_no_chunk_and_leaks_no_space() {
    kill_compressions(4);
}

#[test]
fn kvctl_governs_the_stores_of_all_workers_that_a_coordinator_lists() {
    let coordinator = cluster::start_coordinator("127.0.0.1:0", &[]);
    let base = format!("http://{}", coordinator.address);
    let start = |id: &str| {
        let flags = ["--id", id, "--threads", "1", "--ram", "64MiB", "--coordinator", &base];
        cluster::start("worker", "127.0.0.1:0", &flags, &[])
    };
    let (first, mut second) = (start("first"), start("second"));
    eventually("both workers are members", || {
        cluster::member_ids(&coordinator.address).filter(|ids| ids.len() == 2)
    });
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal");
    let journal = journal.to_str().unwrap();
    let all = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvctl"))
            .args(["--json", "cache", "--all-nodes", "--coordinator", &base])
            .args(arguments)
            .output()
            .unwrap();
        let answers: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (answers["nodes"].clone(), String::from_utf8(output.stderr).unwrap())
    };
    let tokens: Vec<String> = prompt(3).iter().map(u32::to_string).collect();
    let tokens = tokens.join(",");
    let cached = |nodes: &Value| [0, 1].map(|node| nodes[node]["answer"]["cached_tokens"].clone());
    complete(&first.client, &prompt(3));
    eventually("the first worker has the prompt", || {
        let (nodes, _) = all(&["lookup", "--token-ids", &tokens]);
        (cached(&nodes) == [json!(512), json!(0)]).then_some(())
    });

    // From one to the other, then pinned and cleared on both.
    let moving = ["move", "--token-ids", &tokens, "--to-worker", &format!("http://{}", second.address)];
    let moved = kvctl(&first.client, &moving).unwrap();
    assert_eq!(moved, json!({"stored_chunks": 2, "present_chunks": 0}));
    assert_eq!(cached(&all(&["lookup", "--token-ids", &tokens]).0), [json!(0), json!(512)]);
    let (nodes, _) = all(&["--dry-run", "clear", "--token-ids", &tokens]);
    assert_eq!(cached(&nodes), [json!(0), json!(512)], "a dry run only looks");
    assert_eq!(cached(&all(&["lookup", "--token-ids", &tokens]).0), [json!(0), json!(512)]);
    let (nodes, _) = all(&["--journal", journal, "clear", "--token-ids", &tokens]);
    assert_eq!(nodes[1]["answer"], json!({"chunks": {"ram": 2}}));
    assert_eq!(cached(&all(&["lookup", "--token-ids", &tokens]).0), [json!(0), json!(0)]);
    let (nodes, _) = all(&["--journal", journal, "clear", "--token-ids", &tokens]);
    assert_eq!(nodes[0]["done_before"], json!(true));

    let (_, error) = all(&["retrieve", "--token-ids", &tokens, "-o", "x"]);
    assert!(error.contains("`--all-nodes` is given with retrieve"), "{error}");
    second.process.kill();
    let (nodes, error) = all(&["health"]);
    assert_eq!(nodes[0]["answer"]["status"], "ok");
    let is_told = error.contains("1 of 2 workers failed") && nodes[1]["error"].is_string();
    // A coordinator that misses it already lists one.
    assert!(is_told || nodes.as_array().unwrap().len() == 1, "{error}");
}
