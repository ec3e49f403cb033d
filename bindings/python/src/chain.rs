//! Sequences of tokens as chains of chunks.

use kvik_store::{ExtraKey, Space};
use kvik_tier::TokenDigest;
use kvik_types::{BlockHash, CacheSalt};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::error::{invalid, invalid_type};

/// Bytes of a digest.
const DIGEST_BYTES: usize = 32;

/// Bytes of a name and its digest.
const CHUNK_BYTES: usize = 16 + DIGEST_BYTES;

/// Bytes before the chunks of a packed chain: the digest of the space that it was made in, and its tokens.
const HEAD_BYTES: usize = DIGEST_BYTES + size_of::<u64>();

/// The chunks of one sequence: what the store is asked for.
///
/// Made by `Store.chain`. It cannot be changed, and may be used from any thread.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) inner: kvik_store::Chain,
}

/// Makes the chain of a sequence.
pub(crate) fn chain_of(
    space: &Space,
    tokens: &[u32],
    salt: Option<&str>,
    extras: Vec<(usize, Vec<u8>)>,
) -> PyResult<Chain> {
    let salt = salt.map(CacheSalt::try_new).transpose().map_err(|error| invalid_type(&error))?;
    let extras = extras.into_iter().map(|(first_token, key)| ExtraKey { first_token, key }).collect();
    Ok(Chain { inner: space.chain_with_extras(tokens, salt.as_ref(), extras) })
}

/// Makes the chain of the chunks that an engine has keys for.
pub(crate) fn chain_of_keys(space: &Space, keys: &[PyBackedBytes]) -> PyResult<Chain> {
    let chain = space.chain_of_keys(keys.iter().map(|key| &**key));
    Ok(Chain { inner: chain.ok_or_else(|| invalid("keys", &"some twice", "each key once"))? })
}

/// The chain that [`Chain::pack`] gave; `None` where it was made in another space, or is none.
pub(crate) fn unpack(space: &Space, packed: &[u8]) -> Option<Chain> {
    let (head, chunks) = packed.split_at_checked(HEAD_BYTES)?;
    let (root, n_tokens) = head.split_at_checked(DIGEST_BYTES)?;
    let (chunks, rest) = chunks.as_chunks::<CHUNK_BYTES>();
    if root != space.root_digest().0 || !rest.is_empty() {
        return None;
    }
    let n_tokens = usize::try_from(u64::from_le_bytes(n_tokens.try_into().ok()?)).ok()?;
    let (mut names, mut digests) = (Vec::with_capacity(chunks.len()), Vec::with_capacity(chunks.len()));
    for chunk in chunks {
        let (name, digest) = chunk.split_at(CHUNK_BYTES - DIGEST_BYTES);
        names.push(BlockHash(name.try_into().ok()?));
        digests.push(TokenDigest(digest.try_into().ok()?));
    }
    Some(Chain { inner: space.named_chain(names, n_tokens)?.proven(digests)? })
}

#[pymethods]
impl Chain {
    /// Number of its chunks.
    #[getter]
    fn n_chunks(&self) -> usize {
        self.inner.n_chunks()
    }

    /// Tokens of all its chunks; those after the last whole chunk belong to none.
    #[getter]
    fn n_tokens(&self) -> usize {
        self.inner.n_tokens()
    }

    /// The names of its chunks, 16 bytes each.
    fn names(&self) -> Vec<[u8; 16]> {
        self.inner.names().iter().map(|name| name.0).collect()
    }

    /// Its first `n_chunks` chunks without their tokens, 48 bytes each: for `Store.unpack` in another process.
    fn pack<'py>(&self, py: Python<'py>, n_chunks: usize) -> Bound<'py, PyBytes> {
        let packed = py.detach(|| {
            let n_chunks = n_chunks.min(self.inner.n_chunks());
            let n_tokens = self.inner.tokens_of(n_chunks).start as u64;
            let mut packed = Vec::with_capacity(HEAD_BYTES + n_chunks * CHUNK_BYTES);
            packed.extend_from_slice(&self.inner.space().root_digest().0);
            packed.extend_from_slice(&n_tokens.to_le_bytes());
            for (name, digest) in self.inner.names().iter().zip(self.inner.digests(n_chunks)) {
                packed.extend_from_slice(name.as_bytes());
                packed.extend_from_slice(&digest.0);
            }
            packed
        });
        PyBytes::new(py, &packed)
    }

    /// The chain of a longer sequence with the same salt and extra keys; chunks that both share are not hashed again.
    fn extended(&self, py: Python<'_>, tokens: Vec<u32>) -> Self {
        Self { inner: py.detach(|| self.inner.extended(&tokens)) }
    }

    fn __len__(&self) -> usize {
        self.inner.n_chunks()
    }

    fn __repr__(&self) -> String {
        format!("Chain(n_chunks={}, n_tokens={})", self.inner.n_chunks(), self.inner.n_tokens())
    }
}
