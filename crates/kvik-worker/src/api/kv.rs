//! `/kv/*`: KV of sequences, out and in.
//!
//! On the wire a layer is a safetensors file with `k` and `v`, `[seq_len, kv_heads, head_dim]` in the
//! worker's KV dtype, and `token_ids`, the tokens they belong to.

use axum::body::Body;
use axum::extract::{Request, State};
use http::StatusCode;
use kvik_model::{BLOCK_TOKENS, LayerKv};
use kvik_proto::worker::{KvPutResponse, KvStats};
use kvik_types::Dtype;
use safetensors::tensor::{Dtype as TensorDtype, SafeTensors, TensorView, serialize};
use serde::Deserialize;

use super::request::check_seq_id;
use super::{Answer, Shared, json, read_body, typed};
use crate::error::Refusal;
use crate::sequences::Sequences;
use crate::staging::{PutLayer, PutMode};
use crate::state::{KvShape, Loaded};

/// Which layer of which sequence; other parameters are ignored.
#[derive(Debug, Deserialize)]
struct Query {
    seq_id: Option<String>,
    layer: Option<String>,
    mode: Option<String>,
}

/// `POST /kv/put`.
pub(super) async fn put(State(state): Shared, request: Request) -> Answer {
    let query = query(&request)?;
    let loaded = state.ready()?;
    let (seq_id, layer_idx) = query.target(loaded)?;
    let mode = match query.mode.as_deref() {
        Some("append") => PutMode::Append,
        None | Some("replace") => PutMode::Replace,
        Some(other) => return Err(Refusal::field("mode", format!("`{other}`"), "append, replace")),
    };
    refuse_active(&loaded.sequences, &seq_id)?;
    let body = read_body(&state, request).await?;
    let (tokens, kv) = parse(&body, &loaded.shape)?;
    loaded.check_vocabulary("token_ids", &tokens)?;
    drop(body);
    let layer = PutLayer { layer_idx, mode, tokens, keys: kv.keys, values: kv.values };
    let outcome = loaded.staging.put(&loaded.engine, loaded.shape.n_layers, &seq_id, layer).await?;
    let response = KvPutResponse { seq_id, seq_len: outcome.n_tokens, is_complete: outcome.is_complete };
    Ok(json(StatusCode::OK, &response))
}

/// `GET /kv/get`; also while the worker drains, because it is how its sequences are saved.
pub(super) async fn get(State(state): Shared, request: Request) -> Answer {
    let query = query(&request)?;
    let loaded = state.loaded()?;
    let (seq_id, layer_idx) = query.target(loaded)?;
    let exported = loaded.engine.export_kv(&seq_id, layer_idx..layer_idx + 1).await?;
    let Some(kv) = exported else {
        let message = format!("`seq_id` is `{seq_id}`, which is not known here");
        return Err(Refusal::not_found(message, Some("seq_id")));
    };
    let Some(layer) = kv.layers.first() else {
        return Err(Refusal::failed("the engine gave no layer"));
    };
    let body = write(&kv.tokens, layer, &loaded.shape)?;
    Ok(typed(StatusCode::OK, "application/octet-stream", Body::from(body)))
}

/// `GET /kv/stats`.
pub(super) async fn stats(State(state): Shared) -> Answer {
    let loaded = state.loaded()?;
    let snapshot = loaded.engine.snapshot().await?;
    let shape = &loaded.shape;
    let elements = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim;
    let stats = KvStats {
        block_tokens: BLOCK_TOKENS,
        blocks: snapshot.pool.n_blocks,
        limit_blocks: snapshot.pool.limit_blocks,
        free_blocks: snapshot.pool.n_free,
        registered_blocks: snapshot.pool.n_registered,
        evicted_blocks: snapshot.pool.n_evicted,
        running_sequences: snapshot.n_running,
        waiting_sequences: snapshot.n_waiting,
        resident_sequences: snapshot.n_residents,
        bytes_per_token: elements * shape.dtype.size_bytes(),
        dtype: shape.dtype.to_string(),
    };
    Ok(json(StatusCode::OK, &stats))
}

fn query(request: &Request) -> Result<Query, Refusal> {
    axum::extract::Query::try_from_uri(request.uri())
        .map(|axum::extract::Query(query)| query)
        .map_err(|error| Refusal::invalid(format!("the query cannot be read: {error}"), None))
}

