//! Spans against a collector that is there, and one that is not.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::routing::{get, post};
use bytes::Bytes;
use http::{HeaderMap, Request};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span as SentSpan;
use parking_lot::Mutex;
use prost::Message as _;
use tower::ServiceExt as _;

use super::config::HTTP_PATH;
use super::*;

mod transport;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

/// What a collector got.
#[derive(Clone, Default)]
struct Collected(Arc<Mutex<Vec<SentSpan>>>);

impl Collected {
    fn take(&self, message: Bytes) {
        let message = ExportTraceServiceRequest::decode(message).unwrap();
        let spans = message.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        self.0.lock().extend(spans.flat_map(|scope| scope.spans));
    }

    fn named(&self, name: &str) -> SentSpan {
        let spans = self.0.lock();
        let found = spans.iter().find(|span| span.name == name);
        found.unwrap_or_else(|| panic!("no span {name} among {spans:#?}")).clone()
    }
}

async fn collect(State(collected): State<Collected>, body: Bytes) {
    collected.take(body);
}

/// Starts a collector; returns its address and what it gets.
async fn start_collector(shutdown: &Shutdown) -> (String, Collected) {
    let collected = Collected::default();
    let router = Router::new().route(HTTP_PATH, post(collect)).with_state(collected.clone());
    let listener = crate::http::listen("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let server = shutdown.clone();
    shutdown.spawn(async move {
        let limits = crate::http::ListenLimits::default();
        crate::http::serve(listener, router, None, &limits, server.draining(), &server).await;
    });
    (base, collected)
}

fn config(base: &str) -> TracingConfig {
    TracingConfig { otlp_endpoint: Some(base.to_owned()), ..TracingConfig::default() }
}

fn headers(traceparent: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("traceparent", traceparent.parse().unwrap());
    headers
}

#[tokio::test]
async fn without_an_endpoint_requests_pass_as_they_are() {
    let shutdown = Shutdown::new();
    let tracer = Tracer::start(&TracingConfig::default(), "test", "one", &shutdown).unwrap();
    let mut headers = headers(PARENT);
    let span = tracer.request(&headers, || panic!("the name is not needed"));
    span.propagate(&mut headers);
    assert!(!span.is_recording());
    assert_eq!(headers["traceparent"], PARENT);
    shutdown.finish().await;
}

#[tokio::test]
async fn a_request_and_its_phases_continue_the_trace_of_the_caller() {
    let (collector, shutdown) = (Shutdown::new(), Shutdown::new());
    let (base, collected) = start_collector(&collector).await;
    let tracer = Tracer::start(&config(&base), "test", "one", &shutdown).unwrap();
    let handler = async || {
        let mut phases = Phases::begin("queue");
        phases.enter_at("decode", std::time::Instant::now());
        phases.set("gen_ai.usage.output_tokens", 7);
        "done"
    };
    let router = Router::new().route("/work", post(handler)).route("/health", get(async || "ok"));
    let router = tracer.trace_requests(router);
    let ask = |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path).header("traceparent", PARENT);
        router.clone().oneshot(request.body(Body::empty()).unwrap())
    };
    let answer = ask("POST", "/work").await.unwrap();
    assert_eq!(to_bytes(answer.into_body(), 100).await.unwrap(), "done");
    let answer = ask("GET", "/health").await.unwrap();
    to_bytes(answer.into_body(), 100).await.unwrap();
    shutdown.finish().await;

    let (request, queue, decode) =
        (collected.named("POST /work"), collected.named("queue"), collected.named("decode"));
    let hex = |bytes: &[u8]| bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    assert_eq!(hex(&request.trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(hex(&request.parent_span_id), "b7ad6b7169203331");
    for phase in [&queue, &decode] {
        assert_eq!((&phase.trace_id, &phase.parent_span_id), (&request.trace_id, &request.span_id));
        assert!(request.start_time_unix_nano <= phase.start_time_unix_nano);
        assert!(phase.end_time_unix_nano <= request.end_time_unix_nano);
    }
    assert_eq!(queue.end_time_unix_nano, decode.start_time_unix_nano);
    assert_eq!(decode.attributes[0].key, "gen_ai.usage.output_tokens");
    let status = request.attributes.iter().find(|attribute| attribute.key == "http.response.status_code");
    assert!(format!("{status:?}").contains("200"), "{status:?}");
    // Questions for health make no spans.
    assert_eq!(collected.0.lock().len(), 3);
    collector.finish().await;
}

#[tokio::test]
async fn the_caller_decides_whether_its_trace_is_recorded() {
    let (collector, shutdown) = (Shutdown::new(), Shutdown::new());
    let (base, collected) = start_collector(&collector).await;
    let none = TracingConfig { sampling_ratio: 0.0, ..config(&base) };
    let tracer = Tracer::start(&none, "test", "one", &shutdown).unwrap();
    for (traceparent, is_recorded) in [(PARENT, true), (UNSAMPLED, false), ("nonsense", false)] {
        let mut headers = headers(traceparent);
        let span = tracer.request(&headers, || traceparent.to_owned());
        assert_eq!(span.is_recording(), is_recorded, "{traceparent}");
        span.propagate(&mut headers);
        let passed_on = headers["traceparent"].to_str().unwrap();
        assert_ne!(passed_on, traceparent);
        assert!(passed_on.ends_with(if is_recorded { "-01" } else { "-00" }), "{passed_on}");
    }
    shutdown.finish().await;
    assert_eq!(collected.0.lock().len(), 1);
    assert_eq!(collected.named(PARENT).name, PARENT);
    collector.finish().await;
}

#[tokio::test]
async fn a_collector_that_is_away_blocks_no_request() {
    let shutdown = Shutdown::new();
    let tracer = Tracer::start(&config("http://127.0.0.1:9"), "test", "one", &shutdown).unwrap();
    let start = std::time::Instant::now();
    for _ in 0..3 * MAX_WAITING_SPANS {
        drop(tracer.request(&HeaderMap::new(), || "request".to_owned()));
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let start = std::time::Instant::now();
    shutdown.finish().await;
    assert!(start.elapsed() < 3 * FLUSH_TIMEOUT, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_bad_value_is_refused_with_its_field_and_what_is_allowed() {
    let message = |config: TracingConfig| {
        Tracer::start(&config, "test", "one", &Shutdown::new()).unwrap_err().to_string()
    };
    for endpoint in ["collector:4318", "grpc://collector:4317", "https://", "http://"] {
        let message = message(config(endpoint));
        assert!(message.contains(endpoint) && message.contains("`tracing.otlp_endpoint`"), "{message}");
    }
    let ratio = TracingConfig { sampling_ratio: f64::NAN, ..TracingConfig::default() };
    assert!(message(ratio).contains("0 to 1"));
}
