//! Spans and their phases.

use std::time::{Instant, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator as _};
use opentelemetry::trace::{
    Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt as _, Tracer as _,
};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, Span as SdkSpan};

/// The time of one request, or of work of its own, in one service; ends when dropped. The default records nothing.
#[derive(Debug, Default)]
pub struct Span(Option<Box<Active>>);

/// The parts of a request that follow each other, each a child of the request's span; the last one
/// ends when this is dropped.
#[derive(Debug, Default)]
pub struct Phases(Option<Box<ActivePhases>>);

#[derive(Debug)]
struct Active {
    tracer: SdkTracer,
    span: SdkSpan,
}

#[derive(Debug)]
struct ActivePhases {
    parent: Parent,
    phase: SdkSpan,
}

/// Whose children are made.
#[derive(Debug, Clone)]
pub(super) struct Parent {
    tracer: SdkTracer,
    context: SpanContext,
}

struct Headers<'a>(&'a HeaderMap);

struct HeadersMut<'a>(&'a mut HeaderMap);

tokio::task_local! {
    /// The request that the task serves.
    static CURRENT: Parent;
}

// === impl Span ===

impl Span {
    pub(super) fn of_request(tracer: &SdkTracer, headers: &HeaderMap, name: String) -> Self {
        // A context of its own: what the thread did before has nothing to do with it.
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers));
        let builder = SpanBuilder::from_name(name).with_kind(SpanKind::Server);
        let span = tracer.build_with_context(builder, &parent);
        Self(Some(Box::new(Active { tracer: tracer.clone(), span })))
    }

    pub(super) fn of_work(tracer: &SdkTracer, name: &'static str) -> Self {
        let builder = SpanBuilder::from_name(name).with_kind(SpanKind::Internal);
        let span = tracer.build_with_context(builder, &Context::new());
        Self(Some(Box::new(Active { tracer: tracer.clone(), span })))
    }

    /// Whether it is recorded; attributes that cost something are set only then.
    pub fn is_recording(&self) -> bool {
        self.0.as_ref().is_some_and(|active| active.span.is_recording())
    }

    /// Sets an attribute.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(active) = &mut self.0 {
            active.span.set_attribute(KeyValue::new(key, value));
        }
    }

    /// Marks it as failed.
    pub fn fail(&mut self, reason: &'static str) {
        if let Some(active) = &mut self.0 {
            active.span.set_status(Status::error(reason));
        }
    }

    /// Makes it the parent that `headers` name, if there is one.
    pub fn propagate(&self, headers: &mut HeaderMap) {
        if let Some(active) = &self.0 {
            let context = Context::new().with_remote_span_context(active.span.span_context().clone());
            TraceContextPropagator::new().inject_context(&context, &mut HeadersMut(headers));
        }
    }

    /// What its children need to know; `None` if it records nothing.
    pub(super) fn parent(&self) -> Option<Parent> {
        let active = self.0.as_ref()?;
        Some(Parent { tracer: active.tracer.clone(), context: active.span.span_context().clone() })
    }
}

// === impl Phases ===

impl Phases {
    /// Begins the first phase of the request that this task serves.
    pub fn begin(name: &'static str) -> Self {
        let Ok(parent) = CURRENT.try_with(Parent::clone) else { return Self::default() };
        let phase = parent.child(name, SystemTime::now());
        Self(Some(Box::new(ActivePhases { parent, phase })))
    }

    /// Ends the phase that runs and begins the next, both at `began`, which may be past.
    pub fn enter_at(&mut self, name: &'static str, began: Instant) {
        if let Some(active) = &mut self.0 {
            let began = SystemTime::now().checked_sub(began.elapsed()).unwrap_or_else(SystemTime::now);
            active.phase.end_with_timestamp(began);
            active.phase = active.parent.child(name, began);
        }
    }

    /// Sets an attribute of the phase that runs.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(active) = &mut self.0 {
            active.phase.set_attribute(KeyValue::new(key, value));
        }
    }
}

// === impl Parent ===

impl Parent {
    /// Runs `serve`, whose phases are children of this.
    pub(super) async fn scope<T>(self, serve: impl Future<Output = T>) -> T {
        CURRENT.scope(self, serve).await
    }

    fn child(&self, name: &'static str, began: SystemTime) -> SdkSpan {
        let context = Context::new().with_remote_span_context(self.context.clone());
        let builder = SpanBuilder::from_name(name).with_kind(SpanKind::Internal).with_start_time(began);
        self.tracer.build_with_context(builder, &context)
    }
}

// === impl Headers ===

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

impl Injector for HeadersMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        let Ok(name) = HeaderName::try_from(key) else { return };
        // An empty `tracestate` is none.
        match HeaderValue::try_from(value) {
            Ok(value) if !value.is_empty() => {
                self.0.insert(name, value);
            }
            _ => {
                self.0.remove(name);
            }
        }
    }
}
