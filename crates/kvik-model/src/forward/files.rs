//! KV that lies in files, for devices that read files by themselves.

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

use crate::error::ModelError;

/// KV of some blocks of a prompt in an open file: one section for each layer, one after the other, and in each of them block
/// by block. Until it is dropped the bytes stay as they are.
pub trait KvFile: Send + Sync + fmt::Debug {
    /// The file.
    fn file(&self) -> BorrowedFd<'_>;

    /// Where the section of the first layer begins in it. The file has whole blocks of 4096 bytes around all sections.
    fn offset(&self) -> u64;

    /// CRC-64/NVME of each section.
    fn checksums(&self) -> &[u64];

    /// Tells what became of it; the first answer counts.
    fn note_read(&self, read: FileRead);
}

/// What became of the reading of a [`KvFile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileRead {
    /// All of it was read, and every section had its checksum.
    Whole,
    /// A section did not have its checksum.
    Corrupt,
    /// It could not be read.
    Failed,
}

/// The blocks of a prompt that lie in one file.
pub type FileBlocks = Range<usize>;

/// Whether a device reads KV from files by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FileReads {
    /// It does not.
    #[default]
    Off,
    /// Where what it needs for that is there.
    Auto,
    /// It does, and cannot be used without.
    On,
}

impl FromStr for FileReads {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            other => Err(ModelError::request("gpu_direct", other, "off, auto or on")),
        }
    }
}
