//! KV events as vLLM and SGLang publish them over `ZeroMQ`.
//!
//! A message is three frames: a topic, a sequence number of eight bytes, big endian, and a msgpack array of
//! the time of publication, the events and, mostly, the data parallel rank. Events are arrays that begin
//! with their name (vLLM before 0.24, older SGLang) or maps with a `type` (both since); a stream may mix them.
//! Fields that are not known are passed over, so are events of unknown types, which are counted.
//!
//! Nothing here trusts its input: a message that is malformed anywhere is refused as a whole, and no
//! allocation is larger than a small multiple of the message.

pub(crate) mod cursor;
mod fields;

use std::fmt;

use cursor::{Cursor, Number};
use fields::{Removed, Stored};

/// Why a message cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("KV event message, byte {offset}: {what}")]
pub struct EventError {
    /// What was found.
    pub what: &'static str,
    /// Where.
    pub offset: usize,
}

/// Where a topic says that a message comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topic<'a> {
    /// The engine's pod or address.
    pub pod: &'a str,
    /// The model; `None` where the topic does not say.
    pub model: Option<&'a str>,
}

/// An engine's name of a block: an integer, or the last eight bytes of a digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(pub u64);

/// What one message tells.
#[derive(Debug, Clone, PartialEq)]
pub struct EventBatch {
    /// Unix time of publication, in seconds.
    pub published_s: f64,
    /// What happened, in order.
    pub events: Vec<KvEvent>,
    /// The data parallel rank; `None` where the message does not say.
    pub data_parallel_rank: Option<u32>,
    /// Events of types that are not known here.
    pub n_unknown: usize,
}

/// One event.
#[derive(Debug, Clone, PartialEq)]
pub enum KvEvent {
    /// The engine has these blocks now.
    Stored(BlocksStored),
    /// The engine has lost these blocks.
    Removed(BlocksRemoved),
    /// The engine has lost all blocks.
    Cleared,
}

/// Blocks that an engine has now, one after the other in a prompt.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BlocksStored {
    /// Their names.
    pub hashes: Vec<EngineHash>,
    /// The block before the first; `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// Their tokens, all of them or none; of paired blocks one more, the one behind the last block.
    pub tokens: Vec<u32>,
    /// Whether each place stands for its token and the next one: `SGLang` with a draft model.
    pub is_paired: bool,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Where they are.
    pub medium: Medium,
    /// The adapter they were computed with.
    pub lora_name: Option<String>,
    /// For each block, or for none, what else its name stands for.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// What keeps them apart from the same tokens of others; vLLM has it among the extra keys instead.
    pub salt: Option<String>,
    /// Which of the engine's KV cache groups it is about.
    pub group_idx: Option<u32>,
    /// What the layers of that group look back at.
    pub attention: Attention,
}

/// Blocks that an engine has lost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlocksRemoved {
    /// Their names.
    pub hashes: Vec<EngineHash>,
    /// Where they were.
    pub medium: Medium,
    /// Which of the engine's KV cache groups it is about.
    pub group_idx: Option<u32>,
}

/// What the layers of a KV cache group look back at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Attention {
    /// Not said.
    #[default]
    Unknown,
    /// All tokens before.
    Full,
    /// The last ones, or a state: of a prefix only the end is needed.
    Partial,
}

/// The kind of place where an engine has blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Medium {
    /// Memory of the device: `GPU`, or nothing said.
    #[default]
    Gpu,
    /// Memory of the host: `CPU`, `CPU_PINNED`.
    Cpu,
    /// A disk: `STORAGE`, `DISK`.
    Disk,
    /// Another machine: `EXTERNAL`, `REMOTE`.
    Remote,
}

/// What a block's name stands for beside its tokens: an adapter, an image, a salt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ExtraKey {
    /// Text.
    Text(String),
    /// A digest.
    Bytes(Vec<u8>),
    /// A whole number.
    Number(i64),
    /// Several together.
    List(Vec<ExtraKey>),
}

impl BlocksStored {
    /// Whether tokens alone decide what is in them: no adapter, no image, no salt.
    pub fn is_plain(&self) -> bool {
        self.lora_name.is_none() && self.salt.is_none() && self.extra_keys.iter().all(Vec::is_empty)
    }
}

impl<'a> Topic<'a> {
    /// Reads `kv@<pod>@<model>`; any other text is the name of a pod.
    ///
    /// A model's name may have `@` in it, a pod's may not.
    ///
    /// # Errors
    /// If it is not UTF-8 or empty.
    pub fn parse(frame: &'a [u8]) -> Result<Self, EventError> {
        let text = std::str::from_utf8(frame)
            .map_err(|error| EventError { what: "a topic that is not UTF-8", offset: error.valid_up_to() })?;
        if text.is_empty() {
            return Err(EventError { what: "an empty topic", offset: 0 });
        }
        let named = text.strip_prefix("kv@").and_then(|rest| rest.split_once('@'));
        Ok(match named {
            Some((pod, model)) if !pod.is_empty() && !model.is_empty() => Self { pod, model: Some(model) },
            _ => Self { pod: text, model: None },
        })
    }
}

