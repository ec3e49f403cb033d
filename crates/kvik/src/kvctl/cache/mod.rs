//! `kvctl cache`: the KV store of a worker, or of all workers, over their admin API.

mod add;
mod answers;
mod arguments;
mod explained;
mod nodes;

use std::fs;
use std::io::{IsTerminal as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use http::{HeaderName, HeaderValue};
use kvik_proto::cache::{
    ClearRequest, CompressRequest, CompressStatus, MoveRequest, PrefetchState, PrefetchStatus,
};
use kvik_proto::client::{CacheClient, CoordinatorClient, HttpClient, TlsClientConfig, http_client};
use kvik_proto::worker::PromptInput;
use kvik_runtime::trust::client_header;
use tokio::time::{Duration, sleep};

use super::print;
use answers::{FileAnswer, Rendered, SameStore, Shown};
pub(crate) use arguments::CacheArguments;
use arguments::{CacheVerb, CompressArguments, MoveArguments};

/// Time between two looks at a prefetch that is waited for.
const PREFETCH_INTERVAL: Duration = Duration::from_millis(50);

/// Does one verb, on one worker or on all, and prints its answer.
pub(crate) fn run(arguments: &CacheArguments, is_json: bool) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the client")?;
    runtime.block_on(async {
        let connector = Connector::new(arguments)?;
        if arguments.fleet.all_nodes {
            return nodes::run(arguments, &connector, is_json).await;
        }
        let answer = run_verb(&arguments.verb, &connector, &arguments.worker).await?;
        print(&answer, is_json)
    })
}

/// Does a verb on the worker at an address.
async fn run_verb(verb: &CacheVerb, connector: &Connector, worker: &str) -> anyhow::Result<Rendered> {
    let client = connector.worker(worker);
    match verb {
        CacheVerb::Lookup(prompt) => Rendered::of(&Shown(client.lookup(&prompt.read()?).await?)),
        CacheVerb::Explain(prompt) => Rendered::of(&Shown(client.explain(&prompt.read()?).await?)),
        CacheVerb::Prefetch(prefetch) => {
            let status = client.prefetch(&prefetch.prompt.read()?, prefetch.tier.as_deref()).await?;
            let status = if prefetch.wait { wait(&client, status).await? } else { status };
            Rendered::of(&Shown(status))
        }
        CacheVerb::PrefetchStatus(prefetch) => {
            Rendered::of(&Shown(client.prefetch_status(&prefetch.id).await?))
        }
        CacheVerb::Cancel(prefetch) => Rendered::of(&Shown(client.cancel_prefetch(&prefetch.id).await?)),
        CacheVerb::Pin(prompt) => Rendered::of(&Shown(client.pin(&prompt.read()?).await?)),
        CacheVerb::Unpin(prompt) => Rendered::of(&Shown(client.unpin(&prompt.read()?).await?)),
        CacheVerb::Move(relocation) => relocate(relocation, connector, &client).await,
        CacheVerb::Clear(clear) => {
            let input = if clear.all { PromptInput::default() } else { clear.prompt.read()? };
            let tiers = (!clear.tier.is_empty()).then(|| clear.tier.clone());
            Rendered::of(&Shown(client.clear(&ClearRequest { input, tiers }).await?))
        }
        CacheVerb::Compress(arguments) => Rendered::of(&Shown(compress(arguments, &client).await?)),
        CacheVerb::Retrieve(retrieve) => {
            let bytes =
                client.retrieve(&retrieve.prompt.read()?, retrieve.layer, retrieve.tier.as_deref()).await?;
            let path = &retrieve.output;
            write_file(path, &bytes).with_context(|| format!("write {}", path.display()))?;
            Rendered::of(&FileAnswer { file: path.display().to_string(), bytes: bytes.len() })
        }
        CacheVerb::Store(store) => {
            let bytes = fs::read(&store.file).with_context(|| format!("read {}", store.file.display()))?;
            Rendered::of(&Shown(client.store(bytes.into(), store.tier.as_deref()).await?))
        }
        CacheVerb::Add(arguments) => add::run(arguments, &client).await,
        CacheVerb::Health => Rendered::of(&Shown(client.health().await?)),
        CacheVerb::Stats => Rendered::of(&Shown(client.stats().await?)),
    }
}

/// Puts the KV of a prompt into another tier, or onto another node.
async fn relocate(
    relocation: &MoveArguments,
    connector: &Connector,
    client: &CacheClient,
) -> anyhow::Result<Rendered> {
    let input = relocation.prompt.read()?;
    if let (Some(from), Some(to)) = (&relocation.from, &relocation.to) {
        let request = MoveRequest { input, from: from.clone(), to: to.clone(), copy: relocation.copy };
        return Rendered::of(&Shown(client.relocate(&request).await?));
    }
    let Some(target) = &relocation.to_worker else {
        bail!("nowhere to move it: give --from and --to, or --to-worker")
    };
    let target = connector.worker(target);
    // What is forgotten in one would be gone from both.
    if have_one_store(client, &target).await? {
        return Rendered::of(&SameStore { same_store: true });
    }
    let bytes = client.retrieve(&input, None, None).await.context("read the KV from the first worker")?;
    let stored = target.store(bytes, None).await.context("store the KV in the second worker")?;
    // What could not be stored there stays here.
    if !relocation.copy && stored.stored_chunks + stored.present_chunks > 0 {
        client
            .clear(&ClearRequest { input, tiers: None })
            .await
            .context("forget the KV in the first worker")?;
    }
    Rendered::of(&Shown(stored))
}

/// Begins, follows or ends the coding of cold chunks.
async fn compress(arguments: &CompressArguments, client: &CacheClient) -> anyhow::Result<CompressStatus> {
    if arguments.status {
        return Ok(client.compress_status().await?);
    }
    if arguments.cancel {
        return Ok(client.cancel_compress().await?);
    }
    let request = CompressRequest {
        tier: Some(arguments.tier.clone()),
        codec: arguments.codec.clone(),
        idle_s: Some(arguments.idle_s),
        bytes_per_s: Some(arguments.bytes_per_s),
    };
    let mut status = client.compress(&request).await?;
    while arguments.wait && status.state == "running" {
        sleep(PREFETCH_INTERVAL).await;
        status = client.compress_status().await?;
    }
    Ok(status)
}

/// Whether two workers are one, or share the store of a daemon.
async fn have_one_store(first: &CacheClient, second: &CacheClient) -> anyhow::Result<bool> {
    let first = first.stats().await.context("ask the first worker for its store")?.store_id;
    let second = second.stats().await.context("ask the second worker for its store")?.store_id;
    Ok(!first.is_empty() && first == second)
}

/// Makes clients of workers and coordinators.
struct Connector {
    http: HttpClient,
    token: Option<(HeaderName, HeaderValue)>,
}

impl Connector {
    fn new(arguments: &CacheArguments) -> anyhow::Result<Self> {
        let authorities_pem = match &arguments.authorities {
            Some(path) => fs::read(path).with_context(|| format!("read {}", path.display()))?,
            None => Vec::new(),
        };
        let http = http_client(&TlsClientConfig { authorities_pem, identity_pem: None })?;
        Ok(Self { http, token: client_header(arguments.token_file.as_deref())? })
    }

    fn worker(&self, address: &str) -> CacheClient {
        CacheClient::new(self.http.clone(), address).with_header(self.token.clone())
    }

    fn coordinator(&self, address: &str) -> CoordinatorClient {
        CoordinatorClient::new(self.http.clone(), address).with_header(self.token.clone())
    }
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
