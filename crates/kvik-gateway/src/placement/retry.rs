//! The budget of retries.
//!
//! A fleet that fails must not get its load multiplied by retries: each request that arrives saves
//! up a part of a retry, and a retry that was not saved up for is not made.

use parking_lot::Mutex;

use crate::config::RetryConfig;

/// What is saved up.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    retries: Mutex<f64>,
}

impl RetryBudget {
    /// A full budget: a gateway that has just started has seen nothing fail.
    pub(crate) fn new(config: &RetryConfig) -> Self {
        Self { retries: Mutex::new(f64::from(config.budget_burst)) }
    }

    /// Saves up for one request that arrived.
    pub(crate) fn deposit(&self, config: &RetryConfig) {
        let mut retries = self.retries.lock();
        *retries = (*retries + config.budget_ratio).min(f64::from(config.budget_burst));
    }

    /// Takes one retry, if there is one.
    pub(crate) fn withdraw(&self) -> bool {
        let mut retries = self.retries.lock();
        let is_there = 1.0 <= *retries;
        if is_there {
            *retries -= 1.0;
        }
        is_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_a_share_of_requests_once_the_burst_is_spent() {
        let config = RetryConfig { budget_burst: 3, budget_ratio: 0.25, ..RetryConfig::default() };
        let budget = RetryBudget::new(&config);
        assert_eq!((0..5).filter(|_| budget.withdraw()).count(), 3);
        let n_retries = (0..40).filter(|_| {
            budget.deposit(&config);
            budget.withdraw()
        });
        assert_eq!(n_retries.count(), 10);
    }
}
