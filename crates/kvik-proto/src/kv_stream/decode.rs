//! Reading frames from untrusted bytes.

use kvik_types::BlockHash;

use super::encode::{LENGTH_BYTES, change, kind};
use super::{
    BlockGroup, Frame, Hello, KvBatch, KvChange, KvKey, KvTier, MAX_FRAME_BYTES, SnapshotPart, StreamError,
};
use crate::events::EventError;
use crate::events::cursor::{Cursor, Number};

/// Cuts a stream of bytes into frames.
///
/// It holds at most one frame and what was handed in last. After an error the stream is lost.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    /// Where the next frame begins.
    start: usize,
}

impl FrameDecoder {
    /// Takes more of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        // What was read goes at once: the buffer never holds more than one frame that is not whole.
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next frame; `None` until more bytes come. Frames of unknown kinds are passed over.
    ///
    /// # Errors
    /// If the bytes are not frames; nothing more can be read then.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, StreamError> {
        while let Some((length, rest)) = self.buffer[self.start..].split_first_chunk::<LENGTH_BYTES>() {
            let n_bytes = u32::from_be_bytes(*length) as usize;
            if !(1..=MAX_FRAME_BYTES).contains(&n_bytes) {
                return Err(StreamError::BadLength { n_bytes });
            }
            let Some(frame) = rest.get(..n_bytes) else { return Ok(None) };
            self.start += LENGTH_BYTES + n_bytes;
            if let Some(frame) = Frame::decode(frame)? {
                return Ok(Some(frame));
            }
        }
        Ok(None)
    }
}

impl Frame {
    /// Reads a frame without its length; `None` if its kind is not known.
    ///
    /// # Errors
    /// If it is not what its kind says; nothing of it should be used then.
    pub fn decode(frame: &[u8]) -> Result<Option<Self>, StreamError> {
        let Some((frame_kind, body)) = frame.split_first() else {
            return Err(StreamError::BadLength { n_bytes: 0 });
        };
        let mut cursor = Cursor::new(body);
        let read: fn(&mut Cursor<'_>) -> Result<Self, EventError> = match *frame_kind {
            kind::HELLO => |cursor| {
                fields(cursor, 5, |cursor| {
                    Ok(Self::Hello(Hello {
                        worker: cursor.text()?.to_owned(),
                        epoch: number(cursor)?,
                        model: cursor.text()?.to_owned(),
                        groups: list(cursor, group)?,
                        resumes_at: option(cursor, number)?,
                    }))
                })
            },
            kind::SNAPSHOT_PART => |cursor| {
                fields(cursor, 3, |cursor| {
                    Ok(Self::SnapshotPart(SnapshotPart {
                        group: cursor.small_number()?,
                        tier: tier(cursor)?,
                        keys: keys(cursor)?,
                    }))
                })
            },
            kind::SNAPSHOT_END => {
                |cursor| fields(cursor, 1, |cursor| Ok(Self::SnapshotEnd { next_sequence: number(cursor)? }))
            }
            kind::BATCH => |cursor| {
                fields(cursor, 3, |cursor| {
                    Ok(Self::Batch(KvBatch {
                        sequence: number(cursor)?,
                        published_s: cursor.seconds()?,
                        changes: list(cursor, kv_change)?,
                    }))
                })
            },
            kind::ALIVE => {
                |cursor| fields(cursor, 1, |cursor| Ok(Self::Alive { next_sequence: number(cursor)? }))
            }
            _ => return Ok(None),
        };
        let frame = read(&mut cursor)?;
        if !cursor.is_at_end() {
            return Ok(cursor.fail("bytes behind the frame")?);
        }
        Ok(Some(frame))
    }
}

/// Reads an array of at least `n_known` fields, of which `read` takes that many.
fn fields<'a, T>(
    cursor: &mut Cursor<'a>,
    n_known: usize,
    read: impl FnOnce(&mut Cursor<'a>) -> Result<T, EventError>,
) -> Result<T, EventError> {
    let n_fields = cursor.array()?;
    skip_behind(cursor, n_fields, n_known, read)
}

