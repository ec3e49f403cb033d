//! KV of a prompt as a safetensors file, to be looked at or carried to another worker.
//!
//! `token_ids` are the prompt's, as far as its chunks reach. `chunk.N.layer.N` is the layer of a chunk as the
//! engine keeps it, in bytes. The metadata says what they are good for: `namespace`, which covers model, type,
//! layout, tenant and the length of chunks; `cache_salt` of a prompt that has one is there too, and what is
//! stored is found with it alone. `token_digest` proves namespace, salt and tokens, under the key of the store if
//! it has one.

use std::collections::HashMap;

use kvik_proto::cache::StoreResponse;
use kvik_store::{Chain, TierName};
use kvik_types::{CacheSalt, TokenId};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use super::StoreOperations;
use crate::error::Refusal;
use crate::prompt::Prompt;

const NAMESPACE: &str = "namespace";
const CHUNK_TOKENS: &str = "chunk_tokens";
const TOKEN_DIGEST: &str = "token_digest";
const TOKEN_IDS: &str = "token_ids";
const CACHE_SALT: &str = "cache_salt";

/// What the store, or one tier of it, has of a prompt.
pub(super) fn write(
    store: &dyn StoreOperations,
    prompt: &Prompt,
    layer: Option<usize>,
    tier: Option<&TierName>,
) -> Result<Vec<u8>, Refusal> {
    let Prompt { tokens, salt, .. } = prompt;
    let chain = store.space()?.salted_chain(tokens, salt.as_ref());
    let n_layers = chain.space().format().n_layers as usize;
    let layers = match layer {
        None => 0..n_layers,
        Some(layer) if layer < n_layers => layer..layer + 1,
        Some(layer) => return Err(Refusal::field("layer", layer, &format!("0 to {}", n_layers - 1))),
    };
    let chunks = store.read(&chain, tier)?;
    let n_tokens = chain.tokens_of(chunks.n_chunks()).start;
    let failed = |error: safetensors::SafeTensorError| Refusal::failed(error.to_string());
    let ids: Vec<u8> =
        tokens[..n_tokens].iter().flat_map(|token| token.cast_signed().to_le_bytes()).collect();
    let ids = TensorView::new(Dtype::I32, vec![n_tokens], &ids).map_err(failed)?;
    let mut views = vec![(TOKEN_IDS.to_owned(), ids)];
    for chunk_idx in 0..chunks.n_chunks() {
        let section_bytes = chain.section_bytes(chunk_idx);
        for layer_idx in layers.clone() {
            let section = &chunks.payload(chunk_idx)[layer_idx * section_bytes..][..section_bytes];
            let view = TensorView::new(Dtype::U8, vec![section.len()], section).map_err(failed)?;
            views.push((tensor_name(chunk_idx, layer_idx), view));
        }
    }
    let mut metadata = HashMap::from(metadata(&chain, chunks.n_chunks()));
    metadata.extend(salt.as_ref().map(|salt| (CACHE_SALT.to_owned(), salt.as_str().to_owned())));
    serialize(views, Some(metadata)).map_err(failed)
}

/// Stores what [`write`] gave, in one tier alone where one is named.
pub(super) fn read(
    store: &dyn StoreOperations,
    body: &[u8],
    tier: Option<&TierName>,
) -> Result<StoreResponse, Refusal> {
    let invalid = |error: safetensors::SafeTensorError| {
        Refusal::invalid(format!("the body is not safetensors: {error}"), None)
    };
    let (_, header) = SafeTensors::read_metadata(body).map_err(invalid)?;
    let tensors = SafeTensors::deserialize(body).map_err(invalid)?;
    let tokens = token_ids(&tensors)?;
    let given = header.metadata().as_ref();
    let salt = given.and_then(|given| given.get(CACHE_SALT)).map(|salt| CacheSalt::try_new(salt)).transpose();
    let salt = salt.map_err(|error| Refusal::invalid(error.to_string(), Some(CACHE_SALT)))?;
    let chain = store.space()?.salted_chain(&tokens, salt.as_ref());
    for (field, expected) in metadata(&chain, chain.n_chunks()) {
        let value = given.and_then(|given| given.get(&field)).map_or("missing", String::as_str);
        if value != expected {
            return Err(Refusal::field(&field, value, &format!("{expected}, which this worker has")));
        }
    }
    let n_layers = chain.space().format().n_layers as usize;
    // All is checked before anything is stored.
    let layers_of = |chunk_idx| -> Result<Vec<&[u8]>, Refusal> {
        (0..n_layers).map(|layer_idx| section(&tensors, &chain, chunk_idx, layer_idx)).collect()
    };
    let sections = (0..chain.n_chunks()).map(layers_of).collect::<Result<Vec<_>, _>>()?;
    store.write(&chain, &sections, tier)
}

/// What the first `n_chunks` chunks are good for. The namespace comes first: a digest of another one differs too.
fn metadata(chain: &Chain, n_chunks: usize) -> [(String, String); 3] {
    let space = chain.space();
    [
        (NAMESPACE.to_owned(), space.namespace_id().to_string()),
        (CHUNK_TOKENS.to_owned(), space.chunk_tokens().to_string()),
        (TOKEN_DIGEST.to_owned(), chain.digest_up_to(n_chunks).to_string()),
    ]
}

fn tensor_name(chunk_idx: usize, layer_idx: usize) -> String {
    format!("chunk.{chunk_idx}.layer.{layer_idx}")
}

fn token_ids(tensors: &SafeTensors<'_>) -> Result<Vec<TokenId>, Refusal> {
    let Ok(view) = tensors.tensor(TOKEN_IDS) else {
        return Err(Refusal::field(TOKEN_IDS, "missing", "the tokens of the chunks"));
    };
    if view.dtype() != Dtype::I32 || view.shape().len() != 1 {
        let given = format!("{:?} of shape {:?}", view.dtype(), view.shape());
        return Err(Refusal::field(TOKEN_IDS, given, "I32 in one dimension"));
    }
    let token = |bytes: &[u8; 4]| {
        let token = i32::from_le_bytes(*bytes);
        TokenId::try_from(token).map_err(|_| Refusal::field(TOKEN_IDS, token, "0 and above"))
    };
    view.data().as_chunks().0.iter().map(token).collect()
}

/// The bytes of one layer of one chunk, of the right length.
fn section<'a>(
    tensors: &SafeTensors<'a>,
    chain: &Chain,
    chunk_idx: usize,
    layer_idx: usize,
) -> Result<&'a [u8], Refusal> {
    let name = tensor_name(chunk_idx, layer_idx);
    let expected = chain.section_bytes(chunk_idx);
    match tensors.tensor(&name) {
        Ok(view) if view.data().len() == expected => Ok(view.data()),
        Ok(view) => {
            let given = format!("{} bytes long", view.data().len());
            Err(Refusal::field(&name, given, &format!("{expected} bytes")))
        }
        Err(_) => Err(Refusal::field(&name, "missing", "all layers of all chunks of `token_ids`")),
    }
}
