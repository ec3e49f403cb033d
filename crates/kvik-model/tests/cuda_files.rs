//! KV that a GPU reads from files and writes to them by itself: the same as by way of memory, and nothing that is not what was stored.
//!
//! Needs a GPU, NVIDIA's cuFile and the feature `cuda-tests`; `benches/gpu/run` runs it on a machine that has them.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

pub mod support;

use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use kvik_model::{
    Backend, BlockId, BlockSource, CudaBackend, CudaBackendOptions, FileRead, FileReads, KvFile, KvSize,
};
use kvik_types::Dtype;
use parking_lot::Mutex;
use support::schedule::{forward_alone, whole};
use support::{KV_DTYPES, TestModel};

/// Linux's flag for reading past the page cache.
const O_DIRECT: i32 = 0o40000;

/// A backend that reads files; `None`, and why, where it cannot.
#[expect(clippy::print_stderr, reason = "a test that cannot run says so")]
fn backend(model: &TestModel, n_blocks: usize, kv_dtype: Dtype) -> Option<CudaBackend> {
    let mut options = CudaBackendOptions::default();
    options.kv_size = KvSize::Blocks(n_blocks);
    options.kv_dtype = kv_dtype;
    options.kernel_cache = Some(std::env::temp_dir().join("kvik-cuda-tests"));
    options.file_reads = FileReads::On;
    match CudaBackend::load(model.config.clone(), model.checkpoint(), &options) {
        Ok(backend) => Some(backend),
        Err(error) if error.to_string().contains("the library was not found") => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A folder that is not in memory: such file systems may refuse direct reads.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

/// Blocks in a file of their own, some of which may be missing.
#[derive(Debug, Clone)]
struct InFile {
    file: Arc<File>,
    offset: u64,
    checksums: Vec<u64>,
    blocks: Range<usize>,
    told: Arc<Mutex<Vec<FileRead>>>,
}

/// What a prompt has in memory, by layer and block, and in files.
#[derive(Debug)]
struct Source {
    memory: Vec<Vec<Vec<u8>>>,
    files: Vec<InFile>,
}

impl InFile {
    /// Writes layers behind `offset` bytes of something else, with something else behind them.
    fn new(
        path: &Path,
        layers: &[Vec<Vec<u8>>],
        blocks: Range<usize>,
        offset: usize,
        is_direct: bool,
    ) -> Self {
        let mut bytes = vec![0xa5; offset];
        let mut checksums = Vec::new();
        for layer in layers {
            let section = layer[blocks.clone()].concat();
            checksums.push(checksum(CrcAlgorithm::Crc64Nvme, &section));
            bytes.extend(section);
        }
        bytes.resize(bytes.len().next_multiple_of(4096), 0x5a);
        let mut file = File::create(path).unwrap();
        file.write_all(&bytes).unwrap();
        file.sync_all().unwrap();
        Self::open(path, offset, checksums, blocks, is_direct)
    }

    fn open(path: &Path, offset: usize, checksums: Vec<u64>, blocks: Range<usize>, is_direct: bool) -> Self {
        let flags = if is_direct { O_DIRECT } else { 0 };
        let file = Arc::new(File::options().read(true).custom_flags(flags).open(path).unwrap());
        Self { file, offset: offset as u64, checksums, blocks, told: Arc::default() }
    }

    fn told(&self) -> Vec<FileRead> {
        self.told.lock().clone()
    }
}

impl KvFile for InFile {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn offset(&self) -> u64 {
        self.offset
    }

    fn checksums(&self) -> &[u64] {
        &self.checksums
    }

    fn note_read(&self, read: FileRead) {
        self.told.lock().push(read);
    }
}

impl BlockSource for Source {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        self.memory.get(layer_idx)?.get(block_idx).map(Vec::as_slice)
    }

    fn file_blocks(&self, block_idx: usize) -> Option<Range<usize>> {
        self.files.iter().map(|file| file.blocks.clone()).find(|blocks| blocks.contains(&block_idx))
    }

    fn open_file(&self, block_idx: usize) -> Option<Box<dyn KvFile>> {
        let file = self.files.iter().find(|file| file.blocks.contains(&block_idx))?;
        // A file without checksums stands for one that is gone.
        (!file.checksums.is_empty()).then(|| Box::new(file.clone()) as Box<dyn KvFile>)
    }
}

/// All layers of the first blocks of a backend.
fn exported(from: &dyn Backend, blocks: Range<u32>) -> Vec<Vec<Vec<u8>>> {
    let block_of = |layer_idx, block| {
        let mut bytes = vec![0; from.block_layer_bytes()];
        from.export_block(layer_idx, BlockId::new(block), &mut bytes).unwrap();
        bytes
    };
    (0..from.config().n_layers)
        .map(|layer_idx| blocks.clone().map(|block| block_of(layer_idx, block)).collect())
        .collect()
}

/// Bytes that look random.
fn noise(n_bytes: usize, salt: u64) -> Vec<u8> {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(word).flatten().take(n_bytes).collect()
}

fn import(to: &mut CudaBackend, source: &Arc<Source>, pairs: &[(usize, BlockId)]) -> kvik_model::Result<()> {
    let source: Arc<dyn BlockSource> = Arc::clone(source) as Arc<dyn BlockSource>;
    to.start_import(&source, pairs).unwrap().finish()
}

#[test]
fn tokens_go_on_from_blocks_in_files_and_in_memory() {
    let model = TestModel::bundled();
    let prompt: Vec<u32> = (0..112).map(|place| (place * 37 + 11) % model.config.vocab_size as u32).collect();
    let dir = folder();
    for (kv_dtype, is_direct) in
        KV_DTYPES.into_iter().flat_map(|kv_dtype| [(kv_dtype, true), (kv_dtype, false)])
    {
        let (Some(mut from), Some(mut to)) = (backend(&model, 8, kv_dtype), backend(&model, 32, kv_dtype))
        else {
            return;
        };
        assert!(to.max_file_section_bytes().is_some());
        let expected = whole(&mut from, &prompt);
        let memory = exported(&from, 0..6);
        let files = vec![
            InFile::new(&dir.path().join("a"), &memory, 0..3, 4096, is_direct),
            InFile::new(&dir.path().join("b"), &memory, 4..6, 3 * 4096, is_direct),
        ];
        let source = Arc::new(Source { memory, files });
        // The first block is there already: a part of a file is wanted.
        to.import_blocks(
            &(0..model.config.n_layers)
                .map(|layer_idx| kvik_model::BlockImport {
                    layer_idx,
                    block: BlockId::new(20),
                    bytes: &source.memory[layer_idx][0],
                })
                .collect::<Vec<_>>(),
        )
        .unwrap();
        let pairs: Vec<_> = (1..6).map(|idx| (idx, BlockId::new(20 + idx as u32))).collect();
        import(&mut to, &source, &pairs).unwrap();
        assert!(exported(&to, 20..26) == source.memory, "{kv_dtype}: other bytes");
        let table: Vec<BlockId> = (20..27).map(BlockId::new).collect();
        let actual = forward_alone(&mut to, &prompt[96..], 96, &table, 16);
        assert!(actual == expected[96..], "{kv_dtype}: other logits");
        assert!(source.files.iter().all(|file| file.told() == [FileRead::Whole]));
    }
}

#[test]
fn files_of_many_reads_come_whole_whatever_their_sections_length() {
    let model = TestModel::bundled();
    let dir = folder();
    let n_layers = model.config.n_layers;
    let Some(mut to) = backend(&model, 2048, Dtype::F32) else { return };
    let block_bytes = to.block_layer_bytes();
    let longest = to.max_file_section_bytes().unwrap() / block_bytes;
    for (n_blocks, salt) in [(1, 1), (3, 2), (longest / 3, 3), (longest.min(1000), 4)] {
        let blocks_of = |layer_idx: usize| -> Vec<Vec<u8>> {
            (0..2 * n_blocks)
                .map(|block_idx| {
                    noise(block_bytes, (salt * 1_000_000 + layer_idx * 10_000 + block_idx) as u64)
                })
                .collect()
        };
        let memory: Vec<Vec<Vec<u8>>> = (0..n_layers).map(blocks_of).collect();
        let files = vec![
            InFile::new(&dir.path().join("a"), &memory, 0..n_blocks, 4096, true),
            InFile::new(&dir.path().join("b"), &memory, n_blocks..2 * n_blocks, 4096, true),
        ];
        let source = Arc::new(Source { memory, files });
        let pairs: Vec<_> = (0..2 * n_blocks).map(|idx| (idx, BlockId::new(idx as u32))).collect();
        import(&mut to, &source, &pairs).unwrap();
        assert!(exported(&to, 0..2 * n_blocks as u32) == source.memory, "{n_blocks} blocks: other bytes");
    }
    let too_long = longest + 1;
    if 2048 < too_long {
        return;
    }
    let memory = vec![vec![vec![7; block_bytes]; too_long]; n_layers];
    let files = vec![InFile::new(&dir.path().join("a"), &memory, 0..too_long, 4096, true)];
    let source = Arc::new(Source { memory, files });
    assert!(import(&mut to, &source, &[(0, BlockId::new(0))]).is_err(), "a section longer than is read");
}

#[test]
fn two_chunks_of_one_file_are_read_through_one_handle() {
    let model = TestModel::bundled();
    let dir = folder();
    let Some(mut to) = backend(&model, 64, Dtype::BF16) else { return };
    let memory: Vec<Vec<Vec<u8>>> = (0..model.config.n_layers)
        .map(|layer_idx| {
            (0..8).map(|idx| noise(to.block_layer_bytes(), (layer_idx * 8 + idx + 1) as u64)).collect()
        })
        .collect();
    let path = dir.path().join("segment");
    let parts: Vec<InFile> = [0..4, 4..8]
        .map(|blocks: Range<usize>| InFile::new(&dir.path().join("part"), &memory, blocks, 4096, true))
        .into();
    let second = 4096 + memory.iter().map(|layer| layer[..4].concat().len()).sum::<usize>();
    let second = second.next_multiple_of(4096) + 4096;
    let mut bytes = vec![0; second];
    let layers: Vec<u8> = memory.iter().flat_map(|layer| layer[..4].concat()).collect();
    bytes[4096..4096 + layers.len()].copy_from_slice(&layers);
    bytes.extend(memory.iter().flat_map(|layer| layer[4..].concat()));
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    std::fs::write(&path, bytes).unwrap();
    let file = Arc::new(File::options().read(true).custom_flags(O_DIRECT).open(&path).unwrap());
    let files = parts.into_iter().zip([4096, second]).map(|(part, offset)| InFile {
        file: Arc::clone(&file),
        offset: offset as u64,
        ..part
    });
    let source = Arc::new(Source { files: files.collect(), memory });
    let pairs: Vec<_> = (0..8).map(|idx| (idx, BlockId::new(idx as u32))).collect();
    for _ in 0..3 {
        import(&mut to, &source, &pairs).unwrap();
        assert!(exported(&to, 0..8) == source.memory);
    }
}

#[test]
fn one_wrong_bit_anywhere_is_refused() {
    let model = TestModel::bundled();
    let dir = folder();
    let Some(mut to) = backend(&model, 16, Dtype::BF16) else { return };
    let (n_layers, block_bytes) = (model.config.n_layers, to.block_layer_bytes());
    let memory: Vec<Vec<Vec<u8>>> = (0..n_layers)
        .map(|layer_idx| (0..4).map(|idx| noise(block_bytes, (layer_idx * 4 + idx + 1) as u64)).collect())
        .collect();
    let path = dir.path().join("a");
    let right = InFile::new(&path, &memory, 0..4, 4096, true);
    let bytes = std::fs::read(&path).unwrap();
    let n_payload_bytes = n_layers * 4 * block_bytes;
    let pairs: Vec<_> = (0..4).map(|idx| (idx, BlockId::new(idx as u32))).collect();
    let places =
        [0, 1, 7, 8, 2047, 2048, block_bytes - 1, 4 * block_bytes, n_payload_bytes / 2, n_payload_bytes - 1];
    for (place, bit) in places.into_iter().zip((0..8).cycle()) {
        let mut damaged = bytes.clone();
        damaged[4096 + place] ^= 1 << bit;
        std::fs::write(&path, damaged).unwrap();
        let file = InFile::open(&path, 4096, right.checksums.clone(), 0..4, true);
        let source = Arc::new(Source { memory: memory.clone(), files: vec![file] });
        assert!(import(&mut to, &source, &pairs).is_err(), "byte {place}");
        assert_eq!(source.files[0].told(), [FileRead::Corrupt], "byte {place}");
    }
    std::fs::write(&path, &bytes).unwrap();
    let source = Arc::new(Source { memory: memory.clone(), files: vec![right] });
    import(&mut to, &source, &pairs).unwrap();
}

#[test]
fn files_that_end_early_or_are_gone_are_refused() {
    let model = TestModel::bundled();
    let dir = folder();
    let Some(mut to) = backend(&model, 16, Dtype::BF16) else { return };
    let memory = vec![vec![noise(to.block_layer_bytes(), 5); 4]; model.config.n_layers];
    let path = dir.path().join("a");
    let whole = InFile::new(&path, &memory, 0..4, 4096, true);
    let pairs: Vec<_> = (0..4).map(|idx| (idx, BlockId::new(idx as u32))).collect();
    let length = whole.file.metadata().unwrap().len();
    for n_bytes in [length - 4096, 4096, 0] {
        File::options().write(true).open(&path).unwrap().set_len(n_bytes).unwrap();
        let file = InFile::open(&path, 4096, whole.checksums.clone(), 0..4, true);
        let source = Arc::new(Source { memory: memory.clone(), files: vec![file] });
        assert!(import(&mut to, &source, &pairs).is_err(), "{n_bytes} bytes");
        assert_eq!(source.files[0].told(), [FileRead::Failed], "{n_bytes} bytes");
    }
    let gone = InFile { checksums: Vec::new(), ..whole };
    let source = Arc::new(Source { memory, files: vec![gone] });
    assert!(import(&mut to, &source, &pairs).is_err());
    assert!(source.files[0].told().is_empty());
}

/// A file of `n_bytes` for direct writes.
fn empty_file(path: &Path, n_bytes: usize) -> File {
    let mut file = File::create(path).unwrap();
    file.write_all(&vec![0x77; n_bytes]).unwrap();
    file.sync_all().unwrap();
    File::options().read(true).write(true).custom_flags(O_DIRECT).open(path).unwrap()
}

#[test]
fn blocks_that_the_device_writes_are_those_that_memory_gets_and_are_read_again() {
    let model = TestModel::bundled();
    let dir = folder();
    for kv_dtype in KV_DTYPES {
        let Some(mut backend) = backend(&model, 2048, kv_dtype) else { return };
        let block_bytes = backend.block_layer_bytes();
        let (n_layers, longest) =
            (model.config.n_layers, backend.max_file_section_bytes().unwrap() / block_bytes);
        // Lengths that are whole blocks of a file, one of them in many writes, with blocks in no order.
        let unit = 4096 / (4096.min(block_bytes & block_bytes.wrapping_neg()));
        for (case, n_blocks) in
            [unit, 3 * unit, 16 * unit, (longest / unit * unit).min(960)].into_iter().enumerate()
        {
            let blocks: Vec<BlockId> =
                (0..n_blocks).map(|idx| BlockId::new(((idx * 7 + case) % 1024) as u32)).collect();
            let expected: Vec<Vec<Vec<u8>>> = (0..n_layers)
                .map(|layer| {
                    (0..n_blocks)
                        .map(|idx| noise(block_bytes, (layer * 10_000 + idx * 3 + case) as u64))
                        .collect()
                })
                .collect();
            for (layer_idx, layer) in expected.iter().enumerate() {
                for (block, bytes) in blocks.iter().zip(layer) {
                    backend.import_block(layer_idx, *block, bytes).unwrap();
                }
            }
            let path = dir.path().join(format!("{kv_dtype}-{case}"));
            let n_bytes = n_layers * n_blocks * block_bytes;
            let file = empty_file(&path, 8192 + n_bytes + 4096);
            let pinned = backend.pin_blocks(&blocks).unwrap();
            let checksums = pinned.write_file(0..n_layers, 0..n_blocks, file.as_fd(), 8192).unwrap();
            drop(pinned);
            let found = std::fs::read(&path).unwrap();
            let layers: Vec<Vec<u8>> = expected.iter().map(|layer| layer.concat()).collect();
            assert!(
                found[8192..8192 + n_bytes] == layers.concat(),
                "{kv_dtype}, {n_blocks} blocks: other bytes"
            );
            let around = [&found[..8192], &found[8192 + n_bytes..]].concat();
            assert!(around.iter().all(|byte| *byte == 0x77), "what lies around it was written");
            let by_cpu: Vec<u64> =
                layers.iter().map(|layer| checksum(CrcAlgorithm::Crc64Nvme, layer)).collect();
            assert_eq!(checksums, by_cpu);
            let in_file = InFile::open(&path, 8192, checksums, 0..n_blocks, true);
            let source = Arc::new(Source { memory: expected, files: vec![in_file] });
            let pairs: Vec<_> = (0..n_blocks).map(|idx| (idx, BlockId::new(1024 + idx as u32))).collect();
            import(&mut backend, &source, &pairs).unwrap();
            assert!(exported(&backend, 1024..1024 + n_blocks as u32) == source.memory);
        }
    }
}

#[test]
fn writes_that_cannot_be_whole_are_refused() {
    let model = TestModel::bundled();
    let dir = folder();
    let Some(mut backend) = backend(&model, 2048, Dtype::BF16) else { return };
    let n_layers = model.config.n_layers;
    let blocks: Vec<BlockId> = (0..2048).map(BlockId::new).collect();
    let longest = backend.max_file_section_bytes().unwrap() / backend.block_layer_bytes();
    let pinned = backend.pin_blocks(&blocks).unwrap();
    let file = empty_file(&dir.path().join("a"), 1 << 20);
    assert!(pinned.write_file(0..n_layers, 0..4, file.as_fd(), 100).is_err(), "an offset inside of a block");
    assert!(pinned.write_file(0..n_layers, 0..0, file.as_fd(), 0).is_err(), "nothing");
    if longest < 2048 {
        assert!(pinned.write_file(0..n_layers, 0..longest + 1, file.as_fd(), 0).is_err(), "too long");
    }
    let read_only = File::open(dir.path().join("a")).unwrap();
    assert!(pinned.write_file(0..n_layers, 0..4, read_only.as_fd(), 0).is_err(), "a file for reading");
    // What failed before does not hinder what comes behind it.
    pinned.write_file(0..n_layers, 0..4, file.as_fd(), 0).unwrap();
}

#[test]
fn files_are_written_while_others_are_read() {
    let model = TestModel::bundled();
    let dir = folder();
    let Some(mut backend) = backend(&model, 256, Dtype::BF16) else { return };
    let (n_layers, block_bytes) = (model.config.n_layers, backend.block_layer_bytes());
    let memory: Vec<Vec<Vec<u8>>> = (0..n_layers)
        .map(|layer| (0..64).map(|idx| noise(block_bytes, (layer * 64 + idx + 1) as u64)).collect())
        .collect();
    let n_bytes = n_layers * 64 * block_bytes;
    let path = dir.path().join("segment");
    let read = InFile::new(&dir.path().join("part"), &memory, 0..64, 4096, true);
    let mut bytes = vec![0_u8; 4096];
    bytes.extend(memory.iter().flat_map(|layer| layer.concat()));
    bytes.resize(8192 + 2 * n_bytes, 0);
    std::fs::write(&path, &bytes).unwrap();
    let file = Arc::new(File::options().read(true).write(true).custom_flags(O_DIRECT).open(&path).unwrap());
    let source = Arc::new(Source {
        files: vec![InFile { file: Arc::clone(&file), offset: 4096, ..read }],
        memory: memory.clone(),
    });
    let pairs: Vec<_> = (0..64).map(|idx| (idx, BlockId::new(idx as u32))).collect();
    import(&mut backend, &source, &pairs).unwrap();
    let blocks: Vec<BlockId> = (0..64).map(BlockId::new).collect();
    let pinned = backend.pin_blocks(&blocks).unwrap();
    let targets: Vec<_> = (0..64).map(|idx| (idx, BlockId::new(128 + idx as u32))).collect();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let offset = 8192 + n_bytes as u64;
            for _ in 0..20 {
                pinned.write_file(0..n_layers, 0..64, file.as_fd(), offset / 4096 * 4096).unwrap();
            }
        });
        for _ in 0..20 {
            import(&mut backend, &source, &targets).unwrap();
            assert!(exported(&backend, 128..192) == memory);
        }
        writer.join().unwrap();
    });
    let found = std::fs::read(&path).unwrap();
    let at = (8192 + n_bytes) / 4096 * 4096;
    assert!(found[at..at + n_bytes] == bytes[4096..4096 + n_bytes]);
}
