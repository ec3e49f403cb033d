//! The frames of a client that manages: one request, then one answer.
//!
//! A request about a chain follows [`ManageRequest::Chunks`], which name the chunks of the chain and prove them, as many as
//! one frame has room for at a time. Tokens are never sent. All numbers are little-endian.

use kvik_proto::cache::CacheStats;
use kvik_store::{Lookup, TierName};
use kvik_tier::{TierKind, TokenDigest};
use kvik_types::BlockHash;

use crate::error::{NodeError, Result};
use crate::frame::{Fields, MAGIC, push_text};
use crate::operation::{tier_code, tier_of};

/// Chunks in one frame: it has room in the socket's.
pub(crate) const MAX_FRAME_CHUNKS: usize = 512;

/// The longest statistics in one frame: it has room in the socket's.
pub(crate) const MAX_STATS_BYTES: usize = 32 << 10;

/// Pins of a tenant: each takes memory of the daemon until it is taken away.
pub(crate) const MAX_PINS: usize = 1 << 16;

/// Name and digest.
const CHUNK_BYTES: usize = 16 + 32;

/// Tiers in a list: as many as a store can have.
const MAX_TIERS: usize = 8;

/// Stands for no kind of tier.
const NO_KIND: u8 = u8::MAX;

/// What a managing client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManageRequest {
    /// The next chunks of the chain that the next request is about; answered with [`ManageAnswer::Done`].
    Chunks(Vec<(BlockHash, TokenDigest)>),
    /// How much of the chain is there; answered with [`ManageAnswer::Found`].
    Lookup {
        /// Tokens of the chain.
        n_tokens: u64,
        /// Whether remote tiers are left out.
        is_local: bool,
    },
    /// Begin to load the chain into memory; answered with [`ManageAnswer::Prefetch`].
    Prefetch {
        /// Tokens of the chain.
        n_tokens: u64,
        /// Only what this tier has; `None` for all.
        tier: Option<TierName>,
    },
    /// Whether a prefetch of this connection still loads; answered with [`ManageAnswer::Is`].
    IsLoading {
        /// Its number.
        prefetch: u64,
    },
    /// End a prefetch of this connection; answered with [`ManageAnswer::Is`], which says whether it still loaded.
    Cancel {
        /// Its number.
        prefetch: u64,
    },
    /// Keep the chain in memory; answered with [`ManageAnswer::Count`] of the tokens that are kept.
    Pin {
        /// Tokens of the chain.
        n_tokens: u64,
    },
    /// Keep the chain in memory for some time at most; answered as [`ManageRequest::Pin`] is.
    PinFor {
        /// Tokens of the chain.
        n_tokens: u64,
        /// The longest time, in milliseconds.
        time_ms: u64,
    },
    /// Take one pin away; answered with [`ManageAnswer::Is`], which says whether there was one.
    Unpin {
        /// Tokens of the chain.
        n_tokens: u64,
    },
    /// Copy or move the chain; answered with [`ManageAnswer::Count`] of the chunks that are in the new tier.
    Relocate {
        /// Tokens of the chain.
        n_tokens: u64,
        /// The tier that has them.
        from: TierName,
        /// The tier that shall have them.
        to: TierName,
        /// Whether they also stay where they are.
        keeps_source: bool,
    },
    /// Forget the chain, or all of the client's namespace; answered with [`ManageAnswer::Cleared`].
    Clear {
        /// Tokens of the chain; `None` for the namespace.
        n_tokens: Option<u64>,
        /// Only these tiers; `None` for all.
        tiers: Option<Vec<TierName>>,
    },
    /// What the store counted, and the state of its tiers; answered with [`ManageAnswer::Stats`].
    Stats,
    /// Write what one tier has of the chain, from its first chunk on, into a memory file that goes with the frame, one
    /// chunk behind the other; answered with [`ManageAnswer::Count`] of the chunks.
    Read {
        /// Tokens of the chain.
        n_tokens: u64,
        /// The tier.
        tier: TierName,
    },
    /// Store the chunks of the chain, which lie in a memory file that goes with the frame, in one tier alone; answered with
    /// [`ManageAnswer::Written`].
    Write {
        /// Tokens of the chain.
        n_tokens: u64,
        /// The tier.
        tier: TierName,
    },
}

