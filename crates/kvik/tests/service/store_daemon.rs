//! Workers that share the store of a daemon, all of them processes.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cluster::{self, Client, Role};
use crate::http;
use crate::process::{self, Process, eventually};
use crate::store::kvctl;

/// Two chunks and some.
const PROMPT_TOKENS: u32 = 600;

pub(crate) struct Daemon {
    pub(crate) process: Process,
    metrics: String,
}

impl Daemon {
    #[track_caller]
    pub(crate) fn start(folder: &Path, more: &[&str]) -> Self {
        Self::start_at(folder, "127.0.0.1:0", more)
    }

    /// With its metrics at an address.
    #[track_caller]
    fn start_at(folder: &Path, metrics: &str, more: &[&str]) -> Self {
        Self::start_with(folder, metrics, "64MiB", more)
    }

    /// With so much memory, too.
    #[track_caller]
    fn start_with(folder: &Path, metrics: &str, ram: &str, more: &[&str]) -> Self {
        let mut command = process::kvik();
        command.args(["store", "serve", "--log-format", "json", "--ram", ram, "--metrics", metrics]);
        command.arg("--socket").arg(socket(folder)).args(more);
        let mut process = Process::start(&mut command);
        let metrics = process.logged("store daemon is ready")["metrics"].as_str().unwrap().to_owned();
        Self { process, metrics }
    }

    /// The value of a metric, the sum over its labels; 0 where there is none.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = http::send(&self.metrics, "GET", "/metrics", None).unwrap().text().unwrap();
        let values = text
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])));
        values.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    }

    /// Waits until it has as many chunks as the prompts so far have.
    #[track_caller]
    pub(crate) fn wait_for_chunks(&self, n_chunks: u64) {
        eventually("the KV of ended sequences is in the daemon", || {
            (self.metric("kvik_store_stored_chunks_total") >= n_chunks).then_some(())
        });
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("run/store.sock")
}

#[track_caller]
pub(crate) fn start_worker(folder: &Path, more: &[&str]) -> Role {
    let mut command = process::kvik();
    command.args(["worker", "--log-format", "json", "--listen", "127.0.0.1:0", "--threads", "1"]);
    command.arg("--set").arg(format!("store.daemon={}", socket(folder).display())).args(more);
    let mut process = Process::start(&mut command);
    let address = process.logged("worker is ready")["address"].as_str().unwrap().to_owned();
    Role { process, client: Client { address } }
}

fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|position| 100 + (position * 7 + number * 131) % 3000).collect()
}

/// The arguments of `kvctl` that name a prompt.
fn named(number: u32) -> [String; 2] {
    let tokens: Vec<String> = prompt(number).iter().map(u32::to_string).collect();
    ["--token-ids".to_owned(), tokens.join(",")]
}

/// Runs a verb of `kvctl cache` for a prompt.
fn govern(worker: &Role, verb: &str, number: u32, more: &[&str]) -> Result<Value, String> {
    let [flag, tokens] = named(number);
    kvctl(&worker.client, &[&[verb, &flag, &tokens][..], more].concat())
}

/// The tiers that have a prompt, as a worker says.
#[track_caller]
fn tiers_of(worker: &Role, number: u32) -> Value {
    govern(worker, "lookup", number, &[]).unwrap()["tiers"].clone()
}

