//! The trait of all tiers.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

use crate::chunk_file::ChunkFile;
use crate::error::{Result, TierError};
use crate::key::{ChunkKey, TokenDigest};
use crate::operations::OperationMetrics;

/// A place that holds chunks.
///
/// All operations take batches and block until every item of the batch has its outcome. A batch is not a
/// transaction: items succeed and fail one by one, and an item's failure never hides another's success.
/// Implementations are called from many threads at a time.
pub trait Tier: fmt::Debug + Send + Sync {
    /// What kind of place it is.
    fn kind(&self) -> TierKind;

    /// Whether nothing is ever stored there by this store, so that nothing need be handed to it.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Stores the items in their order and sets every outcome.
    ///
    /// An item whose key is present stays as it was ([`PutOutcome::Present`]). An item becomes visible to
    /// other calls as a whole or not at all.
    fn put(&self, batch: &mut [PutItem<'_>]);

    /// Stores the items as [`Self::put`] does, each behind its head.
    ///
    /// Where a tier can, it asks for a head right before the item is sent and on the thread that sends it: what
    /// is made of the item's bytes then finds them, or leaves them, in that thread's caches, and others are
    /// sent meanwhile.
    fn put_each(&self, batch: &mut [PutItem<'_>], heads: &dyn Heads) {
        let parts: Vec<Vec<&[u8]>> = batch
            .iter()
            .enumerate()
            .map(|(item_idx, item)| [&[heads.head_of(item_idx)], item.parts].concat())
            .collect();
        let mut headed: Vec<PutItem<'_>> =
            batch.iter().zip(&parts).map(|(item, parts)| item.with_parts(parts)).collect();
        self.put(&mut headed);
        let outcomes: Vec<PutOutcome> = headed.into_iter().map(|item| item.outcome).collect();
        for (item, outcome) in batch.iter_mut().zip(outcomes) {
            item.outcome = outcome;
        }
    }

    /// Reads the items into their heads and buffers and sets every outcome.
    fn get(&self, batch: &mut [GetItem<'_>]);

    /// Reads the items as [`Self::get`] does and reports each, by its index, as soon as its outcome stands.
    ///
    /// `arrived` is called exactly once for each item, in any order and from any thread: where a tier can, from
    /// the thread that received the bytes, while its caches still have them and others are on their way. It
    /// must not call the tier, whose connections may all be in use by this call.
    fn get_each(&self, batch: &mut [GetItem<'_>], arrived: Arrived<'_>) {
        self.get(batch);
        for (item_idx, item) in batch.iter().enumerate() {
            arrived(item_idx, item);
        }
    }

    /// Says of every key whether it is present, without reading its bytes.
    ///
    /// `present` has the length of `keys`. A later read may still miss.
    ///
    /// # Errors
    /// If the tier cannot be asked; `present` is then undefined.
    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()>;

    /// Removes the keys; returns how many were there. A read that has begun is not disturbed.
    ///
    /// # Errors
    /// If the tier cannot be asked; some of the keys may be gone.
    fn delete(&self, keys: &[ChunkKey]) -> Result<usize>;

    /// Calls `visit` with every key that is known here without I/O, and its length in bytes.
    ///
    /// The length is that of what is stored where that is not the chunk itself, such as a coded form.
    ///
    /// Local tiers know all of theirs, also those from before a restart, and a disk names them in the order
    /// in which they lie in its log; remote tiers know none.
    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64));

    /// Makes what was stored survive a loss of power, where the medium survives it.
    ///
    /// # Errors
    /// If the medium does not confirm.
    fn flush(&self) -> Result<()>;

    /// Whether chunks may be read from files by the caller itself ([`Tier::open_chunk`]). Default: no.
    fn has_files(&self) -> bool {
        false
    }

    /// A chunk where it lies in a file, with what proves it, for a caller that reads and proves its bytes itself. `digest` is
    /// that of the tokens it must be for. Default: none.
    ///
    /// # Errors
    /// The outcome that a read would have, which is no hit.
    fn open_chunk(&self, key: ChunkKey, digest: TokenDigest) -> std::result::Result<ChunkFile, GetOutcome> {
        let _ = (key, digest);
        Err(GetOutcome::Skipped)
    }

    /// Stores a chunk whose bytes `fill` writes to a file by itself, past memory of this process. The chunk becomes visible after
    /// that, as a whole or not at all. Only where [`Tier::has_files`]. Default: skipped.
    fn put_file(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
        let _ = (item, fill);
        PutOutcome::Skipped
    }

    /// The codec of chunks that are put; `None` where they are stored as they are. Default: none.
    fn codec(&self) -> Option<&str> {
        None
    }

    /// Lets `change` make other bytes of a chunk that mean the same, and puts them in its place under the same key and for the
    /// same tokens. At any time, and after a death of the process, a reader finds either the old bytes or the new ones.
    /// Default: refused.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if the tier cannot do this; else if it cannot read or write.
    fn rewrite(&self, key: ChunkKey, change: Change<'_>) -> Result<Rewritten> {
        let _ = (key, change);
        Err(TierError::invalid("tier", &self.kind(), "a disk without encryption"))
    }

    /// Codes a chunk by another codec, where that makes it smaller and it was not coded with loss before: so losses do not
    /// add up. Default: refused.
    ///
    /// # Errors
    /// As [`Tier::rewrite`], and if there is no such codec or it is not allowed.
    fn recode(&self, key: ChunkKey, codec: &str) -> Result<Rewritten> {
        let _ = (key, codec);
        Err(TierError::invalid("tier", &self.kind(), "a disk with a codec and without encryption"))
    }

    /// The tier's counts and state, without I/O.
    fn stat(&self) -> TierStat;
}

/// What is stored before the chunks of a batch.
pub trait Heads: Sync {
    /// Length of every head.
    fn n_bytes(&self) -> usize;

    /// The head of an item, by its index: the same however often it is asked for, from whichever thread.
    fn head_of(&self, item_idx: usize) -> &[u8];
}

/// Nothing before any chunk.
pub(crate) struct NoHeads;

impl Heads for NoHeads {
    fn n_bytes(&self) -> usize {
        0
    }

    fn head_of(&self, _item_idx: usize) -> &[u8] {
        &[]
    }
}

/// Makes other bytes of a chunk, with the unit in which they will be read; `None` leaves it as it is.
pub type Change<'a> = &'a mut dyn FnMut(&[u8]) -> Option<(Vec<u8>, usize)>;

/// A chunk whose bytes are written to a file by its writer itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileItem {
    /// Its name.
    pub key: ChunkKey,
    /// The tokens it is for. Only a tier that keeps digests stores it.
    pub digest: TokenDigest,
    /// Its length, which is not 0.
    pub n_bytes: u64,
    /// The unit in which it will be read.
    pub section_bytes: u64,
}

/// Writes all bytes of a chunk to a file, from the offset on, which is a multiple of 4096, and returns the CRC-64/NVME of each of
/// its sections.
///
/// The file has room for whole blocks of 4096 up to the chunk's end, which are the writer's alone until it returns; it is open for
/// direct I/O where its file system can do that.
pub type Fill<'a> = &'a mut dyn FnMut(BorrowedFd<'_>, u64) -> io::Result<Vec<u64>>;

/// What became of a chunk that was to be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rewritten {
    /// It is not there.
    Missing,
    /// It is as it was.
    Kept,
    /// The tier is full: it is as it was.
    NoRoom,
    /// It has other bytes now.
    Changed {
        /// What it took before.
        n_before_bytes: u64,
        /// What it takes now.
        n_after_bytes: u64,
    },
}

/// The callback for each item that was read, with its index in the batch.
pub type Arrived<'a> = &'a (dyn Fn(usize, &GetItem<'_>) + Sync);

/// What kind of place a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TierKind {
    /// Memory of this machine.
    Ram,
    /// Disks of this machine.
    Nvme,
    /// Memory and disks of other nodes of the cluster.
    Peer,
    /// A Redis or Valkey server or cluster.
    Redis,
    /// An object store.
    Object,
    /// A server of LMCache's plain remote protocol.
    Lm,
    /// A library that was loaded at run time.
    Plugin,
}

/// A chunk to be stored.
#[derive(Debug)]
pub struct PutItem<'a> {
    /// Its name.
    pub key: ChunkKey,
    /// Its bytes, in pieces that are stored one after the other.
    pub parts: &'a [&'a [u8]],
    /// The unit in which it will be read: a range that is read starts and ends at multiples of it, or at
    /// the end. The length of the chunk where it is only read whole.
    pub section_bytes: usize,
    /// The tokens it is for. Only a tier that keeps digests stores it.
    pub digest: TokenDigest,
    /// What became of it.
    pub outcome: PutOutcome,
}

/// A chunk to be read, or a range of one, and its first bytes with it.
///
/// A caller with a prefix before every chunk reads it here along with the range that it is about: one item is
/// one lookup, and one request wherever the range begins behind the head.
#[derive(Debug)]
pub struct GetItem<'a> {
    /// Its name.
    pub key: ChunkKey,
    /// First byte to read into the buffer.
    pub offset: u64,
    /// The tokens it must be for. Only a tier that keeps digests compares it.
    pub digest: TokenDigest,
    /// Whether head and buffer are for the whole chunk: a chunk of another length then is no hit.
    pub is_whole: bool,
    /// Where the chunk's first bytes go, as many as it has room for; empty where only a range is wanted.
    ///
    /// A hit has filled both it and the buffer, from one stored chunk. Only a tier that needs two requests for
    /// them may find that the chunk was deleted and stored again in between, which makes no difference where a
    /// key has one content. With a head, a chunk that is there and too short for what is asked is
    /// [`GetOutcome::Corrupt`], never a miss.
    pub head: &'a mut [u8],
    /// Where the bytes from `offset` on go; exactly that many are read.
    pub buffer: &'a mut [u8],
    /// What became of it.
    pub outcome: GetOutcome,
}

/// What became of a chunk that was to be stored.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum PutOutcome {
    /// Not done yet.
    #[default]
    Pending,
    /// It is there.
    Stored,
    /// It was there before.
    Present,
    /// The tier is full: delete something and try again.
    NoRoom,
    /// The tier was not asked, because it fails or is asked too much.
    Skipped,
    /// It is not there.
    Failed(TierError),
}

