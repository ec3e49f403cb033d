//! SGLang's release of memory: `--enable-memory-saver`.

use serde_json::{Value, json};

use super::{CALL_TIMEOUT, Done, NativeSleep};
use crate::calls::EngineCalls;

/// SGLang, whose weights are read again from where they came.
#[derive(Debug)]
pub(super) struct SglangSleeper {
    pub(super) weights: String,
}

impl NativeSleep for SglangSleeper {
    fn release<'a>(&'a self, calls: &'a EngineCalls) -> Done<'a> {
        Box::pin(async move {
            calls.post("/release_memory_occupation", Some(&json!({})), CALL_TIMEOUT).await.map(|_| ())
        })
    }

    fn resume<'a>(&'a self, calls: &'a EngineCalls) -> Done<'a> {
        Box::pin(async move {
            calls.post("/resume_memory_occupation", Some(&json!({})), CALL_TIMEOUT).await?;
            // The memory of the weights comes back without them.
            let body = json!({ "model_path": self.weights });
            let answer = calls.post("/update_weights_from_disk", Some(&body), CALL_TIMEOUT).await?;
            let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
            if answer.get("success") == Some(&Value::Bool(true)) {
                return Ok(());
            }
            Err(format!("POST /update_weights_from_disk: {answer}; expected success: true"))
        })
    }
}