impl Query {
    /// The sequence and layer.
    fn target(&self, loaded: &Loaded) -> Result<(String, usize), Refusal> {
        let n_layers = loaded.shape.n_layers;
        let seq_id = self.seq_id.clone().unwrap_or_default();
        check_seq_id(&seq_id)?;
        let given = self.layer.as_deref().unwrap_or("missing");
        match given.parse() {
            Ok(layer_idx) if layer_idx < n_layers => Ok((seq_id, layer_idx)),
            _ => Err(Refusal::field("layer", given, &format!("0 to {}", n_layers - 1))),
        }
    }
}

fn refuse_active(sequences: &Sequences, seq_id: &str) -> Result<(), Refusal> {
    if !sequences.is_active(seq_id) {
        return Ok(());
    }
    let message = format!("`seq_id` is `{seq_id}`, which is being stepped; finish it first");
    Err(Refusal::conflict(message, Some("seq_id")))
}

/// Reads a layer and checks it against the model.
fn parse(body: &[u8], shape: &KvShape) -> Result<(Vec<u32>, LayerKv), Refusal> {
    let tensors = SafeTensors::deserialize(body)
        .map_err(|error| Refusal::invalid(format!("the body is not safetensors: {error}"), None))?;
    let tensor = |name: &str| {
        let message = || Refusal::invalid(format!("the body has no tensor `{name}`"), Some(name));
        tensors.tensor(name).map_err(|_| message())
    };
    let tokens = token_ids(&tensor("token_ids")?)?;
    let dtype = tensor_dtype(shape.dtype)?;
    let expected = [tokens.len(), shape.n_kv_heads, shape.head_dim];
    let data = |name: &str| {
        let view = tensor(name)?;
        if view.dtype() != dtype {
            return Err(Refusal::field(name, format!("of dtype {:?}", view.dtype()), &format!("{dtype:?}")));
        }
        if view.shape() != expected {
            let allowed = format!("{expected:?}, which is [token_ids, kv_heads, head_dim]");
            return Err(Refusal::field(name, format!("of shape {:?}", view.shape()), &allowed));
        }
        Ok(view.data().to_vec())
    };
    let kv = LayerKv { n_tokens: tokens.len(), keys: data("k")?, values: data("v")? };
    Ok((tokens, kv))
}

fn token_ids(view: &TensorView<'_>) -> Result<Vec<u32>, Refusal> {
    let field = "token_ids";
    if view.shape().len() != 1 || view.shape() == [0] {
        return Err(Refusal::field(
            field,
            format!("of shape {:?}", view.shape()),
            "one dimension of at least 1",
        ));
    }
    let data = view.data();
    let tokens: Vec<i64> = match view.dtype() {
        TensorDtype::U32 => {
            data.as_chunks().0.iter().map(|&bytes| i64::from(u32::from_le_bytes(bytes))).collect()
        }
        TensorDtype::I32 => {
            data.as_chunks().0.iter().map(|&bytes| i64::from(i32::from_le_bytes(bytes))).collect()
        }
        TensorDtype::I64 => data.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
        other => return Err(Refusal::field(field, format!("of dtype {other:?}"), "I32, U32, I64")),
    };
    let token = |token: i64| {
        u32::try_from(token).map_err(|_| Refusal::field(field, token, "token ids of the vocabulary"))
    };
    tokens.into_iter().map(token).collect()
}

fn write(tokens: &[u32], layer: &LayerKv, shape: &KvShape) -> Result<Vec<u8>, Refusal> {
    let failed = |error: safetensors::SafeTensorError| Refusal::failed(error.to_string());
    // Signed, because not every reader has unsigned integers; ids are far below the sign.
    let ids: Vec<u8> = tokens.iter().flat_map(|&token| token.cast_signed().to_le_bytes()).collect();
    let dims = vec![tokens.len(), shape.n_kv_heads, shape.head_dim];
    let dtype = tensor_dtype(shape.dtype)?;
    let views = [
        ("k", TensorView::new(dtype, dims.clone(), &layer.keys).map_err(failed)?),
        ("v", TensorView::new(dtype, dims, &layer.values).map_err(failed)?),
        ("token_ids", TensorView::new(TensorDtype::I32, vec![tokens.len()], &ids).map_err(failed)?),
    ];
    serialize(views, None).map_err(failed)
}

fn tensor_dtype(dtype: Dtype) -> Result<TensorDtype, Refusal> {
    match dtype {
        Dtype::F32 => Ok(TensorDtype::F32),
        Dtype::F16 => Ok(TensorDtype::F16),
        Dtype::BF16 => Ok(TensorDtype::BF16),
        other => Err(Refusal::failed(format!("KV of dtype {other} cannot be moved"))),
    }
}
