//! How many requests run, and which wait.
//!
//! A request runs while it holds a [`Permit`]. When all are taken it waits in order of arrival, as
//! long as few enough others wait and their bodies are small enough together; otherwise it is
//! refused at once with the time after which its turn would have come at the rate of the last
//! seconds. A permit is a guard: it comes back when the answer's body ends, in whatever way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::config::{AdmissionConfig, millis};

/// Seconds over which the service rate is observed.
const RATE_WINDOW_S: u64 = 10;
/// Longest time that a client is told to wait, in seconds: what is farther cannot be foreseen.
const MAX_RETRY_AFTER_S: u64 = 60;

/// Lets requests run or wait.
#[derive(Debug)]
pub(crate) struct Admission {
    permits: Arc<Semaphore>,
    /// Permits that are to be taken out of circulation when they come back.
    surplus: AtomicUsize,
    waiting: Mutex<Waiting>,
    rate: Mutex<ServiceRate>,
}

/// The right to run.
#[derive(Debug)]
pub(crate) struct Permit {
    admission: Arc<Admission>,
    /// Taken when dropped.
    permit: Option<OwnedSemaphorePermit>,
}

/// Why a request may not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotAdmitted {
    /// Too many wait.
    Full {
        /// In seconds.
        retry_after: u64,
    },
    /// It waited too long.
    TooLate {
        /// In seconds.
        retry_after: u64,
    },
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Waiting {
    n_requests: usize,
    n_bytes: usize,
}

/// A place in the queue; given back when dropped, so also when a waiting client leaves.
struct Place<'a> {
    admission: &'a Admission,
    n_bytes: usize,
}

/// Requests that ended, by second.
#[derive(Debug)]
struct ServiceRate {
    start: Instant,
    /// By the second since `start`, modulo the window; the second and its count.
    ended: [(u64, u64); RATE_WINDOW_S as usize],
}

// === impl Admission ===

impl Admission {
    /// Without running and waiting requests.
    pub(crate) fn new(config: &AdmissionConfig, now: Instant) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(config.max_running)),
            surplus: AtomicUsize::new(0),
            waiting: Mutex::default(),
            rate: Mutex::new(ServiceRate::new(now)),
        }
    }

    /// Lets a request run that need not wait.
    pub(crate) fn try_admit(self: &Arc<Self>) -> Option<Permit> {
        // Permits that come back go to waiting requests: none of them is overtaken here.
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(Permit { admission: Arc::clone(self), permit: Some(permit) })
    }

    /// Waits until a request with a body of `n_bytes` may run.
    ///
    /// Cancel safe: a caller that goes away leaves the queue.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        n_bytes: usize,
        config: &AdmissionConfig,
    ) -> Result<Permit, NotAdmitted> {
        if let Some(permit) = self.try_admit() {
            return Ok(permit);
        }
        let Some(place) = self.enter_queue(n_bytes, config) else {
            let ahead = self.n_waiting() + 1;
            return Err(NotAdmitted::Full { retry_after: self.retry_after(ahead) });
        };
        let turn = Arc::clone(&self.permits).acquire_owned();
        let outcome = tokio::time::timeout(millis(config.max_wait_ms), turn).await;
        drop(place);
        match outcome {
            Ok(Ok(permit)) => Ok(Permit { admission: Arc::clone(self), permit: Some(permit) }),
            // The semaphore is never closed; either way there is no permit.
            Ok(Err(_)) | Err(_) => {
                Err(NotAdmitted::TooLate { retry_after: self.retry_after(self.n_waiting() + 1) })
            }
        }
    }

    /// Requests that wait.
    pub(crate) fn n_waiting(&self) -> usize {
        self.waiting.lock().n_requests
    }

    /// Changes how many requests may run from `before` to `after`; those that run go on.
    pub(crate) fn resize(&self, before: usize, after: usize) {
        if before <= after {
            let mut n_more = after - before;
            // First undo what an earlier, smaller size has not yet taken away.
            // Relaxed: the semaphore orders the permits themselves.
            let _ = self.surplus.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |surplus| {
                n_more = (after - before).saturating_sub(surplus);
                Some(surplus.saturating_sub(after - before))
            });
            self.permits.add_permits(n_more);
        } else {
            let n_less = before - after;
            let n_taken = self.permits.forget_permits(n_less);
            self.surplus.fetch_add(n_less - n_taken, Ordering::Relaxed);
        }
    }

    fn enter_queue(&self, n_bytes: usize, config: &AdmissionConfig) -> Option<Place<'_>> {
        let mut waiting = self.waiting.lock();
        let has_room =
            waiting.n_requests < config.max_waiting && waiting.n_bytes + n_bytes <= config.max_waiting_bytes;
        if !has_room {
            return None;
        }
        waiting.n_requests += 1;
        waiting.n_bytes += n_bytes;
        metrics::gauge!(crate::metrics::QUEUE_LENGTH).set(waiting.n_requests as f64);
        Some(Place { admission: self, n_bytes })
    }

    fn retry_after(&self, n_ahead: usize) -> u64 {
        self.rate.lock().time_for(n_ahead as u64, Instant::now()).as_secs().clamp(1, MAX_RETRY_AFTER_S)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiting = self.admission.waiting.lock();
        waiting.n_requests -= 1;
        waiting.n_bytes -= self.n_bytes;
        metrics::gauge!(crate::metrics::QUEUE_LENGTH).set(waiting.n_requests as f64);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        self.admission.rate.lock().end(Instant::now());
        let surplus = &self.admission.surplus;
        // Relaxed: a count on its own.
        let is_surplus = surplus
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |surplus| surplus.checked_sub(1))
            .is_ok();
        if is_surplus {
            permit.forget();
        }
    }
}

