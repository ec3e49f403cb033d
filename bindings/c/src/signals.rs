//! Keeping an engine's signals away from threads that are not the engine's.

use std::mem::MaybeUninit;
use std::ptr;

/// Blocks all signals on this thread until it is dropped; threads that are started meanwhile keep them
/// blocked, so that a signal of the process never runs its handler on a thread of the library.
#[derive(Debug)]
pub(crate) struct SignalsBlocked {
    before: Option<libc::sigset_t>,
}

impl SignalsBlocked {
    pub(crate) fn new() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the first call fills in what the second reads; the second fills in `before` where it
        // succeeds.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            let result = libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            (result == 0).then(|| before.assume_init())
        };
        Self { before }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: the mask is the one that this thread had. The guard is a local of one call, so it is
            // dropped where it was made.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, ptr::null_mut()) };
        }
    }
}