/// What became of a chunk that was to be read.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum GetOutcome {
    /// Not done yet.
    #[default]
    Pending,
    /// The buffer has its bytes, and the head too.
    Hit,
    /// It is not there.
    Miss,
    /// Something is there that is not what was stored: a miss, and the key should be deleted.
    Corrupt(&'static str),
    /// A chunk of other tokens has the name: a miss, and the key should be deleted, so that the name is free.
    TokenMismatch,
    /// The tier was not asked, because it fails or is asked too much.
    Skipped,
    /// It could not be read.
    Failed(TierError),
}

/// Whether a tier can be used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum TierHealth {
    /// Reads and writes.
    #[default]
    Up,
    /// Reads only.
    ReadOnly(String),
    /// Not asked at present.
    Down(String),
}

/// Counts of a tier; `None` where it does not know.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TierStat {
    /// Chunks that are present.
    pub n_chunks: Option<u64>,
    /// Bytes they take.
    pub used_bytes: Option<u64>,
    /// The most bytes they may take.
    pub capacity_bytes: Option<u64>,
    /// Whether the tier can be used.
    pub health: TierHealth,
    /// Further counts by name, for people and metrics.
    pub details: Vec<(&'static str, u64)>,
    /// What the tier was asked, by operation; empty where nothing counts that.
    pub operations: Vec<OperationMetrics>,
}

