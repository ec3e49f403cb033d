//! Ports of the loopback interface for servers that a test starts as processes.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use parking_lot::Mutex;

/// Below the ports that the system gives to clients and to servers that ask for any port. One of those could be given
/// away before the server has it or while it restarts; and a client that connects to one of them before the server
/// listens can be given the very same port, and so talk to itself.
const FIRST_PORT: u32 = 10_000;
const N_PORTS: u32 = 22_000;

/// A port on which no server listens, and that no other call in any process of this user gets while this process lives.
pub(crate) fn free_port() -> u16 {
    /// The locks of all ports given so far: files in a folder that all test processes share.
    static HELD: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let folder = locks_folder();
    fs::create_dir_all(&folder).unwrap();
    // Processes of tests that run at once begin far from each other.
    let first = std::process::id().wrapping_mul(7919);
    for number in 0..N_PORTS {
        let port = u16::try_from(FIRST_PORT + first.wrapping_add(number) % N_PORTS).unwrap();
        let lock = File::create(folder.join(port.to_string())).unwrap();
        // Such a lock belongs to the open file, so it also keeps out other threads of this process.
        if lock.try_lock().is_ok() && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            HELD.lock().push(lock);
            return port;
        }
    }
    panic!("no port is free");
}

/// A folder of this user for locks of ports.
fn locks_folder() -> PathBuf {
    let user = fs::metadata("/proc/self").unwrap().uid();
    std::env::temp_dir().join(format!("kvik-test-ports-{user}"))
}
