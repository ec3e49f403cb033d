//! Messages of a data plane: any bytes decode to a message or to an error, and any order of messages leaves an exchange in a state that it
//! can go on from or that is over.
#![no_main]

use std::collections::VecDeque;

use kvik_epp::exchange::{Choice, Exchange, ExchangeSettings, MAX_PIECE_BYTES, Refusal, Step};
use kvik_epp::messages::ProcessingRequest;
use kvik_epp::messages::processing_response::Response;
use libfuzzer_sys::fuzz_target;
use prost::Message as _;

fuzz_target!(|data: &[u8]| {
    let settings = ExchangeSettings { max_body_bytes: 1 << 16, is_conformance: data.len() % 2 == 0 };
    let (mut exchange, mut answers) = (Exchange::new(settings), VecDeque::new());
    let choice = Choice { endpoints: vec!["10.0.0.1:8000".to_owned()], ..Choice::default() };
    let mut rest = data;
    // Messages with their length in front, in two bytes.
    while let Some((length, behind)) = rest.split_at_checked(2) {
        let n_bytes = usize::from(u16::from_be_bytes([length[0], length[1]])).min(behind.len());
        let (message, behind) = behind.split_at(n_bytes);
        rest = behind;
        let Ok(message) = ProcessingRequest::decode(message) else { continue };
        let was_over = exchange.is_over();
        match exchange.take(message, &mut answers) {
            Ok(Step::Pick(asked)) if asked.headers.len() % 2 == 0 => exchange.choose(&choice, &mut answers),
            Ok(Step::Pick(_) | Step::TooLarge) => exchange.refuse(&Refusal::default(), &mut answers),
            Ok(Step::Nothing | Step::Answered(_) | Step::Data { .. }) => {}
            Err(_) => assert!(exchange.is_over()),
        }
        assert!(!was_over || (exchange.is_over() && answers.is_empty()));
        for answer in answers.drain(..) {
            let Some(Response::RequestBody(body) | Response::ResponseBody(body)) = answer.response else { continue };
            let piece = body.response.and_then(|common| common.body_mutation?.streamed_response);
            assert!(piece.is_none_or(|piece| piece.body.len() <= MAX_PIECE_BYTES));
        }
    }
});
