//! The bytes between the memory service and its clients.
//!
//! ```text
//! request  "KVMQ"  version u16  op u8  0 u8  number u32, then by op:
//!   1 open       min_bytes u64  max_bytes u64  weight u32  priority u32  ipc_name text  label text
//!   2 claim      n_bytes u64  timeout_ms u32
//!   3 give back  n_bytes u64
//!   4 stats
//!   5 set limit  limit_bytes u64
//! reply    "KVMA"  version u16  op u8  status u8  number u32
//!          held_bytes u64  claimable_bytes u64  limit_bytes u64, then
//!          of stats: budget_bytes u64  device_held_bytes u64  group_held_bytes u64
//!          detail text
//! notice   "KVMN"  version u16  kind u8  0 u8  n_bytes u64
//!   1 reclaim    others need so many bytes of what is held
//!   2 limit      the limit is so many bytes now
//! text     n_bytes u16, then UTF-8
//! ```
//!
//! `u64::MAX` for a limit stands for all that the device has. Status: 0 done, 1 device full, 2 group limit,
//! 3 over share (1 to 3: nothing is held of what was claimed), 4 refused, and `detail` says why.
//!
//! What decodes is exactly what encoding gives: no byte is ignored.

use crate::Result;
use crate::ledger::Policy;
use crate::pages::Shortage;
use crate::wire::{Fields, cut, invalid};

#[cfg(test)]
mod tests;

/// The version of this protocol; both sides have the same or do not talk.
pub const VERSION: u16 = 1;

/// The most bytes of a text; a longer detail is cut.
pub const MAX_TEXT_BYTES: usize = 512;

const REQUEST_MAGIC: [u8; 4] = *b"KVMQ";
const REPLY_MAGIC: [u8; 4] = *b"KVMA";
const NOTICE_MAGIC: [u8; 4] = *b"KVMN";
const UNLIMITED: u64 = u64::MAX;
const LENGTH: &str = "memory frame length";

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Names the request in its reply.
    pub number: u32,
    /// What it asks for.
    pub body: RequestBody,
}

/// The kinds of requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestBody {
    /// Opens the session; the first request of every connection, and only that.
    Open {
        /// The group; empty for the server's own.
        ipc_name: String,
        /// What the client calls itself, for tools.
        label: String,
        /// The policy of the group if it does not exist yet.
        policy: Policy,
    },
    /// Claims grants.
    Claim {
        /// How much, a multiple of 2 MiB, all or nothing.
        n_bytes: u64,
        /// How long to wait for others to give it back; 0 does not wait.
        timeout_ms: u32,
    },
    /// Gives grants back.
    GiveBack {
        /// How much, a multiple of 2 MiB, no more than is held.
        n_bytes: u64,
    },
    /// Asks for the numbers of the device.
    Stats,
    /// Sets the limit of the session's group.
    SetLimit {
        /// The limit; `None` for all that the device has.
        limit_bytes: Option<u64>,
    },
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The request's number.
    pub number: u32,
    /// What came of it.
    pub outcome: Outcome,
    /// The session afterwards.
    pub standing: Standing,
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The session is open.
    Opened,
    /// The grant is held.
    Granted,
    /// Nothing is held of what was claimed.
    Denied(Shortage),
    /// The grant went back.
    GivenBack,
    /// The numbers of the device.
    Stats(DeviceStanding),
    /// The limit holds; for new claims only where more is held.
    LimitSet,
    /// Nothing changed.
    Refused {
        /// The request's op.
        op: u8,
        /// Why.
        reason: String,
    },
}

/// What a session has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Standing {
    /// What it holds.
    pub held_bytes: u64,
    /// What it may hold in all now; less than what is held means that the limit fell below it.
    pub claimable_bytes: u64,
    /// What it may hold if all others gave back what they can.
    pub limit_bytes: u64,
}

/// What the device has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceStanding {
    /// What all members together may hold.
    pub budget_bytes: u64,
    /// What they hold.
    pub held_bytes: u64,
    /// What the session's group holds.
    pub group_held_bytes: u64,
}

/// A message to a client without a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// Others wait for memory that this client holds above its share; they ask again while they wait.
    Reclaim {
        /// How much it is asked to give back.
        n_bytes: u64,
    },
    /// The limit moved.
    Limit {
        /// What the group may hold now.
        limit_bytes: u64,
    },
}

