//! Numbers that are distributed as the KV of large models is: keys have an offset for each element of each head, some of them
//! large, and change slowly from token to token by an amount of their own; values have neither.

/// Share of the elements of a head whose keys are outliers, and how much larger they are.
const OUTLIER_SHARE: f32 = 0.03;
const OUTLIER: f32 = 8.0;

/// A chunk of bf16 in the built-in engine's layout; the same in every run.
pub(super) fn chunk(n_layers: usize, n_tokens: usize, n_heads: usize, head_dim: usize) -> Vec<u8> {
    let mut random = Random(1);
    let mut bytes = Vec::with_capacity(n_layers * n_tokens * 2 * n_heads * head_dim * 2);
    let row_elements = n_heads * head_dim;
    for _ in 0..n_layers {
        let rows: Vec<KeyRow> = (0..row_elements).map(|_| KeyRow::new(&mut random)).collect();
        let mut states: Vec<f32> = rows.iter().map(|_| random.normal()).collect();
        for _ in 0..n_tokens / 16 {
            let mut keys = vec![0.0; row_elements * 16];
            for token in 0..16 {
                for (element, (row, state)) in rows.iter().zip(&mut states).enumerate() {
                    let kept = row.correlation;
                    *state = kept * *state + (1.0 - kept * kept).sqrt() * random.normal();
                    keys[element * 16 + token] = row.offset + row.spread * *state;
                }
            }
            for head_keys in keys.chunks_exact(head_dim * 16) {
                bytes.extend(head_keys.iter().flat_map(|key| to_bf16(*key)));
                bytes.extend((0..head_dim * 16).flat_map(|_| to_bf16(0.3 * random.normal())));
            }
        }
    }
    bytes
}

/// What the keys of one element of one head have in common.
struct KeyRow {
    offset: f32,
    spread: f32,
    correlation: f32,
}

impl KeyRow {
    fn new(random: &mut Random) -> Self {
        let scale = if random.uniform() < OUTLIER_SHARE { OUTLIER } else { 1.0 };
        Self {
            offset: 0.8 * scale * random.normal(),
            spread: 0.5 * scale.sqrt() * (1.0 + 0.5 * random.normal().abs()),
            correlation: (0.5 + 0.3 * random.normal()).clamp(0.0, 0.98),
        }
    }
}

/// `SplitMix64`, so that the numbers are the same on every machine.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed >> 40) as f32 / (1_u64 << 24) as f32
    }

    /// Of mean 0 and deviation 1: the sum of six uniform numbers is near enough.
    fn normal(&mut self) -> f32 {
        ((0..6).map(|_| self.uniform()).sum::<f32>() - 3.0) * std::f32::consts::SQRT_2
    }
}

fn to_bf16(value: f32) -> [u8; 2] {
    ((value.to_bits().wrapping_add(0x8000) >> 16) as u16).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_has_its_length_and_is_the_same_in_every_run() {
        let bytes = chunk(2, 32, 2, 16);
        assert_eq!(bytes.len(), 2 * 32 * 2 * 2 * 16 * 2);
        assert_eq!(bytes, chunk(2, 32, 2, 16));
        let (numbers, _) = bytes.as_chunks::<2>();
        let finite = |bytes: &[u8; 2]| u16::from_le_bytes(*bytes) & 0x7f80 != 0x7f80;
        assert!(numbers.iter().all(finite));
    }
}
