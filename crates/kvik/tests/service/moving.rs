//! Answers whose workers die, stop or leave while they are given.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{Cluster, Settings, start_worker};
use crate::http::{self, Answer};
use crate::process::eventually;
use crate::streams::{by_output, normalized, open, requests, undisturbed};

/// Opens all requests and reads some events of each, which differ in number.
fn begin(cluster: &Cluster, seq_id: &str, salt: &str) -> Vec<(Answer, Vec<String>)> {
    let begin = |(number, request): (usize, &(&str, Value))| {
        let mut stream = open(&cluster.gateway, request, Some(seq_id), &format!("{salt}-{number}"));
        let first = (0..2 + 5 * number).map(|_| stream.event().unwrap().unwrap()).collect();
        (stream, first)
    };
    requests().iter().enumerate().map(begin).collect()
}

/// Reads streams to their end and compares them with the undisturbed run.
#[track_caller]
fn check(streams: Vec<(Answer, Vec<String>)>, expected: &[Vec<(Value, Value)>]) {
    for ((mut stream, mut events), expected) in streams.into_iter().zip(expected) {
        events.extend(stream.events().unwrap());
        let events = by_output(normalized(events));
        for (event, expected) in events.iter().zip(expected) {
            assert_eq!(event, expected);
        }
        assert_eq!(events.len(), expected.len());
    }
}

/// Waits until nothing runs anywhere and no load is counted.
#[track_caller]
fn wait_for_rest(cluster: &Cluster) {
    eventually("all loads and places are given back", || {
        let idle = |role: &crate::cluster::Client, name: &str| role.metric(name, "").unwrap_or(0.0) < 0.5;
        let workers = cluster.workers.iter();
        let is_idle = idle(&cluster.gateway, "kvik_gateway_outstanding_tokens")
            && idle(&cluster.gateway, "kvik_gateway_outstanding_requests")
            && workers.filter(|worker| http::get(&worker.address, "/health").is_ok()).all(|worker| {
                idle(worker, "vllm:num_requests_running") && idle(worker, "vllm:num_requests_waiting")
            });
        is_idle.then_some(())
    });
}

#[test]
fn answers_of_a_killed_worker_go_on_elsewhere_without_a_lost_or_repeated_token() {
    let mut cluster = Cluster::start(Settings::default());
    let expected = undisturbed(&cluster.gateway, &requests(), Some("undisturbed"));
    let sequence = cluster.sequence_of("worker-1");
    let streams = begin(&cluster, &sequence, "killed");
    let n_there = streams.iter().filter(|(stream, _)| stream.worker() == "worker-1").count();
    assert!(0 < n_there);

    cluster.workers[0].process.kill();

    check(streams, &expected);
    let n_replayed = cluster.gateway.metric("kvik_gateway_continued_total", "replayed").unwrap();
    assert!(n_there as f64 <= n_replayed, "{n_replayed} of {n_there}");
    cluster.workers.remove(0);
    wait_for_rest(&cluster);
}

#[test]
fn answers_of_a_stopped_worker_go_on_elsewhere_without_a_lost_or_repeated_token() {
    let cluster = Cluster::start(Settings::default());
    let expected = undisturbed(&cluster.gateway, &requests(), Some("undisturbed"));
    let sequence = cluster.sequence_of("worker-2");
    let streams = begin(&cluster, &sequence, "stopped");
    assert!(streams.iter().any(|(stream, _)| stream.worker() == "worker-2"));

    cluster.workers[1].process.signal("STOP");

    check(streams, &expected);
    assert!(1.0 <= cluster.gateway.metric("kvik_gateway_continued_total", "replayed").unwrap());
    cluster.workers[1].process.signal("CONT");
    cluster.gateway.wait_for_backends(2);
    wait_for_rest(&cluster);
}

#[test]
fn a_worker_that_ends_gives_its_answers_away_with_their_kv() {
    let mut cluster = Cluster::start(Settings::default());
    let expected = undisturbed(&cluster.gateway, &requests(), Some("undisturbed"));
    let sequence = cluster.sequence_of("worker-1");
    let streams = begin(&cluster, &sequence, "drained");
    let n_there = streams.iter().filter(|(stream, _)| stream.worker() == "worker-1").count();
    assert!(0 < n_there);
    let before = Instant::now();

    cluster.workers[0].process.signal("TERM");

    assert_eq!(cluster.workers[0].process.ended().code(), Some(0));
    let took = before.elapsed();
    check(streams, &expected);
    let continued =
        |outcome: &str| cluster.gateway.metric("kvik_gateway_continued_total", outcome).unwrap_or(0.0);
    assert_eq!((continued("moved"), continued("replayed")), (n_there as f64, 0.0), "after {took:?}");
    let ahead = cluster.workers[1].metric("kvik_worker_resumed_total", "ahead").unwrap();
    assert_eq!(ahead as usize, n_there);
    // Nothing waited for an output to end.
    assert!(took < Duration::from_secs(10), "{took:?}");
    cluster.workers.remove(0);
    wait_for_rest(&cluster);
}

