//! Tickets at other workers that nothing comes for.

use futures_util::stream::{self, StreamExt as _};
use kvik_runtime::shutdown::Shutdown;
use tokio_util::sync::CancellationToken;

use super::PeerClient;
use crate::running::UnusedTickets;

/// Notifications in flight at a time: a worker that does not answer delays few others.
const MAX_CALLS: usize = 16;

/// Tells other workers to forget tickets until the worker closes.
pub(crate) async fn forget_tickets(
    peers: PeerClient,
    unused: UnusedTickets,
    closing: CancellationToken,
    shutdown: Shutdown,
) {
    let unused = stream::unfold(unused, |mut unused| async { Some((unused.recv().await?, unused)) });
    let telling = unused.for_each_concurrent(MAX_CALLS, |notice| {
        let peers = &peers;
        async move {
            if let Err(error) = peers.forget(&notice.to, &notice.ticket).await {
                tracing::debug!(%error, "a worker was not told that a request does not come");
            }
        }
    });
    tokio::select! {
        () = telling => {}
        () = closing.cancelled() => {}
        () = shutdown.stopping() => {}
    }
}
