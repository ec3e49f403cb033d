//! A daemon that takes over from another one, both in this process.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod support;

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, Listener, wait_ready};
use kvik_node::{
    AttachOptions, ClientToken, NodeClient, NodeError, NodeManager, NodeSession, NodeWatch, TakeOverFrame,
    Tenant, TenantOpener as _, TenantTerms,
};
use kvik_store::{Clear, Commit, DigestKey, KeptMemory, Retention};
use kvik_tier::shared::{SharedWords, checksum};
use kvik_tier::{Arena, ArenaOptions, RamTier, TierKind};
use kvik_types::BlockSize;
use rustix::event::{PollFd, PollFlags};
use support::place::{ARENA_BYTES, Opener, Place, receive, terms, used_bytes};
use support::{CHUNK_BYTES, CHUNK_TOKENS, Copy, N_LAYERS, chain, chain_in, complete, content, until, verify};

#[test]
fn chunks_are_found_after_a_take_over_with_the_same_bytes() {
    let place = Place::new();
    let opener = Opener::on_disk(place.folder.path());
    let old = place.start(&opener);
    let session = NodeSession::start(place.options()).unwrap();
    for seed in 0..20 {
        assert_eq!(session.run(|client| complete(client, seed, 5)), Some(5));
    }
    let used = used_bytes(&old);
    let new = place.take_over(&opener).unwrap();
    until("the old daemon was told", || opener.is_taken_over.load(Ordering::SeqCst));
    assert!(old.tenants().is_empty());
    drop(old);
    assert_eq!(used_bytes(&new), used);
    // The session notices by itself, with no miss between.
    for seed in 0..20 {
        assert_eq!(session.run(|client| verify(client, seed, 5)), Some(5));
        assert_eq!(session.run(|client| complete(client, seed, 7)), Some(7), "chains go on");
        assert_eq!(session.run(|client| verify(client, seed, 7)), Some(7));
    }
    // And once more, from the one that took over.
    let newest = place.take_over(&opener).unwrap();
    drop(new);
    for seed in 0..20 {
        assert_eq!(session.run(|client| verify(client, seed, 7)), Some(7));
    }
    let stats = newest.stats();
    assert_eq!((stats.n_failed, stats.n_corrupt), (0, 0));
    drop(session);
    until("the session ended", || newest.stats().n_sessions == 0);
    for tenant in &*newest.tenants() {
        tenant.store.clear(&Clear::default());
    }
    assert_eq!(used_bytes(&newest), 0);
    let SocketAddress::Path(path) = &place.socket else { unreachable!() };
    assert!(path.try_exists().unwrap());
    drop(newest);
    assert!(!path.try_exists().unwrap(), "the last daemon removes the file of the socket");
}

#[test]
fn a_take_over_waits_for_leases_and_writes_and_begins_nothing_meanwhile() {
    let place = Place::new();
    let opener = Arc::<Opener>::default();
    let old = place.start(&opener);
    let client = place.attach();
    assert_eq!(complete(&client, 1, 3).unwrap(), 3);
    let lease = client.open(&chain(&client, 1, 3)).unwrap().retrieve(0).unwrap();
    let mut layers = client.open(&chain(&client, 1, 3)).unwrap().retrieve_layers(0).unwrap();
    let write = client.open(&chain(&client, 2, 2)).unwrap().write(0, 2).unwrap();
    let new = std::thread::scope(|scope| {
        let taking = scope.spawn(|| place.take_over(&opener).unwrap());
        until("the daemon pauses", || matches!(client.open(&chain(&client, 1, 3)), Err(NodeError::Moving)));
        // What was begun is finished.
        let mut bytes = vec![0; CHUNK_BYTES];
        lease.copy_out(2, 0, &mut bytes).unwrap();
        assert!(bytes == content(1, 2));
        drop(lease);
        let mut section = vec![0; CHUNK_BYTES / N_LAYERS as usize];
        while let Some(layer_idx) = layers.next_layer().unwrap() {
            layers.copy_out(1, &mut section).unwrap();
            assert!(section == content(1, 1)[layer_idx * section.len()..][..section.len()]);
        }
        drop(layers);
        for chunk in 0..2 {
            let bytes = content(2, chunk);
            write.copy_in(chunk, 0, &bytes).unwrap();
            assert!(!taking.is_finished());
            assert_eq!(write.commit(chunk, checksum(&bytes)).unwrap(), Commit::Stored);
        }
        assert!(!client.is_gone());
        drop(write);
        taking.join().unwrap()
    });
    assert!(matches!(client.open(&chain(&client, 1, 3)), Err(NodeError::Moving)));
    drop(old);
    let client = place.attach();
    assert_eq!((verify(&client, 1, 3).unwrap(), verify(&client, 2, 2).unwrap()), (3, 2));
    drop(new);
}

