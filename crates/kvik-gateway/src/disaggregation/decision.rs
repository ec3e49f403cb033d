//! Whether it pays to compute a prompt on another engine.
//!
//! The engine that answers would compute what it does not have in `uncached / decode_speed` seconds, in which its streams
//! wait. Otherwise it takes over the same tokens in `overhead + uncached / transfer_speed`. The number of tokens at which both are
//! equal is the threshold, and never less than the configured one. Speeds are measured; until they are, configured ones hold.

use std::time::Duration;

use crate::config::{DisaggregationConfig, millis};
use crate::upstream::backend::Backend;

/// What is known when a request has its decoding engine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Figures {
    /// Tokens of the prompt that the decoding engine does not have.
    pub(crate) uncached_tokens: u64,
    /// Fewest uncached tokens for which another engine is asked; `None` if the transfer is as slow as computing.
    pub(crate) threshold_tokens: Option<u64>,
    /// Tokens a second.
    pub(crate) decode_tokens_per_s: f64,
    /// Tokens a second.
    pub(crate) transfer_tokens_per_s: f64,
    /// Of the engine that would compute the prompt, if there is one.
    pub(crate) prefill_tokens_per_s: Option<f64>,
    /// What that engine has to do before.
    pub(crate) prefill_queue_tokens: Option<u64>,
}

/// Why a request is left to one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plain {
    /// It is switched off.
    Off,
    /// The kind of request does not allow it.
    Unsuited,
    /// The decoding engine has to compute too little.
    Short,
    /// KV moves no faster than it is computed.
    SlowTransfer,
    /// There is no usable engine that computes prompts for it.
    NoPrefill,
    /// The other engine has more to do before than the decoding engine.
    Busy,
    /// The other engine also generates, and the decoding engine has nothing else to do.
    Idle,
}

impl Plain {
    /// The word for it in metrics and answers.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Unsuited => "unsuited",
            Self::Short => "short",
            Self::SlowTransfer => "slow_transfer",
            Self::NoPrefill => "no_prefill",
            Self::Busy => "prefill_busy",
            Self::Idle => "decode_idle",
        }
    }
}

impl Figures {
    /// The figures of a decoding engine alone.
    pub(crate) fn new(config: &DisaggregationConfig, decode: &Backend, uncached_tokens: u64) -> Self {
        let decode_tokens_per_s = decode.prefill_speed.tokens_per_s().unwrap_or(config.prefill_tokens_per_s);
        let transfer_tokens_per_s =
            decode.transfer_speed.tokens_per_s().unwrap_or(config.transfer_tokens_per_s);
        Self {
            uncached_tokens,
            threshold_tokens: threshold_tokens(config, decode_tokens_per_s, transfer_tokens_per_s),
            decode_tokens_per_s,
            transfer_tokens_per_s,
            prefill_tokens_per_s: None,
            prefill_queue_tokens: None,
        }
    }

    /// The same with those of the engine that would compute the prompt, which has so much to do before.
    pub(crate) fn with_prefill(
        self,
        config: &DisaggregationConfig,
        prefill: &Backend,
        queue_tokens: u64,
    ) -> Self {
        let speed = prefill.prefill_speed.tokens_per_s().unwrap_or(config.prefill_tokens_per_s);
        Self { prefill_tokens_per_s: Some(speed), prefill_queue_tokens: Some(queue_tokens), ..self }
    }

    /// Whether `n_tokens` of the prompt are worth a transfer.
    pub(crate) fn pays(&self, n_tokens: u64) -> Result<(), Plain> {
        match self.threshold_tokens {
            None => Err(Plain::SlowTransfer),
            Some(threshold) if n_tokens < threshold => Err(Plain::Short),
            Some(_) => Ok(()),
        }
    }

    /// Whether the queue of the other engine is shorter than computing the prompt here takes.
    pub(crate) fn has_turn(&self) -> Result<(), Plain> {
        let (Some(speed), Some(queue_tokens)) = (self.prefill_tokens_per_s, self.prefill_queue_tokens) else {
            return Err(Plain::NoPrefill);
        };
        let wait_s = queue_tokens as f64 / speed;
        let own_s = self.uncached_tokens as f64 / self.decode_tokens_per_s;
        if wait_s < own_s { Ok(()) } else { Err(Plain::Busy) }
    }
}

/// Tokens from which on a transfer takes less time than computing them.
fn threshold_tokens(config: &DisaggregationConfig, decode_speed: f64, transfer_speed: f64) -> Option<u64> {
    let saved_s_per_token = 1.0 / decode_speed - 1.0 / transfer_speed;
    if saved_s_per_token <= 0.0 {
        return None;
    }
    let overhead: Duration = millis(config.overhead_ms);
    let equal_tokens = (overhead.as_secs_f64() / saved_s_per_token).ceil() as u64;
    Some(config.min_uncached_tokens.max(equal_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(decode_speed: f64, transfer_speed: f64) -> Figures {
        let config = DisaggregationConfig::default();
        Figures {
            uncached_tokens: 1000,
            threshold_tokens: threshold_tokens(&config, decode_speed, transfer_speed),
            decode_tokens_per_s: decode_speed,
            transfer_tokens_per_s: transfer_speed,
            prefill_tokens_per_s: None,
            prefill_queue_tokens: None,
        }
    }

    #[test]
    fn the_threshold_is_where_a_transfer_takes_as_long_as_computing() {
        // 20 ms at 10 000 tokens a second are 200 tokens and what the transfer of those takes: the least number counts.
        assert_eq!(figures(10_000.0, 200_000.0).threshold_tokens, Some(512));
        // 20 ms at 100 000 tokens a second.
        assert_eq!(figures(100_000.0, 1e12).threshold_tokens, Some(2001));
        assert_eq!(figures(100_000.0, 200_000.0).threshold_tokens, Some(4000));
        assert_eq!(figures(10_000.0, 10_000.0).threshold_tokens, None);
        assert_eq!(figures(10_000.0, 5000.0).pays(1 << 20), Err(Plain::SlowTransfer));
    }

    #[test]
    fn short_prompts_and_long_queues_stay_on_one_engine() {
        let figures = figures(10_000.0, 200_000.0);
        assert_eq!(figures.pays(511), Err(Plain::Short));
        assert_eq!(figures.pays(512), Ok(()));
        assert_eq!(figures.has_turn(), Err(Plain::NoPrefill));
        let with = |speed, queue| Figures {
            prefill_tokens_per_s: Some(speed),
            prefill_queue_tokens: Some(queue),
            ..figures
        };
        assert_eq!(with(10_000.0, 0).has_turn(), Ok(()));
        assert_eq!(with(10_000.0, 999).has_turn(), Ok(()));
        assert_eq!(with(10_000.0, 1000).has_turn(), Err(Plain::Busy));
        assert_eq!(with(20_000.0, 1999).has_turn(), Ok(()));
    }
}