/// The likeliest tokens after a prompt, and where its KV came from.
#[track_caller]
fn complete(worker: &Role, prompt: &[u32], salt: Option<&str>) -> (Value, Value) {
    let body = json!({
        "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3, "cache_salt": salt,
    });
    let mut answer = http::send(&worker.client.address, "POST", "/v1/completions", Some(&body)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let details = &answer["usage"]["prompt_tokens_details"];
    (answer["choices"].clone(), details["cached_tokens_by_tier"].clone())
}

#[test]
fn what_one_worker_computed_another_one_loads_from_the_daemon_to_the_same_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(folder.path(), &[]);
    let (first, second) = (start_worker(folder.path(), &[]), start_worker(folder.path(), &[]));
    let layerwise = start_worker(folder.path(), &["--set", "store.layerwise=true"]);
    let (expected, tiers) = complete(&first, &prompt(1), None);
    assert_eq!(tiers, Value::Null);
    daemon.wait_for_chunks(2);
    assert_eq!(complete(&second, &prompt(1), None), (expected.clone(), json!({"ram": 512})));
    assert_eq!(complete(&layerwise, &prompt(1), None), (expected.clone(), json!({"ram": 512})));
    // A salt is its own cache, through the daemon too.
    let (salted, tiers) = complete(&second, &prompt(1), Some("tenant 7"));
    assert_eq!((salted, tiers), (expected, Value::Null));
    assert!(daemon.metric("kvik_node_sessions") >= 9, "three sessions a worker");
    assert_eq!(daemon.metric("kvik_node_corrupt_chunks_total"), 0);
    drop((first, second, layerwise));
    eventually("all sessions ended", || (daemon.metric("kvik_node_sessions") == 0).then_some(()));
    daemon.process.signal("TERM");
    assert!(daemon.process.ended().success());
}

#[test]
fn kvctl_governs_the_chunks_of_a_daemon_through_any_of_its_workers() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = format!("{}:64MiB", folder.path().join("nvme").display());
    let daemon = Daemon::start(folder.path(), &["--nvme", &nvme]);
    let (first, second) = (start_worker(folder.path(), &[]), start_worker(folder.path(), &[]));
    let (expected, _) = complete(&first, &prompt(7), None);
    daemon.wait_for_chunks(2);
    let lookup = govern(&second, "lookup", 7, &[]).unwrap();
    assert_eq!(
        lookup,
        json!({"prompt_tokens": 600, "cached_tokens": 512, "tiers": {"ram": 512}, "chunk_tokens": 256})
    );
    let health = kvctl(&second.client, &["health"]).unwrap();
    assert_eq!((&health["status"], &health["tiers"][1]["tier"]), (&json!("ok"), &json!("nvme")));
    eventually("the chunks are on the disk", || {
        let stats = kvctl(&second.client, &["stats"]).unwrap();
        assert_eq!(stats["counts"]["copy_queue_bytes"], 0, "the worker's own");
        (stats["counts"]["written_chunks_nvme"] == 2).then_some(())
    });

    // What one worker moves, pins and clears, the other one sees.
    let moved = govern(&first, "move", 7, &["--from", "ram", "--to", "nvme"]).unwrap();
    assert_eq!(moved, json!({"chunks": 2}));
    assert_eq!(tiers_of(&second, 7), json!({"nvme": 512}));
    let wrong = govern(&first, "move", 7, &["--from", "ram", "--to", "disk"]);
    assert!(
        wrong.as_ref().is_err_and(|error| error.contains("`to` is disk; allowed: ram, nvme")),
        "{wrong:?}"
    );
    let loaded = govern(&second, "prefetch", 7, &["--wait"]).unwrap();
    assert_eq!((&loaded["state"], &loaded["loaded_tokens"]), (&json!("done"), &json!(512)));
    let id = loaded["id"].as_str().unwrap();
    assert_eq!(kvctl(&second.client, &["prefetch-status", id]).unwrap(), loaded);
    assert_eq!(kvctl(&second.client, &["cancel", id]).unwrap(), loaded, "there was nothing left to cancel");
    assert!(kvctl(&first.client, &["prefetch-status", id]).unwrap_err().contains("no prefetch is called"));
    assert_eq!(govern(&first, "pin", 7, &[]).unwrap(), json!({"tokens": 512}));
    assert_eq!(govern(&second, "unpin", 7, &[]).unwrap(), json!({"tokens": 512}));
    let none = govern(&first, "unpin", 7, &[]).unwrap_err();
    assert!(none.contains("nothing of this prompt is pinned"), "{none}");

    // A prefetch of one tier alone.
    let body = json!({"token_ids": prompt(7)});
    let ask = |path: &str| {
        let mut answer = http::send(&first.client.address, "POST", path, Some(&body)).unwrap();
        (answer.status, answer.text().unwrap())
    };
    assert_eq!(ask("/cache/prefetch?tier=nvme").0, 200);
    assert!(ask("/cache/prefetch?tier=tape").1.contains("`tier` is tape; allowed: ram, nvme"));

    // Bytes come out through one, and go in through the other.
    let file = folder.path().join("kv.safetensors").display().to_string();
    govern(&second, "retrieve", 7, &["-o", &file]).unwrap();
    assert_eq!(kvctl(&first.client, &["clear", "--all"]).unwrap(), json!({"chunks": {"ram": 2, "nvme": 2}}));
    assert_eq!(tiers_of(&second, 7), json!({}));
    let stored =
        |n_stored: u32, n_present: u32| json!({"stored_chunks": n_stored, "present_chunks": n_present});
    assert_eq!(kvctl(&first.client, &["store", &file]).unwrap(), stored(2, 0));
    assert_eq!(kvctl(&second.client, &["store", &file]).unwrap(), stored(0, 2));
    let fresh = start_worker(folder.path(), &[]);
    assert_eq!(complete(&fresh, &prompt(7), None), (expected, json!({"ram": 512})));
    let listed = http::get_json(&fresh.address, "/kv/blocks?group=1").unwrap();
    assert_eq!(listed["blocks"].as_array().unwrap().len(), 2, "{listed}");
    assert_eq!(daemon.metric("kvik_node_corrupt_chunks_total"), 0);
}

