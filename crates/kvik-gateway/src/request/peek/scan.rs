//! One pass over a JSON object that stops only where its top level is.
//!
//! Strings are left by their closing quote and nested values by the bracket that closes the
//! outermost one; neither is looked into. So the pass takes no stack, however deep a value is, and
//! most of its time is a vectorized search. On JSON it finds what a parser finds. Of what is no JSON
//! it accepts some, with the fault inside a string or a nested value: the bytes go on as they came,
//! and the worker's parser refuses them.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr;
use serde::de::IgnoredAny;

/// Bytes that are looked at together where no search function fits.
const LANES: usize = 32;

/// Why a text is no JSON object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScanError {
    /// What should be there.
    pub(crate) expected: &'static str,
    /// Where, in bytes.
    pub(crate) place: usize,
}

/// A place in a text.
struct Cursor<'a> {
    text: &'a str,
    place: usize,
}

/// A field of an object, as it stands in the text.
#[derive(Debug)]
pub(crate) struct Member<'a> {
    /// Without its escapes.
    pub(crate) name: Cow<'a, str>,
    /// From the opening quote of its name to the end of its value.
    pub(crate) place: Range<usize>,
    /// The text of its value.
    pub(crate) value: &'a str,
}

/// Calls `found` with the name of each field of the object `text` and with the text of its value,
/// in their order.
pub(crate) fn scan_object<'a>(text: &'a str, mut found: impl FnMut(&str, &'a str)) -> Result<(), ScanError> {
    scan_members(text, |member| found(&member.name, member.value)).map(|_| ())
}

/// Calls `found` with each field of the object `text`, in their order, and returns the place of its closing brace.
pub(crate) fn scan_members<'a>(text: &'a str, mut found: impl FnMut(Member<'a>)) -> Result<usize, ScanError> {
    let mut cursor = Cursor { text, place: 0 };
    cursor.skip_spaces();
    cursor.take(b'{', "`{`")?;
    cursor.skip_spaces();
    if cursor.peek() == Some(b'}') {
        cursor.place += 1;
    } else {
        loop {
            let first = cursor.place;
            let name = cursor.name()?;
            cursor.skip_spaces();
            cursor.take(b':', "`:`")?;
            cursor.skip_spaces();
            let value = cursor.value()?;
            found(Member { name, place: first..value.end, value: &text[value] });
            cursor.skip_spaces();
            match cursor.peek() {
                Some(b',') => cursor.place += 1,
                Some(b'}') => break cursor.place += 1,
                _ => return Err(cursor.expected("`,` or `}`")),
            }
            cursor.skip_spaces();
        }
    }
    let end = cursor.place - 1;
    cursor.skip_spaces();
    if cursor.place < text.len() {
        return Err(cursor.expected("the end of the body"));
    }
    Ok(end)
}

/// The place after the string whose opening quote is before `start`; `None` if it does not end.
pub(crate) fn string_end(text: &[u8], start: usize) -> Option<usize> {
    let mut place = start;
    loop {
        let quote = place + memchr(b'"', text.get(place..)?)?;
        // Quotes are rarer than escapes of line breaks, and a run of backslashes is counted once.
        let n_backslashes = text[place..quote].iter().rev().take_while(|&&byte| byte == b'\\').count();
        if n_backslashes % 2 == 0 {
            return Some(quote + 1);
        }
        place = quote + 1;
    }
}

/// The next quote or bracket at `start` or after it.
pub(crate) fn next_structure(text: &[u8], start: usize) -> Option<usize> {
    // Opening and closing brackets of both kinds differ in one bit.
    let is_structure = |byte: u8| matches!(byte | 0x20, b'{' | b'}') || byte == b'"';
    let mut place = start;
    let rest = text.get(start..)?;
    for lanes in rest.chunks_exact(LANES) {
        if lanes.iter().fold(false, |any, &byte| any | is_structure(byte)) {
            break;
        }
        place += LANES;
    }
    text[place..].iter().position(|&byte| is_structure(byte)).map(|ahead| place + ahead)
}

impl<'a> Cursor<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.place).copied()
    }

    fn expected(&self, expected: &'static str) -> ScanError {
        ScanError { expected, place: self.place }
    }

    fn take(&mut self, byte: u8, name: &'static str) -> Result<(), ScanError> {
        if self.peek() != Some(byte) {
            return Err(self.expected(name));
        }
        self.place += 1;
        Ok(())
    }

    fn skip_spaces(&mut self) {
        let rest = &self.text.as_bytes()[self.place..];
        let n_spaces = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
        self.place += n_spaces;
    }

    /// The name of a field, without its escapes.
    fn name(&mut self) -> Result<Cow<'a, str>, ScanError> {
        let start = self.place;
        if self.peek() != Some(b'"') {
            return Err(self.expected("a field's name"));
        }
        self.string()?;
        let inside = &self.text[start + 1..self.place - 1];
        if memchr(b'\\', inside.as_bytes()).is_none() {
            return Ok(Cow::Borrowed(inside));
        }
        serde_json::from_str(&self.text[start..self.place])
            .map(Cow::Owned)
            .map_err(|_| ScanError { expected: "a field's name", place: start })
    }

    fn value(&mut self) -> Result<Range<usize>, ScanError> {
        let start = self.place;
        match self.peek() {
            Some(b'"') => self.string()?,
            Some(b'{' | b'[') => self.nested()?,
            _ => self.scalar()?,
        }
        Ok(start..self.place)
    }

    fn string(&mut self) -> Result<(), ScanError> {
        let end = string_end(self.text.as_bytes(), self.place + 1);
        self.place = end.ok_or(ScanError { expected: "the end of the string", place: self.place })?;
        Ok(())
    }

    fn nested(&mut self) -> Result<(), ScanError> {
        let unclosed = ScanError { expected: "the closing bracket of the value", place: self.place };
        let bytes = self.text.as_bytes();
        let mut depth = 0_usize;
        loop {
            let structure = next_structure(bytes, self.place).ok_or(unclosed)?;
            self.place = structure + 1;
            match bytes[structure] {
                b'"' => self.place = string_end(bytes, self.place).ok_or(unclosed)?,
                b'{' | b'[' => depth += 1,
                _ if depth == 1 => return Ok(()),
                _ => depth -= 1,
            }
        }
    }

    /// A number, `true`, `false` or `null`.
    fn scalar(&mut self) -> Result<(), ScanError> {
        let rest = &self.text[self.place..];
        let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        let n_bytes = rest.as_bytes().iter().take_while(|byte| is_part(byte)).count();
        if serde_json::from_str::<IgnoredAny>(&rest[..n_bytes]).is_err() {
            return Err(self.expected("a value"));
        }
        self.place += n_bytes;
        Ok(())
    }
}
