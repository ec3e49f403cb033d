//! The bytes between leader and ranks: versioned, little-endian, fixed fields.
//!
//! ```text
//! request  "KVRQ"  version u16  op u8  0 u8  transaction u64  group u32  part u32  n_extents u32
//!          then n_extents times { first_page u32, n_pages u32 }, or the greeting of a Hello
//! greeting generation u64  resumed_instance u64  page_bytes u64  rank u32  world u32  n_buffers u32
//!          capacity_pages u32
//! reply    "KVRA"  version u16  op u8  status u8  transaction u64  instance u64  part u32
//!          n_extents u32  whole u8  0 u8  detail_bytes u16
//!          then n_extents extents and detail_bytes bytes of UTF-8
//! ```
//!
//! What decodes is exactly what encoding gives: no byte is ignored, so two sides cannot read one frame
//! differently.

use crate::Result;
use crate::geometry::{Extent, Geometry, MAX_EXTENT_PAGES, PageId};
use crate::wire::{Fields, cut, invalid};

#[cfg(test)]
mod tests;

/// The version of this protocol; both sides have the same or do not talk.
pub const VERSION: u16 = 1;

/// The most extents in one frame: 32 KiB, well below the socket buffer that every kernel gives.
pub const MAX_FRAME_EXTENTS: usize = 4096;

/// The most bytes of text in a reply; longer reasons are cut.
pub const MAX_DETAIL_BYTES: usize = 512;

/// The largest frame of either kind.
pub const MAX_FRAME_BYTES: usize = REPLY_HEADER_BYTES + MAX_FRAME_EXTENTS * EXTENT_BYTES + MAX_DETAIL_BYTES;

const _: () = assert!(MAX_FRAME_BYTES <= crate::wire::MAX_FRAME_BYTES);

const REQUEST_MAGIC: [u8; 4] = *b"KVRQ";
const REPLY_MAGIC: [u8; 4] = *b"KVRA";
const REPLY_HEADER_BYTES: usize = 36;
const EXTENT_BYTES: usize = 8;
const LENGTH: &str = "rank frame length";

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Begins or resumes a connection; the first request of each.
    Hello,
    /// Maps extents, to be kept only if the transaction is committed.
    PrepareMap,
    /// Keeps what was mapped.
    CommitMap,
    /// Unmaps what was mapped, also right after its commit.
    AbortMap,
    /// Checks that extents are mapped exactly so.
    PrepareUnmap,
    /// Unmaps them.
    CommitUnmap,
    /// Leaves them mapped.
    AbortUnmap,
    /// Asks how far a transaction is.
    Status,
}

/// One request of the leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The transaction; 0 in a Hello.
    pub transaction: u64,
    /// The group of caches this is about; one worker serves one.
    pub group: u32,
    /// What to do.
    pub body: Body,
}

/// The operation of a request and what it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// [`Op::Hello`].
    Hello(Greeting),
    /// [`Op::PrepareMap`] or [`Op::PrepareUnmap`].
    Prepare {
        /// Whether this maps or unmaps.
        kind: Kind,
        /// Which part of the transaction this is, from 0 on.
        part: u32,
        /// One to [`MAX_FRAME_EXTENTS`] extents.
        extents: Vec<Extent>,
    },
    /// [`Op::CommitMap`] or [`Op::CommitUnmap`].
    Commit(Kind),
    /// [`Op::AbortMap`] or [`Op::AbortUnmap`].
    Abort(Kind),
    /// [`Op::Status`].
    Status,
}

/// The two kinds of transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Extents become mapped.
    Map,
    /// Extents become unmapped.
    Unmap,
}

/// How a leader introduces itself, and the rank that it expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// The life of the leader, which no other leader has.
    pub generation: u64,
    /// The life of the rank that this leader was connected to before; 0 begins anew, and the rank
    /// unmaps what former leaders left.
    pub resumed_instance: u64,
    /// Which rank the leader expects.
    pub rank: u32,
    /// How many ranks the group has.
    pub world: u32,
    /// The shape that the rank's region must have.
    pub geometry: Geometry,
}