#[test]
fn a_lease_that_is_not_given_back_refuses_the_take_over_and_the_old_daemon_goes_on() {
    let place = Place::new();
    let opener = Arc::<Opener>::default();
    let old = place.start_with(&opener, |options| options.take_over_grace = Duration::from_millis(200));
    let (holder, idle) = (place.attach(), NodeSession::start(place.options()).unwrap());
    assert_eq!(complete(&holder, 1, 3).unwrap(), 3);
    let lease = holder.open(&chain(&holder, 1, 3)).unwrap().retrieve(0).unwrap();
    let error = place.take_over(&opener).unwrap_err().to_string();
    let holds = format!("process {} holds 1", std::process::id());
    assert!(error.contains(&holds), "{error}");
    assert!(!opener.is_taken_over.load(Ordering::SeqCst));
    let mut bytes = vec![0; CHUNK_BYTES];
    lease.copy_out(0, 0, &mut bytes).unwrap();
    assert!(bytes == content(1, 0));
    // The same session goes on, and others are back.
    assert_eq!(verify(&holder, 1, 3).unwrap(), 3);
    assert_eq!(complete(&holder, 2, 3).unwrap(), 3);
    assert_eq!(idle.run(|client| verify(client, 2, 3)), Some(3));
    // With the lease gone it works.
    drop((lease, holder));
    let new = place.take_over(&opener).unwrap();
    drop(old);
    assert_eq!(idle.run(|client| verify(client, 2, 3)), Some(3));
    drop(new);
}

#[test]
fn a_daemon_that_dies_half_way_leaves_the_old_one_serving_with_all_chunks() {
    let place = Place::new();
    let opener = Opener::on_disk(place.folder.path());
    let old = place.start(&opener);
    let session = NodeSession::start(place.options()).unwrap();
    assert_eq!(session.run(|client| complete(client, 1, 5)), Some(5));
    let used = used_bytes(&old);
    let refuse = TakeOverFrame::Refused { reason: "changed its mind".to_owned() }.encode();
    for step in 0..6_u32 {
        let connection = place.ask();
        if step > 0 {
            let (frame, descriptors) = receive(&connection);
            assert_eq!((frame, descriptors.len()), (TakeOverFrame::Tenant { name: String::new() }, 2));
        }
        if step > 1 {
            let (frame, descriptors) = receive(&connection);
            assert_eq!((frame, descriptors.len()), (TakeOverFrame::Listener, 1));
        }
        match step {
            3 => assert!(connection.send(&refuse).unwrap()),
            4 => assert!(connection.send(b"garbage").unwrap()),
            5 => assert!(connection.send(&TakeOverFrame::Listener.encode()).unwrap()),
            _ => {}
        }
        drop(connection);
        // The call waits for the pause to end, if it has begun.
        assert_eq!(session.run(|client| verify(client, 1, 5)), Some(5), "step {step}");
        let seed = 10 + step;
        assert_eq!(session.run(|client| complete(client, seed, 2)), Some(2), "step {step}");
        until("the tenants are served again", || !old.tenants().is_empty());
    }
    assert!(!opener.is_taken_over.load(Ordering::SeqCst));
    assert!(used_bytes(&old) > used);
    // The disk is there too.
    for tenant in &*old.tenants() {
        assert!(tenant.store.flush(Duration::from_secs(30)));
        tenant.store.clear(&Clear { tiers: Some(vec![TierKind::Ram.into()]), ..Clear::default() });
    }
    assert_eq!(session.run(|client| verify(client, 1, 5)), Some(5));
    let new = place.take_over(&opener).unwrap();
    drop(old);
    assert_eq!(session.run(|client| verify(client, 15, 2)), Some(2));
    drop(new);
}

