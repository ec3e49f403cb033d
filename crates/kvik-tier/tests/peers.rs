//! Peers over real sockets: those that answer, and those that do not.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_tier::peer::{
    PeerAdmission, PeerSource, PeerTlsFiles, PeerToken, Provided, WantedRange, serve_peer,
};
use kvik_tier::{
    Arena, ArenaOptions, ChunkKey, GetItem, GetOutcome, NamespaceId, PeerAddress, PeerOptions, PeerTier,
    PutItem, PutOutcome, RamTier, Tier as _, TierExt as _, TierHealth, TokenDigest,
};
use kvik_types::BlockHash;
use parking_lot::Mutex;

const CHUNK_BYTES: usize = 700_001;

/// A node that serves chunks; dropping it ends its connections and joins its threads.
struct Node {
    address: PeerAddress,
    n_accepted: Arc<AtomicUsize>,
    is_ending: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

/// The connections of a node, which end with it.
type Streams = Arc<Mutex<Vec<TcpStream>>>;

/// Chunks in memory.
#[derive(Debug)]
struct RamSource(RamTier);

/// What happens to the bytes from a node to its client.
#[derive(Clone, Copy)]
enum Disturbance {
    Flip { at: usize },
    Cut { at: usize },
    Stall { at: usize },
}

impl PeerSource for RamSource {
    fn find(&self, keys: &[ChunkKey]) -> Vec<bool> {
        let mut present = vec![false; keys.len()];
        self.0.contains(keys, &mut present).unwrap();
        present
    }

    fn read(&self, wanted: &WantedRange) -> Provided {
        let Some((lease, digest)) = self.0.lease_with_digest(&wanted.key) else { return Provided::Miss };
        if digest != wanted.digest {
            return Provided::TokenMismatch;
        }
        let end = (wanted.offset + wanted.n_bytes) as usize;
        if wanted.chunk_bytes != 0 && wanted.chunk_bytes != lease.len() as u64 || end > lease.len() {
            return Provided::Miss;
        }
        Provided::Bytes(lease, wanted.offset as usize..end)
    }
}

impl Node {
    fn serving(chunks: &[u8], admission: PeerAdmission) -> Self {
        Self::with_chunks(chunks, CHUNK_BYTES, admission)
    }

    fn with_chunks(chunks: &[u8], n_bytes: usize, admission: PeerAdmission) -> Self {
        let ram = RamTier::new(
            Arena::new(ArenaOptions::new((16 << 20) + chunks.len() as u64 * n_bytes as u64)).unwrap(),
        );
        for number in chunks {
            let parts = [&content_of(*number, n_bytes)[..]];
            let mut batch = [PutItem::new(key(*number), &parts).for_tokens(digest(*number))];
            ram.put(&mut batch);
            assert!(batch[0].outcome.is_present());
        }
        let source: Arc<dyn PeerSource> = Arc::new(RamSource(ram));
        Self::accepting(move |stream, _| {
            let source = Arc::clone(&source);
            let tenant_source = move |tenant: &str| (tenant == "docs").then_some(source);
            // Others hold the connection too, so it is ended here.
            let ending = stream.try_clone().unwrap();
            // An error ends the connection; the client's outcome is what is tested.
            let _ = serve_peer(stream, &admission, tenant_source);
            let _ = ending.shutdown(Shutdown::Both);
        })
    }

    fn new(chunks: &[u8]) -> Self {
        Self::serving(chunks, PeerAdmission::new(token(), None).unwrap())
    }

    /// A way to `node` that disturbs what comes from it.
    fn disturbed(node: &Self, disturbance: Disturbance) -> Self {
        let behind = node.address.clone();
        Self::accepting(move |client, streams| {
            let server = TcpStream::connect((behind.host.as_str(), behind.port)).unwrap();
            streams.lock().push(server.try_clone().unwrap());
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let upward = std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            disturb(server, client, disturbance);
            upward.join().unwrap();
        })
    }

