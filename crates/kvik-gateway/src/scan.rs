//! Passes over JSON without reading it.
//!
//! A long prompt is passed over on its way through a gateway, so this is its largest cost after
//! the system's copies. The check is complete: what passes is JSON. Strings, which are nearly all
//! of a prompt, are looked at in blocks: comparisons of a whole block give a bit for each byte.

/// Bytes of a block; each has its bit in a `u64`.
const BLOCK: usize = 64;

/// Where a text stops being JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotJson {
    place: usize,
}

/// Passes over the parts of a text, one after the other.
#[derive(Debug)]
pub(crate) struct Scanner<'a> {
    text: &'a str,
    place: usize,
}

type Result<T> = std::result::Result<T, NotJson>;

impl std::fmt::Display for NotJson {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "it is not as expected after {} bytes", self.place)
    }
}

impl<'a> Scanner<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Self { text, place: 0 }
    }

    /// Passes over a text that is one object; calls `on_field` with the name of each of its fields,
    /// quotes and escapes included, and its value.
    pub(crate) fn object(mut self, mut on_field: impl FnMut(&'a str, &'a str)) -> Result<()> {
        self.skip_space();
        self.expect(b'{')?;
        self.skip_space();
        if self.next() == Some(b'}') {
            self.place += 1;
        } else {
            loop {
                self.skip_space();
                let name = self.passed(Self::string)?;
                self.skip_space();
                self.expect(b':')?;
                self.skip_space();
                on_field(name, self.passed(Self::value)?);
                self.skip_space();
                match self.next() {
                    Some(b',') => self.place += 1,
                    _ => break self.expect(b'}')?,
                }
            }
        }
        self.skip_space();
        if self.place == self.text.len() { Ok(()) } else { self.fail() }
    }

    /// The text that `pass` passes over.
    fn passed(&mut self, pass: impl FnOnce(&mut Self) -> Result<()>) -> Result<&'a str> {
        let start = self.place;
        pass(self)?;
        // What passes begins and ends with ASCII.
        self.text.get(start..self.place).ok_or(NotJson { place: start })
    }

    /// Passes over a value, however deep it is.
    fn value(&mut self) -> Result<()> {
        let mut open = Vec::new();
        loop {
            self.skip_space();
            let is_whole = match self.next() {
                Some(b'"') => self.string().map(|()| true)?,
                Some(b'[') => self.open(b']', &mut open),
                Some(b'{') => self.open(b'}', &mut open),
                Some(b't') => self.literal("true").map(|()| true)?,
                Some(b'f') => self.literal("false").map(|()| true)?,
                Some(b'n') => self.literal("null").map(|()| true)?,
                _ => self.number().map(|()| true)?,
            };
            if is_whole && !self.close(&mut open)? {
                return Ok(());
            }
            if open.last() == Some(&b'}') {
                self.skip_space();
                self.string()?;
                self.skip_space();
                self.expect(b':')?;
            }
        }
    }

    /// Goes into an array or object; returns whether it was empty and has been left again.
    fn open(&mut self, end: u8, open: &mut Vec<u8>) -> bool {
        self.place += 1;
        self.skip_space();
        let is_empty = self.next() == Some(end);
        if is_empty {
            self.place += 1;
        } else {
            open.push(end);
        }
        is_empty
    }

    /// After a value: leaves what ends here; returns whether another value follows.
    fn close(&mut self, open: &mut Vec<u8>) -> Result<bool> {
        while let Some(&end) = open.last() {
            self.skip_space();
            if self.next() == Some(b',') {
                self.place += 1;
                return Ok(true);
            }
            self.expect(end)?;
            open.pop();
        }
        Ok(false)
    }

    fn string(&mut self) -> Result<()> {
        self.expect(b'"')?;
        let bytes = self.text.as_bytes();
        while let Some(block) = bytes.get(self.place..).and_then(<[u8]>::first_chunk::<BLOCK>) {
            let mut escapes = bits(block, |byte| byte == b'\\');
            let mut escaped = 0_u64;
            let mut wrong = bits(block, |byte| byte < 0x20);
            let mut n_passed = BLOCK;
            while escapes != 0 {
                let at = escapes.trailing_zeros() as usize;
                // `\u` and an escape that ends in the next block are passed over one by one.
                let Some(&kind) = block.get(at + 1).filter(|&&kind| kind != b'u') else {
                    n_passed = at;
                    break;
                };
                escaped |= 2 << at;
                wrong |= u64::from(!is_escape(kind)) << at;
                escapes &= !(3 << at);
            }
            let end = (bits(block, |byte| byte == b'"') & !escaped).trailing_zeros() as usize;
            let n_plain = end.min(n_passed);
            if (wrong.trailing_zeros() as usize) < n_plain {
                return self.fail();
            }
            self.place += n_plain;
            if end == n_plain && end < BLOCK {
                self.place += 1;
                return Ok(());
            }
            if n_passed < BLOCK {
                self.escape()?;
            }
        }
        loop {
            match self.next() {
                Some(b'"') => break self.place += 1,
                Some(b'\\') => self.escape()?,
                Some(byte) if 0x20 <= byte => self.place += 1,
                _ => return self.fail(),
            }
        }
        Ok(())
    }

    /// Passes over an escape.
    fn escape(&mut self) -> Result<()> {
        self.expect(b'\\')?;
        match self.next() {
            Some(b'u') => {
                let digits = self.text.as_bytes().get(self.place + 1..self.place + 5);
                if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)) {
                    return self.fail();
                }
                self.place += 5;
            }
            Some(kind) if is_escape(kind) => self.place += 1,
            _ => return self.fail(),
        }
        Ok(())
    }

    fn number(&mut self) -> Result<()> {
        self.place += usize::from(self.next() == Some(b'-'));
        if self.next() == Some(b'0') {
            self.place += 1;
        } else {
            self.digits()?;
        }
        if self.next() == Some(b'.') {
            self.place += 1;
            self.digits()?;
        }
        if matches!(self.next(), Some(b'e' | b'E')) {
            self.place += 1;
            self.place += usize::from(matches!(self.next(), Some(b'+' | b'-')));
            self.digits()?;
        }
        Ok(())
    }

    /// Passes over one digit or more.
    fn digits(&mut self) -> Result<()> {
        let start = self.place;
        while self.next().is_some_and(|byte| byte.is_ascii_digit()) {
            self.place += 1;
        }
        if start < self.place { Ok(()) } else { self.fail() }
    }

    fn literal(&mut self, literal: &str) -> Result<()> {
        if !self.text.as_bytes()[self.place..].starts_with(literal.as_bytes()) {
            return self.fail();
        }
        self.place += literal.len();
        Ok(())
    }

    fn expect(&mut self, byte: u8) -> Result<()> {
        if self.next() != Some(byte) {
            return self.fail();
        }
        self.place += 1;
        Ok(())
    }

    fn skip_space(&mut self) {
        while matches!(self.next(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.place += 1;
        }
    }

    fn next(&self) -> Option<u8> {
        self.text.as_bytes().get(self.place).copied()
    }

    fn fail<T>(&self) -> Result<T> {
        Err(NotJson { place: self.place })
    }
}

