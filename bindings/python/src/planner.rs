//! Whether KV of slow tiers is loaded or computed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvik_store::plan::PrefillMeter;
use kvik_store::{MeasuredRead, SpeedMeter};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::engine::time_of;

/// What an engine's passes and its loads from each tier took, and which of the two is faster.
///
/// It reads the clock for loads only. May be used from any thread.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug, Default)]
pub(crate) struct LoadPlanner {
    prefill: Mutex<PrefillMeter>,
    speeds: Mutex<HashMap<String, Arc<SpeedMeter>>>,
}

/// A load that is under way.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct MeasuredLoad(Mutex<Option<MeasuredRead<Arc<SpeedMeter>>>>);

#[pymethods]
impl LoadPlanner {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Takes a pass that computed `n_tokens`, which looked at `n_attended` together.
    fn note_pass(&self, n_tokens: usize, n_attended: u64, seconds: f64) {
        self.prefill.lock().add(n_tokens, n_attended, seconds);
    }

    /// Begins to measure a load whose bytes come from `tier`. Loads of a tier that overlap share what it can do.
    fn begin_load(&self, tier: String) -> MeasuredLoad {
        MeasuredLoad(Mutex::new(Some(self.speed_of(tier).begin())))
    }

    /// Whether `n_bytes` of `tier` are there before the engine has computed the tokens from `first_token` to `end_token`; `None`
    /// where one of the two was never measured.
    fn is_load_faster(
        &self,
        tier: String,
        n_bytes: u64,
        first_token: usize,
        end_token: usize,
    ) -> Option<bool> {
        let (prefill, speed) = (self.prefill.lock().speed()?, self.speed_of(tier).speed()?);
        Some(speed.seconds(n_bytes) <= prefill.seconds(first_token..end_token))
    }

    /// Whether loads from `tier` were not measured for `max_age_s` seconds: the caller should measure one then. Another caller gets
    /// that answer after as much time again.
    fn claim_measurement(&self, tier: String, max_age_s: f64) -> PyResult<bool> {
        let max_age: Duration = time_of("max_age_s", max_age_s)?;
        Ok(self.speed_of(tier).claim_measurement(max_age))
    }
}

#[pymethods]
impl MeasuredLoad {
    /// Ends the load, which brought `n_bytes`; one that brought none says nothing. Further calls do nothing.
    fn end(&self, n_bytes: u64) {
        if let Some(read) = self.0.lock().take() {
            read.end(n_bytes);
        }
    }
}

impl LoadPlanner {
    fn speed_of(&self, tier: String) -> Arc<SpeedMeter> {
        Arc::clone(self.speeds.lock().entry(tier).or_default())
    }
}
