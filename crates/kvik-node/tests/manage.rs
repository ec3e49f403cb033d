//! Clients that manage the chunks of their tenant.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod support;

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, FrameBuffer, Listener, wait_ready};
use kvik_node::{
    Attach, AttachOptions, Attached, ClientToken, ManageAnswer, ManageRequest, NodeClient, NodeError,
    NodeManager, NodeOptions, NodeServer, NodeWatch, Purpose, Tenant, survey,
};
use kvik_store::{Chain, LowerTier, Store, StoreOptions, TierName};
use kvik_tier::{
    Arena, ArenaOptions, Checksummed, Clock, FaultRates, Faulty, Metered, NvmeOptions, NvmeTier, RamTier,
    TierKind, TokenDigest,
};
use kvik_types::{BlockHash, BlockSize};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};
use support::place::{Opener, Place};
use support::{
    CHUNK_BYTES, CHUNK_TOKENS, Copy, Daemon, chain, chain_in, complete, content, store, store_options, until,
    verify,
};

fn manager(daemon: &Daemon) -> NodeManager {
    NodeManager::new(daemon.options())
}

fn chain_of(manager: &NodeManager, seed: u32, n_chunks: usize) -> Chain {
    chain_in(&manager.space().unwrap(), seed, n_chunks)
}

/// Holds up reads of a tier while it is shut.
#[derive(Debug, Default)]
struct Gate {
    is_shut: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn set_shut(&self, is_shut: bool) {
        *self.is_shut.lock() = is_shut;
        self.changed.notify_all();
    }
}

impl Clock for Gate {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn pause(&self, _: Duration) {
        let mut is_shut = self.is_shut.lock();
        while *is_shut {
            self.changed.wait(&mut is_shut);
        }
    }
}

/// A store with a disk behind a gate, of which each of two threads reads one chunk at a time.
fn gated_store(folder: &Path) -> (Store, Arc<Gate>) {
    let gate = Arc::<Gate>::default();
    let rates = FaultRates { delay: 1000, max_delay: Duration::from_secs(1), ..FaultRates::default() };
    let disk = NvmeTier::open(&NvmeOptions::new(folder, 64 << 20)).unwrap();
    let disk = Faulty::with_clock(disk, rates, 1, Arc::clone(&gate) as _);
    let ram = RamTier::new(Arena::new(ArenaOptions::new(16 << 20)).unwrap());
    let options = StoreOptions { batch_bytes: CHUNK_BYTES as u64, n_read_threads: 2, ..store_options() };
    let store = Store::builder(options, ram).local(Arc::new(Checksummed::new(disk))).open().unwrap();
    (store, gate)
}

#[test]
fn lookups_moves_pins_and_clears_do_what_they_do_in_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_with(gated_store(folder.path()).0);
    let client = daemon.attach();
    assert_eq!(store(&client, 1, 5).unwrap(), 5);
    assert!(daemon.store.flush(Duration::from_secs(30)));
    let manager = manager(&daemon);
    let names = chain_of(&manager, 1, 7);
    let in_tier = |tier: TierKind| vec![(TierName::from(tier), 5 * CHUNK_TOKENS)];
    let found = manager.lookup(&names, false).unwrap();
    assert_eq!((found.n_chunks, found.n_tokens), (5, 5 * CHUNK_TOKENS));
    assert_eq!(found.tokens_by_tier, in_tier(TierKind::Ram));
    // Chunks on the disk are there; those of memory leave it, and come back.
    assert_eq!(manager.relocate(&names, TierKind::Ram, TierKind::Nvme, false).unwrap(), 5);
    assert_eq!(manager.lookup(&names, true).unwrap().tokens_by_tier, in_tier(TierKind::Nvme));
    assert_eq!(manager.relocate(&names, TierKind::Nvme, TierKind::Ram, true).unwrap(), 5);
    assert_eq!(manager.relocate(&names, TierKind::Redis, TierKind::Ram, true).unwrap(), 0, "no such tier");
    assert_eq!(manager.lookup(&names, true).unwrap().tokens_by_tier, in_tier(TierKind::Ram));
    assert_eq!(verify(&client, 1, 5).unwrap(), 5);
    assert_eq!(manager.pin(&names).unwrap(), 5 * CHUNK_TOKENS);
    assert_eq!(daemon.store.n_pins(), 1);
    assert!(manager.unpin(&names).unwrap() && !manager.unpin(&names).unwrap());
    assert_eq!(manager.pin_for(&names, Duration::from_hours(1)).unwrap(), 5 * CHUNK_TOKENS);
    assert_eq!(manager.pin_for(&names, Duration::ZERO).unwrap(), 5 * CHUNK_TOKENS);
    assert_eq!(daemon.store.n_pins(), 1, "one has ended");
    assert!(manager.unpin(&names).unwrap() && !manager.unpin(&names).unwrap());
    let cleared = manager.clear(Some(&names), Some(vec![TierKind::Ram.into()])).unwrap();
    assert_eq!(cleared, [(TierKind::Ram.into(), 5)]);
    assert_eq!(manager.lookup(&names, false).unwrap().tokens_by_tier, in_tier(TierKind::Nvme));
    assert_eq!(manager.clear(None, None).unwrap(), [(TierKind::Ram.into(), 0), (TierKind::Nvme.into(), 5)]);
    assert_eq!(verify(&client, 1, 5).unwrap(), 0);
    // Of nothing there is nothing.
    assert_eq!(manager.lookup(&chain_of(&manager, 1, 0), false).unwrap().n_chunks, 0);
    let stats = manager.stats().unwrap();
    assert_eq!(stats.chunk_tokens, CHUNK_TOKENS);
    assert_eq!(stats.tiers.iter().map(|tier| tier.tier.as_str()).collect::<Vec<_>>(), ["ram", "nvme"]);
    assert_eq!(stats.counts["stored_chunks"], 5);
}