#[test]
fn an_answer_without_a_stream_goes_on_when_its_worker_ends() {
    let mut cluster = Cluster::start(Settings::default());
    let sequence = cluster.sequence_of("worker-1");
    let body = |salt: &str| {
        json!({
            "model": "kvik-tiny", "prompt": "Once upon a time", "seq_id": sequence, "max_tokens": 500, "temperature": 0.7,
            "seed": 5, "logprobs": 1, "ignore_eos": true, "cache_salt": salt,
        })
    };
    let gateway = cluster.gateway.address.clone();
    let ask = |salt: &str| {
        let mut answer = http::send(&gateway, "POST", "/v1/completions", Some(&body(salt))).unwrap();
        let text = answer.text().unwrap();
        assert_eq!(answer.status, 200, "{text}");
        let mut value: Value = serde_json::from_str(&text).unwrap();
        (value["choices"].take(), value["usage"].take())
    };
    let expected = ask("a");
    let leaving = &cluster.workers[0];
    let (answer, ()) = std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask("b"));
        eventually("the request runs", || {
            let running = http::get_json(&leaving.address, "/sequences")?;
            let n_tokens = running["sequences"][0]["output_tokens"].as_u64()?;
            (20 < n_tokens).then_some(())
        });
        leaving.process.signal("TERM");
        (asking.join().unwrap(), ())
    });
    assert_eq!(answer, expected);
    assert_eq!(cluster.gateway.metric("kvik_gateway_continued_total", "moved"), Some(1.0));
    assert_eq!(cluster.workers[0].process.ended().code(), Some(0));
    cluster.workers.remove(0);
    wait_for_rest(&cluster);
}

#[test]
fn an_answer_ends_in_one_clean_error_if_no_worker_is_left() {
    let mut cluster =
        Cluster::start(Settings { gateway: &["retry.continuation_wait_ms=300"], ..Settings::default() });
    let sequence = cluster.sequence_of("worker-1");
    let mut streams = begin(&cluster, &sequence, "lost");
    for worker in &mut cluster.workers {
        worker.process.kill();
    }
    for (stream, _) in &mut streams {
        let events = stream.events().unwrap();
        let errors = events.iter().filter(|event| event.contains("\"error\""));
        assert_eq!(errors.count(), 1, "{:?}", events.last());
        assert!(events.last().unwrap().contains("broke off"), "{:?}", events.last());
    }
    cluster.workers.clear();
    wait_for_rest(&cluster);
}

#[test]
fn an_answer_waits_for_a_worker_that_comes_back() {
    let mut cluster = Cluster::start(Settings::default());
    let expected = undisturbed(&cluster.gateway, &requests(), Some("undisturbed"));
    let sequence = cluster.sequence_of("worker-1");
    let streams = begin(&cluster, &sequence, "waiting");
    for worker in &mut cluster.workers {
        worker.process.kill();
    }
    cluster.workers = vec![start_worker("127.0.0.1:0", "worker-3", &[&cluster.coordinator.address])];
    check(streams, &expected);
    wait_for_rest(&cluster);
}

/// What `kvctl` prints as JSON; it must succeed.
#[track_caller]
fn kvctl(cluster: &Cluster, arguments: &[&str]) -> Value {
    let coordinator = format!("http://{}", cluster.coordinator.address);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvctl"));
    let output = command.args(arguments).args(["--coordinator", &coordinator, "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn an_operator_moves_a_request_and_drains_a_worker() {
    let mut cluster = Cluster::start(Settings::default());
    // Long enough for four commands, one after the other.
    let mut request = requests().swap_remove(0);
    request.1["max_tokens"] = 3000.into();
    let request = [request];
    let expected = undisturbed(&cluster.gateway, &request, Some("undisturbed"));
    let sequence = cluster.sequence_of("worker-1");
    let mut stream = open(&cluster.gateway, &request[0], Some(&sequence), "operated");
    let first = vec![stream.event().unwrap().unwrap()];
    let source = stream.worker();
    let (destination, place) = if source == "worker-1" { ("worker-2", 1) } else { ("worker-1", 0) };
    let streams = vec![(stream, first)];
    let listed = kvctl(&cluster, &["sequences", &source]);
    let id = listed["sequences"][0]["id"].as_str().unwrap_or_else(|| panic!("{listed}"));

    let moved = kvctl(&cluster, &["move", id, destination]);
    assert_eq!((&moved["from"], &moved["to"]), (&json!(source), &json!(destination)));

    let report = kvctl(&cluster, &["drain", destination, "--deadline", "60s"]);
    assert_eq!(report["failed"], 0, "{report}");
    assert_eq!(report["replayed"], 0, "{report}");
    assert_eq!(report["migrated"], 1, "{report}");
    check(streams, &expected);
    assert_eq!(cluster.workers[place].process.ended().code(), Some(0));
    cluster.workers.remove(place);
    wait_for_rest(&cluster);
}
