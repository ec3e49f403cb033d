//! Workers of one host that share memory for keys and values.

use std::path::Path;
use std::time::{Duration, Instant};

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{DeviceSnapshot, Ledger, LimitStatus, Policy};
use kvik_memory::pages::Claim;
use kvik_memory::service::{MemoryClient, Notice, SessionOptions};
use serde_json::json;

use crate::cluster::{Client, Role};
use crate::http;
use crate::process::{self, Process, eventually};

/// The bundled model has 8 layers, and a page is 2 MiB in each.
const PAGE_BYTES: u64 = 8 * UNIT_BYTES;
/// A block of 16 tokens takes 16 KiB in each layer.
const PAGE_BLOCKS: u64 = UNIT_BYTES / (16 << 10);
/// What the workers of a test have together.
const N_PAGES: u64 = 3;
const NAME: &str = "shared-kv";

/// Tokens of a prompt that needs a little more than a page: two of them fill all three.
const PROMPT_TOKENS: u32 = 2100;

/// Blocks that a worker has, and could have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Blocks {
    n_blocks: u64,
    limit_blocks: u64,
}

/// Starts a worker whose ledger is in `dir`, with these variables and settings.
#[track_caller]
fn start_worker(id: &str, dir: &Path, variables: &[(&str, &str)], settings: &[&str]) -> Role {
    let mut command = process::kvik();
    command.env_remove("KVCACHED_IPC_NAME").envs(variables.iter().copied());
    command.args(["worker", "--log-format", "json", "--listen", "127.0.0.1:0", "--id", id, "--threads", "1"]);
    let dir = format!("memory.dir={}", dir.display());
    let device = format!("memory.device_bytes={}", N_PAGES * PAGE_BYTES);
    for setting in [dir.as_str(), device.as_str()].iter().chain(settings) {
        command.args(["--set", setting]);
    }
    let mut process = Process::start(&mut command);
    let address = process.logged("worker is ready")["address"].as_str().unwrap().to_owned();
    Role { process, client: Client { address } }
}

/// Starts a worker that shares its memory.
#[track_caller]
fn start_sharing_worker(id: &str, dir: &Path) -> Role {
    start_worker(id, dir, &[], &["memory.ipc_name=shared-kv", "memory.wait_timeout_s=300", "kv_blocks=1024"])
}

/// Tokens of a prompt that shares no block with another.
fn prompt(number: u32, n_tokens: u32) -> Vec<u32> {
    (0..n_tokens).map(|position| 100 + (position * 7 + number * 131) % 3000).collect()
}

