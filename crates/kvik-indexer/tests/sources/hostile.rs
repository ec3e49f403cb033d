//! Engines that misbehave.

use std::time::Duration;

use kvik_indexer::feed::FeedName;
use kvik_indexer::sources::engine::{EngineConfig, EngineLimits, EngineSource};
use tokio::io::AsyncWriteExt as _;

use crate::peer::{Engine, Peer, TOPIC, frame, message, payload, pod1, quick, stored};
use crate::support::{PATIENCE, Recorder};

#[tokio::test]
async fn a_peer_that_breaks_the_protocol_is_left_and_tried_again() {
    let engine = Engine::bind().await;
    let recorder = Recorder::default();
    let source = EngineSource::start(&engine.config(), recorder.feeds()).unwrap();

    // Another protocol altogether.
    let mut stream = engine.accept_raw().await;
    stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(4)).await.unwrap();
    // Another type of socket: the client leaves after the handshake without a subscription.
    let mut peer = Peer::shake_hands(engine.accept_raw().await, b"PUSH").await;
    assert_eq!(peer.receive().await, None);

    let too_long = [&[2_u8][..], &u64::MAX.to_be_bytes()].concat();
    let just_too_long = [&[2_u8][..], &(16_u64 * 1024 * 1024 + 1).to_be_bytes()].concat();
    let rest_too_long = [&[2_u8][..], &(16_u64 * 1024 * 1024 - 999).to_be_bytes()].concat();
    let too_long_together = [frame(1, &[0; 1000]), rest_too_long].concat();
    for bytes in [
        too_long,
        just_too_long,
        too_long_together,
        // Unknown flags, a command in parts, a command that is too long, commands that cannot be read.
        vec![0x80, 0],
        vec![5, 0],
        [&[6_u8][..], &(1_u64 << 20).to_be_bytes()].concat(),
        frame(4, b"\xffPING"),
        frame(4, b"\x04PING"),
        frame(4, b"\x05ERROR\x04away"),
        // Frames of a message without end.
        [1, 0].repeat(9),
    ] {
        let mut peer = engine.accept().await;
        peer.stream.write_all(&bytes).await.unwrap();
        let left = tokio::time::timeout(PATIENCE, peer.receive()).await.unwrap();
        assert_eq!(left, None, "{bytes:?}");
    }

    let mut peer = engine.accept().await;
    peer.publish(0).await;
    recorder.until_applied(&pod1(), &[0]).await;
    assert_eq!(source.counters().connections, 11);
}

#[tokio::test]
async fn messages_of_other_shapes_are_counted_and_passed_over() {
    let engine = Engine::bind().await;
    let recorder = Recorder::default();
    let source = EngineSource::start(&engine.config(), recorder.feeds()).unwrap();
    let mut peer = engine.accept().await;
    let zero = 0_u64.to_be_bytes();
    let good = stored(0);
    for frames in [
        &[TOPIC][..],
        &[TOPIC, &zero],
        &[TOPIC, &zero, &good, b""],
        &[TOPIC, &zero[1..], &good],
        &[TOPIC, &zero, b""],
        &[TOPIC, &zero, &good[..good.len() - 1]],
        &[TOPIC, &zero, b"\xdd\xff\xff\xff\xff"],
        &[TOPIC, &zero, b"\x92\xcb\0\0\0\0\0\0\0\0\xdd\xff\xff\xff\xff"],
        &[TOPIC, &zero, &vec![0x91; 100_000]],
    ] {
        peer.send(frames).await;
    }
    let long = [&b"kv@"[..], &vec![b'p'; 1 << 20], b"@tiny"].concat();
    for topic in
        [&b""[..], b"kv@", b"kv@pod1", b"\xff\xfe", &long, &[&b"kv@pod1@"[..], &[b'm'; 513]].concat()]
    {
        peer.send(&[topic, &zero, &good]).await;
    }
    peer.publish(0).await;
    recorder.until_applied(&pod1(), &[0]).await;
    let counters = source.counters();
    assert_eq!((counters.messages, counters.malformed, counters.refused), (16, 9, 6));
    assert_eq!(counters.connections, 1);
    assert_eq!(recorder.names(), [pod1()]);
}

