//! Every architecture against logits that the Python `transformers` package computed in float32.
//!
//! `fixtures/make_reference_models.py` made the models and the expected logits.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::path::{Path, PathBuf};

use kvik_model::{
    Backend, BlockId, Checkpoint, CpuBackend, CpuBackendOptions, Isa, Logits, ModelConfig, RowPositions,
    SequenceRows,
};
use safetensors::SafeTensors;

/// Largest difference of a logit from the reference.
const TOLERANCE: f32 = 1e-3;

struct Case {
    name: String,
    folder: PathBuf,
    tokens: [Vec<u32>; 2],
    logits: [Vec<f32>; 2],
    decode_logits: Vec<f32>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let (values, _) = file.tensor(name).unwrap().data().as_chunks::<4>();
    values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn token_ids(file: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let (values, _) = file.tensor(name).unwrap().data().as_chunks::<4>();
    values.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect()
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        cases.push(Case {
            name: folder.file_name().unwrap().to_string_lossy().into_owned(),
            tokens: [token_ids(&file, "tokens_a"), token_ids(&file, "tokens_b")],
            logits: [floats(&file, "logits_a"), floats(&file, "logits_b")],
            decode_logits: floats(&file, "decode_logits_a"),
            folder,
        });
    }
    assert!(14 <= cases.len(), "fixtures are missing");
    cases
}

impl Case {
    fn backend(&self, isa: Isa) -> CpuBackend {
        let json = std::fs::read_to_string(self.folder.join("config.json")).unwrap();
        let config = ModelConfig::from_json(&json).unwrap();
        let checkpoint = Checkpoint::open(&self.folder).unwrap();
        let mut options = CpuBackendOptions::default();
        options.n_blocks = 32;
        options.isa = isa;
        CpuBackend::load(config, &checkpoint, &options).unwrap()
    }

    fn assert_close(&self, what: &str, actual: &[f32], expected: &[f32]) {
        assert_eq!(actual.len(), expected.len(), "{}: {what}", self.name);
        let worst = actual.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= TOLERANCE, "{}: {what}: logits differ by {worst}", self.name);
    }
}

fn blocks(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().map(|&id| BlockId::new(id)).collect()
}

/// Computes `tokens[range]` of one sequence and returns the logits of every row.
fn rows(
    backend: &mut CpuBackend,
    tokens: &[u32],
    range: std::ops::Range<usize>,
    table: &[BlockId],
) -> Vec<f32> {
    let mut logits = Logits::default();
    let sequence = SequenceRows {
        tokens: &tokens[range.clone()],
        positions: RowPositions::From(range.start),
        block_table: table,
        n_logits: range.len(),
    };
    backend.forward(&[sequence], &mut logits).unwrap();
    (0..logits.n_rows()).flat_map(|row| logits.row(row).to_vec()).collect()
}

#[test]
fn a_whole_prefill_gives_the_reference_logits_of_every_architecture_on_every_instruction_set() {
    for case in cases() {
        for isa in Isa::available() {
            let mut backend = case.backend(isa);
            let actual = rows(&mut backend, &case.tokens[0], 0..48, &blocks(&[3, 9, 1]));
            case.assert_close("prefill", &actual, &case.logits[0]);
        }
    }
}

#[test]
fn decoding_after_a_prefill_gives_the_reference_logits_of_a_cached_decode() {
    for case in cases() {
        let mut backend = case.backend(Isa::detect());
        let table = blocks(&[7, 2, 30]);
        rows(&mut backend, &case.tokens[0], 0..40, &table);
        let actual: Vec<f32> = (40..48)
            .flat_map(|position| rows(&mut backend, &case.tokens[0], position..position + 1, &table))
            .collect();
        case.assert_close("decode", &actual, &case.decode_logits);
    }
}

#[test]
fn a_chunked_prefill_gives_the_reference_logits() {
    for case in cases() {
        let mut backend = case.backend(Isa::detect());
        let table = blocks(&[0, 1, 2]);
        let mut actual = Vec::new();
        for range in [0..5, 5..16, 16..33, 33..34, 34..48] {
            actual.extend(rows(&mut backend, &case.tokens[0], range, &table));
        }
        case.assert_close("chunked prefill", &actual, &case.logits[0]);
    }
}

#[test]
fn two_sequences_that_share_the_blocks_of_a_prefix_give_their_reference_logits() {
    for case in cases() {
        assert_eq!(case.tokens[0][..32], case.tokens[1][..32]);
        let mut backend = case.backend(Isa::detect());
        let (table_a, table_b) = (blocks(&[5, 6, 7]), blocks(&[5, 6, 8]));
        rows(&mut backend, &case.tokens[0], 0..32, &table_a);
        let sequences =
            [(&case.tokens[0], &table_a), (&case.tokens[1], &table_b)].map(|(tokens, table)| SequenceRows {
                tokens: &tokens[32..],
                positions: RowPositions::From(32),
                block_table: table,
                n_logits: 16,
            });
        let mut logits = Logits::default();
        backend.forward(&sequences, &mut logits).unwrap();
        let vocab_size = backend.config().vocab_size;
        for (idx, expected) in case.logits.iter().enumerate() {
            let actual: Vec<f32> =
                (idx * 16..(idx + 1) * 16).flat_map(|row| logits.row(row).to_vec()).collect();
            case.assert_close("shared prefix", &actual, &expected[32 * vocab_size..]);
        }
    }
}
