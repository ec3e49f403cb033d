//! The nonlinearities of the feed-forward half, over rows.

use super::math;
use super::simd::{Isa, Kernel, LANES, Simd};

/// Writes `silu(gate) * up` to `out`; the three rows have one length.
///
/// # Panics
/// If the lengths differ or are not a multiple of the vector width.
pub(crate) fn silu_gate_rows(isa: Isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
    isa.run(SiluGate { gate, up, out });
}

/// Replaces each element by its GELU, the tanh approximation.
///
/// # Panics
/// If the length is not a multiple of the vector width.
pub(crate) fn gelu_tanh_rows(isa: Isa, values: &mut [f32]) {
    isa.run(GeluTanh { values });
}

struct SiluGate<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

struct GeluTanh<'a> {
    values: &'a mut [f32],
}

impl Kernel for SiluGate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gate, gate_rest) = self.gate.as_chunks::<LANES>();
        let (up, up_rest) = self.up.as_chunks::<LANES>();
        let (out, out_rest) = self.out.as_chunks_mut::<LANES>();
        assert!(gate_rest.is_empty() && up_rest.is_empty() && out_rest.is_empty());
        assert!(gate.len() == up.len() && gate.len() == out.len());
        for idx in 0..gate.len() {
            let activated = math::silu(simd, simd.load(&gate[idx]));
            simd.store(simd.mul(activated, simd.load(&up[idx])), &mut out[idx]);
        }
    }
}

impl Kernel for GeluTanh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (values, rest) = self.values.as_chunks_mut::<LANES>();
        assert!(rest.is_empty());
        for vector in values {
            let activated = math::gelu_tanh(simd, simd.load(vector));
            simd.store(activated, vector);
        }
    }
}
