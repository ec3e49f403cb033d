//! One prompt sent twice: how long until its first token, and where its KV came from.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use kvik_bench::demo;
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use kvik_runtime::terminal::TITLE;
use serde_json::{Value, json};

/// Numbers in the prompt: about 1 500 tokens of the bundled model, several chunks.
const N_NUMBERS: u32 = 500;

/// Sends the prompt twice through the gateway and prints what was measured.
pub(super) async fn show(gateway: &str, model: &str) -> anyhow::Result<()> {
    demo::wait_until_ready(gateway).await?;
    let http = http_client(&TlsClientConfig::default())?;
    let mut prompt = String::new();
    for number in 1..=N_NUMBERS {
        write!(prompt, "{number} ")?;
    }
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0});
    let mut text = String::new();
    for order in ["first", "second"] {
        let begin = Instant::now();
        let usage = ask(&http, gateway, &body).await?;
        let elapsed_ms = begin.elapsed().as_secs_f64() * 1e3;
        if text.is_empty() {
            let n_tokens = usage["prompt_tokens"].as_u64().unwrap_or(0);
            writeln!(
                text,
                "\n{TITLE}One prompt of {n_tokens} tokens, sent twice{TITLE:#}: time to first token\n"
            )?;
        }
        writeln!(text, "  {order:<8} {elapsed_ms:>7.1} ms   {}", sources(&usage))?;
    }
    let mut stdout = anstream::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("write to standard output")
}

async fn ask(http: &HttpClient, gateway: &str, body: &Value) -> anyhow::Result<Value> {
    let request = Request::post(format!("{gateway}/v1/completions"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))?;
    let response = http.request(request).await.context("ask the gateway")?;
    let status = response.status();
    let bytes = response.into_body().collect().await.context("read the answer")?.to_bytes();
    ensure!(status.is_success(), "the gateway answered {status}");
    let mut answer: Value = serde_json::from_slice(&bytes).context("read the answer")?;
    Ok(answer["usage"].take())
}

/// Where the tokens of a prompt came from, in words.
fn sources(usage: &Value) -> String {
    let mut n_computed = usage["prompt_tokens"].as_u64().unwrap_or(0);
    let mut parts = Vec::new();
    if let Some(tiers) = usage["prompt_tokens_details"]["cached_tokens_by_tier"].as_object() {
        for (tier, n_tokens) in tiers {
            let n_tokens = n_tokens.as_u64().unwrap_or(0);
            n_computed = n_computed.saturating_sub(n_tokens);
            parts.push(format!("{n_tokens} tokens from {tier}"));
        }
    }
    parts.push(format!("{n_computed} computed"));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_of_a_prompt_has_a_source() {
        let usage = json!({"prompt_tokens": 100, "prompt_tokens_details": {
            "cached_tokens_by_tier": {"engine": 32, "ram": 48}}});
        assert_eq!(sources(&usage), "32 tokens from engine, 48 tokens from ram, 20 computed");
        assert_eq!(sources(&json!({"prompt_tokens": 7})), "7 computed");
    }
}
