//! Whether a picker lives and can choose, as its callers ask.

use kvik_epp::{
    CHECK_PATH, HealthCheckRequest, HealthCheckResponse, PROCESS_SERVICE, ServingStatus, WATCH_PATH,
};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use crate::api_server::{ApiServer, pool};
use crate::engine::Engine;
use crate::support::{TestEpp, in_time};

fn request(service: &str) -> tonic::Request<HealthCheckRequest> {
    tonic::Request::new(HealthCheckRequest { service: service.to_owned() })
}

async fn check(epp: &TestEpp, service: &str) -> Result<ServingStatus, Status> {
    let mut grpc = epp.data_plane.grpc();
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
    let answer = in_time(grpc.unary(request(service), CHECK_PATH.parse().unwrap(), codec)).await?;
    Ok(answer.into_inner().status())
}

#[tokio::test]
async fn every_service_is_told_by_its_name() {
    let engines = Engine::start_many(1).await;
    let epp = TestEpp::before(&engines, |_, _| ()).await;
    for service in ["", "liveness", "readiness", PROCESS_SERVICE] {
        assert_eq!(check(&epp, service).await.unwrap(), ServingStatus::Serving, "{service}");
    }
    assert_eq!(check(&epp, "other").await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_picker_is_ready_once_its_pool_is_known_and_until_it_drains() {
    let server = ApiServer::bind().await;
    let epp = TestEpp::before(&[], |config, _| server.configure(config)).await;
    assert_eq!(check(&epp, "liveness").await.unwrap(), ServingStatus::Serving);
    assert_eq!(check(&epp, "readiness").await.unwrap(), ServingStatus::NotServing);
    let mut grpc = epp.data_plane.grpc();
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
    let watching = grpc.server_streaming(request("readiness"), WATCH_PATH.parse().unwrap(), codec);
    let mut statuses = in_time(watching).await.unwrap().into_inner();
    let mut next = async || in_time(statuses.message()).await.unwrap().map(|answer| answer.status());
    assert_eq!(next().await, Some(ServingStatus::NotServing));
    let _watches = server.begin(&pool("1", "vllm"), &[]).await;
    assert_eq!(next().await, Some(ServingStatus::Serving));
    epp.shutdown.drain();
    assert_eq!(next().await, Some(ServingStatus::NotServing));
    assert_eq!(next().await, None);
    in_time(epp.shutdown.finish()).await;
}
