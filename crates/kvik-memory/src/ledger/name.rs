//! Names that become file names: checked before they do.

use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::{MAX_NAME_BYTES, NameWords};
use crate::{MemoryError, Result};

/// What the file of a ledger is called before the device; no group may be called like that.
pub(super) const LEDGER_PREFIX: &str = "kvik_";

const ALLOWED_IPC: &str = "1 to 64 letters, digits, `_` and `-`, not starting with `kvik_`, not ending in `_lock` or `_page_<number>`";

/// Fails unless `name` can name a group, and with it the files `<name>`, `<name>_lock`, `<name>_page_<k>`.
pub(super) fn check_ipc_name(name: &str) -> Result<()> {
    if is_ipc_name(name) { Ok(()) } else { Err(invalid("ipc_name", name, ALLOWED_IPC)) }
}

/// Fails unless `device` can be part of a file name.
pub(super) fn check_device_name(device: &str) -> Result<()> {
    if is_plain(device) && !device.ends_with("_lock") {
        Ok(())
    } else {
        Err(invalid("device", device, "1 to 64 letters, digits, `_` and `-`, not ending in `_lock`"))
    }
}

/// Whether `name` can name a group.
pub(super) fn is_ipc_name(name: &str) -> bool {
    let ends_like_page_file = name
        .rsplit_once("_page_")
        .is_some_and(|(_, number)| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()));
    is_plain(name) && !name.starts_with(LEDGER_PREFIX) && !name.ends_with("_lock") && !ends_like_page_file
}

fn is_plain(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// Writes as much of `name` as fits.
pub(super) fn store_name(words: &NameWords, name: &str) {
    let mut end = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = [0_u8; MAX_NAME_BYTES];
    bytes[..end].copy_from_slice(&name.as_bytes()[..end]);
    for (word, chunk) in words.iter().zip(bytes.as_chunks::<8>().0) {
        word.store(u64::from_le_bytes(*chunk), Ordering::Relaxed);
    }
}

/// Reads a name; what is not UTF-8 or not printable becomes `?`.
pub(super) fn load_name(words: &[AtomicU64]) -> String {
    let bytes: Vec<u8> = words
        .iter()
        .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
        .take_while(|&byte| byte != 0)
        .collect();
    let text = String::from_utf8_lossy(&bytes);
    text.chars().map(|c| if c.is_control() || c == char::REPLACEMENT_CHARACTER { '?' } else { c }).collect()
}

fn invalid(field: &'static str, value: &str, allowed: &str) -> MemoryError {
    MemoryError::Invalid { field, value: format!("{value:?}"), allowed: allowed.to_owned() }
}
