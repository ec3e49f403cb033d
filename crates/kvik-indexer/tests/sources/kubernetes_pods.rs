//! Discovery of pods behind a service, by the slices that Kubernetes' own controller writes for them.

use http::{Method, StatusCode};
use kvik_indexer::sources::kubernetes::KubernetesSource;
use serde_json::{Value, json};

use crate::kube_server::{KubeServer, NAMESPACE, own_address};
use crate::kubernetes::{gone, heard};
use crate::kubernetes_server::{bind, config, start};
use crate::support::{PATIENCE, Recorder};

/// Plays the kubelet of a node for pods of one container each.
struct Node<'a> {
    server: &'a KubeServer,
}

impl<'a> Node<'a> {
    async fn join(server: &'a KubeServer) -> Self {
        server.create("/api/v1/nodes", &json!({ "metadata": { "name": "node-0" } })).await;
        Self { server }
    }

    /// Makes a pod on the node whose port `kv` is `port`, and says that it runs.
    async fn run(&self, pod: &str, port: u16, is_ready: bool) {
        let container =
            json!({ "name": "vllm", "image": "vllm", "ports": [{ "name": "kv", "containerPort": port }] });
        let object = json!({
            "metadata": { "name": pod, "labels": { "app": "vllm" } },
            "spec": { "nodeName": "node-0", "serviceAccountName": "kvik", "containers": [container] },
        });
        self.server.create(&pod_path(""), &object).await;
        self.set_ready(pod, is_ready).await;
    }

    async fn set_ready(&self, pod: &str, is_ready: bool) {
        let address = own_address();
        let ready = if is_ready { "True" } else { "False" };
        let status = json!({ "status": {
            "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
            "conditions": [{ "type": "Ready", "status": ready }],
        }});
        self.call(Method::PATCH, &format!("{}/status", pod_path(pod)), Some(&status)).await;
    }

    /// Ends a pod after `grace_period_s`; at 0 it is gone at once.
    async fn delete(&self, pod: &str, grace_period_s: u32) {
        let path = format!("{}?gracePeriodSeconds={grace_period_s}", pod_path(pod));
        self.call(Method::DELETE, &path, None).await;
    }

    async fn call(&self, method: Method, path: &str, body: Option<&Value>) {
        let (status, answer) = self.server.call(method, path, body).await.unwrap();
        assert_eq!(status, StatusCode::OK, "{path}: {answer}");
    }
}

fn pod_path(pod: &str) -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}").trim_end_matches('/').to_owned()
}

#[tokio::test]
async fn pods_behind_a_service_are_heard_from_when_they_are_ready_until_they_end() {
    let mut server = start().await;
    server.start_controllers();
    let service = json!({
        "metadata": { "name": "vllm" },
        "spec": { "selector": { "app": "vllm" }, "ports": [{ "name": "kv", "port": 5557, "targetPort": "kv" }] },
    });
    server.create(&format!("/api/v1/namespaces/{NAMESPACE}/services"), &service).await;
    let node = Node::join(&server).await;
    let (first, second) = (bind().await, bind().await);
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server, server.port()), recorder.feeds()).unwrap();
    node.run("vllm-0", first.port(), true).await;
    node.run("vllm-1", second.port(), false).await;
    let mut engine = first.accept().await;
    heard(&mut engine, &recorder, "vllm-0", 0).await;
    node.set_ready("vllm-1", true).await;
    let mut other = second.accept().await;
    heard(&mut other, &recorder, "vllm-1", 0).await;

    // It ends, but still serves; then it no longer does.
    node.delete("vllm-0", 30).await;
    server
        .until_slices("a pod ends and serves", |endpoint| {
            endpoint["conditions"]["terminating"] == true && endpoint["conditions"]["serving"] == true
        })
        .await;
    heard(&mut engine, &recorder, "vllm-0", 1).await;
    node.set_ready("vllm-0", false).await;
    gone(&recorder, "vllm-0").await;
    node.delete("vllm-0", 0).await;

    // Not being ready for a while changes nothing; being gone at once does.
    node.set_ready("vllm-1", false).await;
    server.until_slices("a pod is not ready", |endpoint| endpoint["conditions"]["ready"] == false).await;
    heard(&mut other, &recorder, "vllm-1", 1).await;
    node.delete("vllm-1", 0).await;
    gone(&recorder, "vllm-1").await;
    assert_eq!(tokio::time::timeout(PATIENCE, other.receive()).await.unwrap(), None);
}