#[test]
fn bytes_are_read_from_and_written_to_one_tier_of_a_daemon_alone() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = format!("{}:64MiB", folder.path().join("nvme").display());
    let daemon = Daemon::start(folder.path(), &["--nvme", &nvme]);
    let worker = start_worker(folder.path(), &[]);
    let (expected, _) = complete(&worker, &prompt(12), None);
    daemon.wait_for_chunks(2);
    let file = |name: &str| folder.path().join(format!("{name}.safetensors")).display().to_string();
    let read = |name: &str, more: &[&str]| {
        govern(&worker, "retrieve", 12, &[&["-o", &file(name)][..], more].concat()).unwrap();
        let bytes = std::fs::read(file(name)).unwrap();
        // The header has its fields in any order.
        let (n_header_bytes, rest) = bytes.split_first_chunk::<8>().unwrap();
        rest[u64::from_le_bytes(*n_header_bytes) as usize..].to_vec()
    };
    let whole = read("all", &[]);
    eventually("the chunks are on the disk", || (read("nvme", &["--tier", "nvme"]) == whole).then_some(()));
    govern(&worker, "clear", 12, &["--tier", "ram"]).unwrap();
    assert_eq!(tiers_of(&worker, 12), json!({"nvme": 512}));
    let none = read("ram", &["--tier", "ram"]);
    assert!(none.len() < 10_000, "memory has none of {} bytes, and gave {}", whole.len(), none.len());
    assert!(read("nvme", &["--tier", "nvme"]) == whole);
    kvctl(&worker.client, &["clear", "--all"]).unwrap();
    assert_eq!(tiers_of(&worker, 12), json!({}));

    // Into one tier, and into no other; the tokens are the same as before.
    let store = |tier: &str| kvctl(&worker.client, &["store", &file("all"), "--tier", tier]);
    assert_eq!(store("nvme").unwrap(), json!({"stored_chunks": 2, "present_chunks": 0}));
    assert_eq!(tiers_of(&worker, 12), json!({"nvme": 512}));
    assert_eq!(store("nvme").unwrap(), json!({"stored_chunks": 0, "present_chunks": 2}));
    assert!(store("tape").unwrap_err().contains("`tier` is tape; allowed: ram, nvme"));
    let fresh = start_worker(folder.path(), &[]);
    assert_eq!(complete(&fresh, &prompt(12), None), (expected, json!({"nvme": 512})));
}

