//! Fields off the front of a frame: how every frame of this crate is read.

use crate::{MemoryError, Result};

/// Room for the largest frame of any protocol of this crate, which is a page list of the ranks.
pub(crate) const MAX_FRAME_BYTES: usize = 34 << 10;

/// The bytes that are left of a frame.
///
/// Takes any bytes; fails with [`MemoryError::Invalid`], which names `length_field`, where a field is cut off
/// or something follows the last one.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    length_field: &'static str,
    rest: &'a [u8],
}

/// An error about a field of a frame.
pub(crate) fn invalid(field: &'static str, value: &impl ToString, allowed: &str) -> MemoryError {
    MemoryError::Invalid { field, value: value.to_string(), allowed: allowed.to_owned() }
}

/// As much of `text` as fits into `max_bytes`, cut at a character.
pub(crate) fn cut(text: &str, max_bytes: usize) -> &str {
    &text[..text.floor_char_boundary(max_bytes)]
}

impl<'a> Fields<'a> {
    pub(crate) fn new(length_field: &'static str, frame: &'a [u8]) -> Self {
        Self { length_field, rest: frame }
    }

    pub(crate) fn take(&mut self, n_bytes: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(n_bytes) else {
            return Err(invalid(self.length_field, &self.rest.len(), "all fields of the frame"));
        };
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn end(&self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            n_bytes => Err(invalid(self.length_field, &format!("{n_bytes} more"), "nothing behind a frame")),
        }
    }
}
