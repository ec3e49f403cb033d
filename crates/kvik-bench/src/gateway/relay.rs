//! The least that can stand between a client and a worker: a relay of bytes that reads nothing.
//!
//! Its CPU time for each chunk is what the operating system takes for a read, a write and a
//! wake-up; the gateway's time above it is the gateway's own.

use std::io;
use std::net::SocketAddr;

use anyhow::Context;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

/// As much as a server reads at once.
const BUFFER_BYTES: usize = 8 << 10;

/// Starts a relay to `worker` on `runtime` and returns where it listens; it ends with the runtime.
pub(crate) fn start(runtime: &Runtime, worker: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).context("listen as a relay")?;
    let address = listener.local_addr().context("listen as a relay")?;
    runtime.spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(relay(client, worker));
        }
    });
    Ok(address)
}

async fn relay(client: TcpStream, worker: SocketAddr) {
    let Ok(worker) = TcpStream::connect(worker).await else { return };
    let _ = client.set_nodelay(true);
    let _ = worker.set_nodelay(true);
    let (from_client, to_client) = client.into_split();
    let (from_worker, to_worker) = worker.into_split();
    // A connection that breaks shows itself as a failed request of the load.
    tokio::select! {
        _ = copy(&from_client, &to_worker) => {}
        _ = copy(&from_worker, &to_client) => {}
    }
}

/// Copies bytes until `from` ends.
async fn copy(from: &OwnedReadHalf, to: &OwnedWriteHalf) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let n_read = read(from, &mut buffer).await?;
        if n_read == 0 {
            return Ok(());
        }
        let mut rest = &buffer[..n_read];
        while !rest.is_empty() {
            rest = &rest[write(to, rest).await?..];
        }
    }
}

async fn read(from: &OwnedReadHalf, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        from.readable().await?;
        match from.try_read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

async fn write(to: &OwnedWriteHalf, bytes: &[u8]) -> io::Result<usize> {
    loop {
        to.writable().await?;
        match to.try_write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}
