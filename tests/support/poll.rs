//! Waiting for a state of another process or task that sends no notice of it: the one place where a test lets
//! wall-clock time pass.

#![allow(dead_code, reason = "each test uses one of the two")]

use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(5);

/// Asks until there is an answer; `None` if there is none within the time.
pub(crate) async fn poll_for<T>(within: Duration, mut ask: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(answer) = ask().await {
            return Some(answer);
        }
        if deadline < Instant::now() {
            return None;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Asks until there is an answer.
pub(crate) async fn poll<T>(within: Duration, what: &str, ask: impl AsyncFnMut() -> Option<T>) -> T {
    match poll_for(within, ask).await {
        Some(answer) => answer,
        None => panic!("{what}: not within {within:?}"),
    }
}