#[test]
fn a_chain_of_many_frames_is_one_chain() {
    const N_CHUNKS: usize = 1100;
    let daemon = Daemon::start(64 << 20);
    let client = daemon.attach();
    assert_eq!(complete(&client, 3, N_CHUNKS).unwrap(), N_CHUNKS);
    let manager = manager(&daemon);
    let names = chain_of(&manager, 3, N_CHUNKS);
    assert_eq!(manager.lookup(&names, false).unwrap().n_chunks, N_CHUNKS);
    assert_eq!(manager.pin(&names).unwrap(), N_CHUNKS * CHUNK_TOKENS);
    assert_eq!(manager.clear(Some(&names), None).unwrap(), [(TierKind::Ram.into(), N_CHUNKS)]);
    let longest = chain_of(&manager, 3, 9000);
    let error = manager.lookup(&longest, false).unwrap_err().to_string();
    assert!(error.contains("`chunks` is 9000"), "{error}");
    assert_eq!(manager.lookup(&names, false).unwrap().n_chunks, 0, "the next call is served");
}

#[test]
fn a_pin_outlives_its_connection_and_survives_what_other_clients_store() {
    let daemon = Daemon::start(1 << 20);
    let (owner, other) = (daemon.attach(), daemon.attach());
    let press = |first: u32| {
        for seed in first..first + 30 {
            store(&other, seed, 5).unwrap();
            other.open(&chain(&other, seed, 5)).unwrap().note_request(None).unwrap();
        }
    };
    assert_eq!(store(&owner, 1, 5).unwrap(), 5);
    let first = manager(&daemon);
    assert_eq!(first.pin(&chain_of(&first, 1, 5)).unwrap(), 5 * CHUNK_TOKENS);
    drop(first);
    press(100);
    assert_eq!(verify(&other, 1, 5).unwrap(), 5);
    let second = manager(&daemon);
    assert!(second.unpin(&chain_of(&second, 1, 5)).unwrap(), "any client of the tenant takes it away");
    press(200);
    assert!(verify(&other, 1, 5).unwrap() < 5, "afterwards they may leave");
}

#[test]
fn a_clear_by_one_client_is_seen_by_others_and_leases_keep_their_bytes() {
    let daemon = Daemon::start(4 << 20);
    let client = daemon.attach();
    let mut of_another_model = daemon.options();
    "another".clone_into(&mut of_another_model.namespace.model);
    let another = NodeClient::attach(&of_another_model).unwrap();
    assert_eq!((store(&client, 1, 3).unwrap(), store(&another, 1, 3).unwrap()), (3, 3));
    let lease = client.open(&chain(&client, 1, 3)).unwrap().retrieve(0).unwrap();
    assert_eq!(manager(&daemon).clear(None, None).unwrap(), [(TierKind::Ram.into(), 3)]);
    assert_eq!(verify(&client, 1, 3).unwrap(), 0);
    assert_eq!(verify(&another, 1, 3).unwrap(), 3, "only what has the client's namespace");
    // Others take all memory that is free.
    for seed in 10..60 {
        store(&client, seed, 5).unwrap();
    }
    let mut bytes = vec![0; CHUNK_BYTES];
    for place in 0..3 {
        lease.copy_out(place, 0, &mut bytes).unwrap();
        assert!(bytes == content(1, place), "chunk {place}");
    }
}

