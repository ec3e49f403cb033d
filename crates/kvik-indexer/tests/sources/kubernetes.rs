//! Discovery by `EndpointSlices`.

use std::sync::Arc;

use kvik_indexer::feed::FeedName;
use kvik_indexer::sources::kubernetes::{KubernetesConfig, KubernetesSource, PortRef};
use serde_json::json;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::api_server::{ApiServer, Asked, list, serving, slice};
use crate::peer::{Engine, Peer, quick};
use crate::support::{Call, PATIENCE, Recorder};

fn config(server: &ApiServer) -> KubernetesConfig {
    KubernetesConfig {
        api: server.address(),
        namespace: "serving".to_owned(),
        service: Some("vllm".to_owned()),
        port: PortRef::Name("kv".to_owned()),
        model: Some("llama".to_owned()),
        retry_min_ms: 5,
        retry_max_ms: 50,
        limits: quick(),
        ..KubernetesConfig::default()
    }
}

pub(crate) fn pod(worker: &str) -> FeedName {
    FeedName { model: "llama".to_owned(), worker: worker.to_owned(), rank: 0 }
}

/// Publishes and waits until it has come.
pub(crate) async fn heard(
    peer: &mut Peer<tokio::net::TcpStream>,
    recorder: &Recorder,
    worker: &str,
    sequence: u64,
) {
    peer.publish(sequence).await;
    let name = pod(worker);
    recorder.until("an engine is heard", |recorder| recorder.applied(&name).last() == Some(&sequence)).await;
}

pub(crate) async fn gone(recorder: &Recorder, worker: &str) {
    let name = pod(worker);
    recorder.until("an engine is gone", |recorder| recorder.calls(&name).last() == Some(&Call::Closed)).await;
}

#[tokio::test]
async fn engines_are_heard_from_when_they_serve_until_they_are_gone() {
    let server = ApiServer::bind().await;
    let (first, second) = (Engine::bind().await, Engine::bind().await);
    let recorder = Recorder::default();
    let source = KubernetesSource::start(config(&server), recorder.feeds()).unwrap();

    let asked = server.asked().await;
    let path = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices";
    assert_eq!(
        asked.target,
        format!("{path}?labelSelector=kubernetes%2Eio%2Fservice%2Dname%3Dvllm&limit=500")
    );
    // A token goes nowhere in plain text.
    assert!(!asked.head.to_lowercase().contains("authorization"), "{}", asked.head);
    asked.answer(200, &list(&[slice("s1", "5", "vllm-0", first.port(), &serving())], "7")).await;
    let mut watch = server.watch("7").await;
    let mut engine = first.accept().await;
    heard(&mut engine, &recorder, "vllm-0", 0).await;

    // Found while it starts, heard once it serves.
    let starting = json!({ "ready": false, "serving": false, "terminating": false });
    watch.line("ADDED", &slice("s2", "8", "vllm-1", second.port(), &starting)).await;
    watch.line("MODIFIED", &slice("s2", "9", "vllm-1", second.port(), &serving())).await;
    let mut other = second.accept().await;
    heard(&mut other, &recorder, "vllm-1", 0).await;

    // Not being ready for a while, or ending while it still serves, changes nothing.
    watch.line("MODIFIED", &slice("s2", "10", "vllm-1", second.port(), &starting)).await;
    let ending = json!({ "ready": false, "serving": true, "terminating": true });
    watch.line("MODIFIED", &slice("s1", "11", "vllm-0", first.port(), &ending)).await;
    heard(&mut other, &recorder, "vllm-1", 1).await;
    heard(&mut engine, &recorder, "vllm-0", 1).await;

    let ended = json!({ "ready": false, "serving": false, "terminating": true });
    watch.line("MODIFIED", &slice("s1", "12", "vllm-0", first.port(), &ended)).await;
    gone(&recorder, "vllm-0").await;
    assert_eq!(tokio::time::timeout(PATIENCE, engine.receive()).await.unwrap(), None);
    heard(&mut other, &recorder, "vllm-1", 2).await;

    watch.line("DELETED", &slice("s2", "13", "vllm-1", second.port(), &serving())).await;
    gone(&recorder, "vllm-1").await;
    source.stop().await;
}

