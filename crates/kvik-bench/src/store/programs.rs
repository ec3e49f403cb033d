//! The programs that tiers are compared with.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use kvik_tier::RedisUrl;

use super::direction::Direction;

/// Time for a server to take connections.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections that the tier and `redis-benchmark` have.
pub(super) const N_CONNECTIONS: usize = 4;

/// Keys to choose from at random for each that is written: one in two thousand is chosen twice.
const KEY_SPREAD: usize = 1000;

/// How often each key is written on average before reads are measured: one in 55 is missing then.
const FILLING_TURNS: usize = 4;

/// Whether a program can be started.
pub(super) fn is_installed(program: &str) -> bool {
    let version = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok()
}

/// What `fio` reaches with direct I/O in pieces of 1 MiB, 32 under way for each thread, in GB/s.
pub(super) fn fio_rate(
    folder: &Path,
    round_bytes: usize,
    n_threads: usize,
    direction: Direction,
) -> anyhow::Result<Option<f64>> {
    if !is_installed("fio") {
        return Ok(None);
    }
    let (mode, field) = match direction {
        // Fields of the terse format, counted from 0: the bandwidth in KiB/s.
        Direction::Put => ("write", 47),
        Direction::Get => ("read", 6),
    };
    let folder = folder.join("fio");
    std::fs::create_dir_all(&folder)?;
    let output = Command::new("fio")
        .args(["--name=kvik", "--direct=1", "--ioengine=io_uring", "--bs=1m", "--iodepth=32"])
        .args(["--group_reporting", "--output-format=terse", "--end_fsync=1"])
        .arg(format!("--rw={mode}"))
        .arg(format!("--numjobs={n_threads}"))
        .arg(format!("--size={}", round_bytes / n_threads))
        .arg(format!("--directory={}", folder.display()))
        .output()
        .context("run fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let rate = text.lines().last().and_then(|line| line.split(';').nth(field)?.parse::<f64>().ok());
    if direction == Direction::Get {
        std::fs::remove_dir_all(&folder)?;
    }
    match rate {
        Some(kib_per_s) => Ok(Some(kib_per_s * 1024.0 / 1e9)),
        None => bail!("fio gave no rate: {}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// A `redis-server` of its own on loopback; ends with this value.
#[derive(Debug)]
pub(super) struct RedisServer {
    process: Child,
    port: u16,
}

impl RedisServer {
    pub(super) fn start(folder: &Path) -> anyhow::Result<Self> {
        // Free now; if another process takes it meanwhile, another server answers there or this one ends.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let process = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .args(["--port", &port.to_string()])
            .arg("--dir")
            .arg(folder)
            .stdout(Stdio::null())
            .spawn()
            .context("start redis-server")?;
        let mut server = Self { process, port };
        let begin = Instant::now();
        while !server.answers() {
            if let Some(status) = server.process.try_wait()? {
                bail!("redis-server has ended at its start: {status}");
            }
            if begin.elapsed() > START_TIMEOUT {
                bail!("redis-server does not answer at port {port}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// Whether this very process answers at the port.
    fn answers(&self) -> bool {
        let ask = || -> std::io::Result<String> {
            let mut connection = TcpStream::connect(("127.0.0.1", self.port))?;
            connection.set_read_timeout(Some(START_TIMEOUT))?;
            connection.write_all(b"INFO server\r\nQUIT\r\n")?;
            let mut reply = String::new();
            connection.read_to_string(&mut reply)?;
            Ok(reply)
        };
        let own_line = format!("process_id:{}", self.process.id());
        ask().is_ok_and(|reply| reply.lines().any(|line| line == own_line))
    }

    pub(super) fn url(&self) -> anyhow::Result<RedisUrl> {
        Ok(format!("redis://127.0.0.1:{}", self.port).parse()?)
    }

    /// What `redis-benchmark` reaches with values of that length, in GB/s.
    ///
    /// It writes new keys to an empty server, as the tier does: a key that is written again lies in memory that
    /// the server has already, and a new one costs a page fault for every 4 KiB, which is a third of the
    /// time. It reads as many keys as the tier, at random, of which nearly all are there.
    pub(super) fn benchmark_rate(
        &self,
        value_bytes: usize,
        round_bytes: usize,
        direction: Direction,
    ) -> anyhow::Result<Option<f64>> {
        if !is_installed("redis-benchmark") {
            return Ok(None);
        }
        let n_keys = round_bytes / value_bytes;
        let rate = match direction {
            Direction::Put => {
                self.forget_all()?;
                self.run_benchmark("set", value_bytes, KEY_SPREAD * n_keys, n_keys)?
            }
            Direction::Get => {
                self.run_benchmark("set", value_bytes, n_keys, FILLING_TURNS * n_keys)?;
                let rate = self.run_benchmark("get", value_bytes, n_keys, n_keys)?;
                self.forget_all()?;
                rate
            }
        };
        Ok(Some(rate))
    }

    fn run_benchmark(
        &self,
        test: &str,
        value_bytes: usize,
        n_keys: usize,
        n_requests: usize,
    ) -> anyhow::Result<f64> {
        let output = Command::new("redis-benchmark")
            .args(["-p", &self.port.to_string(), "-t", test, "--csv"])
            .args(["-d", &value_bytes.to_string(), "-n", &n_requests.to_string()])
            .args(["-r", &n_keys.to_string(), "-c", &N_CONNECTIONS.to_string()])
            .output()
            .context("run redis-benchmark")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let name = format!("\"{}\"", test.to_uppercase());
        let rate = text
            .lines()
            .find(|line| line.starts_with(&name))
            .and_then(|line| line.split(',').nth(1)?.trim_matches('"').parse::<f64>().ok());
        match rate {
            Some(values_per_s) => Ok(values_per_s * value_bytes as f64 / 1e9),
            None => bail!("redis-benchmark gave no rate: {text}"),
        }
    }

    /// Empties the server.
    fn forget_all(&self) -> anyhow::Result<()> {
        let mut connection = TcpStream::connect(("127.0.0.1", self.port)).context("reach redis-server")?;
        connection.write_all(b"FLUSHALL\r\n")?;
        let mut reply = [0; 5];
        connection.read_exact(&mut reply)?;
        ensure!(&reply == b"+OK\r\n", "redis-server does not forget: {reply:?}");
        Ok(())
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // It is ours and holds no needed data.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
