//! A store that several clients use through shared memory.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod support;

use std::collections::HashSet;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, FrameBuffer, Listener, wait_ready};
use kvik_node::{
    Attach, AttachOptions, Attached, NodeClient, NodeError, NodeOptions, NodeServer, NodeWatch, Purpose,
};
use kvik_store::{Clear, Commit};
use kvik_tier::shared::{Checksum, SharedWords, checksum};
use kvik_types::BlockSize;
use rustix::event::{PollFd, PollFlags};
use support::{CHUNK_BYTES, CHUNK_TOKENS, Copy, Daemon, N_LAYERS, chain, content, store, until, verify};

#[test]
fn a_chunk_that_one_client_writes_is_read_by_another() {
    let daemon = Daemon::start(16 << 20);
    let (writer, reader) = (daemon.attach(), daemon.attach());
    assert_eq!(verify(&reader, 1, 5).unwrap(), 0);
    assert_eq!(store(&writer, 1, 5).unwrap(), 5);
    assert_eq!(store(&writer, 1, 5).unwrap(), 0, "all are present");
    assert_eq!(verify(&reader, 1, 5).unwrap(), 5);
    assert_eq!(verify(&reader, 2, 5).unwrap(), 0);
    // A longer prompt begins with them.
    let longer = chain(&reader, 1, 9);
    let opened = reader.open(&longer).unwrap();
    assert_eq!((opened.n_found(), opened.n_found_tokens()), (5, 5 * CHUNK_TOKENS));
    assert_eq!(opened.retrieve(3).unwrap().n_chunks(), 2);
    opened.note_request(Some(7)).unwrap();
}

#[test]
fn a_chunk_is_found_only_after_its_commit_and_with_its_checksum() {
    let daemon = Daemon::start(16 << 20);
    let (writer, reader) = (daemon.attach(), daemon.attach());
    let names = chain(&writer, 3, 1);
    let opened = writer.open(&names).unwrap();
    let write = opened.write(0, 1).unwrap();
    let bytes = content(3, 0);
    write.copy_in(0, 0, &bytes).unwrap();
    assert_eq!(verify(&reader, 3, 1).unwrap(), 0);
    let error = write.commit(0, Checksum(checksum(&bytes).0 ^ 1)).unwrap_err();
    assert!(error.to_string().contains("checksum"), "{error}");
    assert_eq!(verify(&reader, 3, 1).unwrap(), 0);
    drop(write);
    assert_eq!(store(&writer, 3, 1).unwrap(), 1);
    assert_eq!(verify(&reader, 3, 1).unwrap(), 1);
}

#[test]
fn a_session_lives_as_long_as_its_last_lease_or_write_and_then_gives_everything_back() {
    let daemon = Daemon::start(16 << 20);
    let keeper = daemon.attach();
    assert_eq!(store(&keeper, 4, 3).unwrap(), 3);
    let used_bytes = daemon.used_bytes();
    let leaver = daemon.attach();
    let names = chain(&leaver, 5, 8);
    let mut write = leaver.open(&names).unwrap().write(0, 8).unwrap();
    assert_eq!(write.n_chunks(), 8);
    assert!(daemon.used_bytes() > used_bytes);
    drop(leaver);
    write.write_chunk(0, &content(5, 0)).unwrap();
    drop(write);
    assert_eq!(verify(&keeper, 5, 8).unwrap(), 1);
    let stats = || daemon.server.as_ref().unwrap().stats();
    until("the session ended", || stats().n_sessions == 1);
    daemon.store.clear(&Clear::default());
    assert_eq!(daemon.used_bytes(), 0);
}

#[test]
fn many_clients_at_once_read_only_what_was_written() {
    let daemon = Daemon::start(4 << 20);
    std::thread::scope(|scope| {
        for client in 0..4_u32 {
            let daemon = &daemon;
            scope.spawn(move || {
                let client_of_node = daemon.attach();
                for round in 0..50 {
                    let seed = (client + round) % 7;
                    store(&client_of_node, seed, 12).unwrap();
                    verify(&client_of_node, (seed + 1) % 7, 12).unwrap();
                }
            });
        }
    });
    until("all sessions ended", || daemon.attach().rank() == 0);
}

#[test]
fn a_daemon_that_ends_is_an_error_and_clients_attach_again() {
    let mut daemon = Daemon::start(16 << 20);
    let client = daemon.attach();
    assert_eq!(store(&client, 6, 2).unwrap(), 2);
    daemon.server = None;
    let begin = Instant::now();
    let error = verify(&client, 6, 2).unwrap_err();
    assert!(matches!(error, NodeError::Gone { .. }), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(30));
    assert!(NodeClient::attach(&daemon.options()).is_err());
    daemon.server =
        Some(NodeServer::start(NodeOptions::new(daemon.socket.clone(), daemon.store.clone())).unwrap());
    assert_eq!(verify(&daemon.attach(), 6, 2).unwrap(), 2);
}

