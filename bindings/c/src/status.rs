//! What came of a call: a status for the program, and words for a human.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use kvik_memory::MemoryError;
use kvik_memory::pages::Shortage;

/// What came of a call. Below zero is an error; above zero is an answer that is not a yes.
///
/// Unless a function says otherwise, everything but KVIK_OK means that nothing changed.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum kvik_status {
    /// Done.
    KVIK_OK = 0,
    /// There is not enough memory now; kvik_last_error says whether the device, the limit or others are
    /// the reason. Try again later.
    KVIK_NO_MEMORY = 1,
    /// A newer revision is in force.
    KVIK_STALE = 2,
    /// An argument or a setting is outside of what is allowed.
    KVIK_ERROR_INVALID = -1,
    /// The handle is NULL, closed, or was never one.
    KVIK_ERROR_HANDLE = -2,
    /// What was given back is not allocated: foreign, or freed already.
    KVIK_ERROR_NOT_ALLOCATED = -3,
    /// The device or its driver is not there.
    KVIK_ERROR_NO_DEVICE = -4,
    /// A call to the driver or the kernel failed.
    KVIK_ERROR_DEVICE = -5,
    /// The files of the ledger cannot be used, or all of its places are taken.
    KVIK_ERROR_LEDGER = -6,
    /// The handle belongs to the parent process: open a new one after fork.
    KVIK_ERROR_FORKED = -7,
    /// A defect of the library. The pool is as usable as before the call.
    KVIK_ERROR_INTERNAL = -8,
}

/// Why a call does not answer `KVIK_OK`.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: kvik_status,
    pub(crate) message: Cow<'static, str>,
}

thread_local! {
    static LAST_MESSAGE: RefCell<Cow<'static, str>> = const { RefCell::new(Cow::Borrowed("")) };
    /// What was handed out last: it stays where it is until the thread asks again.
    static HANDED_OUT: RefCell<CString> = RefCell::default();
}

/// Keeps the words of this thread's last failure.
pub(crate) fn remember(message: Cow<'static, str>) {
    // A thread that is ending has no later call that could ask.
    let _ = LAST_MESSAGE.try_with(|last| last.replace(message));
}

/// The words of this thread's last failure.
pub(crate) fn last_message() -> Cow<'static, str> {
    LAST_MESSAGE.try_with(|last| last.borrow().clone()).unwrap_or(Cow::Borrowed(""))
}

/// A C string with `message` that lives until this thread calls again.
pub(crate) fn hand_out(message: &str) -> *const c_char {
    let text = CString::new(message.replace('\0', "?")).unwrap_or_default();
    HANDED_OUT
        .try_with(|last| {
            let mut last = last.borrow_mut();
            *last = text;
            last.as_ptr()
        })
        .unwrap_or(c"".as_ptr())
}

/// The name of a status, by its number.
pub(crate) fn name_of(status: i32) -> &'static CStr {
    match status {
        0 => c"KVIK_OK",
        1 => c"KVIK_NO_MEMORY",
        2 => c"KVIK_STALE",
        -1 => c"KVIK_ERROR_INVALID",
        -2 => c"KVIK_ERROR_HANDLE",
        -3 => c"KVIK_ERROR_NOT_ALLOCATED",
        -4 => c"KVIK_ERROR_NO_DEVICE",
        -5 => c"KVIK_ERROR_DEVICE",
        -6 => c"KVIK_ERROR_LEDGER",
        -7 => c"KVIK_ERROR_FORKED",
        -8 => c"KVIK_ERROR_INTERNAL",
        _ => c"unknown status",
    }
}

impl Failure {
    pub(crate) fn new(status: kvik_status, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(kvik_status::KVIK_ERROR_INVALID, message)
    }

    /// The failure of an argument that must not be NULL.
    pub(crate) fn null(argument: &'static str) -> Self {
        Self::invalid(format!("`{argument}` is NULL"))
    }

    /// Too little memory.
    pub(crate) fn shortage(shortage: Shortage) -> Self {
        let message = match shortage {
            Shortage::DeviceFull => "the device has no more memory, or the pool's addresses are used up",
            Shortage::GroupLimit => "the limit of the group is reached",
            Shortage::OverShare => "others that are below their share wait for memory",
        };
        Self::new(kvik_status::KVIK_NO_MEMORY, message)
    }

    /// Too little memory of the process itself.
    pub(crate) fn no_heap() -> Self {
        Self::new(kvik_status::KVIK_NO_MEMORY, "the process has no memory left")
    }
}

impl From<MemoryError> for Failure {
    fn from(error: MemoryError) -> Self {
        let status = match error {
            MemoryError::Invalid { .. } => kvik_status::KVIK_ERROR_INVALID,
            MemoryError::NotAllocated { .. } => kvik_status::KVIK_ERROR_NOT_ALLOCATED,
            MemoryError::NoDevice { .. } => kvik_status::KVIK_ERROR_NO_DEVICE,
            MemoryError::Device { .. } | MemoryError::Rank { .. } => kvik_status::KVIK_ERROR_DEVICE,
            MemoryError::Segment { .. } | MemoryError::ForeignSegment { .. } | MemoryError::NoSlot { .. } => {
                kvik_status::KVIK_ERROR_LEDGER
            }
            MemoryError::Forked => kvik_status::KVIK_ERROR_FORKED,
            _ => kvik_status::KVIK_ERROR_INTERNAL,
        };
        Self::new(status, error.to_string())
    }
}
