//! Chunks of another node: two daemons on this machine, connected over loopback, beside `iperf3`, and
//! beside plain TCP of as many bytes from memory to memory. `iperf3` sends one small buffer again and again, which stays in
//! the processor's caches.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use kvik_node::NodeClient;
use serde_json::Value;

use super::{CHUNK_BYTES, Daemon, MIB, NodeBenchOptions, attach_options, round_chunks};
use crate::report::{Baseline, Goal, Measurement};

/// Connections between the two nodes, and streams of `iperf3` that the goal is about: the default of the daemon.
const N_CONNECTIONS: usize = 8;

/// Streams of `iperf3` beside which the same is shown: the connections that daemons had before.
const N_FEWER_STREAMS: usize = 4;

/// Bytes of one call of plain TCP, as in the daemons.
const PIECE_BYTES: usize = 256 << 10;

/// Rounds that are not counted.
const N_WARM_UP: usize = 2;

/// Reads what another node has, whole and layer by layer.
pub(super) fn measure(options: NodeBenchOptions) -> anyhow::Result<Vec<Measurement>> {
    let n_rounds = N_WARM_UP + if options.is_quick { 2 } else { 6 };
    let n_chunks = round_chunks(options);
    let port = free_ports(1)?[0];
    let address = format!("127.0.0.1:{port}");
    // Two sets for each round: one that is read whole, and one that is read layer by layer.
    let holder_bytes = 2 * n_rounds * n_chunks * (CHUNK_BYTES + MIB);
    let holder = Daemon::start("holder", holder_bytes, &["--listen", &address])?;
    // What waits to be read may take half of the memory. The rounds that are not counted touch all of it.
    let reader_bytes = 5 * n_chunks * (CHUNK_BYTES + MIB) / 2;
    let settings = ["--peer", &address, "--set", "peer.lookup_timeout_ms=1000"];
    let reader = Daemon::start("reader", reader_bytes, &settings)?;
    let attach = |daemon: &Daemon| NodeClient::attach(&attach_options(daemon.socket(), 32, 4096));
    let (holding, reading) = (attach(&holder).context("attach")?, attach(&reader).context("attach")?);
    for set in 0..2 * n_rounds {
        fill(&holding, set, n_chunks)?;
    }
    let (mut rates, mut baselines, mut first_layers_ms) = (Vec::new(), Vec::new(), Vec::new());
    let (mut plain_rates, mut fewer_rates) = (Vec::new(), Vec::new());
    let (sent, mut received) = (vec![1; n_chunks * CHUNK_BYTES], vec![2; n_chunks * CHUNK_BYTES]);
    for round in 0..n_rounds {
        let rate = read_whole(&reading, 2 * round, n_chunks)?;
        let first_layer_ms = read_first_layer(&reading, 2 * round + 1, n_chunks)?;
        let (baseline, beside_fewer) = (iperf_rate(N_CONNECTIONS)?, iperf_rate(N_FEWER_STREAMS)?);
        let plain_rate = tcp_rate(&sent, &mut received).context("send over plain TCP")?;
        if round >= N_WARM_UP {
            rates.push(rate);
            first_layers_ms.push(first_layer_ms);
            baselines.extend(baseline);
            fewer_rates.extend(beside_fewer);
            plain_rates.push(plain_rate);
        }
    }
    let beside_tcp = Measurement::from_repeats("peer_get_beside_plain_tcp".to_owned(), "GB/s", rates.clone())
        .map(|get| get.compared_with(Baseline::new("TCP from memory to memory", plain_rates), None));
    let beside_iperf = |name: &str, baseline_name, baselines: Vec<f64>, goal| {
        Measurement::from_repeats(name.to_owned(), "GB/s", rates.clone()).map(|get| {
            if baselines.is_empty() {
                return get;
            }
            get.compared_with(Baseline::new(baseline_name, baselines), goal)
        })
    };
    let goal = Some(Goal::RatioAtLeast(0.8));
    let get = beside_iperf("peer_get", "iperf3, 8 streams", baselines, goal);
    let beside_fewer = beside_iperf("peer_get_beside_4_streams", "iperf3, 4 streams", fewer_rates, None);
    let first = Measurement::from_repeats("peer_get_first_layer_ms".to_owned(), "ms", first_layers_ms);
    Ok(get.into_iter().chain(beside_fewer).chain(beside_tcp).chain(first).collect())
}

fn tokens_of(client: &NodeClient, set: usize, n_chunks: usize) -> Vec<u32> {
    let n_tokens = (n_chunks * client.space().chunk_tokens()) as u32;
    (0..n_tokens).map(|place| place ^ (set as u32 + 1) << 16).collect()
}

fn fill(client: &NodeClient, set: usize, n_chunks: usize) -> anyhow::Result<()> {
    let opened = client.open(&client.space().chain(&tokens_of(client, set, n_chunks)))?;
    let mut write = opened.write(0, n_chunks)?;
    ensure!(write.n_chunks() == n_chunks, "there is room for {} chunks", write.n_chunks());
    let payload = vec![set as u8 + 1; CHUNK_BYTES];
    for place in 0..n_chunks {
        write.write_chunk(place, &payload)?;
    }
    write.finish()?;
    Ok(())
}

