//! The end of a worker without the loss of a request.
//!
//! Draining begins with a signal, `POST /drain` or the coordinator's wish. From then on new requests
//! get 503 and the worker is not ready. First it leaves its coordinator, so that gateways send
//! nothing more; then it waits until the engine is done with every request, which gateways move to other workers, but no
//! longer than the grace; what still runs then is left to the gateway to go on from its tokens, and fails with an error event
//! where there is none. Last the server closes: answers that are on
//! their way get some more seconds to be read. Sequences that their clients step are handed over to other workers; those that none
//! takes count as running until they end, are finished or are abandoned.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvik_proto::client::CoordinatorClient;
use kvik_proto::moves::DrainReport;
use kvik_runtime::shutdown::Shutdown;
use tokio_util::sync::CancellationToken;

use crate::engine_thread::EngineHandle;
use crate::hand_over::hand_over;
use crate::state::WorkerState;

/// Time for clients to read what was sent: longer than a stall of a network, shorter than anyone
/// waits for a worker that is done.
const READ_GRACE: Duration = Duration::from_secs(10);

/// Time for answers to end after the engine is done with them, before they are reported.
const COUNT_GRACE: Duration = Duration::from_secs(2);

/// What has to end, in this order.
#[derive(Debug)]
pub(crate) struct Drain {
    pub(crate) engine: EngineHandle,
    /// Know which workers there are.
    pub(crate) coordinators: Vec<CoordinatorClient>,
    /// Cancelled when the coordinators have been left.
    pub(crate) unregistered: CancellationToken,
    /// Makes the server take no more connections and finish those that are there.
    pub(crate) closing: CancellationToken,
    /// Ends the connections.
    pub(crate) connections: Shutdown,
    /// Cancelled when the server has ended.
    pub(crate) served: CancellationToken,
}

impl Drain {
    /// Waits for the drain and performs it.
    pub(crate) async fn run(self, state: Arc<WorkerState>, shutdown: Shutdown) {
        tokio::select! {
            () = state.draining.cancelled() => {}
            () = shutdown.draining() => state.draining.cancel(),
        }
        tracing::info!(worker = %state.id, "worker drains");
        let finish = async {
            self.unregistered.cancelled().await;
            if let Some(loaded) = state.loaded_at_end() {
                hand_over(&state, loaded, &self.coordinators).await;
            }
            state.admission.idle().await;
        };
        // Relaxed: a number that was set before the drain began.
        let grace = Duration::from_secs(state.drain_grace.load(Ordering::Relaxed));
        tokio::select! {
            () = finish => {}
            () = tokio::time::sleep(grace) => {
                tracing::warn!(worker = %state.id, "the grace period is over; what still runs is ended");
                self.engine.stop();
            }
            () = shutdown.stopping() => {}
        }
        if let Some(loaded) = state.loaded_at_end() {
            // Answers are counted when their last byte is on its way.
            let _ = tokio::time::timeout(COUNT_GRACE, loaded.running.idle()).await;
            let DrainReport { migrated, replayed, finished, failed, .. } = loaded.running.drain_report();
            tracing::info!(worker = %state.id, migrated, replayed, finished, failed, "worker has drained");
        }
        state.drained.cancel();
        self.closing.cancel();
        tokio::select! {
            () = self.served.cancelled() => {}
            () = tokio::time::sleep(READ_GRACE) => {
                tracing::warn!(worker = %state.id, "closed connections whose answers were not read");
                self.connections.stop();
            }
            () = shutdown.stopping() => {}
        }
    }
}
