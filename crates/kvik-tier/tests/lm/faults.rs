//! Servers that die, hang and lie while a tier uses them.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvik_tier::conformance::{content, content_key, get_each_once};
use kvik_tier::{
    GetItem, GetOutcome, LM_MAX_VALUE_BYTES, LM_REQUEST_BYTES, LmForm, LmOptions, LmReply, LmTier,
    PutOutcome, Tier, TierExt as _, TierHealth,
};

use super::open;

/// Timeouts that a test can wait for.
fn impatient() -> LmOptions {
    LmOptions {
        connect_timeout: Duration::from_millis(500),
        response_timeout: Duration::from_millis(300),
        ..LmOptions::default()
    }
}

/// What a call with [`impatient`] timeouts may take on a machine that is busy.
const BOUND: Duration = Duration::from_secs(4);

/// A server on a thread that does with each connection what it is told.
fn serve(answer: impl Fn(TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("lm://{}", listener.local_addr().unwrap());
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let answer = Arc::clone(&answer);
            thread::spawn(move || answer(stream.unwrap()));
        }
    });
    url
}

/// A server that answers every request with these bytes.
fn saying(reply: Vec<u8>) -> String {
    serve(move |mut stream| {
        let mut frame = [0; LM_REQUEST_BYTES];
        while stream.read_exact(&mut frame).is_ok() && stream.write_all(&reply).is_ok() {}
    })
}

fn found(n_bytes: usize) -> LmReply {
    LmReply { is_found: true, n_bytes, form: LmForm::of_bytes(n_bytes) }
}

/// Insists that a read of 1000 bytes does not hit, in time.
fn assert_no_hit(tier: &LmTier) -> GetOutcome {
    let begin = Instant::now();
    let outcome = tier.get_one(content_key(0), &mut [0; 1000]);
    assert!(!outcome.is_hit() && begin.elapsed() < BOUND, "{outcome:?} after {:?}", begin.elapsed());
    outcome
}

#[test]
fn a_server_that_is_not_there_or_hangs_fails_in_time() {
    let closed = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let silent = serve(|stream| {
        let _kept = stream;
        thread::park();
    });
    for url in [format!("lm://{closed}"), silent] {
        let tier = open(&url, &impatient());
        assert!(matches!(assert_no_hit(&tier), GetOutcome::Failed(error) if error.is_transient()));
        let begin = Instant::now();
        assert!(matches!(tier.put_one(content_key(1), &vec![7; 100_000]), PutOutcome::Failed(_)));
        assert!(tier.contains(&[content_key(0)], &mut [false]).is_err());
        assert!(tier.delete(&[content_key(0)]).is_err());
        assert!(begin.elapsed() < 3 * BOUND, "{:?}", begin.elapsed());
        assert!(matches!(tier.stat().health, TierHealth::Down(_)));
    }
}

#[test]
fn replies_that_are_none_are_failures_and_no_memory_is_taken_for_them() {
    for reply in
        [vec![0; 36], vec![0xff; 36], b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n".to_vec()]
    {
        let tier = open(&saying(reply), &impatient());
        assert!(matches!(assert_no_hit(&tier), GetOutcome::Failed(error) if !error.is_transient()));
        assert!(tier.contains(&[content_key(0)], &mut [false]).is_err());
    }
}

#[test]
fn a_value_of_another_length_is_corrupt_however_long_it_is_said_to_be() {
    for n_bytes in [1, 999, 1001, 100_000] {
        let tier = open(&saying([found(n_bytes).encode().to_vec(), vec![7; n_bytes]].concat()), &impatient());
        assert!(matches!(assert_no_hit(&tier), GetOutcome::Corrupt("length")), "{n_bytes}");
        assert!(matches!(assert_no_hit(&tier), GetOutcome::Corrupt("length")), "{n_bytes}, again");
    }
    let tier = open(&saying(found(LM_MAX_VALUE_BYTES).encode().to_vec()), &impatient());
    assert!(matches!(assert_no_hit(&tier), GetOutcome::Corrupt("length")));
}

#[test]
fn a_value_that_stops_in_the_middle_fails_in_time() {
    let tier = open(&saying([found(1000).encode().to_vec(), vec![7; 500]].concat()), &impatient());
    assert!(matches!(assert_no_hit(&tier), GetOutcome::Failed(_)));
}

/// LMCache's server has a length and no bytes for a value that it did not receive whole.
#[test]
fn a_value_without_its_bytes_is_corrupt_and_the_next_ones_are_read() {
    let n_connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&n_connections);
    let url = serve(move |mut stream| {
        counted.fetch_add(1, Ordering::Relaxed);
        let mut frame = [0; LM_REQUEST_BYTES];
        while stream.read_exact(&mut frame).is_ok() {
            let broken = content_key(1).chunk.to_string();
            stream.write_all(&found(1000).encode()).unwrap();
            if String::from_utf8_lossy(&frame).contains(&broken) {
                return;
            }
            stream.write_all(&[7; 1000]).unwrap();
        }
    });
    let tier = open(&url, &impatient());
    let mut buffers = vec![vec![0; 1000]; 3];
    let mut batch: Vec<GetItem<'_>> =
        buffers.iter_mut().zip(0..).map(|(buffer, idx)| GetItem::whole(content_key(idx), buffer)).collect();
    get_each_once(&tier, &mut batch);
    let outcomes: Vec<&GetOutcome> = batch.iter().map(|item| &item.outcome).collect();
    assert!(
        matches!(outcomes[..], [GetOutcome::Hit, GetOutcome::Corrupt("no bytes"), GetOutcome::Hit]),
        "{outcomes:?}"
    );
    assert_eq!(n_connections.load(Ordering::Relaxed), 2);
}

#[test]
fn connections_that_the_server_closed_are_replaced() {
    let url = serve(|mut stream| {
        let mut frame = [0; LM_REQUEST_BYTES];
        stream.read_exact(&mut frame).unwrap();
        stream.write_all(&LmReply::FOUND.encode()).unwrap();
    });
    let tier = open(&url, &impatient());
    for _ in 0..3 {
        let mut present = [false];
        tier.contains(&[content_key(0)], &mut present).unwrap();
        assert!(present[0]);
    }
}

#[test]
fn a_chunk_that_the_server_does_not_keep_is_not_stored() {
    let url = serve(|mut stream| {
        let mut frame = [0; LM_REQUEST_BYTES];
        while stream.read_exact(&mut frame).is_ok() {
            if frame[0] == 1 {
                stream.read_exact(&mut [0; 5000]).unwrap();
            } else {
                stream.write_all(&LmReply::NOT_FOUND.encode()).unwrap();
            }
        }
    });
    let tier = open(&url, &impatient());
    let chunk = content(content_key(0), 5000);
    assert!(matches!(tier.put_one(content_key(0), &chunk), PutOutcome::NoRoom));
    assert!(
        matches!(tier.put_one(content_key(0), &[]), PutOutcome::Failed(_)),
        "a value without bytes is none"
    );
}