// === impl ServiceRate ===

impl ServiceRate {
    fn new(start: Instant) -> Self {
        Self { start, ended: [(0, 0); RATE_WINDOW_S as usize] }
    }

    fn end(&mut self, now: Instant) {
        let second = self.second(now);
        let slot = &mut self.ended[(second % RATE_WINDOW_S) as usize];
        if slot.0 != second {
            *slot = (second, 0);
        }
        slot.1 += 1;
    }

    /// Time in which `n_requests` end at the rate of the last seconds, rounded up to a second; the
    /// whole window if none ended.
    fn time_for(&self, n_requests: u64, now: Instant) -> Duration {
        let second = self.second(now);
        let is_recent = |&&(at, _): &&(u64, u64)| at <= second && second - at < RATE_WINDOW_S;
        let n_ended: u64 = self.ended.iter().filter(is_recent).map(|&(_, count)| count).sum();
        if n_ended == 0 {
            return Duration::from_secs(RATE_WINDOW_S);
        }
        let observed_s = (second + 1).min(RATE_WINDOW_S);
        Duration::from_secs(n_requests.saturating_mul(observed_s).div_ceil(n_ended))
    }

    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_secs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(max_running: usize, max_waiting: usize) -> AdmissionConfig {
        AdmissionConfig { max_running, max_waiting, max_waiting_bytes: 100, max_wait_ms: 100 }
    }

    fn admission(config: &AdmissionConfig) -> Arc<Admission> {
        Arc::new(Admission::new(config, Instant::now()))
    }

    #[tokio::test]
    async fn the_first_request_runs_first() {
        let config = config(1, 10);
        let admission = admission(&config);
        let running = admission.admit(1, &config).await.unwrap();
        let mut first = Box::pin(admission.admit(1, &config));
        let mut second = Box::pin(admission.admit(1, &config));
        assert!(poll_once(&mut first).await.is_none() && poll_once(&mut second).await.is_none());
        assert_eq!(admission.n_waiting(), 2);
        drop(running);
        assert!(poll_once(&mut second).await.is_none());
        let permit = poll_once(&mut first).await.unwrap().unwrap();
        drop(permit);
        assert!(poll_once(&mut second).await.unwrap().is_ok());
        assert_eq!(admission.n_waiting(), 0);
    }

    #[tokio::test]
    async fn the_queue_is_bounded_in_requests_bytes_and_time() {
        let config = config(1, 2);
        let admission = admission(&config);
        let _running = admission.admit(1, &config).await.unwrap();
        let mut waiting = Box::pin(admission.admit(90, &config));
        assert!(poll_once(&mut waiting).await.is_none());
        assert!(matches!(admission.admit(11, &config).await, Err(NotAdmitted::Full { .. })));
        let mut another = Box::pin(admission.admit(10, &config));
        assert!(poll_once(&mut another).await.is_none());
        assert!(matches!(admission.admit(0, &config).await, Err(NotAdmitted::Full { .. })));
        assert!(matches!(waiting.await, Err(NotAdmitted::TooLate { .. })));
        assert!(matches!(another.await, Err(NotAdmitted::TooLate { .. })));
        assert_eq!(*admission.waiting.lock(), Waiting::default());
    }

    #[tokio::test]
    async fn a_smaller_size_takes_permits_as_they_come_back() {
        let config = config(3, 0);
        let admission = admission(&config);
        let mut permits = Vec::new();
        for _ in 0..3 {
            permits.push(admission.admit(1, &config).await.unwrap());
        }
        admission.resize(3, 1);
        permits.truncate(1);
        assert!(admission.admit(1, &config).await.is_err());
        permits.clear();
        let one = admission.admit(1, &config).await.unwrap();
        assert!(admission.admit(1, &config).await.is_err());
        admission.resize(1, 2);
        assert!(admission.admit(1, &config).await.is_ok());
        drop(one);
    }

    #[test]
    fn the_time_to_wait_follows_the_observed_rate() {
        let start = Instant::now();
        let mut rate = ServiceRate::new(start);
        assert_eq!(rate.time_for(5, start).as_secs(), RATE_WINDOW_S);
        for second in 0..20 {
            for _ in 0..2 {
                rate.end(start + Duration::from_secs(second));
            }
        }
        let now = start + Duration::from_secs(19);
        assert_eq!(rate.time_for(2, now).as_secs(), 1);
        assert_eq!(rate.time_for(9, now).as_secs(), 5);
        assert_eq!(rate.time_for(9, now + Duration::from_mins(1)).as_secs(), RATE_WINDOW_S);
    }

    /// Polls once.
    async fn poll_once<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
        std::future::poll_fn(|context| match std::pin::Pin::new(&mut *future).poll(context) {
            std::task::Poll::Ready(value) => std::task::Poll::Ready(Some(value)),
            std::task::Poll::Pending => std::task::Poll::Ready(None),
        })
        .await
    }
}