/// What a rank says to one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The operation of the request.
    pub op: Op,
    /// The transaction of the request.
    pub transaction: u64,
    /// The part of the request.
    pub part: u32,
    /// The life of the rank that answers.
    pub instance: u64,
    /// What came of it.
    pub status: Status,
    /// The extents that could not be undone or unmapped.
    pub extents: Vec<Extent>,
    /// Whether `extents` did not fit, so that it stands for all extents of the transaction.
    pub whole: bool,
    /// Why, for people; at most [`MAX_DETAIL_BYTES`].
    pub detail: String,
}

/// The outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It is done, now or when it was first asked for.
    Done,
    /// The device has no memory; this part maps nothing.
    NoMemory,
    /// A call failed; all is undone but the extents listed.
    Failed,
    /// The request does not fit the state of the rank; nothing was changed.
    Refused,
    /// To [`Op::Status`]: the transaction is not known.
    Unknown,
    /// To [`Op::Status`]: prepared, neither committed nor aborted.
    Prepared,
    /// To [`Op::Status`]: committed.
    Committed,
    /// To [`Op::Status`]: aborted.
    Aborted,
}

// === impl Op ===

impl Op {
    fn code(self) -> u8 {
        match self {
            Self::Hello => 1,
            Self::PrepareMap => 2,
            Self::CommitMap => 3,
            Self::AbortMap => 4,
            Self::PrepareUnmap => 5,
            Self::CommitUnmap => 6,
            Self::AbortUnmap => 7,
            Self::Status => 8,
        }
    }

    fn from_code(code: u8) -> Result<Self> {
        Ok(match code {
            1 => Self::Hello,
            2 => Self::PrepareMap,
            3 => Self::CommitMap,
            4 => Self::AbortMap,
            5 => Self::PrepareUnmap,
            6 => Self::CommitUnmap,
            7 => Self::AbortUnmap,
            8 => Self::Status,
            _ => return Err(invalid("rank frame op", &code, "1 to 8")),
        })
    }
}

// === impl Request ===

impl Request {
    /// The operation.
    pub fn op(&self) -> Op {
        match self.body {
            Body::Hello(_) => Op::Hello,
            Body::Prepare { kind: Kind::Map, .. } => Op::PrepareMap,
            Body::Prepare { kind: Kind::Unmap, .. } => Op::PrepareUnmap,
            Body::Commit(Kind::Map) => Op::CommitMap,
            Body::Commit(Kind::Unmap) => Op::CommitUnmap,
            Body::Abort(Kind::Map) => Op::AbortMap,
            Body::Abort(Kind::Unmap) => Op::AbortUnmap,
            Body::Status => Op::Status,
        }
    }

    /// The part of the transaction; 0 for all that is not a prepare.
    pub fn part(&self) -> u32 {
        match self.body {
            Body::Prepare { part, .. } => part,
            _ => 0,
        }
    }

    /// The bytes of this request.
    pub fn encode(&self) -> Vec<u8> {
        let extents: &[Extent] = match &self.body {
            Body::Prepare { extents, .. } => extents,
            _ => &[],
        };
        let mut frame = Vec::with_capacity(REPLY_HEADER_BYTES + extents.len() * EXTENT_BYTES);
        frame.extend_from_slice(&REQUEST_MAGIC);
        frame.extend_from_slice(&VERSION.to_le_bytes());
        frame.extend_from_slice(&[self.op().code(), 0]);
        frame.extend_from_slice(&self.transaction.to_le_bytes());
        frame.extend_from_slice(&self.group.to_le_bytes());
        frame.extend_from_slice(&self.part().to_le_bytes());
        frame.extend_from_slice(&(extents.len() as u32).to_le_bytes());
        put_extents(&mut frame, extents);
        if let Body::Hello(greeting) = &self.body {
            greeting.put(&mut frame);
        }
        frame
    }