#[test]
fn a_daemon_that_is_slow_to_serve_either_serves_or_is_told_that_it_does_not() {
    const TIMEOUT: Duration = Duration::from_millis(40);
    let place = Place::new();
    let (mut n_taken, mut n_refused) = (0, 0);
    for round in 0..40_u32 {
        let opener = Arc::<Opener>::default();
        let old = place.start_with(&opener, |options| options.successor_timeout = TIMEOUT);
        assert_eq!(complete(&place.attach(), 1, 2).unwrap(), 2);
        let connection = place.ask();
        while receive(&connection).0 != TakeOverFrame::Listener {}
        // From the start to twice the time that the old daemon waits.
        let at = Instant::now() + TIMEOUT / 20 * round;
        while Instant::now() < at {
            std::hint::spin_loop();
        }
        if connection.send(&TakeOverFrame::Serving.encode()).is_ok_and(|is_sent| is_sent) {
            until("the old daemon ends", || opener.is_taken_over.load(Ordering::SeqCst));
            assert!(old.tenants().is_empty());
            n_taken += 1;
            // The daemon that serves in this round is gone.
            drop((old, connection));
            let SocketAddress::Path(path) = &place.socket else { unreachable!() };
            std::fs::remove_file(path).unwrap();
        } else {
            assert_eq!(verify(&place.attach(), 1, 2).unwrap(), 2, "the old daemon serves");
            assert!(!opener.is_taken_over.load(Ordering::SeqCst));
            n_refused += 1;
        }
    }
    assert!(n_taken > 0 && n_refused > 0, "{n_taken} {n_refused}");
}

#[test]
fn a_daemon_that_cannot_open_its_tiers_leaves_the_old_one_serving() {
    let place = Place::new();
    let (opener, broken) = (Opener::on_disk(place.folder.path()), Arc::<Opener>::default());
    let old = place.start(&opener);
    let session = NodeSession::start(place.options()).unwrap();
    assert_eq!(session.run(|client| complete(client, 1, 5)), Some(5));
    let manager = NodeManager::new(place.options());
    let pinned = chain_in(&manager.space().unwrap(), 1, 5);
    assert_eq!(manager.pin(&pinned).unwrap(), 5 * CHUNK_TOKENS);
    broken.is_failing.store(true, Ordering::SeqCst);
    let error = place.take_over(&broken).unwrap_err().to_string();
    assert!(error.contains("told to fail"), "{error}");
    assert_eq!(session.run(|client| verify(client, 1, 5)), Some(5));
    // It lets go of the disk, and finds it again.
    let client = place.attach();
    assert_eq!(complete(&client, 2, 5).unwrap(), 5);
    assert!(manager.unpin(&pinned).unwrap(), "its pins are as they were");
    drop((client, old));
}

#[test]
fn times_of_chunks_go_on_after_a_take_over() {
    let place = Place::new();
    let opener = Opener::on_disk(place.folder.path());
    let old = place.start(&opener);
    let client = place.attach();
    let short = Duration::from_secs(1);
    for (seed, time) in [(1, short), (2, Duration::from_hours(1))] {
        let retention = Retention { time_to_live: Some(time), ..Retention::default() };
        let opened = client.open(&chain(&client, seed, 3)).unwrap();
        let mut write = opened.write_kept(0, 3, retention).unwrap();
        for chunk_idx in 0..3 {
            write.write_chunk(chunk_idx, &content(seed, chunk_idx)).unwrap();
        }
        assert_eq!(write.finish().unwrap(), [Some(Commit::Stored); 3]);
    }
    drop(client);
    let new = place.take_over(&opener).unwrap();
    drop(old);
    let client = place.attach();
    until("the time is over", || verify(&client, 1, 3).unwrap() == 0);
    assert_eq!(verify(&client, 2, 3).unwrap(), 3);
    drop((client, new));
}

