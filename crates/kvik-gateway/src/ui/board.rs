//! Where pages find what was last read of the fleet.

use std::sync::Arc;

use tokio::sync::{Notify, watch};

use super::series::Points;

/// Pages that are served at a time: each costs a copy of the fleet every second.
pub(super) const MAX_PAGES: usize = 64;

/// What pages are shown.
#[derive(Debug, Clone, Default)]
pub(super) struct Shown {
    /// The fleet, as JSON; none before the first look.
    pub(super) fleet: Option<Arc<str>>,
    /// The last hour.
    pub(super) points: Points,
}

/// What was last read, and the pages that wait for the next.
#[derive(Debug, Default)]
pub(crate) struct Board {
    shown: watch::Sender<Shown>,
    opened: Notify,
}

impl Board {
    /// Opens a page; none if there are too many. The first thing that it gets is not older than its opening.
    pub(super) fn open(&self) -> Option<watch::Receiver<Shown>> {
        if MAX_PAGES <= self.n_pages() {
            return None;
        }
        let page = self.shown.subscribe();
        self.opened.notify_one();
        Some(page)
    }

    /// Pages that are open.
    pub(super) fn n_pages(&self) -> usize {
        self.shown.receiver_count()
    }

    /// Waits until a page is opened.
    pub(super) async fn opened(&self) {
        self.opened.notified().await;
    }

    /// Shows pages something new.
    pub(super) fn show(&self, fleet: String, points: Points) {
        self.shown.send_replace(Shown { fleet: Some(fleet.into()), points });
    }
}
