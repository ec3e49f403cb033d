//! The end of a service: drain, then stop.
//!
//! Draining means: nothing new is taken, what runs is finished. Stopping means: end now. The first
//! signal drains and a second one stops. Tasks are spawned on the [`Shutdown`], which waits for them.

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tokio_util::task::TaskTracker;

/// The state of a service's end; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    draining: CancellationToken,
    stopping: CancellationToken,
    tasks: TaskTracker,
}

impl Shutdown {
    /// A service that runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts draining; does nothing if it has begun.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Ends everything now.
    pub fn stop(&self) {
        // In this order: what drains because everything ends sees that it ends.
        self.stopping.cancel();
        self.draining.cancel();
    }

    /// Whether nothing new is taken.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled() || self.is_stopping()
    }

    /// Whether everything ends now.
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// Waits until draining begins. Cancel safe.
    pub fn draining(&self) -> WaitForCancellationFuture<'_> {
        self.draining.cancelled()
    }

    /// Waits until everything ends. Cancel safe.
    pub fn stopping(&self) -> WaitForCancellationFuture<'_> {
        self.stopping.cancelled()
    }

    /// Runs `task` until it ends by itself; [`Shutdown::finish`] waits for it. The task MUST end
    /// when [`Shutdown::stopping`] does.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Drains on the first SIGTERM or SIGINT, stops on the second or `grace` after the first.
    pub fn listen_for_signals(&self, grace: Duration) {
        let shutdown = self.clone();
        self.spawn(async move {
            tokio::select! {
                // A service that stops is draining too, and does not say so.
                biased;
                () = shutdown.stopping() => return,
                () = shutdown.draining() => {}
                () = next_signal() => {}
            }
            tracing::info!(grace_s = grace.as_secs(), "draining; a second signal ends at once");
            shutdown.drain();
            tokio::select! {
                () = next_signal() => tracing::info!("ending at once"),
                () = tokio::time::sleep(grace) => tracing::warn!("the grace period is over"),
                () = shutdown.stopping() => {}
            }
            shutdown.stop();
        });
    }

    /// Ends the service and waits for all its tasks.
    pub async fn finish(&self) {
        self.stop();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Waits for SIGTERM or SIGINT.
async fn next_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::warn!("signals cannot be received; the service ends only by force");
        std::future::pending::<()>().await;
        return;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Wake, Waker};

    use super::Shutdown;

    /// Notes whether everything ends when it is woken.
    struct Drain {
        shutdown: Shutdown,
        saw_the_end: AtomicBool,
    }

    impl Wake for Drain {
        fn wake(self: Arc<Self>) {
            self.saw_the_end.store(self.shutdown.is_stopping(), Ordering::SeqCst);
        }
    }

    #[test]
    fn what_drains_because_all_ends_sees_that_it_ends() {
        let shutdown = Shutdown::new();
        let drain = Arc::new(Drain { shutdown: shutdown.clone(), saw_the_end: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&drain));
        let mut draining = pin!(shutdown.draining());
        assert!(draining.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        shutdown.stop();
        assert!(drain.saw_the_end.load(Ordering::SeqCst));
    }
}
