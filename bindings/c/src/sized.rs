//! Structures of the caller's that begin with their size.

use std::mem::MaybeUninit;
use std::ptr;

use crate::status::Failure;

/// Copies a structure, which may be of a newer header as long as what is new there is not set.
///
/// # Safety
///
/// `structure` is NULL or points to as many readable bytes as its first word says. `T` begins with that word, and
/// any bits are a value of it.
pub(crate) unsafe fn read_sized<T: Copy>(name: &'static str, structure: *const T) -> Result<T, Failure> {
    if structure.is_null() {
        return Err(Failure::null(name));
    }
    // SAFETY: not NULL, so there is at least the first word.
    let size = unsafe { structure.cast::<usize>().read_unaligned() };
    // The first version of the structure is the smallest there is.
    if size < size_of::<T>() {
        return Err(Failure::invalid(format!(
            "`{name}.size` is {size}; allowed: {} or more, as sizeof gives it",
            size_of::<T>()
        )));
    }
    // SAFETY: the caller promised `size` bytes.
    let unknown = unsafe {
        std::slice::from_raw_parts(structure.cast::<u8>().add(size_of::<T>()), size - size_of::<T>())
    };
    if unknown.iter().any(|&byte| byte != 0) {
        return Err(Failure::invalid(format!(
            "`{name}` has settings that this version of the library does not know"
        )));
    }
    let mut copy = MaybeUninit::<T>::uninit();
    // SAFETY: both are as long as the structure, whose fields can have any bits.
    Ok(unsafe {
        ptr::copy_nonoverlapping(structure.cast::<u8>(), copy.as_mut_ptr().cast::<u8>(), size_of::<T>());
        copy.assume_init()
    })
}
