//! One exchange with a data plane: its messages in, answers out, and the request's hold on a worker between them.
//!
//! The answers are a stream that reads messages when it is asked for more: an exchange has no task of its own, and all that it holds goes back when
//! the data plane drops it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{self, BoxStream, StreamExt as _};
use kvik_gateway::{PickRefusal, PickRequest, Picked, Picker};
use kvik_runtime::shutdown::Shutdown;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};
use tonic::{Code, Status, Streaming};

use crate::budget::{BodyBudget, BodyShare};
use crate::exchange::{AnswerHead, Asked, Choice, Exchange, ExchangeSettings, Refusal, Step};
use crate::messages::processing_request::Request;
use crate::messages::{ProcessingRequest, ProcessingResponse};
use crate::metrics::{Metrics, Outcome};

/// Answers to a data plane.
pub(crate) type Answers = BoxStream<'static, Result<ProcessingResponse, Status>>;

/// What all exchanges share.
#[derive(Debug)]
pub(crate) struct Processor {
    pub(crate) picker: Picker,
    pub(crate) budget: Arc<BodyBudget>,
    pub(crate) max_fallbacks: usize,
    pub(crate) shows_token: bool,
    pub(crate) is_conformance: bool,
    pub(crate) metrics: Metrics,
    pub(crate) shutdown: Shutdown,
}

/// One exchange.
struct Driver {
    processor: Arc<Processor>,
    messages: Streaming<ProcessingRequest>,
    exchange: Exchange,
    answers: VecDeque<ProcessingResponse>,
    picked: Option<Picked>,
    has_answer_head: bool,
    has_answer_body: bool,
    share: BodyShare,
    /// When the request's time is over.
    deadline: Pin<Box<Sleep>>,
    is_ended: bool,
    _permit: OwnedSemaphorePermit,
}

impl Processor {
    /// Answers the messages of one exchange.
    pub(crate) fn process(
        self: Arc<Self>,
        messages: Streaming<ProcessingRequest>,
        permit: OwnedSemaphorePermit,
    ) -> Answers {
        self.metrics.open.increment(1.0);
        let settings = ExchangeSettings {
            max_body_bytes: self.picker.max_body_bytes(),
            is_conformance: self.is_conformance,
        };
        let driver = Driver {
            messages,
            exchange: Exchange::new(settings),
            answers: VecDeque::new(),
            picked: None,
            has_answer_head: false,
            has_answer_body: false,
            share: self.budget.share(),
            deadline: Box::pin(tokio::time::sleep_until(Instant::now() + self.picker.request_timeout())),
            is_ended: false,
            _permit: permit,
            processor: self,
        };
        let answers = stream::unfold(driver, async |mut driver| {
            let answer = driver.next().await?;
            Some((answer, driver))
        });
        answers.boxed()
    }
}

impl Driver {
    /// The next answer; `None` after the last one.
    async fn next(&mut self) -> Option<Result<ProcessingResponse, Status>> {
        loop {
            if let Some(answer) = self.answers.pop_front() {
                return Some(Ok(answer));
            }
            if !self.exchange.is_arriving() {
                self.share.clear();
            }
            if self.is_ended || self.exchange.is_over() {
                self.end(Outcome::Complete);
                return None;
            }
            let shutdown = self.processor.shutdown.clone();
            let message = tokio::select! {
                biased;
                message = self.messages.message() => message,
                () = &mut self.deadline => Err(self.out_of_time()),
                () = shutdown.stopping() => Err(self.stopped()),
            };
            let taken = match message {
                Ok(Some(message)) => self.take(message).await,
                Ok(None) => {
                    self.close();
                    return None;
                }
                Err(status) => Err(status),
            };
            if let Err(status) = taken {
                self.picked = None;
                self.end(if status.code() == Code::InvalidArgument { Outcome::Wrong } else { Outcome::Left });
                return Some(Err(status));
            }
        }
    }