#[test]
fn settings_that_differ_are_refused_by_their_name_without_a_pause() {
    let place = Place::new();
    let opener = Arc::<Opener>::default();
    let token = "a token of sixteen bytes or more";
    let old = place.start_with(&opener, |options| {
        options.tenants[0].token = Some(ClientToken::try_new(token).unwrap());
    });
    let with_token = || TenantTerms { token: token.to_owned(), ..terms() };
    let options = AttachOptions { token: Some(ClientToken::try_new(token).unwrap()), ..place.options() };
    let client = NodeClient::attach(&options).unwrap();
    assert_eq!(complete(&client, 1, 2).unwrap(), 2);
    let lease = client.open(&chain(&client, 1, 2)).unwrap().retrieve(0).unwrap();
    for (field, wrong) in [
        ("`tenants` is 2", vec![with_token(), TenantTerms { name: "b".to_owned(), ..with_token() }]),
        ("`tenant` is b", vec![TenantTerms { name: "b".to_owned(), ..with_token() }]),
        ("`token of a tenant`", vec![terms()]),
        (
            "`token of a tenant`",
            vec![TenantTerms { token: "another token of 16 bytes".to_owned(), ..terms() }],
        ),
        (
            "`chunk_tokens` is 64; allowed: 32",
            vec![TenantTerms { chunk_tokens: BlockSize::try_new(64).unwrap(), ..with_token() }],
        ),
        ("`tails` is true", vec![TenantTerms { stores_tails: true, ..with_token() }]),
        (
            "`digest_key_file`",
            vec![TenantTerms { digest_key: Some(DigestKey::from_secret(b"another")), ..with_token() }],
        ),
        ("`ram` is", vec![TenantTerms { ram_bytes: 2 * ARENA_BYTES, ..with_token() }]),
        ("`ram` is", vec![TenantTerms { ram_bytes: ARENA_BYTES / 2, ..with_token() }]),
    ] {
        let error = place.take_over_with(&opener, wrong).unwrap_err().to_string();
        assert!(error.contains(field) && !error.contains(token), "{field}: {error}");
        assert_eq!(verify(&client, 1, 2).unwrap(), 2, "it was not paused");
    }
    drop((lease, client));
    // Memory that is not named is taken as it is.
    let new = place.take_over_with(&opener, vec![TenantTerms { ram_bytes: 0, ..with_token() }]).unwrap();
    drop(old);
    assert_eq!(verify(&NodeClient::attach(&options).unwrap(), 1, 2).unwrap(), 2);
    assert!(NodeClient::attach(&place.options()).is_err(), "the token still counts");
    drop(new);
}

#[test]
fn a_daemon_that_cannot_be_taken_over_says_so() {
    let place = Place::new();
    let opener = Arc::<Opener>::default();
    let old = place.start_with(&opener, |options| options.opener = None);
    let error = place.take_over(&opener).unwrap_err().to_string();
    assert!(error.contains("cannot open its tiers again"), "{error}");
    drop(old);
    let old = place.start(&opener);
    let kept = old.tenants()[0].store.clone();
    let error = place.take_over(&opener).unwrap_err().to_string();
    assert!(error.contains("another part of the process uses a store"), "{error}");
    assert_eq!(complete(&place.attach(), 1, 2).unwrap(), 2, "it goes on");
    drop((kept, old));
    let error = place.take_over(&opener).unwrap_err().to_string();
    assert!(error.contains("take over from the daemon"), "{error}");
}