/// Comfort on top of [`Tier`].
pub trait TierExt: Tier {
    /// Stores one chunk that is read whole.
    fn put_one(&self, key: ChunkKey, bytes: &[u8]) -> PutOutcome {
        let parts = [bytes];
        let mut batch = [PutItem::new(key, &parts)];
        self.put(&mut batch);
        let [item] = batch;
        item.outcome
    }

    /// Reads one whole chunk.
    fn get_one(&self, key: ChunkKey, buffer: &mut [u8]) -> GetOutcome {
        let mut batch = [GetItem::whole(key, buffer)];
        self.get(&mut batch);
        let [item] = batch;
        item.outcome
    }
}

impl<T: Tier + ?Sized> TierExt for T {}

// === impl TierKind ===

impl TierKind {
    /// The name in configuration, metrics and usage reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Nvme => "nvme",
            Self::Peer => "peer",
            Self::Redis => "redis",
            Self::Object => "object",
            Self::Lm => "lm",
            Self::Plugin => "plugin",
        }
    }
}

impl fmt::Display for TierKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

// === impl PutItem, GetItem ===

impl<'a> PutItem<'a> {
    /// A chunk that is read whole.
    pub fn new(key: ChunkKey, parts: &'a [&'a [u8]]) -> Self {
        let n_bytes = parts.iter().map(|part| part.len()).sum();
        Self::with_sections(key, parts, n_bytes)
    }

    /// A chunk that is read in units of `section_bytes`.
    pub fn with_sections(key: ChunkKey, parts: &'a [&'a [u8]], section_bytes: usize) -> Self {
        Self { key, parts, section_bytes, digest: TokenDigest::NONE, outcome: PutOutcome::Pending }
    }

    /// The same chunk for the tokens of `digest`; [`TokenDigest::NONE`] otherwise.
    #[must_use]
    pub fn for_tokens(self, digest: TokenDigest) -> Self {
        Self { digest, ..self }
    }

    /// An item that stores other bytes in the place of this one's.
    pub fn with_parts<'b>(&self, parts: &'b [&'b [u8]]) -> PutItem<'b> {
        PutItem::with_sections(self.key, parts, self.section_bytes).for_tokens(self.digest)
    }

    /// Length of the chunk.
    pub fn n_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }
}

