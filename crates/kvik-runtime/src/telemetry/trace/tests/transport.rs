//! Spans on their way to collectors that speak TLS and gRPC.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;

use http::{HeaderValue, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_http::HttpClient as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::super::config::GRPC_PATH;
use super::*;
use crate::tls::TlsClientFiles;

/// The header that a collector of these tests asks for, as the configuration has it.
const HEADERS: &str = "authorization=Bearer%20abc, x-scope=main";

/// A certificate for `localhost`, which is its own authority, with its key.
struct Certificate {
    chain_pem: String,
    key_pem: String,
}

impl Certificate {
    fn new() -> Self {
        let signed = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        Self { chain_pem: signed.cert.pem(), key_pem: signed.signing_key.serialize_pem() }
    }

    /// What accepts connections of clients that speak `protocol`.
    fn acceptor(&self, protocol: &[u8]) -> TlsAcceptor {
        let chain = CertificateDer::pem_slice_iter(self.chain_pem.as_bytes()).map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ServerConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let mut config = builder.with_single_cert(chain, key).unwrap();
        config.alpn_protocols = vec![protocol.to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }

    /// Writes the authority into `folder`; returns the TLS settings of a client that trusts it.
    fn trusted(&self, folder: &Path) -> TlsClientFiles {
        let path = folder.join("authority.pem");
        std::fs::write(&path, &self.chain_pem).unwrap();
        TlsClientFiles { authorities: Some(path), ..TlsClientFiles::default() }
    }
}

/// Answers a call of gRPC, with `status` as its outcome.
async fn answer_call(
    request: http::Request<Incoming>,
    collected: Collected,
    status: &'static str,
) -> Result<Response<impl http_body::Body<Data = Bytes, Error = Infallible>>, Infallible> {
    assert_eq!(request.uri().path(), GRPC_PATH);
    assert_eq!(request.headers()["content-type"], "application/grpc");
    assert_eq!(request.headers()["te"], "trailers");
    assert_eq!(request.headers()["authorization"], "Bearer abc");
    assert_eq!(request.headers()["x-scope"], "main");
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let length: [u8; 4] = body[1..5].try_into().unwrap();
    assert_eq!((body[0], u32::from_be_bytes(length) as usize), (0, body.len() - 5));
    collected.take(body.slice(5..));
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static(status));
    let empty_message = Bytes::from_static(&[0; 5]);
    Ok(Response::new(Full::new(empty_message).with_trailers(async move { Some(Ok(trailers)) })))
}

/// Starts a collector that takes gRPC; returns its address and what it gets.
async fn start_grpc_collector(
    acceptor: Option<TlsAcceptor>,
    status: &'static str,
    shutdown: &Shutdown,
) -> (SocketAddr, Collected) {
    let collected = Collected::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (taken, ending) = (collected.clone(), shutdown.clone());
    shutdown.spawn(async move {
        let serve = async {
            let (stream, _) = listener.accept().await.unwrap();
            let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let service = service_fn(move |request| answer_call(request, taken.clone(), status));
            match acceptor {
                None => server.serve_connection(TokioIo::new(stream), service).await,
                Some(acceptor) => {
                    let stream = acceptor.accept(stream).await.unwrap();
                    server.serve_connection(TokioIo::new(stream), service).await
                }
            }
        };
        tokio::select! {
            served = serve => served.unwrap(),
            () = ending.draining() => {}
        }
    });
    (address, collected)
}

/// Sends one span to the collector of `config`.
async fn send_span(config: &TracingConfig) {
    let shutdown = Shutdown::new();
    let tracer = Tracer::start(config, "test", "one", &shutdown).unwrap();
    drop(tracer.work("rebalance"));
    shutdown.finish().await;
}

fn grpc_config(base: &str) -> TracingConfig {
    TracingConfig { otlp_protocol: OtlpProtocol::Grpc, otlp_headers: Some(HEADERS.into()), ..config(base) }
}

#[tokio::test]
async fn a_collector_takes_spans_over_grpc_with_the_configured_headers() {
    let collector = Shutdown::new();
    let (address, collected) = start_grpc_collector(None, "0", &collector).await;
    send_span(&grpc_config(&format!("http://{address}"))).await;
    assert_eq!(collected.named("rebalance").parent_span_id, Vec::<u8>::new());
    collector.finish().await;
}

#[tokio::test]
async fn a_collector_takes_spans_over_grpc_and_tls() {
    let (collector, folder) = (Shutdown::new(), tempfile::tempdir().unwrap());
    let certificate = Certificate::new();
    let (address, collected) = start_grpc_collector(Some(certificate.acceptor(b"h2")), "0", &collector).await;
    let base = format!("https://localhost:{}", address.port());
    send_span(&TracingConfig { tls: certificate.trusted(folder.path()), ..grpc_config(&base) }).await;
    collected.named("rebalance");
    collector.finish().await;
}

#[tokio::test]
async fn a_collector_takes_spans_over_https_if_its_authority_is_trusted() {
    let (collector, folder) = (Shutdown::new(), tempfile::tempdir().unwrap());
    let certificate = Certificate::new();
    let collected = Collected::default();
    let router = Router::new().route(HTTP_PATH, post(collect)).with_state(collected.clone());
    let listener = crate::http::listen("127.0.0.1:0").await.unwrap();
    let base = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let (server, acceptor) = (collector.clone(), certificate.acceptor(b"http/1.1"));
    collector.spawn(async move {
        let limits = crate::http::ListenLimits::default();
        crate::http::serve(listener, router, Some(acceptor), &limits, server.draining(), &server).await;
    });
    // The system does not trust it: the message is lost, and nothing else happens.
    send_span(&config(&base)).await;
    assert_eq!(collected.0.lock().len(), 0);
    send_span(&TracingConfig { tls: certificate.trusted(folder.path()), ..config(&base) }).await;
    collected.named("rebalance");
    collector.finish().await;
}

#[tokio::test]
async fn a_refusal_over_grpc_is_an_error_with_its_status() {
    let collector = Shutdown::new();
    let (address, _) = start_grpc_collector(None, "7", &collector).await;
    let described = grpc_config(&format!("http://{address}")).collector().unwrap().unwrap();
    let request = Request::post(&described.url).body(Bytes::new()).unwrap();
    let client = export::OtlpClient::new(described).unwrap();
    let error = client.send_bytes(request).await.unwrap_err().to_string();
    assert!(error.contains("gRPC status 7"), "{error}");
    collector.finish().await;
}

#[tokio::test]
async fn bad_headers_and_files_are_refused_without_the_values_of_headers() {
    let start = |config: &TracingConfig| {
        Tracer::start(config, "test", "one", &Shutdown::new()).unwrap_err().to_string()
    };
    let base = config("http://127.0.0.1:9");
    for (headers, name) in [("hidden", "without `=`"), ("a b=hidden", "a b"), ("x=hidden%0a", "x")] {
        let message = start(&TracingConfig { otlp_headers: Some(headers.into()), ..base.clone() });
        assert!(message.contains(name) && message.contains("`tracing.otlp_headers`"), "{message}");
        assert!(!message.contains("hidden"), "{message}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.pem");
    std::fs::write(&path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    let tls = TlsClientFiles { authorities: Some(path), ..TlsClientFiles::default() };
    let message = start(&TracingConfig { tls, ..base });
    assert!(message.contains("`tracing.tls.authorities`"), "{message}");
}
