//! Message sequences, in their right order and in any other one.

use proptest::prelude::*;

use super::*;
use crate::messages::processing_response::Response;
use crate::messages::{HeaderMap, HeaderValue, HttpTrailers, ListValue, Struct, Value, value};

const SETTINGS: ExchangeSettings = ExchangeSettings { max_body_bytes: 1 << 20, is_conformance: false };

fn header(name: &str, value: &str) -> HeaderValue {
    let raw_value = Bytes::copy_from_slice(value.as_bytes());
    HeaderValue { key: name.to_owned(), value: String::new(), raw_value }
}

fn head(headers: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let headers = headers.iter().map(|(name, value)| header(name, value)).collect();
    HttpHeaders { headers: Some(HeaderMap { headers }), end_of_stream }
}

fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

fn request_head(end_of_stream: bool) -> ProcessingRequest {
    message(Request::RequestHeaders(head(&[(":path", "/v1/completions"), ("x-a", "b")], end_of_stream)))
}

fn body(bytes: impl Into<Bytes>, end_of_stream: bool) -> HttpBody {
    HttpBody { body: bytes.into(), end_of_stream }
}

fn trailers() -> HttpTrailers {
    HttpTrailers { trailers: None }
}

fn choice() -> Choice {
    Choice { endpoints: vec!["10.0.0.1:8000".to_owned(), "10.0.0.2:8000".to_owned()], ..Choice::default() }
}

/// An exchange with what it has answered.
struct Played {
    exchange: Exchange,
    answers: VecDeque<ProcessingResponse>,
}

impl Played {
    fn new(settings: ExchangeSettings) -> Self {
        Self { exchange: Exchange::new(settings), answers: VecDeque::new() }
    }

    fn take(&mut self, message: ProcessingRequest) -> Step {
        self.exchange.take(message, &mut self.answers).unwrap()
    }

    fn asked(&mut self, message: ProcessingRequest) -> Asked {
        match self.take(message) {
            Step::Pick(asked) => *asked,
            other => panic!("{other:?}"),
        }
    }

    fn choose(&mut self) {
        self.exchange.choose(&choice(), &mut self.answers);
    }

    fn answered(&mut self) -> Vec<ProcessingResponse> {
        self.answers.drain(..).collect()
    }
}

/// A body out of pieces, none of them too long, and whether the last one ends it.
fn joined(answers: &[ProcessingResponse]) -> (Vec<u8>, bool) {
    let (mut bytes, mut is_ended) = (Vec::new(), false);
    for answer in answers {
        let Some(Response::RequestBody(piece) | Response::ResponseBody(piece)) = &answer.response else {
            panic!("{answer:?}")
        };
        let mutation = piece.response.as_ref().unwrap().body_mutation.as_ref().unwrap();
        let piece = mutation.streamed_response.as_ref().unwrap();
        assert!(piece.body.len() <= MAX_PIECE_BYTES && !is_ended);
        bytes.extend_from_slice(&piece.body);
        is_ended = piece.end_of_stream;
    }
    (bytes, is_ended)
}

fn set_headers(answer: &ProcessingResponse) -> Vec<(String, String)> {
    let common = match answer.response.as_ref().unwrap() {
        Response::RequestHeaders(head) => head.response.as_ref().unwrap(),
        Response::RequestBody(body) => body.response.as_ref().unwrap(),
        other => panic!("{other:?}"),
    };
    assert!(common.clear_route_cache);
    let headers = common.header_mutation.as_ref().unwrap().set_headers.iter();
    let texts = headers.map(|set| {
        let header = set.header.as_ref().unwrap();
        (header.key.clone(), String::from_utf8(header.raw_value.to_vec()).unwrap())
    });
    texts.collect()
}