    async fn take(&mut self, message: ProcessingRequest) -> Result<(), Status> {
        if let Some(Request::RequestBody(piece)) = &message.request {
            self.processor.metrics.body_bytes.increment(piece.body.len() as u64);
            if self.exchange.is_arriving() && !self.share.take(piece.body.len()) {
                self.refuse(self.processor.picker.bodies_full());
                return Ok(());
            }
        }
        let step = self.exchange.take(message, &mut self.answers);
        match step.map_err(|error| Status::invalid_argument(error.to_string()))? {
            Step::Nothing => {}
            Step::Pick(asked) => self.pick(*asked).await?,
            Step::TooLarge => self.refuse(self.processor.picker.too_large()),
            Step::Answered(head) => {
                let AnswerHead { status, headers, served, is_last } = *head;
                self.has_answer_head = true;
                if let Some(picked) = &mut self.picked {
                    picked.answered(status, &headers, served.as_deref());
                }
                if is_last {
                    self.complete();
                }
            }
            Step::Data { bytes, is_last } => {
                self.has_answer_body = true;
                if let Some(picked) = &mut self.picked {
                    picked.data(&bytes);
                }
                if is_last {
                    self.complete();
                }
            }
        }
        Ok(())
    }

    async fn pick(&mut self, asked: Asked) -> Result<(), Status> {
        let Asked { path, headers, body, subset, forced } = asked;
        let Processor { max_fallbacks, shows_token, .. } = *self.processor;
        let request = PickRequest { path, headers, body, subset, forced, max_fallbacks, shows_token };
        let (processor, started) = (Arc::clone(&self.processor), Instant::now());
        let picked = tokio::select! {
            biased;
            picked = processor.picker.pick(request) => picked,
            () = &mut self.deadline => return Err(self.out_of_time()),
            () = processor.shutdown.stopping() => return Err(self.stopped()),
        };
        processor.metrics.pick_seconds.record(started.elapsed().as_secs_f64());
        match picked {
            Err(refusal) => self.refuse(refusal),
            Ok(picked) => {
                let choice = Choice {
                    endpoints: picked.endpoints().map(str::to_owned).collect(),
                    prefill_endpoint: picked.prefill_endpoint().map(str::to_owned),
                    added_headers: picked.added_headers().to_vec(),
                    removed_headers: picked.removed_headers().to_vec(),
                };
                self.exchange.choose(&choice, &mut self.answers);
                self.picked = Some(picked);
            }
        }
        Ok(())
    }

    fn refuse(&mut self, refusal: PickRefusal) {
        let PickRefusal { status, reason, headers, body, .. } = refusal;
        self.exchange.refuse(&Refusal { status, reason, headers, body }, &mut self.answers);
        self.end(Outcome::Refused);
    }

    /// The answer is complete.
    fn complete(&mut self) {
        if let Some(picked) = self.picked.take() {
            picked.end();
        }
    }

    /// The data plane ends the exchange: of its own accord if it sends no bodies of answers, else because its client has left.
    fn close(&mut self) {
        if self.has_answer_head && !self.has_answer_body {
            self.complete();
            self.end(Outcome::Complete);
        } else {
            self.picked = None;
            self.end(Outcome::Left);
        }
    }

    fn out_of_time(&mut self) -> Status {
        self.end(Outcome::Timeout);
        Status::deadline_exceeded("the request was not answered within its time")
    }

    fn stopped(&mut self) -> Status {
        self.end(Outcome::Left);
        Status::unavailable("the picker ends")
    }

    /// Counts the end; only the first one counts.
    fn end(&mut self, outcome: Outcome) {
        if !self.is_ended {
            self.is_ended = true;
            self.processor.metrics.open.decrement(1.0);
            self.processor.metrics.ended(outcome);
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.has_answer_head && self.exchange.sees_heads_only() {
            self.complete();
            self.end(Outcome::Complete);
        }
        self.end(Outcome::Left);
    }
}
