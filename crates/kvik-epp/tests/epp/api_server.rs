//! An API server of Kubernetes that says what a test wants.

use kvik_epp::EppConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::in_time;

const POOLS: &str = "/apis/inference.networking.k8s.io/v1/namespaces/serving/inferencepools";
const PODS: &str = "/api/v1/namespaces/serving/pods";

/// A server; the test answers request by request.
pub(crate) struct ApiServer {
    listener: TcpListener,
}

/// A request that waits for its answer.
pub(crate) struct Asked {
    /// Path and query.
    pub(crate) target: String,
    stream: TcpStream,
}

/// A watch that has not ended.
pub(crate) struct Watch {
    stream: TcpStream,
}

/// The watches of a pool and of its pods.
pub(crate) struct Watches {
    pub(crate) pods: Watch,
    pub(crate) pool: Watch,
}

impl ApiServer {
    pub(crate) async fn bind() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.unwrap() }
    }

    /// Has a picker follow the pool `serving/vllm` of this server.
    pub(crate) fn configure(&self, config: &mut EppConfig) {
        config.pool.name = Some("serving/vllm".to_owned());
        config.pool.api = format!("http://{}", self.listener.local_addr().unwrap());
        config.pool.retry_min_ms = 5;
        config.pool.retry_max_ms = 50;
    }

    /// Waits for a request.
    pub(crate) async fn asked(&self) -> Asked {
        let (mut stream, _) = in_time(self.listener.accept()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(in_time(stream.read_u8()).await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        let target = head.strip_prefix("GET ").unwrap().split(' ').next().unwrap().to_owned();
        Asked { target, stream }
    }

    /// Answers the lists of a pool and of its pods, and begins to be watched.
    pub(crate) async fn begin(&self, pool: &Value, pods: &[Value]) -> Watches {
        let asked = self.asked().await;
        assert_eq!(asked.target, format!("{POOLS}?fieldSelector=metadata%2Ename%3Dvllm&limit=500"));
        asked.list(std::slice::from_ref(pool), "10").await;
        self.list_pods(pool, pods).await
    }

    /// The same from the list of pods on.
    pub(crate) async fn list_pods(&self, pool: &Value, pods: &[Value]) -> Watches {
        let app = pool["spec"]["selector"]["matchLabels"]["app"].as_str().unwrap();
        let asked = self.asked().await;
        assert_eq!(asked.target, format!("{PODS}?labelSelector=app%3D{app}&limit=500"));
        asked.list(pods, "20").await;
        let pods = self.watch(PODS, "20").await;
        let pool = self.watch(POOLS, "10").await;
        Watches { pods, pool }
    }

    /// Waits for a watch.
    pub(crate) async fn watch(&self, path: &str, version: &str) -> Watch {
        let asked = self.asked().await;
        assert!(asked.target.starts_with(path), "{}", asked.target);
        assert!(asked.target.contains("&watch=1&allowWatchBookmarks=true&"), "{}", asked.target);
        assert!(asked.target.ends_with(&format!("&resourceVersion={version}")), "{}", asked.target);
        asked.stream().await
    }

    /// Waits for the watch of pods.
    pub(crate) async fn watch_pods(&self, version: &str) -> Watch {
        self.watch(PODS, version).await
    }
}

impl Asked {
    pub(crate) async fn list(self, items: &[Value], version: &str) {
        self.answer(200, &json!({"metadata": {"resourceVersion": version}, "items": items})).await;
    }

    pub(crate) async fn answer(mut self, status: u16, body: &Value) {
        let body = body.to_string();
        let head =
            format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
        self.stream.write_all(head.as_bytes()).await.unwrap();
        self.stream.write_all(body.as_bytes()).await.unwrap();
    }

    async fn stream(mut self) -> Watch {
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
        self.stream.write_all(head).await.unwrap();
        Watch { stream: self.stream }
    }
}

impl Watch {
    pub(crate) async fn line(&mut self, kind: &str, object: &Value) {
        let line = format!("{}\n", json!({"type": kind, "object": object}));
        self.stream.write_all(format!("{:x}\r\n{line}\r\n", line.len()).as_bytes()).await.unwrap();
    }

    /// Ends as a server does whose time for a watch is over.
    pub(crate) async fn end(mut self) {
        self.stream.write_all(b"0\r\n\r\n").await.unwrap();
    }
}

/// The pool `vllm` of the pods with this label.
pub(crate) fn pool(version: &str, app: &str) -> Value {
    json!({
        "metadata": {"name": "vllm", "resourceVersion": version},
        "spec": {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": 1}]},
    })
}

/// The same with these ports.
pub(crate) fn pool_with_ports(version: &str, ports: &[u16]) -> Value {
    let mut pool = pool(version, "vllm");
    pool["spec"]["targetPorts"] = ports.iter().map(|number| json!({"number": number})).collect();
    pool
}

/// A pod on this machine.
pub(crate) fn pod(name: &str, version: &str, is_ready: bool) -> Value {
    json!({
        "metadata": {"name": name, "resourceVersion": version, "labels": {"app": "vllm"}},
        "status": {
            "phase": "Running", "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": if is_ready { "True" } else { "False" }}],
        },
    })
}
