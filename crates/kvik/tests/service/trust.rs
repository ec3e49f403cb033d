//! What roles demand of their callers, each a process.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cluster::{Role, start};
use crate::http;
use crate::process::{self, Process, eventually};

const CLUSTER: &str = "cluster-token-0123456789";
const ADMIN: &str = "admin-token-0123456789";

fn status(role: &Role, method: &str, path: &str, token: Option<&str>, body: Option<&Value>) -> u16 {
    let headers: Vec<(&str, &str)> = token.map(|token| ("x-kvik-cluster-token", token)).into_iter().collect();
    http::send_with(&role.client.address, method, path, &headers, body).unwrap().status
}

#[test]
fn a_role_that_other_machines_can_reach_does_not_start_without_a_credential() {
    for role in ["worker", "coordinator", "gateway", "indexer"] {
        let output = process::kvik().args([role, "--listen", "0.0.0.0:0"]).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{role}: {message}");
        for word in ["`listen` is 0.0.0.0:", "other machines", "`cluster_token`", "`insecure: true`"] {
            assert!(message.contains(word), "{role}, {word}: {message}");
        }
    }
    let mut command = process::kvik();
    command.args(["gateway", "--listen", "127.0.0.1:0", "--set", "index.grpc_listen=0.0.0.0:0"]);
    let output = command.output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(3) && message.contains("`index.grpc_listen` is 0.0.0.0:"),
        "{message}"
    );
}

#[test]
fn an_address_that_is_none_is_refused_as_every_wrong_setting() {
    for role in ["worker", "coordinator", "gateway"] {
        let output = process::kvik().args([role, "--listen", "nonsense"]).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{role}: {message}");
        assert!(message.contains("listen on nonsense"), "{role}: {message}");
    }
}

#[test]
fn an_insecure_role_warns_and_serves() {
    for role in ["coordinator", "gateway"] {
        let mut command = process::kvik();
        command.args([role, "--log-format", "json", "--listen", "0.0.0.0:0", "--set", "insecure=true"]);
        let mut process = Process::start(&mut command);
        let warned = process.logged("insecure: other machines are served without credentials");
        assert_eq!(warned["level"], "WARN");
        let address = process.logged(&format!("{role} is ready"))["address"].as_str().unwrap().to_owned();
        let address = address.replace("0.0.0.0", "127.0.0.1");
        assert_eq!(http::get(&address, "/health").unwrap().0, 200);
    }
}

#[test]
fn a_cluster_with_tokens_serves_only_its_members() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, format!("{CLUSTER}\n")).unwrap();
    let cluster_token = format!("cluster_token_file={}", file.display());
    let tokens = [cluster_token.as_str(), &format!("admin_token={ADMIN}")];
    let quick = ["heartbeat_interval_ms=100", "slow_start_ms=0"];
    let coordinator = start("coordinator", "127.0.0.1:0", &[], &[&tokens[..], &quick].concat());
    let base = format!("http://{}", coordinator.client.address);
    let flags = ["--coordinator", base.as_str()];
    let worker_flags = [&flags[..], &["--id", "worker-1", "--threads", "1", "--ram", "16MiB"]].concat();
    let worker = start("worker", "127.0.0.1:0", &worker_flags, &tokens);
    let gateway = start("gateway", "127.0.0.1:0", &flags, &tokens);

    // The worker registered and the gateway serves: both showed the token.
    let prompt =
        json!({"model": "kvik-tiny", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0});
    eventually("the gateway serves", || {
        (status(&gateway, "POST", "/v1/completions", None, Some(&prompt)) == 200).then_some(())
    });
    // The index heard of the worker's blocks.
    eventually("the index follows the worker", || {
        let headers = [("x-kvik-cluster-token", ADMIN)];
        let answer = http::send_with(&gateway.client.address, "GET", "/index/stats", &headers, None);
        answer.unwrap().text().unwrap().contains("worker-1").then_some(())
    });

    for role in [&coordinator, &worker] {
        for path in ["/health", "/ready", "/metrics"] {
            assert_eq!(status(role, "GET", path, None, None), 200, "{path}");
        }
    }
    let stranger = json!({
        "worker": {"id": "stranger", "epoch": 1, "address": "http://127.0.0.1:1", "model": "kvik-tiny",
                   "capacity_tokens": 1000, "weight": 1.0},
        "load": {"running": 0, "waiting": 0, "outstanding_tokens": 0, "kv_usage": 0.0}, "state": "ready",
    });
    for (role, method, path, body) in [
        (&coordinator, "POST", "/register", Some(&stranger)),
        (&coordinator, "GET", "/workers", None),
        (&coordinator, "GET", "/watch", None),
        (&coordinator, "GET", "/nothing", None),
        (&worker, "POST", "/v1/completions", Some(&prompt)),
        (&worker, "GET", "/v1/models", None),
        (&worker, "GET", "/kv/events", None),
        (&worker, "GET", "/nothing", None),
    ] {
        for wrong in [None, Some("cluster-token-012345678x"), Some("short")] {
            assert_eq!(status(role, method, path, wrong, body), 401, "{path} {wrong:?}");
        }
    }
    assert_eq!(status(&worker, "GET", "/v1/models", Some(CLUSTER), None), 200);
    assert_eq!(status(&coordinator, "GET", "/workers", Some(CLUSTER), None), 200);

    // What changes a role needs the administrator's token.
    for (role, method, path, served) in [
        (&worker, "POST", "/kv/put?seq_id=s", 400),
        (&worker, "POST", "/cache/store", 400),
        (&worker, "POST", "/cache/clear", 400),
        (&worker, "GET", "/cache/stats", 200),
        (&gateway, "GET", "/index/stats", 200),
        (&coordinator, "POST", "/workers/worker-9/drain", 404),
        (&worker, "POST", "/drain", 202),
    ] {
        assert_eq!(status(role, method, path, None, None), 401, "{path}");
        assert_eq!(status(role, method, path, Some(CLUSTER), None), 403, "{path}");
        assert_eq!(status(role, method, path, Some(ADMIN), None), served, "{path}");
    }
}
