//! Daemons that take over from each other under load.
//!
//! Clients write and read chunks all the time and compare every byte. There is room for all that they write, so a call that
//! fails, or that does not find what was written before, is a fault of a take-over.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use kvik_node::{DaemonConfig, NodeClient, NodeError, NodeSession, RunningDaemon, StoreConfig, StoreDaemon};
use kvik_runtime::shutdown::Shutdown;
use kvik_store::{Clear, Commit};
use kvik_tier::TierKind;

use super::processes::{
    CHUNK_BYTES, CHUNK_TOKENS, DaemonProcess, N_CLIENTS, N_LAYERS, Random, attach_options, content,
    start_process, tokens, wait_for_turns, within,
};

pub(crate) const DAEMON: &str = "as-successor";
pub(crate) const CLIENT: &str = "as-steady-client";

pub(crate) const START: &str = "start";
pub(crate) const TAKE_OVER: &str = "take-over";

/// More than all chains of all clients take.
pub(crate) const RAM_BYTES: u64 = 64 << 20;
const N_CHAINS: u64 = 24;
const MAX_CHUNKS: u64 = 8;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn socket(folder: &Path) -> PathBuf {
    folder.join("private/node.sock")
}

// === a daemon ===

/// Serves until it was taken over or its input ends, and answers questions about itself.
pub(crate) fn serve(folder: &Path, how: &str) {
    let tiers = StoreConfig {
        ram: RAM_BYTES.to_string(),
        nvme: Some(format!("{}:256MiB", folder.join("disk").display())),
        chunk_tokens: CHUNK_TOKENS,
        // What leaves first is certain.
        policy: "lru".to_owned(),
        ..StoreConfig::default()
    };
    let config = DaemonConfig { socket: socket(folder), tiers, ..DaemonConfig::default() };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let shutdown = Shutdown::new();
    runtime.block_on(async {
        let daemon = match how {
            START => StoreDaemon::start(config, &shutdown).await.unwrap(),
            _ => StoreDaemon::take_over(config, &shutdown).await.unwrap(),
        };
        println!("ready");
        let daemon = std::sync::Arc::new(daemon);
        let (asked, ending) = (std::sync::Arc::downgrade(&daemon), shutdown.clone());
        std::thread::spawn(move || {
            for line in std::io::stdin().lines() {
                let Some(daemon) = asked.upgrade() else { return };
                answer(&daemon, &line.unwrap());
            }
            ending.drain();
        });
        shutdown.draining().await;
    });
    // Taken over or told to end: either is a good end.
    runtime.block_on(shutdown.finish());
}

fn answer(daemon: &RunningDaemon, question: &str) {
    let server = daemon.server();
    if question == "clear" {
        server.tenants().iter().for_each(|tenant| drop(tenant.store.clear(&Clear::default())));
    }
    let used_bytes: u64 = server.tenants().iter().map(|tenant| tenant.store.arena().stat().used_bytes).sum();
    println!("{} {used_bytes}", server.stats().n_sessions);
}

// === a client ===

/// Writes and reads until its input ends; fails where a call returns nothing, a chunk is missing or a byte is wrong.
pub(crate) fn use_store(folder: &Path, client_number: u64) {
    let session = NodeSession::start(attach_options(&socket(folder))).unwrap();
    let is_over = std::thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let mut random = Random(client_number);
    let mut written = vec![0; N_CHAINS as usize];
    let mut longest = Duration::ZERO;
    let mut output = std::io::stdout();
    while !is_over.is_finished() {
        let number = random.below(N_CHAINS) as usize;
        let chain_number = client_number * N_CHAINS + number as u64;
        let n_chunks = 1 + random.below(MAX_CHUNKS) as usize;
        let begin = Instant::now();
        let n_known: usize = written[number];
        if random.below(3) == 0 {
            let stored = session.run(|client| write(client, chain_number, n_chunks));
            stored.expect("a write returned nothing");
            written[number] = n_known.max(n_chunks);
        } else {
            let found = session.run(|client| read(client, chain_number, n_chunks));
            let n_found = found.expect("a read returned nothing");
            assert_eq!(n_found, n_chunks.min(n_known), "chunks of chain {chain_number}");
        }
        longest = longest.max(begin.elapsed());
        // A byte for each turn: the test counts them.
        output.write_all(b".").unwrap();
        output.flush().unwrap();
    }
    println!("\n{}", longest.as_millis());
}

