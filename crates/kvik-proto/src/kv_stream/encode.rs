//! Writing frames.

use rmp::encode::{write_array_len, write_bin_len, write_f64, write_nil, write_str, write_uint};

use super::{Frame, Hello, KvBatch, KvChange, KvKey, KvTier, SnapshotPart};

/// Bytes of a frame's length.
pub(super) const LENGTH_BYTES: usize = 4;

/// The kinds of frames.
pub(super) mod kind {
    pub(in crate::kv_stream) const HELLO: u8 = 1;
    pub(in crate::kv_stream) const SNAPSHOT_PART: u8 = 2;
    pub(in crate::kv_stream) const SNAPSHOT_END: u8 = 3;
    pub(in crate::kv_stream) const BATCH: u8 = 4;
    pub(in crate::kv_stream) const ALIVE: u8 = 5;
}

/// The kinds of changes.
pub(super) mod change {
    pub(in crate::kv_stream) const STORED: u64 = 1;
    pub(in crate::kv_stream) const REMOVED: u64 = 2;
    pub(in crate::kv_stream) const CLEARED: u64 = 3;
}

impl Frame {
    /// Appends the frame to `out`.
    ///
    /// The caller keeps to [`MAX_FRAME_KEYS`](super::MAX_FRAME_KEYS) and to names of reasonable length:
    /// readers refuse a frame above [`MAX_FRAME_BYTES`](super::MAX_FRAME_BYTES).
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; LENGTH_BYTES]);
        match self {
            Self::Hello(hello) => hello.encode(out),
            Self::SnapshotPart(part) => part.encode(out),
            Self::SnapshotEnd { next_sequence } => {
                out.push(kind::SNAPSHOT_END);
                array(out, 1);
                number(out, *next_sequence);
            }
            Self::Batch(batch) => batch.encode(out),
            Self::Alive { next_sequence } => {
                out.push(kind::ALIVE);
                array(out, 1);
                number(out, *next_sequence);
            }
        }
        let n_bytes = out.len() - start - LENGTH_BYTES;
        debug_assert!(n_bytes <= super::MAX_FRAME_BYTES, "a frame of {n_bytes} bytes");
        out[start..start + LENGTH_BYTES].copy_from_slice(&(n_bytes as u32).to_be_bytes());
    }
}

impl Hello {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(kind::HELLO);
        array(out, 5);
        text(out, &self.worker);
        number(out, self.epoch);
        text(out, &self.model);
        array(out, self.groups.len());
        for group in &self.groups {
            array(out, 3);
            number(out, u64::from(group.number));
            number(out, u64::from(group.block_tokens));
            bytes(out, group.root.as_bytes());
        }
        option(out, self.resumes_at);
    }
}

impl SnapshotPart {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(kind::SNAPSHOT_PART);
        array(out, 3);
        number(out, u64::from(self.group));
        tier(out, self.tier);
        keys(out, &self.keys);
    }
}

impl KvBatch {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(kind::BATCH);
        array(out, 3);
        number(out, self.sequence);
        written(&write_f64(out, self.published_s));
        array(out, self.changes.len());
        for change in &self.changes {
            change.encode(out);
        }
    }
}

impl KvChange {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Stored { group, tier: at, parent, keys: blocks } => {
                array(out, 5);
                number(out, change::STORED);
                number(out, u64::from(*group));
                tier(out, *at);
                option(out, parent.map(|key| key.0));
                keys(out, blocks);
            }
            Self::Removed { group, tier: at, keys: blocks } => {
                array(out, 4);
                number(out, change::REMOVED);
                number(out, u64::from(*group));
                tier(out, *at);
                keys(out, blocks);
            }
            Self::Cleared { tier: at } => {
                array(out, 2);
                number(out, change::CLEARED);
                option(out, at.map(|tier| tier.as_index() as u64));
            }
        }
    }
}

fn array(out: &mut Vec<u8>, n_elements: usize) {
    written(&write_array_len(out, n_elements as u32));
}

fn number(out: &mut Vec<u8>, value: u64) {
    written(&write_uint(out, value));
}

fn text(out: &mut Vec<u8>, value: &str) {
    written(&write_str(out, value));
}

fn bytes(out: &mut Vec<u8>, value: &[u8]) {
    written(&write_bin_len(out, value.len() as u32));
    out.extend_from_slice(value);
}

fn option(out: &mut Vec<u8>, value: Option<u64>) {
    match value {
        Some(value) => number(out, value),
        None => written(&write_nil(out)),
    }
}

fn tier(out: &mut Vec<u8>, value: KvTier) {
    number(out, value.as_index() as u64);
}

/// Keys are one run of bytes: eight for each, big endian.
fn keys(out: &mut Vec<u8>, values: &[KvKey]) {
    written(&write_bin_len(out, (8 * values.len()) as u32));
    out.extend(values.iter().flat_map(|key| key.0.to_be_bytes()));
}

/// Memory takes whatever is written to it.
fn written<T, E>(outcome: &Result<T, E>) {
    debug_assert!(outcome.is_ok(), "a vector refused bytes");
}