/// Reads the frame of a sequence number.
///
/// # Errors
/// If it has not eight bytes.
pub fn parse_sequence(frame: &[u8]) -> Result<u64, EventError> {
    let bytes = frame.try_into();
    bytes.map(u64::from_be_bytes).map_err(|_| EventError {
        what: "a sequence number that has not 8 bytes",
        offset: frame.len().min(8),
    })
}

impl EventBatch {
    /// Reads the payload of a message.
    ///
    /// # Errors
    /// Where the payload is not what an engine sends; nothing of it should be used then.
    pub fn decode(payload: &[u8]) -> Result<Self, EventError> {
        let mut cursor = Cursor::new(payload);
        let n_fields = cursor.array()?;
        if n_fields < 2 {
            return cursor.fail("a batch without events");
        }
        let published_s = cursor.seconds()?;
        let n_events = cursor.array()?;
        let mut batch = Self { published_s, events: Vec::new(), data_parallel_rank: None, n_unknown: 0 };
        for _ in 0..n_events {
            match decode_event(&mut cursor)? {
                Some(event) => batch.events.push(event),
                None => batch.n_unknown += 1,
            }
        }
        if n_fields > 2 && !cursor.take_nil()? {
            batch.data_parallel_rank = Some(cursor.small_number()?);
        }
        for _ in 3..n_fields {
            cursor.skip()?;
        }
        if !cursor.is_at_end() {
            return cursor.fail("bytes behind the batch");
        }
        Ok(batch)
    }
}

/// One event of either form; `None` if its type is not known.
fn decode_event(cursor: &mut Cursor<'_>) -> Result<Option<KvEvent>, EventError> {
    match cursor.peek()? {
        rmp::Marker::FixMap(_) | rmp::Marker::Map16 | rmp::Marker::Map32 => decode_map(cursor),
        _ => decode_array(cursor),
    }
}

fn decode_map(cursor: &mut Cursor<'_>) -> Result<Option<KvEvent>, EventError> {
    let n_pairs = cursor.map()?;
    // The tag need not come first, so it is looked for before the fields are read.
    let mut ahead = cursor.clone();
    let mut tag = None;
    for _ in 0..n_pairs {
        if ahead.text()? == "type" {
            tag = Some(ahead.text()?);
        } else {
            ahead.skip()?;
        }
    }
    let Some(tag) = tag else { return cursor.fail("an event without a type") };
    let mut event = Draft::new(tag);
    for _ in 0..n_pairs {
        let name = cursor.text()?;
        if name == "type" {
            cursor.skip()?;
        } else {
            event.read(name, cursor)?;
        }
    }
    event.finish(cursor)
}

fn decode_array(cursor: &mut Cursor<'_>) -> Result<Option<KvEvent>, EventError> {
    let n_fields = cursor.array()?;
    if n_fields == 0 {
        return cursor.fail("an event without a type");
    }
    let mut event = Draft::new(cursor.text()?);
    let names = event.field_names();
    for place in 1..n_fields {
        event.read(names.get(place - 1).copied().unwrap_or_default(), cursor)?;
    }
    event.finish(cursor)
}

/// An event whose fields are being read.
#[derive(Debug)]
enum Draft {
    Stored(Stored),
    Removed(Removed),
    Cleared,
    Unknown,
}

impl Draft {
    fn new(tag: &str) -> Self {
        match tag {
            "BlockStored" => Self::Stored(Stored::default()),
            "BlockRemoved" => Self::Removed(Removed::default()),
            "AllBlocksCleared" => Self::Cleared,
            _ => Self::Unknown,
        }
    }

    /// The fields in the order of the array form.
    fn field_names(&self) -> &'static [&'static str] {
        match self {
            Self::Stored(_) => Stored::FIELDS,
            Self::Removed(_) => Removed::FIELDS,
            Self::Cleared | Self::Unknown => &[],
        }
    }

    fn read(&mut self, name: &str, cursor: &mut Cursor<'_>) -> Result<(), EventError> {
        match self {
            Self::Stored(stored) => stored.read(name, cursor),
            Self::Removed(removed) => removed.read(name, cursor),
            Self::Cleared | Self::Unknown => cursor.skip(),
        }
    }

    fn finish(self, cursor: &Cursor<'_>) -> Result<Option<KvEvent>, EventError> {
        Ok(match self {
            Self::Stored(stored) => Some(KvEvent::Stored(stored.finish(cursor)?)),
            Self::Removed(removed) => Some(KvEvent::Removed(removed.finish(cursor)?)),
            Self::Cleared => Some(KvEvent::Cleared),
            Self::Unknown => None,
        })
    }
}

/// An engine's name of a block in any of its forms.
fn decode_hash(cursor: &mut Cursor<'_>) -> Result<EngineHash, EventError> {
    match cursor.peek()? {
        rmp::Marker::Bin8 | rmp::Marker::Bin16 | rmp::Marker::Bin32 => {
            let digest = cursor.bytes()?;
            match digest.last_chunk::<8>() {
                Some(last) => Ok(EngineHash(u64::from_be_bytes(*last))),
                None => cursor.fail("a digest below 8 bytes"),
            }
        }
        _ => Ok(EngineHash(match cursor.number()? {
            Number::Unsigned(value) => value,
            // SGLang's are signed: the same 64 bits.
            Number::Negative(value) => value.cast_unsigned(),
        })),
    }
}

impl fmt::Display for EngineHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}
