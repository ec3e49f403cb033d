//! KV that the device reads from files and writes to them by itself, by way of memory beside the blocks (`lane.rs`): what comes is
//! proven there before it is copied to blocks, and what leaves is summed up there (`write.rs`).

mod lane;
mod write;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvik_memory::vmm::cuda::CopyPiece;
use lane::{CHECKSUM_THREADS, Lane, MAX_SECTIONS};
use parking_lot::Mutex;

use super::device::{CuFile, Device, FileHandle, Function, Module, compile};
use super::pages::{PageAddresses, add_piece};
use crate::error::{ModelError, Result};
use crate::forward::{BlockSource, FileRead, FileReads, KvFile};
use crate::paging::BlockId;

const SOURCE: &str = include_str!("../kernels/checksum.cu");

/// What files are read and written in.
const FILE_BLOCK_BYTES: u64 = 4096;

/// Bytes of sections that are read or written by one call, and the longest section: enough that calls cost little beside them.
pub(super) const CALL_BYTES: usize = 8 << 20;

/// Reads under way at a time: disks are fast only when they are asked for much, and bytes that have come are proven meanwhile.
const N_LANES: usize = 4;

/// Moves KV between files and blocks.
#[derive(Debug)]
pub(super) struct FileMover {
    device: Arc<Device>,
    library: &'static CuFile,
    checksum: Function,
    lanes: [Mutex<Lane>; N_LANES],
    write_lanes: Mutex<write::Lanes>,
}

/// Blocks of a prompt that lie in one file.
struct FileBlocks<'a> {
    source: &'a dyn BlockSource,
    /// All that the file has.
    blocks: Range<usize>,
    /// Those that are wanted, and where they go.
    wanted: &'a [(usize, BlockId)],
    file: OnceLock<Option<Box<dyn KvFile>>>,
    n_left_layers: AtomicUsize,
}

/// The files that the library knows, of those that are read together: chunks may share one.
struct Handles<'a> {
    library: &'static CuFile,
    known: Mutex<Vec<Arc<FileHandle<'a>>>>,
}

/// What is read of each file at a time, and what is left of it.
struct Progress {
    layers_at_a_time: usize,
    /// Files whose layers have not come, for each of these groups.
    n_left_files: Mutex<Vec<usize>>,
    has_failed: AtomicBool,
}

/// What takes the pieces of a read to the blocks.
pub(super) type CopyInside<'a> = &'a (dyn Fn(&[CopyPiece]) -> Result<()> + Sync);

impl FileMover {
    /// Sets up what `wanted` says; `None` where there is to be none, or what it needs is not there and need not be.
    ///
    /// # Errors
    /// If it is wanted in any case and the library is not there.
    pub(super) fn open(
        device: &Arc<Device>,
        wanted: FileReads,
        cache: Option<&Path>,
    ) -> Result<Option<Self>> {
        match wanted {
            FileReads::Off => Ok(None),
            FileReads::On => Self::new(device, cache).map(Some),
            FileReads::Auto => Ok(Self::new(device, cache)
                .inspect_err(|error| tracing::info!(%error, "the device does not read files by itself"))
                .ok()),
        }
    }

    fn new(device: &Arc<Device>, cache: Option<&Path>) -> Result<Self> {
        device.enter()?;
        let library = CuFile::get()?;
        let module = Module::load(device, &compile(SOURCE, &[], cache)?)?;
        let checksum = module.function("checksum_sections", CHECKSUM_THREADS, 0)?;
        // All of them now: new memory is zeroed in the engine's stream, and later another thread may record that.
        let lanes: Vec<Mutex<Lane>> =
            (0..N_LANES).map(|_| Lane::new(device, library).map(Mutex::new)).collect::<Result<_>>()?;
        let write_lanes = Mutex::new(write::new_lanes(device, library)?);
        device.synchronize()?;
        let lanes = <[Mutex<Lane>; N_LANES]>::try_from(lanes).map_err(|_| failed("a number of lanes"))?;
        Ok(Self { device: Arc::clone(device), library, checksum, lanes, write_lanes })
    }

