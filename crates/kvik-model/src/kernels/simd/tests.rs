use proptest::prelude::*;

use super::super::math;
use super::*;

/// Values at which instruction sets tend to differ.
const SPECIAL: [f32; 24] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
    1e-45,
    -1e-45,
    1.1e-38,
    3.4e38,
    0.1,
    -87.336,
    -87.337,
    -88.0,
    88.0,
    89.0,
    -104.0,
    1e-20,
    -65504.0,
];

/// Runs every operation on the lanes `a`, `b` and `c` and returns the results by name.
struct AllOperations {
    a: [f32; LANES],
    b: [f32; LANES],
    c: [f32; LANES],
    bits: [u16; 2 * LANES],
}

impl Kernel for AllOperations {
    type Output = Vec<(&'static str, [f32; LANES])>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let (a, b, c) = (simd.load(&self.a), simd.load(&self.b), simd.load(&self.c));
        let halves = self.bits.first_chunk::<LANES>().unwrap();
        let lanes = [
            ("load", a),
            ("splat", simd.splat(self.a[0])),
            ("load_bf16", simd.load_bf16(halves)),
            ("load_f16", simd.load_f16(halves)),
            ("load_bf16_even", simd.load_bf16_even(&self.bits)),
            ("load_bf16_odd", simd.load_bf16_odd(&self.bits)),
            ("add", simd.add(a, b)),
            ("sub", simd.sub(a, b)),
            ("mul", simd.mul(a, b)),
            ("div", simd.div(a, b)),
            ("fma", simd.fma(a, b, c)),
            ("max", simd.max(a, b)),
            ("min", simd.min(a, b)),
            ("add_exponent", simd.add_exponent(a, b)),
            ("keep_where_at_least", simd.keep_where_at_least(a, b, c)),
            ("exp", math::exp(simd, a)),
            ("silu", math::silu(simd, a)),
            ("gelu_tanh", math::gelu_tanh(simd, a)),
        ];
        let mut results: Self::Output = lanes
            .into_iter()
            .map(|(name, lanes)| {
                let mut values = [0.0; LANES];
                simd.store(lanes, &mut values);
                (name, values)
            })
            .collect();
        results.push(("sum", [simd.sum(a); LANES]));
        results.push(("max_lane", [simd.max_lane(a); LANES]));
        results
    }
}

/// NaN may have any bits: which operand's payload survives is not part of IEEE 754.
fn canonical(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

fn assert_all_equal(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES], bits: [u16; 2 * LANES]) {
    let expected = Isa::Scalar.run(AllOperations { a, b, c, bits });
    for isa in Isa::available() {
        let actual = isa.run(AllOperations { a, b, c, bits });
        for ((name, actual), (_, expected)) in actual.iter().zip(&expected) {
            assert_eq!(
                actual.map(canonical),
                expected.map(canonical),
                "{isa} {name}: {actual:?} is not {expected:?} for {a:?}, {b:?}, {c:?}"
            );
        }
    }
}

