//! Discovery with a real API server: its TLS, tokens, roles, pages, watches and restarts.

use kvik_indexer::sources::kubernetes::{KubernetesConfig, KubernetesSource, PortRef};
use serde_json::json;
use tokio::net::TcpStream;

use crate::api_server::serving;
use crate::kube_server::{KubeServer, Link, NAMESPACE, own_address, slice};
use crate::kubernetes::{gone, heard, pod};
use crate::peer::{Engine, Peer, quick};
use crate::support::{Call, Recorder};

/// Labels of the watches of a source in the server's counts.
const WATCH: [&str; 3] = ["resource=\"endpointslices\"", "scope=\"namespace\"", "verb=\"WATCH\""];

/// A configuration as in a pod, by way of `port`.
pub(crate) fn config(server: &KubeServer, port: u16) -> KubernetesConfig {
    KubernetesConfig {
        api: format!("https://localhost:{port}"),
        namespace: NAMESPACE.to_owned(),
        service: Some("vllm".to_owned()),
        port: PortRef::Name("kv".to_owned()),
        model: Some("llama".to_owned()),
        token_file: server.folder().join("token"),
        ca_file: server.folder().join("ca.crt"),
        retry_min_ms: 5,
        retry_max_ms: 50,
        limits: quick(),
        ..KubernetesConfig::default()
    }
}

/// A server with an account that may look for engines.
pub(crate) async fn start() -> KubeServer {
    let server = KubeServer::start().await;
    server.add_account("kvik").await;
    server.grant("kvik").await;
    server
}

pub(crate) async fn bind() -> Engine {
    Engine::bind_at(own_address()).await
}

/// A source that hears two engines and watches for more, all by way of a link.
struct Linked {
    link: Link,
    recorder: Recorder,
    /// `vllm-0`, of the slice `s1`.
    stays: Peer<TcpStream>,
    /// `vllm-1`, of the slice `s2`.
    leaves: Peer<TcpStream>,
    _source: KubernetesSource,
    _engines: [Engine; 2],
}

async fn hear_two(server: &KubeServer) -> Linked {
    let link = Link::to(server.port()).await;
    let (first, second) = (bind().await, bind().await);
    for (name, pod, engine) in [("s1", "vllm-0", &first), ("s2", "vllm-1", &second)] {
        server.create_slice(&slice(name, pod, engine.port(), &serving())).await;
    }
    let recorder = Recorder::default();
    let source = KubernetesSource::start(config(server, link.port), recorder.feeds()).unwrap();
    let (mut stays, mut leaves) = (first.accept().await, second.accept().await);
    heard(&mut stays, &recorder, "vllm-0", 0).await;
    heard(&mut leaves, &recorder, "vllm-1", 0).await;
    server.until_metric("apiserver_longrunning_requests", &WATCH).await;
    Linked { link, recorder, stays, leaves, _source: source, _engines: [first, second] }
}

#[tokio::test]
async fn engines_of_a_service_are_heard_from_when_they_serve_until_they_are_gone() {
    let server = start().await;
    let (first, second, stranger) = (bind().await, bind().await, bind().await);
    server.create_slice(&slice("s1", "vllm-0", first.port(), &serving())).await;
    let mut other_service = slice("s0", "other-0", stranger.port(), &serving());
    other_service["metadata"]["labels"]["kubernetes.io/service-name"] = json!("other");
    server.create_slice(&other_service).await;
    let recorder = Recorder::default();
    let source = KubernetesSource::start(config(&server, server.port()), recorder.feeds()).unwrap();
    let mut engine = first.accept().await;
    heard(&mut engine, &recorder, "vllm-0", 0).await;

    let starting = json!({ "ready": false, "serving": false, "terminating": false });
    server.create_slice(&slice("s2", "vllm-1", second.port(), &starting)).await;
    server.replace_slice(&slice("s2", "vllm-1", second.port(), &serving())).await;
    let mut other = second.accept().await;
    heard(&mut other, &recorder, "vllm-1", 0).await;

    let ended = json!({ "ready": false, "serving": false, "terminating": true });
    server.replace_slice(&slice("s1", "vllm-0", first.port(), &ended)).await;
    gone(&recorder, "vllm-0").await;
    heard(&mut other, &recorder, "vllm-1", 1).await;
    server.delete_slice("s2").await;
    gone(&recorder, "vllm-1").await;
    assert_eq!(recorder.names().len(), 2, "{:?}", recorder.names());
    source.stop().await;
}