impl<'a> GetItem<'a> {
    /// All of a chunk, which must have the buffer's length.
    pub fn whole(key: ChunkKey, buffer: &'a mut [u8]) -> Self {
        Self { is_whole: true, ..Self::range(key, 0, buffer) }
    }

    /// Bytes of a chunk from `offset` on, as many as the buffer takes.
    pub fn range(key: ChunkKey, offset: u64, buffer: &'a mut [u8]) -> Self {
        Self::with_head(key, &mut [], offset, buffer)
    }

    /// Bytes of a chunk from `offset` on, and as many from its beginning as the head takes.
    pub fn with_head(key: ChunkKey, head: &'a mut [u8], offset: u64, buffer: &'a mut [u8]) -> Self {
        let (digest, outcome) = (TokenDigest::NONE, GetOutcome::Pending);
        Self { key, offset, digest, is_whole: false, head, buffer, outcome }
    }

    /// The same chunk for the tokens of `digest`; [`TokenDigest::NONE`] otherwise.
    #[must_use]
    pub fn for_tokens(self, digest: TokenDigest) -> Self {
        Self { digest, ..self }
    }

    /// Bytes to be read, head and buffer together.
    pub fn n_bytes(&self) -> usize {
        self.head.len() + self.buffer.len()
    }

    /// Where the one range begins that fills the head and then the buffer; none if it takes two.
    pub(crate) fn start_of_one_range(&self) -> Option<u64> {
        if self.head.is_empty() {
            Some(self.offset)
        } else {
            (self.buffer.is_empty() || self.offset == self.head.len() as u64).then_some(0)
        }
    }

    /// Copies head and buffer from a chunk that lies in memory; false if it does not have those bytes.
    pub(crate) fn copy_from(&mut self, chunk: &[u8]) -> bool {
        let start = usize::try_from(self.offset).unwrap_or(usize::MAX);
        let range = start..start.saturating_add(self.buffer.len());
        let is_length_right = !self.is_whole || self.n_bytes() == chunk.len();
        match (chunk.get(..self.head.len()), chunk.get(range)) {
            (Some(head), Some(bytes)) if is_length_right => {
                self.head.copy_from_slice(head);
                self.buffer.copy_from_slice(bytes);
                true
            }
            _ => false,
        }
    }
}

// === impl PutOutcome, GetOutcome ===

impl PutOutcome {
    /// Whether the chunk is there now.
    pub fn is_present(&self) -> bool {
        matches!(self, Self::Stored | Self::Present)
    }
}

impl GetOutcome {
    /// Whether the buffer has the bytes.
    pub fn is_hit(&self) -> bool {
        matches!(self, Self::Hit)
    }
}
