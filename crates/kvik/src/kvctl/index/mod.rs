//! `kvctl index`: the global KV index of a gateway.

mod answers;
mod arguments;
mod check;

use std::fs;
use std::io::{self, Write as _};

use anyhow::{Context as _, bail};
use kvik_proto::client::{BlocksQuery, HttpClient, IndexClient, TlsClientConfig, http_client};
use kvik_proto::index::{BookStats, IndexStats, ScoreRequest, SourceStats};
use kvik_runtime::trust::client_header;
use serde::Serialize;

use super::print;
use answers::Shown;
pub(crate) use arguments::IndexArguments;
use arguments::{DumpArguments, IndexVerb, LookupArguments};

/// A block of the index, as `dump` prints it.
#[derive(Debug, Serialize)]
struct DumpedBlock<'a> {
    model: &'a str,
    worker: &'a str,
    rank: u32,
    keys: &'a str,
    key: &'a str,
    tiers: &'a [String],
}

/// A source of a book.
struct Place<'a> {
    model: &'a str,
    book: &'a BookStats,
    source: &'a SourceStats,
}

/// Does one verb and prints its answer.
pub(crate) fn run(arguments: &IndexArguments, is_json: bool) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the client")?;
    runtime.block_on(run_verb(arguments, is_json))
}

async fn run_verb(arguments: &IndexArguments, is_json: bool) -> anyhow::Result<()> {
    let http = http(arguments)?;
    let token = client_header(arguments.token_file.as_deref())?;
    let client = IndexClient::new(http.clone(), &arguments.gateway).with_header(token.clone());
    match &arguments.verb {
        IndexVerb::Stats => print(&Shown(client.stats().await?), is_json),
        IndexVerb::Lookup(lookup) => print(&Shown(client.score(&request(lookup)?).await?), is_json),
        IndexVerb::Dump(dump) => print_blocks(&client, dump).await,
        IndexVerb::Check(arguments) => {
            let answer = check::check(&http, token, &client, arguments).await?;
            print(&answer, is_json)?;
            if answer.is_equal { Ok(()) } else { bail!("the index and the workers differ") }
        }
    }
}

fn http(arguments: &IndexArguments) -> anyhow::Result<HttpClient> {
    let authorities_pem = match &arguments.authorities {
        Some(path) => fs::read(path).with_context(|| format!("read {}", path.display()))?,
        None => Vec::new(),
    };
    Ok(http_client(&TlsClientConfig { authorities_pem, identity_pem: None })?)
}

fn request(arguments: &LookupArguments) -> anyhow::Result<ScoreRequest> {
    let input = arguments.prompt.read()?;
    Ok(ScoreRequest {
        model: arguments.model.clone(),
        prompt: input.prompt,
        messages: None,
        token_ids: input.token_ids,
        cache_salt: arguments.cache_salt.clone(),
        pods: arguments.worker.clone(),
        scorer: Some(arguments.scorer.clone()),
    })
}

async fn print_blocks(client: &IndexClient, arguments: &DumpArguments) -> anyhow::Result<()> {
    let stats = client.stats().await?;
    let is_wanted = |place: &Place<'_>| {
        arguments.model.as_ref().is_none_or(|model| model == place.model)
            && arguments.worker.as_ref().is_none_or(|worker| *worker == place.source.worker)
    };
    for place in places(&stats).into_iter().filter(is_wanted) {
        let Place { model, book, source } = place;
        let mut after = None;
        loop {
            let query = place.query(after.as_deref());
            let page = client.blocks(&query).await?;
            let mut stdout = io::stdout().lock();
            for block in &page.blocks {
                let dumped = DumpedBlock {
                    model,
                    worker: &source.worker,
                    rank: source.rank,
                    keys: &book.keys,
                    key: &block.key,
                    tiers: &block.tiers,
                };
                serde_json::to_writer(&mut stdout, &dumped).map_err(io::Error::from)?;
                stdout.write_all(b"\n")?;
            }
            stdout.flush()?;
            drop(stdout);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
    }
    Ok(())
}

fn places(stats: &IndexStats) -> Vec<Place<'_>> {
    let mut places = Vec::new();
    for model in &stats.models {
        for book in &model.books {
            places.extend(book.sources.iter().map(|source| Place { model: &model.model, book, source }));
        }
    }
    places
}

impl<'a> Place<'a> {
    fn query<'q>(&self, after: Option<&'q str>) -> BlocksQuery<'q>
    where
        'a: 'q,
    {
        BlocksQuery {
            model: self.model,
            worker: &self.source.worker,
            rank: self.source.rank,
            keys: &self.book.keys,
            after,
        }
    }
}