#[test]
fn a_tenant_manages_nothing_of_another() {
    let token = |name: &str| ClientToken::try_new(format!("token of tenant {name}")).unwrap();
    let mut daemon = Daemon::start(4 << 20);
    daemon.server = None;
    let tenant = |name: &str| Tenant {
        name: name.to_owned(),
        token: Some(token(name)),
        store: Daemon::open_store(4 << 20),
    };
    let mut options = NodeOptions::new(daemon.socket.clone(), daemon.store.clone());
    options.tenants = vec![tenant("a"), tenant("b")];
    daemon.server = Some(NodeServer::start(options).unwrap());
    let with = |name: &str| AttachOptions { token: Some(token(name)), ..daemon.options() };
    let a = NodeClient::attach(&with("a")).unwrap();
    assert_eq!(store(&a, 1, 3).unwrap(), 3);
    let of_b = NodeManager::new(with("b"));
    assert_eq!(of_b.lookup(&chain_of(&of_b, 1, 3), false).unwrap().n_chunks, 0);
    assert_eq!(of_b.clear(None, None).unwrap(), [(TierKind::Ram.into(), 0)]);
    let error = of_b.clear(Some(&chain(&a, 1, 3)), None).unwrap_err().to_string();
    assert!(error.contains("another space"), "{error}");
    // Names of the other tenant's chunks, sent by hand, are not found either.
    let connection = attach_raw(&daemon.socket, &with("b"));
    let names = chain(&a, 1, 3);
    let chunks = names.names().iter().copied().zip(names.digests(3)).collect();
    assert_eq!(ask_raw(&connection, &ManageRequest::Chunks(chunks)), Some(ManageAnswer::Done));
    let clear = ManageRequest::Clear { n_tokens: Some(names.n_tokens() as u64), tiers: None };
    assert_eq!(ask_raw(&connection, &clear), Some(ManageAnswer::Cleared(vec![(TierKind::Ram.into(), 0)])));
    assert_eq!(verify(&a, 1, 3).unwrap(), 3);
    for wrong in [daemon.options(), with("c")] {
        let error = NodeManager::new(wrong).stats().unwrap_err().to_string();
        assert!(error.contains("`token`"), "{error}");
    }
}

/// Attaches to manage, with nothing that checks what is sent.
fn attach_raw(socket: &SocketAddress, options: &AttachOptions) -> Connection {
    let AttachOptions { namespace, format, rank, token, .. } = options.clone();
    let token = token.map_or_else(String::new, |_| "token of tenant b".to_owned());
    let attach = Attach { namespace, format, rank, token, purpose: Purpose::Manage };
    let connection = Connection::open(socket).unwrap();
    assert!(connection.send(&attach.encode()).unwrap());
    Attached::decode(&receive_raw(&connection).unwrap()).unwrap();
    connection
}

/// The next frame; `None` where the connection ended.
fn receive_raw(connection: &Connection) -> Option<Vec<u8>> {
    let mut buffer = FrameBuffer::new();
    loop {
        match connection.receive(&mut buffer) {
            Ok(Some(frame)) => return Some(frame.to_vec()),
            Ok(None) => {}
            Err(_) => return None,
        }
        let mut waiting = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
        let deadline = Instant::now() + Duration::from_secs(30);
        assert!(wait_ready(&mut waiting, Some(deadline)).unwrap(), "neither an answer nor an end");
    }
}

fn ask_raw(connection: &Connection, request: &ManageRequest) -> Option<ManageAnswer> {
    assert!(connection.send(&request.encode()).unwrap());
    receive_raw(connection).map(|frame| ManageAnswer::decode(&frame).unwrap())
}

