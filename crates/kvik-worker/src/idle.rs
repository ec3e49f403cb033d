//! What clients have left behind.

use std::sync::Arc;
use std::time::Duration;

use kvik_runtime::shutdown::Shutdown;
use tokio_util::sync::CancellationToken;

use crate::state::{Loaded, WorkerState};

/// Ends abandoned sequences and abandoned KV until the worker closes.
pub(crate) async fn end_idle(
    state: Arc<WorkerState>,
    loaded: Arc<Loaded>,
    closing: CancellationToken,
    shutdown: Shutdown,
) {
    let idle = state.config.idle_timeout();
    // Nothing is kept much longer than configured, and looking costs nothing.
    let mut interval = tokio::time::interval((idle / 4).min(Duration::from_secs(10)));
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            () = closing.cancelled() => return,
            () = shutdown.stopping() => return,
        }
        loaded.sequences.end_idle(idle);
        loaded.staging.end_idle(idle);
        loaded.arrivals.end_idle();
    }
}
