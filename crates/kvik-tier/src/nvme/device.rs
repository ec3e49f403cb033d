//! A tier on a block device, without a file system.
//!
//! ```text
//! 0        header: magic, version, identity, length and number of segments, CRC-64
//! 4096     nothing, where other programs have their marks
//! 1 MiB    segment 0, as a file of a directory is
//! ...      further segments, each as long as the first
//! ```
//!
//! A device belongs to kvik by its header alone. One without it is formatted only on demand, and never where another
//! program has left a mark or uses it. Formatting first takes the header away, then blanks the first block of every
//! segment, and writes the header last, with a sync between the steps: a device with a header has all its segments, and
//! none of an earlier life.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, checksum};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::aligned::AlignedBuffer;
use super::file::SegmentFile;
use super::format::{BLOCK_BYTES, Reason};
use super::lock::FileLock;
use super::options::{MIN_SEGMENTS, NvmeOptions};
use super::signature::{SEARCHED_BYTES, find_signature};
use crate::error::{Result, TierError};

const MAGIC: [u8; 8] = *b"KVIKDISK";
const VERSION: u32 = 1;
const CRC_BYTES: usize = 8;

/// Segments are counted with 32 bits.
const MAX_SEGMENTS: u64 = u32::MAX as u64;

/// Where the first segment begins.
const FIRST_SEGMENT: u64 = SEARCHED_BYTES;

const UNFORMATTED: &str = "a device that kvik has formatted: `kvik store format DEVICE` does that, or \
    `store.format_devices: true`; what is on it is lost";

/// The first block of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceHeader {
    /// Names the device since it was formatted.
    pub(crate) id: [u8; 16],
    pub(crate) segment_bytes: u64,
    pub(crate) n_segments: u64,
}

/// A device that this process alone uses.
#[derive(Debug)]
pub(crate) struct Device {
    path: PathBuf,
    /// Open for its user alone, and locked.
    lock: FileLock,
    header: DeviceHeader,
}

/// What formatting writes to.
pub(crate) trait Medium {
    /// Writes whole blocks.
    fn write(&self, offset: u64, blocks: &AlignedBuffer) -> io::Result<()>;

    /// Makes what was written survive a loss of power.
    fn sync(&self) -> io::Result<()>;
}

