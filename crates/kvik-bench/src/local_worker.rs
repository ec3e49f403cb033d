//! A worker in this process, asked over loopback.

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client, send};
use kvik_runtime::shutdown::Shutdown;
use kvik_worker::{Running, Worker, WorkerConfig};
use serde_json::Value;

/// A running worker and the client that asks it.
pub(crate) struct LocalWorker {
    http: HttpClient,
    base: String,
    running: Running,
    shutdown: Shutdown,
}

impl LocalWorker {
    pub(crate) async fn start(config: WorkerConfig) -> anyhow::Result<Self> {
        let config = WorkerConfig { listen: "127.0.0.1:0".to_owned(), ..config };
        let shutdown = Shutdown::new();
        let running = Worker::start(config, &shutdown).await.context("start a worker")?;
        let base = format!("http://{}", running.address());
        Ok(Self { http: http_client(&TlsClientConfig::default())?, base, running, shutdown })
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let request = Request::post(format!("{}{path}", self.base))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))?;
        self.ask(path, request).await
    }

    pub(crate) async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let request = Request::get(format!("{}{path}", self.base)).body(Full::new(Bytes::new()))?;
        self.ask(path, request).await
    }

    async fn ask(&self, path: &str, request: Request<Full<Bytes>>) -> anyhow::Result<Value> {
        let response = send(&self.http, request).await.context("ask the worker")?;
        let status = response.status();
        let body = response.into_body().collect().await.context("read the answer")?.to_bytes();
        ensure!(status.is_success(), "{path} answered {status}: {}", String::from_utf8_lossy(&body));
        Ok(serde_json::from_slice(&body)?)
    }

    /// Ends the worker and waits for all its tasks.
    pub(crate) async fn end(self) {
        self.shutdown.finish().await;
        self.running.closed().await;
    }
}
