//! One HTTP request in the messages of a data plane: a state machine without I/O.
//!
//! ```text
//! Head --> Body --> Picking --> Sent --> Answer --> Over
//! ```
//!
//! The request is held until it is whole, since only its body says which worker has its prompt. Then its head goes on with the choice,
//! the whole body behind it in pieces, and its trailers. The answer passes as it comes.
//!
//! | body mode of requests | when the choice is made | what goes back |
//! |---|---|---|
//! | `FULL_DUPLEX_STREAMED` | after the last piece | head, body, trailers |
//! | `BUFFERED` | after the only piece, the head is answered before | the choice beside the body |
//! | `NONE` | after the head, without a prompt | head |
//!
//! Data planes that do not say which mode they use use the first one. Messages in another order, and other modes, are errors that end
//! the exchange. An answer that comes before the request is whole is the data plane's own.

mod answers;
mod body;
mod heads;

use std::collections::VecDeque;

use bytes::Bytes;

pub use self::answers::{Choice, DESTINATION, LOAD_BALANCER_NAMESPACE, MAX_PIECE_BYTES, PREFILLER, Refusal};
use self::answers::{Side, set_header};
use self::body::CollectedBody;
use self::heads::RequestHead;
pub use self::heads::{AnswerHead, SERVED, SUBSET, SUBSET_NAMESPACE, TEST_SELECTION};
use crate::error::ProtocolError;
use crate::messages::processing_request::Request;
use crate::messages::{
    BodySendMode, CommonResponse, HeaderMutation, HttpBody, HttpHeaders, Metadata, ProcessingRequest,
    ProcessingResponse, ProtocolConfiguration,
};

/// The header in which conformance tests find the endpoint that answered.
const TEST_SERVED: &str = "x-conformance-test-served-endpoint";

/// What is still to come of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The head of the request.
    Head,
    /// The rest of the request.
    Body,
    /// The choice.
    Picking,
    /// The head of the answer.
    Sent,
    /// The rest of the answer.
    Answer,
    /// Nothing.
    Over,
}

/// One HTTP request and its answer.
#[derive(Debug)]
pub struct Exchange {
    phase: Phase,
    settings: ExchangeSettings,
    request_mode: BodySendMode,
    answer_mode: BodySendMode,
    head: RequestHead,
    subset: Option<Vec<String>>,
    body: CollectedBody,
    /// The whole body during the choice; `None` for a request without a body.
    whole: Option<Bytes>,
    /// Whether the request ends with trailers.
    has_trailers: bool,
    /// Whether the head of the request was answered before the choice.
    is_head_answered: bool,
}

/// What an exchange may do.
#[derive(Debug, Clone, Copy)]
pub struct ExchangeSettings {
    /// Largest body of a request.
    pub max_body_bytes: usize,
    /// Whether requests say themselves which endpoint they want, and answers which they had.
    pub is_conformance: bool,
}

/// What a message asks for, beside the answers to it.
#[derive(Debug)]
pub enum Step {
    /// Nothing.
    Nothing,
    /// A worker; [`Exchange::choose`] or [`Exchange::refuse`] must follow.
    Pick(Box<Asked>),
    /// The body is too large; [`Exchange::refuse`] must follow.
    TooLarge,
    /// The head of the answer is to be noted.
    Answered(Box<AnswerHead>),
    /// A part of the answer is to be noted.
    Data {
        /// The bytes.
        bytes: Bytes,
        /// Whether nothing comes behind it.
        is_last: bool,
    },
}

/// A request that needs a worker.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// Its path.
    pub path: String,
    /// Its headers.
    pub headers: http::HeaderMap,
    /// Its body; `None` if it has none.
    pub body: Option<Bytes>,
    /// The only endpoints that may be chosen; `None` means all.
    pub subset: Option<Vec<String>>,
    /// The endpoints that a conformance test wants.
    pub forced: Vec<String>,
}

impl Exchange {
    /// Begins before the first message.
    pub fn new(settings: ExchangeSettings) -> Self {
        Self {
            phase: Phase::Head,
            settings,
            request_mode: BodySendMode::FullDuplexStreamed,
            answer_mode: BodySendMode::FullDuplexStreamed,
            head: RequestHead::default(),
            subset: None,
            body: CollectedBody::default(),
            whole: None,
            has_trailers: false,
            is_head_answered: false,
        }
    }

