//! How many outputs may be in the making or wait for their turn.
//!
//! Every output of a request takes a place before the engine gets it and gives it back when its
//! answer ends, however it ends. When all places are taken a request is refused at once: a client
//! that is told to come back costs nothing, one that waits in memory does.

use tokio::sync::watch;

/// The places of a worker.
#[derive(Debug)]
pub(crate) struct Admission {
    n_places: usize,
    n_taken: watch::Sender<usize>,
}

/// Places that were taken; given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    n: usize,
    n_taken: watch::Sender<usize>,
}

impl Admission {
    pub(crate) fn new(n_places: usize) -> Self {
        Self { n_places, n_taken: watch::Sender::new(0) }
    }

    /// All places.
    pub(crate) fn n_places(&self) -> usize {
        self.n_places
    }

    /// Takes `n` places, or `None` if fewer are left.
    pub(crate) fn try_take(&self, n: usize) -> Option<Permit> {
        let fits = self.n_taken.send_if_modified(|taken| {
            let fits = *taken + n <= self.n_places;
            if fits {
                *taken += n;
            }
            fits
        });
        fits.then(|| Permit { n, n_taken: self.n_taken.clone() })
    }

    /// Waits until no place is taken. Cancel safe.
    pub(crate) async fn idle(&self) {
        let mut taken = self.n_taken.subscribe();
        // The sender lives as long as `self`.
        let _ = taken.wait_for(|&taken| taken == 0).await;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.n_taken.send_modify(|taken| *taken -= self.n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn places_are_given_back_and_never_more_than_there_are() {
        let admission = Admission::new(3);
        let two = admission.try_take(2).unwrap();
        assert!(admission.try_take(2).is_none());
        let one = admission.try_take(1).unwrap();
        assert!(admission.try_take(1).is_none());
        drop(two);
        assert!(admission.try_take(2).is_some());
        drop(one);
        admission.idle().await;
    }
}
