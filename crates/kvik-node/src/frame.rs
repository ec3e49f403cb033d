//! The frames of the socket: one to attach, one in answer. All numbers are little-endian; a text has its length in two
//! bytes before it.

use std::fmt;

use kvik_store::{ChunkFormat, DigestKey, Space, StoreOptions};
use kvik_types::{BlockSize, Namespace};

use crate::error::{NodeError, Result};

/// The first bytes of every frame, with the version of the frames and of the rings.
pub(crate) const MAGIC: [u8; 8] = *b"KVIKND04";

/// The longest text: a frame of five has room in the socket's.
const MAX_TEXT_BYTES: usize = 4096;

const ATTACHED: u8 = 1;
pub(crate) const REFUSED: u8 = 2;

/// What a client attaches for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To read and write chunks.
    Session,
    /// To receive which chunks there are.
    Watch,
    /// To ask for what people and tools do with a store: look up, pin, move, clear and the like.
    Manage,
    /// To read and write segments: their tails are kept whatever the daemon's settings say, and no index gets events of them.
    Segments,
}

/// What a client says of itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Attach {
    /// Model, element type and layout. The tenant is the daemon's to say.
    pub namespace: Namespace,
    /// The bytes of its chunks.
    pub format: ChunkFormat,
    /// Its rank, less than the format's number of ranks.
    pub rank: u16,
    /// What it proves its tenant with; empty without one.
    pub token: String,
    /// What it attaches for.
    pub purpose: Purpose,
}

/// What a client needs to name chunks as the daemon does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// Whose chunks the session sees.
    pub tenant: String,
    /// Tokens of a chunk.
    pub chunk_tokens: BlockSize,
    /// Whether the tokens behind the last full chunk are stored.
    pub stores_tails: bool,
    /// The key of the tenant's digests.
    pub digest_key: Option<DigestKey>,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Where other nodes read the daemon's chunks, `host:port`; `None` where they do not.
    pub peer_address: Option<String>,
}

/// What is left of a frame.
pub(crate) struct Fields<'a>(&'a [u8]);

impl Attach {
    /// The frame.
    pub fn encode(&self) -> Vec<u8> {
        let Self { namespace, format, rank, token, purpose } = self;
        let mut frame = MAGIC.to_vec();
        frame.push(match purpose {
            Purpose::Session => 0,
            Purpose::Watch => 1,
            Purpose::Manage => 2,
            Purpose::Segments => 3,
        });
        frame.extend(rank.to_le_bytes());
        frame.extend(format.n_layers.to_le_bytes());
        frame.extend(format.token_layer_bytes.to_le_bytes());
        frame.extend(format.n_ranks.to_le_bytes());
        frame.extend((format.block_tokens.get() as u64).to_le_bytes());
        for text in [&namespace.model, &namespace.dtype.to_string(), &namespace.layout, token] {
            push_text(&mut frame, text);
        }
        frame
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// If the bytes are no such frame; the error names the wrong field.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = Fields::after_magic(frame)?;
        let purpose = match fields.array()? {
            [0] => Purpose::Session,
            [1] => Purpose::Watch,
            [2] => Purpose::Manage,
            [3] => Purpose::Segments,
            [other] => return Err(NodeError::invalid("purpose", &other, "0 to 3")),
        };
        let rank = u16::from_le_bytes(fields.array()?);
        let format = ChunkFormat {
            n_layers: u32::from_le_bytes(fields.array()?),
            token_layer_bytes: u64::from_le_bytes(fields.array()?),
            n_ranks: u16::from_le_bytes(fields.array()?),
            block_tokens: fields.block_size("block_tokens")?,
        };
        if rank >= format.n_ranks {
            return Err(NodeError::invalid("rank", &rank, format!("less than the {} ranks", format.n_ranks)));
        }
        let model = fields.text("model")?;
        let dtype = fields.text("dtype")?;
        let dtype = dtype
            .parse()
            .map_err(|_| NodeError::invalid("dtype", &dtype, "f32, f16, bf16, fp8_e4m3, fp8_e5m2 or u8"))?;
        let namespace = Namespace { model, dtype, layout: fields.text("layout")?, tenant: String::new() };
        let token = fields.text("token")?;
        fields.end()?;
        Ok(Self { namespace, format, rank, token, purpose })
    }
}

