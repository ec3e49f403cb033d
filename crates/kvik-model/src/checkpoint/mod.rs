//! Reading weights from safetensors files, one tensor at a time.
//!
//! A [`Checkpoint`] is one file, several files under an index, or bytes in memory. Opening it
//! reads and checks the headers only; a tensor's bytes are read when it is asked for, so a model
//! is never in memory twice. No byte of a file is trusted: a damaged file is an error.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::error::{ModelError, Result};

mod header;
mod index;
mod source;
mod tensor;
#[cfg(test)]
mod tests;

pub use header::{Header, TensorPlace, parse_header};
pub use tensor::{Tensor, TensorInfo, WeightDtype};

use source::Source;

/// The file of a checkpoint that is not split.
const SINGLE_FILE: &str = "model.safetensors";

/// Longest index file that is read, in bytes; an index takes some 100 bytes a tensor.
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// The weights of a model, ready to be read by name.
#[derive(Debug)]
pub struct Checkpoint {
    sources: Vec<Source>,
    tensors: BTreeMap<String, Entry>,
    /// Tensors that cannot be read, with the name of their dtype.
    unsupported: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Entry {
    info: TensorInfo,
    source_idx: usize,
    range: Range<u64>,
}

impl Checkpoint {
    /// Opens `model.safetensors` of a model folder, or the files that `model.safetensors.index.json` names.
    pub fn open(folder: &Path) -> Result<Self> {
        let single_path = folder.join(SINGLE_FILE);
        if is_present(&single_path)? {
            let (source, header) = Source::open(&single_path)?;
            let mut checkpoint = Self::empty();
            checkpoint.add(source, header);
            return Ok(checkpoint);
        }
        let index_path = folder.join(index::INDEX_FILE);
        if is_present(&index_path)? {
            return Self::open_shards(folder, &index_path);
        }
        let what = format!("{SINGLE_FILE} or {}", index::INDEX_FILE);
        Err(ModelError::MissingFile { folder: folder.to_owned(), what })
    }

    /// Takes the bytes of one safetensors file; `name` stands for the file in messages.
    ///
    /// Tensors of borrowed bytes are read without a copy.
    pub fn from_bytes(name: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        let header = header::parse_named_header(name, &bytes, bytes.len() as u64)?;
        let mut checkpoint = Self::empty();
        checkpoint.add(Source::Memory(bytes), header);
        Ok(checkpoint)
    }

    /// Returns the names of the tensors that can be read, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns dtype and shape of a tensor; `None` if it is missing or of a dtype the engine does not read.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|entry| &entry.info)
    }

    /// Reads a tensor.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let source = self
            .sources
            .get(entry.source_idx)
            .ok_or_else(|| ModelError::weights(name, "its file is not open"))?;
        let bytes = source.read(entry.range.clone())?;
        Ok(Tensor { dtype: entry.info.dtype, shape: entry.info.shape.clone(), bytes })
    }

    /// Reads a tensor that must have the shape `expected`; nothing is read if it has not.
    pub fn read_shaped(&self, name: &str, expected: &[usize]) -> Result<Tensor> {
        let found = &self.entry(name)?.info.shape;
        if found != expected {
            return Err(ModelError::weights(name, format!("the shape is {found:?}; expected: {expected:?}")));
        }
        self.read(name)
    }

    /// Returns the bytes of all tensors that can be read.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.range.end - entry.range.start).sum()
    }

    /// Returns the number of elements of all tensors that can be read.
    pub fn n_parameters(&self) -> u64 {
        self.tensors.values().map(|entry| entry.info.n_elements() as u64).sum()
    }

    /// Returns a hash of all tensors that can be read: names, dtypes, shapes and elements. Reads all of them.
    pub fn fingerprint(&self) -> Result<u128> {
        let mut hash = Xxh3::new();
        for (name, entry) in &self.tensors {
            let tensor = self.read(name)?;
            let header = format!("{name:?} {} {:?}", entry.info.dtype, entry.info.shape);
            for part in [header.as_bytes(), &tensor.bytes] {
                // With its length, so that no part can take bytes from the next one.
                hash.update(&(part.len() as u64).to_le_bytes());
                hash.update(part);
            }
        }
        Ok(hash.digest128())
    }
    pub(crate) fn empty() -> Self {
        Self { sources: Vec::new(), tensors: BTreeMap::new(), unsupported: BTreeMap::new() }
    }

    fn add(&mut self, source: Source, header: Header) {
        let source_idx = self.sources.len();
        self.sources.push(source);
        let entries = header
            .tensors
            .into_iter()
            .map(|(name, TensorPlace { info, range })| (name, Entry { info, source_idx, range }));
        self.tensors.extend(entries);
        self.unsupported.extend(header.unsupported);
    }

    fn open_shards(folder: &Path, index_path: &Path) -> Result<Self> {
        let io_error = |source: io::Error| ModelError::Io { path: index_path.to_owned(), source };
        let index_len = fs::metadata(index_path).map_err(io_error)?.len();
        if index_len > MAX_INDEX_BYTES {
            let reason = format!("the file has {index_len} bytes; allowed: at most {MAX_INDEX_BYTES}");
            return Err(ModelError::weights(index::INDEX_FILE, reason));
        }
        let shards = index::parse_index(&fs::read(index_path).map_err(io_error)?)?;
        let mut checkpoint = Self::empty();
        for (shard_name, tensor_names) in shards {
            let shard_path = folder.join(&shard_name);
            if !is_present(&shard_path)? {
                return Err(ModelError::MissingFile { folder: folder.to_owned(), what: shard_name });
            }
            let (source, mut header) = Source::open(&shard_path)?;
            // The index decides which shard a tensor is read from; what else a shard holds is
            // left out, so two shards with the same name cannot hide one another.
            let mut wanted = Header::default();
            for name in tensor_names {
                if let Some(place) = header.tensors.remove(&name) {
                    wanted.tensors.insert(name, place);
                } else if let Some(dtype) = header.unsupported.remove(&name) {
                    wanted.unsupported.insert(name, dtype);
                } else {
                    let reason = format!("the index places it in {shard_name}, which does not hold it");
                    return Err(ModelError::weights(name, reason));
                }
            }
            checkpoint.add(source, wanted);
        }
        Ok(checkpoint)
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.tensors.get(name).ok_or_else(|| match self.unsupported.get(name) {
            Some(dtype) => {
                ModelError::weights(name, format!("the dtype is {dtype}; allowed: F32, F16, BF16"))
            }
            None => ModelError::weights(name, "the tensor is missing"),
        })
    }
}

fn is_present(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|source| ModelError::Io { path: path.to_owned(), source })
}
