//! A daemon and its clients that are killed at random moments under load.
//!
//! Clients write and read chunks all the time and compare every byte. After each kill the daemon must have forgotten the
//! dead client within a second, and in the end nothing may be leased or allocated any more.

use std::io::Write as _;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use kvik_memory::SocketAddress;
use kvik_node::{NodeClient, NodeError, NodeOptions, NodeServer, NodeSession};
use kvik_store::{Clear, Store, StoreOptions};
use kvik_tier::{Arena, ArenaOptions, RamTier};
use kvik_types::BlockSize;

use super::processes::{
    CHUNK_BYTES, CHUNK_TOKENS, DaemonProcess, N_CLIENTS, N_LAYERS, Random, attach_options, content,
    start_process, tokens, wait_for_turns, within,
};

pub(crate) const DAEMON: &str = "as-daemon";
pub(crate) const CLIENT: &str = "as-client";

/// Room for some of the chains that clients use, so that chunks are evicted all the time.
const ARENA_BYTES: u64 = 2 << 20;
const N_CHAINS: u64 = 12;
const MAX_CHUNKS: u64 = 12;

/// Time for the daemon to take back what a dead client held.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(1);

// === the daemon ===

/// Serves until it is killed or its input ends, and answers questions about itself.
pub(crate) fn serve(socket: &Path) {
    let options =
        StoreOptions { chunk_tokens: BlockSize::try_new(CHUNK_TOKENS).unwrap(), ..StoreOptions::default() };
    let ram = RamTier::new(Arena::new(ArenaOptions::new(ARENA_BYTES)).unwrap());
    let store = Store::builder(options, ram).open().unwrap();
    let address = SocketAddress::Path(socket.to_owned());
    let server = NodeServer::start(NodeOptions::new(address, store.clone())).unwrap();
    println!("ready");
    for line in std::io::stdin().lines() {
        if line.unwrap() == "clear" {
            store.clear(&Clear::default());
        }
        println!("{} {}", server.stats().n_sessions, store.arena().stat().used_bytes);
    }
}

// === a client ===

/// Writes and reads until it is killed; ends by itself only if a byte is wrong.
pub(crate) fn use_store(socket: &Path, seed: u64) {
    let session = NodeSession::start(attach_options(socket)).unwrap();
    let mut random = Random(seed);
    let mut output = std::io::stdout();
    loop {
        match session.run(|client| use_once(client, &mut random)) {
            Some(()) => {
                // A byte for each turn: the test kills after a number of them.
                output.write_all(b".").unwrap();
                output.flush().unwrap();
            }
            None => drop(session.wait_for_space(Duration::from_secs(1))),
        }
    }
}

fn use_once(client: &NodeClient, random: &mut Random) -> Result<(), NodeError> {
    let (chain_number, n_chunks) = (random.below(N_CHAINS), 1 + random.below(MAX_CHUNKS) as usize);
    let chain = client.space().chain(&tokens(chain_number, n_chunks));
    let opened = client.open(&chain)?;
    if random.below(2) == 0 {
        let mut write = opened.write(0, n_chunks)?;
        for place in (0..write.n_chunks()).filter(|place| !write.is_present(*place)).collect::<Vec<_>>() {
            write.write_chunk(place, &content(chain_number, place))?;
        }
        // What was there meanwhile, or has lost its parent, is no failure.
        write.finish()?;
    }
    let lease = opened.retrieve(0)?;
    let mut bytes = vec![0; CHUNK_BYTES];
    for place in 0..lease.n_chunks() {
        lease.copy_out(place, 0, &mut bytes)?;
        assert!(
            bytes == content(chain_number, place),
            "chunk {place} of chain {chain_number} has wrong bytes"
        );
    }
    let mut layers = client.open(&chain)?.retrieve_layers(0)?;
    let mut section = vec![0; CHUNK_BYTES / N_LAYERS as usize];
    while let Some(layer_idx) = layers.next_layer()? {
        let place = random.below(layers.n_chunks() as u64) as usize;
        layers.copy_out(place, &mut section)?;
        let expected = &content(chain_number, place)[layer_idx * section.len()..][..section.len()];
        assert!(section == expected, "layer {layer_idx} of chunk {place} has wrong bytes");
    }
    Ok(())
}

// === the test ===

fn start_daemon(socket: &Path) -> DaemonProcess {
    DaemonProcess::start(&[DAEMON, socket.to_str().unwrap()])
}

fn start_client(socket: &Path, seed: u64) -> Child {
    start_process(&[CLIENT, socket.to_str().unwrap(), &seed.to_string()])
}

/// Kills clients and, now and then, the daemon, `n_kills` in all.
pub(crate) fn kill_processes(n_kills: u64) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("private/node.sock");
    let mut random = Random(7);
    let mut daemon = start_daemon(&socket);
    let mut clients: Vec<Child> = (0..N_CLIENTS as u64).map(|seed| start_client(&socket, seed + 1)).collect();
    let mut n_daemons = 1;
    for kill in 0..n_kills {
        let watched = random.below(N_CLIENTS as u64) as usize;
        wait_for_turns(&mut clients[watched], 1 + random.below(8));
        for client in &mut clients {
            let ended = client.try_wait().unwrap();
            assert!(ended.is_none(), "a client ended by itself: {ended:?}; what it said is above");
        }
        if random.below(4) == 0 {
            daemon.kill();
            daemon = start_daemon(&socket);
            n_daemons += 1;
            // They come back by themselves.
            within(Duration::from_secs(20), "clients attached again", || {
                daemon.ask("").0 == N_CLIENTS as u64
            });
        } else {
            within(Duration::from_secs(20), "clients attached", || daemon.ask("").0 == N_CLIENTS as u64);
            let victim = random.below(N_CLIENTS as u64) as usize;
            let client = &mut clients[victim];
            client.kill().unwrap();
            client.wait().unwrap();
            within(RECLAIM_TIMEOUT, "the session of a dead client ended", || {
                daemon.ask("").0 == N_CLIENTS as u64 - 1
            });
            *client = start_client(&socket, 1000 + kill);
        }
    }
    for client in &mut clients {
        assert!(client.try_wait().unwrap().is_none(), "a client ended by itself");
        client.kill().unwrap();
        client.wait().unwrap();
    }
    within(RECLAIM_TIMEOUT, "all sessions ended", || daemon.ask("").0 == 0);
    let (_, used_bytes) = daemon.ask("clear");
    assert_eq!(used_bytes, 0, "slots or leases of dead clients are left after {n_kills} kills");
    daemon.kill();
    println!("{n_kills} kills, {n_daemons} daemons");
}