/// The likeliest 8 tokens after prompt `number`, as text.
#[track_caller]
fn answer(worker: &Client, number: u32) -> String {
    let body = json!({
        "model": "kvik-tiny", "prompt": prompt(number, PROMPT_TOKENS), "max_tokens": 8,
        "temperature": 0, "ignore_eos": true,
    });
    let mut answer = http::send(&worker.address, "POST", "/v1/completions", Some(&body)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{text}");
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 8, "{text}");
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[track_caller]
fn blocks(worker: &Client) -> Blocks {
    let stats = http::get_json(&worker.address, "/kv/stats").unwrap();
    let field = |name: &str| stats[name].as_u64().unwrap();
    Blocks { n_blocks: field("blocks"), limit_blocks: field("limit_blocks") }
}

fn pages(n_pages: u64) -> Blocks {
    Blocks { n_blocks: n_pages * PAGE_BLOCKS, limit_blocks: N_PAGES * PAGE_BLOCKS }
}

#[track_caller]
fn open_ledger(dir: &Path) -> Ledger {
    Ledger::open_existing(dir, "host0").unwrap().unwrap()
}

/// What each worker holds, by its name.
fn held_bytes(snapshot: &DeviceSnapshot, label: &str) -> u64 {
    let members = snapshot.members.iter().filter(|member| member.label == label);
    members.map(|member| member.held_bytes).sum()
}

#[test]
fn memory_goes_to_the_worker_that_has_the_load_and_survives_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let alone = start_worker("alone", dir.path(), &[], &[]);
    let expected: Vec<String> = (0..4).map(|number| answer(&alone, number)).collect();
    let first = start_sharing_worker("first", dir.path());
    let mut second = start_sharing_worker("second", dir.path());
    let ledger = open_ledger(dir.path());
    assert_eq!((blocks(&first), blocks(&second)), (pages(0), pages(0)), "an idle worker holds nothing");

    // The first has all the load, and all the memory.
    for number in [0, 1] {
        assert_eq!(answer(&first, number), expected[number as usize]);
    }
    assert_eq!((blocks(&first), blocks(&second)), (pages(3), pages(0)));
    let snapshot = ledger.snapshot().unwrap();
    assert_eq!(snapshot.held_bytes, N_PAGES * PAGE_BYTES);
    assert_eq!(held_bytes(&snapshot, "first"), N_PAGES * PAGE_BYTES);
    assert_eq!(snapshot.groups[0].used_bytes, 0, "a cache without readers is not in use");

    // The load moves: one prompt needs more than half of what there is.
    assert_eq!(answer(&second, 2), expected[2]);
    assert_eq!(blocks(&second), pages(2));
    let n_left = blocks(&first).n_blocks;
    assert!(n_left <= PAGE_BLOCKS, "{n_left}");
    assert_eq!(first.metric("kvik_worker_kv_blocks", ""), Some(n_left as f64));
    assert_eq!(first.metric("kvik_worker_kv_blocks_limit", ""), Some((N_PAGES * PAGE_BLOCKS) as f64));
    let n_given_back = first.metric("kvik_worker_kv_blocks_given_back_total", "");
    assert_eq!(n_given_back, Some((N_PAGES * PAGE_BLOCKS - n_left) as f64));
    assert_eq!(second.metric("kvik_worker_kv_blocks_given_back_total", ""), Some(0.0));
    let snapshot = ledger.snapshot().unwrap();
    assert_eq!(held_bytes(&snapshot, "first"), n_left / PAGE_BLOCKS * PAGE_BYTES);
    assert_eq!(held_bytes(&snapshot, "second"), 2 * PAGE_BYTES);

    // And both at a time, each prompt needing more than half: one after the other.
    std::thread::scope(|scope| {
        let to_first = scope.spawn(|| (0..2).map(|number| answer(&first.client, number)).collect::<Vec<_>>());
        let to_second =
            scope.spawn(|| (2..4).map(|number| answer(&second.client, number)).collect::<Vec<_>>());
        assert_eq!(to_first.join().unwrap(), expected[0..2]);
        assert_eq!(to_second.join().unwrap(), expected[2..4]);
    });

    // What the dead held is free again: the first takes everything.
    assert_eq!(answer(&second, 2), expected[2]);
    assert!(2 * PAGE_BLOCKS <= blocks(&second).n_blocks);
    second.process.kill();
    for number in [0, 3, 1] {
        assert_eq!(answer(&first, number), expected[number as usize]);
    }
    assert_eq!(blocks(&first), pages(3));
    let snapshot = ledger.snapshot().unwrap();
    assert_eq!(snapshot.members.iter().map(|member| member.label.as_str()).collect::<Vec<_>>(), ["first"]);
}

#[test]
fn a_lowered_limit_shrinks_an_idle_worker_within_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let worker = start_worker("idle", dir.path(), &[("KVCACHED_IPC_NAME", NAME)], &["kv_blocks=1024"]);
    let expected = answer(&worker, 0);
    answer(&worker, 1);
    assert_eq!(blocks(&worker), pages(3));
    let ledger = open_ledger(dir.path());

    let started = Instant::now();
    let change = ledger.set_limit(NAME, Some(PAGE_BYTES), None).unwrap();
    // The worker may have given everything back before the answer is made.
    assert!(matches!(change.status, LimitStatus::Applied | LimitStatus::Deferred), "{change:?}");
    assert_eq!(change.limit_bytes, Some(PAGE_BYTES));
    eventually("the worker shrinks", || (ledger.snapshot().unwrap().held_bytes <= PAGE_BYTES).then_some(()));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    let after = blocks(&worker);
    assert_eq!(after.limit_blocks, PAGE_BLOCKS);
    assert!(after.n_blocks <= PAGE_BLOCKS, "{after:?}");

    // The same while a sequence holds two pages: it shrinks when the sequence ends.
    ledger.set_limit(NAME, None, None).unwrap();
    answer(&worker, 1);
    let body = json!({
        "model": "kvik-tiny", "prompt": prompt(0, PROMPT_TOKENS), "max_tokens": 1000, "temperature": 0,
        "ignore_eos": true, "stream": true,
    });
    let mut stream = http::send(&worker.address, "POST", "/v1/completions", Some(&body)).unwrap();
    stream.event().unwrap().unwrap();
    assert_eq!(blocks(&worker), pages(3));
    ledger.set_limit(NAME, Some(PAGE_BYTES), None).unwrap();
    stream.text().unwrap();
    eventually("the worker shrinks", || (ledger.snapshot().unwrap().held_bytes <= PAGE_BYTES).then_some(()));

    // What could never fit is refused at once, and runs when the limit is gone.
    let body = json!({"model": "kvik-tiny", "prompt": prompt(0, PROMPT_TOKENS), "max_tokens": 8});
    let mut refused = http::send(&worker.address, "POST", "/v1/completions", Some(&body)).unwrap();
    let text = refused.text().unwrap();
    assert_eq!(refused.status, 400, "{text}");
    assert!(text.contains("by the KV pool"), "{text}");
    let change = ledger.set_limit(NAME, None, None).unwrap();
    assert_eq!(change.status, LimitStatus::Applied);
    assert_eq!(answer(&worker, 0), expected);
    assert_eq!(blocks(&worker).limit_blocks, N_PAGES * PAGE_BLOCKS);
}

