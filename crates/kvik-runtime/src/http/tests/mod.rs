use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::routing::get;
use tokio::sync::Notify;

use super::*;

mod limits;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n";
const PATIENCE: Duration = Duration::from_secs(10);

/// A server whose only route waits for `gate`; its address, and its end.
async fn start(
    shutdown: &Shutdown,
    gate: Arc<Notify>,
    n_arrived: Arc<Notify>,
) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let handler = async move |Extension(peer): Extension<SocketAddr>| {
        n_arrived.notify_one();
        gate.notified().await;
        peer.to_string()
    };
    start_with(shutdown, Router::new().route("/", get(handler)), None, ListenLimits::default()).await
}

async fn start_with(
    shutdown: &Shutdown,
    router: Router,
    tls: Option<TlsAcceptor>,
    limits: ListenLimits,
) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let listener = listen("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let shutdown = shutdown.clone();
    let serving = tokio::spawn(async move {
        serve(listener, router, tls, &limits, shutdown.draining(), &shutdown).await;
    });
    (address, serving)
}

async fn send(stream: &TcpStream) {
    stream.writable().await.unwrap();
    assert_eq!(stream.try_write(REQUEST).unwrap(), REQUEST.len());
}

/// Reads until there are `n_bytes`, or until the server closes or resets the connection.
async fn read(stream: &TcpStream, n_bytes: usize) -> String {
    let reading = async {
        let mut read = Vec::new();
        while read.len() < n_bytes {
            stream.readable().await.unwrap();
            let mut buffer = [0; 512];
            match stream.try_read(&mut buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => break,
                Ok(n_read) => read.extend_from_slice(&buffer[..n_read]),
            }
        }
        String::from_utf8(read).unwrap()
    };
    tokio::time::timeout(PATIENCE, reading).await.unwrap()
}

async fn ends(serving: tokio::task::JoinHandle<()>) -> bool {
    tokio::time::timeout(PATIENCE, serving).await.is_ok_and(|ended| ended.is_ok())
}

#[tokio::test]
async fn a_drain_closes_idle_connections_and_finishes_the_request_that_runs() {
    let (shutdown, gate, arrived) = (Shutdown::new(), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (address, serving) = start(&shutdown, Arc::clone(&gate), Arc::clone(&arrived)).await;
    let idle = TcpStream::connect(address).await.unwrap();
    send(&idle).await;
    arrived.notified().await;
    gate.notify_one();
    assert!(read(&idle, 12).await.starts_with("HTTP/1.1 200"));
    let busy = TcpStream::connect(address).await.unwrap();
    send(&busy).await;
    arrived.notified().await;

    shutdown.drain();
    read(&idle, usize::MAX).await;
    assert!(!serving.is_finished());
    gate.notify_one();
    let answer = read(&busy, usize::MAX).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.ends_with(&busy.local_addr().unwrap().to_string()), "{answer}");
    assert!(ends(serving).await);
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_stop_breaks_off_what_runs() {
    let (shutdown, gate, arrived) = (Shutdown::new(), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (address, serving) = start(&shutdown, gate, Arc::clone(&arrived)).await;
    let busy = TcpStream::connect(address).await.unwrap();
    send(&busy).await;
    arrived.notified().await;
    shutdown.stop();
    assert!(ends(serving).await);
    assert_eq!(read(&busy, usize::MAX).await, "");
}

#[tokio::test]
async fn what_is_no_address_is_answered_with_what_one_looks_like() {
    for address in ["999", "localhost", ":8080", "127.0.0.1:99999", ""] {
        let text = crate::error::with_causes(&listen(address).await.unwrap_err());
        assert_eq!(text, format!("listen on {address}: {ADDRESS_RULE}"));
    }
    let taken = listen("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let text = crate::error::with_causes(&listen(&address).await.unwrap_err());
    assert!(text.contains("in use") && !text.contains("allowed"), "{text}");
}