    fn accepting(serve: impl Fn(TcpStream, &Streams) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = PeerAddress { host: "127.0.0.1".to_owned(), port };
        let (kept, is_ending) = (Streams::default(), Arc::new(AtomicBool::new(false)));
        let n_accepted = Arc::<AtomicUsize>::default();
        let (ending, serve, counted) = (Arc::clone(&is_ending), Arc::new(serve), Arc::clone(&n_accepted));
        let accepting = std::thread::spawn(move || {
            let mut serving = Vec::new();
            while let Ok((stream, _)) = listener.accept() {
                if ending.load(Ordering::Acquire) {
                    break;
                }
                counted.fetch_add(1, Ordering::Relaxed);
                kept.lock().push(stream.try_clone().unwrap());
                let (serve, kept) = (Arc::clone(&serve), Arc::clone(&kept));
                serving.push(std::thread::spawn(move || serve(stream, &kept)));
            }
            for stream in kept.lock().iter() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            for thread in serving {
                thread.join().unwrap();
            }
        });
        Self { address, n_accepted, is_ending, accepting: Some(accepting) }
    }
}

/// Passes bytes on and disturbs them at a place.
fn disturb(mut from: TcpStream, mut to: TcpStream, disturbance: Disturbance) {
    let mut n_passed = 0;
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n_bytes) = from.read(&mut buffer)
        && n_bytes > 0
    {
        let mut bytes = &mut buffer[..n_bytes];
        let passing = n_passed..n_passed + n_bytes;
        n_passed += n_bytes;
        match disturbance {
            Disturbance::Flip { at } if passing.contains(&at) => bytes[at - passing.start] ^= 1,
            Disturbance::Cut { at } if passing.contains(&at) => bytes = &mut bytes[..at - passing.start],
            Disturbance::Stall { at } if passing.end > at => {
                // Until the other side gives up.
                let _ = to.read(&mut [0]);
                break;
            }
            _ => {}
        }
        if to.write_all(bytes).is_err() || bytes.len() < n_bytes {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

fn key(number: u8) -> ChunkKey {
    ChunkKey { namespace: NamespaceId(BlockHash([7; 16])), chunk: BlockHash([number; 16]), rank: 3 }
}

fn digest(number: u8) -> TokenDigest {
    TokenDigest([number; 32])
}

fn content(number: u8) -> Vec<u8> {
    content_of(number, CHUNK_BYTES)
}

fn content_of(number: u8, n_bytes: usize) -> Vec<u8> {
    (0..n_bytes)
        .map(|place| (place as u8).wrapping_mul(number | 1).wrapping_add((place >> 8) as u8))
        .collect()
}

fn token() -> PeerToken {
    PeerToken::from_secret(b"a token of peers")
}

fn options() -> PeerOptions {
    PeerOptions {
        tenant: "docs".to_owned(),
        token: token(),
        lookup_timeout: Duration::from_secs(5),
        response_timeout: Duration::from_secs(5),
        ..PeerOptions::default()
    }
}

fn tier_of(nodes: &[&Node], options: PeerOptions) -> PeerTier {
    let tier = PeerTier::open(options).unwrap();
    let addresses: Vec<PeerAddress> = nodes.iter().map(|node| node.address.clone()).collect();
    tier.set_peers(&addresses);
    tier
}

fn present(tier: &PeerTier, numbers: &[u8]) -> Vec<bool> {
    let keys: Vec<ChunkKey> = numbers.iter().map(|number| key(*number)).collect();
    let mut present = vec![false; keys.len()];
    tier.contains(&keys, &mut present).unwrap();
    present
}

fn read(tier: &PeerTier, number: u8, digest: TokenDigest) -> (GetOutcome, Vec<u8>) {
    read_bytes(tier, number, CHUNK_BYTES, digest)
}

fn read_bytes(tier: &PeerTier, number: u8, n_bytes: usize, digest: TokenDigest) -> (GetOutcome, Vec<u8>) {
    let mut buffer = vec![0; n_bytes];
    let mut batch = [GetItem::whole(key(number), &mut buffer).for_tokens(digest)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    (outcome, buffer)
}

fn detail(tier: &PeerTier, name: &str) -> u64 {
    tier.stat().details.into_iter().find(|(other, _)| *other == name).unwrap().1
}

#[test]
fn chunks_of_a_peer_are_found_and_read_whole_and_in_ranges() {
    let node = Node::new(&[1, 2, 3]);
    let tier = tier_of(&[&node], options());
    assert!(matches!(read(&tier, 1, digest(1)).0, GetOutcome::Miss), "nothing is asked before a lookup");
    assert_eq!(present(&tier, &[1, 9, 2, 3]), [true, false, true, true]);
    let (outcome, bytes) = read(&tier, 1, digest(1));
    assert!(outcome.is_hit() && bytes == content(1), "{outcome:?}");
    assert!(matches!(read(&tier, 9, digest(9)).0, GetOutcome::Miss));
    assert!(matches!(read(&tier, 2, digest(8)).0, GetOutcome::TokenMismatch));

    assert_eq!(present(&tier, &[2, 3]), [true, true]);
    let (mut head, mut first, mut second, mut longer) = ([0; 11], vec![0; 1000], vec![0; 4096], vec![0; 10]);
    let mut batch = [
        GetItem::with_head(key(2), &mut head, 5000, &mut first).for_tokens(digest(2)),
        GetItem::range(key(3), (CHUNK_BYTES - 4096) as u64, &mut second).for_tokens(digest(3)),
        GetItem::range(key(3), (CHUNK_BYTES - 9) as u64, &mut longer).for_tokens(digest(3)),
    ];
    tier.get(&mut batch);
    let outcomes: Vec<bool> = batch.iter().map(|item| item.outcome.is_hit()).collect();
    assert_eq!(outcomes, [true, true, false]);
    assert_eq!(head, content(2)[..11]);
    assert_eq!(first, content(2)[5000..6000]);
    assert_eq!(second, content(3)[CHUNK_BYTES - 4096..]);
    assert!(matches!(tier.put_one(key(5), &[1]), PutOutcome::Skipped));
}

/// Bytes of a chunk that is worth all connections.
const LARGE_BYTES: usize = (18 << 20) + 7;

#[test]
fn a_large_chunk_comes_over_several_connections_and_is_whole() {
    let node = Node::with_chunks(&[1, 2], LARGE_BYTES, PeerAdmission::new(token(), None).unwrap());
    let tier = tier_of(&[&node], PeerOptions { n_connections: 3, ..options() });
    for (round, number) in [1, 2, 1, 2, 1].into_iter().enumerate() {
        assert_eq!(present(&tier, &[number]), [true]);
        let (outcome, bytes) = read_bytes(&tier, number, LARGE_BYTES, digest(number));
        assert!(outcome.is_hit() && bytes == content_of(number, LARGE_BYTES), "round {round}: {outcome:?}");
        // One more with each read, up to as many as are allowed.
        assert_eq!(node.n_accepted.load(Ordering::Relaxed), 3.min(2 + round));
    }
    assert_eq!(present(&tier, &[1]), [true]);
    assert!(matches!(read_bytes(&tier, 1, LARGE_BYTES + 1, digest(1)).0, GetOutcome::Miss), "another length");
    assert_eq!(present(&tier, &[1]), [true]);
    assert!(matches!(read_bytes(&tier, 1, LARGE_BYTES, digest(2)).0, GetOutcome::TokenMismatch));
    assert_eq!(present(&tier, &[1, 2]), [true, true]);
    // Several readers beside each other: each has a connection, and what is to spare is shared.
    std::thread::scope(|scope| {
        for number in [1, 2, 1] {
            let tier = &tier;
            scope.spawn(move || {
                let (outcome, bytes) = read_bytes(tier, number, LARGE_BYTES, digest(number));
                assert!(outcome.is_hit() && bytes == content_of(number, LARGE_BYTES), "{outcome:?}");
            });
        }
    });
}

#[test]
fn a_large_chunk_of_which_one_connection_brings_other_bytes_or_ends_is_no_hit() {
    let node = Node::with_chunks(&[1], LARGE_BYTES, PeerAdmission::new(token(), None).unwrap());
    for disturbance in [Disturbance::Flip { at: 5_000_000 }, Disturbance::Cut { at: 5_000_000 }] {
        let behind = Node::disturbed(&node, disturbance);
        let tier = tier_of(&[&behind, &node], options());
        let alone = tier_of(&[&behind], options());
        for _ in 0..2 {
            assert_eq!(present(&alone, &[1]), [true]);
            let (outcome, _) = read_bytes(&alone, 1, LARGE_BYTES, digest(1));
            assert!(!outcome.is_hit(), "{outcome:?}");
        }
        assert_eq!(detail(&alone, "avoided_peers"), 1, "two reads that failed, however many connections had");
        for _ in 0..4 {
            assert_eq!(present(&tier, &[1]), [true]);
            let (outcome, bytes) = read_bytes(&tier, 1, LARGE_BYTES, digest(1));
            assert!(outcome.is_hit() && bytes == content_of(1, LARGE_BYTES), "{outcome:?}");
        }
    }
}

#[test]
fn a_peer_and_a_client_with_other_tokens_or_tenants_have_nothing_for_each_other() {
    let node = Node::new(&[1]);
    let stranger = PeerOptions { token: PeerToken::from_secret(b"another token"), ..options() };
    let other_tenant = PeerOptions { tenant: "mail".to_owned(), ..options() };
    for options in [stranger, other_tenant] {
        let tier = tier_of(&[&node], options);
        assert_eq!(present(&tier, &[1]), [false]);
        assert_eq!(detail(&tier, "failures"), 1);
    }
    assert_eq!(present(&tier_of(&[&node], options()), &[1]), [true]);
}

#[test]
fn other_bytes_than_the_peers_are_corrupt_and_another_peer_is_asked() {
    let node = Node::new(&[1]);
    // Behind the greeting, the lookup's answer and some of the chunk.
    let liar = Node::disturbed(&node, Disturbance::Flip { at: 300_000 });
    let alone = tier_of(&[&liar], options());
    assert_eq!(present(&alone, &[1]), [true]);
    assert!(matches!(read(&alone, 1, digest(1)).0, GetOutcome::Corrupt(_)));
    assert_eq!(detail(&alone, "corrupt"), 1);

    let liar = Node::disturbed(&node, Disturbance::Flip { at: 300_000 });
    let tier = tier_of(&[&liar, &node], options());
    for _ in 0..4 {
        assert_eq!(present(&tier, &[1]), [true]);
        let (outcome, bytes) = read(&tier, 1, digest(1));
        assert!(outcome.is_hit() && bytes == content(1), "{outcome:?}");
    }
}

#[test]
fn a_wrong_byte_anywhere_in_an_answer_is_never_a_hit() {
    let node = Node::new(&[1]);
    // The greeting is 64 bytes and one, a lookup's answer one, then come the head, the bytes and the checksum.
    let answer = 66;
    for at in (answer..answer + 32)
        .chain([answer + 32, answer + 32 + CHUNK_BYTES - 1])
        .chain(answer + 32 + CHUNK_BYTES..answer + 40 + CHUNK_BYTES)
    {
        let liar = Node::disturbed(&node, Disturbance::Flip { at });
        let tier =
            tier_of(&[&liar], PeerOptions { response_timeout: Duration::from_millis(200), ..options() });
        assert_eq!(present(&tier, &[1]), [true]);
        let (outcome, _) = read(&tier, 1, digest(1));
        assert!(!outcome.is_hit(), "a flipped bit at {at} went unseen");
    }
}

#[test]
fn a_peer_that_stalls_or_ends_costs_a_bounded_time_and_is_left_alone() {
    let node = Node::new(&[1]);
    for disturbance in [Disturbance::Stall { at: 300_000 }, Disturbance::Cut { at: 300_000 }] {
        let behind = Node::disturbed(&node, disturbance);
        let quick = PeerOptions { response_timeout: Duration::from_millis(100), ..options() };
        let tier = tier_of(&[&behind], quick);
        assert_eq!(present(&tier, &[1]), [true]);
        let begin = Instant::now();
        assert!(matches!(read(&tier, 1, digest(1)).0, GetOutcome::Failed(_)));
        assert!(begin.elapsed() < Duration::from_secs(3));
        assert_eq!(detail(&tier, "avoided_peers"), 0, "once may happen");
        assert_eq!(present(&tier, &[1]), [true]);
        assert!(matches!(read(&tier, 1, digest(1)).0, GetOutcome::Failed(_)));
        assert_eq!(detail(&tier, "avoided_peers"), 1);
        assert_eq!(present(&tier, &[1]), [false], "it is not asked");
        assert!(matches!(tier.stat().health, TierHealth::Down(_)));
    }
}

#[test]
fn a_peer_that_is_gone_is_a_miss_and_others_are_still_found() {
    let (gone, node) = (Node::new(&[1]), Node::new(&[2]));
    let tier = tier_of(&[&gone, &node], options());
    assert_eq!(present(&tier, &[1, 2]), [true, true]);
    drop(gone);
    assert!(!read(&tier, 1, digest(1)).0.is_hit());
    for _ in 0..3 {
        assert_eq!(present(&tier, &[1, 2]), [false, true]);
    }
    assert!(read(&tier, 2, digest(2)).0.is_hit());
    tier.set_peers(&[]);
    assert_eq!(present(&tier, &[1, 2]), [false, false]);
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let node = Node::new(&[1]);
    let tier = tier_of(&[&node], options());
    for garbage in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 4096], b"KVIKPR01"] {
        let mut stream = TcpStream::connect((node.address.host.as_str(), node.address.port)).unwrap();
        // The node may end it before all is written.
        let _ = stream.write_all(garbage);
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
        assert_eq!(present(&tier, &[1]), [true]);
    }
}

#[test]
fn peers_with_certificates_of_one_authority_trust_each_other_and_others_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let files = |name: &str| write_identity(folder.path(), name);
    let (ours, theirs) = (files("ours"), files("theirs"));
    let node = Node::serving(&[1], PeerAdmission::new(token(), Some(&ours)).unwrap());
    let with = |tls| tier_of(&[&node], PeerOptions { tls, ..options() });
    let tier = with(Some(ours.clone()));
    assert_eq!(present(&tier, &[1]), [true]);
    let (outcome, bytes) = read(&tier, 1, digest(1));
    assert!(outcome.is_hit() && bytes == content(1), "{outcome:?}");
    let mixed = PeerTlsFiles { authorities: ours.authorities.clone(), ..theirs.clone() };
    for tls in [Some(theirs), Some(mixed), None] {
        assert_eq!(present(&with(tls), &[1]), [false]);
    }
    let missing = PeerTlsFiles { key: folder.path().join("none.pem"), ..ours };
    let error = PeerTier::open(PeerOptions { tls: Some(missing), ..options() }).unwrap_err();
    assert!(error.to_string().contains("none.pem"), "{error}");
}

/// An authority and a certificate that it signed for this machine.
fn write_identity(folder: &std::path::Path, name: &str) -> PeerTlsFiles {
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = parameters.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::new(parameters, authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let parameters = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = parameters.signed_by(&key, &issuer).unwrap();
    let write = |file: &str, content: String| {
        let path = folder.join(format!("{name}-{file}.pem"));
        std::fs::write(&path, content).unwrap();
        path
    };
    PeerTlsFiles {
        authorities: write("authority", authority.pem()),
        certificate: write("certificate", certificate.pem()),
        key: write("key", key.serialize_pem()),
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Release);
        // It wakes the accepting thread, which ends the connections.
        let woken = TcpStream::connect((self.address.host.as_str(), self.address.port));
        if woken.is_ok()
            && let Some(accepting) = self.accepting.take()
        {
            accepting.join().unwrap();
        }
    }
}
