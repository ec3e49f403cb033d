//! KV bytes that describe and protect themselves.
//!
//! ```text
//! offset  bytes  field, little endian
//!      0      4  magic "KVBF"
//!      4      2  version, 1
//!      6      1  kind: 0 = [2, L, T, D], 1 = [1, L, T, D] of an MLA model
//!      7      1  element type: 1 f32, 2 f16, 3 bf16, 4 fp8_e4m3, 5 fp8_e5m2, 6 u8
//!      8      4  layers
//!     12      4  tokens
//!     16      4  K (or V) heads
//!     20      4  elements of a head
//!     24      8  length of the payload in bytes
//!     32      8  XXH3-64 of the 32 bytes above and of the payload
//!     40      -  payload
//! ```

use xxhash_rust::xxh3::Xxh3Default;

use super::strides::Strides;
use super::{KvLayout, KvPlacement, KvShape};
use crate::dtype::Dtype;
use crate::error::{Result, TypesError};

/// Length of the header before the payload of a binary frame.
pub const BINARY_HEADER_BYTES: usize = 40;

const MAGIC: [u8; 4] = *b"KVBF";
const VERSION: u16 = 1;
const CHECKSUM_START: usize = 32;

/// A binary frame that was verified: shape, length and checksum are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinaryFrame<'a> {
    shape: KvShape,
    is_mla: bool,
    payload: &'a [u8],
}

impl<'a> BinaryFrame<'a> {
    /// Verifies `bytes` as exactly one frame.
    ///
    /// Never panics, whatever the bytes. Fails with [`TypesError::Corrupt`] on everything that
    /// [`convert`](super::convert) would not have written.
    pub fn decode(bytes: &'a [u8]) -> Result<Self> {
        let Some((header, payload)) = bytes.split_first_chunk::<BINARY_HEADER_BYTES>() else {
            let allowed = format!("at least {BINARY_HEADER_BYTES} bytes");
            return Err(TypesError::corrupt("frame", &format!("{} bytes long", bytes.len()), allowed));
        };
        let [magic @ .., _, _, _, _] = take::<8>(header, 0);
        if magic != MAGIC {
            return Err(TypesError::corrupt("magic", &format!("{magic:02x?}"), format!("{MAGIC:02x?}")));
        }
        let version = u16::from_le_bytes(take(header, 4));
        if version != VERSION {
            return Err(TypesError::corrupt("version", &version, VERSION.to_string()));
        }
        let is_mla = match header[6] {
            0 => false,
            1 => true,
            kind => return Err(TypesError::corrupt("kind", &kind, "0 or 1")),
        };
        let dtype = Dtype::from_code(header[7])
            .ok_or_else(|| TypesError::corrupt("element type", &header[7], "1 to 6"))?;
        let number = |start| u32::from_le_bytes(take(header, start)) as usize;
        let shape = KvShape {
            n_layers: number(8),
            n_tokens: number(12),
            n_kv_heads: number(16),
            head_dim: number(20),
            dtype,
        };
        let n_payload_bytes = u64::from_le_bytes(take(header, 24));
        if n_payload_bytes != payload.len() as u64 {
            return Err(TypesError::corrupt(
                "payload length",
                &n_payload_bytes,
                format!("{}", payload.len()),
            ));
        }
        let expected = KvPlacement::dense(if is_mla { KvLayout::KvMlaFmt } else { KvLayout::Kv2Ltd })
            .and_then(|placement| Strides::of(&placement, &shape, is_mla))
            .map_err(|error| TypesError::corrupt("shape", &format!("{shape:?}"), error.to_string()))?
            .n_bytes;
        if payload.len() != expected {
            return Err(TypesError::corrupt(
                "payload length",
                &payload.len(),
                format!("{expected} for {shape:?}"),
            ));
        }
        let stored = u64::from_le_bytes(take(header, CHECKSUM_START));
        let computed = checksum(header, payload);
        if stored != computed {
            return Err(TypesError::corrupt(
                "checksum",
                &format!("{stored:016x}"),
                format!("{computed:016x}"),
            ));
        }
        Ok(Self { shape, is_mla, payload })
    }

    /// Returns the shape that the header gives.
    pub const fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Returns whether the payload holds MLA latents in the layout `kv_mla_fmt`; otherwise it holds K
    /// and V in `kv_2ltd`.
    pub const fn is_mla(&self) -> bool {
        self.is_mla
    }

    /// Returns the bytes behind the header.
    pub const fn payload(&self) -> &'a [u8] {
        self.payload
    }
}

/// Returns the header for a payload; the caller has checked that the shape's fields fit in 32 bits.
pub(super) fn encode_header(shape: &KvShape, is_mla: bool, payload: &[u8]) -> [u8; BINARY_HEADER_BYTES] {
    let mut header = [0; BINARY_HEADER_BYTES];
    header[..4].copy_from_slice(&MAGIC);
    header[4..6].copy_from_slice(&VERSION.to_le_bytes());
    header[6] = u8::from(is_mla);
    header[7] = shape.dtype.code();
    let numbers = [shape.n_layers, shape.n_tokens, shape.n_kv_heads, shape.head_dim];
    for (bytes, number) in header[8..24].chunks_exact_mut(4).zip(numbers) {
        bytes.copy_from_slice(&(number as u32).to_le_bytes());
    }
    header[24..32].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    let checksum = checksum(&header, payload);
    header[CHECKSUM_START..].copy_from_slice(&checksum.to_le_bytes());
    header
}

fn checksum(header: &[u8; BINARY_HEADER_BYTES], payload: &[u8]) -> u64 {
    let mut hasher = Xxh3Default::new();
    hasher.update(&header[..CHECKSUM_START]);
    hasher.update(payload);
    hasher.digest()
}

/// Returns `N` bytes of the header; every `start` in this file leaves room for them.
fn take<const N: usize>(header: &[u8; BINARY_HEADER_BYTES], start: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[start..start + N]);
    bytes
}
