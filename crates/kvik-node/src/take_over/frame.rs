//! The frames between two daemons, one of which takes over from the other.

use std::fmt;

use kvik_store::DigestKey;
use kvik_types::BlockSize;

use crate::error::{NodeError, Result};
use crate::frame::{Fields, MAGIC, REFUSED, push_text, refusal};

/// Where the frame of a client says what it attaches for, this says that a daemon takes over. No other frame has it.
const TAKE_OVER: u8 = 9;

const TENANT: u8 = 6;
const LISTENER: u8 = 7;
const SERVING: u8 = 8;

/// The longest frame of terms: it has room in the socket's.
const MAX_TERMS_BYTES: usize = 32 << 10;

/// What the new daemon asks: to go on with the tenants of the old one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakeOver {
    /// All tenants of the new daemon.
    pub tenants: Vec<TenantTerms>,
}

/// What two daemons must have in common about a tenant.
#[derive(Clone, PartialEq, Eq)]
pub struct TenantTerms {
    /// Its name.
    pub name: String,
    /// The token of its clients, which proves that the new daemon may have its chunks; empty without one.
    pub token: String,
    /// Tokens of a chunk.
    pub chunk_tokens: BlockSize,
    /// Whether the tokens behind the last full chunk are stored.
    pub stores_tails: bool,
    /// The key of its digests.
    pub digest_key: Option<DigestKey>,
    /// Memory for its chunks; 0 takes what there is.
    pub ram_bytes: u64,
}

/// What the two daemons say after that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TakeOverFrame {
    /// The old daemon: here is a tenant's memory. Two descriptors go with it, the arena and the list of its chunks.
    Tenant {
        /// Its name.
        name: String,
    },
    /// The old daemon: here is the socket, whose descriptor goes with it. It is the last frame.
    Listener,
    /// The new daemon: it serves from now on.
    Serving,
    /// Either: it does not go on with this.
    Refused {
        /// Why not.
        reason: String,
    },
}

/// Whether a client's first frame is that of a daemon that takes over.
pub(crate) fn is_take_over(frame: &[u8]) -> bool {
    frame.strip_prefix(&MAGIC).is_some_and(|body| body.first() == Some(&TAKE_OVER))
}

impl TakeOver {
    /// The frame.
    ///
    /// # Errors
    /// If there are more tenants than a frame has room for.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut frame = MAGIC.to_vec();
        frame.push(TAKE_OVER);
        frame.extend((self.tenants.len() as u16).to_le_bytes());
        for terms in &self.tenants {
            let TenantTerms { name, token, chunk_tokens, stores_tails, digest_key, ram_bytes } = terms;
            push_text(&mut frame, name);
            push_text(&mut frame, token);
            frame.extend((chunk_tokens.get() as u64).to_le_bytes());
            frame.push((*stores_tails).into());
            frame.push(digest_key.is_some().into());
            frame.extend(digest_key.iter().flat_map(DigestKey::expose));
            frame.extend(ram_bytes.to_le_bytes());
        }
        if frame.len() > MAX_TERMS_BYTES {
            let allowed = format!("as many as fit into {MAX_TERMS_BYTES} bytes with their tokens");
            return Err(NodeError::invalid("tenants", &self.tenants.len(), allowed));
        }
        Ok(frame)
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// If the bytes are no such frame; the error names the wrong field.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = Fields::after_magic(frame)?;
        let [purpose] = fields.array()?;
        if purpose != TAKE_OVER {
            return Err(NodeError::invalid("purpose", &purpose, TAKE_OVER.to_string()));
        }
        let n_tenants = u16::from_le_bytes(fields.array()?);
        let mut tenants = Vec::new();
        for _ in 0..n_tenants {
            tenants.push(TenantTerms {
                name: fields.text("tenant")?,
                token: fields.text("token")?,
                chunk_tokens: fields.block_size("chunk_tokens")?,
                stores_tails: fields.flag("stores_tails")?,
                digest_key: if fields.flag("digest_key")? {
                    Some(DigestKey::from_exposed(fields.array()?))
                } else {
                    None
                },
                ram_bytes: u64::from_le_bytes(fields.array()?),
            });
        }
        fields.end()?;
        Ok(Self { tenants })
    }
}

impl fmt::Debug for TenantTerms {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, token: _, chunk_tokens, stores_tails, digest_key: _, ram_bytes } = self;
        formatter
            .debug_struct("TenantTerms")
            .field("name", name)
            .field("chunk_tokens", chunk_tokens)
            .field("stores_tails", stores_tails)
            .field("ram_bytes", ram_bytes)
            .finish_non_exhaustive()
    }
}

impl TakeOverFrame {
    /// The frame.
    pub fn encode(&self) -> Vec<u8> {
        let with_kind = |kind: u8| [&MAGIC[..], &[kind]].concat();
        match self {
            Self::Tenant { name } => {
                let mut frame = with_kind(TENANT);
                push_text(&mut frame, name);
                frame
            }
            Self::Listener => with_kind(LISTENER),
            Self::Serving => with_kind(SERVING),
            Self::Refused { reason } => refusal(reason),
        }
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// If the bytes are no such frame.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = Fields::after_magic(frame)?;
        let decoded = match fields.array()? {
            [TENANT] => Self::Tenant { name: fields.text("tenant")? },
            [LISTENER] => Self::Listener,
            [SERVING] => Self::Serving,
            [REFUSED] => Self::Refused { reason: fields.text("reason")? },
            [kind] => return Err(NodeError::invalid("kind of frame", &kind, "2, 6, 7 or 8")),
        };
        fields.end()?;
        Ok(decoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_over() -> TakeOver {
        let terms = |name: &str, token: &str, digest_key| TenantTerms {
            name: name.to_owned(),
            token: token.to_owned(),
            chunk_tokens: BlockSize::try_new(256).unwrap(),
            stores_tails: true,
            digest_key,
            ram_bytes: 1 << 40,
        };
        let key = DigestKey::from_secret(b"secret");
        TakeOver { tenants: vec![terms("a", "secret token", Some(key)), terms("", "", None)] }
    }

    #[test]
    fn frames_are_read_as_they_were_written_and_what_is_cut_is_refused() {
        let ask = take_over().encode().unwrap();
        assert_eq!(TakeOver::decode(&ask).unwrap(), take_over());
        assert!(is_take_over(&ask));
        assert!(crate::frame::Attach::decode(&ask).is_err(), "it is no client");
        for n_bytes in 0..ask.len() {
            assert!(TakeOver::decode(&ask[..n_bytes]).is_err(), "{n_bytes}");
        }
        for frame in [
            TakeOverFrame::Tenant { name: "t".to_owned() },
            TakeOverFrame::Listener,
            TakeOverFrame::Serving,
            TakeOverFrame::Refused { reason: "why".to_owned() },
        ] {
            let bytes = frame.encode();
            assert_eq!(TakeOverFrame::decode(&bytes).unwrap(), frame);
            assert!(!is_take_over(&bytes));
            assert!(TakeOverFrame::decode(&bytes[..bytes.len() - 1]).is_err());
            assert!(TakeOverFrame::decode(&[&bytes[..], &[0]].concat()).is_err());
        }
    }

    #[test]
    fn tokens_are_not_printed_and_too_many_tenants_are_refused() {
        let mut ask = take_over();
        assert!(!format!("{ask:?}").contains("secret"));
        ask.tenants = vec![ask.tenants[0].clone(); 1000];
        assert!(ask.encode().unwrap_err().to_string().contains("`tenants` is 1000"));
    }
}