fn skip_behind<'a, T>(
    cursor: &mut Cursor<'a>,
    n_fields: usize,
    n_known: usize,
    read: impl FnOnce(&mut Cursor<'a>) -> Result<T, EventError>,
) -> Result<T, EventError> {
    let Some(n_unknown) = n_fields.checked_sub(n_known) else { return cursor.fail("too few fields") };
    let value = read(cursor)?;
    for _ in 0..n_unknown {
        cursor.skip()?;
    }
    Ok(value)
}

fn group(cursor: &mut Cursor<'_>) -> Result<BlockGroup, EventError> {
    fields(cursor, 3, |cursor| {
        let (number, block_tokens) = (cursor.small_number()?, cursor.small_number()?);
        if block_tokens == 0 {
            return cursor.fail("blocks without tokens");
        }
        match cursor.bytes()?.try_into() {
            Ok(root) => Ok(BlockGroup { number, block_tokens, root: BlockHash(root) }),
            Err(_) => cursor.fail("a root that has not 16 bytes"),
        }
    })
}

fn kv_change(cursor: &mut Cursor<'_>) -> Result<KvChange, EventError> {
    let n_fields = cursor.array()?;
    if n_fields == 0 {
        return cursor.fail("a change without a kind");
    }
    match number(cursor)? {
        change::STORED => skip_behind(cursor, n_fields, 5, |cursor| {
            Ok(KvChange::Stored {
                group: cursor.small_number()?,
                tier: tier(cursor)?,
                parent: option(cursor, number)?.map(KvKey),
                keys: keys(cursor)?,
            })
        }),
        change::REMOVED => skip_behind(cursor, n_fields, 4, |cursor| {
            Ok(KvChange::Removed { group: cursor.small_number()?, tier: tier(cursor)?, keys: keys(cursor)? })
        }),
        change::CLEARED => {
            skip_behind(cursor, n_fields, 2, |cursor| Ok(KvChange::Cleared { tier: option(cursor, tier)? }))
        }
        // Unlike a frame, it is inside of a number: passing over it would lose a change.
        _ => cursor.fail("a change that is not known"),
    }
}

fn list<'a, T>(
    cursor: &mut Cursor<'a>,
    mut element: impl FnMut(&mut Cursor<'a>) -> Result<T, EventError>,
) -> Result<Vec<T>, EventError> {
    let n_elements = cursor.array()?;
    // Not reserved: an element takes more memory than the byte that it must have in the frame.
    let mut elements = Vec::new();
    for _ in 0..n_elements {
        elements.push(element(cursor)?);
    }
    Ok(elements)
}

fn option<'a, T>(
    cursor: &mut Cursor<'a>,
    value: impl FnOnce(&mut Cursor<'a>) -> Result<T, EventError>,
) -> Result<Option<T>, EventError> {
    if cursor.take_nil()? { Ok(None) } else { value(cursor).map(Some) }
}

fn number(cursor: &mut Cursor<'_>) -> Result<u64, EventError> {
    match cursor.number()? {
        Number::Unsigned(value) => Ok(value),
        Number::Negative(_) => cursor.fail("a number below zero"),
    }
}

fn tier(cursor: &mut Cursor<'_>) -> Result<KvTier, EventError> {
    let number = cursor.small_number()?;
    match KvTier::ALL.get(number as usize) {
        Some(tier) => Ok(*tier),
        None => cursor.fail("a tier that is not known"),
    }
}

fn keys(cursor: &mut Cursor<'_>) -> Result<Vec<KvKey>, EventError> {
    match cursor.bytes()?.as_chunks() {
        (keys, []) => Ok(keys.iter().map(|key| KvKey(u64::from_be_bytes(*key))).collect()),
        _ => cursor.fail("keys that have not 8 bytes each"),
    }
}
