//! Chunks out of and into the arena of a daemon, copied by this process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvik_node::{NodeClient, NodeError, OpenChain, RemoteLayers, RemoteLease};
use kvik_store::Chain;

use super::daemon_planner::DaemonPlanner;
use super::job::Job;
use super::layered::{LayerBytes, layered};
use super::load::{LoadedPrefix, PromptKv};

/// Chunks that are written with one request: the daemon publishes some while the next are copied, and a sequence that is
/// given up ends soon.
const CHUNKS_A_WRITE: usize = 16;

/// Leased chunks, and what they have.
type CopiedChunks = (RemoteLease, Vec<Vec<u8>>);

/// Copies all chunks of a lease; `None` if the job is not wanted any more.
pub(super) fn copy_out<T>(job: &Job<T>, lease: &RemoteLease) -> Result<Option<Vec<Vec<u8>>>, NodeError> {
    let mut payloads = Vec::with_capacity(lease.n_chunks());
    for place in 0..lease.n_chunks() {
        if !job.is_wanted() {
            return Ok(None);
        }
        let mut payload = vec![0; lease.payload_bytes(place)];
        lease.copy_out(place, 0, &mut payload)?;
        payloads.push(payload);
    }
    Ok(Some(payloads))
}

/// Copies the chunks of a prompt that the daemon has, from `first_chunk` on; `None` where that would take longer than computing
/// them.
pub(super) fn read_chunks(
    client: &NodeClient,
    job: &Job<PromptKv>,
    chain: &Chain,
    first_chunk: usize,
    planner: &DaemonPlanner,
) -> Result<Option<PromptKv>, NodeError> {
    let opened = client.open(chain)?;
    let (n_found, tier) = (opened.n_found(), opened.slowest_tier());
    if n_found <= first_chunk {
        return Ok(None);
    }
    if !planner.should_load(chain, first_chunk, n_found, tier) {
        job.complete(None);
        if planner.claim_measurement(tier) {
            // One chunk, which stays in the daemon's memory.
            read_measured(&Job::<()>::default(), &opened, n_found - 1, planner)?;
        }
        return Ok(None);
    }
    let Some((lease, payloads)) = read_measured(job, &opened, first_chunk, planner)? else { return Ok(None) };
    let chunk_of = |place| (lease.token_range(place), lease.tier(place));
    let chunks = (0..lease.n_chunks()).map(chunk_of).collect();
    Ok(LoadedPrefix::from_copies(chunks, payloads, chain).map(PromptKv::Loaded))
}

/// Copies the chunks that were found, from `first_chunk` on, and measures how fast they came; `None` if the job is not wanted any
/// more.
fn read_measured<T>(
    job: &Job<T>,
    opened: &OpenChain,
    first_chunk: usize,
    planner: &DaemonPlanner,
) -> Result<Option<CopiedChunks>, NodeError> {
    let read = || {
        let lease = opened.retrieve(first_chunk)?;
        Ok(copy_out(job, &lease)?.map(|payloads| (lease, payloads)))
    };
    let n_bytes = |read: &Result<Option<CopiedChunks>, NodeError>| match read {
        Ok(Some((_, payloads))) => payloads.iter().map(|payload| payload.len() as u64).sum(),
        _ => 0,
    };
    planner.speed_of(opened.slowest_tier()).measure(read, n_bytes)
}

/// Copies the chunks of a prompt layer by layer as they arrive, from `first_chunk` on: the job is done with the first layer, and
/// the others follow until `deadline`.
pub(super) fn read_layers(
    client: &NodeClient,
    job: &Job<PromptKv>,
    chain: &Chain,
    first_chunk: usize,
    deadline: Instant,
) -> Result<(), NodeError> {
    let opened = client.open(chain)?;
    let tier = opened.slowest_tier();
    let mut layers = opened.retrieve_layers(first_chunk)?;
    let Some(first) = next_layer(&mut layers)? else { return Ok(()) };
    let chunk_of = |place| (chain.tokens_of(first_chunk + place), tier);
    let chunks = (0..layers.n_chunks()).map(chunk_of).collect();
    let n_layers = chain.space().format().n_layers as usize;
    let (prefix, sender) = layered(chunks, n_layers, deadline);
    sender.send(first, layers.n_chunks());
    job.complete(Some(PromptKv::Layered(prefix)));
    while sender.is_wanted()
        && let Some(layer) = next_layer(&mut layers)?
    {
        sender.send(layer, layers.n_chunks());
    }
    Ok(())
}

/// Copies the next layer of the chunks that still hold; `None` where none does, and after the last.
fn next_layer(layers: &mut RemoteLayers) -> Result<Option<LayerBytes>, NodeError> {
    if layers.next_layer()?.is_none() || layers.n_chunks() == 0 {
        return Ok(None);
    }
    let mut sections = Vec::with_capacity(layers.n_chunks());
    for place in 0..layers.n_chunks() {
        let mut section = vec![0; layers.section_bytes(place)];
        layers.copy_out(place, &mut section)?;
        sections.push(section);
    }
    Ok(Some(LayerBytes::Copied(sections)))
}

/// Writes the chunks of a chain that the daemon does not have, as far as there is room and until they are given up. `fill` gets
/// the number of a chunk in the chain and the memory for all its layers; false ends it, with what was filled before.
pub(super) fn write_missing(
    opened: &OpenChain,
    is_given_up: &AtomicBool,
    mut fill: impl FnMut(usize, &mut [u8]) -> bool,
) -> Result<(), NodeError> {
    let mut payload = Vec::new();
    let mut first_chunk = opened.n_found();
    while first_chunk < opened.chain().n_chunks() && !is_given_up.load(Ordering::Relaxed) {
        let mut write = opened.write(first_chunk, CHUNKS_A_WRITE)?;
        let n_chunks = write.n_chunks();
        for place in 0..n_chunks {
            if write.is_present(place) {
                continue;
            }
            payload.resize(write.payload_bytes(place), 0);
            if !fill(first_chunk + place, &mut payload) {
                return write.finish().map(drop);
            }
            write.write_chunk(place, &payload)?;
        }
        write.finish()?;
        if n_chunks < CHUNKS_A_WRITE {
            break;
        }
        first_chunk += n_chunks;
    }
    Ok(())
}