#[tokio::test]
async fn an_engine_that_moved_is_another_one() {
    let server = ApiServer::bind().await;
    let (first, second) = (Engine::bind().await, Engine::bind().await);
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server), recorder.feeds()).unwrap();
    server.list(&[slice("s", "5", "vllm-0", first.port(), &serving())], "7").await;
    let mut watch = server.watch("7").await;
    heard(&mut first.accept().await, &recorder, "vllm-0", 0).await;
    watch.line("MODIFIED", &slice("s", "8", "vllm-0", second.port(), &serving())).await;
    let mut engine = second.accept().await;
    assert!(recorder.calls(&pod("vllm-0")).contains(&Call::Closed));
    heard(&mut engine, &recorder, "vllm-0", 0).await;
}

#[tokio::test]
async fn a_watch_that_ends_or_breaks_goes_on_from_the_last_version() {
    let server = ApiServer::bind().await;
    let engine = Engine::bind().await;
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server), recorder.feeds()).unwrap();
    server.list(&[slice("s1", "5", "vllm-0", engine.port(), &serving())], "7").await;
    let mut watch = server.watch("7").await;
    let mut peer = engine.accept().await;
    watch
        .line("BOOKMARK", &json!({ "kind": "EndpointSlice", "metadata": { "resourceVersion": "70" } }))
        .await;
    watch.end().await;
    // A connection that breaks in the middle of a line.
    let mut watch = server.watch("70").await;
    watch.line("MODIFIED", &slice("s1", "71", "vllm-0", engine.port(), &serving())).await;
    watch.raw(b"{\"type\": \"MODI").await.unwrap();
    drop(watch);
    let _watch = server.watch("71").await;
    heard(&mut peer, &recorder, "vllm-0", 0).await;
}

#[tokio::test]
async fn a_version_that_is_gone_asks_for_a_new_list_and_keeps_what_is_still_there() {
    let server = ApiServer::bind().await;
    let (first, second) = (Engine::bind().await, Engine::bind().await);
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server), recorder.feeds()).unwrap();
    let both = [
        slice("s1", "5", "vllm-0", first.port(), &serving()),
        slice("s2", "6", "vllm-1", second.port(), &serving()),
    ];
    server.list(&both, "7").await;
    // Said in the stream.
    let mut watch = server.watch("7").await;
    let (mut stays, mut leaves) = (first.accept().await, second.accept().await);
    heard(&mut stays, &recorder, "vllm-0", 0).await;
    heard(&mut leaves, &recorder, "vllm-1", 0).await;
    watch.line("ERROR", &json!({ "kind": "Status", "code": 410, "reason": "Expired" })).await;
    server.list(&both, "20").await;
    // Said by the status.
    server.asked().await.answer(410, &json!({ "kind": "Status", "code": 410 })).await;
    server.list(&both[..1], "30").await;
    let _watch = server.watch("30").await;
    gone(&recorder, "vllm-1").await;
    heard(&mut stays, &recorder, "vllm-0", 1).await;
}

#[tokio::test]
async fn an_api_server_that_is_away_or_talks_nonsense_changes_nothing() {
    let server = ApiServer::bind().await;
    let engine = Engine::bind().await;
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server), recorder.feeds()).unwrap();
    let slices = [slice("s1", "5", "vllm-0", engine.port(), &serving())];
    server.list(&slices, "7").await;
    let mut watch = server.watch("7").await;
    let mut peer = engine.accept().await;
    heard(&mut peer, &recorder, "vllm-0", 0).await;

    // A line that is no JSON.
    watch.raw(b"\n\xff\xfe{]\n").await.unwrap();
    server.asked().await.answer(503, &json!({ "message": "etcd is away" })).await;
    server.asked().await.answer(403, &json!({ "message": "endpointslices is forbidden" })).await;
    server.asked().await.answer(200, &json!(["no", "list"])).await;
    drop(server.asked().await);
    heard(&mut peer, &recorder, "vllm-0", 1).await;

    // A line without end is left after some megabytes.
    server.list(&slices, "8").await;
    let mut watch = server.watch("8").await;
    let mut n_written = 0;
    while n_written < 64 && watch.raw(&vec![b'x'; 1 << 20]).await.is_ok() {
        n_written += 1;
    }
    assert!(n_written < 64, "{n_written} MiB of one line were taken");
    server.list(&slices, "9").await;
    let _watch = server.watch("9").await;
    heard(&mut peer, &recorder, "vllm-0", 2).await;
}

