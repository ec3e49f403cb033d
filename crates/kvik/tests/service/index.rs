//! The global KV index of a gateway over real workers, and `kvctl index` beside it.

use std::process::Command;

use serde_json::{Value, json};

use crate::cluster::{Cluster, Role, Settings, start, start_coordinator, start_gateway};
use crate::http;
use crate::process::{Process, eventually, free_address};
use crate::store;

/// More than two chunks of the store, all but the last token in whole blocks.
const PROMPT_TOKENS: u32 = 593;

fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|position| 100 + (position * 7 + number * 131) % 3000).collect()
}

/// Runs `kvctl --json index ...`; its answer, or what it said on standard error.
fn kvctl(gateway: &Role, arguments: &[&str]) -> Result<Value, String> {
    run_kvctl("index", gateway, arguments)
}

fn run_kvctl(verb: &str, gateway: &Role, arguments: &[&str]) -> Result<Value, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_kvctl"))
        .args(["--json", verb, "--gateway", &format!("http://{}", gateway.address)])
        .args(arguments)
        .output()
        .unwrap();
    if output.status.success() {
        return Ok(serde_json::from_slice(&output.stdout).unwrap_or_default());
    }
    Err(String::from_utf8(output.stderr).unwrap())
}

/// Completes a prompt for a user; the worker that did it and the tokens that it had.
#[track_caller]
fn complete(gateway: &Role, body: &Value, user: &str) -> (String, u64) {
    let mut body = body.clone();
    body["user"] = json!(user);
    body["max_tokens"] = json!(2);
    let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
    let mut answer = http::send(&gateway.address, "POST", path, Some(&body)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{text}");
    let parsed: Value = serde_json::from_str(&text).unwrap();
    let cached = parsed["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    (answer.worker(), cached)
}

/// How much of a prompt each worker has, as the index knows it.
fn score(gateway: &Role, request: &Value) -> Value {
    let mut answer = http::send(&gateway.address, "POST", "/v1/score", Some(request)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[track_caller]
fn wait_until_known(gateway: &Role, request: &Value, worker: &str) {
    eventually("the index knows the prompt", || {
        let answer = score(gateway, request);
        (answer["best"] == worker && answer["matched_tokens"][worker].as_u64()? > 100).then_some(())
    });
}

#[test]
fn requests_go_to_the_worker_that_has_their_prompt() {
    let cluster = Cluster::start(Settings::default());
    let gateway = &cluster.gateway;
    let story =
        "The keeper of the light walked down to the sea every morning before the sun was up. ".repeat(20);
    let bodies = [
        (
            json!({"model": "kvik-tiny", "prompt": prompt(1)}),
            json!({"model": "kvik-tiny", "token_ids": prompt(1)}),
        ),
        (json!({"model": "kvik-tiny", "prompt": story}), json!({"model": "kvik-tiny", "prompt": story})),
        (
            json!({"model": "kvik-tiny", "messages": [{"role": "user", "content": story}]}),
            json!({"model": "kvik-tiny", "messages": [{"role": "user", "content": story}]}),
        ),
    ];
    for (body, question) in &bodies {
        let (holder, _) = complete(gateway, body, "first");
        wait_until_known(gateway, question, &holder);
        for user in 0..6 {
            let (worker, cached) = complete(gateway, body, &format!("user-{user}"));
            assert_eq!(worker, holder, "{question}");
            assert!(cached > 100, "{cached} tokens of {question}");
        }
    }
    let by_index = gateway.metric("kvik_gateway_route_decisions_total", "holder");
    assert!(by_index >= Some(18.0), "{by_index:?}");
    assert_eq!(gateway.metric("kvik_index_predictions_total", "short"), None);
}

#[test]
fn kvctl_shows_the_index_and_finds_it_equal_to_what_workers_hold() {
    let cluster = Cluster::start(Settings::default());
    let gateway = &cluster.gateway;
    let (holder, _) = complete(gateway, &json!({"model": "kvik-tiny", "prompt": prompt(2)}), "a");
    wait_until_known(gateway, &json!({"model": "kvik-tiny", "token_ids": prompt(2)}), &holder);
    let stats = kvctl(gateway, &["stats"]).unwrap();
    assert_eq!((&stats["backend"], &stats["models"][0]["has_tokenizer"]), (&json!("memory"), &json!(true)));
    let tokens: Vec<String> = prompt(2).iter().map(u32::to_string).collect();
    let lookup = ["lookup", "--model", "kvik-tiny", "--token-ids", &tokens.join(",")];
    assert_eq!(kvctl(gateway, &lookup).unwrap()["best"], json!(holder));
    let coordinator = format!("http://{}", cluster.coordinator.address);
    let check = kvctl(gateway, &["check", "--coordinator", &coordinator]).unwrap();
    assert_eq!(check["is_equal"], true, "{check}");
    let n_blocks: u64 =
        check["workers"].as_array().unwrap().iter().map(|worker| worker["n_blocks"].as_u64().unwrap()).sum();
    assert!(n_blocks >= 37, "{check}");
    let wrong = kvctl(gateway, &["lookup", "--model", "kvik-tiny", "--prompt", "a", "--scorer", "luck"]);
    assert!(wrong.unwrap_err().contains("longest_prefix, highest_block_hit, coverage, cost"));
    let unknown = kvctl(gateway, &["check", "--coordinator", &coordinator, "--worker", "nobody"]);
    assert!(unknown.unwrap_err().contains("nobody"));
}

#[test]
fn kvctl_explains_where_a_request_would_go_and_sends_nothing() {
    let cluster = Cluster::start(Settings::default());
    let gateway = &cluster.gateway;
    let (holder, _) = complete(gateway, &json!({"model": "kvik-tiny", "prompt": prompt(3)}), "a");
    wait_until_known(gateway, &json!({"model": "kvik-tiny", "token_ids": prompt(3)}), &holder);
    let tokens: Vec<String> = prompt(3).iter().map(u32::to_string).collect();
    let explain = ["explain", "--model", "kvik-tiny", "--token-ids", &tokens.join(","), "--max-tokens", "7"];
    let answer = run_kvctl("route", gateway, &explain).unwrap();
    assert_eq!((&answer["worker"], &answer["reason"]), (&json!(holder), &json!("holder")), "{answer}");
    assert_eq!((&answer["prompt_tokens"], &answer["output_tokens"]), (&json!(PROMPT_TOKENS), &json!(7)));
    assert_eq!(answer["disaggregation"], Value::Null);
    let candidates = answer["candidates"].as_array().unwrap();
    let cached = |worker: &Value| worker["cached_tokens"].as_u64().unwrap();
    assert!(
        candidates.iter().all(|worker| (100 < cached(worker)) == (worker["worker"] == holder)),
        "{answer}"
    );
    let unknown = run_kvctl("route", gateway, &["explain", "--model", "none", "--prompt", "a"]);
    assert!(unknown.unwrap_err().contains("none"));
}

#[test]
fn a_killed_worker_is_in_no_answer_any_more() {
    let mut cluster = Cluster::start(Settings::default());
    let body = json!({"model": "kvik-tiny", "prompt": prompt(3)});
    let question = json!({"model": "kvik-tiny", "token_ids": prompt(3)});
    let (holder, _) = complete(&cluster.gateway, &body, "a");
    wait_until_known(&cluster.gateway, &question, &holder);
    let place = usize::from(holder == "worker-2");
    cluster.workers[place].process.kill();
    eventually("the index has forgotten the worker", || {
        score(&cluster.gateway, &question)["best"].is_null().then_some(())
    });
    cluster.gateway.wait_for_backends(1);
    let (other, _) = complete(&cluster.gateway, &body, "a");
    assert_ne!(other, holder);
    wait_until_known(&cluster.gateway, &question, &other);
}

#[test]
fn what_a_worker_that_ends_held_in_memory_is_in_no_answer_any_more() {
    let coordinator = start_coordinator("127.0.0.1:0", &[]);
    let base = format!("http://{}", coordinator.address);
    let worker = |id: &str| {
        let flags = ["--id", id, "--threads", "1", "--ram", "64MiB", "--coordinator", &base];
        start("worker", "127.0.0.1:0", &flags, &[])
    };
    let mut workers = ["worker-1", "worker-2"].map(worker);
    let gateway = start_gateway("127.0.0.1:0", &[&coordinator.address], &[]);
    gateway.wait_for_backends(2);
    let body = json!({"model": "kvik-tiny", "prompt": prompt(6), "seq_id": "turn"});
    let question = json!({"model": "kvik-tiny", "token_ids": prompt(6)});
    let (holder, _) = complete(&gateway, &body, "a");
    wait_until_known(&gateway, &question, &holder);
    let leaving = &mut workers[usize::from(holder == "worker-2")];
    let tokens: Vec<String> = prompt(6).iter().map(u32::to_string).collect();
    eventually("its store has the chunks of the prompt in memory", || {
        let lookup = store::kvctl(&leaving.client, &["lookup", "--token-ids", &tokens.join(",")]).unwrap();
        (lookup["tiers"] == json!({"ram": 512})).then_some(())
    });

    leaving.process.signal("TERM");
    assert_eq!(leaving.process.ended().code(), Some(0));

    eventually("the index has forgotten the worker", || {
        score(&gateway, &question)["best"].is_null().then_some(())
    });
    // The next turn is not sent after KV that is gone.
    let (other, cached) = complete(&gateway, &body, "a");
    assert!(other != holder && cached == 0, "{other} has {cached}");
    wait_until_known(&gateway, &question, &other);
}

#[test]
fn a_shared_index_survives_the_gateway() {
    let cluster = Cluster::start(Settings::default());
    let folder = tempfile::tempdir().unwrap();
    let address = free_address();
    let port = address.rsplit_once(':').unwrap().1.to_owned();
    let mut server = Command::new("redis-server");
    server.args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--dir"]).arg(folder.path());
    server.stdout(std::process::Stdio::null());
    let _server = Process::start(&mut server);
    eventually("the server listens", || std::net::TcpStream::connect(&address).ok());
    let backend = format!("index.backend=redis://{address}");
    let mut first = start_gateway("127.0.0.1:0", &[&cluster.coordinator.address], &[&backend]);
    first.wait_for_backends(2);
    let question = json!({"model": "kvik-tiny", "token_ids": prompt(4)});
    let (holder, _) = complete(&first, &json!({"model": "kvik-tiny", "prompt": prompt(4)}), "a");
    wait_until_known(&first, &question, &holder);
    let before = score(&first, &question);
    first.process.kill();
    // Without a coordinator it hears of no worker: what it knows is what the first one left.
    let second = start_gateway("127.0.0.1:0", &[], &[&backend]);
    assert_eq!(score(&second, &question)["matched_tokens"], before["matched_tokens"]);
    assert_eq!(kvctl(&second, &["stats"]).unwrap()["backend"], "redis");
}

#[test]
fn a_gateway_whose_shared_index_is_away_serves_by_the_ring() {
    let address = free_address();
    let cluster = Cluster::start(Settings::default());
    let backend = format!("index.backend=redis://{address}");
    let gateway = start_gateway("127.0.0.1:0", &[&cluster.coordinator.address], &[&backend]);
    gateway.wait_for_backends(2);
    let body = json!({"model": "kvik-tiny", "prompt": prompt(5)});
    let (first, _) = complete(&gateway, &body, "a");
    assert_eq!(complete(&gateway, &body, "a").0, first);
    let question = json!({"model": "kvik-tiny", "token_ids": prompt(5)});
    let answer = http::send(&gateway.address, "POST", "/v1/score", Some(&question)).unwrap();
    assert_eq!(answer.status, 503);
}
