//! Time since the last use, in steps that grow with it.

/// How many steps there are; the last one has no end.
pub(super) const N_AGES: usize = 36;

/// How many coarse steps there are.
pub(super) const N_COARSE_AGES: usize = 7;

/// End of the first step. No user reads an answer and asks again much faster.
const FIRST_END_S: f64 = 4.0;

/// Three steps double the age: the cube roots of 1, 2 and 4.
const CUBE_ROOTS: [f64; 3] = [1.0, 1.259_921_049_894_873_2, 1.587_401_051_968_199_4];

/// Ends of the coarse steps but the last.
const COARSE_ENDS_S: [f64; N_COARSE_AGES - 1] = [30.0, 60.0, 120.0, 240.0, 480.0, 960.0];

/// The borders of the steps: `begin_s[age]` to `begin_s[age + 1]`.
#[derive(Debug)]
pub(super) struct Ages {
    begin_s: [f64; N_AGES],
    coarse: [u8; N_AGES],
}

impl Ages {
    pub(super) fn new() -> Self {
        let mut begin_s = [0.0; N_AGES];
        let mut coarse = [0; N_AGES];
        for age in 0..N_AGES {
            if age > 0 {
                begin_s[age] = FIRST_END_S * CUBE_ROOTS[(age - 1) % 3] * f64::from(1_u32 << ((age - 1) / 3));
            }
            coarse[age] = COARSE_ENDS_S.partition_point(|&end_s| end_s <= begin_s[age]) as u8;
        }
        Self { begin_s, coarse }
    }

    /// The step that an age in seconds falls into.
    pub(super) fn step(&self, age_s: f64) -> usize {
        self.begin_s.partition_point(|&begin_s| begin_s <= age_s).saturating_sub(1)
    }

    /// Where a step ends; the last one does not.
    pub(super) fn end_s(&self, age: usize) -> f64 {
        self.begin_s.get(age + 1).copied().unwrap_or(f64::INFINITY)
    }

    /// How long a step is; infinite for the last.
    pub(super) fn length_s(&self, age: usize) -> f64 {
        self.end_s(age) - self.begin_s[age]
    }

    pub(super) fn middle_s(&self, age: usize) -> f64 {
        f64::midpoint(self.begin_s[age], self.end_s(age))
    }

    pub(super) fn coarse(&self, age: usize) -> usize {
        usize::from(self.coarse[age])
    }

    /// How far into its step an age is, from 0 to 1.
    pub(super) fn part(&self, age: usize, age_s: f64) -> f64 {
        ((age_s - self.begin_s[age]) / self.length_s(age)).clamp(0.0, 1.0)
    }
}
