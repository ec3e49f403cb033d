//! `kvctl cache`: the KV store of a worker, over its admin API.

mod answers;
mod arguments;

use std::fs;
use std::io::{IsTerminal as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use kvik_proto::cache::{ClearRequest, MoveRequest, PrefetchState, PrefetchStatus};
use kvik_proto::client::{CacheClient, TlsClientConfig, http_client};
use kvik_proto::worker::PromptInput;
use kvik_runtime::trust::client_header;
use tokio::time::{Duration, sleep};

use super::print;
use answers::{FileAnswer, Shown};
pub(crate) use arguments::CacheArguments;
use arguments::CacheVerb;

/// Time between two looks at a prefetch that is waited for.
const PREFETCH_INTERVAL: Duration = Duration::from_millis(50);

/// Does one verb and prints its answer.
pub(crate) fn run(arguments: &CacheArguments, is_json: bool) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the client")?;
    runtime.block_on(run_verb(arguments, is_json))
}

async fn run_verb(arguments: &CacheArguments, is_json: bool) -> anyhow::Result<()> {
    let client = client(arguments)?;
    match &arguments.verb {
        CacheVerb::Lookup(prompt) => print(&Shown(client.lookup(&prompt.read()?).await?), is_json),
        CacheVerb::Prefetch(prefetch) => {
            let status = client.prefetch(&prefetch.prompt.read()?).await?;
            let status = if prefetch.wait { wait(&client, status).await? } else { status };
            print(&Shown(status), is_json)
        }
        CacheVerb::PrefetchStatus(prefetch) => {
            print(&Shown(client.prefetch_status(&prefetch.id).await?), is_json)
        }
        CacheVerb::Cancel(prefetch) => print(&Shown(client.cancel_prefetch(&prefetch.id).await?), is_json),
        CacheVerb::Pin(prompt) => print(&Shown(client.pin(&prompt.read()?).await?), is_json),
        CacheVerb::Unpin(prompt) => print(&Shown(client.unpin(&prompt.read()?).await?), is_json),
        CacheVerb::Move(relocation) => {
            let request = MoveRequest {
                input: relocation.prompt.read()?,
                from: relocation.from.clone(),
                to: relocation.to.clone(),
                copy: relocation.copy,
            };
            print(&Shown(client.relocate(&request).await?), is_json)
        }
        CacheVerb::Clear(clear) => {
            let input = if clear.all { PromptInput::default() } else { clear.prompt.read()? };
            let tiers = (!clear.tier.is_empty()).then(|| clear.tier.clone());
            print(&Shown(client.clear(&ClearRequest { input, tiers }).await?), is_json)
        }
        CacheVerb::Retrieve(retrieve) => {
            let bytes = client.retrieve(&retrieve.prompt.read()?, retrieve.layer).await?;
            let path = &retrieve.output;
            write_file(path, &bytes).with_context(|| format!("write {}", path.display()))?;
            print(&FileAnswer { file: path.display().to_string(), bytes: bytes.len() }, is_json)
        }
        CacheVerb::Store(store) => {
            let bytes = fs::read(&store.file).with_context(|| format!("read {}", store.file.display()))?;
            print(&Shown(client.store(bytes.into()).await?), is_json)
        }
        CacheVerb::Health => print(&Shown(client.health().await?), is_json),
        CacheVerb::Stats => print(&Shown(client.stats().await?), is_json),
    }
}

fn client(arguments: &CacheArguments) -> anyhow::Result<CacheClient> {
    let authorities_pem = match &arguments.authorities {
        Some(path) => fs::read(path).with_context(|| format!("read {}", path.display()))?,
        None => Vec::new(),
    };
    let http = http_client(&TlsClientConfig { authorities_pem, identity_pem: None })?;
    let token = client_header(arguments.token_file.as_deref())?;
    Ok(CacheClient::new(http, &arguments.worker).with_header(token))
}

/// Follows a prefetch until it has ended.
async fn wait(client: &CacheClient, mut status: PrefetchStatus) -> anyhow::Result<PrefetchStatus> {
    while status.state == PrefetchState::Loading {
        sleep(PREFETCH_INTERVAL).await;
        status = client.prefetch_status(&status.id).await?;
    }
    Ok(status)
}

/// Writes a file as a whole or not at all; `-` is standard output, if that is no terminal.
fn write_file(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if path == Path::new("-") {
        let mut stdout = std::io::stdout().lock();
        if stdout.is_terminal() {
            bail!("standard output is a terminal");
        }
        stdout.write_all(bytes)?;
        return Ok(stdout.flush()?);
    }
    let partial = path.with_added_extension("partial");
    fs::write(&partial, bytes)?;
    Ok(fs::rename(&partial, path)?)
}