impl fmt::Debug for Attach {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, format, rank, token: _, purpose } = self;
        formatter
            .debug_struct("Attach")
            .field("namespace", namespace)
            .field("format", format)
            .field("rank", rank)
            .field("purpose", purpose)
            .finish_non_exhaustive()
    }
}

impl Attached {
    /// Where chains are made with the names that the daemon uses.
    pub(crate) fn space(&self, namespace: &Namespace, format: ChunkFormat) -> Result<Space> {
        let options = StoreOptions {
            chunk_tokens: self.chunk_tokens,
            stores_tails: self.stores_tails,
            digest_key: self.digest_key.clone(),
            ..StoreOptions::default()
        };
        let namespace = Namespace { tenant: self.tenant.clone(), ..namespace.clone() };
        Ok(Space::detached(&namespace, format, &options)?)
    }

    /// The frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = [&MAGIC[..], &[ATTACHED]].concat();
        push_text(&mut frame, &self.tenant);
        frame.extend((self.chunk_tokens.get() as u64).to_le_bytes());
        frame.push(self.stores_tails.into());
        frame.push(self.digest_key.is_some().into());
        if let Some(key) = &self.digest_key {
            frame.extend(key.expose());
        }
        frame.extend(self.arena_bytes.to_le_bytes());
        push_text(&mut frame, self.peer_address.as_deref().unwrap_or_default());
        frame
    }

    /// Reads the daemon's answer.
    ///
    /// # Errors
    /// If it is a refusal, or no answer.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = Fields::after_magic(frame)?;
        match fields.array()? {
            [ATTACHED] => {}
            [REFUSED] => return Err(NodeError::Refused { reason: fields.text("reason")? }),
            [kind] => return Err(NodeError::invalid("kind of frame", &kind, "1 or 2")),
        }
        let tenant = fields.text("tenant")?;
        let chunk_tokens = fields.block_size("chunk_tokens")?;
        let stores_tails = fields.flag("stores_tails")?;
        let digest_key =
            if fields.flag("digest_key")? { Some(DigestKey::from_exposed(fields.array()?)) } else { None };
        let arena_bytes = u64::from_le_bytes(fields.array()?);
        let peer_address = Some(fields.text("peer_address")?).filter(|address| !address.is_empty());
        fields.end()?;
        Ok(Self { tenant, chunk_tokens, stores_tails, digest_key, arena_bytes, peer_address })
    }
}

/// The frame that says why a client is not served.
pub(crate) fn refusal(reason: &str) -> Vec<u8> {
    let mut frame = [&MAGIC[..], &[REFUSED]].concat();
    push_text(&mut frame, reason);
    frame
}

pub(crate) fn push_text(frame: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(MAX_TEXT_BYTES)];
    frame.extend((text.len() as u16).to_le_bytes());
    frame.extend(text.as_bytes());
}

// === impl Fields ===

impl<'a> Fields<'a> {
    pub(crate) fn after_magic(frame: &'a [u8]) -> Result<Self> {
        let mut fields = Self(frame);
        let magic: [u8; MAGIC.len()] = fields.array()?;
        if magic == MAGIC {
            Ok(fields)
        } else {
            Err(NodeError::invalid("start of a frame", &"another", "KVIKND04"))
        }
    }