pub(crate) fn write(client: &NodeClient, chain_number: u64, n_chunks: usize) -> Result<(), NodeError> {
    let chain = client.space().chain(&tokens(chain_number, n_chunks));
    let opened = client.open(&chain)?;
    let mut write = opened.write(0, n_chunks)?;
    assert_eq!(write.n_chunks(), n_chunks, "there is room for all");
    for place in (0..n_chunks).filter(|place| !write.is_present(*place)).collect::<Vec<_>>() {
        write.write_chunk(place, &content(chain_number, place))?;
    }
    let outcomes = write.finish()?;
    assert!(outcomes.iter().flatten().all(|outcome| *outcome == Commit::Stored), "{outcomes:?}");
    Ok(())
}

fn read(client: &NodeClient, chain_number: u64, n_chunks: usize) -> Result<usize, NodeError> {
    let chain = client.space().chain(&tokens(chain_number, n_chunks));
    let opened = client.open(&chain)?;
    let lease = opened.retrieve(0)?;
    let mut bytes = vec![0; CHUNK_BYTES];
    for place in 0..lease.n_chunks() {
        assert_eq!(lease.tier(place), TierKind::Ram, "memory was kept");
        lease.copy_out(place, 0, &mut bytes)?;
        assert!(bytes == content(chain_number, place), "chunk {place} of chain {chain_number} is wrong");
    }
    let mut layers = opened.retrieve_layers(0)?;
    assert_eq!(layers.n_chunks(), lease.n_chunks());
    let mut section = vec![0; CHUNK_BYTES / N_LAYERS as usize];
    while let Some(layer_idx) = layers.next_layer()? {
        let place = layer_idx % layers.n_chunks();
        layers.copy_out(place, &mut section)?;
        let expected = &content(chain_number, place)[layer_idx * section.len()..][..section.len()];
        assert!(section == expected, "layer {layer_idx} of chunk {place} is wrong");
    }
    Ok(lease.n_chunks())
}

// === the test ===

pub(crate) fn start_daemon(folder: &Path, how: &str) -> DaemonProcess {
    DaemonProcess::start(&[DAEMON, folder.to_str().unwrap(), how])
}

/// Lets daemons take over from each other `n_take_overs` times while clients use the store.
pub(crate) fn take_over(n_take_overs: u64) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut random = Random(11);
    let mut daemon = start_daemon(folder, START);
    let mut clients: Vec<Child> = (0..N_CLIENTS)
        .map(|number| start_process(&[CLIENT, folder.to_str().unwrap(), &(number + 1).to_string()]))
        .collect();
    for _ in 0..n_take_overs {
        for client in &mut clients {
            wait_for_turns(client, 1 + random.below(8));
        }
        let next = start_daemon(folder, TAKE_OVER);
        let mut old = std::mem::replace(&mut daemon, next);
        assert!(old.process.wait().unwrap().success(), "the old daemon ends by itself");
    }
    let mut longest_ms = Vec::new();
    for client in &mut clients {
        wait_for_turns(client, 20);
        drop(client.stdin.take());
        let mut rest = String::new();
        client.stdout.as_mut().unwrap().read_to_string(&mut rest).unwrap();
        assert!(client.wait().unwrap().success(), "a client failed; what it said is above");
        longest_ms.push(rest.lines().last().unwrap().parse::<u64>().unwrap());
    }
    within(TIMEOUT, "all sessions ended", || daemon.ask("").0 == 0);
    assert!(daemon.ask("").1 > 0);
    let (_, used_bytes) = daemon.ask("clear");
    assert_eq!(used_bytes, 0, "slots or leases are left after {n_take_overs} take-overs");
    drop(daemon.input);
    assert!(daemon.process.wait().unwrap().success());
    println!("{n_take_overs} take-overs, longest calls of the clients {longest_ms:?} ms");
}
