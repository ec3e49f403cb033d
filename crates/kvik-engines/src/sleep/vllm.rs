//! vLLM's sleep mode: `--enable-sleep-mode`, and `VLLM_SERVER_DEV_MODE=1` for its calls.

use serde_json::{Value, json};

use super::{CALL_TIMEOUT, Done, NativeSleep};
use crate::calls::EngineCalls;
use crate::config::VllmSleep;

/// vLLM by how deep it sleeps.
#[derive(Debug)]
pub(super) struct VllmSleeper(pub(super) VllmSleep);

impl NativeSleep for VllmSleeper {
    fn release<'a>(&'a self, calls: &'a EngineCalls) -> Done<'a> {
        Box::pin(async move {
            match self.0 {
                VllmSleep::KvCache => {
                    post(calls, "/sleep?level=0&mode=keep", None).await?;
                    post(calls, "/release_kv_cache_memory", None).await
                }
                VllmSleep::Level1 => {
                    post(calls, "/sleep?level=1", None).await?;
                    confirm(calls, true).await
                }
                VllmSleep::Level2 => {
                    post(calls, "/sleep?level=2", None).await?;
                    confirm(calls, true).await
                }
            }
        })
    }

    fn resume<'a>(&'a self, calls: &'a EngineCalls) -> Done<'a> {
        Box::pin(async move {
            match self.0 {
                VllmSleep::KvCache => post(calls, "/wake_up?tags=kv_cache", None).await?,
                VllmSleep::Level1 => post(calls, "/wake_up", None).await?,
                VllmSleep::Level2 => {
                    // The weights were dropped: what is in their memory is not theirs until they are read again.
                    post(calls, "/wake_up?tags=weights", None).await?;
                    post(calls, "/collective_rpc", Some(json!({"method": "reload_weights"}))).await?;
                    post(calls, "/wake_up?tags=kv_cache", None).await?;
                }
            }
            confirm(calls, false).await
        })
    }
}

async fn post(calls: &EngineCalls, path: &str, body: Option<Value>) -> Result<(), String> {
    calls.post(path, body.as_ref(), CALL_TIMEOUT).await.map(|_| ())
}

/// Asks whether the engine sleeps now, and refuses another answer than the expected one.
async fn confirm(calls: &EngineCalls, is_expected: bool) -> Result<(), String> {
    let answer = calls.get("/is_sleeping", CALL_TIMEOUT).await?;
    if answer.get("is_sleeping") == Some(&Value::Bool(is_expected)) {
        return Ok(());
    }
    Err(format!("GET /is_sleeping: {answer}; expected is_sleeping: {is_expected}"))
}
