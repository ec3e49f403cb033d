//! `kvctl route`: how a gateway routes.

mod answers;
mod arguments;

use std::fs;

use anyhow::Context as _;
use kvik_proto::client::{RouteClient, TlsClientConfig, http_client};
use kvik_runtime::trust::client_header;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use super::print;
use answers::Shown;
pub(crate) use arguments::RouteArguments;
use arguments::{ExplainArguments, RouteVerb};

/// Does one verb and prints its answer.
pub(crate) fn run(arguments: &RouteArguments, is_json: bool) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the client")?;
    runtime.block_on(run_verb(arguments, is_json))
}

async fn run_verb(arguments: &RouteArguments, is_json: bool) -> anyhow::Result<()> {
    let authorities_pem = match &arguments.authorities {
        Some(path) => fs::read(path).with_context(|| format!("read {}", path.display()))?,
        None => Vec::new(),
    };
    let http = http_client(&TlsClientConfig { authorities_pem, identity_pem: None })?;
    let token = client_header(arguments.token_file.as_deref())?;
    let client = RouteClient::new(http, &arguments.gateway).with_header(token);
    let RouteVerb::Explain(explain) = &arguments.verb;
    print(&Shown(client.explain(&request(explain)?).await?), is_json)
}

/// The request that is explained.
fn request(arguments: &ExplainArguments) -> anyhow::Result<Box<RawValue>> {
    if let Some(path) = &arguments.body {
        let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        return serde_json::from_str(&text)
            .with_context(|| format!("read {}: it is no JSON", path.display()));
    }
    let input = arguments.prompt.read()?;
    let mut body =
        json!({"prompt": input.prompt.map_or_else(|| json!(input.token_ids), |prompt| json!(prompt))});
    for (name, value) in [
        ("model", json!(arguments.model)),
        ("cache_salt", json!(arguments.cache_salt)),
        ("max_tokens", json!(arguments.max_tokens)),
    ] {
        if !value.is_null() {
            body[name] = value;
        }
    }
    Ok(to_raw_value(&body)?)
}
