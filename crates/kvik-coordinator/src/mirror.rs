//! The task that holds the leader's snapshot while this coordinator follows.
//!
//! A follower watches the leader as a gateway does, so its answers carry the leader's term, version
//! and loads, and it goes on showing the last ones while there is no leader.

use std::sync::Arc;
use std::time::Duration;

use kvik_proto::client::{ClientError, CoordinatorClient, HttpClient};
use kvik_proto::coordinator::WatchEvent;
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::trust::Trust;
use tokio::sync::watch;

use crate::api::ALIVE_INTERVAL;
use crate::publish::Publisher;
use crate::state::Role;

/// Pause after a leader's stream broke.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Mirrors the current leader until the service drains.
pub(crate) async fn run(
    http: HttpClient,
    trust: Arc<Trust>,
    mut role: watch::Receiver<Role>,
    publisher: Publisher,
    shutdown: Shutdown,
) {
    loop {
        let leader = match &*role.borrow_and_update() {
            Role::Follower { leader } => leader.clone(),
            Role::Leader { .. } => None,
        };
        let mirroring = async {
            match leader {
                None => std::future::pending().await,
                Some(leader) => {
                    if let Err(error) = mirror(&http, &trust, &leader, &publisher).await {
                        tracing::debug!(%leader, %error, "the leader's stream broke");
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        };
        tokio::select! {
            () = mirroring => {}
            changed = role.changed() => if changed.is_err() { return },
            () = shutdown.draining() => return,
        }
    }
}

async fn mirror(
    http: &HttpClient,
    trust: &Trust,
    leader: &str,
    publisher: &Publisher,
) -> Result<(), ClientError> {
    let client = CoordinatorClient::new(http.clone(), leader).with_header(trust.cluster_header());
    let mut watch = client.watch().await?;
    // A leader that stands still keeps its connections open.
    while let Ok(event) = tokio::time::timeout(3 * ALIVE_INTERVAL, watch.next()).await {
        match event? {
            Some(WatchEvent::Snapshot(snapshot)) => publisher.offer(snapshot),
            Some(WatchEvent::Alive) => {}
            None => break,
        }
    }
    Ok(())
}
