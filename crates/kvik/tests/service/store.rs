//! A worker with a store, as a process, and `kvctl cache` beside it.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::cluster::{Client, Role};
use crate::http;
use crate::process::{self, Process, eventually};

/// Two chunks and some.
const PROMPT_TOKENS: u32 = 600;

#[track_caller]
fn start_worker(folder: &Path) -> Role {
    let mut command = process::kvik();
    command.args(["worker", "--log-format", "json", "--listen", "127.0.0.1:0", "--threads", "1"]);
    command.args(["--ram", "64MiB", "--nvme"]).arg(format!("{}:256MiB", folder.display()));
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
fn kvctl(worker: &Client, arguments: &[&str]) -> Result<Value, String> {
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