#[test]
fn after_a_request_without_an_answer_every_call_fails_at_once() {
    let daemon = Daemon::start(16 << 20);
    let mut options = daemon.options();
    options.socket = SocketAddress::Abstract(format!("kvik-node-silent-{}", std::process::id()));
    options.timeout = Duration::from_millis(300);
    let listener = Listener::open(&options.socket).unwrap();
    let arena = daemon.store.arena();
    let words = SharedWords::create(1 << 16).unwrap();
    let answer = Attached {
        tenant: String::new(),
        chunk_tokens: BlockSize::try_new(CHUNK_TOKENS).unwrap(),
        stores_tails: false,
        digest_key: None,
        arena_bytes: arena.stat().capacity_bytes,
        peer_address: None,
    };
    std::thread::scope(|scope| {
        let attaching = scope.spawn(|| NodeClient::attach(&options).unwrap());
        let connection = loop {
            if let Some(connection) = listener.accept().unwrap() {
                break connection;
            }
            wait_ready(&mut [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)], None).unwrap();
        };
        let descriptors = [words.as_fd(), arena.as_fd(), arena.as_fd()];
        assert!(connection.send_with_descriptors(&answer.encode(), &descriptors).unwrap());
        let client = attaching.join().unwrap();
        let first = verify(&client, 1, 1).unwrap_err().to_string();
        assert!(first.contains("does not answer"), "{first}");
        let second = verify(&client, 1, 1).unwrap_err().to_string();
        assert!(second.contains("earlier request"), "{second}");
    });
}

#[test]
fn garbage_in_a_ring_ends_only_its_own_session() {
    let daemon = Daemon::start(16 << 20);
    let honest = daemon.attach();
    assert_eq!(store(&honest, 8, 3).unwrap(), 3);
    let AttachOptions { namespace, format, rank, .. } = daemon.options();
    let mut state = 1_u64;
    for round in 0..40 {
        let connection = Connection::open(&daemon.socket).unwrap();
        let attach = Attach {
            namespace: namespace.clone(),
            format,
            rank,
            token: String::new(),
            purpose: Purpose::Session,
        };
        connection.send(&attach.encode()).unwrap();
        let mut buffer = FrameBuffer::new();
        let words = loop {
            if let Some((_, descriptors)) = connection.receive_with_descriptors(&mut buffer).unwrap() {
                break SharedWords::map(descriptors.into_iter().next().unwrap(), 4096).unwrap();
            }
            let mut waiting = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
            wait_ready(&mut waiting, None).unwrap();
        };
        for word in words.words() {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            // Small numbers now and then: they pass for positions and operations.
            let value = if round % 2 == 0 { state } else { state >> 56 };
            word.store(value, Ordering::Relaxed);
        }
        for word in 0..256 {
            words.wake(word);
        }
        drop(connection);
        assert_eq!(verify(&honest, 8, 3).unwrap(), 3, "round {round}");
    }
}

#[test]
fn bad_frames_are_refused_with_the_field_that_is_wrong() {
    let daemon = Daemon::start(16 << 20);
    let mut options = daemon.options();
    options.format.n_layers = 0;
    let error = NodeClient::attach(&options).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
    let connection = Connection::open(&daemon.socket).unwrap();
    connection.send(b"GET / HTTP/1.1").unwrap();
    assert_eq!(store(&daemon.attach(), 9, 1).unwrap(), 1);
}

#[test]
fn many_chunks_are_written_without_a_wait_for_each() {
    const N_CHUNKS: usize = 300;
    let daemon = Daemon::start(32 << 20);
    let client = daemon.attach();
    let names = chain(&client, 11, N_CHUNKS);
    let opened = client.open(&names).unwrap();
    let mut write = opened.write(0, N_CHUNKS).unwrap();
    for place in 0..N_CHUNKS {
        write.write_chunk(place, &content(11, place)).unwrap();
    }
    assert!(write.write_chunk(0, &content(11, 0)).is_err(), "a chunk is committed once");
    assert!(write.write_chunk(1, &[0; 7]).unwrap_err().to_string().contains("length of a chunk"));
    assert_eq!(write.finish().unwrap(), vec![Some(Commit::Stored); N_CHUNKS]);
    assert_eq!(verify(&daemon.attach(), 11, N_CHUNKS).unwrap(), N_CHUNKS);
    // A write whose answers are not taken leaves nothing behind that the next one stumbles over.
    let names = chain(&client, 12, 3);
    let opened = client.open(&names).unwrap();
    let mut dropped = opened.write(0, 3).unwrap();
    dropped.write_chunk(0, &content(12, 0)).unwrap();
    drop(dropped);
    assert_eq!(verify(&client, 12, 3).unwrap(), 1);
}