/// A frame from the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromServer {
    /// An answer.
    Reply(Reply),
    /// Something unasked.
    Notice(Notice),
}

// === impl Request ===

impl RequestBody {
    /// The number of the kind.
    pub fn op(&self) -> u8 {
        match self {
            Self::Open { .. } => 1,
            Self::Claim { .. } => 2,
            Self::GiveBack { .. } => 3,
            Self::Stats => 4,
            Self::SetLimit { .. } => 5,
        }
    }
}

impl Request {
    /// The frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = head(REQUEST_MAGIC, self.body.op(), 0);
        frame.extend_from_slice(&self.number.to_le_bytes());
        match &self.body {
            RequestBody::Open { ipc_name, label, policy } => {
                frame.extend_from_slice(&policy.min_bytes.to_le_bytes());
                frame.extend_from_slice(&policy.max_bytes.unwrap_or(UNLIMITED).to_le_bytes());
                frame.extend_from_slice(&policy.weight.to_le_bytes());
                frame.extend_from_slice(&policy.priority.to_le_bytes());
                put_text(&mut frame, ipc_name);
                put_text(&mut frame, label);
            }
            RequestBody::Claim { n_bytes, timeout_ms } => {
                frame.extend_from_slice(&n_bytes.to_le_bytes());
                frame.extend_from_slice(&timeout_ms.to_le_bytes());
            }
            RequestBody::GiveBack { n_bytes } => frame.extend_from_slice(&n_bytes.to_le_bytes()),
            RequestBody::Stats => {}
            RequestBody::SetLimit { limit_bytes } => {
                frame.extend_from_slice(&limit_bytes.unwrap_or(UNLIMITED).to_le_bytes());
            }
        }
        frame
    }

    /// Reads a frame, all of it.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = Fields::new(LENGTH, frame);
        let (op, zero) = take_head(&mut fields, REQUEST_MAGIC)?;
        check_zero(zero)?;
        let number = fields.u32()?;
        let body = match op {
            1 => {
                let policy = Policy {
                    min_bytes: fields.u64()?,
                    max_bytes: Some(fields.u64()?).filter(|&max_bytes| max_bytes != UNLIMITED),
                    weight: fields.u32()?,
                    priority: fields.u32()?,
                };
                RequestBody::Open {
                    policy,
                    ipc_name: take_text(&mut fields)?,
                    label: take_text(&mut fields)?,
                }
            }
            2 => RequestBody::Claim { n_bytes: fields.u64()?, timeout_ms: fields.u32()? },
            3 => RequestBody::GiveBack { n_bytes: fields.u64()? },
            4 => RequestBody::Stats,
            5 => RequestBody::SetLimit {
                limit_bytes: Some(fields.u64()?).filter(|&limit_bytes| limit_bytes != UNLIMITED),
            },
            other => return Err(invalid("memory frame op", &other, "1 to 5")),
        };
        fields.end()?;
        Ok(Self { number, body })
    }
}

// === impl Reply ===

impl Reply {
    /// The frame.
    pub fn encode(&self) -> Vec<u8> {
        let (op, status, detail) = match &self.outcome {
            Outcome::Opened => (1, 0, ""),
            Outcome::Granted => (2, 0, ""),
            Outcome::Denied(Shortage::DeviceFull) => (2, 1, ""),
            Outcome::Denied(Shortage::GroupLimit) => (2, 2, ""),
            Outcome::Denied(Shortage::OverShare) => (2, 3, ""),
            Outcome::GivenBack => (3, 0, ""),
            Outcome::Stats(_) => (4, 0, ""),
            Outcome::LimitSet => (5, 0, ""),
            Outcome::Refused { op, reason } => (*op, 4, reason.as_str()),
        };
        let mut frame = head(REPLY_MAGIC, op, status);
        frame.extend_from_slice(&self.number.to_le_bytes());
        let Standing { held_bytes, claimable_bytes, limit_bytes } = self.standing;
        for number in [held_bytes, claimable_bytes, limit_bytes] {
            frame.extend_from_slice(&number.to_le_bytes());
        }
        if let Outcome::Stats(DeviceStanding { budget_bytes, held_bytes, group_held_bytes }) = self.outcome {
            for number in [budget_bytes, held_bytes, group_held_bytes] {
                frame.extend_from_slice(&number.to_le_bytes());
            }
        }
        put_text(&mut frame, detail);
        frame
    }
}

