//! Ports of the loopback interface for servers that a test starts as processes.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the ports that the system gives to clients and to who asks for any port. One of those could go to
/// somebody else before the server has it or while it restarts; and who connects to one of them before
/// anybody listens there can be given the very same port, and so talk to itself.
const FIRST_PORT: u32 = 10_000;
const N_PORTS: u32 = 22_000;

/// A port that nobody has, and that no other call in this process gets.
pub(crate) fn free_port() -> u16 {
    static N_GIVEN: AtomicU32 = AtomicU32::new(0);
    // Processes of tests that run at once begin far from each other.
    let first = std::process::id().wrapping_mul(7919);
    loop {
        let n_given = N_GIVEN.fetch_add(1, Ordering::Relaxed);
        assert!(n_given < N_PORTS, "no port is free");
        let port = u16::try_from(FIRST_PORT + first.wrapping_add(n_given) % N_PORTS).unwrap();
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}
