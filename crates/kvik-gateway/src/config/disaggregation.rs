//! What is configured about prompts that are computed on another engine than their answers.

use serde::{Deserialize, Serialize};

use crate::config::check::{MAX_VALUE, check};
use crate::error::Result;

/// Most tokens a second that a setting can say.
const MAX_SPEED: f64 = 1e12;

/// Which part of requests a backend takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts for others.
    Prefill,
    /// Generates, after prompts that others or it itself computed.
    Decode,
    /// Both.
    #[default]
    Both,
}

/// How KV moves from the engine that computed a prompt to the one that generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PdProtocol {
    /// vLLM's `NixlConnector`: the decoding engine reads out of the other's memory.
    NixlPull,
    /// The P2P tier of vLLM's `OffloadingConnector`.
    P2p,
    /// `SGLang`'s disaggregation, both engines at once.
    Sglang,
    /// A store that both engines use, such as kvik's: neither gets a field about it.
    Shared,
    /// Workers of kvik, which say their role themselves: the request moves with its KV.
    #[serde(skip)]
    Kvik,
}

/// When a prompt is computed on another engine than its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DisaggregationConfig {
    /// Whether prompts may be computed elsewhere, where the protocol leaves a choice. Default: true; without backends that have
    /// `pd` nothing is.
    pub enabled: bool,
    /// Fewest tokens that the decoding engine would have to compute. Default: 512; the threshold is higher where the measured
    /// speeds say that a transfer does not pay.
    pub min_uncached_tokens: u64,
    /// Tokens a second that an engine computes of a prompt, until it has been measured. Default: 10 000.
    pub prefill_tokens_per_s: f64,
    /// Tokens a second whose KV an engine takes over, until it has been measured. Default: 200 000, 25 GB/s at 128 KiB a
    /// token.
    pub transfer_tokens_per_s: f64,
    /// Time that the second leg and its transfer cost, whatever the prompt. Default: 20 ms.
    pub overhead_ms: u64,
    /// Time for the answer of an engine that only computes the prompt; then another one is tried once. Default: 60 000 ms.
    pub prefill_timeout_ms: u64,
    /// Time after the prompt was computed in which its KV may be offered to a decoding engine; below the engines' own lease, after which
    /// they use the memory again (vLLM: 30 s). Default: 15 000 ms.
    pub lease_ms: u64,
    /// Whether clients may send `kv_transfer_params` and `bootstrap_*` of their own to backends with `pd`. They name hosts and memory of
    /// engines, so only clients that are as trusted as the gateway should. Default: false; such requests are refused.
    pub allow_client_params: bool,
}

impl Default for DisaggregationConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            min_uncached_tokens: 512,
            prefill_tokens_per_s: 10_000.0,
            transfer_tokens_per_s: 200_000.0,
            overhead_ms: 20,
            prefill_timeout_ms: 60_000,
            lease_ms: 15_000,
            allow_client_params: false,
        }
    }
}

impl Role {
    /// Whether it generates.
    pub(crate) fn decodes(self) -> bool {
        self != Self::Prefill
    }

    /// Whether it computes prompts for others.
    pub(crate) fn prefills(self) -> bool {
        self != Self::Decode
    }

    /// The word for it in the configuration.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

impl PdProtocol {
    /// All that can be configured.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 4] = [Self::NixlPull, Self::P2p, Self::Sglang, Self::Shared];

    /// The word for it in the configuration, in metrics and in logs.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::NixlPull => "nixl_pull",
            Self::P2p => "p2p",
            Self::Sglang => "sglang",
            Self::Shared => "shared",
            Self::Kvik => "kvik",
        }
    }

    /// The port at which engines reach each other where none is configured; `None` if they need no address.
    pub(crate) fn default_port(self) -> Option<u16> {
        match self {
            Self::P2p => Some(5710),
            Self::Sglang => Some(8998),
            Self::NixlPull | Self::Shared | Self::Kvik => None,
        }
    }
}

/// The part of a backend, as its configuration gives it.
#[derive(Debug, Clone, Copy)]
pub(super) struct BackendPart<'a> {
    pub(super) role: Role,
    pub(super) pd: Option<PdProtocol>,
    pub(super) pd_host: Option<&'a str>,
    pub(super) pd_port: Option<u16>,
}

impl DisaggregationConfig {
    /// Checks every value.
    pub(super) fn validate(&self) -> Result<()> {
        for (field, speed) in [
            ("disaggregation.prefill_tokens_per_s", self.prefill_tokens_per_s),
            ("disaggregation.transfer_tokens_per_s", self.transfer_tokens_per_s),
        ] {
            let is_speed = speed.is_finite() && 0.0 < speed && speed <= MAX_SPEED;
            check(is_speed, field, speed, "above 0 and at most 10^12")?;
        }
        for (field, value, least) in [
            ("disaggregation.min_uncached_tokens", self.min_uncached_tokens, 0),
            ("disaggregation.overhead_ms", self.overhead_ms, 0),
            ("disaggregation.prefill_timeout_ms", self.prefill_timeout_ms, 1),
            ("disaggregation.lease_ms", self.lease_ms, 1),
        ] {
            check((least..=MAX_VALUE).contains(&value), field, value, &format!("{least} to 2^40"))?;
        }
        Ok(())
    }
}

