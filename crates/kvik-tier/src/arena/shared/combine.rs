//! The checksum of bytes in two parts from the checksums of the parts.
//!
//! A CRC is the remainder of the bytes as a polynomial over two elements. Appending `n` bytes multiplies it by x^8n, which
//! takes a few multiplications of 64 bits by repeated squaring. Checksums that begin and end inverted, as this one, combine
//! as those that do not.

/// The polynomial of CRC-64/NVME, lowest power in the highest bit, without x^64.
const POLYNOMIAL: u64 = 0x9A6C_9329_AC4B_C9B5;

/// x^0: the highest bit.
const ONE: u64 = 1 << 63;

/// x to the power of two to the power of each index.
const POWERS: [u64; 64] = powers();

/// The checksum of bytes with the checksum `first` that are followed by `n_bytes` with the checksum `second`.
pub(super) fn combine(first: u64, second: u64, n_bytes: u64) -> u64 {
    multiply(first, power_of_bytes(n_bytes)) ^ second
}

/// x^8n.
fn power_of_bytes(n_bytes: u64) -> u64 {
    let mut product = ONE;
    // The exponent is 8n: its lowest set bits are three further than those of n.
    for (bit, power) in POWERS.iter().skip(3).enumerate() {
        if n_bytes >> bit & 1 != 0 {
            product = multiply(product, *power);
        }
    }
    product
}

/// The product of two remainders.
const fn multiply(left: u64, right: u64) -> u64 {
    let (mut product, mut shifted, mut idx) = (0, right, 0);
    // Bits of `left` from x^0 on; `shifted` is `right` times that power.
    while idx < u64::BITS {
        if left << idx & ONE != 0 {
            product ^= shifted;
        }
        let overflow = shifted & 1;
        shifted >>= 1;
        if overflow != 0 {
            shifted ^= POLYNOMIAL;
        }
        idx += 1;
    }
    product
}

const fn powers() -> [u64; 64] {
    let mut powers = [ONE >> 1; 64];
    let mut idx = 1;
    while idx < powers.len() {
        powers[idx] = multiply(powers[idx - 1], powers[idx - 1]);
        idx += 1;
    }
    powers
}
