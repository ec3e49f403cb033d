//! What sleep means for engines that sleep with their process; all others end and are started again.

mod sglang;
mod vllm;

use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

use crate::calls::EngineCalls;
use crate::config::SleepMethod;

/// Longest time that an engine takes to fall asleep or to wake: weights are copied or read.
const CALL_TIMEOUT: Duration = Duration::from_mins(10);

/// The outcome of a call, with what went wrong in words.
type Done<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// An engine's own way to give memory back and to take it again.
pub(crate) trait NativeSleep: Debug + Send + Sync {
    /// Gives memory back. After an error the engine serves on as before, or cannot be told from one that is broken: its
    /// health decides.
    fn release<'a>(&'a self, calls: &'a EngineCalls) -> Done<'a>;

    /// Takes memory again with all that it held. After an error the engine must not serve: its weights may be missing.
    fn resume<'a>(&'a self, calls: &'a EngineCalls) -> Done<'a>;
}

/// The way of an engine to sleep with its process; `None` if its process ends instead.
pub(crate) fn native(method: &SleepMethod) -> Option<Box<dyn NativeSleep>> {
    match method {
        SleepMethod::Vllm(depth) => Some(Box::new(vllm::VllmSleeper(*depth))),
        SleepMethod::Sglang { weights } => Some(Box::new(sglang::SglangSleeper { weights: weights.clone() })),
        SleepMethod::Stop | SleepMethod::Never => None,
    }
}

#[cfg(test)]
mod tests;
