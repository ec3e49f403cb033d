//! `config.json` and a safetensors file, as a damaged or hostile model folder has them.
//!
//! The input is the text of the config, a zero byte, and the bytes of the weights.

#![no_main]

use kvik_model::{Checkpoint, CpuBackend, CpuBackendOptions, ModelConfig, parse_header};
use libfuzzer_sys::fuzz_target;

/// Larger inputs only repeat what smaller ones do.
const MAX_INPUT_BYTES: usize = 1 << 18;

fuzz_target!(|input: &[u8]| {
    if MAX_INPUT_BYTES < input.len() {
        return;
    }
    let split = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let (config, weights) = (&input[..split], input.get(split + 1..).unwrap_or_default());
    let config = std::str::from_utf8(config).ok().and_then(|text| ModelConfig::from_json(text).ok());
    let header = parse_header(weights, weights.len() as u64);
    let checkpoint = Checkpoint::from_bytes("fuzz", weights.to_vec());
    assert_eq!(header.is_ok(), checkpoint.is_ok());
    let Ok(checkpoint) = checkpoint else { return };
    for name in checkpoint.names() {
        let tensor = checkpoint.read(name).expect("a listed tensor can be read");
        assert_eq!(tensor.to_f32().len(), tensor.shape.iter().product::<usize>());
    }
    let Some(config) = config else { return };
    let mut options = CpuBackendOptions::default();
    options.n_blocks = 1;
    options.n_threads = 1;
    let _ = CpuBackend::load(config, &checkpoint, &options);
});
