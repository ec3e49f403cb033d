//! Metrics in Prometheus' text format.

use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::error::{Result, RuntimeError};
use crate::shutdown::Shutdown;
use crate::telemetry::{process, series};

/// Bounds of latency histograms in seconds: from a routing decision to a long answer.
const LATENCY_BUCKETS: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0,
];

/// Time between two foldings: at ten thousand requests a second, some megabytes of samples.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(5);

static METRICS: OnceLock<PrometheusHandle> = OnceLock::new();

/// Starts collecting metrics; all roles of a process share one registry.
///
/// # Errors
/// If another registry is in place.
pub fn start_metrics() -> Result<()> {
    if METRICS.get().is_some() {
        return Ok(());
    }
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), LATENCY_BUCKETS)
        .and_then(PrometheusBuilder::install_recorder)
        .map_err(|error| RuntimeError::Telemetry(error.to_string()))?;
    // Lost only if another thread has just started them.
    let _ = METRICS.set(handle);
    Ok(())
}

/// Folds collected samples together every few seconds until everything stops; without it they pile
/// up in memory while they are not scraped.
pub fn maintain_metrics(shutdown: &Shutdown) {
    let stopping = shutdown.clone();
    shutdown.spawn(async move {
        loop {
            tokio::select! {
                () = tokio::time::sleep(MAINTENANCE_INTERVAL) => {}
                () = stopping.stopping() => return,
            }
            if let Some(handle) = METRICS.get() {
                handle.run_upkeep();
            }
        }
    });
}

/// All metrics in Prometheus' text format; empty before [`start_metrics`].
pub fn render_metrics() -> String {
    METRICS.get().map_or_else(String::new, |handle| {
        handle.run_upkeep();
        let mut text = handle.render();
        series::render(&mut text);
        process::render(&mut text);
        text
    })
}