#[test]
fn what_was_committed_of_a_write_stays_until_the_write_ends() {
    const N_CHUNKS: usize = 8;
    let daemon = Daemon::start(1 << 20);
    let (writer, other) = (daemon.attach(), daemon.attach());
    let opened = writer.open(&chain(&writer, 40, N_CHUNKS)).unwrap();
    let write = opened.write(0, N_CHUNKS).unwrap();
    assert_eq!(write.n_chunks(), N_CHUNKS);
    for place in 0..N_CHUNKS {
        let bytes = content(40, place);
        write.copy_in(place, 0, &bytes).unwrap();
        assert_eq!(write.commit(place, checksum(&bytes)).unwrap(), Commit::Stored, "{place}");
        // More than there is room for, and each used more than once: the chunk would have to leave.
        for seed in 0..10 {
            store(&other, seed, 5).unwrap();
            let requested = other.open(&chain(&other, seed, 5)).unwrap();
            requested.note_request(None).unwrap();
        }
    }
    assert_eq!(verify(&other, 40, N_CHUNKS).unwrap(), N_CHUNKS);
    drop(write);
    for seed in 0..40 {
        store(&other, seed, 5).unwrap();
    }
    assert!(verify(&other, 40, N_CHUNKS).unwrap() < N_CHUNKS, "afterwards they may leave");
}

#[test]
fn a_chunk_goes_in_and_comes_out_layer_by_layer() {
    const SECTION_BYTES: usize = CHUNK_BYTES / N_LAYERS as usize;
    let daemon = Daemon::start(16 << 20);
    let (writer, reader) = (daemon.attach(), daemon.attach());
    let names = chain(&writer, 13, 3);
    let opened = writer.open(&names).unwrap();
    let mut write = opened.write(0, 3).unwrap();
    // Layers of all chunks, the last layer first.
    for layer_idx in (0..N_LAYERS as usize).rev() {
        assert_eq!(verify(&reader, 13, 3).unwrap(), 0, "layer {layer_idx}");
        for place in 0..3 {
            let bytes = content(13, place);
            write
                .write_layer(place, layer_idx, &bytes[layer_idx * SECTION_BYTES..][..SECTION_BYTES])
                .unwrap();
        }
    }
    assert!(write.write_layer(0, 99, &[0; SECTION_BYTES]).unwrap_err().to_string().contains("`layer` is 99"));
    assert_eq!(write.finish().unwrap(), vec![Some(Commit::Stored); 3]);
    assert_eq!(verify(&reader, 13, 3).unwrap(), 3);

    let opened = reader.open(&names).unwrap();
    let mut layers = opened.retrieve_layers(1).unwrap();
    assert_eq!(layers.n_chunks(), 2);
    let mut section = [0; SECTION_BYTES];
    for expected in 0..N_LAYERS as usize {
        assert_eq!(layers.next_layer().unwrap(), Some(expected));
        for place in 0..2 {
            assert_eq!(layers.section_bytes(place), SECTION_BYTES);
            layers.copy_out(place, &mut section).unwrap();
            assert!(section == content(13, place + 1)[expected * SECTION_BYTES..][..SECTION_BYTES]);
        }
    }
    assert_eq!(layers.next_layer().unwrap(), None);
    assert!(layers.copy_out(0, &mut section).is_err());
}

#[test]
fn a_watch_follows_what_the_daemon_has_also_over_its_restart() {
    let mut daemon = Daemon::start(1 << 20);
    let client = daemon.attach();
    let watches: Vec<_> = (0..2)
        .map(|_| {
            let copy = Arc::new(Copy::default());
            let watch = NodeWatch::start(daemon.options(), client.space().clone(), Arc::clone(&copy) as _);
            (copy, watch.unwrap())
        })
        .collect();
    let is_same = |daemon: &Daemon, copy: &Copy| {
        let mut there = HashSet::new();
        let space = daemon.store.space(&daemon.options().namespace, daemon.options().format).unwrap();
        daemon.store.visit_chunks(&space, |hash, tiers| {
            there.extend(tiers.iter().map(|tier| (hash, *tier)));
        });
        !there.is_empty() && *copy.held.lock() == there
    };
    // More than there is room for: chunks leave, too.
    for seed in 0..20 {
        store(&client, seed, 5).unwrap();
    }
    for (copy, _) in &watches {
        until("the copy is exact", || is_same(&daemon, copy));
    }
    let late = Arc::new(Copy::default());
    let late_watch =
        NodeWatch::start(daemon.options(), client.space().clone(), Arc::clone(&late) as _).unwrap();
    until("a late copy is exact", || is_same(&daemon, &late));
    daemon.server = None;
    for (copy, _) in &watches {
        until("a daemon that is gone has nothing", || copy.held.lock().is_empty());
    }
    daemon.server =
        Some(NodeServer::start(NodeOptions::new(daemon.socket.clone(), daemon.store.clone())).unwrap());
    store(&daemon.attach(), 30, 5).unwrap();
    for (copy, _) in &watches {
        until("the copy is exact again", || is_same(&daemon, copy));
    }
    drop(late_watch);
}

