//! An engine that is healthy and lists its model: a picker asks nothing else of it.

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

pub(crate) const MODEL: &str = "m";

/// A running engine; gone when dropped.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Engine {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { address, serving: tokio::spawn(serve(listener)) }
    }

    pub(crate) async fn start_many(n_engines: usize) -> Vec<Self> {
        let mut engines = Vec::new();
        for _ in 0..n_engines {
            engines.push(Self::start().await);
        }
        engines
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn endpoint(&self) -> String {
        self.address.to_string()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(listener: TcpListener) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(answer)));
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let body = match request.uri().path() {
        "/v1/models" => format!(r#"{{"object":"list","data":[{{"id":"{MODEL}"}}]}}"#),
        _ => "{}".to_owned(),
    };
    Ok(Response::new(Full::from(body)))
}
