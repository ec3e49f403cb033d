//! The task that follows a coordinator.
//!
//! Coordinators are tried in turn, with a pause that doubles up to a limit. While none answers the
//! gateway goes on with what it knows.

use std::sync::Arc;
use std::time::Duration;

use kvik_proto::client::{ClientError, CoordinatorClient};
use kvik_proto::coordinator::WatchEvent;
use tokio::time::Instant;

use crate::config::millis;
use crate::state::Shared;

const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// A coordinator that says nothing for this long, not even that it lives, is not there.
const MAX_SILENCE: Duration = Duration::from_secs(15);

/// Follows the configured coordinators until everything stops.
pub(crate) async fn run(shared: Arc<Shared>) {
    let shutdown = shared.shutdown.clone();
    tokio::select! {
        () = follow_in_turn(&shared) => {}
        () = shutdown.stopping() => {}
    }
}

async fn follow_in_turn(shared: &Shared) {
    let mut pause = MIN_PAUSE;
    let mut is_reported = false;
    let mut turn = 0_usize;
    loop {
        let coordinators = shared.view().config.coordinators.clone();
        if let Some(url) = coordinators.get(turn % coordinators.len().max(1)) {
            let outcome = follow(shared, url, &mut || {
                pause = MIN_PAUSE;
                is_reported = false;
            })
            .await;
            shared.metrics.coordinator_connected.set(0.0);
            // One line for each time that the coordinator goes away, not for each attempt.
            if !is_reported {
                let reason =
                    outcome.err().map_or_else(|| "the stream ended".to_owned(), |error| error.to_string());
                tracing::warn!(%url, %reason, "lost the coordinator; routing goes on with the last snapshot");
                is_reported = true;
            }
        }
        turn = turn.wrapping_add(1);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Follows one coordinator until it goes away or is no longer configured; `connected` is called
/// when it has answered.
async fn follow(shared: &Shared, url: &str, connected: &mut impl FnMut()) -> Result<(), ClientError> {
    let client = CoordinatorClient::new(shared.http.clone(), url).with_header(shared.cluster_header.clone());
    let mut watch = client.watch().await?;
    loop {
        let event = tokio::time::timeout(MAX_SILENCE, watch.next()).await;
        let silent =
            |_| ClientError::Unreachable { url: url.to_owned(), reason: "it fell silent".to_owned() };
        let Some(event) = event.map_err(silent)?? else { return Ok(()) };
        connected();
        shared.metrics.coordinator_connected.set(1.0);
        let config = Arc::clone(&shared.view().config);
        if !config.coordinators.iter().any(|known| known == url) {
            return Ok(());
        }
        if let WatchEvent::Snapshot(snapshot) = event {
            let retain = millis(config.health.retain_members_ms);
            tracing::debug!(term = snapshot.term, version = snapshot.version, "snapshot received");
            shared.change_members(|book| book.apply(snapshot, retain, Instant::now()));
        }
    }
}