#[tokio::test]
async fn the_last_of_all_numbers_is_a_number() {
    let engine = Engine::bind().await;
    let recorder = Recorder::default();
    let source = EngineSource::start(&engine.config_with_replay(), recorder.feeds()).unwrap();
    let mut peer = engine.accept().await;
    peer.publish(0).await;
    recorder.until_applied(&pod1(), &[0]).await;
    peer.publish(u64::MAX).await;
    recorder.until_applied(&pod1(), &[0, u64::MAX]).await;
    assert_eq!(recorder.skipped(&pod1()), [u64::MAX]);
    // Nothing is due after it; whatever comes is a restart.
    peer.publish(0).await;
    recorder.until_applied(&pod1(), &[0, u64::MAX, 0]).await;
    assert_eq!(source.counters().restarts, 1);
    peer.publish(u64::MAX - 1).await;
    peer.publish(u64::MAX).await;
    recorder.until_applied(&pod1(), &[0, u64::MAX, 0, u64::MAX - 1, u64::MAX]).await;
    drop(peer);
    let mut peer = engine.accept().await;
    recorder.until("nothing of it is left", |recorder| recorder.holds(&pod1(), 1000).is_none()).await;
    peer.publish(0).await;
    recorder.until("it goes on", |recorder| recorder.holds(&pod1(), 1000) == Some(false)).await;
}

#[tokio::test]
async fn an_endpoint_cannot_speak_for_more_workers_than_it_may() {
    let engine = Engine::bind().await;
    let limits = EngineLimits { max_feeds: 3, ..quick() };
    let recorder = Recorder::default();
    let config = EngineConfig { limits, ..engine.config() };
    let source = EngineSource::start(&config, recorder.feeds()).unwrap();
    let mut peer = engine.accept().await;
    for pod in 0..1000 {
        let topic = format!("kv@pod{pod}@tiny");
        peer.send(&[topic.as_bytes(), &0_u64.to_be_bytes(), &stored(0)]).await;
    }
    recorder.until("all have come", |_| source.counters().messages == 1000).await;
    recorder.until("all were looked at", |_| source.counters().refused == 997).await;
    assert_eq!(recorder.names().len(), 3);
    // The first workers are still followed.
    peer.send(&[b"kv@pod0@tiny", &1_u64.to_be_bytes(), &stored(1)]).await;
    let name = FeedName { worker: "pod0".to_owned(), ..pod1() };
    recorder.until_applied(&name, &[0, 1]).await;
}

#[tokio::test]
async fn a_replay_of_garbage_or_of_nothing_ends_and_the_live_stream_goes_on() {
    let engine = Engine::bind().await;
    let garbage = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let replay_endpoint = Some(format!("tcp://{}", garbage.local_addr().unwrap()));
    let limits = EngineLimits { replay_ms: 2000, ..quick() };
    let config = EngineConfig { replay_endpoint, limits, ..engine.config() };
    let recorder = Recorder::default();
    let source = EngineSource::start(&config, recorder.feeds()).unwrap();
    let mut peer = engine.accept().await;
    peer.publish(2).await;
    // At the connection: answers that cannot be read, without end.
    let (stream, _) = garbage.accept().await.unwrap();
    let mut router = Peer::shake_hands(stream, b"ROUTER").await;
    router.receive().await.unwrap();
    let shapes: [&[&[u8]]; 4] = [&[b""], &[b"", b"1", b"2", b"3", b"4"], &[b"", TOPIC, b"1", b""], &[b"x"]];
    let mut pace = tokio::time::interval(Duration::from_millis(1));
    let flood = async {
        while router.stream.write_all(&shapes.map(message).concat()).await.is_ok() {
            pace.tick().await;
        }
    };
    tokio::time::timeout(PATIENCE, flood).await.unwrap();
    // For the gap: no answer.
    let (stream, _) = garbage.accept().await.unwrap();
    let mut router = Peer::shake_hands(stream, b"ROUTER").await;
    router.receive().await.unwrap();
    recorder.until_applied(&pod1(), &[2]).await;
    let counters = source.counters();
    assert_eq!((counters.replays, counters.failed_replays, counters.skipped_gaps), (2, 2, 1));
    // Each shape at least once: how often depends on the speed of the machine.
    assert!(counters.malformed >= 4, "{counters:?}");
}

