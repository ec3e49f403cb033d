//! Packs the bundled model's weights and tokenizer for the binary.
//!
//! The high bytes of bf16 numbers, a sign and an exponent, are few values and take a third of their length in Huffman
//! codes; a search for repeated strings would only cost more codes. The low bytes have no pattern and stay as they are.
//! The form: the length of the file, the length of the deflated high bytes, these, the low bytes; lengths are 8 bytes,
//! little-endian. The file's bytes are taken as numbers from its start, its header too.
//!
//! The tokenizer is text, deflated as a whole.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use miniz_oxide::DataFormat;
use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::deflate::core::{
    CompressionStrategy, CompressorOxide, TDEFLFlush, TDEFLStatus, compress_to_output,
};

const WEIGHTS: &str = "bundled/model.safetensors";
const TOKENIZER: &str = "bundled/tokenizer.json";

/// Of 1 to 10: beyond it the result hardly gets smaller.
const LEVEL: u8 = 6;

/// The largest window of the format.
const WINDOW_BITS: u8 = 15;

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={WEIGHTS}");
    println!("cargo::rerun-if-changed={TOKENIZER}");
    let folder = env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default();
    write_packed_weights(&folder)?;
    fs::write(folder.join("tokenizer.deflated"), compress_to_vec(&fs::read(TOKENIZER)?, LEVEL))
}

fn write_packed_weights(folder: &Path) -> io::Result<()> {
    let weights = fs::read(WEIGHTS)?;
    let low: Vec<u8> = weights.iter().copied().step_by(2).collect();
    let high: Vec<u8> = weights.iter().copied().skip(1).step_by(2).collect();
    let deflated = huffman_codes(&high)?;
    let lengths = [weights.len() as u64, deflated.len() as u64];
    let packed = [&lengths[0].to_le_bytes(), &lengths[1].to_le_bytes(), &deflated[..], &low].concat();
    fs::write(folder.join("kvik-tiny.packed"), packed)
}

fn huffman_codes(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let strategy = CompressionStrategy::HuffmanOnly;
    let mut compressor = CompressorOxide::with_params(DataFormat::Raw, LEVEL, strategy, WINDOW_BITS);
    let mut codes = Vec::new();
    let (status, n_read) = compress_to_output(&mut compressor, bytes, TDEFLFlush::Finish, |part| {
        codes.extend_from_slice(part);
        true
    });
    match status {
        TDEFLStatus::Done if n_read == bytes.len() => Ok(codes),
        _ => Err(io::Error::other(format!("could not deflate: {status:?} after {n_read} bytes"))),
    }
}
