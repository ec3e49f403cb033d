//! What loopback itself gives: bytes through a TCP connection between two threads.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use anyhow::Context as _;

/// Bytes of one write, as many as workers send in one call.
const PIECE_BYTES: usize = 2 << 20;

/// Sends `n_bytes` over loopback; gigabytes a second until the last is read.
///
/// # Errors
/// If there is no connection, or it breaks.
pub(super) fn loopback_gb_s(n_bytes: usize) -> anyhow::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listen on loopback")?;
    let address = listener.local_addr().context("listen on loopback")?;
    let n_pieces = n_bytes.div_ceil(PIECE_BYTES);
    let sending = std::thread::spawn(move || -> std::io::Result<()> {
        let mut stream = TcpStream::connect(address)?;
        let piece = vec![7; PIECE_BYTES];
        (0..n_pieces).try_for_each(|_| stream.write_all(&piece))
    });
    let (mut stream, _) = listener.accept().context("accept a connection")?;
    let mut piece = vec![0; PIECE_BYTES];
    let begin = Instant::now();
    for _ in 0..n_pieces {
        stream.read_exact(&mut piece).context("read from loopback")?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    sending.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?.context("write to loopback")?;
    Ok((n_pieces * PIECE_BYTES) as f64 / 1e9 / seconds)
}