    /// Reads all layers of `blocks`, which lie in files of `source`, and has `copy` bring them to `pages`; `tell` hears how many
    /// layers are there. A file that cannot be read, or has other bytes than were stored, ends it; the file is told.
    ///
    /// # Safety
    /// The blocks are the caller's alone until this returns.
    ///
    /// # Errors
    /// As said; any of the blocks may have been written.
    pub(super) unsafe fn read(
        &self,
        source: &dyn BlockSource,
        blocks: &[(usize, BlockId)],
        pages: &PageAddresses,
        copy: CopyInside<'_>,
        tell: &(dyn Fn(usize) + Sync),
    ) -> Result<()> {
        let (n_layers, block_bytes) = (pages.n_layers(), pages.block_bytes());
        let files = files_of(source, blocks, n_layers)?;
        let longest = files.iter().map(|file| file.blocks.len() * block_bytes).max().unwrap_or(0);
        if longest == 0 || CALL_BYTES < longest || !block_bytes.is_multiple_of(8) {
            return Err(failed(format!("a layer of {longest} bytes, of at most {CALL_BYTES}")));
        }
        let layers_at_a_time = (CALL_BYTES / longest).min(MAX_SECTIONS);
        let n_groups = n_layers.div_ceil(layers_at_a_time);
        let n_left_files = Mutex::new(vec![files.len(); n_groups]);
        let progress = Progress { layers_at_a_time, n_left_files, has_failed: AtomicBool::new(false) };
        // Given back before the files are.
        let handles = Handles { library: self.library, known: Mutex::default() };
        let next = AtomicUsize::new(0);
        let read_next = |lane: &Mutex<Lane>| -> Result<()> {
            let mut lane = lane.lock();
            self.device.enter()?;
            while !progress.has_failed.load(Ordering::Relaxed) {
                // By layers: those that passes need first come first.
                let turn = next.fetch_add(1, Ordering::Relaxed);
                let (group, file) = (turn / files.len(), &files[turn % files.len()]);
                if n_groups <= group {
                    break;
                }
                let first = group * progress.layers_at_a_time;
                let layers = first..n_layers.min(first + progress.layers_at_a_time);
                let n_read_layers = layers.len();
                let pieces = self.read_layers(&mut lane, file, &handles, layers, pages)?;
                copy(&pieces)?;
                file.note_layers(n_read_layers);
                progress.note(group, n_layers, tell);
            }
            Ok(())
        };
        let read_lane =
            |lane| read_next(lane).inspect_err(|_| progress.has_failed.store(true, Ordering::Relaxed));
        std::thread::scope(|scope| {
            let read_lane = &read_lane;
            let others: Vec<_> =
                self.lanes[1..].iter().map(|lane| scope.spawn(move || read_lane(lane))).collect();
            let first = read_lane(&self.lanes[0]);
            let ended = others
                .into_iter()
                .map(|lane| lane.join().unwrap_or_else(|_| Err(failed("a thread that reads has panicked"))));
            ended.fold(first, Result::and)
        })
    }