#[test]
fn a_chunk_is_found_only_with_the_parts_of_all_ranks_and_leaves_with_all_of_them() {
    let daemon = Daemon::start(4 << 20);
    let attach = |rank: u16| {
        let mut options = daemon.options();
        options.format.n_ranks = 2;
        options.rank = rank;
        NodeClient::attach(&options).unwrap()
    };
    let (first, second) = (attach(0), attach(1));
    assert_eq!(chain(&first, 1, 3).names(), chain(&second, 1, 3).names(), "ranks name chunks alike");
    assert_eq!(store(&first, 1, 3).unwrap(), 3);
    assert_eq!(
        (verify(&first, 1, 3).unwrap(), verify(&second, 1, 3).unwrap()),
        (0, 0),
        "one part is not enough"
    );
    // The other rank stores less: only that much is there.
    assert_eq!(store(&second, 1, 2).unwrap(), 2);
    assert_eq!((verify(&first, 1, 3).unwrap(), verify(&second, 1, 3).unwrap()), (2, 2));
    assert_eq!(store(&second, 1, 3).unwrap(), 1);
    assert_eq!((verify(&first, 1, 3).unwrap(), verify(&second, 1, 3).unwrap()), (3, 3));
    // Others take the memory: what one rank lacks, the other one lacks too.
    for seed in 2..40 {
        store(&first, seed, 3).unwrap();
        store(&second, seed, 3).unwrap();
        for seed in (1..=seed).rev().step_by(7) {
            assert_eq!(
                verify(&first, seed, 3).unwrap(),
                verify(&second, seed, 3).unwrap(),
                "sequence {seed}"
            );
        }
    }
    assert!((1..40).any(|seed| verify(&first, seed, 3).unwrap() == 0), "nothing was evicted");
}

#[test]
fn chunks_in_pieces_are_written_and_read_by_several_threads() {
    const N_CHUNKS: usize = 12;
    let daemon = Daemon::start(16 << 20);
    let client = daemon.attach();
    let contents: Vec<Vec<u8>> = (0..N_CHUNKS).map(|place| content(9, place)).collect();
    let opened = client.open(&chain(&client, 9, N_CHUNKS)).unwrap();
    let mut write = opened.write(0, N_CHUNKS).unwrap();
    write.write_all(4, |place| contents[place].chunks(5000)).unwrap();
    assert_eq!(write.finish().unwrap(), vec![Some(Commit::Stored); N_CHUNKS]);
    assert_eq!(verify(&client, 9, N_CHUNKS).unwrap(), N_CHUNKS);
    // Chunks that are there need no bytes.
    let opened = client.open(&chain(&client, 9, N_CHUNKS)).unwrap();
    let mut write = opened.write(0, N_CHUNKS).unwrap();
    write.write_all(4, |_| [&[1_u8; 3][..]]).unwrap();
    assert_eq!(write.finish().unwrap(), vec![None; N_CHUNKS]);

    let mut read: Vec<Vec<u8>> = vec![vec![0; CHUNK_BYTES]; N_CHUNKS];
    let lease = opened.retrieve(0).unwrap();
    let targets = read
        .iter_mut()
        .map(|chunk| chunk.chunks_mut(777).enumerate().map(|(idx, piece)| (idx * 777, piece)).collect());
    lease.copy_all(3, targets.collect()).unwrap();
    assert!(read == contents, "other bytes came back");
    let mut longer = vec![0; CHUNK_BYTES + 1];
    let error = lease.copy_all(2, vec![vec![(0, &mut longer[..])]]).unwrap_err().to_string();
    assert!(error.contains("length of a chunk"), "{error}");

    // A chunk with too few bytes is not stored, and those before it are.
    let short = |place: usize| &contents[place][..if place == 2 { 100 } else { CHUNK_BYTES }];
    let opened = client.open(&chain(&client, 10, 4)).unwrap();
    let mut write = opened.write(0, 4).unwrap();
    let error = write.write_all(1, |place| [short(place)]).unwrap_err().to_string();
    assert!(error.contains("`length of a chunk` is 100"), "{error}");
    let outcomes = write.finish().unwrap();
    assert_eq!(outcomes, [Some(Commit::Stored), Some(Commit::Stored), None, None]);
}
