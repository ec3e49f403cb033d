//! `kvctl index check`: holds the index of a gateway against what workers say they hold.
//!
//! Both change while they are read. A block counts as different only if it is so in every one of some rounds
//! with a pause between them, in which events that were on their way arrive.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use anyhow::{Context as _, bail};
use http::{HeaderName, HeaderValue};
use kvik_proto::client::{BlocksQuery, CoordinatorClient, HttpClient, IndexClient, WorkerClient};
use kvik_proto::coordinator::WorkerInfo;
use kvik_proto::kv_stream::{BlockGroup, Frame, KvTier};
use serde::Serialize;

use super::super::Answer;
use super::arguments::CheckArguments;

/// Rounds in which a block must differ.
const N_ROUNDS: usize = 3;
/// Time between two rounds: longer than an event takes.
const PAUSE: Duration = Duration::from_millis(500);
/// Blocks that are asked for at a time.
const PAGE_BLOCKS: usize = 10_000;
/// Different blocks that are shown.
const MAX_SHOWN: usize = 10;

const GOOD: Style = AnsiColor::Green.on_default();
const BAD: Style = AnsiColor::Red.on_default();

/// Blocks and the tiers that have them, bit by bit.
type Blocks = BTreeMap<String, u8>;

/// What came out.
#[derive(Debug, Serialize)]
pub(super) struct CheckAnswer {
    pub(super) is_equal: bool,
    workers: Vec<WorkerCheck>,
}

/// What came out for one worker and one way of naming its blocks.
#[derive(Debug, Serialize)]
struct WorkerCheck {
    worker: String,
    model: String,
    keys: String,
    n_blocks: usize,
    /// Blocks that the index has and the worker has not, or in other tiers.
    wrong: Vec<String>,
    /// Blocks that the worker has and the index has not.
    missing: Vec<String>,
}

/// Compares all workers that are asked for.
pub(super) async fn check(
    http: &HttpClient,
    token: Option<(HeaderName, HeaderValue)>,
    index: &IndexClient,
    arguments: &CheckArguments,
) -> anyhow::Result<CheckAnswer> {
    let coordinator = CoordinatorClient::new(http.clone(), &arguments.coordinator).with_header(token.clone());
    let snapshot = coordinator.workers().await?;
    let members = snapshot.members.into_iter().map(|member| member.worker);
    let is_wanted = |info: &WorkerInfo| arguments.worker.as_ref().is_none_or(|wanted| *wanted == info.id);
    let wanted: Vec<WorkerInfo> = members.filter(is_wanted).collect();
    if let Some(worker) = &arguments.worker
        && wanted.is_empty()
    {
        bail!("`--worker` is {worker}; the coordinator knows no such worker");
    }
    let mut workers = Vec::new();
    for info in &wanted {
        let client = WorkerClient::new(http.clone(), &info.address).with_header(token.clone());
        for group in groups(&client).await.with_context(|| format!("ask {}", info.id))? {
            workers.push(check_group(index, &client, info, group).await?);
        }
    }
    let is_equal = workers.iter().all(|worker| worker.wrong.is_empty() && worker.missing.is_empty());
    Ok(CheckAnswer { is_equal, workers })
}

/// The ways in which a worker names its blocks.
async fn groups(client: &WorkerClient) -> anyhow::Result<Vec<BlockGroup>> {
    let mut stream = client.kv_events(None).await?;
    match stream.next().await? {
        Some(Frame::Hello(hello)) => Ok(hello.groups),
        _ => bail!("the worker's stream does not begin with a hello"),
    }
}

async fn check_group(
    index: &IndexClient,
    client: &WorkerClient,
    info: &WorkerInfo,
    group: BlockGroup,
) -> anyhow::Result<WorkerCheck> {
    let keys = format!("kvik:{}:{}", group.root, group.block_tokens);
    let query = BlocksQuery { model: &info.model, worker: &info.id, rank: 0, keys: &keys, after: None };
    let mut different: Option<(BTreeSet<String>, BTreeSet<String>)> = None;
    let mut n_blocks = 0;
    for round in 0..N_ROUNDS {
        if round > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        let (known, held) = (known_blocks(index, query).await?, held_blocks(client, group.number).await?);
        n_blocks = held.len();
        let wrong = known.iter().filter(|(key, tiers)| held.get(*key).is_none_or(|held| *tiers & !held != 0));
        let missing =
            held.iter().filter(|(key, tiers)| known.get(*key).is_none_or(|known| *tiers & !known != 0));
        let wrong: BTreeSet<String> = wrong.map(|(key, _)| key.clone()).collect();
        let missing: BTreeSet<String> = missing.map(|(key, _)| key.clone()).collect();
        let (wrong, missing) = match different {
            None => (wrong, missing),
            Some((before_wrong, before_missing)) => (&before_wrong & &wrong, &before_missing & &missing),
        };
        if wrong.is_empty() && missing.is_empty() {
            different = None;
            break;
        }
        different = Some((wrong, missing));
    }
    let (wrong, missing) = different.unwrap_or_default();
    let [wrong, missing] = [wrong, missing].map(|keys| keys.into_iter().collect());
    Ok(WorkerCheck { worker: info.id.clone(), model: info.model.clone(), keys, n_blocks, wrong, missing })
}

async fn known_blocks(index: &IndexClient, query: BlocksQuery<'_>) -> anyhow::Result<Blocks> {
    let mut blocks = Blocks::new();
    let mut after = None;
    loop {
        let page = index.blocks(&BlocksQuery { after: after.as_deref(), ..query }).await?;
        for block in page.blocks {
            let bits = block.tiers.iter().filter_map(|name| tier_bit(name)).fold(0, |bits, bit| bits | bit);
            blocks.insert(block.key, bits);
        }
        after = page.next;
        if after.is_none() {
            return Ok(blocks);
        }
    }
}

async fn held_blocks(client: &WorkerClient, group: u32) -> anyhow::Result<Blocks> {
    let mut blocks = Blocks::new();
    let mut after = None;
    loop {
        let page = client.kv_blocks(group, after, PAGE_BLOCKS).await?;
        after = page.blocks.last().map(|block| block.key);
        for block in page.blocks {
            let bits = block.tiers.iter().fold(0, |bits, tier| bits | 1 << tier.as_index());
            blocks.insert(format!("{:016x}", block.key.0), bits);
        }
        if !page.has_more {
            return Ok(blocks);
        }
    }
}

fn tier_bit(name: &str) -> Option<u8> {
    let names = ["gpu", "cpu", "disk", "remote"];
    let tier = KvTier::ALL.into_iter().find(|tier| names[tier.as_index()] == name)?;
    Some(1 << tier.as_index())
}

impl Answer for CheckAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        if self.workers.is_empty() {
            return writeln!(output, "no worker to compare with");
        }
        for WorkerCheck { worker, model, keys, n_blocks, wrong, missing } in &self.workers {
            let (style, word) =
                if wrong.is_empty() && missing.is_empty() { (GOOD, "equal") } else { (BAD, "different") };
            writeln!(output, "{worker} {model} {keys}: {style}{word}{style:#}, {n_blocks} blocks")?;
            for (what, keys) in [("only in the index", wrong), ("not in the index", missing)] {
                for key in keys.iter().take(MAX_SHOWN) {
                    writeln!(output, "  {key} {what}")?;
                }
                if let Some(n_more) = keys.len().checked_sub(MAX_SHOWN).filter(|n_more| *n_more > 0) {
                    writeln!(output, "  and {n_more} more {what}")?;
                }
            }
        }
        Ok(())
    }
}
