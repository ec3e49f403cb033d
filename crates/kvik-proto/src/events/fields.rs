//! The fields of events, by name.

use rmp::Marker;

use super::cursor::{Cursor, Number};
use super::{Attention, BlocksRemoved, BlocksStored, EngineHash, EventError, ExtraKey, Medium, decode_hash};

/// Deepest nesting of an extra key: a list of what makes up an image's name is one level.
const MAX_EXTRA_DEPTH: usize = 4;

/// A `BlockStored` whose fields are being read.
#[derive(Debug, Default)]
pub(super) struct Stored {
    event: BlocksStored,
    has_hashes: bool,
    has_block_size: bool,
}

/// A `BlockRemoved` whose fields are being read.
#[derive(Debug, Default)]
pub(super) struct Removed {
    event: BlocksRemoved,
    has_hashes: bool,
}

impl Stored {
    /// In the order of the array form.
    pub(super) const FIELDS: &'static [&'static str] = &[
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ];

    pub(super) fn read(&mut self, name: &str, cursor: &mut Cursor<'_>) -> Result<(), EventError> {
        let event = &mut self.event;
        match name {
            "block_hashes" => {
                event.hashes = hashes(cursor)?;
                self.has_hashes = true;
            }
            "block_size" => {
                event.block_tokens = cursor.small_number()?;
                self.has_block_size = true;
            }
            // Every other field may be nil, which is its default.
            _ if cursor.take_nil()? => {}
            "parent_block_hash" => event.parent = Some(decode_hash(cursor)?),
            "token_ids" => (event.tokens, event.is_paired) = tokens(cursor)?,
            "medium" => event.medium = medium(cursor)?,
            // SGLang has a map with a salt behind the medium of its array form.
            "lora_name" if is_map(cursor)? => event.salt = salt(cursor)?,
            "lora_name" => event.lora_name = Some(cursor.text()?.to_owned()),
            "cache_salt" => event.salt = Some(cursor.text()?.to_owned()),
            "group_idx" => event.group_idx = Some(cursor.small_number()?),
            "kv_cache_spec_kind" => event.attention = attention(cursor.text()?),
            "extra_keys" if is_array(cursor)? => event.extra_keys = list(cursor, block_extra_keys)?,
            _ => cursor.skip()?,
        }
        Ok(())
    }

    pub(super) fn finish(self, cursor: &Cursor<'_>) -> Result<BlocksStored, EventError> {
        let Self { event, has_hashes, has_block_size } = self;
        if !has_hashes || !has_block_size {
            return cursor.fail("stored blocks without names or size");
        }
        let n_places = event.hashes.len() as u64 * u64::from(event.block_tokens);
        let n_tokens = n_places + u64::from(event.is_paired);
        if !event.tokens.is_empty() && event.tokens.len() as u64 != n_tokens {
            return cursor.fail("a number of tokens that is not that of the blocks");
        }
        if !event.extra_keys.is_empty() && event.extra_keys.len() != event.hashes.len() {
            return cursor.fail("a number of extra keys that is not that of the blocks");
        }
        Ok(event)
    }
}

impl Removed {
    /// In the order of the array form.
    pub(super) const FIELDS: &'static [&'static str] = &["block_hashes", "medium", "group_idx"];

    pub(super) fn read(&mut self, name: &str, cursor: &mut Cursor<'_>) -> Result<(), EventError> {
        match name {
            "block_hashes" => {
                self.event.hashes = hashes(cursor)?;
                self.has_hashes = true;
            }
            _ if cursor.take_nil()? => {}
            "medium" => self.event.medium = medium(cursor)?,
            "group_idx" => self.event.group_idx = Some(cursor.small_number()?),
            _ => cursor.skip()?,
        }
        Ok(())
    }

    pub(super) fn finish(self, cursor: &Cursor<'_>) -> Result<BlocksRemoved, EventError> {
        if !self.has_hashes {
            return cursor.fail("removed blocks without names");
        }
        Ok(self.event)
    }
}

fn hashes(cursor: &mut Cursor<'_>) -> Result<Vec<EngineHash>, EventError> {
    list(cursor, decode_hash)
}

