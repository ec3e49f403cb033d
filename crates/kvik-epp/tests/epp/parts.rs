//! Prompts that another engine computes.

use kvik_gateway::{BackendConfig, GatewayConfig, PdProtocol, Role};

use crate::data_plane::completion;
use crate::engine::{Engine, MODEL};
use crate::support::TestEpp;

async fn start(engines: &[Engine], protocol: PdProtocol) -> TestEpp {
    let parted = |(engine, role): (&Engine, Role)| BackendConfig {
        url: engine.url(),
        model: Some(MODEL.to_owned()),
        role,
        pd: Some(protocol),
        ..BackendConfig::default()
    };
    let roles = [Role::Prefill, Role::Decode];
    let backends = engines.iter().zip(roles).map(parted).collect();
    TestEpp::before(&[], |_, gateway: &mut GatewayConfig| gateway.backends = backends).await
}

#[tokio::test]
async fn a_long_prompt_names_the_engine_that_computes_it() {
    let engines = Engine::start_many(2).await;
    for protocol in [PdProtocol::NixlPull, PdProtocol::Sglang] {
        let epp = start(&engines, protocol).await;
        let (mut exchange, outcome) = epp.data_plane.complete(&completion(1, 40_000)).await;
        let sent = outcome.sent();
        assert_eq!(sent.endpoints, [engines[1].endpoint()]);
        assert_eq!(sent.prefill_endpoint, Some(engines[0].endpoint()));
        assert!(0 < epp.outstanding_at(&engines[0].endpoint()));
        exchange.answer(200, None, &[b"data: {}\n\n"]).await;
        epp.idle().await;
    }
}

#[tokio::test]
async fn a_short_prompt_is_left_to_one_engine() {
    let engines = Engine::start_many(2).await;
    let epp = start(&engines, PdProtocol::NixlPull).await;
    let (mut exchange, outcome) = epp.data_plane.complete(&completion(1, 100)).await;
    let sent = outcome.sent();
    assert_eq!((sent.endpoints, sent.prefill_endpoint), (vec![engines[1].endpoint()], None));
    exchange.answer(200, None, &[b"{}"]).await;
    epp.idle().await;
}

#[tokio::test]
async fn a_client_cannot_say_where_kv_is() {
    let engines = Engine::start_many(2).await;
    let epp = start(&engines, PdProtocol::NixlPull).await;
    let body = format!(r#"{{"model":"{MODEL}","prompt":"a","kv_transfer_params":{{"remote_host":"x"}}}}"#);
    let (_, outcome) = epp.data_plane.complete(body.as_bytes()).await;
    let (status, text, _) = outcome.refused();
    assert_eq!(status, 400, "{text}");
    epp.idle().await;
}