impl BackendPart<'_> {
    /// Checks the part of the backend at `place`, such as `backends[0]`.
    pub(super) fn validate(&self, place: &str) -> Result<()> {
        let Self { role, pd, pd_host, pd_port } = *self;
        let (is_allowed, allowed) = match pd {
            None => (role == Role::Both, "both, or `pd` with the protocol that KV moves by"),
            // A server of SGLang is started for one of them.
            Some(PdProtocol::Sglang) => (
                role != Role::Both,
                "prefill or decode with `pd: sglang`; a server that does both is a backend without `pd`",
            ),
            Some(_) => (true, ""),
        };
        check(is_allowed, &format!("{place}.role"), role.as_str(), allowed)?;
        let has_address = pd.is_some_and(|pd| pd.default_port().is_some());
        let only_with = "none unless `pd` is sglang or p2p";
        if let Some(host) = pd_host {
            let field = format!("{place}.pd_host");
            check(has_address, &field, host, only_with)?;
            let is_host = (1..=253).contains(&host.len())
                && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]%".contains(&byte));
            check(is_host, &field, host, "a host name or an IP address")?;
        }
        if let Some(port) = pd_port {
            let field = format!("{place}.pd_port");
            check(has_address, &field, port, only_with)?;
            check(port != 0, &field, port, "1 to 65535")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: BackendPart<'static> =
        BackendPart { role: Role::Both, pd: None, pd_host: None, pd_port: None };

    fn error_of(part: BackendPart<'_>) -> String {
        part.validate("backends[0]").map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn parts_that_fit_each_other_are_accepted() {
        let of = |pd, role| BackendPart { role, pd: Some(pd), ..PLAIN };
        for part in [
            PLAIN,
            of(PdProtocol::NixlPull, Role::Both),
            of(PdProtocol::NixlPull, Role::Prefill),
            of(PdProtocol::Sglang, Role::Decode),
            of(PdProtocol::Shared, Role::Prefill),
            BackendPart {
                pd_host: Some("10.0.0.1"),
                pd_port: Some(8999),
                ..of(PdProtocol::Sglang, Role::Prefill)
            },
            BackendPart { pd_host: Some("::1"), pd_port: Some(5710), ..of(PdProtocol::P2p, Role::Both) },
        ] {
            assert_eq!(error_of(part), "", "{part:?}");
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_refused_with_the_field_and_what_is_allowed() {
        let nixl = BackendPart { pd: Some(PdProtocol::NixlPull), ..PLAIN };
        let p2p = BackendPart { pd: Some(PdProtocol::P2p), ..PLAIN };
        for (part, start) in [
            (
                BackendPart { role: Role::Prefill, ..PLAIN },
                "`backends[0].role` is prefill; allowed: both, or `pd`",
            ),
            (
                BackendPart { pd: Some(PdProtocol::Sglang), ..PLAIN },
                "`backends[0].role` is both; allowed: prefill or decode",
            ),
            (BackendPart { pd_port: Some(1), ..nixl }, "`backends[0].pd_port` is 1; allowed: none"),
            (BackendPart { pd_host: Some("h"), ..PLAIN }, "`backends[0].pd_host` is h; allowed: none"),
            (BackendPart { pd_port: Some(0), ..p2p }, "`backends[0].pd_port` is 0; allowed: 1 to 65535"),
            (BackendPart { pd_host: Some("a\"b"), ..p2p }, "`backends[0].pd_host` is a\"b; allowed: a host"),
            (BackendPart { pd_host: Some(""), ..p2p }, "`backends[0].pd_host` is ; allowed: a host"),
        ] {
            let error = error_of(part);
            assert!(error.starts_with(start), "{part:?}: {error}");
        }
    }

    #[test]
    fn settings_are_bounded() {
        let defaults = DisaggregationConfig::default;
        assert!(defaults().validate().is_ok());
        let error = DisaggregationConfig { prefill_tokens_per_s: 0.0, ..defaults() }.validate().unwrap_err();
        let expected = "`disaggregation.prefill_tokens_per_s` is 0; allowed: above 0 and at most 10^12";
        assert_eq!(error.to_string(), expected);
        let error = DisaggregationConfig { lease_ms: 0, ..defaults() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "`disaggregation.lease_ms` is 0; allowed: 1 to 2^40");
    }

    #[test]
    fn words_are_those_of_the_configuration() {
        for pd in PdProtocol::ALL {
            assert_eq!(serde_json::to_value(pd).unwrap(), pd.as_str());
        }
        // Workers of kvik say so themselves.
        assert!(serde_json::from_str::<PdProtocol>("\"kvik\"").is_err());
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            assert_eq!(serde_json::to_value(role).unwrap(), role.as_str());
        }
    }
}
