//! The task that gets, keeps and gives up the lead.

use std::sync::Arc;

use kvik_runtime::shutdown::Shutdown;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::metrics;
use crate::state::{Role, StateBackend};

/// Keeps `role` true until the service drains; then gives the lead up.
pub(crate) async fn run(backend: Arc<impl StateBackend>, role: watch::Sender<Role>, shutdown: Shutdown) {
    loop {
        let turn = async {
            let began = Instant::now();
            elect(&*backend, &role).await;
            let interval = backend.elect_interval(&role.borrow());
            tokio::time::sleep_until(began + interval).await;
        };
        tokio::select! {
            () = turn => {}
            () = shutdown.draining() => break,
        }
    }
    take(&role, Role::Follower { leader: None });
    backend.resign().await;
}

/// One turn: asks the backend, and lets go of a lead whose time is over.
async fn elect(backend: &impl StateBackend, role: &watch::Sender<Role>) {
    match backend.elect().await {
        Ok(elected) => take(role, elected),
        Err(error) => {
            let held = role.borrow().clone();
            tracing::warn!(%error, "failed to reach the state backend");
            if matches!(held, Role::Leader { .. }) && !held.leads(Instant::now()) {
                take(role, Role::Follower { leader: None });
                backend.resign().await;
            }
        }
    }
}

/// Sets the role. Waiters are woken by another role or term, not by a lead that was renewed.
fn take(role: &watch::Sender<Role>, new: Role) {
    let is_leader = matches!(new, Role::Leader { .. });
    let is_news = role.send_if_modified(|held| {
        let is_news = match (&*held, &new) {
            (Role::Leader { term: held, .. }, Role::Leader { term, .. }) => held != term,
            (held, new) => held != new,
        };
        if is_news {
            match &new {
                Role::Leader { term, .. } => tracing::info!(term, "became leader"),
                Role::Follower { leader } => tracing::info!(?leader, "follows"),
            }
        }
        *held = new;
        is_news
    });
    if is_news {
        metrics::leader(is_leader);
    }
}