#[test]
fn a_hostile_client_ends_only_its_own_connection() {
    let daemon = Daemon::start(4 << 20);
    let (honest, client) = (manager(&daemon), daemon.attach());
    assert_eq!(store(&client, 1, 3).unwrap(), 3);
    let names = chain_of(&honest, 1, 3);
    let mut frames: Vec<Vec<u8>> = vec![
        b"garbage".to_vec(),
        b"KVIKND04".to_vec(),
        [&b"KVIKND04"[..], &[99]].concat(),
        [&b"KVIKND04"[..], &[0], &[7; 48 * 600]].concat(),
        // Larger than any frame.
        vec![1; 60_000],
        // A list that says that it is longer than it is.
        [&b"KVIKND04"[..], &[8, 0], &[0; 8], &[1, 255, 0]].concat(),
        // Tokens that its chunks do not have.
        ManageRequest::Lookup { n_tokens: u64::MAX, is_local: false }.encode(),
        ManageRequest::Pin { n_tokens: 1 << 62 }.encode(),
        ManageRequest::Clear { n_tokens: Some(31), tiers: None }.encode(),
    ];
    let mut state = 1_u64;
    for n_bytes in 0..60 {
        let random = (0..n_bytes).map(|_| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (state >> 56) as u8
        });
        frames.push([&b"KVIKND04"[..], &[12 + n_bytes as u8], &random.collect::<Vec<u8>>()].concat());
    }
    let n_frames = frames.len() as u64;
    for frame in frames {
        let connection = attach_raw(&daemon.socket, &daemon.options());
        assert!(connection.send(&frame).unwrap());
        let answer = receive_raw(&connection);
        assert_eq!(answer, None, "{:?}", &frame[..frame.len().min(20)]);
        assert_eq!(honest.lookup(&names, false).unwrap().n_chunks, 3);
    }
    // More chunks than a chain may have, in frames that each are right.
    let connection = attach_raw(&daemon.socket, &daemon.options());
    let chunks = ManageRequest::Chunks(vec![(BlockHash([1; 16]), TokenDigest([2; 32])); 512]);
    let n_taken = (0..20).take_while(|_| ask_raw_if_there(&connection, &chunks)).count();
    assert_eq!(n_taken, 16);
    let server = daemon.server.as_ref().unwrap();
    until("all of them ended", || server.stats().n_failed == n_frames + 1);
    assert_eq!(verify(&client, 1, 3).unwrap(), 3);
    // One that asks for numbers that it was not given hears that nothing loads.
    let connection = attach_raw(&daemon.socket, &daemon.options());
    for prefetch in [0, 7, u64::MAX] {
        assert_eq!(ask_raw(&connection, &ManageRequest::Cancel { prefetch }), Some(ManageAnswer::Is(false)));
    }
}

#[test]
fn a_file_that_is_not_in_memory_or_is_missing_ends_the_connection_of_its_client() {
    let daemon = Daemon::start(4 << 20);
    let (honest, client) = (manager(&daemon), daemon.attach());
    assert_eq!(store(&client, 1, 3).unwrap(), 3);
    let names = chain_of(&honest, 1, 3);
    let chunks = names.names().iter().copied().zip(names.digests(3)).collect();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let (n_tokens, tier) = (names.n_tokens() as u64, TierName::from(TierKind::Ram));
    for request in [
        ManageRequest::Read { n_tokens, tier: tier.clone() },
        ManageRequest::Write { n_tokens, tier: tier.clone() },
    ] {
        for descriptors in [vec![], vec![pipe.as_fd()]] {
            let connection = attach_raw(&daemon.socket, &daemon.options());
            let told = ask_raw(&connection, &ManageRequest::Chunks(Vec::clone(&chunks)));
            assert_eq!(told, Some(ManageAnswer::Done));
            assert!(connection.send_with_descriptors(&request.encode(), &descriptors).unwrap());
            assert_eq!(receive_raw(&connection), None, "a pipe would be waited for");
        }
    }
    let payloads = honest.read_from(&names, &tier).unwrap();
    assert!(payloads.iter().enumerate().all(|(place, payload)| *payload == content(1, place)));
    assert_eq!(payloads.len(), 3);
    let wrong = TierName::try_new("tape").unwrap();
    assert!(honest.read_from(&names, &wrong).unwrap_err().to_string().contains("no tier of that name"));
    // What is written with fewer bytes than chunks is stored as far as chunks are whole.
    let longer = chain_of(&honest, 2, 3);
    let (first, second) = (content(2, 0), content(2, 1));
    let written = honest.write_to(&longer, &[vec![&first[..]], vec![&second[..100]]], &tier).unwrap();
    assert_eq!(written, (1, 0));
    assert_eq!(verify(&client, 2, 3).unwrap(), 1);
    let written = honest.write_to(&longer, &[vec![&first[..]], vec![&second[..7], &second[7..]]], &tier);
    assert_eq!(written.unwrap(), (1, 1));
    assert_eq!(verify(&client, 2, 3).unwrap(), 2);
}