impl Medium for File {
    fn write(&self, offset: u64, blocks: &AlignedBuffer) -> io::Result<()> {
        self.write_all_at(blocks, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

// === impl DeviceHeader ===

impl DeviceHeader {
    /// The header of a device of so many bytes.
    ///
    /// # Errors
    /// If the device is too small or larger than it is.
    pub(crate) fn for_device(options: &NvmeOptions, device_bytes: u64, id: [u8; 16]) -> Result<Self> {
        let usable_bytes = device_bytes.saturating_sub(FIRST_SEGMENT);
        let is_whole = options.capacity_bytes == NvmeOptions::WHOLE_DEVICE;
        if !is_whole && options.capacity_bytes > device_bytes {
            let allowed = format!("at most {device_bytes} bytes, which the device has");
            return Err(TierError::invalid("capacity_bytes", &options.capacity_bytes, allowed));
        }
        let capacity_bytes = options.capacity_bytes.min(usable_bytes);
        let sized = NvmeOptions { capacity_bytes, ..options.clone() };
        let segment_bytes = sized.checked_segment_bytes()?;
        Ok(Self { id, segment_bytes, n_segments: capacity_bytes / segment_bytes })
    }

    pub(crate) fn encode(&self) -> AlignedBuffer {
        let mut block = AlignedBuffer::new(BLOCK_BYTES as usize);
        let fields = [
            &MAGIC[..],
            &VERSION.to_le_bytes(),
            &[0; 4],
            &self.id,
            &self.segment_bytes.to_le_bytes(),
            &self.n_segments.to_le_bytes(),
        ]
        .concat();
        block[..fields.len()].copy_from_slice(&fields);
        let crc_at = block.len() - CRC_BYTES;
        let crc = checksum(CrcAlgorithm::Crc64Nvme, &block[..crc_at]);
        block[crc_at..].copy_from_slice(&crc.to_le_bytes());
        block
    }

    /// Reads the first block of a device of so many bytes.
    ///
    /// # Errors
    /// Why it is no header of kvik.
    pub(crate) fn decode(block: &[u8], device_bytes: u64) -> Result<Self, Reason> {
        let (body, crc) = block.split_last_chunk::<CRC_BYTES>().ok_or("it is too short")?;
        let (magic, rest) = body.split_first_chunk::<8>().ok_or("it is too short")?;
        if *magic != MAGIC {
            return Err("it has no header of kvik");
        }
        if checksum(CrcAlgorithm::Crc64Nvme, body) != u64::from_le_bytes(*crc) {
            return Err("its header is damaged");
        }
        let (version, rest) = rest.split_first_chunk::<4>().ok_or("it is too short")?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err("its header is of another version");
        }
        let (_, rest) = rest.split_first_chunk::<4>().ok_or("it is too short")?;
        let (id, rest) = rest.split_first_chunk::<16>().ok_or("it is too short")?;
        let (segment_bytes, rest) = rest.split_first_chunk::<8>().ok_or("it is too short")?;
        let (n_segments, _) = rest.split_first_chunk::<8>().ok_or("it is too short")?;
        let header = Self {
            id: *id,
            segment_bytes: u64::from_le_bytes(*segment_bytes),
            n_segments: u64::from_le_bytes(*n_segments),
        };
        let end =
            header.segment_bytes.checked_mul(header.n_segments).and_then(|n| n.checked_add(FIRST_SEGMENT));
        let is_whole_blocks = header.segment_bytes.is_multiple_of(BLOCK_BYTES) && header.segment_bytes > 0;
        match end {
            Some(end) if end > device_bytes => Err("its header is of a larger device"),
            Some(_) if is_whole_blocks && (MIN_SEGMENTS..=MAX_SEGMENTS).contains(&header.n_segments) => {
                Ok(header)
            }
            _ => Err("its header cannot be"),
        }
    }

    /// Makes a device ready for kvik; what was on it is lost.
    ///
    /// # Errors
    /// If the device does not take or keep it; it has no header then.
    pub(crate) fn format(&self, medium: &dyn Medium) -> io::Result<()> {
        let blank = AlignedBuffer::new(BLOCK_BYTES as usize);
        medium.write(0, &blank)?;
        medium.sync()?;
        for number in 0..self.n_segments {
            medium.write(self.segment_offset(number), &blank)?;
        }
        medium.sync()?;
        medium.write(0, &self.encode())?;
        medium.sync()
    }

    fn segment_offset(&self, number: u64) -> u64 {
        FIRST_SEGMENT + number * self.segment_bytes
    }
}

// === impl Device ===

impl Device {
    /// Opens the device at the path of the options; `None` where there is a folder, or nothing yet.
    ///
    /// # Errors
    /// If it is in use, has a mark of another program, or has no header and may not be formatted.
    pub(crate) fn open(options: &NvmeOptions) -> Result<Option<Self>> {
        let path = &options.dir;
        if !is_device(path)? {
            return Ok(None);
        }
        let lock = open_alone(path)?;
        let (device_bytes, first_block) = inspect(path, lock.file())?;
        let header = match DeviceHeader::decode(&first_block, device_bytes) {
            Ok(header) => header,
            Err(_) if options.formats_device => format_opened(options, lock.file(), device_bytes)?,
            Err(reason) => {
                let given = format!("{}: {reason}", path.display());
                return Err(TierError::invalid("nvme", &given, UNFORMATTED));
            }
        };
        let asked = DeviceHeader::for_device(options, device_bytes, header.id)?;
        let is_whole = options.capacity_bytes == NvmeOptions::WHOLE_DEVICE;
        if !is_whole && asked.capacity_bytes() != header.capacity_bytes() {
            let allowed = format!("no size, or that of the format, {} bytes", header.capacity_bytes());
            return Err(TierError::invalid("capacity_bytes", &options.capacity_bytes, allowed));
        }
        Ok(Some(Self { path: path.clone(), lock, header }))
    }

    pub(crate) fn segment_bytes(&self) -> u64 {
        self.header.segment_bytes
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.header.capacity_bytes()
    }

    /// What keeps other programs from the device; its segments need it.
    pub(crate) fn into_lock(self) -> FileLock {
        self.lock
    }

    /// All segments, used or not.
    pub(crate) fn segments(&self) -> impl Iterator<Item = SegmentFile> {
        let DeviceHeader { segment_bytes, n_segments, .. } = self.header;
        let path = &self.path;
        (0..n_segments).map(move |number| {
            let base = self.header.segment_offset(number);
            SegmentFile::of_device(path, self.lock.file(), number as u32, base, segment_bytes)
        })
    }
}

impl DeviceHeader {
    fn capacity_bytes(&self) -> u64 {
        self.segment_bytes * self.n_segments
    }
}

/// Makes the device at the path of the options ready for kvik; returns the bytes that segments take.
///
/// # Errors
/// If it is no device, is in use, has a mark of another program, or was formatted before.
pub fn format_device(options: &NvmeOptions) -> Result<u64> {
    let path = &options.dir;
    if !is_device(path)? {
        return Err(TierError::invalid("device", &path.display(), "a block device"));
    }
    let lock = open_alone(path)?;
    let (device_bytes, first_block) = inspect(path, lock.file())?;
    if DeviceHeader::decode(&first_block, device_bytes).is_ok() {
        let allowed = "a device that kvik has not formatted; blank its first 4096 bytes to format it again";
        return Err(TierError::invalid("device", &path.display(), allowed));
    }
    Ok(format_opened(options, lock.file(), device_bytes)?.capacity_bytes())
}

fn format_opened(options: &NvmeOptions, file: &File, device_bytes: u64) -> Result<DeviceHeader> {
    let failed = |error| TierError::io(format!("format {}", options.dir.display()), error);
    let header = DeviceHeader::for_device(options, device_bytes, random_id().map_err(failed)?)?;
    header.format(file).map_err(failed)?;
    Ok(header)
}

fn random_id() -> io::Result<[u8; 16]> {
    let mut id = [0; 16];
    match rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())? {
        16 => Ok(id),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Whether there is a device, or the image of one, and no folder.
fn is_device(path: &Path) -> Result<bool> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Ok(false),
        Ok(metadata) if metadata.file_type().is_block_device() || metadata.is_file() => Ok(true),
        Ok(_) => Err(TierError::invalid("nvme", &path.display(), "a folder or a block device")),
        // A folder that is to be made; what else is wrong is found then.
        Err(_) => Ok(false),
    }
}

/// Opens a device that no other program has open for itself, past the page cache where it can be.
fn open_alone(path: &Path) -> Result<FileLock> {
    let failed = |error| TierError::io(format!("open {}", path.display()), error);
    let open = |flags: OFlags| {
        OpenOptions::new().read(true).write(true).custom_flags(flags.bits().cast_signed()).open(path)
    };
    // A block device that is mounted, or in use by another program in the same way, is refused by the kernel.
    let opened = match open(OFlags::EXCL | OFlags::DIRECT) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => open(OFlags::EXCL),
        opened => opened,
    };
    let in_use = || {
        let allowed = "a device that is not mounted and that no other program has open";
        TierError::invalid("nvme", &path.display(), allowed)
    };
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(code) if code == Errno::BUSY.raw_os_error() => in_use(),
        _ => failed(error),
    })?;
    FileLock::take(file).map_err(failed)?.ok_or_else(in_use)
}

/// The length of a device and its first block.
///
/// # Errors
/// If another program has left a mark on it.
fn inspect(path: &Path, file: &File) -> Result<(u64, AlignedBuffer)> {
    let failed = |error| TierError::io(format!("read {}", path.display()), error);
    let mut seeking = file;
    let device_bytes = seeking.seek(SeekFrom::End(0)).map_err(failed)?;
    let n_searched = SEARCHED_BYTES.min(device_bytes / BLOCK_BYTES * BLOCK_BYTES);
    let mut bytes = AlignedBuffer::new(n_searched as usize);
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    if let Some(owner) = find_signature(&bytes) {
        let given = format!("{}, which has {owner}", path.display());
        let allowed = "a device without the mark of another program; `wipefs` removes it, if what is there is not needed";
        return Err(TierError::invalid("nvme", &given, allowed));
    }
    let mut first_block = AlignedBuffer::new(BLOCK_BYTES as usize);
    let n_bytes = first_block.len().min(bytes.len());
    first_block[..n_bytes].copy_from_slice(&bytes[..n_bytes]);
    Ok((device_bytes, first_block))
}
