//! vLLM's `NixlConnector`: the prompt is computed first, then the decoding engine reads its KV out of the other's memory.
//!
//! The first engine says in `kv_transfer_params` of its answer where the KV is, and that goes to the second one as it was
//! written. It names memory by block numbers, which the first engine uses again once they were read or its lease is over: so
//! they are given to one engine only, unless that has not seen them, and only for a while.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::request::peek::scan::scan_object;

/// What the engine that computes the prompt is told.
pub(super) const PREFILL_PARAMS: &str = concat!(
    r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"#,
    r#""remote_block_ids":null,"remote_host":null,"remote_port":null}"#
);

/// The fields without which the decoding engine would compute the prompt itself.
#[derive(Deserialize)]
struct HandedOver {
    do_remote_prefill: bool,
    #[serde(rename = "remote_block_ids")]
    _block_ids: Vec<IgnoredAny>,
    #[serde(rename = "remote_engine_id")]
    _engine_id: String,
    #[serde(rename = "remote_request_id")]
    _request_id: String,
    #[serde(rename = "remote_host")]
    _host: String,
    #[serde(rename = "remote_port")]
    _port: u16,
}

/// The `kv_transfer_params` of an answer as they were written; `None` if they hand nothing over.
pub(super) fn handed_over(answer: &[u8]) -> Option<String> {
    let text = simdutf8::basic::from_utf8(answer).ok()?;
    let mut params = None;
    scan_object(text, |name, value| {
        if name == "kv_transfer_params" {
            params = Some(value);
        }
    })
    .ok()?;
    let params = params?;
    // Read in full: what is no JSON must not get into another body.
    let HandedOver { do_remote_prefill, .. } = serde_json::from_str(params).ok()?;
    do_remote_prefill.then(|| params.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn params_are_taken_as_they_were_written() {
        let params = concat!(
            r#"{"do_remote_prefill": true, "do_remote_decode":false, "remote_block_ids":[[1, 2],[3]],"#,
            r#""remote_engine_id":"e","remote_request_id":"cmpl-1","remote_host":"h","remote_port":5600,"x":1.50}"#
        );
        let answer = format!(r#"{{"id":"cmpl-1","choices":[],"kv_transfer_params": {params} }}"#);
        assert_eq!(handed_over(answer.as_bytes()).as_deref(), Some(params));
    }

    #[test]
    fn what_hands_nothing_over_is_none() {
        let whole = concat!(
            r#"{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","#,
            r#""remote_request_id":"r","remote_host":"h","remote_port":1}"#
        );
        let answer = |params: &str| format!(r#"{{"kv_transfer_params":{params}}}"#);
        assert!(handed_over(answer(whole).as_bytes()).is_some());
        for broken in [
            answer("null"),
            answer("{}"),
            answer(&whole.replace("true", "false")),
            answer(&whole.replace(":1}", ":\"1\"}")),
            answer(&whole.replace("[[1]]", "null")),
            answer(&whole.replace("[[1]]", "[[1}]")),
            "{}".to_owned(),
            "[]".to_owned(),
        ] {
            assert_eq!(handed_over(broken.as_bytes()), None, "{broken}");
        }
        assert_eq!(handed_over(b"{\"a\":\"\xff\"}"), None);
    }
}
