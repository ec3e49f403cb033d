//! Reading msgpack from untrusted bytes.

use rmp::Marker;

use super::EventError;

/// Deepest nesting that is followed; what engines send has four levels.
const MAX_DEPTH: usize = 16;

/// Walks over a msgpack document.
///
/// Lengths are checked against the bytes that are there before anything is allocated for them.
#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
    n_bytes: usize,
}

/// A whole number as msgpack has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
    Unsigned(u64),
    /// Below zero.
    Negative(i64),
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, n_bytes: bytes.len() }
    }

    /// Fails here, because of `what`.
    pub(crate) fn fail<T>(&self, what: &'static str) -> Result<T, EventError> {
        Err(EventError { what, offset: self.n_bytes - self.rest.len() })
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    /// What comes next, without taking it.
    pub(crate) fn peek(&self) -> Result<Marker, EventError> {
        match self.rest.first() {
            Some(byte) => Ok(Marker::from_u8(*byte)),
            None => self.fail("the end comes too early"),
        }
    }

    /// Takes a nil if there is one.
    pub(crate) fn take_nil(&mut self) -> Result<bool, EventError> {
        let is_nil = self.peek()? == Marker::Null;
        if is_nil {
            self.take(1)?;
        }
        Ok(is_nil)
    }

    /// The length of an array; each of its elements has at least one byte of the rest.
    pub(crate) fn array(&mut self) -> Result<usize, EventError> {
        let n_elements = match self.marker()? {
            Marker::FixArray(n_elements) => usize::from(n_elements),
            Marker::Array16 => self.length::<2>()?,
            Marker::Array32 => self.length::<4>()?,
            _ => return self.fail("not an array"),
        };
        self.bounded(n_elements, 1)
    }

    /// The number of pairs of a map.
    pub(crate) fn map(&mut self) -> Result<usize, EventError> {
        let n_pairs = match self.marker()? {
            Marker::FixMap(n_pairs) => usize::from(n_pairs),
            Marker::Map16 => self.length::<2>()?,
            Marker::Map32 => self.length::<4>()?,
            _ => return self.fail("not a map"),
        };
        self.bounded(n_pairs, 2)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, EventError> {
        let n_bytes = match self.marker()? {
            Marker::FixStr(n_bytes) => usize::from(n_bytes),
            Marker::Str8 => self.length::<1>()?,
            Marker::Str16 => self.length::<2>()?,
            Marker::Str32 => self.length::<4>()?,
            _ => return self.fail("not a text"),
        };
        let bytes = self.take(n_bytes)?;
        std::str::from_utf8(bytes).or_else(|_| self.fail("a text that is not UTF-8"))
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], EventError> {
        let n_bytes = match self.marker()? {
            Marker::Bin8 => self.length::<1>()?,
            Marker::Bin16 => self.length::<2>()?,
            Marker::Bin32 => self.length::<4>()?,
            _ => return self.fail("not bytes"),
        };
        self.take(n_bytes)
    }

    pub(crate) fn number(&mut self) -> Result<Number, EventError> {
        let signed = |value: i64| match u64::try_from(value) {
            Ok(value) => Number::Unsigned(value),
            Err(_) => Number::Negative(value),
        };
        Ok(match self.marker()? {
            Marker::FixPos(value) => Number::Unsigned(u64::from(value)),
            Marker::FixNeg(value) => Number::Negative(i64::from(value)),
            Marker::U8 => Number::Unsigned(u64::from(u8::from_be_bytes(self.array_of()?))),
            Marker::U16 => Number::Unsigned(u64::from(u16::from_be_bytes(self.array_of()?))),
            Marker::U32 => Number::Unsigned(u64::from(u32::from_be_bytes(self.array_of()?))),
            Marker::U64 => Number::Unsigned(u64::from_be_bytes(self.array_of()?)),
            Marker::I8 => signed(i64::from(i8::from_be_bytes(self.array_of()?))),
            Marker::I16 => signed(i64::from(i16::from_be_bytes(self.array_of()?))),
            Marker::I32 => signed(i64::from(i32::from_be_bytes(self.array_of()?))),
            Marker::I64 => signed(i64::from_be_bytes(self.array_of()?)),
            _ => return self.fail("not a whole number"),
        })
    }

    /// A whole number from 0 to `u32::MAX`.
    pub(crate) fn small_number(&mut self) -> Result<u32, EventError> {
        match self.number()? {
            Number::Unsigned(value) => u32::try_from(value).or_else(|_| self.fail("a number above 32 bits")),
            Number::Negative(_) => self.fail("a number below zero"),
        }
    }

    /// Seconds, whole or not.
    pub(crate) fn seconds(&mut self) -> Result<f64, EventError> {
        match self.peek()? {
            Marker::F64 => {
                self.take(1)?;
                Ok(f64::from_be_bytes(self.array_of()?))
            }
            Marker::F32 => {
                self.take(1)?;
                Ok(f64::from(f32::from_be_bytes(self.array_of()?)))
            }
            _ => Ok(match self.number()? {
                Number::Unsigned(value) => value as f64,
                Number::Negative(value) => value as f64,
            }),
        }
    }

    /// Passes over one value of any kind.
    pub(crate) fn skip(&mut self) -> Result<(), EventError> {
        // Elements still to pass over, level by level; never deeper than the bound.
        let mut pending = [0_usize; MAX_DEPTH];
        let mut depth = 0;
        pending[0] = 1;
        loop {
            while pending[depth] == 0 {
                if depth == 0 {
                    return Ok(());
                }
                depth -= 1;
            }
            pending[depth] -= 1;
            let n_inside = self.skip_head()?;
            if n_inside > 0 {
                depth += 1;
                if depth == MAX_DEPTH {
                    return self.fail("nested too deeply");
                }
                pending[depth] = n_inside;
            }
        }
    }

    /// Passes over a scalar, or over the head of an array or map; returns how many values are inside.
    fn skip_head(&mut self) -> Result<usize, EventError> {
        let n_bytes = match self.peek()? {
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => return self.array(),
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => return Ok(2 * self.map()?),
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
                // Not `text`: what is passed over need not be UTF-8.
                let marker = self.marker()?;
                match marker {
                    Marker::FixStr(n_bytes) => usize::from(n_bytes),
                    Marker::Str8 => self.length::<1>()?,
                    Marker::Str16 => self.length::<2>()?,
                    _ => self.length::<4>()?,
                }
            }
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => return self.bytes().map(|_| 0),
            Marker::Ext8 => self.extension_length::<1>()?,
            Marker::Ext16 => self.extension_length::<2>()?,
            Marker::Ext32 => self.extension_length::<4>()?,
            Marker::FixExt2 => 4,
            Marker::FixExt4 => 6,
            Marker::FixExt8 => 10,
            Marker::FixExt16 => 18,
            Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => 1,
            Marker::U8 | Marker::I8 => 2,
            Marker::U16 | Marker::I16 | Marker::FixExt1 => 3,
            Marker::U32 | Marker::I32 | Marker::F32 => 5,
            Marker::U64 | Marker::I64 | Marker::F64 => 9,
            Marker::Reserved => return self.fail("a byte that no value begins with"),
        };
        self.take(n_bytes).map(|_| 0)
    }

    /// Takes the head of an extension; returns what follows, with the byte of its type.
    fn extension_length<const N: usize>(&mut self) -> Result<usize, EventError> {
        self.take(1)?;
        Ok(self.length::<N>()?.saturating_add(1))
    }

    fn marker(&mut self) -> Result<Marker, EventError> {
        let marker = self.peek()?;
        self.take(1)?;
        Ok(marker)
    }

    /// A length of `N` bytes, big endian.
    fn length<const N: usize>(&mut self) -> Result<usize, EventError> {
        let bytes = self.take(N)?;
        Ok(bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)))
    }

    fn bounded(&self, n_elements: usize, bytes_each: usize) -> Result<usize, EventError> {
        if n_elements > self.rest.len() / bytes_each {
            return self.fail("a length beyond the end");
        }
        Ok(n_elements)
    }

    fn array_of<const N: usize>(&mut self) -> Result<[u8; N], EventError> {
        match self.rest.split_first_chunk::<N>() {
            Some((array, rest)) => {
                self.rest = rest;
                Ok(*array)
            }
            None => self.fail("the end comes too early"),
        }
    }

    fn take(&mut self, n_bytes: usize) -> Result<&'a [u8], EventError> {
        match self.rest.split_at_checked(n_bytes) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => self.fail("the end comes too early"),
        }
    }
}
