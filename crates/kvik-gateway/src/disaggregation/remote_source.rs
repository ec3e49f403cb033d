//! The P2P tier of vLLM's `OffloadingConnector`: an engine reads KV out of the memory tier of another one.
//!
//! `remote_kv_source` is one leg: the index names an engine that has more of the prompt, and the engine that answers pulls that
//! instead of computing it. It asks the other first, so that blocks which are gone are computed. With `remote_decoder` and
//! `remote_prefiller` the prompt is computed first; the id binds both, and an id that is not known, or no longer, is refused by the engine.

use std::fmt::Write as _;
use std::sync::Arc;

use crate::config::PdProtocol;
use crate::request::headers::unique_id;
use crate::upstream::backend::Backend;
use crate::upstream::fleet::{ModelGroup, Transfer};

/// Binds the two legs of a request.
#[derive(Debug, Clone)]
pub(super) struct KvRequestId(String);

impl KvRequestId {
    pub(super) fn new() -> Self {
        Self(format!("kvik-{:032x}", unique_id()))
    }

    /// What the engine that computes the prompt is told.
    pub(super) fn prefill_params(&self) -> String {
        format!(r#"{{"remote_decoder":{{"kv_request_id":"{}"}}}}"#, self.0)
    }

    /// What the engine that generates is told.
    pub(super) fn decode_params(&self, prefill: &Transfer) -> String {
        self.at("remote_prefiller", prefill)
    }

    /// The parameters of an engine that pulls from a holder.
    pub(super) fn source_params(&self, holder: &Transfer) -> String {
        self.at("remote_kv_source", holder)
    }

    fn at(&self, relation: &str, Transfer { host, port, .. }: &Transfer) -> String {
        let mut params = format!(r#"{{"{relation}":{{"kv_request_id":"{}","remote_host":"#, self.0);
        // Hosts have been checked; written as JSON all the same.
        let host = serde_json::Value::from(host.as_str());
        let _ = write!(params, r#"{host},"remote_port":{port}}}}}"#);
        params
    }
}

/// The usable backend, other than `decode`, that has most of a prompt, as `matched` says, and how many tokens more than
/// `n_own_tokens` it has.
pub(super) fn holder(
    group: &ModelGroup,
    decode: &Arc<Backend>,
    n_own_tokens: u64,
    matched: impl Fn(&Backend) -> u64,
) -> Option<(usize, u64)> {
    let seats = group.seats.iter().enumerate().filter(|(_, seat)| {
        seat.is_usable()
            && seat.part.protocol() == Some(PdProtocol::P2p)
            && !Arc::ptr_eq(&seat.backend, decode)
    });
    let (member, n_tokens) =
        seats.map(|(member, seat)| (member, matched(&seat.backend))).max_by_key(|(_, n_tokens)| *n_tokens)?;
    n_tokens.checked_sub(n_own_tokens).filter(|gained| 0 < *gained).map(|gained| (member, gained))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn params_name_the_other_engine_and_one_id() {
        let id = KvRequestId::new();
        let peer = Transfer { protocol: PdProtocol::P2p, host: "10.0.0.7".to_owned(), port: 5710 };
        let parse = |text: String| serde_json::from_str::<Value>(&text).unwrap();
        assert_eq!(parse(id.prefill_params()), json!({"remote_decoder": {"kv_request_id": id.0}}));
        let at = json!({"kv_request_id": id.0, "remote_host": "10.0.0.7", "remote_port": 5710});
        assert_eq!(parse(id.decode_params(&peer)), json!({"remote_prefiller": at}));
        assert_eq!(parse(id.source_params(&peer)), json!({"remote_kv_source": at}));
        assert_ne!(KvRequestId::new().0, id.0);
    }
}