/// What a managing client is answered.
#[derive(Debug, Clone, PartialEq)]
pub enum ManageAnswer {
    /// It is done.
    Done,
    /// How much is there.
    Found(Lookup),
    /// A prefetch was begun.
    Prefetch {
        /// Its number, which no other of the connection has.
        number: u64,
        /// Whether it still loads.
        is_loading: bool,
    },
    /// Yes or no.
    Is(bool),
    /// So many.
    Count(u64),
    /// How many chunks left each tier.
    Cleared(Vec<(TierName, usize)>),
    /// The store's counts and tiers.
    Stats(Box<CacheStats>),
    /// It is not done, and the connection goes on.
    Refused {
        /// Why not.
        reason: String,
    },
    /// What became of chunks that were to be stored, up to the first that was refused.
    Written {
        /// Those that are new.
        n_stored: u64,
        /// Those that were there.
        n_present: u64,
    },
    /// Another daemon takes over. What was asked and not answered is not done; the connection ends.
    Moving,
}

// === impl ManageRequest ===

impl ManageRequest {
    /// The frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = MAGIC.to_vec();
        frame.push(self.code());
        match self {
            Self::Chunks(chunks) => {
                for (name, digest) in chunks {
                    frame.extend(name.0);
                    frame.extend(digest.0);
                }
            }
            Self::Lookup { n_tokens, is_local } => {
                push_number(&mut frame, *n_tokens);
                frame.push((*is_local).into());
            }
            Self::Prefetch { n_tokens, tier } => {
                push_number(&mut frame, *n_tokens);
                push_name(&mut frame, tier.as_ref());
            }
            Self::Pin { n_tokens: number }
            | Self::Unpin { n_tokens: number }
            | Self::IsLoading { prefetch: number }
            | Self::Cancel { prefetch: number } => push_number(&mut frame, *number),
            Self::PinFor { n_tokens, time_ms } => {
                push_number(&mut frame, *n_tokens);
                push_number(&mut frame, *time_ms);
            }
            Self::Relocate { n_tokens, from, to, keeps_source } => {
                push_number(&mut frame, *n_tokens);
                push_name(&mut frame, Some(from));
                push_name(&mut frame, Some(to));
                frame.push((*keeps_source).into());
            }
            Self::Clear { n_tokens, tiers } => {
                frame.push(n_tokens.is_some().into());
                push_number(&mut frame, n_tokens.unwrap_or(0));
                frame.push(tiers.is_some().into());
                let tiers = tiers.as_deref().unwrap_or_default();
                frame.push(tiers.len() as u8);
                for tier in tiers {
                    push_name(&mut frame, Some(tier));
                }
            }
            Self::Stats => {}
            Self::Read { n_tokens, tier } | Self::Write { n_tokens, tier } => {
                push_number(&mut frame, *n_tokens);
                push_name(&mut frame, Some(tier));
            }
        }
        frame
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// If the bytes are no such frame; the error names the wrong field.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = Fields::after_magic(frame)?;
        let [code] = fields.array()?;
        let request = match code {
            0 => {
                let (chunks, rest) = fields.rest().as_chunks::<CHUNK_BYTES>();
                if !rest.is_empty() || chunks.len() > MAX_FRAME_CHUNKS {
                    let allowed = format!("whole ones, at most {MAX_FRAME_CHUNKS}");
                    return Err(NodeError::invalid("chunks", &chunks.len(), allowed));
                }
                Self::Chunks(chunks.iter().map(chunk_of).collect::<Result<_>>()?)
            }
            1 => Self::Lookup { n_tokens: number(&mut fields)?, is_local: fields.flag("is_local")? },
            2 => Self::Prefetch { n_tokens: number(&mut fields)?, tier: optional_tier(&mut fields)? },
            3 => Self::IsLoading { prefetch: number(&mut fields)? },
            4 => Self::Cancel { prefetch: number(&mut fields)? },
            5 => Self::Pin { n_tokens: number(&mut fields)? },
            6 => Self::Unpin { n_tokens: number(&mut fields)? },
            7 => Self::Relocate {
                n_tokens: number(&mut fields)?,
                from: tier(&mut fields)?,
                to: tier(&mut fields)?,
                keeps_source: fields.flag("keeps_source")?,
            },
            8 => {
                let (has_chain, n_tokens) = (fields.flag("chain")?, number(&mut fields)?);
                let has_tiers = fields.flag("tiers")?;
                let tiers = list(&mut fields, tier)?;
                if (!has_chain && n_tokens != 0) || (!has_tiers && !tiers.is_empty()) {
                    return Err(NodeError::invalid("clear", &"of nothing", "a chain or a namespace"));
                }
                Self::Clear { n_tokens: has_chain.then_some(n_tokens), tiers: has_tiers.then_some(tiers) }
            }
            9 => Self::Stats,
            10 => Self::Read { n_tokens: number(&mut fields)?, tier: tier(&mut fields)? },
            11 => Self::Write { n_tokens: number(&mut fields)?, tier: tier(&mut fields)? },
            12 => Self::PinFor { n_tokens: number(&mut fields)?, time_ms: number(&mut fields)? },
            other => return Err(NodeError::invalid("request", &other, "0 to 12")),
        };
        fields.end()?;
        Ok(request)
    }

    fn code(&self) -> u8 {
        match self {
            Self::Chunks(_) => 0,
            Self::Lookup { .. } => 1,
            Self::Prefetch { .. } => 2,
            Self::IsLoading { .. } => 3,
            Self::Cancel { .. } => 4,
            Self::Pin { .. } => 5,
            Self::Unpin { .. } => 6,
            Self::Relocate { .. } => 7,
            Self::Clear { .. } => 8,
            Self::Stats => 9,
            Self::Read { .. } => 10,
            Self::Write { .. } => 11,
            Self::PinFor { .. } => 12,
        }
    }
}

