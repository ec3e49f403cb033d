//! The bytes of request bodies that wait for a choice.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes of all bodies together.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    n_used_bytes: AtomicUsize,
    max_bytes: usize,
}

/// The part of one exchange; given back when dropped.
#[derive(Debug)]
pub(crate) struct BodyShare {
    budget: Arc<BodyBudget>,
    n_bytes: usize,
}

impl BodyBudget {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { n_used_bytes: AtomicUsize::new(0), max_bytes }
    }

    /// A part without bytes.
    pub(crate) fn share(self: &Arc<Self>) -> BodyShare {
        BodyShare { budget: Arc::clone(self), n_bytes: 0 }
    }
}

impl BodyShare {
    /// Takes more bytes; false if there are not so many.
    pub(crate) fn take(&mut self, n_bytes: usize) -> bool {
        let budget = &self.budget;
        let add = |n_used: usize| n_used.checked_add(n_bytes).filter(|n_used| *n_used <= budget.max_bytes);
        // Relaxed: a number that bounds memory, and nothing else is read by it.
        let is_taken = budget.n_used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok();
        if is_taken {
            self.n_bytes += n_bytes;
        }
        is_taken
    }

    /// Gives all of it back.
    pub(crate) fn clear(&mut self) {
        self.budget.n_used_bytes.fetch_sub(self.n_bytes, Ordering::Relaxed);
        self.n_bytes = 0;
    }
}

impl Drop for BodyShare {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_taken_up_to_the_budget_and_come_back() {
        let budget = Arc::new(BodyBudget::new(100));
        let (mut one, mut other) = (budget.share(), budget.share());
        assert!(one.take(60) && !other.take(41) && other.take(40) && !one.take(1));
        one.clear();
        assert!(other.take(60) && !one.take(1));
        drop(other);
        assert!(one.take(100) && !one.take(usize::MAX));
        drop(one);
        assert_eq!(budget.n_used_bytes.load(Ordering::Relaxed), 0);
    }
}