/// A bit for each byte of `block`, the first one lowest, that says whether it `is` so.
#[inline]
fn bits(block: &[u8; BLOCK], is: impl Fn(u8) -> bool) -> u64 {
    // The compiler makes vectors of this loop.
    let ones = block.map(|byte| u8::from(is(byte)));
    let (groups, _) = ones.as_chunks::<8>();
    groups.iter().enumerate().fold(0, |bits, (idx, group)| {
        // Moves the lowest bit of each byte into the highest byte.
        let byte = u64::from_le_bytes(*group).wrapping_mul(0x0102_0408_1020_4080) >> 56;
        bits | (byte << (8 * idx))
    })
}

/// Whether a backslash and `kind` are a whole escape.
fn is_escape(kind: u8) -> bool {
    matches!(kind, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IgnoredAny;

    use super::*;

    fn is_json(text: &str) -> bool {
        let mut scanner = Scanner::new(text);
        scanner.value().is_ok() && {
            scanner.skip_space();
            scanner.place == text.len()
        }
    }

    #[test]
    fn strings_end_where_they_should_whatever_stands_at_a_block_s_edge() {
        for n_before in 0..3 * BLOCK {
            for (inside, is_right) in [
                ("", true),
                ("\\\\", true),
                ("\\\"", true),
                ("\\u00e9", true),
                ("\\\\\\\"", true),
                ("\\u00g9", false),
                ("\\q", false),
                ("\n", false),
                ("\\", false),
            ] {
                for n_after in [0, 1, 70] {
                    let text = format!("\"{}{inside}{}\"", "x".repeat(n_before), "y".repeat(n_after));
                    // A lone backslash before a letter or the closing quote.
                    assert_eq!(is_json(&text), is_right, "{text}");
                    assert_eq!(serde_json::from_str::<IgnoredAny>(&text).is_ok(), is_right, "{text}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn what_passes_is_what_a_parser_takes(text in "[\\[\\]{}:,\"0-9eE+.\\\\ntrufalse \n-]{0,40}") {
            prop_assert_eq!(is_json(&text), serde_json::from_str::<IgnoredAny>(&text).is_ok());
        }

        #[test]
        fn every_string_passes_whole(text in "(\\PC|[\"\\\\\n\u{1}]|x{9}){0,200}", rest in ".{0,9}") {
            let json = serde_json::Value::from(text).to_string();
            let all = format!("{json}{rest}");
            let mut scanner = Scanner::new(&all);
            prop_assert_eq!(scanner.passed(Scanner::string), Ok(json.as_str()));
        }

        #[test]
        fn a_changed_byte_is_seen_as_by_a_parser(place in 0..200_usize, byte in 0_u8..128) {
            let text = r#"{"a":[1.5e3,-0,true,null,{"b":{}}],"long":"0123456789 \"quoted\" \n\n \\ and 0123456789 0123456789 0123456789 \u00e9 0123456789","c":[[],[[]]]}"#;
            let mut bytes = text.as_bytes().to_vec();
            let place = place % bytes.len();
            bytes[place] = byte;
            let text = String::from_utf8(bytes).unwrap();
            prop_assert_eq!(is_json(&text), serde_json::from_str::<IgnoredAny>(&text).is_ok(), "{}", text);
        }
    }
}
