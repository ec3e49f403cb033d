//! The fields of a request, read as strictly as engines do and then some: what is unknown, missing, of another type or not
//! allowed beside the others is refused.

use serde_json::{Map, Value};

use crate::engine::Kind;

/// A request that was accepted.
#[derive(Debug)]
pub(crate) struct Fields {
    pub(crate) prompt: String,
    pub(crate) is_stream: bool,
    pub(crate) params: Option<Params>,
}

/// What a request says about KV.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Params {
    /// Compute the prompt and say where it is.
    Compute,
    /// Compute the prompt for the one that asks by this id.
    ComputeAs { id: String },
    /// Use the KV with this id.
    Use { id: String },
    /// Ask a holder.
    Source,
    /// Meet the other engine.
    Room { room: u64 },
}

impl Fields {
    pub(crate) fn uses_foreign_kv(&self) -> bool {
        matches!(self.params, Some(Params::Use { .. } | Params::Source | Params::Room { .. }))
    }
}

/// Reads a request.
pub(crate) fn read(kind: Kind, is_chat: bool, body: &[u8]) -> Result<Fields, String> {
    let body: Value = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let mut fields = body.as_object().ok_or("the body is no object")?.clone();
    let take =
        |fields: &mut Map<String, Value>, name: &str| fields.remove(name).filter(|value| !value.is_null());
    let prompt =
        take(&mut fields, if is_chat { "messages" } else { "prompt" }).ok_or("there is no prompt")?;
    let n_prompts = match &prompt {
        Value::String(_) if !is_chat => 1,
        Value::Array(messages) if is_chat && messages.iter().all(Value::is_object) => 1,
        Value::Array(list) if list.iter().all(Value::is_u64) => 1,
        Value::Array(list) if list.iter().all(|item| item.is_string() || item.is_array()) => list.len(),
        other => return Err(format!("the prompt is {other}")),
    };
    if !take(&mut fields, "model").is_some_and(|model| model.is_string()) {
        return Err("`model` is missing".to_owned());
    }
    let number = |fields: &mut Map<String, Value>, name: &str| match take(fields, name) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or(format!("`{name}` is {value}")),
    };
    let max_tokens = number(&mut fields, "max_tokens")?;
    let max_completion_tokens = number(&mut fields, "max_completion_tokens")?;
    if max_completion_tokens.is_some() && !is_chat {
        return Err("`max_completion_tokens` is for conversations".to_owned());
    }
    let limit = max_completion_tokens.or(max_tokens);
    if limit == Some(0) {
        return Err("no tokens are asked for".to_owned());
    }
    if let Some(min_tokens) = number(&mut fields, "min_tokens")?
        && limit.is_some_and(|limit| limit < min_tokens)
    {
        return Err("`min_tokens` is more than `max_tokens`".to_owned());
    }
    let n_outputs = number(&mut fields, "n")?.unwrap_or(1);
    let is_stream = match take(&mut fields, "stream") {
        None => false,
        Some(value) => value.as_bool().ok_or(format!("`stream` is {value}"))?,
    };
    if let Some(options) = take(&mut fields, "stream_options")
        && (!options.is_object() || !is_stream)
    {
        return Err("`stream_options` can only be an object beside `stream`".to_owned());
    }
    let is_alone = max_tokens == Some(1) && max_completion_tokens.is_none() && !is_stream;
    let kv = take(&mut fields, "kv_transfer_params");
    let room = ["bootstrap_host", "bootstrap_port", "bootstrap_room"].map(|name| take(&mut fields, name));
    let params = match kind {
        Kind::Sglang if kv.is_some() => return Err("`kv_transfer_params` is unknown".to_owned()),
        Kind::Sglang => {
            let n_values = if is_chat { n_outputs as usize } else { n_prompts };
            Some(Params::Room { room: read_room(&room, n_values)? })
        }
        _ if room.iter().any(Option::is_some) => return Err("`bootstrap_*` is unknown".to_owned()),
        Kind::Shared if kv.is_some() => return Err("`kv_transfer_params` is unknown".to_owned()),
        Kind::Shared => None,
        Kind::Nixl => kv.map(|kv| read_nixl(&kv)).transpose()?,
        Kind::P2p => kv.map(|kv| read_p2p(&kv)).transpose()?,
    };
    if matches!(params, Some(Params::Compute | Params::ComputeAs { .. })) && !is_alone {
        return Err("a prompt is computed by a request for one token in one piece".to_owned());
    }
    if n_outputs != 1 && params.is_some() && !matches!(kind, Kind::Sglang) {
        return Err("KV moves for one output".to_owned());
    }
    let known = ["temperature", "seed", "echo", "prompt_logprobs", "logprobs", "user", "best_of"];
    if let Some(unknown) = fields.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(format!("`{unknown}` is unknown"));
    }
    Ok(Fields { prompt: prompt.to_string(), is_stream, params })
}