    /// Reads some layers of a file and proves them; says which pieces go where.
    fn read_layers<'a>(
        &self,
        lane: &mut Lane,
        blocks: &'a FileBlocks<'_>,
        handles: &Handles<'a>,
        layers: Range<usize>,
        pages: &PageAddresses,
    ) -> Result<Vec<CopyPiece>> {
        let block_bytes = pages.block_bytes();
        let section_bytes = blocks.blocks.len() * block_bytes;
        let file = blocks.open()?;
        let checksums = file.checksums().get(layers.clone());
        let checksums = checksums.ok_or_else(|| failed("checksums of all layers"))?;
        let start = file.offset() + (layers.start * section_bytes) as u64;
        let mut read = || -> Result<u64> {
            let handle = handles.of(file)?;
            let end = start + (layers.len() * section_bytes) as u64;
            let first = start - start % FILE_BLOCK_BYTES;
            let n_bytes = (end.next_multiple_of(FILE_BLOCK_BYTES) - first) as usize;
            lane.read(&handle, n_bytes, first)?;
            Ok(lane.address() + (start - first))
        };
        let address = read().inspect_err(|_| file.note_read(FileRead::Failed))?;
        let found = lane.checksums_of(&self.checksum, address, section_bytes, layers.len());
        let found = found.inspect_err(|_| file.note_read(FileRead::Failed))?;
        if found != checksums {
            file.note_read(FileRead::Corrupt);
            return Err(failed("a layer whose bytes are those that were stored"));
        }
        let mut pieces = Vec::with_capacity(layers.len() * blocks.wanted.len());
        for (place, layer_idx) in layers.enumerate() {
            for &(block_idx, block) in blocks.wanted {
                let offset = place * section_bytes + (block_idx - blocks.blocks.start) * block_bytes;
                let target = pages.address(layer_idx, block);
                let piece = CopyPiece { target, source: address + offset as u64, n_bytes: block_bytes };
                add_piece(&mut pieces, piece);
            }
        }
        Ok(pieces)
    }
}

impl FileBlocks<'_> {
    fn open(&self) -> Result<&dyn KvFile> {
        let file = self.file.get_or_init(|| self.source.open_file(self.blocks.start));
        file.as_deref().ok_or_else(|| failed("a file that is still there"))
    }

    /// Tells the file when all of its layers have come.
    fn note_layers(&self, n_layers: usize) {
        if self.n_left_layers.fetch_sub(n_layers, Ordering::AcqRel) == n_layers
            && let Ok(file) = self.open()
        {
            file.note_read(FileRead::Whole);
        }
    }
}

impl<'a> Handles<'a> {
    fn of(&self, file: &'a dyn KvFile) -> Result<Arc<FileHandle<'a>>> {
        use std::os::fd::AsRawFd as _;

        let mut known = self.known.lock();
        let descriptor = file.file().as_raw_fd();
        if let Some(handle) = known.iter().find(|handle| handle.descriptor() == descriptor) {
            return Ok(Arc::clone(handle));
        }
        let handle = Arc::new(self.library.handle(file.file())?);
        known.push(Arc::clone(&handle));
        Ok(handle)
    }
}

impl Progress {
    /// Notes that a group of layers of a file has come.
    fn note(&self, group: usize, n_layers: usize, tell: &(dyn Fn(usize) + Sync)) {
        let mut n_left_files = self.n_left_files.lock();
        n_left_files[group] -= 1;
        let n_whole = n_left_files.iter().take_while(|n_left| **n_left == 0).count();
        // Under the lock: what is told never falls.
        tell(n_layers.min(n_whole * self.layers_at_a_time));
    }
}

/// The files of blocks, which are in rising order.
fn files_of<'a>(
    source: &'a dyn BlockSource,
    mut blocks: &'a [(usize, BlockId)],
    n_layers: usize,
) -> Result<Vec<FileBlocks<'a>>> {
    let mut files = Vec::new();
    while let Some((first, _)) = blocks.first() {
        let of_file = source.file_blocks(*first).filter(|of_file| of_file.contains(first));
        let of_file = of_file.ok_or_else(|| failed("blocks that lie in files"))?;
        let n_wanted = blocks.iter().take_while(|(block_idx, _)| of_file.contains(block_idx)).count();
        let (wanted, rest) = blocks.split_at(n_wanted);
        let (file, n_left_layers) = (OnceLock::new(), AtomicUsize::new(n_layers));
        files.push(FileBlocks { source, blocks: of_file, wanted, file, n_left_layers });
        blocks = rest;
    }
    Ok(files)
}

fn failed(allowed: impl Into<String>) -> ModelError {
    ModelError::request("kv", "in a file", allowed.into())
}

#[cfg(test)]
mod tests {
    use crc_fast::{CrcAlgorithm, checksum};
    use proptest::prelude::*;

