//! Random numbers without state.

/// Odd constant of the golden ratio: neighboring counters land far apart.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Scrambles 64 bits; a bijection, so different inputs stay different.
pub(crate) const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(GOLDEN);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The random number in `[0, 1)` for token number `counter` of a stream.
pub(super) fn uniform(seed: u64, stream: u32, counter: u64) -> f64 {
    let bits = mix(mix(mix(seed) ^ u64::from(stream)) ^ counter);
    // 53 bits are all that an f64 below one can hold evenly.
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_evenly_over_counters_and_streams() {
        for stream in 0..4 {
            let mut buckets = [0_u32; 10];
            for counter in 0..100_000 {
                buckets[(uniform(7, stream, counter) * 10.0) as usize] += 1;
            }
            assert!(buckets.iter().all(|&count| (9_500..10_500).contains(&count)), "{buckets:?}");
        }
    }

    #[test]
    fn seed_stream_and_counter_each_change_the_number() {
        let base = uniform(1, 2, 3).to_bits();
        assert_ne!(base, uniform(2, 2, 3).to_bits());
        assert_ne!(base, uniform(1, 3, 3).to_bits());
        assert_ne!(base, uniform(1, 2, 4).to_bits());
    }
}