#[tokio::test]
async fn an_account_without_the_role_finds_engines_as_soon_as_it_has_it() {
    let server = KubeServer::start().await;
    server.add_account("kvik").await;
    let engine = bind().await;
    server.create_slice(&slice("s1", "vllm-0", engine.port(), &serving())).await;
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server, server.port()), recorder.feeds()).unwrap();
    // The server counts what no role allows.
    server.until_metric("authorization_attempts_total", &["result=\"no-opinion\""]).await;
    assert!(recorder.names().is_empty());
    server.grant("kvik").await;
    heard(&mut engine.accept().await, &recorder, "vllm-0", 0).await;
}

#[tokio::test]
async fn an_api_server_that_dies_changes_nothing_and_is_followed_again() {
    let mut server = start().await;
    let (first, second) = (bind().await, bind().await);
    server.create_slice(&slice("s1", "vllm-0", first.port(), &serving())).await;
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server, server.port()), recorder.feeds()).unwrap();
    let mut engine = first.accept().await;
    heard(&mut engine, &recorder, "vllm-0", 0).await;
    server.kill();
    heard(&mut engine, &recorder, "vllm-0", 1).await;
    server.restart().await;
    server.create_slice(&slice("s2", "vllm-1", second.port(), &serving())).await;
    heard(&mut second.accept().await, &recorder, "vllm-1", 0).await;
    heard(&mut engine, &recorder, "vllm-0", 2).await;
    assert!(!recorder.calls(&pod("vllm-0")).contains(&Call::Closed));
}

#[tokio::test]
async fn changes_behind_a_broken_connection_are_seen_when_it_is_back() {
    let server = start().await;
    let third = bind().await;
    let Linked { link, recorder, stays, leaves, .. } = &mut hear_two(&server).await;
    link.cut();
    server.delete_slice("s2").await;
    server.create_slice(&slice("s3", "vllm-2", third.port(), &serving())).await;
    heard(leaves, recorder, "vllm-1", 1).await;
    link.mend();
    gone(recorder, "vllm-1").await;
    heard(&mut third.accept().await, recorder, "vllm-2", 0).await;
    heard(stays, recorder, "vllm-0", 1).await;
    assert!(!recorder.calls(&pod("vllm-0")).contains(&Call::Closed));
}

#[tokio::test]
async fn a_version_that_the_server_has_forgotten_asks_for_a_new_list() {
    let mut server = start().await;
    let Linked { link, recorder, stays, .. } = &mut hear_two(&server).await;
    link.cut();
    server.delete_slice("s2").await;
    // A server that starts knows no version before the one that it finds, and etcd has dropped the others.
    server.kill();
    server.compact().await;
    server.restart().await;
    let loaded = "apiserver_watch_cache_initializations_total";
    server.until_metric(loaded, &["resource=\"endpointslices\""]).await;
    link.mend();
    gone(recorder, "vllm-1").await;
    heard(stays, recorder, "vllm-0", 1).await;
    assert!(!recorder.calls(&pod("vllm-0")).contains(&Call::Closed));
    // The watch ended at once; a list and another watch, which has not ended, followed it.
    server.until_metric("apiserver_request_total", &WATCH).await;
}

#[tokio::test]
async fn a_list_of_many_slices_comes_in_pages() {
    let server = start().await;
    let engine = bind().await;
    let starting = json!({ "ready": false, "serving": false, "terminating": false });
    for slice_idx in 0..1001 {
        let (name, pod) = (format!("s{slice_idx:04}"), format!("vllm-{slice_idx}"));
        server.create_slice(&slice(&name, &pod, engine.port(), &starting)).await;
    }
    server.create_slice(&slice("s9999", "vllm-last", engine.port(), &serving())).await;
    let recorder = Recorder::default();
    let _source = KubernetesSource::start(config(&server, server.port()), recorder.feeds()).unwrap();
    heard(&mut engine.accept().await, &recorder, "vllm-last", 0).await;
    assert_eq!(recorder.names().len(), 1, "{:?}", recorder.names());
}