/// Checks that an object has these fields and no other.
fn exactly<'a>(value: &'a Value, names: &[&str]) -> Result<&'a Map<String, Value>, String> {
    let fields = value.as_object().ok_or(format!("{value} is no object"))?;
    let is_exact = fields.len() == names.len() && names.iter().all(|name| fields.contains_key(*name));
    if is_exact { Ok(fields) } else { Err(format!("{value} must have the fields {names:?}")) }
}

fn read_nixl(params: &Value) -> Result<Params, String> {
    if params["do_remote_decode"] == true {
        let names = [
            "do_remote_decode",
            "do_remote_prefill",
            "remote_engine_id",
            "remote_block_ids",
            "remote_host",
            "remote_port",
        ];
        let fields = exactly(params, &names)?;
        let is_empty = names[2..].iter().all(|name| fields[*name].is_null());
        return if is_empty && fields["do_remote_prefill"] == false {
            Ok(Params::Compute)
        } else {
            Err(format!("{params} is not what computes a prompt"))
        };
    }
    let names = [
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
    ];
    let fields = exactly(params, &names)?;
    let is_sane = fields["do_remote_prefill"] == true
        && fields["do_remote_decode"] == false
        && fields["remote_block_ids"] == serde_json::json!([[4, 5, 6]])
        && fields["remote_engine_id"].is_string()
        && fields["remote_host"].is_string()
        && fields["remote_port"].is_u64();
    let id =
        fields["remote_request_id"].as_str().filter(|_| is_sane).ok_or(format!("{params} cannot be used"))?;
    Ok(Params::Use { id: id.to_owned() })
}

fn read_p2p(params: &Value) -> Result<Params, String> {
    let id_of = |value: &Value, names: &[&str]| {
        let fields = exactly(value, names)?;
        let is_address = fields.get("remote_host").is_none_or(Value::is_string)
            && fields
                .get("remote_port")
                .is_none_or(|port| port.as_u64().is_some_and(|port| 0 < port && port < 65536));
        let id = fields["kv_request_id"].as_str().filter(|id| is_address && !id.is_empty());
        id.map(str::to_owned).ok_or(format!("{value} cannot be used"))
    };
    let at = ["kv_request_id", "remote_host", "remote_port"];
    if let Some(value) =
        exactly(params, &["remote_decoder"]).ok().and_then(|fields| fields.get("remote_decoder"))
    {
        return Ok(Params::ComputeAs { id: id_of(value, &["kv_request_id"])? });
    }
    if let Some(value) =
        exactly(params, &["remote_prefiller"]).ok().and_then(|fields| fields.get("remote_prefiller"))
    {
        return Ok(Params::Use { id: id_of(value, &at)? });
    }
    let fields = exactly(params, &["remote_kv_source"])?;
    id_of(&fields["remote_kv_source"], &at).map(|_| Params::Source)
}

/// Reads where the engines meet: one value each, or a list of as many as there are prompts.
fn read_room(values: &[Option<Value>; 3], n_values: usize) -> Result<u64, String> {
    let [Some(host), Some(port), Some(room)] = values else {
        return Err("Disaggregated request received without bootstrap room id".to_owned());
    };
    let firsts = [host, port, room].map(|value| match value {
        Value::Array(list) if list.len() == n_values && 1 < n_values => list.first(),
        Value::Array(_) => None,
        value if n_values == 1 => Some(value),
        _ => None,
    });
    let [Some(host), Some(port), Some(room)] = firsts else {
        return Err(format!("{values:?} are not for {n_values} prompts"));
    };
    let is_address = host.is_string() && port.as_u64().is_some_and(|port| 0 < port && port < 65536);
    room.as_u64().filter(|room| is_address && *room < 1 << 63).ok_or(format!("{values:?} name no room"))
}
