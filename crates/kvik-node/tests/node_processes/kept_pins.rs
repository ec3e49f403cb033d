//! Pins, when daemons take over from each other.

use std::path::Path;

use kvik_node::{NodeClient, NodeManager};
use kvik_tier::TierKind;

use super::processes::{CHUNK_TOKENS, DaemonProcess, attach_options, tokens, within};
use super::take_overs::{RAM_BYTES, START, TAKE_OVER, TIMEOUT, socket, start_daemon, write};

const PINNED: u64 = 1;
const UNPINNED: u64 = 2;
const N_CHUNKS: usize = 5;

/// Pins a chain, lets two daemons take over and fills the memory of the last one: the chain is in memory, and one that was
/// not pinned is not, until the pin is taken away.
pub(crate) fn keep_pins() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut daemon = start_daemon(folder, START);
    let manager = NodeManager::new(attach_options(&socket(folder)));
    let chain = |number: u64| manager.space().unwrap().chain(&tokens(number, N_CHUNKS));
    let client = NodeClient::attach(&attach_options(&socket(folder))).unwrap();
    for number in [PINNED, UNPINNED] {
        write(&client, number, N_CHUNKS).unwrap();
    }
    drop(client);
    for _ in 0..2 {
        assert_eq!(manager.pin(&chain(PINNED)).unwrap(), N_CHUNKS * CHUNK_TOKENS);
    }
    for _ in 0..2 {
        let next = start_daemon(folder, TAKE_OVER);
        let mut old = std::mem::replace(&mut daemon, next);
        assert!(old.process.wait().unwrap().success(), "the old daemon ends by itself");
    }
    let in_memory = |number: u64| manager.lookup(&chain(number), true).unwrap().tokens_in(TierKind::Ram);
    fill(folder, 1000);
    assert_eq!((in_memory(PINNED), in_memory(UNPINNED)), (N_CHUNKS * CHUNK_TOKENS, 0));
    assert!(manager.unpin(&chain(PINNED)).unwrap());
    fill(folder, 2000);
    assert_eq!(in_memory(PINNED), N_CHUNKS * CHUNK_TOKENS, "it was pinned twice");
    assert!(manager.unpin(&chain(PINNED)).unwrap());
    assert!(!manager.unpin(&chain(PINNED)).unwrap());
    fill(folder, 3000);
    assert_eq!(in_memory(PINNED), 0);
    end(daemon);
}

/// Writes more than memory has room for.
fn fill(folder: &Path, first_chain: u64) {
    let client = NodeClient::attach(&attach_options(&socket(folder))).unwrap();
    let n_chains = 2 * RAM_BYTES / (super::processes::CHUNK_BYTES * N_CHUNKS) as u64;
    for number in first_chain..first_chain + n_chains {
        write(&client, number, N_CHUNKS).unwrap();
    }
}

fn end(mut daemon: DaemonProcess) {
    within(TIMEOUT, "all sessions ended", || daemon.ask("").0 == 0);
    assert_eq!(daemon.ask("clear").1, 0);
    drop(daemon.input);
    assert!(daemon.process.wait().unwrap().success());
}