fn ask_raw_if_there(connection: &Connection, request: &ManageRequest) -> bool {
    connection.send(&request.encode()).is_ok_and(|is_sent| is_sent) && receive_raw(connection).is_some()
}

#[test]
fn a_prefetch_loads_and_is_ended_by_a_cancel_or_with_its_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (disk_store, gate) = gated_store(folder.path());
    let daemon = Daemon::start_with(disk_store);
    let client = daemon.attach();
    for seed in 1..4 {
        assert_eq!(store(&client, seed, 4).unwrap(), 4);
    }
    assert!(daemon.store.flush(Duration::from_secs(30)));
    let manager = manager(&daemon);
    manager.clear(None, Some(vec![TierKind::Ram.into()])).unwrap();
    assert_eq!(daemon.used_bytes(), 0);
    gate.set_shut(true);
    let names: Vec<Chain> = (1..4).map(|seed| chain_of(&manager, seed, 4)).collect();
    let loads = manager.prefetch(&names[0], None).unwrap();
    assert!(loads.is_loading && manager.is_loading(&loads).unwrap() == Some(true));
    let cancelled = manager.prefetch(&names[1], None).unwrap();
    assert_eq!(manager.cancel(&cancelled).unwrap(), Some(true));
    assert_eq!(manager.cancel(&cancelled).unwrap(), Some(false));
    assert_eq!(manager.is_loading(&cancelled).unwrap(), Some(false));
    let other = NodeManager::new(daemon.options());
    assert!(other.prefetch(&names[2], None).unwrap().is_loading);
    other.close();
    assert!(other.stats().is_err(), "a closed one stays closed");
    let n_managers = || daemon.server.as_ref().unwrap().stats().n_managers;
    until("the daemon has seen its end", || n_managers() == 1);
    gate.set_shut(false);
    until("the prefetch is done", || manager.is_loading(&loads).unwrap() == Some(false));
    let in_memory =
        |names: &Chain| manager.lookup(names, true).unwrap().tokens_in(TierKind::Ram) / CHUNK_TOKENS;
    // The first one held both reading threads until the others had ended.
    assert_eq!(names.iter().map(in_memory).collect::<Vec<_>>(), [4, 0, 0]);
    drop((manager, client));
    daemon.store.clear(&kvik_store::Clear::default());
    until("no lease is left", || daemon.used_bytes() == 0);
}

#[test]
fn tiers_of_one_kind_are_told_apart_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let disk = |name: &str| {
        let tier = NvmeTier::open(&NvmeOptions::new(folder.path().join(name), 64 << 20)).unwrap();
        LowerTier::local(Arc::new(Checksummed::new(tier))).named(TierName::try_new(name).unwrap())
    };
    let ram = RamTier::new(Arena::new(ArenaOptions::new(16 << 20)).unwrap());
    let builder = Store::builder(store_options(), ram).tier(disk("fast")).tier(disk("large"));
    let daemon = Daemon::start_with(builder.open().unwrap());
    let client = daemon.attach();
    assert_eq!(store(&client, 1, 4).unwrap(), 4);
    assert!(daemon.store.flush(Duration::from_secs(30)));
    let manager = manager(&daemon);
    let names = chain_of(&manager, 1, 4);
    let name = |text: &str| TierName::try_new(text).unwrap();
    let cleared = manager.clear(Some(&names), Some(vec![name("ram"), name("fast")])).unwrap();
    assert_eq!(cleared, [(name("ram"), 4), (name("fast"), 4)]);
    let found = manager.lookup(&names, false).unwrap();
    assert_eq!(found.tokens_by_tier, [(name("large"), 4 * CHUNK_TOKENS)]);
    assert_eq!(found.slowest_tier, Some(TierKind::Nvme));
    // One tier alone is read: the first has nothing.
    let from_fast = manager.prefetch(&names, Some(&name("fast"))).unwrap();
    until("the tier was asked", || manager.is_loading(&from_fast).unwrap() == Some(false));
    assert_eq!(manager.lookup(&names, true).unwrap().tokens_in(TierKind::Ram), 0);
    let from_large = manager.prefetch(&names, Some(&name("large"))).unwrap();
    until("the prefetch is done", || manager.is_loading(&from_large).unwrap() == Some(false));
    assert_eq!(manager.lookup(&names, true).unwrap().tokens_in(TierKind::Ram), 4 * CHUNK_TOKENS);
    let error = manager.prefetch(&names, Some(&name("other"))).unwrap_err();
    assert!(matches!(error, NodeError::Refused { .. }), "{error}");
    // The move of one disk to the other leaves nothing behind.
    assert_eq!(manager.relocate(&names, name("large"), name("fast"), false).unwrap(), 4);
    let AttachOptions { namespace, format, .. } = daemon.options();
    let space = daemon.store.space(&namespace, format).unwrap();
    let tiers = daemon.store.tier_names_of(&chain_in(&space, 1, 4), 3);
    assert_eq!(tiers, [name("ram"), name("fast")]);
    assert_eq!(verify(&client, 1, 4).unwrap(), 4);
}