    pub(crate) fn take(&mut self, n_bytes: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self
            .0
            .split_at_checked(n_bytes)
            .ok_or_else(|| NodeError::invalid("length of a frame", &self.0.len(), "all of its fields"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn text(&mut self, field: &'static str) -> Result<String> {
        let n_bytes = usize::from(u16::from_le_bytes(self.array()?));
        if n_bytes > MAX_TEXT_BYTES {
            return Err(NodeError::invalid(
                field,
                &format!("{n_bytes} bytes"),
                format!("{MAX_TEXT_BYTES} bytes"),
            ));
        }
        let text = std::str::from_utf8(self.take(n_bytes)?);
        text.map(str::to_owned).map_err(|_| NodeError::invalid(field, &"other bytes", "UTF-8"))
    }

    pub(crate) fn flag(&mut self, field: &'static str) -> Result<bool> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(NodeError::invalid(field, &other, "0 or 1")),
        }
    }

    pub(crate) fn block_size(&mut self, field: &'static str) -> Result<BlockSize> {
        let n_tokens = u64::from_le_bytes(self.array()?);
        let size = usize::try_from(n_tokens).ok().and_then(|n_tokens| BlockSize::try_new(n_tokens).ok());
        size.ok_or_else(|| NodeError::invalid(field, &n_tokens, "a number of tokens of a block"))
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    pub(crate) fn end(&self) -> Result<()> {
        match self.0.len() {
            0 => Ok(()),
            n_bytes => {
                Err(NodeError::invalid("length of a frame", &format!("{n_bytes} more"), "nothing behind it"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvik_types::Dtype;

    use super::*;

    fn attach() -> Attach {
        let namespace = Namespace {
            model: "m".to_owned(),
            dtype: Dtype::BF16,
            layout: "l".to_owned(),
            tenant: String::new(),
        };
        let block_tokens = BlockSize::try_new(16).unwrap();
        let format = ChunkFormat { n_layers: 4, token_layer_bytes: 256, n_ranks: 2, block_tokens };
        Attach { namespace, format, rank: 1, token: "secret token".to_owned(), purpose: Purpose::Watch }
    }

    fn attached(digest_key: Option<DigestKey>) -> Attached {
        let chunk_tokens = BlockSize::try_new(256).unwrap();
        let digest_key_is_set = digest_key.is_some();
        Attached {
            tenant: "t".to_owned(),
            chunk_tokens,
            stores_tails: true,
            digest_key,
            arena_bytes: 1 << 40,
            peer_address: digest_key_is_set.then(|| "node-2:9106".to_owned()),
        }
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        for purpose in [Purpose::Session, Purpose::Watch, Purpose::Manage, Purpose::Segments] {
            let attach = Attach { purpose, ..attach() };
            assert_eq!(Attach::decode(&attach.encode()).unwrap(), attach);
        }
        let mut unknown = attach().encode();
        unknown[MAGIC.len()] = 4;
        assert!(Attach::decode(&unknown).unwrap_err().to_string().contains("`purpose` is 4"));
        for key in [None, Some(DigestKey::from_secret(b"secret"))] {
            assert_eq!(Attached::decode(&attached(key.clone()).encode()).unwrap(), attached(key));
        }
        let error = Attached::decode(&refusal("not you")).unwrap_err();
        assert_eq!(error.to_string(), "the store daemon refused: not you");
    }

    #[test]
    fn a_token_is_not_printed() {
        assert!(!format!("{:?}", attach()).contains("secret token"));
    }

    #[test]
    fn frames_that_are_cut_or_longer_are_refused() {
        for frame in [attach().encode(), attached(None).encode(), refusal("why")] {
            for n_bytes in 0..frame.len() {
                assert!(Attach::decode(&frame[..n_bytes]).is_err(), "{n_bytes}");
                assert!(Attached::decode(&frame[..n_bytes]).is_err(), "{n_bytes}");
            }
            let longer = [&frame[..], &[0]].concat();
            assert!(Attach::decode(&longer).is_err() && Attached::decode(&longer).is_err());
        }
        let mut wrong = attach();
        wrong.rank = 2;
        assert!(Attach::decode(&wrong.encode()).unwrap_err().to_string().contains("`rank` is 2"));
    }
}