// === impl Notice ===

impl Notice {
    /// The frame.
    pub fn encode(self) -> Vec<u8> {
        let (kind, n_bytes) = match self {
            Self::Reclaim { n_bytes } => (1, n_bytes),
            Self::Limit { limit_bytes } => (2, limit_bytes),
        };
        let mut frame = head(NOTICE_MAGIC, kind, 0);
        frame.extend_from_slice(&n_bytes.to_le_bytes());
        frame
    }
}

// === impl FromServer ===

impl FromServer {
    /// Reads a frame, all of it.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = Fields::new(LENGTH, frame);
        if frame.starts_with(&NOTICE_MAGIC) {
            let (kind, zero) = take_head(&mut fields, NOTICE_MAGIC)?;
            check_zero(zero)?;
            let n_bytes = fields.u64()?;
            fields.end()?;
            return match kind {
                1 => Ok(Self::Notice(Notice::Reclaim { n_bytes })),
                2 => Ok(Self::Notice(Notice::Limit { limit_bytes: n_bytes })),
                other => Err(invalid("memory frame notice", &other, "1 or 2")),
            };
        }
        let (op, status) = take_head(&mut fields, REPLY_MAGIC)?;
        let number = fields.u32()?;
        let standing = Standing {
            held_bytes: fields.u64()?,
            claimable_bytes: fields.u64()?,
            limit_bytes: fields.u64()?,
        };
        let outcome = match (op, status) {
            (1, 0) => Outcome::Opened,
            (2, 0) => Outcome::Granted,
            (2, 1) => Outcome::Denied(Shortage::DeviceFull),
            (2, 2) => Outcome::Denied(Shortage::GroupLimit),
            (2, 3) => Outcome::Denied(Shortage::OverShare),
            (3, 0) => Outcome::GivenBack,
            (4, 0) => Outcome::Stats(DeviceStanding {
                budget_bytes: fields.u64()?,
                held_bytes: fields.u64()?,
                group_held_bytes: fields.u64()?,
            }),
            (5, 0) => Outcome::LimitSet,
            (op, 4) => Outcome::Refused { op, reason: take_text(&mut fields)? },
            _ => return Err(invalid("memory frame status", &format!("{status} of op {op}"), "0 to 4")),
        };
        if !matches!(outcome, Outcome::Refused { .. }) && !take_text(&mut fields)?.is_empty() {
            return Err(invalid("memory frame detail", &"a text", "nothing unless refused"));
        }
        fields.end()?;
        Ok(Self::Reply(Reply { number, outcome, standing }))
    }
}

fn take_head(fields: &mut Fields<'_>, magic: [u8; 4]) -> Result<(u8, u8)> {
    if fields.array::<4>()? != magic {
        return Err(invalid("memory frame magic", &"another", "KVMQ, KVMA or KVMN"));
    }
    match fields.u16()? {
        VERSION => Ok((fields.u8()?, fields.u8()?)),
        version => Err(invalid("memory frame version", &version, "1: run one version of kvik on both sides")),
    }
}

fn take_text(fields: &mut Fields<'_>) -> Result<String> {
    let n_bytes = usize::from(fields.u16()?);
    if MAX_TEXT_BYTES < n_bytes {
        return Err(invalid("memory frame text", &format!("{n_bytes} bytes"), "up to 512 bytes"));
    }
    let text = str::from_utf8(fields.take(n_bytes)?);
    text.map(str::to_owned).map_err(|_| invalid("memory frame text", &"other bytes", "UTF-8"))
}

fn head(magic: [u8; 4], kind: u8, second: u8) -> Vec<u8> {
    let mut frame = Vec::with_capacity(64);
    frame.extend_from_slice(&magic);
    frame.extend_from_slice(&VERSION.to_le_bytes());
    frame.extend_from_slice(&[kind, second]);
    frame
}

/// Writes as much of `text` as a frame has room for.
fn put_text(frame: &mut Vec<u8>, text: &str) {
    let text = cut(text, MAX_TEXT_BYTES);
    frame.extend_from_slice(&(text.len() as u16).to_le_bytes());
    frame.extend_from_slice(text.as_bytes());
}

fn check_zero(byte: u8) -> Result<()> {
    if byte == 0 { Ok(()) } else { Err(invalid("memory frame reserved byte", &byte, "0")) }
}
