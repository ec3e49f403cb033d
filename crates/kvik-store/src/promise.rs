//! One value that one thread owes another.

use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// The side that owes the value. Dropping it without a value ends the wait with none.
#[derive(Debug)]
pub(crate) struct Promise<T> {
    shared: Weak<Shared<T>>,
}

/// The side that waits for the value.
#[derive(Debug)]
pub(crate) struct Answer<T> {
    shared: Arc<Shared<T>>,
}

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
enum State<T> {
    Owed,
    Kept(T),
    Ended,
}

/// Makes the two sides.
pub(crate) fn promise<T>() -> (Promise<T>, Answer<T>) {
    let shared = Arc::new(Shared { state: Mutex::new(State::Owed), changed: Condvar::new() });
    (Promise { shared: Arc::downgrade(&shared) }, Answer { shared })
}

impl<T> Promise<T> {
    /// Whether there is a waiter.
    pub(crate) fn is_wanted(&self) -> bool {
        self.shared.strong_count() > 0
    }

    pub(crate) fn keep(self, value: T) {
        if let Some(shared) = self.shared.upgrade() {
            *shared.state.lock() = State::Kept(value);
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let mut state = shared.state.lock();
            if matches!(*state, State::Owed) {
                *state = State::Ended;
            }
            drop(state);
            shared.changed.notify_all();
        }
    }
}

impl<T> Answer<T> {
    /// Waits for the value; `None` where there will be none or the deadline passes.
    pub(crate) fn wait(self, deadline: Instant) -> Option<T> {
        let mut state = self.shared.state.lock();
        while matches!(*state, State::Owed)
            && !self.shared.changed.wait_until(&mut state, deadline).timed_out()
        {}
        match std::mem::replace(&mut *state, State::Ended) {
            State::Kept(value) => Some(value),
            State::Owed | State::Ended => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn deadline() -> Instant {
        Instant::now() + Duration::from_mins(1)
    }

    #[test]
    fn a_kept_promise_is_answered() {
        let (promise, answer) = promise();
        let thread = std::thread::spawn(move || promise.keep(7));
        assert_eq!(answer.wait(deadline()), Some(7));
        thread.join().unwrap();
    }

    #[test]
    fn a_dropped_promise_ends_the_wait() {
        let (promise, answer) = promise::<u32>();
        drop(promise);
        assert_eq!(answer.wait(deadline()), None);
    }

    #[test]
    fn a_promise_without_a_waiter_is_not_wanted() {
        let (promise, answer) = promise();
        assert!(promise.is_wanted());
        drop(answer);
        assert!(!promise.is_wanted());
        promise.keep(1);
    }
}
