//! Where the bytes of one safetensors file come from.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::header::{self, Header, LENGTH_BYTES};
use crate::error::{ModelError, Result};

/// One safetensors file, on disk or in memory.
#[derive(Debug)]
pub(super) enum Source {
    /// Read by position and not mapped: a file that another process cuts gives an error
    /// instead of a signal.
    File {
        path: PathBuf,
        file: File,
    },
    Memory(Cow<'static, [u8]>),
}

impl Source {
    /// Opens a file and reads its header.
    pub(super) fn open(path: &Path) -> Result<(Self, Header)> {
        let io_error = |source: io::Error| ModelError::Io { path: path.to_owned(), source };
        // Looked at before it is opened: opening a pipe would wait for a writer.
        if !fs::metadata(path).map_err(io_error)?.is_file() {
            return Err(ModelError::weights(path.display().to_string(), "is not a file"));
        }
        let file = File::open(path).map_err(io_error)?;
        let file_len = file.metadata().map_err(io_error)?.len();
        let file_name = path.display().to_string();
        let mut length = vec![0; LENGTH_BYTES.min(file_len) as usize];
        file.read_exact_at(&mut length, 0).map_err(io_error)?;
        let header_len = header::header_len(&file_name, &length, file_len)?;
        let mut bytes = vec![0; (LENGTH_BYTES + header_len) as usize];
        file.read_exact_at(&mut bytes, 0).map_err(io_error)?;
        let header = header::parse_named_header(&file_name, &bytes, file_len)?;
        Ok((Self::File { path: path.to_owned(), file }, header))
    }

    /// Reads the bytes in `range`, which came from the header of this file.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Cow<'static, [u8]>> {
        match self {
            Self::File { path, file } => {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                file.read_exact_at(&mut bytes, range.start)
                    .map_err(|source| ModelError::Io { path: path.clone(), source })?;
                Ok(Cow::Owned(bytes))
            }
            Self::Memory(bytes) => {
                let range = range.start as usize..range.end as usize;
                match bytes {
                    Cow::Borrowed(bytes) => bytes.get(range).map(Cow::Borrowed),
                    Cow::Owned(bytes) => bytes.get(range).map(|part| Cow::Owned(part.to_vec())),
                }
                .ok_or_else(|| ModelError::weights("memory", "a tensor lies outside of the bytes"))
            }
        }
    }
}
