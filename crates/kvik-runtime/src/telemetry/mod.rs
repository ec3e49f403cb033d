//! Logs, metrics and traces.
//!
//! Logs and metrics belong to the process: all its roles write to one standard error and one
//! registry. Traces belong to a service: each one has a [`Tracer`], which does nothing at all
//! unless an endpoint is configured.

mod logs;
mod metrics;
mod process;
mod series;
mod trace;

pub use logs::{LogFormat, TelemetryConfig, start_logging};
pub use metrics::{maintain_metrics, render_metrics, start_metrics};
pub use series::MetricSet;
pub use trace::{OtlpProtocol, Phases, Span, Tracer, TracingConfig};
