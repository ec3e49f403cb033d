//! How fast segments are put in their places: keys turned to their new positions, both transposed into pages.

use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use kvik_model::{
    BLOCK_TOKENS, Backend as _, BlockId, Checkpoint, CpuBackend, CpuBackendOptions, Isa, Model, SegmentPart,
};
use kvik_types::Dtype;

use crate::report::{Baseline, Measurement};

/// A long document.
const SEGMENT_TOKENS: usize = 2048;

/// Where it is placed: nothing there is special.
const FIRST_TOKEN: usize = 1000;

/// Measures the instruction sets of this machine on one thread, beside plain Rust.
pub(super) fn measure(folder: &Path, n_repeats: usize) -> anyhow::Result<Vec<Measurement>> {
    let mut measurements = Vec::new();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        let plain = speeds(folder, dtype, Isa::Scalar, n_repeats)?;
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Scalar) {
            let name = format!("place_segments_{dtype}_{isa}");
            let measured = Measurement::from_repeats(name, "GB/s", speeds(folder, dtype, isa, n_repeats)?);
            let baseline = Baseline::new("plain Rust", plain.clone());
            measurements.extend(measured.map(|measured| measured.compared_with(baseline, None)));
        }
    }
    Ok(measurements)
}

/// Bytes of keys and values that are placed in a nanosecond, by repeat.
fn speeds(folder: &Path, kv_dtype: Dtype, isa: Isa, n_repeats: usize) -> anyhow::Result<Vec<f64>> {
    let (model, checkpoint) = (Model::open(folder)?, Checkpoint::open(folder)?);
    let config = model.config().clone();
    let mut options = CpuBackendOptions::default();
    (options.kv_dtype, options.isa, options.n_threads) = (kv_dtype, isa, 1);
    options.n_blocks = (FIRST_TOKEN + SEGMENT_TOKENS).div_ceil(BLOCK_TOKENS);
    let mut backend = CpuBackend::load(config.clone(), &checkpoint, &options).context("load the model")?;
    let table: Vec<BlockId> = (0..options.n_blocks as u32).map(BlockId::new).collect();
    let n_bytes = SEGMENT_TOKENS * config.n_kv_heads * config.head_dim * kv_dtype.size_bytes();
    // A quarter in each type: what is computed with it is no special case.
    let element: &[u8] = match kv_dtype {
        Dtype::F32 => &[0, 0, 0x80, 0x3e],
        Dtype::F16 => &[0, 0x34],
        _ => &[0x80, 0x3e],
    };
    let bytes: Vec<u8> = element.iter().copied().cycle().take(n_bytes).collect();
    let part = SegmentPart { keys: &bytes, values: &bytes };
    let mut place_all = || -> anyhow::Result<f64> {
        let begin = Instant::now();
        for layer_idx in 0..config.n_layers {
            backend.place_kv(layer_idx, &table, FIRST_TOKEN, FIRST_TOKEN as i64, part)?;
        }
        Ok((2 * n_bytes * config.n_layers) as f64 / begin.elapsed().as_secs_f64() / 1e9)
    };
    // Touches the pages.
    place_all()?;
    (0..n_repeats).map(|_| place_all()).collect()
}