    use super::*;

    /// As `checksum.cu` has it.
    const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

    fn multiply(a: u64, mut b: u64) -> u64 {
        let mut product = 0;
        for power in (0..64).rev() {
            if (a >> power) & 1 == 1 {
                product ^= b;
            }
            b = (b >> 1) ^ (if b & 1 == 1 { POLYNOMIAL } else { 0 });
        }
        product
    }

    /// What the kernel does with a section, thread by thread.
    fn by_threads(words: &[u64], n_threads: usize) -> u64 {
        let mut shift = POLYNOMIAL;
        for _ in 0..n_threads.ilog2() {
            shift = multiply(shift, shift);
        }
        let n_missing = words.len().next_multiple_of(n_threads) - words.len();
        let mut sums = vec![0; n_threads];
        for row in 0..words.len().div_ceil(n_threads) {
            for (thread, sum) in sums.iter_mut().enumerate() {
                let word = match (row * n_threads + thread).checked_sub(n_missing) {
                    None => 0,
                    Some(0) => !words[0],
                    Some(at) => words[at],
                };
                *sum = multiply(*sum, shift) ^ word;
            }
        }
        let (mut step, mut shift) = (1, POLYNOMIAL);
        while step < n_threads {
            for thread in (0..n_threads).step_by(2 * step) {
                sums[thread] = multiply(sums[thread], shift) ^ sums[thread + step];
            }
            (step, shift) = (2 * step, multiply(shift, shift));
        }
        !multiply(sums[0], POLYNOMIAL)
    }

    proptest! {
        #[test]
        fn remainders_of_threads_add_up_to_the_checksum_of_the_section(
            words in prop::collection::vec(any::<u64>(), 1..1500),
            log_threads in 0_u32..9,
        ) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let expected = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
            prop_assert_eq!(by_threads(&words, 1 << log_threads), expected);
        }
    }

    #[test]
    fn the_kernel_has_the_numbers_of_this_file() {
        assert!(SOURCE.contains(&format!("#define N_THREADS {CHECKSUM_THREADS}\n")));
        assert!(SOURCE.contains(&format!("#define POLYNOMIAL {POLYNOMIAL:#x}ull\n")));
    }

    /// Blocks 3 to 10 lie in files of four, the first of them from block 2 on.
    #[derive(Debug)]
    struct Files;

    impl BlockSource for Files {
        fn block(&self, _: usize, _: usize) -> Option<&[u8]> {
            None
        }

        fn file_blocks(&self, block_idx: usize) -> Option<Range<usize>> {
            let start = block_idx.checked_sub(2)? / 4 * 4 + 2;
            (start < 10).then_some(start..start + 4)
        }
    }

    #[test]
    fn blocks_are_taken_from_the_files_that_have_them() {
        let blocks: Vec<_> = (3..9).map(|block_idx| (block_idx, BlockId::new(block_idx as u32))).collect();
        let files = files_of(&Files, &blocks, 5).unwrap();
        let found: Vec<_> = files.iter().map(|file| (file.blocks.clone(), file.wanted.len())).collect();
        assert_eq!(found, [(2..6, 3), (6..10, 3)]);
        assert!(files_of(&Files, &[(1, BlockId::new(1))], 5).is_err());
        let gone = files[0].open().map(|_| ()).unwrap_err().to_string();
        assert!(gone.contains("a file that is still there"), "{gone}");
    }

    #[test]
    fn a_layer_is_told_when_it_has_come_from_every_file() {
        let progress = Progress {
            layers_at_a_time: 2,
            n_left_files: Mutex::new(vec![2, 2, 2]),
            has_failed: false.into(),
        };
        let told = Mutex::new(Vec::new());
        for group in [0, 1, 1, 0, 2, 2] {
            progress.note(group, 5, &|n_there| told.lock().push(n_there));
        }
        assert_eq!(*told.lock(), [0, 0, 0, 4, 4, 5]);
    }
}
