//! Asking the engine to free memory that others are entitled to.

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;

use parking_lot::ReentrantMutex;

use crate::status::Failure;

/// The engine's function, as `kvik_reclaim_callback` without its NULL.
pub(crate) type Function = unsafe extern "C" fn(user_data: *mut c_void, n_bytes: u64);

/// The function that frees memory on request, if the engine has one.
///
/// The lock is held during a call, so a thread that replaces the function knows that the old one is over; it is
/// reentrant, so that the function may replace itself.
#[derive(Default)]
pub(crate) struct Reclaimer {
    callback: ReentrantMutex<Cell<Option<Callback>>>,
}

#[derive(Clone, Copy)]
struct Callback {
    function: Function,
    user_data: *mut c_void,
}

// SAFETY: the code that set the callback promised that any thread may call it with this pointer.
unsafe impl Send for Callback {}

thread_local! {
    static IS_CALLING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside of a callback.
pub(crate) fn is_calling() -> bool {
    IS_CALLING.get()
}

impl Reclaimer {
    /// Sets or removes the function; the old one does not run any more when this returns, unless it is
    /// the caller.
    ///
    /// # Safety
    ///
    /// Until it is replaced or the pool is closed, any thread may call `function` with `user_data`.
    pub(crate) unsafe fn set(&self, function: Option<Function>, user_data: *mut c_void) {
        self.callback.lock().set(function.map(|function| Callback { function, user_data }));
    }

    /// Asks for `n_bytes`.
    pub(crate) fn call(&self, n_bytes: u64) {
        let callback = self.callback.lock();
        if let Some(Callback { function, user_data }) = callback.get() {
            IS_CALLING.set(true);
            // SAFETY: the code that set it promised that it can be called by any thread until it is replaced,
            // which the lock prevents meanwhile.
            unsafe { function(user_data, n_bytes) };
            IS_CALLING.set(false);
        }
    }
}

/// Fails inside of a callback: a close waits for the callback to end.
pub(crate) fn check_not_calling() -> Result<(), Failure> {
    if is_calling() { Err(Failure::invalid("a reclaim callback cannot close a pool")) } else { Ok(()) }
}

impl fmt::Debug for Reclaimer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reclaimer").finish_non_exhaustive()
    }
}