#[test]
fn the_statistics_of_a_store_with_all_its_tiers_have_room_in_a_frame() {
    let folder = tempfile::tempdir().unwrap();
    let ram = RamTier::new(Arena::new(ArenaOptions::new(16 << 20)).unwrap());
    let mut builder = Store::builder(store_options(), ram);
    for number in 1..8 {
        let disk =
            NvmeTier::open(&NvmeOptions::new(folder.path().join(number.to_string()), 64 << 20)).unwrap();
        let name = TierName::try_new(&number.to_string().repeat(32)).unwrap();
        builder = builder.tier(LowerTier::local(Arc::new(Metered::new(disk))).named(name));
    }
    let daemon = Daemon::start_with(builder.open().unwrap());
    assert_eq!(store(&daemon.attach(), 1, 4).unwrap(), 4);
    assert!(daemon.store.flush(Duration::from_secs(30)));
    let stats = manager(&daemon).stats().unwrap();
    assert_eq!(stats.tiers.len(), 8);
    assert!(!stats.tiers[7].operations.is_empty());
}

#[test]
fn a_manager_does_not_hold_up_a_take_over_and_goes_on_with_the_new_daemon() {
    let place = Place::new();
    let opener = Opener::on_disk(place.folder.path());
    let mut server = place.start(&opener);
    let idle = NodeManager::new(place.options());
    let names = chain_of(&idle, 1, 5);
    assert_eq!(complete(&place.attach(), 1, 5).unwrap(), 5);
    assert!(server.tenants()[0].store.flush(Duration::from_secs(30)), "they are on the disk");
    idle.clear(Some(&names), Some(vec![TierKind::Ram.into()])).unwrap();
    for round in 0..3 {
        let prefetch = idle.prefetch(&names, None).unwrap();
        let begin = Instant::now();
        let next = place.take_over(&opener).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(10), "it was waited for");
        drop(std::mem::replace(&mut server, next));
        assert_eq!(idle.is_loading(&prefetch).unwrap(), None, "it ended with its connection");
        assert_eq!(idle.lookup(&names, false).unwrap().n_chunks, 5, "round {round}");
    }
    // Calls without a pause, while daemons take over from each other: none fails, and none is done twice.
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let calling = scope.spawn(|| {
            let mut n_calls = 0_u64;
            while !is_over.load(std::sync::atomic::Ordering::SeqCst) {
                assert_eq!(idle.lookup(&names, false).unwrap().n_chunks, 5);
                assert_eq!(idle.pin(&names).unwrap(), 5 * CHUNK_TOKENS);
                // Pins go over, each with its unpin.
                assert!(idle.unpin(&names).unwrap());
                assert!(!idle.unpin(&names).unwrap());
                n_calls += 1;
            }
            n_calls
        });
        for _ in 0..3 {
            let next = place.take_over(&opener).unwrap();
            drop(std::mem::replace(&mut server, next));
        }
        is_over.store(true, std::sync::atomic::Ordering::SeqCst);
        assert!(calling.join().unwrap() > 0);
    });
    assert_eq!(server.tenants()[0].store.n_pins(), 0);
}

