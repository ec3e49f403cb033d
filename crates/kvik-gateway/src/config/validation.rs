//! What values of the configuration are refused, before any of them takes effect.

use kvik_indexer::IndexerError;
use kvik_runtime::http::InvalidLimit;
use kvik_runtime::secret::redacted_url;

use super::check::{MAX_VALUE, check};
use super::disaggregation::BackendPart;
use super::{BackendConfig, GatewayConfig, same_url};
use crate::error::{GatewayError, Result};

/// More connections than one process can have.
const MAX_RUNNING: usize = 1_000_000;

impl GatewayConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// [`GatewayError::InvalidConfig`] names the first field that cannot be used.
    pub fn validate(&self) -> Result<()> {
        self.limits.validate().map_err(|InvalidLimit { field, value, allowed }| {
            let (field, allowed) = (field.to_owned(), allowed.to_owned());
            GatewayError::InvalidConfig { field, value, allowed }
        })?;
        for (index, url) in self.coordinators.iter().enumerate() {
            check_url(&format!("coordinators[{index}]"), url)?;
        }
        for (index, backend) in self.backends.iter().enumerate() {
            check_url(&format!("backends[{index}].url"), &backend.url)?;
            let weight = backend.weight.unwrap_or(1.0);
            let is_weight = weight.is_finite() && 0.0 < weight && weight <= 100.0;
            check(is_weight, &format!("backends[{index}].weight"), weight, "above 0 and at most 100")?;
            let is_first = !self.backends[..index].iter().any(|before| same_url(&before.url, &backend.url));
            check(is_first, &format!("backends[{index}].url"), &backend.url, "each address once")?;
            backend.part().validate(&format!("backends[{index}]"))?;
        }
        self.disaggregation.validate()?;
        self.index.validate().map_err(|error| match error {
            IndexerError::Invalid { field, value, allowed } => {
                GatewayError::InvalidConfig { field: format!("index.{field}"), value, allowed }
            }
            error => GatewayError::Index(error),
        })?;
        let is_paired = self.backend_tls.is_paired();
        check(is_paired, "backend_tls", "only one of `certificate` and `key`", "both or none")?;
        for (index, key) in self.api_keys.iter().enumerate() {
            let digest = key.sha256.expose();
            let is_digest = digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
            // Hidden: it may be a key that was pasted here by mistake.
            check(is_digest, &format!("api_keys[{index}].sha256"), &key.sha256, "64 hexadecimal digits")?;
        }
        let grace = self.drain_grace_s;
        check(grace <= 86_400, "drain_grace_s", grace, "0 to 86400 (a day)")?;
        let positive = [
            ("max_body_bytes", self.max_body_bytes as u64),
            ("admission.max_running", self.admission.max_running as u64),
            ("admission.max_wait_ms", self.admission.max_wait_ms),
            ("timeouts.request_ms", self.timeouts.request_ms),
            ("timeouts.response_header_ms", self.timeouts.response_header_ms),
            ("timeouts.stream_idle_ms", self.timeouts.stream_idle_ms),
            ("breaker.consecutive_failures", u64::from(self.breaker.consecutive_failures)),
            ("breaker.window_ms", self.breaker.window_ms),
            ("breaker.open_ms", self.breaker.open_ms),
            ("health.interval_ms", self.health.interval_ms),
            ("health.timeout_ms", self.health.timeout_ms),
            ("health.failures", u64::from(self.health.failures)),
            ("routing.max_lookup_ms", self.routing.max_lookup_ms),
            ("routing.ring.virtual_nodes", u64::from(self.routing.ring.virtual_nodes)),
        ];
        for (field, value) in positive {
            check(0 < value && value <= MAX_VALUE, field, value, "1 to 2^40")?;
        }
        let floor = self.routing.named_floor_tokens;
        check(floor <= MAX_VALUE, "routing.named_floor_tokens", floor, "0 to 2^40")?;
        let running = self.admission.max_running;
        check(running <= MAX_RUNNING, "admission.max_running", running, "1 to 1 000 000")?;
        let attempts = self.retry.max_attempts;
        check((1..=10).contains(&attempts), "retry.max_attempts", attempts, "1 to 10")?;
        let ratio = self.retry.budget_ratio;
        check((0.0..=1.0).contains(&ratio), "retry.budget_ratio", ratio, "0 to 1")?;
        let continuations = self.retry.max_continuations;
        check(continuations <= 100, "retry.max_continuations", continuations, "0 to 100")?;
        let wait_ms = self.retry.continuation_wait_ms;
        check(wait_ms <= 600_000, "retry.continuation_wait_ms", wait_ms, "0 to 600000")?;
        let ratio = self.breaker.error_ratio;
        check(0.0 < ratio && ratio <= 1.0, "breaker.error_ratio", ratio, "above 0 and at most 1")?;
        let (open, longest) = (self.breaker.open_ms, self.breaker.max_open_ms);
        check(
            (open..=MAX_VALUE).contains(&longest),
            "breaker.max_open_ms",
            longest,
            "at least breaker.open_ms",
        )?;
        let factor = self.routing.kv_load_factor;
        check(factor.is_finite() && 0.0 <= factor, "routing.kv_load_factor", factor, "0 or more")?;
        let factor = self.routing.ring.load_factor;
        check(factor.is_finite() && 0.0 <= factor, "routing.ring.load_factor", factor, "0 or more")
    }
}

impl BackendConfig {
    fn part(&self) -> BackendPart<'_> {
        let Self { role, pd, pd_port, .. } = *self;
        BackendPart { role, pd, pd_host: self.pd_host.as_deref(), pd_port }
    }
}

fn check_url(field: &str, url: &str) -> Result<()> {
    let is_base = url.parse::<http::Uri>().is_ok_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            // A login would be sent to no server, and be printed wherever the address is.
            && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
            && uri.query().is_none()
    });
    check(is_base, field, redacted_url(url), "http://host:port or https://host:port")
}