// === impl ManageAnswer ===

impl ManageAnswer {
    /// The frame. Statistics that have no room in one are a refusal.
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = MAGIC.to_vec();
        match self {
            Self::Done => frame.push(0),
            Self::Found(Lookup { n_tokens, n_chunks, tokens_by_tier, slowest_tier }) => {
                frame.push(1);
                push_number(&mut frame, *n_tokens as u64);
                push_number(&mut frame, *n_chunks as u64);
                push_counts(&mut frame, tokens_by_tier);
                frame.push(slowest_tier.map_or(NO_KIND, |kind| tier_code(kind) as u8));
            }
            Self::Prefetch { number, is_loading } => {
                frame.push(2);
                push_number(&mut frame, *number);
                frame.push((*is_loading).into());
            }
            Self::Is(is_so) => frame.extend([3, (*is_so).into()]),
            Self::Count(count) => {
                frame.push(4);
                push_number(&mut frame, *count);
            }
            Self::Cleared(chunks) => {
                frame.push(5);
                push_counts(&mut frame, chunks);
            }
            Self::Stats(stats) => match serde_json::to_vec(stats) {
                Ok(text) if text.len() <= MAX_STATS_BYTES => {
                    frame.push(6);
                    frame.extend(text);
                }
                _ => {
                    let reason = "the statistics are longer than a frame".to_owned();
                    return Self::Refused { reason }.encode();
                }
            },
            Self::Refused { reason } => {
                frame.push(7);
                push_text(&mut frame, reason);
            }
            Self::Moving => frame.push(8),
            Self::Written { n_stored, n_present } => {
                frame.push(9);
                push_number(&mut frame, *n_stored);
                push_number(&mut frame, *n_present);
            }
        }
        frame
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// If the bytes are no such frame; the error names the wrong field.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = Fields::after_magic(frame)?;
        let [code] = fields.array()?;
        let answer = match code {
            0 => Self::Done,
            1 => Self::Found(Lookup {
                n_tokens: count(&mut fields)?,
                n_chunks: count(&mut fields)?,
                tokens_by_tier: list(&mut fields, tier_count)?,
                slowest_tier: optional_kind(&mut fields)?,
            }),
            2 => Self::Prefetch { number: number(&mut fields)?, is_loading: fields.flag("is_loading")? },
            3 => Self::Is(fields.flag("answer")?),
            4 => Self::Count(number(&mut fields)?),
            5 => Self::Cleared(list(&mut fields, tier_count)?),
            6 => {
                let text = fields.rest();
                if text.len() > MAX_STATS_BYTES {
                    return Err(NodeError::invalid("statistics", &text.len(), "what a frame has room for"));
                }
                let refused =
                    |_| NodeError::invalid("statistics", &"other bytes", "JSON of counts and tiers");
                Self::Stats(serde_json::from_slice(text).map_err(refused)?)
            }
            7 => Self::Refused { reason: fields.text("reason")? },
            8 => Self::Moving,
            9 => Self::Written { n_stored: number(&mut fields)?, n_present: number(&mut fields)? },
            other => return Err(NodeError::invalid("answer", &other, "0 to 9")),
        };
        fields.end()?;
        Ok(answer)
    }
}