#[tokio::test]
async fn a_long_list_comes_in_pages() {
    let server = ApiServer::bind().await;
    let (first, second) = (Engine::bind().await, Engine::bind().await);
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server), recorder.feeds()).unwrap();
    let mut page = list(&[slice("s1", "5", "vllm-0", first.port(), &serving())], "7");
    page["metadata"]["continue"] = json!("next page/2");
    server.asked().await.answer(200, &page).await;
    let asked = server.asked().await;
    assert!(asked.target.ends_with("&limit=500&continue=next%20page%2F2"), "{}", asked.target);
    asked.answer(200, &list(&[slice("s2", "6", "vllm-1", second.port(), &serving())], "7")).await;
    heard(&mut first.accept().await, &recorder, "vllm-0", 0).await;
    heard(&mut second.accept().await, &recorder, "vllm-1", 0).await;
}

#[tokio::test]
async fn no_more_engines_are_heard_than_may_be() {
    let server = ApiServer::bind().await;
    let (first, second) = (Engine::bind().await, Engine::bind().await);
    let recorder = Recorder::default();
    let config = KubernetesConfig { max_engines: 1, ..config(&server) };
    let _source = KubernetesSource::start(config, recorder.feeds()).unwrap();
    let both = [
        slice("s1", "5", "vllm-0", first.port(), &serving()),
        slice("s2", "6", "vllm-1", second.port(), &serving()),
    ];
    server.list(&both, "7").await;
    let mut watch = server.watch("7").await;
    heard(&mut first.accept().await, &recorder, "vllm-0", 0).await;
    watch.line("DELETED", &both[0]).await;
    heard(&mut second.accept().await, &recorder, "vllm-1", 0).await;
    assert_eq!(recorder.calls(&pod("vllm-0")).last(), Some(&Call::Closed));
}

#[tokio::test]
async fn ranks_of_an_engine_are_heard_on_ports_of_their_own() {
    let server = ApiServer::bind().await;
    let (first, second) = Engine::bind_pair().await;
    let recorder = Recorder::default();
    let config = KubernetesConfig { n_ranks: 2, ..config(&server) };
    let _source = KubernetesSource::start(config, recorder.feeds()).unwrap();
    server.list(&[slice("s1", "5", "vllm-0", first.port(), &serving())], "7").await;
    heard(&mut first.accept().await, &recorder, "vllm-0", 0).await;
    // A message that does not say its rank.
    let payload = [&[0x92_u8][..], &crate::peer::stored(0)[1..]].concat();
    let mut other = second.accept().await;
    other.send(&[b"kv@any@any", &0_u64.to_be_bytes(), &payload[..payload.len() - 1]]).await;
    recorder.until_applied(&FeedName { rank: 1, ..pod("vllm-0") }, &[0]).await;
}

#[tokio::test]
async fn over_tls_the_authorities_are_checked_and_the_token_is_the_one_in_the_file_now() {
    let server = ApiServer::bind().await;
    let engine = Engine::bind().await;
    let folder = tempfile::tempdir().unwrap();
    let (token_file, ca_file) = (folder.path().join("token"), folder.path().join("ca.crt"));
    let signed = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let stranger = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(&token_file, "first\n").unwrap();
    std::fs::write(&ca_file, stranger.cert.pem()).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(signed.signing_key.serialize_der()));
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![signed.cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let accept = async || {
        let (stream, _) = tokio::time::timeout(PATIENCE, server.listener.accept()).await.unwrap().unwrap();
        acceptor.accept(stream).await
    };

    let config = KubernetesConfig {
        api: format!("https://localhost:{}", server.listener.local_addr().unwrap().port()),
        token_file: token_file.clone(),
        ca_file: ca_file.clone(),
        ..config(&server)
    };
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config, recorder.feeds()).unwrap();
    assert!(accept().await.is_err(), "the source talked to an untrusted server");
    std::fs::write(&ca_file, signed.cert.pem()).unwrap();
    let stream = loop {
        // An attempt with the old authorities may be under way.
        if let Ok(stream) = accept().await {
            break stream;
        }
    };
    let asked = Asked::read(Box::new(stream)).await;
    assert!(asked.head.contains("\r\nauthorization: Bearer first\r\n"), "{}", asked.head);
    std::fs::write(&token_file, "second\n").unwrap();
    asked.answer(200, &list(&[slice("s1", "5", "vllm-0", engine.port(), &serving())], "7")).await;
    let asked = Asked::read(Box::new(accept().await.unwrap())).await;
    assert!(asked.head.contains("\r\nauthorization: Bearer second\r\n"), "{}", asked.head);
    heard(&mut engine.accept().await, &recorder, "vllm-0", 0).await;
}
