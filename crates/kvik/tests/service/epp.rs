//! `kvik epp` in front of real workers, asked as Envoy asks.

use bytes::Bytes;
use futures_util::stream;
use kvik_epp::PROCESS_PATH;
use kvik_epp::exchange::DESTINATION;
use kvik_epp::messages::processing_request::Request;
use kvik_epp::messages::processing_response::Response;
use kvik_epp::messages::{
    HeaderMap, HeaderValue, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use serde_json::{Value, json};
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use crate::cluster::{Client, Role, start, start_coordinator, start_worker};
use crate::http;
use crate::process::{self, Process, eventually};

/// A picker: where data planes and where people reach it.
struct Picker {
    role: Role,
    data_planes: String,
}

fn start_picker(flags: &[&str], environment: &[(&str, &str)]) -> Picker {
    let mut command = process::kvik();
    command.envs(environment.iter().copied());
    command.args(["epp", "--log-format", "json", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]);
    let mut process = Process::start(command.args(flags).env("KVIK_GATEWAY_HEALTH_INTERVAL_MS", "100"));
    let ready = process.logged("epp is ready");
    let address = |field: &str| ready[field].as_str().unwrap().to_owned();
    Picker {
        role: Role { process, client: Client { address: address("http_address") } },
        data_planes: address("address"),
    }
}

fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

impl Picker {
    /// The worker for a request; `None` if it is refused.
    fn pick(&self, body: &Value) -> Option<String> {
        let headers = self.headers(body)?;
        headers.into_iter().find(|(name, _)| name == DESTINATION).map(|(_, endpoint)| endpoint)
    }

    /// Asks for a worker, and leaves once it is named; the headers that it is to get, `None` if the request is refused.
    fn headers(&self, body: &Value) -> Option<Vec<(String, String)>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("http://{}", self.data_planes)).unwrap();
            let mut grpc = Grpc::<Channel>::new(endpoint.connect().await.unwrap());
            grpc.ready().await.unwrap();
            let path = HeaderValue {
                key: ":path".to_owned(),
                value: "/v1/completions".to_owned(),
                raw_value: Bytes::new(),
            };
            let headers = Some(HeaderMap { headers: vec![path] });
            let body = HttpBody { body: Bytes::from(body.to_string()), end_of_stream: true };
            let messages = [
                message(Request::RequestHeaders(HttpHeaders { headers, end_of_stream: false })),
                message(Request::RequestBody(body)),
            ];
            let codec = ProstCodec::<ProcessingRequest, ProcessingResponse>::default();
            let sent = tonic::Request::new(stream::iter(messages));
            let answers = grpc.streaming(sent, PROCESS_PATH.parse().unwrap(), codec).await.unwrap();
            let first = answers.into_inner().message().await.unwrap().unwrap();
            let Some(Response::RequestHeaders(head)) = first.response else { return None };
            let mutation = head.response.unwrap().header_mutation.unwrap();
            let headers = mutation.set_headers.into_iter().map(|set| {
                let header = set.header.unwrap();
                (header.key, String::from_utf8(header.raw_value.to_vec()).unwrap())
            });
            Some(headers.collect())
        })
    }
}

/// Completes a prompt where the picker says; the tokens that the worker had.
fn complete(endpoint: &str, body: &Value) -> u64 {
    let mut answer = http::send(endpoint, "POST", "/v1/completions", Some(body)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

#[test]
fn requests_are_sent_to_the_worker_that_has_their_prompt() {
    let coordinator = start_coordinator("127.0.0.1:0", &[]);
    let workers = ["worker-1", "worker-2", "worker-3"]
        .map(|id| start_worker("127.0.0.1:0", id, &[&coordinator.address]));
    let mut picker = start_picker(&["--coordinator", &format!("http://{}", coordinator.address)], &[]);
    picker.role.wait_for_backends(3);
    for number in 0..4_u32 {
        let prompt: Vec<u32> = (0..200).map(|place| 100 + (place * 7 + number * 131) % 3000).collect();
        let body = json!({"model": "kvik-tiny", "prompt": prompt, "max_tokens": 2});
        // Each has one that the ring would give to another one, too.
        let holder = &workers[number as usize % workers.len()];
        complete(&holder.address, &body);
        eventually("the picker knows the holder", || {
            let question = json!({"model": "kvik-tiny", "token_ids": prompt});
            let mut answer = http::send(&picker.role.address, "POST", "/v1/score", Some(&question)).ok()?;
            let answer: Value = serde_json::from_str(&answer.text().ok()?).ok()?;
            answer["best"].is_string().then_some(())
        });
        assert_eq!(picker.pick(&body).as_ref(), Some(&holder.address));
        assert!(100 < complete(&holder.address, &body));
    }
    assert_eq!(picker.pick(&json!({"model": "none", "prompt": "a"})), None);
    let picked = picker.role.metric("kvik_gateway_route_decisions_total", "holder");
    assert!(picked >= Some(4.0), "{picked:?}");
    assert_eq!(picker.role.metric("kvik_epp_exchanges_total", "refused"), Some(1.0));
    picker.role.process.signal("TERM");
    assert_eq!(picker.role.process.ended().code(), Some(0));
}

#[test]
fn workers_get_the_cluster_token_only_if_data_planes_may_see_it() {
    const TOKEN: &str = "cluster-token-0123456789";
    let token = format!("cluster_token={TOKEN}");
    let coordinator = start_coordinator("127.0.0.1:0", &[&token]);
    let base = format!("http://{}", coordinator.address);
    let _worker = start(
        "worker",
        "127.0.0.1:0",
        &["--id", "worker-1", "--threads", "1", "--coordinator", &base],
        &[&token],
    );
    for is_shown in [false, true] {
        let setting = format!("send_cluster_token={is_shown}");
        let flags = ["--coordinator", &base, "--set", &setting];
        let picker = start_picker(&flags, &[("KVIK_CLUSTER_TOKEN", TOKEN)]);
        picker.role.wait_for_backends(1);
        let headers = picker.headers(&json!({"model": "kvik-tiny", "prompt": "a"})).unwrap();
        let expected = ("x-kvik-cluster-token".to_owned(), TOKEN.to_owned());
        assert_eq!(headers.contains(&expected), is_shown, "{headers:?}");
    }
}

#[test]
fn a_picker_that_other_machines_reach_must_be_told_so() {
    let mut command = process::kvik();
    command.args(["epp", "--listen", "0.0.0.0:0", "--http-listen", "127.0.0.1:0"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("`listen` is 0.0.0.0:") && error.contains("`insecure: true`"), "{error}");
    let output = process::kvik().args(["epp", "--pool", "vllm"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8(output.stderr).unwrap().contains("`pool.name` is vllm"));
}