fn push_number(frame: &mut Vec<u8>, number: u64) {
    frame.extend(number.to_le_bytes());
}

/// Its length, then the name; the length is 0 where there is none.
fn push_name(frame: &mut Vec<u8>, name: Option<&TierName>) {
    let text = name.map_or("", TierName::as_str);
    frame.push(text.len() as u8);
    frame.extend(text.as_bytes());
}

fn push_counts(frame: &mut Vec<u8>, counts: &[(TierName, usize)]) {
    frame.push(counts.len() as u8);
    for (tier, count) in counts {
        push_name(frame, Some(tier));
        push_number(frame, *count as u64);
    }
}

fn number(fields: &mut Fields<'_>) -> Result<u64> {
    Ok(u64::from_le_bytes(fields.array()?))
}

fn count(fields: &mut Fields<'_>) -> Result<usize> {
    let number = number(fields)?;
    usize::try_from(number).map_err(|_| NodeError::invalid("count", &number, "what memory can hold"))
}

fn optional_tier(fields: &mut Fields<'_>) -> Result<Option<TierName>> {
    let [n_bytes] = fields.array()?;
    if n_bytes == 0 {
        return Ok(None);
    }
    let refused = || NodeError::invalid("tier", &format!("{n_bytes} bytes"), "the name of a tier");
    let text = std::str::from_utf8(fields.take(n_bytes.into())?).map_err(|_| refused())?;
    TierName::try_new(text).map(Some).map_err(|_| refused())
}

fn tier(fields: &mut Fields<'_>) -> Result<TierName> {
    optional_tier(fields)?.ok_or_else(|| NodeError::invalid("tier", &"empty", "the name of a tier"))
}

fn optional_kind(fields: &mut Fields<'_>) -> Result<Option<TierKind>> {
    let [code] = fields.array()?;
    if code == NO_KIND {
        return Ok(None);
    }
    let kind = tier_of(code.into());
    kind.map(Some).ok_or_else(|| NodeError::invalid("kind of a tier", &code, "the number of one"))
}

fn tier_count(fields: &mut Fields<'_>) -> Result<(TierName, usize)> {
    Ok((tier(fields)?, count(fields)?))
}

fn list<T>(fields: &mut Fields<'_>, read: fn(&mut Fields<'_>) -> Result<T>) -> Result<Vec<T>> {
    let [n_items] = fields.array()?;
    if usize::from(n_items) > MAX_TIERS {
        return Err(NodeError::invalid("tiers", &n_items, format!("at most {MAX_TIERS}")));
    }
    (0..n_items).map(|_| read(fields)).collect()
}

fn chunk_of(bytes: &[u8; CHUNK_BYTES]) -> Result<(BlockHash, TokenDigest)> {
    let cut = || NodeError::invalid("chunk", &"cut off", "name and digest");
    let (name, digest) = bytes.split_first_chunk().ok_or_else(cut)?;
    Ok((BlockHash(*name), TokenDigest(*digest.first_chunk().ok_or_else(cut)?)))
}

#[cfg(test)]
mod tests;
