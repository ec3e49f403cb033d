//! A proxy that delivers requests and withholds answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Stands before a server; ends with its value.
pub(crate) struct WithheldAnswers {
    /// The base address of the proxy.
    pub(crate) url: String,
    task: JoinHandle<()>,
}

impl WithheldAnswers {
    /// A proxy of the server at `upstream` that withholds the answers to the first `n_withheld` requests for `path`.
    pub(crate) async fn start(upstream: &str, path: &str, n_withheld: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let upstream = upstream.trim_start_matches("http://").to_owned();
        let needle = format!("POST {path} ");
        let n_left = Arc::new(AtomicUsize::new(n_withheld));
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&upstream).await.unwrap();
                connections.spawn(relay(client, server, needle.clone(), Arc::clone(&n_left)));
            }
        });
        Self { url, task }
    }
}

impl Drop for WithheldAnswers {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Copies in both directions; after a request that is withheld, nothing goes back to the client.
async fn relay(client: TcpStream, server: TcpStream, needle: String, n_left: Arc<AtomicUsize>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (mut request, mut answer) = ([0; 1 << 14], [0; 1 << 14]);
    let mut is_withheld = false;
    loop {
        tokio::select! {
            n_read = from_client.read(&mut request) => {
                let Ok(1..) = n_read else { return };
                let bytes = &request[..n_read.unwrap()];
                if bytes.starts_with(needle.as_bytes()) {
                    let take = |left: usize| left.checked_sub(1);
                    is_withheld |= n_left.try_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok();
                }
                if to_server.write_all(bytes).await.is_err() {
                    return;
                }
            }
            n_read = from_server.read(&mut answer) => {
                let Ok(1..) = n_read else { return };
                if !is_withheld && to_client.write_all(&answer[..n_read.unwrap()]).await.is_err() {
                    return;
                }
            }
        }
    }
}