#[test]
fn a_move_between_workers_of_one_daemon_or_to_itself_loses_nothing_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(folder.path(), &[]);
    let (first, second) = (start_worker(folder.path(), &[]), start_worker(folder.path(), &[]));
    complete(&first, &prompt(9), None);
    daemon.wait_for_chunks(2);
    for target in [&second, &first] {
        let to = format!("http://{}", target.client.address);
        let moved = govern(&first, "move", 9, &["--to-worker", &to]).unwrap();
        assert_eq!(moved, json!({"same_store": true}));
        assert_eq!(tiers_of(&second, 9), json!({"ram": 512}));
    }
    // A worker with a store of its own takes them.
    let own = cluster::start("worker", "127.0.0.1:0", &["--threads", "1", "--ram", "64MiB"], &[]);
    let to = format!("http://{}", own.client.address);
    let moved = govern(&first, "move", 9, &["--to-worker", &to]).unwrap();
    assert_eq!(moved, json!({"stored_chunks": 2, "present_chunks": 0}));
    assert_eq!((tiers_of(&second, 9), tiers_of(&own, 9)), (json!({}), json!({"ram": 512})));
}

#[test]
fn what_one_worker_pins_stays_while_another_one_fills_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    // Room for seven chunks of 2 MiB.
    let daemon = Daemon::start_with(folder.path(), "127.0.0.1:0", "16MiB", &[]);
    let (first, second) = (start_worker(folder.path(), &[]), start_worker(folder.path(), &[]));
    complete(&first, &prompt(8), None);
    daemon.wait_for_chunks(2);
    assert_eq!(govern(&first, "pin", 8, &[]).unwrap(), json!({"tokens": 512}));
    drop(first);
    for number in 20..27 {
        complete(&second, &prompt(number), None);
        daemon.wait_for_chunks(u64::from(2 * (number - 20) + 4));
    }
    assert_eq!(tiers_of(&second, 8), json!({"ram": 512}), "although the worker that pinned it is gone");
    let is_whole = |number: u32| tiers_of(&second, number) == json!({"ram": 512});
    let n_whole = (20..27).filter(|number| is_whole(*number)).count();
    assert!(n_whole <= 2, "there is room for two more, and {n_whole} are there");
}

#[test]
fn without_its_daemon_a_worker_says_so_and_a_daemon_that_comes_late_is_governed_and_known_to_the_index() {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = cluster::start_coordinator("127.0.0.1:0", &[]);
    let base = format!("http://{}", coordinator.address);
    // They wait two seconds for the daemon, and go on without it.
    let start = |id: &str| start_worker(folder.path(), &["--id", id, "--coordinator", &base]);
    let (first, second) = (start("worker-1"), start("worker-2"));
    let gateway = cluster::start_gateway("127.0.0.1:0", &[&coordinator.address], &[]);
    gateway.wait_for_backends(2);
    for (verb, prompt) in [("lookup", Some(9)), ("pin", Some(9)), ("stats", None), ("health", None)] {
        let refused = match prompt {
            Some(number) => govern(&first, verb, number, &[]).unwrap_err(),
            None => kvctl(&first.client, &[verb]).unwrap_err(),
        };
        assert!(refused.contains("503") && refused.contains("the store daemon"), "{verb}: {refused}");
    }

    let daemon = Daemon::start(folder.path(), &[]);
    eventually("both workers attached", || (daemon.metric("kvik_node_sessions") == 6).then_some(()));
    complete(&first, &prompt(9), None);
    daemon.wait_for_chunks(2);
    assert_eq!(tiers_of(&second, 9), json!({"ram": 512}));
    // The second worker has computed nothing: what the index knows of it, it knows of the daemon.
    let question = json!({"model": "kvik-tiny", "token_ids": prompt(9)});
    eventually("the index knows the chunks of the second worker", || {
        let mut answer = http::send(&gateway.address, "POST", "/v1/score", Some(&question)).ok()?;
        let score: Value = serde_json::from_str(&answer.text().ok()?).ok()?;
        (score["matched_tokens"]["worker-2"].as_u64() == Some(512)).then_some(())
    });
    kvctl(&second.client, &["clear", "--all"]).unwrap();
    eventually("the index knows that they are gone", || {
        let mut answer = http::send(&gateway.address, "POST", "/v1/score", Some(&question)).ok()?;
        let score: Value = serde_json::from_str(&answer.text().ok()?).ok()?;
        (score["matched_tokens"]["worker-2"].as_u64().unwrap_or(0) == 0).then_some(())
    });
}

