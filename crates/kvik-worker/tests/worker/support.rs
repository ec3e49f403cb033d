//! A worker on a free port and a client for it.

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use kvik_model::{CpuBackendOptions, EngineEvent, EngineOptions, GenerateRequest, Model, SamplingParams};
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use kvik_proto::sse::SseDecoder;
use kvik_proto::worker::KvStats;
use kvik_runtime::shutdown::Shutdown;
use kvik_tokens::AddSpecial;
use kvik_worker::{Running, Worker, WorkerConfig};
use serde_json::Value;

pub(crate) const PROMPT: &str = "Once upon a time there was a little dog who had a red ball and a";

/// A worker that ends with the test.
pub(crate) struct TestWorker {
    pub(crate) running: Running,
    pub(crate) shutdown: Shutdown,
    pub(crate) client: TestClient,
}

/// Asks one address.
#[derive(Clone)]
pub(crate) struct TestClient {
    http: HttpClient,
    base: String,
}

/// What was answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Bytes,
}

/// A stream that is being read.
pub(crate) struct OpenStream {
    body: Incoming,
    decoder: SseDecoder,
    pending: std::collections::VecDeque<String>,
}

pub(crate) fn config() -> WorkerConfig {
    WorkerConfig { listen: "127.0.0.1:0".to_owned(), threads: 1, ..WorkerConfig::default() }
}

pub(crate) async fn start() -> TestWorker {
    start_with(config()).await
}

pub(crate) async fn start_with(config: WorkerConfig) -> TestWorker {
    let shutdown = Shutdown::new();
    let running = Worker::start(config, &shutdown).await.unwrap();
    let client = TestClient::new(&format!("http://{}", running.address()));
    TestWorker { running, shutdown, client }
}

impl TestWorker {
    /// Ends the worker and waits for all its tasks.
    pub(crate) async fn end(self) {
        self.shutdown.finish().await;
        self.running.closed().await;
    }
}

impl TestClient {
    pub(crate) fn new(base: &str) -> Self {
        Self { http: http_client(&TlsClientConfig::default()).unwrap(), base: base.to_owned() }
    }

    pub(crate) async fn try_send(&self, method: Method, path: &str, body: Vec<u8>) -> Option<Answer> {
        Answer::of(self.open(method, path, &[], body).await?).await
    }

    /// Sends a request with headers.
    pub(crate) async fn send_with(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Answer {
        let response = self.open(method, path, headers, body).await.expect("the worker answers");
        Answer::of(response).await.expect("the answer is whole")
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Answer {
        self.try_send(method, path, body).await.expect("the worker answers")
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, Vec::new()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(Method::POST, path, body.to_string().into_bytes()).await
    }

    /// Posts and expects success.
    pub(crate) async fn ask(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer.json()
    }

    /// Posts and reads the whole stream.
    pub(crate) async fn events(&self, path: &str, body: &Value) -> Vec<String> {
        let mut stream = self.stream(path, body).await;
        let mut events = Vec::new();
        while let Some(event) = stream.next().await {
            events.push(event);
        }
        events
    }

    /// Posts and gives the stream before its end.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> OpenStream {
        self.stream_with(path, &[], body).await
    }

    /// Posts with headers and gives the stream before its end.
    pub(crate) async fn stream_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> OpenStream {
        let response = self.open(Method::POST, path, headers, body.to_string().into_bytes()).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        OpenStream {
            body: response.into_body(),
            decoder: SseDecoder::default(),
            pending: std::collections::VecDeque::new(),
        }
    }

    pub(crate) async fn kv_stats(&self) -> KvStats {
        serde_json::from_slice(&self.get("/kv/stats").await.body).unwrap()
    }

    /// Asks for the state until `fits`; the test's time limit is the harness'.
    pub(crate) async fn wait_for_stats(&self, fits: impl Fn(&KvStats) -> bool) -> KvStats {
        loop {
            let stats = self.kv_stats().await;
            if fits(&stats) {
                return stats;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Waits until the KV of all ended sequences is in the store, if there is one.
    pub(crate) async fn wait_for_copies(&self) {
        loop {
            let stats = self.get("/cache/stats").await;
            if stats.status != StatusCode::OK || stats.json()["counts"]["copy_queue_bytes"] == 0 {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    async fn open(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Option<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::from(body))).unwrap();
        self.http.request(request).await.ok()
    }
}

impl Answer {
    async fn of(response: Response<Incoming>) -> Option<Self> {
        let (head, body) = response.into_parts();
        let body = body.collect().await.ok()?.to_bytes();
        Some(Self { status: head.status, headers: head.headers, body })
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The error's message, field and code.
    pub(crate) fn error(&self) -> (String, Value, Value) {
        let error = self.json()["error"].clone();
        (error["message"].as_str().unwrap().to_owned(), error["param"].clone(), error["code"].clone())
    }
}

impl OpenStream {
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Some(event);
            }
            let frame = self.body.frame().await?.expect("the stream is whole");
            if let Ok(bytes) = frame.into_data() {
                let pending = &mut self.pending;
                self.decoder.push(&bytes, |event| pending.push_back(event.to_owned())).unwrap();
            }
        }
    }
}

pub(crate) fn tokens_of(text: &str) -> Vec<u32> {
    Model::bundled().unwrap().tokenizer().encode(text, AddSpecial::Yes).unwrap()
}

/// What the engine alone makes of a prompt: tokens and text.
pub(crate) fn engine_alone(prompt: Vec<u32>, sampling: SamplingParams) -> (Vec<u32>, String) {
    let model = Model::bundled().unwrap();
    let mut engine = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    engine.submit(GenerateRequest { prompt, sampling }).unwrap();
    let (mut tokens, mut text) = (Vec::new(), String::new());
    for event in engine.run_until_idle().unwrap() {
        match event {
            EngineEvent::Token(token) => {
                tokens.push(token.token);
                text.push_str(&token.text);
            }
            EngineEvent::Finished { text: rest, .. } => text.push_str(&rest),
            EngineEvent::Admitted { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    (tokens, text)
}
