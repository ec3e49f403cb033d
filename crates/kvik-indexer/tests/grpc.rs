//! The gRPC service over a real socket, asked by a client of its own library.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _};
use hyper_util::rt::TokioIo;
use kvik_indexer::grpc::{
    CallGuard, GET_POD_SCORES_PATH, GetPodScoresRequest, GetPodScoresResponse, GrpcLimits, PodScore,
    PodScores, serve,
};
use kvik_indexer::{IndexerError, Result};
use kvik_runtime::http::{TlsServerConfig, tls_acceptor};
use kvik_runtime::shutdown::Shutdown;
use prost::Message as _;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// Scores each pod by the length of the prompt and what it is told to.
#[derive(Default)]
struct FakeIndex {
    is_asked: Notify,
    may_answer: Notify,
}

impl PodScores for FakeIndex {
    fn scores<'a>(
        &'a self,
        prompt: &'a str,
        model: &'a str,
        pods: &'a [String],
    ) -> BoxFuture<'a, Result<Vec<PodScore>>> {
        let scores = async move {
            match model {
                "slow" => {
                    self.is_asked.notify_one();
                    self.may_answer.notified().await;
                }
                "unknown" => {
                    return Err(IndexerError::Invalid {
                        field: "model_name".into(),
                        value: "unknown".into(),
                        allowed: "known".into(),
                    });
                }
                "away" => {
                    return Err(IndexerError::Unavailable {
                        operation: "look up",
                        reason: "no server".into(),
                    });
                }
                _ => {}
            }
            let score = |(at, pod): (usize, &String)| PodScore {
                pod: pod.clone(),
                score: (prompt.len() + at) as f64,
                data_parallel_rank: (at == 1).then_some(1),
            };
            let n_times = if model == "twice" { 2 } else { 1 };
            Ok((0..n_times).flat_map(|_| pods.iter().enumerate().map(score)).collect())
        };
        scores.boxed()
    }
}

/// Admits calls that show the key.
struct Key;

impl CallGuard for Key {
    fn admits(&self, headers: &tonic::codegen::http::HeaderMap) -> bool {
        headers.get("authorization").is_some_and(|value| value == "Bearer key")
    }
}

struct Service {
    address: SocketAddr,
    index: Arc<FakeIndex>,
    shutdown: Shutdown,
    serving: JoinHandle<Result<()>>,
}

impl Service {
    /// Begins a call that is answered when the test says so.
    async fn ask_slow(&self) -> JoinHandle<Result<GetPodScoresResponse, Status>> {
        let mut client = connect(self.address).await;
        let request = request("p", "slow", &["a"]);
        let asking = tokio::spawn(async move { ask(&mut client, GET_POD_SCORES_PATH, request).await });
        self.index.is_asked.notified().await;
        asking
    }
}

async fn start() -> Service {
    start_with(None, GrpcLimits::default()).await
}

async fn start_within(limits: GrpcLimits) -> Service {
    start_with(None, limits).await
}

async fn start_with(tls: Option<TlsAcceptor>, limits: GrpcLimits) -> Service {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (index, shutdown) = (Arc::new(FakeIndex::default()), Shutdown::new());
    let (scores, ending) = (Arc::clone(&index), shutdown.clone());
    let serving =
        tokio::spawn(async move { serve(listener, tls, scores, Arc::new(Key), &limits, ending).await });
    Service { address, index, shutdown, serving }
}

async fn connect(address: SocketAddr) -> Grpc<Channel> {
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    Grpc::new(channel).max_decoding_message_size(usize::MAX)
}

async fn ask(
    client: &mut Grpc<Channel>,
    path: &'static str,
    request: GetPodScoresRequest,
) -> Result<GetPodScoresResponse, Status> {
    client.ready().await.unwrap();
    let codec = ProstCodec::<GetPodScoresRequest, GetPodScoresResponse>::default();
    let path = tonic::codegen::http::uri::PathAndQuery::from_static(path);
    let mut request = Request::new(request);
    request.metadata_mut().insert("authorization", "Bearer key".parse().unwrap());
    client.unary(request, path, codec).await.map(tonic::Response::into_inner)
}

fn request(prompt: &str, model: &str, pods: &[&str]) -> GetPodScoresRequest {
    let pod_identifiers = pods.iter().map(|pod| (*pod).to_owned()).collect();
    GetPodScoresRequest { prompt: prompt.into(), model_name: model.into(), pod_identifiers }
}

