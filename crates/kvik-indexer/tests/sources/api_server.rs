//! An API server of Kubernetes that says what a test wants.

use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::support::PATIENCE;

/// A server; the test answers request by request.
pub(crate) struct ApiServer {
    pub(crate) listener: TcpListener,
}

/// A request that waits for its answer.
pub(crate) struct Asked {
    /// Path and query.
    pub(crate) target: String,
    pub(crate) head: String,
    stream: Box<dyn Duplex>,
}

/// An answer that has not ended.
pub(crate) struct Streaming {
    stream: Box<dyn Duplex>,
}

pub(crate) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

impl ApiServer {
    pub(crate) async fn bind() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.unwrap() }
    }

    pub(crate) fn address(&self) -> String {
        format!("http://{}", self.listener.local_addr().unwrap())
    }

    /// Waits for a request.
    pub(crate) async fn asked(&self) -> Asked {
        let (stream, _) = tokio::time::timeout(PATIENCE, self.listener.accept()).await.unwrap().unwrap();
        Asked::read(Box::new(stream)).await
    }

    /// Waits for a list and answers it.
    pub(crate) async fn list(&self, slices: &[Value], version: &str) {
        let asked = self.asked().await;
        assert!(!asked.target.contains("watch="), "{}", asked.target);
        asked.answer(200, &list(slices, version)).await;
    }

    /// Waits for a watch from a version on.
    pub(crate) async fn watch(&self, version: &str) -> Streaming {
        let asked = self.asked().await;
        assert!(asked.target.contains("&watch=1&allowWatchBookmarks=true&"), "{}", asked.target);
        assert!(asked.target.ends_with(&format!("&resourceVersion={version}")), "{}", asked.target);
        asked.stream().await
    }
}

impl Asked {
    pub(crate) async fn read(mut stream: Box<dyn Duplex>) -> Self {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        let target = head.strip_prefix("GET ").unwrap().split(' ').next().unwrap().to_owned();
        Self { target, head, stream }
    }

    pub(crate) async fn answer(mut self, status: u16, body: &Value) {
        let body = body.to_string();
        let head =
            format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
        self.stream.write_all(head.as_bytes()).await.unwrap();
        self.stream.write_all(body.as_bytes()).await.unwrap();
        self.stream.flush().await.unwrap();
    }

    pub(crate) async fn stream(mut self) -> Streaming {
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
        self.stream.write_all(head).await.unwrap();
        Streaming { stream: self.stream }
    }
}

impl Streaming {
    pub(crate) async fn line(&mut self, kind: &str, object: &Value) {
        let line = json!({ "type": kind, "object": object }).to_string();
        // In two pieces: where the pieces of a stream end says nothing.
        let (first, second) = line.split_at(line.len() / 2);
        self.raw(first.as_bytes()).await.unwrap();
        self.raw(format!("{second}\n").as_bytes()).await.unwrap();
    }

    pub(crate) async fn raw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(format!("{:x}\r\n", bytes.len()).as_bytes()).await?;
        self.stream.write_all(bytes).await?;
        self.stream.write_all(b"\r\n").await?;
        self.stream.flush().await
    }

    /// Ends as a server does whose time for a watch is over.
    pub(crate) async fn end(mut self) {
        self.stream.write_all(b"0\r\n\r\n").await.unwrap();
        self.stream.flush().await.unwrap();
    }
}

pub(crate) fn list(slices: &[Value], version: &str) -> Value {
    json!({
        "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
        "metadata": { "resourceVersion": version }, "items": slices,
    })
}

/// A slice with one endpoint on this machine, whose port `kv` is `port`.
pub(crate) fn slice(name: &str, version: &str, pod: &str, port: u16, conditions: &Value) -> Value {
    json!({
        "metadata": { "name": name, "resourceVersion": version },
        "addressType": "IPv4",
        "ports": [{ "name": "http", "port": 8000 }, { "name": "kv", "port": port, "protocol": "TCP" }],
        "endpoints": [{
            "addresses": ["127.0.0.1"], "conditions": conditions,
            "targetRef": { "kind": "Pod", "name": pod, "namespace": "serving" },
        }],
    })
}

pub(crate) fn serving() -> Value {
    json!({ "ready": true, "serving": true, "terminating": false })
}
