//! How fast an engine computes KV, learned from its passes.

use super::PrefillSpeed;

/// What a new sample leaves of the weight of those before it: about the last twenty decide.
const KEPT_WEIGHT: f64 = 0.95;

/// A pass with fewer tokens says more of what a pass costs than of what its tokens do.
const MIN_TOKENS: usize = 32;

/// A pass with fewer tokens than this tells what a pass costs beside its tokens.
const SHORT_TOKENS: usize = 128;

/// Where two samples are so nearly in proportion, they say nothing of what attention costs.
const MIN_DETERMINANT: f64 = 1e-3;

/// Learns what a token costs, and what each token does that it looks at.
#[derive(Debug, Default, Clone, Copy)]
pub struct PrefillMeter {
    tokens_tokens: f64,
    tokens_attended: f64,
    attended_attended: f64,
    tokens_seconds: f64,
    attended_seconds: f64,
    short: Option<ShortPass>,
}

/// A pass with few tokens, as the mean of the last ones.
#[derive(Debug, Clone, Copy)]
struct ShortPass {
    tokens: f64,
    attended: f64,
    seconds: f64,
}

impl PrefillMeter {
    /// Takes a pass that computed `n_tokens`, which looked at `n_attended` together. A pass with few says nothing.
    pub fn add(&mut self, n_tokens: usize, n_attended: u64, seconds: f64) {
        if n_tokens < MIN_TOKENS || !(seconds.is_finite() && 0.0 < seconds) {
            return;
        }
        let (tokens, attended) = (n_tokens as f64, n_attended as f64);
        for (sum, term) in [
            (&mut self.tokens_tokens, tokens * tokens),
            (&mut self.tokens_attended, tokens * attended),
            (&mut self.attended_attended, attended * attended),
            (&mut self.tokens_seconds, tokens * seconds),
            (&mut self.attended_seconds, attended * seconds),
        ] {
            *sum = KEPT_WEIGHT * *sum + term;
        }
        if n_tokens < SHORT_TOKENS {
            let pass = ShortPass { tokens, attended, seconds };
            self.short = Some(self.short.map_or(pass, |before| before.toward(pass)));
        }
    }

    /// What was learned; `None` before the first sample. What passes cost is known where some had few tokens and others many.
    pub fn speed(&self) -> Option<PrefillSpeed> {
        let (token_s, attended_s) = self.token_costs()?;
        // Passes with many tokens decide the others: what is left of one with few is what it costs beside its tokens.
        let pass_s = self.short.map_or(0.0, |short| {
            (short.seconds - token_s * short.tokens - attended_s * short.attended).max(0.0)
        });
        Some(PrefillSpeed { pass_s, token_s, attended_s })
    }

    /// Seconds for a token, and for each that it looks at.
    fn token_costs(&self) -> Option<(f64, f64)> {
        if self.tokens_tokens <= 0.0 {
            return None;
        }
        let product = self.tokens_tokens * self.attended_attended;
        let determinant = product - self.tokens_attended * self.tokens_attended;
        if MIN_DETERMINANT * product < determinant {
            let token_s = (self.tokens_seconds * self.attended_attended
                - self.attended_seconds * self.tokens_attended)
                / determinant;
            let attended_s = (self.tokens_tokens * self.attended_seconds
                - self.tokens_attended * self.tokens_seconds)
                / determinant;
            if 0.0 < token_s && 0.0 <= attended_s {
                return Some((token_s, attended_s));
            }
        }
        // One of the two alone, that of tokens.
        Some((self.tokens_seconds / self.tokens_tokens, 0.0))
    }
}

impl ShortPass {
    /// The mean that a new pass makes of the passes before it.
    fn toward(self, pass: Self) -> Self {
        let mean = |before: f64, new: f64| KEPT_WEIGHT * before + (1.0 - KEPT_WEIGHT) * new;
        Self {
            tokens: mean(self.tokens, pass.tokens),
            attended: mean(self.attended, pass.attended),
            seconds: mean(self.seconds, pass.seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_is_known_before_a_pass_that_is_long_enough() {
        let mut meter = PrefillMeter::default();
        assert_eq!(meter.speed(), None);
        meter.add(1, 5000, 0.01);
        assert_eq!(meter.speed(), None);
        meter.add(256, 256 * 128, 0.256);
        assert!((meter.speed().unwrap().token_s - 0.001).abs() < 1e-9);
    }

    #[test]
    fn passes_with_few_tokens_tell_what_a_pass_costs() {
        let of = |pass_s: f64| {
            let mut meter = PrefillMeter::default();
            for n_tokens in [64, 256, 1024, 4096] {
                meter.add(n_tokens, 0, pass_s + 20e-6 * n_tokens as f64);
            }
            meter.speed().unwrap()
        };
        let (gpu, cpu) = (of(5e-3), of(0.0));
        assert!((3e-3..6e-3).contains(&gpu.pass_s), "{gpu:?}");
        assert!((1000..4000).contains(&gpu.piece_tokens()), "{gpu:?}");
        assert!(cpu.pass_s < 1e-9 && cpu.piece_tokens() <= 1, "{cpu:?}");
    }

    proptest! {
        #[test]
        fn passes_of_a_prompt_give_both_costs(token_s in 1e-6_f64..1e-3, attended_s in 1e-9_f64..1e-7, n_passes in 4_usize..20) {
            let speed = PrefillSpeed { pass_s: 0.0, token_s, attended_s };
            let mut meter = PrefillMeter::default();
            for pass in 0..n_passes {
                let tokens = pass * 256..(pass + 1) * 256;
                let n_attended = tokens.clone().map(|position| position as u64 + 1).sum();
                meter.add(256, n_attended, speed.seconds(tokens));
            }
            let learned = meter.speed().unwrap();
            let whole = 0..n_passes * 256;
            let ratio = learned.seconds(whole.clone()) / speed.seconds(whole);
            prop_assert!((ratio - 1.0).abs() < 0.01, "{learned:?}");
        }

        #[test]
        fn any_samples_give_a_speed_above_zero(
            samples in proptest::collection::vec((32_usize..5000, 0_u64..1 << 30, 1e-6_f64..100.0), 1..20),
        ) {
            let mut meter = PrefillMeter::default();
            for (n_tokens, n_attended, seconds) in samples {
                meter.add(n_tokens, n_attended, seconds);
            }
            let speed = meter.speed().unwrap();
            prop_assert!(speed.pass_s.is_finite() && 0.0 <= speed.pass_s, "{:?}", speed);
            prop_assert!(0.0 < speed.token_s && 0.0 <= speed.attended_s && speed.seconds(0..100_000).is_finite());
        }
    }
}