    /// Takes a message; what is to be sent goes to the end of `answers`.
    ///
    /// # Errors
    /// If the message may not come now, or the data plane sends bodies in a way that is not served. The exchange is over then.
    pub fn take(
        &mut self,
        message: ProcessingRequest,
        answers: &mut VecDeque<ProcessingResponse>,
    ) -> Result<Step, ProtocolError> {
        let ProcessingRequest { request, metadata_context, observability_mode, protocol_config } = message;
        let metadata = metadata_context.as_ref();
        // Windows and parts of later versions.
        let Some(request) = request else { return Ok(Step::Nothing) };
        let step = match (self.phase, request) {
            (Phase::Head, Request::RequestHeaders(head)) => {
                if observability_mode {
                    Err(ProtocolError::Observed)
                } else {
                    self.set_modes(protocol_config).map(|()| self.take_head(&head, metadata, answers))
                }
            }
            (Phase::Body, Request::RequestBody(piece)) => Ok(self.take_body(piece, metadata)),
            (Phase::Body, Request::RequestTrailers(_)) => {
                self.has_trailers = true;
                Ok(self.pick(metadata))
            }
            // The choice was made without them.
            (Phase::Sent, Request::RequestTrailers(_)) if !self.has_trailers && self.is_answered_early() => {
                self.has_trailers = true;
                answers.push_back(Side::Request.trailers());
                Ok(Step::Nothing)
            }
            (Phase::Body | Phase::Sent, Request::ResponseHeaders(head)) => {
                Ok(self.take_answer_head(&head, metadata, answers))
            }
            (Phase::Answer, Request::ResponseBody(piece)) => Ok(self.take_answer_body(piece, answers)),
            (Phase::Answer, Request::ResponseTrailers(_)) => {
                self.phase = Phase::Over;
                answers.push_back(Side::Answer.trailers());
                Ok(Step::Data { bytes: Bytes::new(), is_last: true })
            }
            (phase, request) => {
                Err(ProtocolError::Order { message: name_of(&request), expected: phase.expected() })
            }
        };
        if step.is_err() {
            self.phase = Phase::Over;
        }
        step
    }

    /// Sends the request to where the choice says.
    pub fn choose(&mut self, choice: &Choice, answers: &mut VecDeque<ProcessingResponse>) {
        if self.phase != Phase::Picking {
            return;
        }
        self.phase = Phase::Sent;
        let whole = self.whole.take();
        let is_echoed = self.request_mode == BodySendMode::FullDuplexStreamed;
        let (common, metadata) = choice.head(whole.as_ref().filter(|_| is_echoed).map(Bytes::len));
        // What comes last of a request whose head was answered before says where it goes.
        let (mut first, mut is_ended) = match (self.is_head_answered, &whole) {
            (false, _) => (Side::Request.head(common), false),
            (true, Some(_)) => (Side::Request.body(common), false),
            (true, None) => (Side::Request.trailers(), true),
        };
        first.dynamic_metadata = Some(metadata);
        answers.push_back(first);
        if let Some(body) = whole.filter(|_| is_echoed) {
            Side::Request.pieces(&body, !self.has_trailers, answers);
        }
        is_ended |= !self.has_trailers;
        if !is_ended {
            answers.push_back(Side::Request.trailers());
        }
    }

    /// Answers the client in place of a worker.
    pub fn refuse(&mut self, refusal: &Refusal, answers: &mut VecDeque<ProcessingResponse>) {
        self.phase = Phase::Over;
        self.whole = None;
        self.body = CollectedBody::default();
        answers.push_back(refusal.message());
    }

    /// Whether nothing more comes of it.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Whether the data plane sends no bodies of answers, so that their heads are all that comes of them.
    pub fn sees_heads_only(&self) -> bool {
        self.answer_mode == BodySendMode::None
    }

    /// Whether the request is still arriving.
    pub fn is_arriving(&self) -> bool {
        matches!(self.phase, Phase::Head | Phase::Body)
    }

    fn set_modes(&mut self, config: Option<ProtocolConfiguration>) -> Result<(), ProtocolError> {
        let Some(config) = config else { return Ok(()) };
        let mode = |field, number| {
            BodySendMode::try_from(number)
                .map_err(|_| ProtocolError::Mode { field, mode: format!("{number}") })
        };
        let request_mode = mode("request_body_mode", config.request_body_mode)?;
        let answer_mode = mode("response_body_mode", config.response_body_mode)?;
        let allowed = [BodySendMode::None, BodySendMode::Buffered, BodySendMode::FullDuplexStreamed];
        if !allowed.contains(&request_mode) {
            return Err(ProtocolError::Mode {
                field: "request_body_mode",
                mode: format!("{request_mode:?}"),
            });
        }
        if answer_mode == BodySendMode::Grpc {
            return Err(ProtocolError::Mode {
                field: "response_body_mode",
                mode: format!("{answer_mode:?}"),
            });
        }
        (self.request_mode, self.answer_mode) = (request_mode, answer_mode);
        Ok(())
    }

