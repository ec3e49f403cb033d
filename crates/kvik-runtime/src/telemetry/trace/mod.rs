//! Traces: where the time of a request went, across services.
//!
//! Spans leave as OTLP, over HTTP with protobuf bodies or over gRPC, so any collector takes them. A request's
//! parent comes in its `traceparent` header (W3C Trace Context) and goes on to the next service in
//! the same header.
//!
//! Guarantees: without an endpoint nothing is allocated and nothing is sent, and a request's own
//! `traceparent` passes unchanged. With one, spans wait in a bounded queue; when the collector is
//! slow or away the newest are dropped, and no request waits for it. What waits at the end of the
//! service is sent, for at most [`FLUSH_TIMEOUT`].

mod config;
mod export;
mod layer;
mod span;
#[cfg(test)]
mod tests;

pub use config::{OtlpProtocol, TracingConfig};
pub use span::{Phases, Span};

use std::time::Duration;

use axum::Router;
use http::HeaderMap;
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider,
};

use crate::error::{Result, RuntimeError};
use crate::shutdown::Shutdown;

/// Spans that may wait to be sent; at a kilobyte each, a few megabytes.
const MAX_WAITING_SPANS: usize = 4096;
/// Spans in one message.
const MAX_BATCH_SPANS: usize = 512;
/// Time between two messages, unless one is full before.
const SEND_INTERVAL: Duration = Duration::from_secs(1);
/// Time in which requests that are cut off at the end of a service end their spans.
const LAST_SPANS: Duration = Duration::from_millis(100);
/// Time to send what waits when the service ends: long enough for a collector that lives, short enough
/// not to hold up the end.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);
/// Makes the spans of one service; clones are the same one. The default makes none.
#[derive(Debug, Clone, Default)]
pub struct Tracer {
    tracer: Option<SdkTracer>,
}

impl Tracer {
    /// Starts the tracer of `service`, such as `kvik-gateway`, whose process is `instance`. What
    /// waits is sent when `shutdown` stops. Must be called within a runtime.
    ///
    /// # Errors
    /// If a value of `config` is not allowed or a file of it cannot be used. A collector that cannot be reached is no error.
    pub fn start(
        config: &TracingConfig,
        service: &'static str,
        instance: &str,
        shutdown: &Shutdown,
    ) -> Result<Self> {
        let Some(collector) = config.collector()? else { return Ok(Self::default()) };
        let url = collector.url.clone();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(export::OtlpClient::new(collector)?)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&url)
            .build()
            .map_err(|error| RuntimeError::Telemetry(error.to_string()))?;
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(MAX_WAITING_SPANS)
            .with_max_export_batch_size(MAX_BATCH_SPANS)
            .with_scheduled_delay(SEND_INTERVAL)
            .build();
        let processor = BatchSpanProcessor::builder(exporter).with_batch_config(batches).build();
        let resource = Resource::builder()
            .with_service_name(service)
            .with_attribute(KeyValue::new("service.instance.id", instance.to_owned()))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.sampling_ratio)));
        let provider = SdkTracerProvider::builder()
            .with_span_processor(processor)
            .with_sampler(sampler)
            .with_resource(resource)
            .build();
        let tracer = provider.tracer(service);
        tracing::info!(%url, protocol = %config.otlp_protocol, sampling_ratio = config.sampling_ratio, "sending traces");
        let ending = shutdown.clone();
        shutdown.spawn(async move {
            ending.stopping().await;
            tokio::time::sleep(LAST_SPANS).await;
            // Blocks; and its thread needs this runtime to send.
            let flush = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(FLUSH_TIMEOUT));
            if let Ok(Err(error)) = flush.await {
                tracing::debug!(%error, "the last spans were not sent");
            }
        });
        Ok(Self { tracer: Some(tracer) })
    }

    /// Begins the span of a request with these `headers`; its parent is the one that they name.
    /// `name` is called only if spans are made.
    pub fn request(&self, headers: &HeaderMap, name: impl FnOnce() -> String) -> Span {
        match &self.tracer {
            None => Span::default(),
            Some(tracer) => Span::of_request(tracer, headers, name()),
        }
    }

    /// Begins the span of work that no request asked for; `name` is its name.
    pub fn work(&self, name: &'static str) -> Span {
        match &self.tracer {
            None => Span::default(),
            Some(tracer) => Span::of_work(tracer, name),
        }
    }

    /// Gives every POST request to one of the routes of `router` a span that ends with its answer's
    /// body; [`Phases`] divide it. Without an endpoint the router stays as it is.
    pub fn trace_requests<S: Clone + Send + Sync + 'static>(&self, router: Router<S>) -> Router<S> {
        if self.tracer.is_none() {
            return router;
        }
        router.layer(axum::middleware::from_fn_with_state(self.clone(), layer::trace_request))
    }
}
