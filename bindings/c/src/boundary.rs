//! What every function of the library passes through: no panic leaves it, and a failure becomes a status whose words the
//! handle and the thread keep.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::handle::{self, kvik_pool};
use crate::pool::Pool;
use crate::status::{self, Failure, kvik_status};

#[cfg(test)]
mod tests;

/// Runs `work` on the pool behind a handle and answers with its status.
pub(crate) fn call(pool: *const kvik_pool, work: impl FnOnce(&Pool) -> Result<(), Failure>) -> kvik_status {
    answer(|| {
        handle::with(pool, |pool| {
            // Here as well, so that the handle has the words.
            let result = caught(|| work(pool));
            if let Err(failure) = &result {
                pool.remember(failure.message.clone());
            }
            result
        })?
    })
}

/// Runs `work` and answers with its status.
pub(crate) fn answer(work: impl FnOnce() -> Result<(), Failure>) -> kvik_status {
    match caught(work) {
        Ok(()) => kvik_status::KVIK_OK,
        Err(Failure { status, message }) => {
            status::remember(message);
            status
        }
    }
}

/// Turns a panic into a failure: unwinding into C is not defined.
fn caught(work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().map(|words| Cow::Borrowed(*words));
        let words = words.or_else(|| panic.downcast_ref::<String>().map(|words| Cow::Owned(words.clone())));
        Err(Failure::new(
            kvik_status::KVIK_ERROR_INTERNAL,
            format!("a defect of the library: {}", words.unwrap_or(Cow::Borrowed("a panic"))),
        ))
    })
}

/// Fails where the caller's array cannot be one; it is not looked at.
pub(crate) fn check_array<T>(argument: &'static str, array: *const T, length: usize) -> Result<(), Failure> {
    if length == 0 {
        return Ok(());
    }
    if array.is_null() {
        return Err(Failure::null(argument));
    }
    let n_bytes = length.checked_mul(size_of::<T>()).filter(|&n_bytes| isize::try_from(n_bytes).is_ok());
    if n_bytes.is_none() || !array.is_aligned() {
        return Err(Failure::invalid(format!("`{argument}` is no array of {length} values")));
    }
    Ok(())
}