    fn take_head(
        &mut self,
        head: &HttpHeaders,
        metadata: Option<&Metadata>,
        answers: &mut VecDeque<ProcessingResponse>,
    ) -> Step {
        self.phase = Phase::Body;
        self.head = RequestHead::read(head);
        let n_announced_bytes = self.head.n_announced_bytes.unwrap_or(0);
        if head.end_of_stream || self.request_mode == BodySendMode::None {
            return self.pick(metadata);
        }
        if self.settings.max_body_bytes < n_announced_bytes {
            return Step::TooLarge;
        }
        self.subset = heads::subset(metadata);
        self.body = CollectedBody::expecting(n_announced_bytes);
        if self.request_mode == BodySendMode::Buffered {
            self.is_head_answered = true;
            answers.push_back(Side::Request.head(CommonResponse::default()));
        }
        Step::Nothing
    }

    fn take_body(&mut self, piece: HttpBody, metadata: Option<&Metadata>) -> Step {
        if self.settings.max_body_bytes - self.body.len() < piece.body.len() {
            return Step::TooLarge;
        }
        self.body.push(piece.body);
        self.whole.get_or_insert_default();
        // A buffered body is there as a whole, whether or not trailers follow.
        if piece.end_of_stream || self.request_mode == BodySendMode::Buffered {
            return self.pick(metadata);
        }
        Step::Nothing
    }

    fn pick(&mut self, metadata: Option<&Metadata>) -> Step {
        self.phase = Phase::Picking;
        if self.whole.is_some() {
            self.whole = Some(self.body.take());
        }
        let forced = if self.settings.is_conformance { self.head.test_selection() } else { Vec::new() };
        let RequestHead { path, headers, .. } = std::mem::take(&mut self.head);
        Step::Pick(Box::new(Asked {
            path,
            headers,
            body: self.whole.clone(),
            subset: self.subset.take().or_else(|| heads::subset(metadata)),
            forced,
        }))
    }

    fn take_answer_head(
        &mut self,
        head: &HttpHeaders,
        metadata: Option<&Metadata>,
        answers: &mut VecDeque<ProcessingResponse>,
    ) -> Step {
        let head = AnswerHead::read(head, metadata);
        self.phase = if head.is_last { Phase::Over } else { Phase::Answer };
        self.body = CollectedBody::default();
        let mut common = CommonResponse::default();
        if self.settings.is_conformance {
            let served = head.served.clone().unwrap_or_else(|| "none".to_owned());
            let set_headers = vec![set_header(TEST_SERVED, served.into())];
            common.header_mutation = Some(HeaderMutation { set_headers, remove_headers: Vec::new() });
        }
        answers.push_back(Side::Answer.head(common));
        Step::Answered(Box::new(head))
    }

    fn take_answer_body(&mut self, piece: HttpBody, answers: &mut VecDeque<ProcessingResponse>) -> Step {
        let HttpBody { body, end_of_stream } = piece;
        if self.answer_mode == BodySendMode::FullDuplexStreamed {
            Side::Answer.pieces(&body, end_of_stream, answers);
        } else {
            answers.push_back(Side::Answer.body(CommonResponse::default()));
        }
        if end_of_stream {
            self.phase = Phase::Over;
        }
        Step::Data { bytes: body, is_last: end_of_stream }
    }

    /// Whether the request may have trailers that the choice did not wait for.
    fn is_answered_early(&self) -> bool {
        self.request_mode != BodySendMode::FullDuplexStreamed
    }
}

impl Phase {
    /// What may come, for people.
    fn expected(self) -> &'static str {
        match self {
            Self::Head => "request_headers",
            Self::Body => "request_body, request_trailers or response_headers",
            Self::Picking => "nothing before the choice",
            Self::Sent => "response_headers",
            Self::Answer => "response_body or response_trailers",
            Self::Over => "nothing",
        }
    }
}

fn name_of(request: &Request) -> &'static str {
    match request {
        Request::RequestHeaders(_) => "request_headers",
        Request::ResponseHeaders(_) => "response_headers",
        Request::RequestBody(_) => "request_body",
        Request::ResponseBody(_) => "response_body",
        Request::RequestTrailers(_) => "request_trailers",
        Request::ResponseTrailers(_) => "response_trailers",
    }
}

#[cfg(test)]
mod tests;