    /// Reads a request from any bytes.
    ///
    /// Fails with [`MemoryError::Invalid`](crate::MemoryError::Invalid) where they are not exactly one request of this version.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = open(frame, REQUEST_MAGIC)?;
        let op = Op::from_code(fields.u8()?)?;
        take_zero(&mut fields)?;
        let transaction = fields.u64()?;
        let group = fields.u32()?;
        let part = fields.u32()?;
        let n_extents = fields.u32()?;
        let is_prepare = matches!(op, Op::PrepareMap | Op::PrepareUnmap);
        if is_prepare && n_extents == 0 {
            return Err(invalid("rank frame n_extents", &n_extents, "1 or more in a prepare"));
        }
        if !is_prepare && (n_extents, part) != (0, 0) {
            return Err(invalid("rank frame n_extents", &n_extents, "extents and parts only in a prepare"));
        }
        if (op == Op::Hello) != (transaction == 0) {
            return Err(invalid("rank frame transaction", &transaction, "0 in a hello, 1 or more elsewhere"));
        }
        let extents = take_extents(&mut fields, n_extents)?;
        let body = match op {
            Op::Hello => Body::Hello(Greeting::take(&mut fields)?),
            Op::PrepareMap => Body::Prepare { kind: Kind::Map, part, extents },
            Op::PrepareUnmap => Body::Prepare { kind: Kind::Unmap, part, extents },
            Op::CommitMap => Body::Commit(Kind::Map),
            Op::CommitUnmap => Body::Commit(Kind::Unmap),
            Op::AbortMap => Body::Abort(Kind::Map),
            Op::AbortUnmap => Body::Abort(Kind::Unmap),
            Op::Status => Body::Status,
        };
        fields.end()?;
        Ok(Self { transaction, group, body })
    }
}

// === impl Greeting ===

impl Greeting {
    fn put(&self, frame: &mut Vec<u8>) {
        frame.extend_from_slice(&self.generation.to_le_bytes());
        frame.extend_from_slice(&self.resumed_instance.to_le_bytes());
        frame.extend_from_slice(&self.geometry.page_bytes().to_le_bytes());
        for number in [self.rank, self.world, self.geometry.n_buffers(), self.geometry.capacity_pages()] {
            frame.extend_from_slice(&number.to_le_bytes());
        }
    }

    fn take(fields: &mut Fields<'_>) -> Result<Self> {
        let generation = fields.u64()?;
        let resumed_instance = fields.u64()?;
        let page_bytes = fields.u64()?;
        let rank = fields.u32()?;
        let world = fields.u32()?;
        let n_buffers = fields.u32()?;
        let capacity_pages = fields.u32()?;
        let geometry = Geometry::try_new(n_buffers, page_bytes, capacity_pages)?;
        Ok(Self { generation, resumed_instance, rank, world, geometry })
    }
}

// === impl Reply ===

impl Reply {
    /// The bytes of this reply; a detail that is too long is cut at a character.
    pub fn encode(&self) -> Vec<u8> {
        let detail = cut(&self.detail, MAX_DETAIL_BYTES);
        let n_extents = self.extents.len().min(MAX_FRAME_EXTENTS);
        let whole = self.whole || n_extents < self.extents.len();
        let mut frame = Vec::with_capacity(REPLY_HEADER_BYTES + n_extents * EXTENT_BYTES + detail.len());
        frame.extend_from_slice(&REPLY_MAGIC);
        frame.extend_from_slice(&VERSION.to_le_bytes());
        frame.extend_from_slice(&[self.op.code(), self.status.code()]);
        frame.extend_from_slice(&self.transaction.to_le_bytes());
        frame.extend_from_slice(&self.instance.to_le_bytes());
        frame.extend_from_slice(&self.part.to_le_bytes());
        frame.extend_from_slice(&(n_extents as u32).to_le_bytes());
        frame.extend_from_slice(&[u8::from(whole), 0]);
        frame.extend_from_slice(&(detail.len() as u16).to_le_bytes());
        put_extents(&mut frame, &self.extents[..n_extents]);
        frame.extend_from_slice(detail.as_bytes());
        frame
    }