fn lanes() -> impl Strategy<Value = [f32; LANES]> {
    prop::array::uniform16(prop_oneof![
        4 => -100.0..100.0_f32,
        2 => any::<u32>().prop_map(f32::from_bits),
        1 => prop::sample::select(SPECIAL.to_vec()),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_instruction_set_gives_the_bits_of_the_scalar_one(
        a in lanes(),
        b in lanes(),
        c in lanes(),
        bits in prop::array::uniform32(any::<u16>()),
    ) {
        assert_all_equal(a, b, c, bits);
    }
}

#[test]
fn every_instruction_set_treats_special_values_like_the_scalar_one() {
    for (idx, &b) in SPECIAL.iter().enumerate() {
        for &c in &SPECIAL {
            for a in SPECIAL.chunks(LANES) {
                let mut lanes = [0.5; LANES];
                lanes[..a.len()].copy_from_slice(a);
                let bits = std::array::from_fn(|lane| (idx * 2731 + lane * 2039) as u16);
                assert_all_equal(lanes, [b; LANES], [c; LANES], bits);
            }
        }
    }
}

#[test]
fn every_half_precision_number_is_widened_exactly() {
    for isa in Isa::available() {
        for first in (0..=u16::MAX - 15).step_by(LANES) {
            let halves: [u16; LANES] = std::array::from_fn(|lane| first + lane as u16);
            let mut bits = [0; 2 * LANES];
            bits[..LANES].copy_from_slice(&halves);
            let results = isa.run(AllOperations { a: [0.0; LANES], b: [0.0; LANES], c: [0.0; LANES], bits });
            let of = |wanted: &str| results.iter().find(|(name, _)| *name == wanted).unwrap().1;
            let f16 = halves.map(|bits| canonical(half::f16::from_bits(bits).to_f32()));
            let bf16 = halves.map(|bits| canonical(half::bf16::from_bits(bits).to_f32()));
            assert_eq!(of("load_f16").map(canonical), f16, "{isa}");
            assert_eq!(of("load_bf16").map(canonical), bf16, "{isa}");
        }
    }
}

#[test]
fn a_kernel_of_an_instruction_set_that_is_not_there_runs_anyway() {
    for isa in [Isa::Avx512, Isa::Avx2, Isa::Scalar] {
        let results = isa.run(AllOperations {
            a: [2.0; LANES],
            b: [3.0; LANES],
            c: [4.0; LANES],
            bits: [0; 2 * LANES],
        });
        let fma = results.iter().find(|(name, _)| *name == "fma").unwrap().1;
        assert!(fma.iter().all(|&value| value.to_bits() == 10.0_f32.to_bits()));
    }
}

struct Apply<F>(f32, F);

/// A function of one lane.
trait LaneFunction {
    fn call<S: Simd>(&self, simd: S, x: S::Lanes) -> S::Lanes;
}

struct Exp;
struct Silu;
struct GeluTanh;

impl LaneFunction for Exp {
    #[inline(always)]
    fn call<S: Simd>(&self, simd: S, x: S::Lanes) -> S::Lanes {
        math::exp(simd, x)
    }
}

impl LaneFunction for Silu {
    #[inline(always)]
    fn call<S: Simd>(&self, simd: S, x: S::Lanes) -> S::Lanes {
        math::silu(simd, x)
    }
}

impl LaneFunction for GeluTanh {
    #[inline(always)]
    fn call<S: Simd>(&self, simd: S, x: S::Lanes) -> S::Lanes {
        math::gelu_tanh(simd, x)
    }
}

impl<F: LaneFunction> Kernel for Apply<F> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut values = [0.0; LANES];
        simd.store(self.1.call(simd, simd.splat(self.0)), &mut values);
        values[0]
    }
}

fn exp(x: f32) -> f32 {
    Isa::detect().run(Apply(x, Exp))
}

#[test]
fn the_exponential_is_right_to_two_ten_millionths() {
    let mut worst = 0.0_f64;
    for step in -1_746_000..1_760_000 {
        let x = step as f32 * 5e-5;
        let exact = f64::from(x).exp();
        worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
    }
    assert!(worst < 2e-7, "the largest relative error is {worst:e}");
    assert!(1e-9 < worst, "nothing was measured");
}

#[test]
fn the_exponential_is_exact_at_zero_and_ends_where_it_says() {
    assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
    assert_eq!(exp(-0.0).to_bits(), 1.0_f32.to_bits());
    for x in [f32::NEG_INFINITY, f32::MIN, -1000.0, -88.0, -87.4] {
        assert_eq!(exp(x).to_bits(), 0.0_f32.to_bits(), "{x}");
    }
    assert!(exp(-87.33) >= f32::MIN_POSITIVE);
    for x in [88.0, 89.0, f32::MAX, f32::INFINITY] {
        assert_eq!(exp(x).to_bits(), exp(88.0).to_bits(), "{x}");
    }
    assert!(exp(88.0).is_finite());
}

#[test]
fn the_exponential_never_falls() {
    let mut last = 0.0;
    for step in -900_000..900_000 {
        let value = exp(step as f32 * 1e-4);
        // One unit in the last place is the error that the function may have.
        assert!(last <= value * 1.000_000_2, "at {step}");
        last = value;
    }
}

#[test]
fn the_nonlinearities_are_those_of_f64() {
    for step in -20_000..=20_000 {
        let x = step as f32 * 1e-3;
        let wide = f64::from(x);
        let silu = wide / (1.0 + (-wide).exp());
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide * wide * wide);
        let gelu = 0.5 * wide * (1.0 + inner.tanh());
        for (name, actual, exact) in [
            ("silu", Isa::detect().run(Apply(x, Silu)), silu),
            ("gelu_tanh", Isa::detect().run(Apply(x, GeluTanh)), gelu),
        ] {
            let error = (f64::from(actual) - exact).abs();
            assert!(error <= 1e-6 * exact.abs().max(1e-2), "{name}({x}) = {actual}, not {exact}");
        }
    }
}