#[tokio::test]
async fn scores_come_highest_first() {
    let service = start().await;
    let mut client = connect(service.address).await;
    let answer = ask(&mut client, GET_POD_SCORES_PATH, request("four", "m", &["a", "b"])).await.unwrap();
    let a = PodScore { pod: "a".into(), score: 4.0, data_parallel_rank: None };
    let b = PodScore { pod: "b".into(), score: 5.0, data_parallel_rank: Some(1) };
    assert_eq!(answer.scores, [b, a]);
    let none = ask(&mut client, GET_POD_SCORES_PATH, request("", "m", &[])).await.unwrap();
    assert!(none.scores.is_empty());
}

#[tokio::test]
async fn errors_are_statuses_that_say_what_to_do() {
    let service = start().await;
    let mut client = connect(service.address).await;
    for (model, code, words) in [
        ("", Code::InvalidArgument, "`model_name` is empty"),
        ("unknown", Code::InvalidArgument, "`model_name` is unknown; allowed: known"),
        ("away", Code::Unavailable, "look up: no server"),
    ] {
        let status = ask(&mut client, GET_POD_SCORES_PATH, request("p", model, &["a"])).await.unwrap_err();
        assert_eq!(status.code(), code);
        assert!(status.message().contains(words), "{status}");
    }
    let status =
        ask(&mut client, "/indexer.v1.IndexerService/Other", request("p", "m", &[])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

#[tokio::test]
async fn a_call_without_a_key_is_refused() {
    let service = start().await;
    let mut client = connect(service.address).await;
    for path in [GET_POD_SCORES_PATH, "/indexer.v1.IndexerService/Other"] {
        client.ready().await.unwrap();
        let codec = ProstCodec::<GetPodScoresRequest, GetPodScoresResponse>::default();
        let path = tonic::codegen::http::uri::PathAndQuery::from_static(path);
        let mut call = Request::new(request("p", "m", &["a"]));
        call.metadata_mut().insert("authorization", "Bearer other".parse().unwrap());
        let status = client.unary(call, path, codec).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(!status.message().contains("other"), "{status}");
    }
}

#[tokio::test]
async fn calls_over_tls_are_served_and_plain_ones_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let certified = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.path().join("certificate.pem"), folder.path().join("key.pem"));
    std::fs::write(&certificate, certified.cert.pem()).unwrap();
    std::fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    let files =
        TlsServerConfig { certificate: Some(certificate), key: Some(key), ..TlsServerConfig::default() };
    let service = start_with(tls_acceptor(&files).unwrap(), GrpcLimits::default()).await;

    let mut roots = RootCertStore::empty();
    roots.add(certified.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let (connector, address) = (TlsConnector::from(Arc::new(config)), service.address);
    let connect_tls = tower::service_fn(move |_| {
        let connector = connector.clone();
        async move {
            let name = ServerName::try_from("localhost").unwrap();
            let stream = connector.connect(name, TcpStream::connect(address).await?).await?;
            std::io::Result::Ok(TokioIo::new(stream))
        }
    });
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut client = Grpc::new(endpoint.connect_with_connector(connect_tls).await.unwrap());
    let answer = ask(&mut client, GET_POD_SCORES_PATH, request("four", "m", &["a"])).await.unwrap();
    let a = PodScore { pod: "a".into(), score: 4.0, data_parallel_rank: None };
    assert_eq!(answer.scores, [a]);

    let mut plain = Grpc::new(endpoint.connect_lazy());
    let codec = ProstCodec::<GetPodScoresRequest, GetPodScoresResponse>::default();
    let path = tonic::codegen::http::uri::PathAndQuery::from_static(GET_POD_SCORES_PATH);
    let refused = match plain.ready().await {
        Ok(()) => plain.unary(Request::new(request("p", "m", &["a"])), path, codec).await.is_err(),
        Err(_) => true,
    };
    assert!(refused);
}

#[tokio::test]
async fn calls_beyond_the_bound_are_refused_and_fit_again_when_others_end() {
    const N_CALLS: usize = 3;
    let service = start_within(GrpcLimits { max_calls: N_CALLS as u64, ..GrpcLimits::default() }).await;
    let mut running = Vec::new();
    for _ in 0..N_CALLS {
        running.push(service.ask_slow().await);
    }
    let mut client = connect(service.address).await;
    let status = ask(&mut client, GET_POD_SCORES_PATH, request("p", "m", &["a"])).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    // All of them wait by now, so each is woken once.
    (0..N_CALLS).for_each(|_| service.index.may_answer.notify_one());
    for call in running {
        call.await.unwrap().unwrap();
    }
    assert!(ask(&mut client, GET_POD_SCORES_PATH, request("p", "m", &["a"])).await.is_ok());
}

#[tokio::test]
async fn messages_are_bounded_in_both_directions() {
    const MAX_MESSAGE_BYTES: usize = 100_000;
    let max_message_bytes = MAX_MESSAGE_BYTES as u64;
    let service = start_within(GrpcLimits { max_message_bytes, ..GrpcLimits::default() }).await;
    let mut client = connect(service.address).await;
    let fits = "p".repeat(MAX_MESSAGE_BYTES - 100);
    assert!(ask(&mut client, GET_POD_SCORES_PATH, request(&fits, "m", &["a"])).await.is_ok());
    let long = "p".repeat(MAX_MESSAGE_BYTES);
    let status = ask(&mut client, GET_POD_SCORES_PATH, request(&long, "m", &["a"])).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    // Twice the pods that were asked for are too much to answer.
    let name = "p".repeat(MAX_MESSAGE_BYTES / 10);
    let pods = [name.as_str(); 6];
    let status = ask(&mut client, GET_POD_SCORES_PATH, request("p", "twice", &pods)).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    assert!(ask(&mut client, GET_POD_SCORES_PATH, request("p", "m", &["a"])).await.is_ok());
}

#[tokio::test]
async fn a_connection_has_so_many_calls_at_a_time_and_a_call_so_much_time() {
    let limits = GrpcLimits { max_connection_calls: 1, call_ms: 60_000, ..GrpcLimits::default() };
    let service = start_within(limits).await;
    let client = connect(service.address).await;
    let begin = || {
        let mut client = client.clone();
        tokio::spawn(async move { ask(&mut client, GET_POD_SCORES_PATH, request("p", "slow", &["a"])).await })
    };
    let first = begin();
    service.index.is_asked.notified().await;
    let second = begin();
    let is_early = tokio::time::timeout(Duration::from_millis(200), service.index.is_asked.notified()).await;
    assert!(is_early.is_err(), "the second call waits for the first");
    service.index.may_answer.notify_one();
    first.await.unwrap().unwrap();
    service.index.is_asked.notified().await;
    service.index.may_answer.notify_one();
    second.await.unwrap().unwrap();

    let service = start_within(GrpcLimits { call_ms: 50, ..GrpcLimits::default() }).await;
    let status = service.ask_slow().await.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
}

#[tokio::test]
async fn connections_beyond_the_bound_wait_until_another_one_ends() {
    let service = start_within(GrpcLimits { max_connections: 1, ..GrpcLimits::default() }).await;
    let mut first = connect(service.address).await;
    assert!(ask(&mut first, GET_POD_SCORES_PATH, request("p", "m", &["a"])).await.is_ok());
    let address = service.address;
    let mut second = tokio::spawn(async move {
        let mut client = connect(address).await;
        ask(&mut client, GET_POD_SCORES_PATH, request("p", "m", &["a"])).await
    });
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut second).await.is_err(), "it waits");
    drop(first);
    second.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_call_that_runs_is_finished_when_the_service_drains() {
    let service = start().await;
    let asking = service.ask_slow().await;
    service.shutdown.drain();
    tokio::time::timeout(Duration::from_secs(30), async {
        while Endpoint::from_shared(format!("http://{}", service.address)).unwrap().connect().await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    service.index.may_answer.notify_one();
    assert_eq!(asking.await.unwrap().unwrap().scores.len(), 1);
    tokio::time::timeout(Duration::from_secs(30), service.serving).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_call_that_runs_ends_when_the_service_stops() {
    let service = start().await;
    let asking = service.ask_slow().await;
    service.shutdown.stop();
    tokio::time::timeout(Duration::from_secs(30), service.serving).await.unwrap().unwrap().unwrap();
    let answer = tokio::time::timeout(Duration::from_secs(30), asking).await.unwrap().unwrap();
    assert_eq!(answer.unwrap_err().code(), Code::Unavailable);
}

#[test]
fn the_bytes_of_messages_are_those_of_other_clients() {
    let bytes = request("p", "m", &["a", "b"]).encode_to_vec();
    assert_eq!(bytes, b"\x0a\x01p\x12\x01m\x1a\x01a\x1a\x01b");
    let score = PodScore { pod: "a".into(), score: 1.5, data_parallel_rank: Some(0) };
    let bytes = GetPodScoresResponse { scores: vec![score] }.encode_to_vec();
    assert_eq!(bytes, b"\x0a\x0e\x0a\x01a\x11\0\0\0\0\0\0\xf8\x3f\x18\0");
}