    /// Reads a reply from any bytes.
    ///
    /// Fails with [`MemoryError::Invalid`](crate::MemoryError::Invalid) where they are not exactly one reply of this version.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let mut fields = open(frame, REPLY_MAGIC)?;
        let op = Op::from_code(fields.u8()?)?;
        let status = Status::from_code(fields.u8()?)?;
        let transaction = fields.u64()?;
        let instance = fields.u64()?;
        let part = fields.u32()?;
        let n_extents = fields.u32()?;
        let whole = match fields.u8()? {
            0 => false,
            1 => true,
            other => return Err(invalid("rank frame whole", &other, "0 or 1")),
        };
        take_zero(&mut fields)?;
        let detail_bytes = usize::from(fields.u16()?);
        if MAX_DETAIL_BYTES < detail_bytes {
            return Err(invalid("rank frame detail_bytes", &detail_bytes, "up to 512"));
        }
        let extents = take_extents(&mut fields, n_extents)?;
        let detail = std::str::from_utf8(fields.take(detail_bytes)?)
            .map_err(|_| invalid("rank frame detail", &"other bytes", "UTF-8"))?
            .to_owned();
        fields.end()?;
        Ok(Self { op, transaction, part, instance, status, extents, whole, detail })
    }
}

// === impl Status ===

impl Status {
    fn code(self) -> u8 {
        match self {
            Self::Done => 1,
            Self::NoMemory => 2,
            Self::Failed => 3,
            Self::Refused => 4,
            Self::Unknown => 5,
            Self::Prepared => 6,
            Self::Committed => 7,
            Self::Aborted => 8,
        }
    }

    fn from_code(code: u8) -> Result<Self> {
        Ok(match code {
            1 => Self::Done,
            2 => Self::NoMemory,
            3 => Self::Failed,
            4 => Self::Refused,
            5 => Self::Unknown,
            6 => Self::Prepared,
            7 => Self::Committed,
            8 => Self::Aborted,
            _ => return Err(invalid("rank frame status", &code, "1 to 8")),
        })
    }
}

/// The fields behind magic and version.
fn open(frame: &[u8], magic: [u8; 4]) -> Result<Fields<'_>> {
    if MAX_FRAME_BYTES < frame.len() {
        return Err(invalid(LENGTH, &frame.len(), "up to the largest frame"));
    }
    let mut fields = Fields::new(LENGTH, frame);
    if fields.array::<4>()? != magic {
        return Err(invalid("rank frame magic", &"another", "KVRQ for requests, KVRA for replies"));
    }
    match fields.u16()? {
        VERSION => Ok(fields),
        version => Err(invalid("rank frame version", &version, "1: run one version of kvik on all ranks")),
    }
}

fn take_zero(fields: &mut Fields<'_>) -> Result<()> {
    match fields.u8()? {
        0 => Ok(()),
        other => Err(invalid("rank frame reserved byte", &other, "0")),
    }
}

fn take_extents(fields: &mut Fields<'_>, n_extents: u32) -> Result<Vec<Extent>> {
    if MAX_FRAME_EXTENTS < n_extents as usize {
        return Err(invalid("rank frame n_extents", &n_extents, "up to 4096"));
    }
    let mut listed = Fields::new(LENGTH, fields.take(n_extents as usize * EXTENT_BYTES)?);
    let mut extents = Vec::with_capacity(n_extents as usize);
    for _ in 0..n_extents {
        let extent = Extent { first_page: PageId(listed.u32()?), n_pages: listed.u32()? };
        if !is_aligned(extent) {
            let value = format!("{} at page {}", extent.n_pages, extent.first_page);
            return Err(invalid("rank frame extent", &value, "1, 2, 4 .. 32 pages, aligned"));
        }
        extents.push(extent);
    }
    Ok(extents)
}

/// Whether an extent is as [`Extent`] demands and ends within the numbers of pages.
pub(super) fn is_aligned(extent: Extent) -> bool {
    extent.n_pages.is_power_of_two()
        && extent.n_pages <= MAX_EXTENT_PAGES
        && extent.first_page.0.is_multiple_of(extent.n_pages)
        && extent.first_page.0.checked_add(extent.n_pages).is_some()
}

fn put_extents(frame: &mut Vec<u8>, extents: &[Extent]) {
    for extent in extents {
        frame.extend_from_slice(&extent.first_page.0.to_le_bytes());
        frame.extend_from_slice(&extent.n_pages.to_le_bytes());
    }
}
