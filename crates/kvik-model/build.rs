//! Packs the weights of the bundled model for the binary.
//!
//! The high bytes of bf16 numbers, a sign and an exponent, repeat and are deflated to two fifths; the low ones do not,
//! and stay as they are. The form: the length of the file, the length of the deflated high bytes, these, the low bytes;
//! lengths are 8 bytes, little-endian. The file's bytes are taken as numbers from its start, its header too.

use std::path::PathBuf;
use std::{env, fs, io};

const WEIGHTS: &str = "../../models/kvik-tiny/model.safetensors";

/// Of 1 to 10: beyond it the result hardly gets smaller.
const LEVEL: u8 = 6;

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={WEIGHTS}");
    let weights = fs::read(WEIGHTS)?;
    let low: Vec<u8> = weights.iter().copied().step_by(2).collect();
    let high: Vec<u8> = weights.iter().copied().skip(1).step_by(2).collect();
    let deflated = miniz_oxide::deflate::compress_to_vec(&high, LEVEL);
    let lengths = [weights.len() as u64, deflated.len() as u64];
    let packed = [&lengths[0].to_le_bytes(), &lengths[1].to_le_bytes(), &deflated[..], &low].concat();
    let folder = env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default();
    fs::write(folder.join("kvik-tiny.packed"), packed)
}