#[test]
fn the_memory_service_lends_what_workers_leave_and_ends_with_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("service").join("memory.sock");
    let mut command = process::kvik();
    command.args(["memory", "serve", "--device", "-1", "--log-format", "json", "--ipc-name", NAME]);
    command.args(["--host-bytes", &(N_PAGES * PAGE_BYTES).to_string()]);
    command.arg("--dir").arg(dir.path()).arg("--socket").arg(&socket);
    let mut server = Process::start(&mut command);
    let ready = server.logged("memory service is ready");
    assert_eq!(
        (ready["device"].as_str(), ready["budget_bytes"].as_u64()),
        (Some("host0"), Some(N_PAGES * PAGE_BYTES))
    );
    let options =
        SessionOptions { ipc_name: String::new(), label: "guest".to_owned(), policy: Policy::default() };
    let mut guest = MemoryClient::connect(&socket, &options).unwrap();
    assert_eq!(guest.claim(N_PAGES * PAGE_BYTES, Duration::ZERO).unwrap(), Claim::Granted);

    // A worker of the same host gets its share of what the guest holds.
    let worker = start_worker("worker", dir.path(), &[], &["memory.ipc_name=shared-kv", "kv_blocks=1024"]);
    let body = json!({"model": "kvik-tiny", "prompt": "Once upon a time", "max_tokens": 4});
    std::thread::scope(|scope| {
        let send = || http::send(&worker.client.address, "POST", "/v1/completions", Some(&body)).unwrap();
        let asked = scope.spawn(move || send().status);
        let Some(Notice::Reclaim { n_bytes }) = guest.next_notice(process::PATIENCE).unwrap() else {
            panic!("the guest was not asked")
        };
        assert_eq!(n_bytes, PAGE_BYTES);
        guest.give_back(n_bytes).unwrap();
        assert_eq!(asked.join().unwrap(), 200);
    });
    assert_eq!(blocks(&worker).n_blocks, PAGE_BLOCKS);

    server.signal("TERM");
    assert!(server.ended().success());
    assert!(guest.stats().is_err());
    assert_eq!(open_ledger(dir.path()).snapshot().unwrap().held_bytes, PAGE_BYTES);
    assert!(!socket.try_exists().unwrap());
}

#[test]
fn a_worker_refuses_bad_variables_of_kvcached_by_name_and_warns_of_those_without_a_meaning() {
    for (variable, value, allowed) in [
        ("KVCACHED_GPU_UTILIZATION", "banana", "above 0, up to 1"),
        ("KVCACHED_PAGE_SIZE_MB", "3", "a multiple of 2"),
        ("KVCACHED_PAGE_PREALLOC_ENABLED", "banana", "true, false"),
        ("KVCACHED_LOG_LEVEL", "loud", "trace, debug"),
        ("ENABLE_KVCACHED", "2", "true, false"),
    ] {
        let output = process::kvik().env(variable, value).arg("worker").output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success());
        assert!(
            message.contains(variable) && message.contains(value) && message.contains(allowed),
            "{message}"
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let variables = [
        ("ENABLE_KVCACHED", "true"),
        ("KVCACHED_GPU_UTILIZATION", "0.67"),
        ("KVCACHED_PAGE_SIZE_MB", "4"),
        ("KVCACHED_LOG_LEVEL", "info"),
        ("KVCACHED_SANITY_CHECK", "true"),
    ];
    let mut command = process::kvik();
    command.envs(variables).args([
        "worker",
        "--log-format",
        "json",
        "--listen",
        "127.0.0.1:0",
        "--threads",
        "1",
    ]);
    let dir = format!("memory.dir={}", dir.path().display());
    let device = format!("memory.device_bytes={}", N_PAGES * PAGE_BYTES);
    command.args(["--set", &dir, "--set", &device, "--set", "kv_blocks=1024"]);
    let mut process = Process::start(&mut command);
    let warned = process.logged("ignored variables that have no meaning for a worker");
    assert!(warned["variables"].to_string().contains("KVCACHED_SANITY_CHECK"), "{warned}");
    let address = process.logged("worker is ready")["address"].as_str().unwrap().to_owned();
    let worker = Role { process, client: Client { address } };
    // Two thirds of three pages of 2 MiB are one page of 4 MiB.
    assert_eq!(blocks(&worker).limit_blocks, 2 * PAGE_BLOCKS);
}
