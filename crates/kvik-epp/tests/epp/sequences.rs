//! What a data plane says for one request, in its right order and in others.

use bytes::Bytes;
use kvik_epp::exchange::{SUBSET, SUBSET_NAMESPACE};
use kvik_epp::messages::processing_request::Request;
use kvik_epp::messages::{
    HttpBody, HttpTrailers, ListValue, Metadata, ProcessingRequest, Struct, Value, value,
};
use tonic::Code;

use crate::data_plane::{
    Exchange, Outcome, completion, http_headers, message, metadata, piece, request_head, trailers,
};
use crate::engine::Engine;
use crate::poll::poll;
use crate::support::{Numbers, PATIENCE, TestEpp, in_time};

fn subset(endpoints: &[String]) -> Metadata {
    let text = |text: &String| Value { kind: Some(value::Kind::Text(text.clone())) };
    let values = endpoints.iter().map(text).collect();
    metadata(SUBSET_NAMESPACE, Struct::with(SUBSET, value::Kind::List(ListValue { values })))
}

#[tokio::test]
async fn a_request_in_many_pieces_goes_back_whole_to_one_engine() {
    let engines = Engine::start_many(3).await;
    let epp = TestEpp::before(&engines, |_, _| ()).await;
    let (body, long) = (completion(1, 300_000), vec![b'x'; 100_000]);
    for ends_with_trailers in [false, true] {
        let mut exchange = epp.data_plane.open().await;
        exchange.send(request_head(&[("x-prefiller-host-port", "10.1.1.1:1")], false)).await;
        let n_pieces = body.chunks(9_001).count();
        for (number, bytes) in body.chunks(9_001).enumerate() {
            let is_last = !ends_with_trailers && number + 1 == n_pieces;
            exchange.send(piece(Bytes::copy_from_slice(bytes), is_last)).await;
        }
        if ends_with_trailers {
            exchange.send(trailers()).await;
        }
        let sent = exchange.outcome().await.sent();
        assert_eq!(sent.content_length, Some(body.len()));
        assert!(sent.body == body && sent.has_trailers == ends_with_trailers);
        assert!(sent.prefill_endpoint.is_none());
        assert!(sent.removed_headers.iter().any(|name| name == "x-prefiller-host-port"));
        let [endpoint] = &sent.endpoints[..] else { panic!("{:?}", sent.endpoints) };
        assert!(engines.iter().any(|engine| engine.endpoint() == *endpoint));
        assert!(0 < epp.outstanding_at(endpoint));
        exchange.answer(200, Some(endpoint), &[b"data: {}\n\n", &long, b"data: [DONE]\n\n"]).await;
        epp.idle().await;
    }
}

#[tokio::test]
async fn a_request_without_a_body_goes_to_some_engine() {
    let engines = Engine::start_many(2).await;
    let epp = TestEpp::before(&engines, |_, _| ()).await;
    let mut exchange = epp.data_plane.open().await;
    let head = [(":method", "GET"), (":path", "/v1/models")];
    let head = http_headers(&head, true);
    exchange.send(message(Request::RequestHeaders(head))).await;
    let sent = exchange.outcome().await.sent();
    assert_eq!((sent.endpoints.len(), sent.content_length), (1, None));
    exchange.answer(200, None, &[b"{}"]).await;
    epp.idle().await;
}

#[tokio::test]
async fn only_endpoints_of_the_subset_are_chosen() {
    let engines = Engine::start_many(3).await;
    let epp = TestEpp::before(&engines, |config, _| config.max_fallbacks = 2).await;
    let allowed = engines[1].endpoint();
    for number in 0..8 {
        let body = completion(number, 100);
        let only = subset(std::slice::from_ref(&allowed));
        let (mut exchange, outcome) = epp.data_plane.complete_among(&body, Some(only)).await;
        assert_eq!(outcome.sent().endpoints, *std::slice::from_ref(&allowed));
        exchange.answer(200, None, &[b"{}"]).await;
    }
    for nothing in [vec![], vec!["10.9.9.9:1".to_owned()]] {
        let (_, outcome) = epp.data_plane.complete_among(&completion(1, 1), Some(subset(&nothing))).await;
        let (status, text, headers) = outcome.refused();
        assert_eq!(status, 503, "{text}");
        assert!(headers.iter().any(|(name, _)| name == "retry-after"), "{headers:?}");
    }
    // All of them, the chosen one first.
    let (_exchange, outcome) = epp.data_plane.complete(&completion(9, 100)).await;
    let mut endpoints = outcome.sent().endpoints;
    endpoints.sort();
    let mut all: Vec<String> = engines.iter().map(Engine::endpoint).collect();
    all.sort();
    assert_eq!(endpoints, all);
}