/// Bytes a second into the memory of this node, in GB/s.
fn read_whole(client: &NodeClient, set: usize, n_chunks: usize) -> anyhow::Result<f64> {
    let chain = client.space().chain(&tokens_of(client, set, n_chunks));
    let begin = Instant::now();
    let lease = client.open(&chain)?.retrieve(0)?;
    let took = begin.elapsed();
    ensure!(lease.n_chunks() == n_chunks, "only {} of {n_chunks} chunks came", lease.n_chunks());
    ensure!(lease.tier(0) == kvik_tier::TierKind::Peer, "the chunks were there before");
    let mut bytes = vec![0; CHUNK_BYTES];
    lease.copy_out(n_chunks - 1, 0, &mut bytes)?;
    ensure!(bytes.iter().all(|byte| *byte == set as u8 + 1), "other bytes came");
    Ok((n_chunks * CHUNK_BYTES) as f64 / took.as_nanos() as f64)
}

/// Time until the first layer of all chunks is there, the lookup included.
fn read_first_layer(client: &NodeClient, set: usize, n_chunks: usize) -> anyhow::Result<f64> {
    let chain = client.space().chain(&tokens_of(client, set, n_chunks));
    let begin = Instant::now();
    let mut layers = client.open(&chain)?.retrieve_layers(0)?;
    layers.next_layer()?;
    let took = begin.elapsed();
    ensure!(layers.n_chunks() == n_chunks, "only {} of {n_chunks} chunks came", layers.n_chunks());
    Ok(took.as_secs_f64() * 1e3)
}

/// What `iperf3` moves over loopback in a second, in GB/s; `None` where it is not installed.
///
/// One process on each side for each stream: older versions have one thread for all streams of a process.
fn iperf_rate(n_streams: usize) -> anyhow::Result<Option<f64>> {
    let version =
        Command::new("iperf3").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !version.is_ok_and(|status| status.success()) {
        return Ok(None);
    }
    let ports = free_ports(n_streams)?;
    let rates = std::thread::scope(|scope| {
        let streams: Vec<_> =
            ports.into_iter().map(|port| scope.spawn(move || stream_rate(&port.to_string()))).collect();
        let rates =
            streams.into_iter().map(|stream| stream.join().map_err(|_| anyhow!("a stream panicked"))?);
        rates.collect::<anyhow::Result<Vec<f64>>>()
    });
    rates.map(|rates| Some(rates.iter().sum()))
}

/// One stream of `iperf3`.
fn stream_rate(port: &str) -> anyhow::Result<f64> {
    let mut server = Command::new("iperf3")
        .args(["-s", "-1", "-B", "127.0.0.1", "-p", port])
        .stdout(Stdio::null())
        .spawn()
        .context("start iperf3")?;
    let mut rate = Err(anyhow!("iperf3 reports no rate"));
    // The server may not listen yet.
    for _ in 0..200 {
        let arguments = ["-c", "127.0.0.1", "-p", port, "-t", "1", "-J"];
        let output = Command::new("iperf3").args(arguments).output().context("run iperf3")?;
        let report: Value = serde_json::from_slice(&output.stdout).context("read what iperf3 reports")?;
        if let Some(bits_per_s) = report["end"]["sum_received"]["bits_per_second"].as_f64() {
            rate = Ok(bits_per_s / 8e9);
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = server.kill();
    let _ = server.wait();
    rate
}

/// What plain TCP moves from one memory to another over as many connections as the nodes have, without names and checksums, in GB/s.
fn tcp_rate(sent: &[u8], received: &mut [u8]) -> anyhow::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listen")?;
    let address = listener.local_addr().context("listen")?;
    let part_bytes = sent.len().div_ceil(N_CONNECTIONS);
    let parts = sent.chunks(part_bytes).zip(received.chunks_mut(part_bytes));
    let mut connections = Vec::new();
    for (source, target) in parts {
        let sender = TcpStream::connect(address).context("connect")?;
        let (receiver, _) = listener.accept().context("accept")?;
        connections.push((source, sender, target, receiver));
    }
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let streams: Vec<_> = connections
            .into_iter()
            .map(|(source, mut sender, target, mut receiver)| {
                let sending = scope
                    .spawn(move || source.chunks(PIECE_BYTES).try_for_each(|piece| sender.write_all(piece)));
                let receiving = scope.spawn(move || {
                    target.chunks_mut(PIECE_BYTES).try_for_each(|piece| receiver.read_exact(piece))
                });
                [sending, receiving]
            })
            .collect();
        let ends = streams
            .into_iter()
            .flatten()
            .map(|end| end.join().map_err(|_| anyhow!("a stream panicked"))?.context("move bytes"));
        ends.collect::<anyhow::Result<()>>()
    })?;
    let took = begin.elapsed();
    ensure!(received == sent, "other bytes came");
    received.fill(2);
    Ok(sent.len() as f64 / took.as_nanos() as f64)
}

/// Different ports that are free now.
fn free_ports(n_ports: usize) -> anyhow::Result<Vec<u16>> {
    // All are held until the last is found, so that none is found twice.
    let listeners = (0..n_ports).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<io::Result<Vec<_>>>();
    let listeners = listeners.context("find free ports")?;
    let ports = listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect::<io::Result<_>>();
    ports.context("find free ports")
}
