use std::net::SocketAddr;

use futures_util::FutureExt as _;
use http_body_util::BodyExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const CHUNKED_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";

async fn listen() -> (TcpListener, Arc<Links>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let links = links_to(listener.local_addr().unwrap());
    (listener, links)
}

fn links_to(address: SocketAddr) -> Arc<Links> {
    Arc::new(Links::new(&format!("http://{address}/any").parse().unwrap()).unwrap())
}

fn request(links: &Links, body: &'static [u8]) -> Request<Full<Bytes>> {
    Request::post("/path?query")
        .header(http::header::HOST, links.host_header.clone())
        .body(Full::from(body))
        .unwrap()
}

/// Reads a request with a body of `n_bytes` and returns its head.
async fn read_request(stream: &mut TcpStream, n_bytes: usize) -> String {
    let mut read = Vec::new();
    loop {
        let mut byte = [0];
        stream.read_exact(&mut byte).await.unwrap();
        read.push(byte[0]);
        if read.ends_with(b"\r\n\r\n") {
            break;
        }
    }
    stream.read_exact(&mut vec![0; n_bytes]).await.unwrap();
    String::from_utf8(read).unwrap()
}

/// Asks, lets `worker` answer on the connection that comes, and returns the answer.
async fn exchange(
    links: &Arc<Links>,
    listener: &TcpListener,
    answer: &[u8],
) -> (Response<LinkedBody>, TcpStream) {
    let worker = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream, 2).await;
        stream.write_all(answer).await.unwrap();
        stream
    };
    let (response, stream) = tokio::join!(links.request(request(links, b"hi")), worker);
    (response.unwrap(), stream)
}

async fn read(response: Response<LinkedBody>) -> io::Result<Bytes> {
    let reading = response.into_body().collect();
    Ok(tokio::time::timeout(PATIENCE, reading).await.unwrap()?.to_bytes())
}

#[tokio::test]
async fn a_connection_whose_answer_was_read_whole_is_used_again() {
    let (listener, links) = listen().await;
    let (response, mut stream) = exchange(&links, &listener, ANSWER).await;
    assert_eq!(read(response).await.unwrap(), "ok");
    assert_eq!(links.idle.lock().len(), 1);
    for answer in [ANSWER, &[CHUNKED_HEAD, b"2\r\nok\r\n0\r\n\r\n"].concat()] {
        let worker = async {
            let head = read_request(&mut stream, 2).await;
            assert!(head.starts_with("POST /path?query HTTP/1.1\r\nhost: 127.0.0.1:"), "{head}");
            stream.write_all(answer).await.unwrap();
        };
        let (response, ()) = tokio::join!(links.request(request(&links, b"hi")), worker);
        assert_eq!(read(response.unwrap()).await.unwrap(), "ok");
        assert_eq!(links.idle.lock().len(), 1);
    }
}

#[tokio::test]
async fn a_connection_that_the_worker_closed_meanwhile_is_replaced() {
    let (listener, links) = listen().await;
    for _ in 0..3 {
        let (response, stream) = exchange(&links, &listener, ANSWER).await;
        assert_eq!(read(response).await.unwrap(), "ok");
        assert_eq!(links.idle.lock().len(), 1);
        drop(stream);
        // The end must have arrived; a request that crosses it fails like any other.
        let is_open = || links.idle.lock().last_mut().is_some_and(|(link, _)| link.is_idle());
        while is_open() {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_connection_that_the_worker_wants_closed_is_not_kept() {
    let (listener, links) = listen().await;
    let answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok";
    let (response, _stream) = exchange(&links, &listener, answer).await;
    assert_eq!(read(response).await.unwrap(), "ok");
    assert_eq!(links.idle.lock().len(), 0);
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_an_error_and_not_an_end() {
    for begun in [&[CHUNKED_HEAD, b"2\r\nok\r\n"].concat(), &ANSWER[..ANSWER.len() - 1]] {
        let (listener, links) = listen().await;
        let (response, stream) = exchange(&links, &listener, begun).await;
        drop(stream);
        assert!(read(response).await.is_err());
        assert_eq!(links.idle.lock().len(), 0);
    }
}

#[tokio::test]
async fn a_body_that_is_dropped_early_closes_its_connection() {
    let (listener, links) = listen().await;
    let begun = [CHUNKED_HEAD, b"2\r\nok\r\n"].concat();
    let (mut response, mut stream) = exchange(&links, &listener, &begun).await;
    assert_eq!(response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap(), "ok");
    drop(response);
    assert_eq!(links.idle.lock().len(), 0);
    let closed = tokio::time::timeout(PATIENCE, stream.read(&mut [0; 1])).await.unwrap();
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
}

#[tokio::test]
async fn a_request_that_is_given_up_closes_its_connection() {
    let (listener, links) = listen().await;
    let worker = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream, 2).await;
        stream
    };
    let mut stream = tokio::select! {
        _ = links.request(request(&links, b"hi")) => unreachable!("there is no answer"),
        stream = worker => stream,
    };
    let closed = tokio::time::timeout(PATIENCE, stream.read(&mut [0; 1])).await.unwrap();
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
}

#[tokio::test]
async fn chunks_that_came_together_are_there_together() {
    let (listener, links) = listen().await;
    let chunks = b"2\r\nok\r\n".repeat(40);
    let (mut response, _stream) = exchange(&links, &listener, &[CHUNKED_HEAD, &chunks].concat()).await;
    let body = response.body_mut();
    body.frame().await.unwrap().unwrap();
    let mut n_more = 0;
    while let Some(frame) = body.frame().now_or_never() {
        frame.unwrap().unwrap();
        n_more += 1;
    }
    assert_eq!(n_more, 39);
}

#[tokio::test]
async fn a_body_wakes_the_waiter_for_its_next_chunk() {
    let (listener, links) = listen().await;
    let (mut response, mut stream) = exchange(&links, &listener, CHUNKED_HEAD).await;
    let reader = tokio::spawn(async move {
        let mut n_bytes = 0;
        while let Some(frame) = response.body_mut().frame().await {
            n_bytes += frame.unwrap().data_ref().map_or(0, Bytes::len);
        }
        n_bytes
    });
    for _ in 0..200 {
        stream.write_all(b"2\r\nok\r\n").await.unwrap();
        tokio::task::yield_now().await;
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(tokio::time::timeout(PATIENCE, reader).await.unwrap().unwrap(), 400);
    assert_eq!(links.idle.lock().len(), 1);
}

#[tokio::test]
async fn a_worker_that_does_not_listen_is_an_error() {
    let (listener, links) = listen().await;
    drop(listener);
    assert!(links.request(request(&links, b"hi")).await.is_err());
}

#[tokio::test]
async fn connections_that_are_idle_for_long_are_closed() {
    let (listener, links) = listen().await;
    let (response, _stream) = exchange(&links, &listener, ANSWER).await;
    read(response).await.unwrap();
    links.close_idle(Instant::now());
    assert_eq!(links.idle.lock().len(), 1);
    links.close_idle(Instant::now() + MAX_IDLE_TIME);
    assert_eq!(links.idle.lock().len(), 0);
}

#[test]
fn only_plain_http_has_connections_of_its_own() {
    assert!(Links::new(&"https://worker:1/x".parse().unwrap()).is_none());
    let links = Links::new(&"http://[::1]/x".parse().unwrap()).unwrap();
    assert_eq!((links.host.as_str(), links.port), ("::1", 80));
}
