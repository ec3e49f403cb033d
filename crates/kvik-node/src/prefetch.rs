//! A prefetch that ends by itself.

use std::sync::Arc;
use std::time::Duration;

use kvik_store::Prefetch;
use parking_lot::Mutex;

/// Holds a prefetch while it loads; what it leases is released when it is done, whether or not a client asks. Dropping it
/// gives up what has not been read.
#[derive(Debug, Default)]
pub struct HeldPrefetch(Mutex<Option<Prefetch>>);

impl HeldPrefetch {
    /// Holds a prefetch until it is done.
    pub fn hold(prefetch: Prefetch) -> Arc<Self> {
        let held = Arc::new(Self::default());
        let ending = Arc::downgrade(&held);
        prefetch.on_done(move || {
            if let Some(held) = ending.upgrade() {
                held.release_if_done();
            }
        });
        *held.0.lock() = Some(prefetch);
        // It may have ended before it was here.
        held.release_if_done();
        held
    }

    /// Lets go of what a prefetch leases that has ended.
    fn release_if_done(&self) {
        let mut prefetch = self.0.lock();
        if let Some(done) = prefetch.take_if(|prefetch| prefetch.is_done()) {
            // Under the lock: a prefetch that does not load any more has put into memory what it loaded.
            drop(done.wait(Duration::ZERO));
        }
    }

    /// Whether more will arrive.
    pub fn is_loading(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Gives up a prefetch that still loads; says whether it did.
    pub fn cancel(&self) -> bool {
        self.0.lock().take().is_some()
    }
}
