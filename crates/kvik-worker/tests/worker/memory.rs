//! The memory that engines of a machine share, as its workers tell of it.

use http::StatusCode;
use kvik_worker::WorkerConfig;
use serde_json::{Value, json};

use crate::support::{config, start_with};

#[tokio::test]
async fn the_groups_of_a_machine_are_told_and_changed() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = WorkerConfig { id: Some("first".to_owned()), ..config() };
    config.memory.ipc_name = Some("shared".to_owned());
    config.memory.device_bytes = 1 << 30;
    config.memory.dir = folder.path().to_owned();
    let worker = start_with(config).await;
    let client = &worker.client;
    let report = client.get("/memory").await.json();
    let device = report["devices"][0].clone();
    assert_eq!((&device["device"], &device["budget_bytes"]), (&json!("host0"), &json!(1 << 30)));
    let group = &device["groups"][0];
    assert_eq!((&group["ipc"], &group["limit_bytes"]), (&json!("shared"), &json!(1 << 30)));
    assert_eq!(
        (&group["members"][0]["label"], &group["members"][0]["is_live"]),
        (&json!("first"), &json!(true))
    );

    let policy = |max_bytes: Value| {
        let policy = json!({"min_bytes": 0, "max_bytes": max_bytes, "weight": 3, "priority": 1});
        json!({"device": "host0", "ipc": "shared", "policy": policy})
    };
    let changed = client.ask("/memory/policy", &policy(json!((256 << 20) + 1))).await;
    assert_eq!(
        changed["policy"],
        json!({"min_bytes": 0, "max_bytes": 256 << 20, "weight": 3, "priority": 1})
    );
    let report = client.get("/memory").await.json();
    assert_eq!(report["devices"][0]["groups"][0]["limit_bytes"], 256 << 20);
    let changed = client.ask("/memory/policy", &policy(Value::Null)).await;
    assert_eq!(changed["policy"]["max_bytes"], Value::Null);
    assert_eq!(client.ask("/memory/trim", &json!({"device": "host0", "ipc": "shared"})).await["engines"], 1);

    let with = |field: &str, value: Value| {
        let mut body = policy(Value::Null);
        body[field] = value;
        body
    };
    for (path, body, status, param) in [
        ("/memory/policy", with("ipc", json!("misspelled")), StatusCode::NOT_FOUND, "ipc"),
        ("/memory/policy", with("device", json!("../../etc")), StatusCode::NOT_FOUND, "device"),
        ("/memory/policy", with("policy", json!({"weight": 1})), StatusCode::BAD_REQUEST, "policy"),
        ("/memory/trim", json!({"device": "host0", "ipc": "misspelled"}), StatusCode::NOT_FOUND, "ipc"),
    ] {
        let refused = client.post(path, &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (status, &json!(param)), "{body}");
    }
    let report = client.get("/memory").await.json();
    assert_eq!(report["devices"][0]["groups"].as_array().unwrap().len(), 1, "a wrong name makes no group");
    worker.end().await;
}