fn list<'a, T>(
    cursor: &mut Cursor<'a>,
    mut element: impl FnMut(&mut Cursor<'a>) -> Result<T, EventError>,
) -> Result<Vec<T>, EventError> {
    let n_elements = cursor.array()?;
    let mut elements = Vec::with_capacity(n_elements);
    for _ in 0..n_elements {
        elements.push(element(cursor)?);
    }
    Ok(elements)
}

/// Tokens, or pairs of each token and the next; whether they are pairs.
fn tokens(cursor: &mut Cursor<'_>) -> Result<(Vec<u32>, bool), EventError> {
    let mut ahead = cursor.clone();
    let is_paired = ahead.array()? > 0 && is_array(&ahead)?;
    if !is_paired {
        return Ok((list(cursor, Cursor::small_number)?, false));
    }
    let n_pairs = cursor.array()?;
    let mut tokens = Vec::with_capacity(n_pairs + 1);
    for _ in 0..n_pairs {
        if cursor.array()? != 2 {
            return cursor.fail("tokens together that are not two");
        }
        let (first, second) = (cursor.small_number()?, cursor.small_number()?);
        match tokens.last() {
            None => tokens.push(first),
            Some(last) if *last == first => {}
            Some(_) => return cursor.fail("a pair of tokens that does not go on where the one before ends"),
        }
        tokens.push(second);
    }
    Ok((tokens, true))
}

/// The salt in a map of what `SGLang` says beside the blocks.
fn salt(cursor: &mut Cursor<'_>) -> Result<Option<String>, EventError> {
    let mut salt = None;
    for _ in 0..cursor.map()? {
        if cursor.text()? != "cache_salt" {
            cursor.skip()?;
        } else if !cursor.take_nil()? {
            salt = Some(cursor.text()?.to_owned());
        }
    }
    Ok(salt)
}

fn attention(kind: &str) -> Attention {
    match kind {
        "full_attention" | "mla_attention" | "sink_full_attention" => Attention::Full,
        "unknown" => Attention::Unknown,
        _ => Attention::Partial,
    }
}

fn medium(cursor: &mut Cursor<'_>) -> Result<Medium, EventError> {
    let text = cursor.text()?;
    let known = [
        ("GPU", Medium::Gpu),
        ("CPU", Medium::Cpu),
        ("CPU_PINNED", Medium::Cpu),
        ("STORAGE", Medium::Disk),
        ("DISK", Medium::Disk),
        ("EXTERNAL", Medium::Remote),
        ("REMOTE", Medium::Remote),
    ];
    match known.iter().find(|(name, _)| name.eq_ignore_ascii_case(text)) {
        Some((_, medium)) => Ok(*medium),
        None => cursor.fail("a medium that is not known"),
    }
}

/// The extra keys of one block: nil, or a list.
fn block_extra_keys(cursor: &mut Cursor<'_>) -> Result<Vec<ExtraKey>, EventError> {
    if cursor.take_nil()? {
        return Ok(Vec::new());
    }
    list(cursor, |cursor| extra_key(cursor, MAX_EXTRA_DEPTH))
}

fn extra_key(cursor: &mut Cursor<'_>, depth_left: usize) -> Result<ExtraKey, EventError> {
    if is_array(cursor)? {
        let Some(depth_left) = depth_left.checked_sub(1) else { return cursor.fail("nested too deeply") };
        return Ok(ExtraKey::List(list(cursor, |cursor| extra_key(cursor, depth_left))?));
    }
    match cursor.peek()? {
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
            Ok(ExtraKey::Text(cursor.text()?.to_owned()))
        }
        Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => Ok(ExtraKey::Bytes(cursor.bytes()?.to_owned())),
        _ => match cursor.number()? {
            Number::Unsigned(value) => match i64::try_from(value) {
                Ok(value) => Ok(ExtraKey::Number(value)),
                Err(_) => cursor.fail("an extra key above 63 bits"),
            },
            Number::Negative(value) => Ok(ExtraKey::Number(value)),
        },
    }
}

fn is_map(cursor: &Cursor<'_>) -> Result<bool, EventError> {
    Ok(matches!(cursor.peek()?, Marker::FixMap(_) | Marker::Map16 | Marker::Map32))
}

fn is_array(cursor: &Cursor<'_>) -> Result<bool, EventError> {
    Ok(matches!(cursor.peek()?, Marker::FixArray(_) | Marker::Array16 | Marker::Array32))
}
