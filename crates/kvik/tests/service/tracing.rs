//! Traces as a collector gets them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AttributeValue;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use prost::Message;

use crate::cluster::{Ending, completion, start, start_coordinator, start_gateway};
use crate::http;
use crate::process::{eventually, free_address};

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

/// A collector that takes OTLP over HTTP, for as long as the test runs.
struct Collector {
    base: String,
    /// The service that sent a span, and the span.
    spans: Arc<Mutex<Vec<(String, Span)>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let spans = Arc::new(Mutex::new(Vec::new()));
        let collected = Arc::clone(&spans);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let collected = Arc::clone(&collected);
                thread::spawn(move || while let Some(()) = take_message(&stream, &collected) {});
            }
        });
        Self { base, spans }
    }

    fn spans(&self) -> Vec<(String, Span)> {
        self.spans.lock().clone()
    }
}

/// Reads one request and answers it; none at the end of the connection.
fn take_message(mut stream: &TcpStream, collected: &Mutex<Vec<(String, Span)>>) -> Option<()> {
    // Nothing is read ahead: the client waits for the answer.
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    assert!(head.starts_with("POST /v1/traces "), "{head}");
    let header = |name: &str| {
        let lines = head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(held, _)| held.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
    };
    assert_eq!(header("content-type"), Some("application/x-protobuf"), "{head}");
    let mut body = vec![0; header("content-length")?.parse().unwrap()];
    reader.read_exact(&mut body).ok()?;
    let message = ExportTraceServiceRequest::decode(body.as_slice()).unwrap();
    for resource in message.resource_spans {
        let service = attribute(&resource.resource.unwrap().attributes, "service.name").unwrap();
        let sent = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
        collected.lock().extend(sent.map(|span| (service.clone(), span)));
    }
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").ok()
}

fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.as_ref()? {
        AnyValue { value: Some(AttributeValue::StringValue(text)) } => Some(text.clone()),
        AnyValue { value: Some(AttributeValue::IntValue(number)) } => Some(number.to_string()),
        other => Some(format!("{other:?}")),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

#[test]
fn a_request_is_one_trace_from_the_caller_through_gateway_and_worker() {
    let collector = Collector::start();
    let endpoint = format!("tracing.otlp_endpoint={}", collector.base);
    let coordinator = start_coordinator("127.0.0.1:0", &[]);
    let base = format!("http://{}", coordinator.address);
    let flags = ["--id", "worker-1", "--threads", "1", "--coordinator", &base];
    let mut worker = start("worker", "127.0.0.1:0", &flags, &[&endpoint]);
    let mut gateway = start_gateway("127.0.0.1:0", &[&coordinator.address], &[&endpoint]);
    gateway.wait_for_backends(1);

    let traceparent = format!("00-{TRACE_ID}-{CALLER}-01");
    let body = completion("sequence", 40, true);
    let headers = [("traceparent", traceparent.as_str())];
    let mut stream =
        http::send_with(&gateway.address, "POST", "/v1/completions", &headers, Some(&body)).unwrap();
    assert!(Ending::of(&mut stream).is_complete());
    // What waits is sent when a service ends.
    for role in [&mut gateway, &mut worker] {
        role.process.signal("TERM");
        assert_eq!(role.process.ended().code(), Some(0));
    }

    let spans: Vec<_> =
        collector.spans().into_iter().filter(|(_, span)| hex(&span.trace_id) == TRACE_ID).collect();
    let named = |service: &str, name: &str| {
        let mut found = spans.iter().filter(|(sender, span)| sender == service && span.name == name);
        let (_, span) = found.next().unwrap_or_else(|| panic!("no {name} of {service} in {spans:#?}"));
        assert!(found.next().is_none(), "{name} of {service} came twice");
        span
    };
    let at_gateway = named("kvik-gateway", "POST /v1/completions");
    let at_worker = named("kvik-worker", "POST /v1/completions");
    assert_eq!(hex(&at_gateway.parent_span_id), CALLER);
    assert_eq!(at_worker.parent_span_id, at_gateway.span_id);
    let phases = ["queue", "prefill", "decode"].map(|name| named("kvik-worker", name));
    assert_eq!(spans.len(), 2 + phases.len(), "{spans:#?}");
    for phase in phases {
        assert_eq!(phase.parent_span_id, at_worker.span_id);
    }
    for (phase, next) in phases.iter().zip(&phases[1..]) {
        assert_eq!(phase.end_time_unix_nano, next.start_time_unix_nano);
    }
    assert!(at_worker.start_time_unix_nano <= phases[0].start_time_unix_nano);

    for (key, expected) in [
        ("http.route", "/v1/completions"),
        ("http.response.status_code", "200"),
        ("gen_ai.request.model", "kvik-tiny"),
        ("kvik.worker", "worker-1"),
        ("kvik.retries", "0"),
        ("kvik.outcome", "complete"),
    ] {
        assert_eq!(attribute(&at_gateway.attributes, key).as_deref(), Some(expected), "{at_gateway:#?}");
    }
    let n_tokens: u64 = attribute(&at_gateway.attributes, "kvik.estimated_tokens").unwrap().parse().unwrap();
    assert!(40 <= n_tokens, "{n_tokens}");
    assert_eq!(attribute(&phases[2].attributes, "gen_ai.usage.output_tokens").as_deref(), Some("40"));
}

#[test]
fn a_coordinator_traces_changes_of_its_members_and_no_heartbeats() {
    let collector = Collector::start();
    let endpoint = format!("tracing.otlp_endpoint={}", collector.base);
    let flags = ["heartbeat_interval_ms=100", endpoint.as_str()];
    let mut coordinator = start_coordinator("127.0.0.1:0", &flags);
    let base = format!("http://{}", coordinator.address);
    let flags = ["--id", "worker-1", "--threads", "1", "--coordinator", &base];
    let mut worker = start("worker", "127.0.0.1:0", &flags, &[]);
    let mut gateway = start_gateway("127.0.0.1:0", &[&coordinator.address], &[]);
    gateway.wait_for_backends(1);
    for role in [&mut gateway, &mut worker, &mut coordinator] {
        role.process.signal("TERM");
        assert_eq!(role.process.ended().code(), Some(0));
    }
    let spans = collector.spans();
    let names: Vec<&str> = spans.iter().map(|(_, span)| span.name.as_str()).collect();
    assert_eq!(names, ["POST /register", "POST /deregister"]);
    assert!(spans.iter().all(|(service, _)| service == "kvik-coordinator"), "{spans:#?}");
}

#[test]
fn a_collector_that_is_away_stops_no_request_and_is_told_of_once() {
    let endpoint = format!("tracing.otlp_endpoint=http://{}", free_address());
    let worker = start("worker", "127.0.0.1:0", &["--threads", "1"], &[&endpoint]);
    let backend = format!("http://{}", worker.address);
    let mut gateway = start("gateway", "127.0.0.1:0", &["--backend", &backend], &[&endpoint]);
    gateway.wait_for_backends(1);
    gateway.served_by("sequence");
    let warning = gateway.process.logged("the collector does not take traces; they are lost until it does");
    assert_eq!(warning["level"], "WARN");
    gateway.served_by("sequence");
    eventually("everything has ended", || {
        (gateway.metric("kvik_gateway_outstanding_requests", "")? < 0.5).then_some(())
    });
    gateway.process.signal("TERM");
    assert_eq!(gateway.process.ended().code(), Some(0));
}