#[tokio::test]
async fn the_load_goes_to_the_endpoint_that_served() {
    let engines = Engine::start_many(2).await;
    let epp = TestEpp::before(&engines, |config, _| config.max_fallbacks = 1).await;
    let (mut exchange, outcome) = epp.data_plane.complete(&completion(1, 4_000)).await;
    let endpoints = outcome.sent().endpoints;
    assert!(0 < epp.outstanding_at(&endpoints[0]) && epp.outstanding_at(&endpoints[1]) == 0);
    exchange.answer_head(200, Some(&endpoints[1])).await;
    poll(PATIENCE, "the load has moved", async || {
        (epp.outstanding_at(&endpoints[0]) == 0 && 0 < epp.outstanding_at(&endpoints[1])).then_some(())
    })
    .await;
    drop(exchange);
    epp.idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_engine_at_once() {
    let engines = Engine::start_many(2).await;
    let epp = TestEpp::before(&engines, |_, gateway| gateway.admission.max_running = 1).await;
    // In the middle of its body.
    let mut early = epp.data_plane.open().await;
    early.send(request_head(&[], false)).await;
    early.send(piece("{", false)).await;
    drop(early);
    for n_answer_pieces in [0, 1, 2] {
        let (mut exchange, outcome) = epp.data_plane.complete(&completion(n_answer_pieces, 1000)).await;
        outcome.sent();
        assert!(0 < epp.outstanding_tokens());
        if 0 < n_answer_pieces {
            exchange.answer_head(200, None).await;
        }
        for _ in 1..n_answer_pieces {
            let body = HttpBody { body: Bytes::from_static(b"data: {}\n\n"), end_of_stream: false };
            exchange.send(message(Request::ResponseBody(body))).await;
            exchange.next().await.unwrap().expect("the piece");
        }
        drop(exchange);
        epp.idle().await;
    }
}

#[tokio::test]
async fn a_request_that_waits_for_its_turn_leaves_the_queue_with_its_client() {
    let engines = Engine::start_many(1).await;
    let epp = TestEpp::before(&engines, |_, gateway| {
        gateway.admission.max_running = 1;
        gateway.admission.max_waiting = 1;
    })
    .await;
    let gateway = epp.epp.gateway().gateway().clone();
    let (running, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
    outcome.sent();
    let mut waiting = epp.data_plane.open().await;
    waiting.send(request_head(&[], false)).await;
    waiting.send(piece(completion(2, 10), true)).await;
    poll(PATIENCE, "one waits", async || (gateway.n_waiting() == 1).then_some(())).await;
    let (_, outcome) = epp.data_plane.complete(&completion(3, 10)).await;
    let (status, text, headers) = outcome.refused();
    assert_eq!(status, 429, "{text}");
    assert!(headers.iter().any(|(name, _)| name == "retry-after"), "{headers:?}");
    drop(waiting);
    poll(PATIENCE, "none waits", async || (gateway.n_waiting() == 0).then_some(())).await;
    drop(running);
    epp.idle().await;
}

#[tokio::test]
async fn what_a_gateway_refuses_is_refused_in_its_words() {
    let engines = Engine::start_many(1).await;
    let epp = TestEpp::before(&engines, |_, gateway| gateway.max_body_bytes = 10_000).await;
    for (body, status, words) in [
        (br#"{"model":"none","prompt":"a"}"#.to_vec(), 404, "none"),
        (br#"{"model":7}"#.to_vec(), 400, "`model` is 7"),
        (b"[".to_vec(), 400, "not a JSON object"),
        (completion(1, 10_000), 413, "10000 bytes"),
    ] {
        let (mut exchange, outcome) = epp.data_plane.complete(&body).await;
        let (refused, text, headers) = outcome.refused();
        assert_eq!(refused, status, "{text}");
        assert!(text.contains(words), "{text}");
        assert!(headers.contains(&("content-type".to_owned(), "application/json".to_owned())));
        assert_eq!(exchange.next().await.unwrap(), None);
    }
    let announced = request_head(&[("content-length", "10001")], false);
    let mut exchange = epp.data_plane.open().await;
    exchange.send(announced).await;
    assert_eq!(exchange.outcome().await.refused().0, 413);
    epp.idle().await;
}

#[tokio::test]
async fn without_an_engine_the_client_is_told_to_come_later() {
    let epp = TestEpp::before(&[], |_, _| ()).await;
    let (_, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
    let (status, text, _) = outcome.refused();
    assert_eq!(status, 503, "{text}");
}

#[tokio::test]
async fn bodies_that_wait_for_a_choice_are_bounded_together() {
    let engines = Engine::start_many(1).await;
    let epp = TestEpp::before(&engines, |config, _| config.max_body_bytes_in_flight = 1 << 20).await;
    let mut held = epp.data_plane.open().await;
    held.send(request_head(&[], false)).await;
    held.send(piece(vec![b' '; 1_000_000], false)).await;
    // Its bytes are counted once another exchange is refused for them.
    poll(PATIENCE, "the budget is used up", async || {
        let (_, outcome) = epp.data_plane.complete(&completion(1, 100_000)).await;
        match outcome {
            Outcome::Refused(refusal) => {
                assert_eq!(refusal.status.unwrap().code, 503);
                Some(())
            }
            Outcome::Sent(_) => None,
        }
    })
    .await;
    drop(held);
    poll(PATIENCE, "the budget is back", async || {
        let (_, outcome) = epp.data_plane.complete(&completion(1, 100_000)).await;
        matches!(outcome, Outcome::Sent(_)).then_some(())
    })
    .await;
    epp.idle().await;
}

#[tokio::test]
async fn messages_in_a_wrong_order_end_their_exchange_alone() {
    let engines = Engine::start_many(1).await;
    let epp = TestEpp::before(&engines, |_, _| ()).await;
    let answer_piece = || message(Request::ResponseBody(HttpBody::default()));
    let wrong = [
        vec![piece("{}", true)],
        vec![answer_piece()],
        vec![trailers()],
        vec![request_head(&[], false), request_head(&[], false)],
        vec![request_head(&[], false), piece("{", false), answer_piece()],
    ];
    for messages in wrong {
        let mut exchange = epp.data_plane.open().await;
        for message in messages {
            exchange.send(message).await;
        }
        let status = exchange.next().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains("allowed now"), "{status}");
    }
    // Behind a choice, which is given back.
    let (mut exchange, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
    outcome.sent();
    exchange.send(answer_piece()).await;
    assert_eq!(exchange.next().await.unwrap_err().code(), Code::InvalidArgument);
    epp.idle().await;
    // Others go on.
    let (mut exchange, outcome) = epp.data_plane.complete(&completion(2, 10)).await;
    outcome.sent();
    exchange.answer(200, None, &[b"{}"]).await;
    epp.idle().await;
}

#[tokio::test]
async fn no_order_of_messages_leaves_a_load_behind() {
    let engines = Engine::start_many(2).await;
    let epp = TestEpp::before(&engines, |_, _| ()).await;
    let mut numbers = Numbers(3);
    for number in 0..300 {
        let mut exchange = epp.data_plane.open().await;
        // Half of them begin well.
        if number % 2 == 0 {
            exchange.send(request_head(&[], false)).await;
            exchange.send(piece(completion(number, 100), true)).await;
        }
        for _ in 0..numbers.below(6) {
            let is_last = numbers.below(2) == 0;
            let body = HttpBody { body: Bytes::from_static(b"{}"), end_of_stream: is_last };
            let message = match numbers.below(7) {
                0 => request_head(&[], is_last),
                1 => piece(completion(number, 10), is_last),
                2 => trailers(),
                3 => message(Request::ResponseHeaders(http_headers(&[(":status", "200")], is_last))),
                4 => message(Request::ResponseBody(body)),
                5 => message(Request::ResponseTrailers(HttpTrailers::default())),
                _ => ProcessingRequest::default(),
            };
            // An exchange that has ended takes no more.
            if exchange.messages.send(message).await.is_err() {
                break;
            }
        }
        if numbers.below(2) == 0 {
            let Exchange { messages, mut answers } = exchange;
            drop(messages);
            while let Ok(Some(_)) = in_time(answers.message()).await {}
        }
    }
    epp.idle().await;
}

#[tokio::test]
async fn a_request_whose_time_is_over_gives_everything_back() {
    let engines = Engine::start_many(1).await;
    let epp = TestEpp::before(&engines, |_, gateway| gateway.timeouts.request_ms = 1000).await;
    let (mut exchange, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
    outcome.sent();
    assert_eq!(exchange.next().await.unwrap_err().code(), Code::DeadlineExceeded);
    epp.idle().await;
}

#[tokio::test]
async fn a_data_plane_that_sends_only_the_head_of_an_answer_completes_it() {
    let engines = Engine::start_many(1).await;
    let epp = TestEpp::before(&engines, |_, _| ()).await;
    let (mut exchange, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
    outcome.sent();
    exchange.answer_head(200, None).await;
    let Exchange { messages, mut answers } = exchange;
    drop(messages);
    assert!(in_time(answers.message()).await.unwrap().is_none());
    epp.idle().await;
}

#[tokio::test]
async fn engines_that_fail_by_what_data_planes_see_get_no_more_requests() {
    let engines = Engine::start_many(2).await;
    let epp = TestEpp::before(&engines, |_, gateway| {
        gateway.breaker.consecutive_failures = 1;
        // Longer than the test: a healthy engine would come back.
        gateway.breaker.open_ms = 600_000;
        gateway.breaker.max_open_ms = 600_000;
    })
    .await;
    let (mut exchange, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
    let failed = outcome.sent().endpoints[0].clone();
    exchange.answer(500, None, &[b"{}"]).await;
    epp.idle().await;
    for number in 0..8 {
        let (mut exchange, outcome) = epp.data_plane.complete(&completion(number, 10)).await;
        assert_ne!(outcome.sent().endpoints[0], failed);
        exchange.answer(200, None, &[b"{}"]).await;
    }
}

#[tokio::test]
async fn open_exchanges_end_before_a_picker_that_drains() {
    let engines = Engine::start_many(1).await;
    let epp = TestEpp::before(&engines, |_, _| ()).await;
    let (mut exchange, outcome) = epp.data_plane.complete(&completion(1, 10)).await;
    outcome.sent();
    epp.shutdown.drain();
    exchange.answer(200, None, &[b"data: {}\n\n", b"data: [DONE]\n\n"]).await;
    drop(exchange);
    in_time(epp.epp.finished()).await;
    in_time(epp.shutdown.finish()).await;
}
