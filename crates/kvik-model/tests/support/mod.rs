//! What the tests of the engine share: fixture models and schedules of forward passes.

#![expect(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a helper that cannot go on fails its test, and a panic is how a test fails"
)]

pub mod notes_qa;
pub mod requests;
pub mod schedule;
pub mod shelf;
pub mod visits;

use std::path::{Path, PathBuf};

use kvik_model::{Checkpoint, CpuBackend, CpuBackendOptions, Isa, Model, ModelConfig, Result, parse_header};
use kvik_types::{Dtype, Namespace};
use proptest::test_runner::{Config, TestRunner};

/// The dtypes in which keys and values can be kept.
pub const KV_DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// A folder of `fixtures/`.
pub fn fixture_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The folder of the bundled model.
pub fn bundled_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/kvik-tiny")
}

/// The namespace of engines without a model folder.
pub fn namespace() -> Namespace {
    Namespace {
        model: "fixture".to_owned(),
        dtype: Dtype::F32,
        layout: "test".to_owned(),
        tenant: String::new(),
    }
}

/// Options of a backend with `n_blocks` blocks and the defaults of one thread and f32.
pub fn backend_options(n_blocks: usize) -> CpuBackendOptions {
    let mut options = CpuBackendOptions::default();
    options.n_blocks = n_blocks;
    options.n_threads = 1;
    options
}

/// Config and weights, from which backends are made.
#[derive(Debug)]
pub struct TestModel {
    /// Name of the fixture, for messages.
    pub name: String,
    /// The model's numbers.
    pub config: ModelConfig,
    checkpoint: Checkpoint,
}

impl TestModel {
    /// The fixture `name`.
    pub fn fixture(name: &str) -> Self {
        Self::patched(name, |_, _| {})
    }

    /// The fixture `name` with weights that `patch` has changed; it gets the bytes of the file and
    /// a function that finds the range of a tensor in them.
    pub fn patched(
        name: &str,
        patch: impl FnOnce(&mut [u8], &dyn Fn(&str) -> std::ops::Range<usize>),
    ) -> Self {
        let folder = fixture_folder(name);
        let json = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let mut bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let header = parse_header(&bytes, bytes.len() as u64).unwrap();
        let range_of = |tensor: &str| {
            let range = &header.tensors[tensor].range;
            range.start as usize..range.end as usize
        };
        patch(&mut bytes, &range_of);
        Self {
            name: name.to_owned(),
            config: ModelConfig::from_json(&json).unwrap(),
            checkpoint: Checkpoint::from_bytes(name, bytes).unwrap(),
        }
    }

    /// A fixture whose embedding of `token` is NaN, and so is all that sees the token.
    pub fn with_poisoned_token(name: &str, token: u32) -> Self {
        Self::patched(name, |bytes, range_of| {
            let embedding = &mut bytes[range_of("model.embed_tokens.weight")];
            let config = std::fs::read_to_string(fixture_folder(name).join("config.json")).unwrap();
            let row_bytes = ModelConfig::from_json(&config).unwrap().hidden_size * size_of::<f32>();
            let row = &mut embedding[token as usize * row_bytes..][..row_bytes];
            for element in row.as_chunks_mut::<4>().0 {
                *element = f32::NAN.to_le_bytes();
            }
        })
    }

    /// The bundled model.
    pub fn bundled() -> Self {
        let model = Model::bundled().unwrap();
        let weights = std::fs::read(bundled_folder().join("model.safetensors")).unwrap();
        Self {
            name: model.name().to_owned(),
            config: model.config().clone(),
            checkpoint: Checkpoint::from_bytes("bundled", weights).unwrap(),
        }
    }

    /// The weights.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Loads a backend whose blocks were never used.
    pub fn backend(&self, options: &CpuBackendOptions) -> CpuBackend {
        self.try_backend(options).unwrap()
    }

    /// As [`TestModel::backend`], with the error.
    pub fn try_backend(&self, options: &CpuBackendOptions) -> Result<CpuBackend> {
        CpuBackend::load(self.config.clone(), &self.checkpoint, options)
    }
}

/// One element of keys or values, from its bytes.
pub fn widen(kv_dtype: Dtype, element: &[u8]) -> f32 {
    let bits = || u16::from_le_bytes(*element.first_chunk().unwrap());
    match kv_dtype {
        Dtype::BF16 => half::bf16::from_bits(bits()).to_f32(),
        Dtype::F16 => half::f16::from_bits(bits()).to_f32(),
        _ => f32::from_le_bytes(*element.first_chunk().unwrap()),
    }
}

/// A runner of `n_cases` random cases. A failure prints its input; there is no file to keep it in,
/// because the runner does not know which test it works for.
pub fn runner(n_cases: u32) -> TestRunner {
    TestRunner::new(Config { cases: n_cases, failure_persistence: None, ..Config::default() })
}

/// Every combination of instruction set, number of threads and KV dtype, as options of a backend.
pub fn all_backend_options(n_blocks: usize) -> Vec<CpuBackendOptions> {
    let mut all = Vec::new();
    for isa in Isa::available() {
        for n_threads in 1..=3 {
            for kv_dtype in KV_DTYPES {
                let mut options = backend_options(n_blocks);
                options.isa = isa;
                options.n_threads = n_threads;
                options.kv_dtype = kv_dtype;
                all.push(options);
            }
        }
    }
    all
}