#[test]
fn the_workers_of_up_share_a_store_and_the_index_knows_it_of_both() {
    let mut command = process::kvik();
    let mut process = Process::start(
        command.args(["up", "--port", "0", "--shared-store"]).stdout(std::process::Stdio::piped()),
    );
    let mut lines = BufReader::new(process.stdout()).lines().map(Result::unwrap);
    let address =
        lines.find_map(|line| Some(line.trim().strip_prefix("gateway")?.trim().to_owned())).unwrap();
    let store = lines.find(|line| line.trim_start().starts_with("store ")).unwrap();
    assert!(store.contains("shared by all workers at"), "{store}");
    let gateway = address.strip_prefix("http://").unwrap();
    eventually("the gateway is ready", || http::get_json(gateway, "/ready"));
    let body = json!({"model": "kvik-tiny", "prompt": prompt(5), "max_tokens": 1});
    assert_eq!(http::send(gateway, "POST", "/v1/completions", Some(&body)).unwrap().status, 200);
    let question = json!({"model": "kvik-tiny", "token_ids": prompt(5)});
    eventually("the index knows the chunks of both workers", || {
        let mut answer = http::send(gateway, "POST", "/v1/score", Some(&question)).ok()?;
        let score: Value = serde_json::from_str(&answer.text().ok()?).ok()?;
        let tokens = |worker: &str| score["matched_tokens"][worker].as_u64().unwrap_or(0);
        (tokens("worker-1") >= 512 && tokens("worker-2") >= 512).then_some(())
    });
    process.signal("INT");
    let rest: Vec<String> = lines.collect();
    assert_eq!(process.ended().code(), Some(0), "{rest:#?}");
    let folder = store.split("at ").nth(1).unwrap().split("/run/store.sock").next().unwrap();
    assert!(!Path::new(folder).try_exists().unwrap(), "{folder} is left");
}

#[test]
fn workers_serve_without_the_daemon_and_attach_again_when_it_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = format!("{}:64MiB", folder.path().join("nvme").display());
    // Before there is a daemon.
    let worker = start_worker(folder.path(), &[]);
    let (expected, tiers) = complete(&worker, &prompt(2), None);
    assert_eq!(tiers, Value::Null);
    let mut daemon = Daemon::start(folder.path(), &["--nvme", &nvme]);
    eventually("the worker attached", || (daemon.metric("kvik_node_sessions") == 3).then_some(()));
    complete(&worker, &prompt(3), None);
    complete(&worker, &prompt(2), Some("stored under a salt"));
    daemon.wait_for_chunks(4);
    eventually("the chunks are on the disk", || {
        (daemon.metric("kvik_store_written_chunks_nvme_total") >= 4).then_some(())
    });
    daemon.process.kill();
    assert_eq!(complete(&worker, &prompt(2), None).0, expected, "without the daemon");

    let mut daemon = Daemon::start(folder.path(), &["--nvme", &nvme]);
    eventually("the worker attached again", || (daemon.metric("kvik_node_sessions") == 3).then_some(()));
    let fresh = start_worker(folder.path(), &[]);
    let salted = complete(&fresh, &prompt(2), Some("stored under a salt"));
    assert_eq!(salted, (expected, json!({"nvme": 512})), "the disk outlived the daemon");
    daemon.process.signal("TERM");
    assert!(daemon.process.ended().success());
}

