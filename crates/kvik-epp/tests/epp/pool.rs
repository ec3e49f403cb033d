//! Engines that an `InferencePool` selects.

use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use crate::api_server::{ApiServer, pod, pool, pool_with_ports};
use crate::data_plane::{Outcome, completion};
use crate::engine::{Engine, MODEL};
use crate::poll::poll;
use crate::support::{PATIENCE, TestEpp, in_time};

/// The endpoints that a picker knows.
fn known(epp: &TestEpp) -> Vec<String> {
    epp.epp.gateway().gateway().workers().into_iter().map(|worker| worker.id).collect()
}

async fn until_known(epp: &TestEpp, engines: &[&Engine]) {
    let mut expected: Vec<String> = engines.iter().map(|engine| engine.url()).collect();
    expected.sort();
    poll(PATIENCE, "the engines of the pool are known", async || (known(epp) == expected).then_some(()))
        .await;
}

#[tokio::test]
async fn ready_pods_of_the_pool_are_chosen_from() {
    let server = ApiServer::bind().await;
    let engines = Engine::start_many(2).await;
    let epp = TestEpp::before(&[], |config, _| server.configure(config)).await;
    let ports = [engines[0].address.port(), engines[1].address.port()];
    let both = pool_with_ports("9", &ports);
    let mut watches = server.begin(&both, &[pod("vllm-0", "5", false)]).await;
    let (_, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
    assert_eq!(outcome.refused().0, 503);
    // Both ports of a pod that has become ready, whose models it lists itself.
    watches.pods.line("MODIFIED", &pod("vllm-0", "21", true)).await;
    until_known(&epp, &[&engines[0], &engines[1]]).await;
    let sent = poll(PATIENCE, "a request is sent", async || {
        let (_, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
        match outcome {
            Outcome::Sent(sent) => Some(sent),
            Outcome::Refused(_) => None,
        }
    })
    .await;
    assert!(engines.iter().any(|engine| engine.endpoint() == sent.endpoints[0]));
    // Other ports of the same pods.
    watches.pool.line("MODIFIED", &pool_with_ports("22", &ports[1..])).await;
    until_known(&epp, &[&engines[1]]).await;
    watches.pods.line("DELETED", &pod("vllm-0", "23", true)).await;
    until_known(&epp, &[]).await;
    epp.idle().await;
}

#[tokio::test]
async fn a_pool_with_another_selector_has_other_pods() {
    let server = ApiServer::bind().await;
    let epp = TestEpp::before(&[], |config, _| {
        server.configure(config);
        config.pool.model = Some(MODEL.to_owned());
    })
    .await;
    let mut watches = server.begin(&pool("9", "vllm"), &[pod("vllm-0", "5", true)]).await;
    poll(PATIENCE, "the pod is known", async || (known(&epp).len() == 1).then_some(())).await;
    watches.pool.line("MODIFIED", &pool("11", "other")).await;
    let mut watches = server.begin(&pool("11", "other"), &[]).await;
    poll(PATIENCE, "the pod is gone", async || known(&epp).is_empty().then_some(())).await;
    // A pool that is deleted is asked for again, and has no engines until it is back.
    watches.pods.line("ADDED", &pod("other-0", "30", true)).await;
    poll(PATIENCE, "the pod is known", async || (known(&epp).len() == 1).then_some(())).await;
    watches.pool.line("DELETED", &pool("12", "other")).await;
    server.asked().await.list(&[], "40").await;
    poll(PATIENCE, "no pod is known", async || known(&epp).is_empty().then_some(())).await;
}

#[tokio::test]
async fn engines_stay_while_the_api_server_is_away() {
    let server = ApiServer::bind().await;
    let epp = TestEpp::before(&[], |config, _| server.configure(config)).await;
    let both = [pod("vllm-0", "5", true)];
    let watches = server.begin(&pool("9", "vllm"), &both).await;
    poll(PATIENCE, "the pod is known", async || (known(&epp).len() == 1).then_some(())).await;
    // A watch that ends goes on from the last version.
    let mut pods = watches.pods;
    pods.line("BOOKMARK", &json!({"metadata": {"resourceVersion": "70"}})).await;
    pods.end().await;
    let mut pods = server.watch_pods("70").await;
    // A version that is gone asks for a new list; a server that fails is asked again.
    pods.line("ERROR", &json!({"code": 410, "message": "too old"})).await;
    server.asked().await.answer(500, &json!({"message": "not now"})).await;
    assert_eq!(known(&epp).len(), 1);
    let mut watches = server.begin(&pool("9", "vllm"), &both).await;
    watches.pods.line("ADDED", &pod("vllm-1", "80", false)).await;
    assert_eq!(known(&epp).len(), 1);
}

#[tokio::test]
async fn kv_events_of_a_pod_are_listened_to_while_it_is_ready() {
    let server = ApiServer::bind().await;
    let publisher = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let _epp = TestEpp::before(&[], |config, _| {
        server.configure(config);
        config.pool.kv_events.port = Some(publisher.local_addr().unwrap().port());
    })
    .await;
    let mut watches = server.begin(&pool("9", "vllm"), &[pod("vllm-0", "5", true)]).await;
    let (mut listener, _) = in_time(publisher.accept()).await.unwrap();
    // What every peer of ZeroMQ says first.
    let mut greeting = [0; 10];
    in_time(listener.read_exact(&mut greeting)).await.unwrap();
    assert_eq!((greeting[0], greeting[9]), (0xff, 0x7f));
    watches.pods.line("MODIFIED", &pod("vllm-0", "21", false)).await;
    in_time(listener.read_to_end(&mut Vec::new())).await.unwrap();
}