#[test]
fn tenants_go_over_each_with_its_own_chunks() {
    let place = Place::new();
    let opener = Arc::<Opener>::default();
    let token = |name: &str| ClientToken::try_new(format!("token of tenant {name}")).unwrap();
    let old = place.start_with(&opener, |options| {
        let tenant = |name: &str| {
            let ram = RamTier::new(Arena::new(ArenaOptions::new(ARENA_BYTES)).unwrap());
            let store = opener.parts(name).unwrap().open(KeptMemory::new(ram)).unwrap();
            Tenant { name: name.to_owned(), token: Some(token(name)), store }
        };
        options.tenants = vec![tenant("a"), tenant("b")];
    });
    let attach =
        |name| NodeClient::attach(&AttachOptions { token: Some(token(name)), ..place.options() }).unwrap();
    assert_eq!(complete(&attach("a"), 1, 4).unwrap(), 4);
    assert_eq!(complete(&attach("b"), 2, 3).unwrap(), 3);
    let terms_of = |name: &str| TenantTerms {
        name: name.to_owned(),
        token: format!("token of tenant {name}"),
        ..terms()
    };
    // The order is the new daemon's.
    let new = place.take_over_with(&opener, vec![terms_of("b"), terms_of("a")]).unwrap();
    drop(old);
    let (a, b) = (attach("a"), attach("b"));
    assert_eq!((verify(&a, 1, 4).unwrap(), verify(&a, 2, 3).unwrap()), (4, 0));
    assert_eq!((verify(&b, 1, 4).unwrap(), verify(&b, 2, 3).unwrap()), (0, 3));
    drop(new);
}

#[test]
fn a_list_that_is_damaged_or_impossible_is_refused() {
    let place = Place::new();
    let opener = Arc::<Opener>::default();
    let listener = Listener::open(&place.socket).unwrap();
    let arena = Arena::new(ArenaOptions::new(ARENA_BYTES)).unwrap();
    // Zeros are no list, and a list of chunks that overlap is none that an arena takes.
    let zeros = || SharedWords::create(64).unwrap().as_fd().try_clone_to_owned().unwrap();
    for (n_lists, reason) in [(1, "list of chunks"), (0, "descriptors")] {
        let list = zeros();
        let error = std::thread::scope(|scope| {
            let taking = scope.spawn(|| place.take_over(&opener).unwrap_err().to_string());
            let connection = loop {
                if let Some(connection) = listener.accept().unwrap() {
                    break connection;
                }
                wait_ready(&mut [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)], None).unwrap();
            };
            let tenant = TakeOverFrame::Tenant { name: String::new() }.encode();
            let descriptors = [arena.as_fd(), list.as_fd()];
            connection.send_with_descriptors(&tenant, &descriptors[..=n_lists]).unwrap();
            let socket = TakeOverFrame::Listener.encode();
            // It may have refused already.
            let _ = connection.send_with_descriptors(&socket, &[listener.as_fd()]);
            taking.join().unwrap()
        });
        assert!(error.contains(reason), "{error}");
    }
    assert!(Connection::open(&place.socket).is_ok(), "the socket is as it was");
}

#[test]
fn a_watch_is_told_only_what_differs_after_a_take_over() {
    let place = Place::new();
    let opener = Arc::<Opener>::default();
    let mut server = place.start(&opener);
    let session = NodeSession::start(place.options()).unwrap();
    let copy = Arc::new(Copy::default());
    let watch = NodeWatch::start(place.options(), session.space().unwrap(), Arc::clone(&copy) as _).unwrap();
    assert_eq!(session.run(|client| complete(client, 1, 8)), Some(8));
    until("all was told", || copy.held.lock().len() == 8);
    for round in 0..3_u32 {
        let new = place.take_over(&opener).unwrap();
        drop(std::mem::replace(&mut server, new));
        assert!(session.space().is_some(), "chains can be made in the pause");
        assert_eq!(session.run(|client| complete(client, 2 + round, 1)), Some(1));
        let expected = 9 + u64::from(round);
        until("the new chunk was told", || copy.held.lock().len() as u64 == expected);
        assert_eq!(copy.n_changes.load(Ordering::SeqCst), expected, "and nothing else");
    }
    drop(server);
    until("a daemon that is gone has nothing", || copy.held.lock().is_empty());
    drop(watch);
}

#[test]
fn without_a_take_over_a_dead_daemon_means_no_wait() {
    let place = Place::new();
    let old = place.start(&Arc::default());
    let session = NodeSession::start(place.options()).unwrap();
    assert_eq!(session.run(|client| complete(client, 1, 1)), Some(1));
    drop(old);
    let begin = Instant::now();
    assert_eq!(session.run(|client| verify(client, 1, 1)), None);
    assert_eq!(session.run(|client| verify(client, 1, 1)), None);
    assert!(session.space().is_none());
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}