#[test]
fn a_new_daemon_takes_over_from_a_running_one_and_workers_find_everything_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = format!("{}:64MiB", folder.path().join("nvme").display());
    let metrics = process::free_address();
    let mut old = Daemon::start_at(folder.path(), &metrics, &["--nvme", &nvme]);
    let (first, second) = (start_worker(folder.path(), &[]), start_worker(folder.path(), &[]));
    let (expected, _) = complete(&first, &prompt(6), None);
    old.wait_for_chunks(2);

    let mut refused = process::kvik();
    refused.args(["store", "serve", "--take-over", "--ram", "32MiB", "--socket"]).arg(socket(folder.path()));
    let output = refused.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("`ram` is 33554432; allowed: 67108864"), "{text}");
    assert!(!output.status.success());

    // At the same address of the metrics, too: it is free when the old daemon has ended.
    let mut new = Daemon::start_at(folder.path(), &metrics, &["--nvme", &nvme, "--take-over"]);
    assert!(old.process.ended().success());
    assert!(old.process.logged_text().contains("another daemon has taken over"));
    assert_eq!(complete(&second, &prompt(6), None), (expected, json!({"ram": 512})));
    eventually("both workers attached", || (new.metric("kvik_node_sessions") == 6).then_some(()));
    new.process.signal("TERM");
    assert!(new.process.ended().success());
    let without = process::kvik()
        .args(["store", "serve", "--take-over", "--ram", "1MiB", "--socket"])
        .arg(socket(folder.path()))
        .output()
        .unwrap();
    let text = String::from_utf8(without.stderr).unwrap();
    assert!(text.contains("take over from the daemon at"), "{text}");
}

#[test]
fn tenants_of_a_daemon_find_nothing_of_each_other_and_a_worker_needs_its_token() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (a, b) = (file("a", "the token of tenant a\n"), file("b", "the token of tenant b\n"));
    let tenants = format!(
        "tenants=[{{name: a, token_file: {a}, ram: 32MiB}}, {{name: b, token_file: {b}, ram: 32MiB}}]"
    );
    let daemon = Daemon::start(folder.path(), &["--set", &tenants]);
    let with_token =
        |token: &str| start_worker(folder.path(), &["--set", &format!("store.daemon_token_file={token}")]);
    let (of_a, also_of_a, of_b) = (with_token(&a), with_token(&a), with_token(&b));
    let mut without = start_worker(folder.path(), &[]);
    let (expected, _) = complete(&of_a, &prompt(4), None);
    daemon.wait_for_chunks(2);
    assert_eq!(complete(&of_b, &prompt(4), None), (expected.clone(), Value::Null));
    assert_eq!(complete(&also_of_a, &prompt(4), None), (expected.clone(), json!({"ram": 512})));
    assert_eq!(complete(&without, &prompt(4), None), (expected, Value::Null));
    assert!(without.process.logged_text().contains("`token` is another"));
    assert!(daemon.metric("kvik_node_refused_total") > 0);
}

#[test]
fn wrong_settings_of_a_daemon_are_refused_with_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |arguments: &[&str]| {
        let output = process::kvik().args(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        let is_refused = text.contains("; allowed: ");
        assert_eq!(output.status.code(), Some(if is_refused { 3 } else { 1 }), "{text}");
        text
    };
    let socket = socket(folder.path()).display().to_string();
    let daemon = |more: &[&str]| refused(&[&["store", "serve", "--socket", &socket][..], more].concat());
    assert!(daemon(&["--ram", "much"]).contains("`store.ram` is much"), "{}", daemon(&["--ram", "much"]));
    let text = daemon(&["--ram", "1MiB", "--metrics", "nowhere"]);
    assert!(text.contains("start the store daemon: listen on nowhere: "), "{text}");
    let wrong = process::kvik().args(["store", "serve", "--ram", "much"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(3), "input that is refused");
    let short = folder.path().join("short");
    std::fs::write(&short, "short").unwrap();
    let text = daemon(&["--ram", "1MiB", "--set", &format!("token_file={}", short.display())]);
    assert!(text.contains("`token` is 5 bytes; allowed: 16 to 4096 bytes"), "{text}");
    let text = daemon(&["--ram", "1MiB", "--set", "max_sessions=0"]);
    assert!(text.contains("`max_sessions` is 0"), "{text}");
    let text = refused(&["worker", "--set", "store.daemon=/run/x", "--set", "store.ram=1GiB"]);
    assert!(text.contains("`store.daemon` is /run/x"), "{text}");
    let text = refused(&["worker", "--set", "store.daemon_token_file=/x"]);
    assert!(text.contains("`store.daemon_token_file` is /x"), "{text}");
}