#[test]
fn a_request_goes_back_whole_behind_the_choice() {
    let mut played = Played::new(SETTINGS);
    assert!(matches!(played.take(request_head(false)), Step::Nothing));
    let whole: Vec<u8> = (0..200_000_u32).map(|number| (number % 251) as u8).collect();
    for piece in whole[..150_000].chunks(7_001) {
        assert!(matches!(
            played.take(message(Request::RequestBody(body(piece.to_vec(), false)))),
            Step::Nothing
        ));
    }
    assert!(played.answers.is_empty());
    let asked = played.asked(message(Request::RequestBody(body(whole[150_000..].to_vec(), true))));
    assert_eq!((asked.path.as_str(), asked.body.as_deref()), ("/v1/completions", Some(&whole[..])));
    assert_eq!(asked.headers.get("x-a").unwrap(), "b");
    assert!(asked.subset.is_none() && asked.forced.is_empty());
    played.choose();
    let answers = played.answered();
    let names = "10.0.0.1:8000,10.0.0.2:8000";
    let expected = [(DESTINATION, names), ("content-length", "200000")];
    assert_eq!(set_headers(&answers[0]), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let balancer = Struct::with(DESTINATION, value::Kind::Text(names.to_owned()));
    let metadata = Struct::with(LOAD_BALANCER_NAMESPACE, value::Kind::Struct(balancer));
    assert_eq!(answers[0].dynamic_metadata, Some(metadata));
    assert_eq!(joined(&answers[1..]), (whole, true));
    assert_eq!(answers.len(), 1 + 4);
}

#[test]
fn trailers_end_a_body_and_come_last() {
    for has_body in [true, false] {
        let mut played = Played::new(SETTINGS);
        played.take(request_head(false));
        if has_body {
            played.take(message(Request::RequestBody(body("{}", false))));
        }
        let asked = played.asked(message(Request::RequestTrailers(trailers())));
        assert_eq!(asked.body.is_some(), has_body);
        played.choose();
        let answers = played.answered();
        assert!(matches!(answers.last().unwrap().response, Some(Response::RequestTrailers(_))));
        let pieces = &answers[1..answers.len() - 1];
        assert_eq!(pieces.len(), usize::from(has_body));
        if has_body {
            assert_eq!(joined(pieces), (b"{}".to_vec(), false));
        }
    }
}

#[test]
fn a_request_without_a_body_is_chosen_for_at_once() {
    let mut played = Played::new(SETTINGS);
    assert!(played.asked(request_head(true)).body.is_none());
    played.choose();
    let answers = played.answered();
    assert_eq!(answers.len(), 1);
    assert_eq!(set_headers(&answers[0])[0].0, DESTINATION);
    assert_eq!(set_headers(&answers[0]).len(), 1);
    // An empty piece is a body, too.
    let mut played = Played::new(SETTINGS);
    played.take(request_head(false));
    assert_eq!(played.asked(message(Request::RequestBody(body("", true)))).body.unwrap(), "");
    played.choose();
    assert_eq!(joined(&played.answered()[1..]), (Vec::new(), true));
}

#[test]
fn an_answer_passes_piece_by_piece_to_its_end() {
    let mut played = Played::new(SETTINGS);
    played.asked(request_head(true));
    played.choose();
    played.answers.clear();
    let served = Struct::with(SERVED, value::Kind::Text("10.0.0.2:8000".to_owned()));
    let mut metadata = Metadata::default();
    metadata.filter_metadata.insert(LOAD_BALANCER_NAMESPACE.to_owned(), served);
    let mut answer_head = message(Request::ResponseHeaders(head(&[(":status", "503"), ("a", "b")], false)));
    answer_head.metadata_context = Some(metadata);
    let Step::Answered(answer_head) = played.take(answer_head) else { panic!("no head") };
    assert_eq!((answer_head.status.as_u16(), answer_head.is_last), (503, false));
    assert_eq!(answer_head.served.as_deref(), Some("10.0.0.2:8000"));
    assert!(matches!(played.answered()[0].response, Some(Response::ResponseHeaders(_))));
    let long = vec![7; 100_000];
    let Step::Data { bytes, is_last } =
        played.take(message(Request::ResponseBody(body(long.clone(), false))))
    else {
        panic!("no data")
    };
    assert!(bytes == long && !is_last);
    assert_eq!(joined(&played.answered()), (long, false));
    let Step::Data { is_last, .. } = played.take(message(Request::ResponseTrailers(trailers()))) else {
        panic!("no end")
    };
    assert!(is_last && played.exchange.is_over());
    assert!(matches!(played.answered()[0].response, Some(Response::ResponseTrailers(_))));
}

#[test]
fn a_subset_limits_the_choice_even_if_it_is_empty() {
    let text = |text: &str| Value { kind: Some(value::Kind::Text(text.to_owned())) };
    let list = |values: Vec<Value>| value::Kind::List(ListValue { values });
    let subset_of = |value: Option<value::Kind>| {
        let mut first = request_head(true);
        let mut metadata = Metadata::default();
        let fields = value.map(|value| Struct::with(SUBSET, value)).unwrap_or_default();
        metadata.filter_metadata.insert(SUBSET_NAMESPACE.to_owned(), fields);
        first.metadata_context = Some(metadata);
        Played::new(SETTINGS).asked(first).subset
    };
    let both = vec!["10.0.0.1:80".to_owned(), "10.0.0.2:80".to_owned()];
    assert_eq!(subset_of(Some(list(vec![text("10.0.0.1:80"), text("10.0.0.2:80")]))), Some(both.clone()));
    assert_eq!(subset_of(Some(value::Kind::Text("10.0.0.1:80, 10.0.0.2:80".to_owned()))), Some(both));
    assert_eq!(subset_of(Some(list(vec![]))), Some(vec![]));
    assert_eq!(subset_of(None), None);
}

#[test]
fn a_body_that_is_too_large_is_refused_as_soon_as_that_is_known() {
    let settings = ExchangeSettings { max_body_bytes: 10, ..SETTINGS };
    let mut announced = Played::new(settings);
    let long = message(Request::RequestHeaders(head(&[("content-length", "11")], false)));
    assert!(matches!(announced.take(long), Step::TooLarge));
    let mut grown = Played::new(settings);
    grown.take(request_head(false));
    assert!(matches!(grown.take(message(Request::RequestBody(body(vec![0; 10], false)))), Step::Nothing));
    assert!(matches!(grown.take(message(Request::RequestBody(body(vec![0; 1], true)))), Step::TooLarge));
    let refusal = Refusal { status: http::StatusCode::PAYLOAD_TOO_LARGE, ..Refusal::default() };
    grown.exchange.refuse(&refusal, &mut grown.answers);
    let answers = grown.answered();
    let Some(Response::ImmediateResponse(answer)) = &answers[0].response else { panic!("{answers:?}") };
    assert_eq!(answer.status.unwrap().code, 413);
    assert!(grown.exchange.is_over());
}

#[test]
fn a_buffered_body_is_answered_after_its_head() {
    let mut first = request_head(false);
    let mode = |mode: BodySendMode| i32::from(mode);
    let config = ProtocolConfiguration {
        request_body_mode: mode(BodySendMode::Buffered),
        response_body_mode: mode(BodySendMode::Streamed),
    };
    first.protocol_config = Some(config);
    let mut played = Played::new(SETTINGS);
    played.take(first.clone());
    assert!(matches!(played.answered()[..], [ref head] if head.dynamic_metadata.is_none()));
    played.asked(message(Request::RequestBody(body("{}", false))));
    played.choose();
    let answers = played.answered();
    assert_eq!(answers.len(), 1);
    assert!(matches!(answers[0].response, Some(Response::RequestBody(_))));
    assert!(answers[0].dynamic_metadata.is_some());
    assert_eq!(set_headers(&answers[0])[0].0, DESTINATION);
    played.take(message(Request::RequestTrailers(trailers())));
    played.take(message(Request::ResponseHeaders(head(&[(":status", "200")], false))));
    played.answers.clear();
    played.take(message(Request::ResponseBody(body("x", true))));
    let answers = played.answered();
    let Some(Response::ResponseBody(unchanged)) = &answers[0].response else { panic!("{answers:?}") };
    assert_eq!(unchanged.response.as_ref().unwrap().body_mutation, None);
    // Without its body a request is chosen for by its head.
    first.protocol_config = Some(ProtocolConfiguration { request_body_mode: 0, ..config });
    assert!(Played::new(SETTINGS).asked(first.clone()).body.is_none());
    for (request_mode, answer_mode) in [(1, 0), (3, 0), (5, 0), (77, 0), (4, 5)] {
        first.protocol_config =
            Some(ProtocolConfiguration { request_body_mode: request_mode, response_body_mode: answer_mode });
        let outcome = Exchange::new(SETTINGS).take(first.clone(), &mut VecDeque::new());
        assert!(matches!(outcome, Err(ProtocolError::Mode { .. })), "{request_mode} {answer_mode}");
    }
}

#[test]
fn conformance_tests_choose_themselves_only_where_that_is_allowed() {
    let first = message(Request::RequestHeaders(head(&[(TEST_SELECTION, "10.0.0.2, 10.0.0.3")], true)));
    assert!(Played::new(SETTINGS).asked(first.clone()).forced.is_empty());
    let mut played = Played::new(ExchangeSettings { is_conformance: true, ..SETTINGS });
    assert_eq!(played.asked(first).forced, ["10.0.0.2", "10.0.0.3"]);
    played.choose();
    played.answers.clear();
    played.take(message(Request::ResponseHeaders(head(&[(":status", "200")], true))));
    let answers = played.answered();
    let Some(Response::ResponseHeaders(head)) = &answers[0].response else { panic!("{answers:?}") };
    let mutation = head.response.as_ref().unwrap().header_mutation.as_ref().unwrap();
    assert_eq!(mutation.set_headers[0].header.as_ref().unwrap().key, TEST_SERVED);
}

#[test]
fn headers_of_sidecars_come_from_the_choice_alone() {
    let prefill_endpoint = Some("10.0.0.9:8000".to_owned());
    let (common, _) = Choice { prefill_endpoint, ..choice() }.head(None);
    let mutation = common.header_mutation.unwrap();
    assert!(mutation.set_headers.iter().any(|set| set.header.as_ref().unwrap().key == PREFILLER));
    assert!(!mutation.remove_headers.iter().any(|name| name == PREFILLER));
    let (common, _) = choice().head(None);
    assert!(common.header_mutation.unwrap().remove_headers.iter().any(|name| name == PREFILLER));
}

#[test]
fn what_comes_in_a_wrong_order_is_named() {
    let second_head = || request_head(false);
    let piece = || message(Request::RequestBody(body("x", false)));
    let answer_piece = || message(Request::ResponseBody(body("x", false)));
    for (before, wrong, expected) in [
        (vec![], piece(), "request_body came; allowed now: request_headers"),
        (vec![second_head()], second_head(), "request_headers came; allowed now: request_body"),
        (vec![second_head()], answer_piece(), "response_body came; allowed now: request_body"),
    ] {
        let mut played = Played::new(SETTINGS);
        for message in before {
            played.take(message);
        }
        let error = played.exchange.take(wrong, &mut played.answers).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
        assert!(played.exchange.is_over());
    }
    // A data plane may answer by itself before the request is whole.
    let mut played = Played::new(SETTINGS);
    played.take(second_head());
    let own = message(Request::ResponseHeaders(head(&[(":status", "504")], true)));
    assert!(matches!(played.take(own), Step::Answered(_)));
    assert!(played.exchange.is_over());
}

fn any_message() -> impl Strategy<Value = ProcessingRequest> {
    let piece =
        || (0_usize..100_000, any::<bool>()).prop_map(|(n_bytes, is_last)| body(vec![1; n_bytes], is_last));
    let kind = prop_oneof![
        any::<bool>().prop_map(|is_last| Some(Request::RequestHeaders(head(&[("a", "b")], is_last)))),
        any::<bool>().prop_map(|is_last| Some(Request::ResponseHeaders(head(&[], is_last)))),
        piece().prop_map(|piece| Some(Request::RequestBody(piece))),
        piece().prop_map(|piece| Some(Request::ResponseBody(piece))),
        Just(Some(Request::RequestTrailers(trailers()))),
        Just(Some(Request::ResponseTrailers(trailers()))),
        Just(None),
    ];
    let modes = prop_oneof![
        3 => Just(None),
        1 => (0..7_i32, 0..7_i32).prop_map(|(request_body_mode, response_body_mode)| {
            Some(ProtocolConfiguration { request_body_mode, response_body_mode })
        }),
    ];
    (kind, modes).prop_map(|(request, protocol_config)| ProcessingRequest {
        request,
        protocol_config,
        ..ProcessingRequest::default()
    })
}

proptest! {
    #[test]
    fn no_order_of_messages_breaks_an_exchange(
        first in any::<bool>(),
        messages in prop::collection::vec((any_message(), any::<bool>()), 0..24),
    ) {
        let mut played = Played::new(SETTINGS);
        let start = first.then(|| (request_head(false), true));
        let (mut n_picks, mut n_heads) = (0, 0);
        for (message, is_chosen) in start.into_iter().chain(messages) {
            let was_over = played.exchange.is_over();
            match played.exchange.take(message, &mut played.answers) {
                Ok(Step::Pick(_)) => {
                    n_picks += 1;
                    if is_chosen {
                        played.choose();
                    } else {
                        played.exchange.refuse(&Refusal::default(), &mut played.answers);
                    }
                }
                Ok(Step::TooLarge) => played.exchange.refuse(&Refusal::default(), &mut played.answers),
                Ok(Step::Answered(_)) => n_heads += 1,
                Ok(Step::Nothing | Step::Data { .. }) => {}
                Err(_) => prop_assert!(played.exchange.is_over()),
            }
            // What is over stays over, and answers nothing more.
            if was_over {
                prop_assert!(played.exchange.is_over());
                prop_assert!(played.answers.is_empty());
            }
            played.answers.clear();
        }
        prop_assert!(n_picks <= 1 && n_heads <= 1);
    }
}