#[tokio::test]
async fn a_ping_is_answered_and_a_silent_peer_is_left() {
    let engine = Engine::bind().await;
    let limits = EngineLimits { heartbeat_ms: 200, ..quick() };
    let config = EngineConfig { limits, ..engine.config() };
    let recorder = Recorder::default();
    let source = EngineSource::start(&config, recorder.feeds()).unwrap();
    let mut peer = engine.accept().await;
    peer.stream.write_all(&frame(4, b"\x04PING\0\x64context")).await.unwrap();
    let (flags, pong) = loop {
        let (flags, body) = peer.receive_frame().await.unwrap();
        if !body.starts_with(b"\x04PING") {
            break (flags, body);
        }
    };
    assert_eq!((flags, pong.as_slice()), (4, &b"\x04PONGcontext"[..]));
    // A peer that answers is kept.
    for _ in 0..3 {
        let (_, ping) = peer.receive_frame().await.unwrap();
        assert_eq!(&ping[..5], b"\x04PING");
        peer.stream.write_all(&frame(4, &[b"\x04PONG", &ping[7..]].concat())).await.unwrap();
    }
    assert_eq!(source.counters().connections, 1);
    // One that does not is left after two.
    let mut n_pings = 0;
    while peer.receive_frame().await.is_some() {
        n_pings += 1;
    }
    assert_eq!(n_pings, 2);
    let mut peer = engine.accept().await;
    peer.publish(0).await;
    recorder.until_applied(&pod1(), &[0]).await;
}

#[tokio::test]
async fn a_flood_from_one_engine_waits_for_the_index_and_blocks_no_other_engine() {
    const N_FLOODED: u64 = 20_000;
    let (loud, quiet) = (Engine::bind().await, Engine::bind().await);
    let recorder = Recorder::default();
    let loud_source = EngineSource::start(&loud.config(), recorder.feeds()).unwrap();
    let quiet_source = EngineSource::start(&quiet.config(), recorder.feeds()).unwrap();
    let mut flood = loud.accept().await;
    let mut other = quiet.accept().await;
    let written = tokio::spawn(async move {
        for sequence in 0..N_FLOODED {
            let batch = message(&[b"kv@loud@tiny", &sequence.to_be_bytes(), &payload(1.0, sequence, 0)]);
            flood.stream.write_all(&batch).await.unwrap();
        }
        flood
    });
    let name = FeedName { worker: "quiet".to_owned(), ..pod1() };
    for sequence in 0..20 {
        other.send(&[b"kv@quiet@tiny", &u64::to_be_bytes(sequence), &stored(sequence)]).await;
        recorder
            .until("the quiet one is served", |recorder| recorder.applied(&name).len() as u64 == sequence + 1)
            .await;
    }
    let _flood = written.await.unwrap();
    recorder.until("the flood is over", |_| loud_source.counters().messages == N_FLOODED).await;
    assert_eq!((loud_source.counters().gaps, quiet_source.counters().gaps), (0, 0));
    assert_eq!(quiet_source.counters().messages, 20);
}

#[tokio::test]
async fn an_index_that_does_not_go_on_stops_the_engine_and_not_the_memory() {
    let engine = Engine::bind().await;
    let recorder = Recorder::default();
    let source = EngineSource::start(&engine.config(), recorder.feeds()).unwrap();
    let mut peer = engine.accept().await;
    recorder.fail(u32::MAX);
    // More than all buffers of two sockets: sooner or later nothing more can be written.
    let batch = message(&[TOPIC, &0_u64.to_be_bytes(), &vec![0; 1 << 20]]);
    peer.publish(0).await;
    let mut n_written = 0;
    while tokio::time::timeout(Duration::from_millis(500), peer.stream.write_all(&batch)).await.is_ok() {
        n_written += 1;
        assert!(n_written < 256, "{n_written} MiB were taken by a source that cannot hand them on");
    }
    assert_eq!(source.counters().messages, 1);
}