#[test]
fn a_daemon_that_is_gone_is_an_error_and_one_that_is_back_is_asked() {
    let mut daemon = Daemon::start(4 << 20);
    let manager = manager(&daemon);
    assert_eq!(store(&daemon.attach(), 1, 2).unwrap(), 2);
    let names = chain_of(&manager, 1, 2);
    assert_eq!(manager.lookup(&names, false).unwrap().n_chunks, 2);
    let begin_again = |daemon: &Daemon| {
        NodeServer::start(NodeOptions::new(daemon.socket.clone(), daemon.store.clone())).unwrap()
    };
    daemon.server = None;
    daemon.server = Some(begin_again(&daemon));
    assert_eq!(manager.lookup(&names, false).unwrap().n_chunks, 2, "nothing was seen of it");
    daemon.server = None;
    let begin = Instant::now();
    assert!(manager.lookup(&names, false).is_err() && manager.stats().is_err());
    assert!(begin.elapsed() < Duration::from_secs(4), "a daemon that is gone is not waited for");
    daemon.server = Some(begin_again(&daemon));
    assert_eq!(manager.lookup(&names, false).unwrap().n_chunks, 2);
}

#[test]
fn a_daemon_that_does_not_answer_is_given_up_after_the_timeout() {
    let socket = SocketAddress::Abstract(format!("kvik-node-mute-{}", std::process::id()));
    let listener = Listener::open(&socket).unwrap();
    let manager = NodeManager::new(support::attach_options(socket)).with_timeout(Duration::from_millis(200));
    let answer = Attached {
        tenant: String::new(),
        chunk_tokens: BlockSize::try_new(CHUNK_TOKENS).unwrap(),
        stores_tails: false,
        digest_key: None,
        arena_bytes: 1 << 20,
        peer_address: None,
    };
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| manager.stats().unwrap_err());
        let connection = loop {
            if let Some(connection) = listener.accept().unwrap() {
                break connection;
            }
            wait_ready(&mut [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)], None).unwrap();
        };
        assert!(connection.send(&answer.encode()).unwrap());
        let error = asking.join().unwrap();
        assert!(matches!(error, NodeError::Gone { reason: "it does not answer" }), "{error}");
        // A late answer is to no question any more.
        assert!(receive_raw(&connection).is_some(), "the attachment");
        assert!(receive_raw(&connection).is_some(), "the question");
        assert_eq!(receive_raw(&connection), None, "and then its end");
    });
}

#[test]
fn a_survey_gives_what_the_store_has() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_with(gated_store(folder.path()).0);
    let client = daemon.attach();
    for seed in 0..40 {
        assert_eq!(store(&client, seed, 5).unwrap(), 5);
    }
    assert!(daemon.store.flush(Duration::from_secs(30)));
    let manager = manager(&daemon);
    manager.clear(Some(&chain_of(&manager, 7, 5)), Some(vec![TierKind::Ram.into()])).unwrap();
    let mut expected: HashMap<BlockHash, Vec<TierKind>> = HashMap::new();
    let space = daemon.store.space(&daemon.options().namespace, daemon.options().format).unwrap();
    daemon.store.visit_chunks(&space, |hash, tiers| {
        expected.insert(hash, tiers.to_vec());
    });
    assert_eq!(expected.len(), 200);
    assert_eq!(survey(&daemon.options(), client.space()).unwrap(), expected);
}

#[test]
fn a_watch_that_begins_before_the_daemon_learns_its_space_and_everything_it_has() {
    let mut daemon = Daemon::start(1 << 20);
    assert_eq!(store(&daemon.attach(), 1, 5).unwrap(), 5);
    daemon.server = None;
    let (copy, learned) = (Arc::new(Copy::default()), Arc::new(Mutex::new(Vec::new())));
    let (told, held) = (Arc::clone(&learned), Arc::clone(&copy));
    let on_space = move |space: &kvik_store::Space| {
        assert!(held.held.lock().is_empty(), "before anything is told");
        told.lock().push(space.clone());
    };
    let watch = NodeWatch::start_for_first(daemon.options(), on_space, Arc::clone(&copy) as _).unwrap();
    for _ in 0..2 {
        daemon.server =
            Some(NodeServer::start(NodeOptions::new(daemon.socket.clone(), daemon.store.clone())).unwrap());
        until("all was told", || copy.held.lock().len() == 5);
        daemon.server = None;
        until("a daemon that is gone has nothing", || copy.held.lock().is_empty());
    }
    let learned = learned.lock();
    assert_eq!(learned.len(), 1, "once, also over a restart");
    let space = daemon.store.space(&daemon.options().namespace, daemon.options().format).unwrap();
    assert!(learned[0].names_as(&space));
    drop(watch);
}
