//! Engines that do one part of requests, and check every field of what they are sent as vLLM and `SGLang` do.
//!
//! KV is a table that all engines of a test share: who computed which prompt under which name. An engine that is told to use KV finds
//! the prompt there and compares it with its own, so a test fails if KV of another prompt, or KV that is no longer there, is ever used.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::fields;

/// Which engine it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// vLLM with `NixlConnector`.
    Nixl,
    /// vLLM with the P2P tier.
    P2p,
    /// vLLM with a connector that is told nothing.
    Shared,
    /// `SGLang`, in either of its two modes.
    Sglang,
}

/// What an engine does instead of its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Answers with this status before it looks at the request.
    Refuse(u16),
    /// Breaks the connection when it has the request.
    Die,
    /// Does not answer.
    Hang,
    /// Answers with this status once it is let go on.
    RefuseLater(u16),
    /// Sends the head of a stream and breaks the connection.
    DieAfterHead,
    /// Sends a part of its stream and breaks the connection.
    DieInStream,
    /// Sends its head and all but the end of its body, whose end waits.
    HoldEnd,
    /// Cannot load KV: ends with an error, in a stream as its first event.
    FailToLoad,
    /// Computes the prompt and hands nothing over.
    HandOverNothing,
}

/// KV of all engines: the prompt behind each name.
#[derive(Debug, Default)]
pub(crate) struct Fabric {
    kv: Mutex<HashMap<String, String>>,
    /// Engines of `SGLang` that have come to a room.
    rooms: Mutex<HashMap<u64, usize>>,
    changed: Notify,
    /// What must never happen.
    pub(crate) wrongs: Mutex<Vec<String>>,
}

#[derive(Debug)]
pub(crate) struct EngineState {
    kind: Kind,
    number: usize,
    fabric: Arc<Fabric>,
    pub(crate) faults: Mutex<Vec<Fault>>,
    /// The bodies of requests, as they came.
    pub(crate) seen: Mutex<Vec<Bytes>>,
    pub(crate) n_cancelled: AtomicUsize,
    pub(crate) go_on: Notify,
}

/// A running engine; gone when dropped.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<EngineState>,
    _stop: DropGuard,
}

/// Counts a request that the other side gave up.
struct Open {
    state: Arc<EngineState>,
    is_complete: bool,
}

/// A body that is written while it is sent.
struct Written(mpsc::Receiver<std::io::Result<Bytes>>);

type Answer = Response<Written>;

// === impl Engine ===

impl Engine {
    pub(crate) async fn start(kind: Kind, fabric: &Arc<Fabric>) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(EngineState {
            kind,
            number: NEXT.fetch_add(1, Ordering::SeqCst),
            fabric: Arc::clone(fabric),
            faults: Mutex::default(),
            seen: Mutex::default(),
            n_cancelled: AtomicUsize::new(0),
            go_on: Notify::new(),
        });
        let stop = CancellationToken::new();
        tokio::spawn(serve(listener, Arc::clone(&state), stop.clone()));
        Self { address, state, _stop: stop.drop_guard() }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The next requests meet these faults, one each.
    pub(crate) fn fail(&self, faults: &[Fault]) {
        *self.state.faults.lock() = faults.to_vec();
    }

    pub(crate) fn n_seen(&self) -> usize {
        self.state.seen.lock().len()
    }

    /// The body of a request, as JSON.
    pub(crate) fn body(&self, number: usize) -> Value {
        serde_json::from_slice(&self.state.seen.lock()[number]).unwrap()
    }

    pub(crate) fn n_cancelled(&self) -> usize {
        self.state.n_cancelled.load(Ordering::SeqCst)
    }
}

/// The text that every engine generates after a prompt.
pub(crate) fn text_after(prompt: &str) -> String {
    let sum = prompt.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
    format!("after {} bytes: {sum:08x}", prompt.len())
}

async fn serve(listener: TcpListener, state: Arc<EngineState>, stop: CancellationToken) {
    // Dropped with this task: an engine that is gone has no connections.
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else { continue };
        stream.set_nodelay(true).unwrap();
        let state = Arc::clone(&state);
        connections.spawn(async move {
            let service = service_fn(move |request| handle(Arc::clone(&state), request));
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn handle(state: Arc<EngineState>, request: Request<Incoming>) -> Result<Answer, std::io::Error> {
    let (parts, body) = request.into_parts();
    if parts.method == Method::GET {
        return Ok(answer(200, &json!({"object": "list", "data": [{"id": "m"}]})));
    }
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    state.seen.lock().push(body.clone());
    let open = Open { state: Arc::clone(&state), is_complete: false };
    let fault = {
        let mut faults = state.faults.lock();
        if faults.is_empty() { None } else { Some(faults.remove(0)) }
    };
    match fault {
        Some(Fault::Refuse(status)) => {
            open.complete();
            return Ok(answer(status, &json!({"error": {"message": "told to refuse"}})));
        }
        Some(Fault::Die) => {
            open.complete();
            return Err(std::io::Error::other("told to die"));
        }
        Some(Fault::Hang) => std::future::pending().await,
        Some(Fault::RefuseLater(status)) => {
            state.go_on.notified().await;
            open.complete();
            return Ok(answer(status, &json!({"error": {"message": "told to refuse"}})));
        }
        _ => {}
    }
    let is_chat = parts.uri.path() == "/v1/chat/completions";
    let read = fields::read(state.kind, is_chat, &body);
    let fields = match read {
        Ok(fields) => fields,
        Err(problem) => {
            open.complete();
            return Ok(answer(400, &json!({"error": {"message": problem}})));
        }
    };
    let loaded = if fault == Some(Fault::FailToLoad) && fields.uses_foreign_kv() {
        Err("told to fail".to_owned())
    } else {
        state.work(&fields).await
    };
    let params = match loaded {
        Ok(params) => params.filter(|_| fault != Some(Fault::HandOverNothing)),
        Err(problem) => {
            let error = json!({"error": {"message": problem}});
            if fields.is_stream {
                return Ok(stream(open, vec![format!("data: {error}\n\n")], None));
            }
            open.complete();
            return Ok(answer(500, &error));
        }
    };
    let text = text_after(&fields.prompt);
    if !fields.is_stream {
        open.complete();
        let choice = if is_chat { json!({"message": {"content": text}}) } else { json!({"text": text}) };
        return Ok(answer(200, &json!({"choices": [choice], "kv_transfer_params": params})));
    }
    let events = text.split_inclusive(' ').map(|piece| {
        let choice = if is_chat { json!({"delta": {"content": piece}}) } else { json!({"text": piece}) };
        format!("data: {}\n\n", json!({"choices": [choice]}))
    });
    let events: Vec<String> = events.chain(["data: [DONE]\n\n".to_owned()]).collect();
    Ok(stream(open, events, fault))
}

impl EngineState {
    /// Computes a prompt or takes its KV from where the request says; returns what is handed over.
    async fn work(&self, fields: &fields::Fields) -> Result<Option<Value>, String> {
        let Some(params) = &fields.params else { return Ok(None) };
        if let fields::Params::Room { room } = params {
            *self.fabric.rooms.lock().entry(*room).or_default() += 1;
            self.fabric.changed.notify_waiters();
            loop {
                let changed = self.fabric.changed.notified();
                if self.fabric.rooms.lock()[room] == 2 {
                    return Ok(None);
                }
                changed.await;
            }
        }
        match params {
            fields::Params::Compute => {
                let id = format!("cmpl-{}-{}", self.number, self.seen.lock().len());
                self.fabric.kv.lock().insert(id.clone(), fields.prompt.clone());
                Ok(Some(json!({
                    "do_remote_prefill": true, "do_remote_decode": false,
                    "remote_block_ids": [[4, 5, 6]], "remote_engine_id": format!("engine-{}", self.number),
                    "remote_request_id": id, "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
                    "dcp_size": 1, "pp_size": 1, "remote_num_tokens": fields.prompt.len(),
                    "remote_blocks_expiry_time": null, "transfer_mode": "pull",
                })))
            }
            fields::Params::ComputeAs { id } => {
                self.fabric.kv.lock().insert(id.clone(), fields.prompt.clone());
                Ok(None)
            }
            fields::Params::Use { id } => {
                // What was read is used again for something else.
                match self.fabric.kv.lock().remove(id) {
                    None => Err(format!("there is no KV {id}")),
                    Some(prompt) => {
                        if prompt != fields.prompt {
                            self.fabric.wrongs.lock().push(format!("KV {id} of another prompt was used"));
                        }
                        Ok(None)
                    }
                }
            }
            // A holder that does not have it is asked for nothing.
            fields::Params::Source | fields::Params::Room { .. } => Ok(None),
        }
    }
}

impl Open {
    /// The request has its answer.
    fn complete(mut self) {
        self.is_complete = true;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.is_complete {
            self.state.n_cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Body for Written {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        self.0.poll_recv(context).map(|data| data.map(|data| data.map(Frame::data)))
    }
}

fn answer(status: u16, value: &Value) -> Answer {
    let (sender, receiver) = mpsc::channel(1);
    sender.try_send(Ok(Bytes::from(value.to_string()))).unwrap();
    let mut response = Response::new(Written(receiver));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// Streams `events`, as the fault says.
fn stream(open: Open, events: Vec<String>, fault: Option<Fault>) -> Answer {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let n_sent = match fault {
            Some(Fault::DieAfterHead) => 0,
            Some(Fault::DieInStream) => 1,
            Some(Fault::HoldEnd) => events.len() - 1,
            _ => events.len(),
        };
        let (sent, rest) = events.split_at(n_sent);
        for event in sent {
            if sender.send(Ok(Bytes::from(event.clone()))).await.is_err() {
                return;
            }
        }
        if fault == Some(Fault::HoldEnd) {
            let state = Arc::clone(&open.state);
            tokio::select! {
                () = state.go_on.notified() => {}
                () = sender.closed() => return,
            }
            for event in rest {
                let _ = sender.send(Ok(Bytes::from(event.clone()))).await;
            }
        } else if !rest.is_empty() {
            let _ = sender.send(Err(std::io::Error::other("told to die"))).await;
        }
        open.complete();
    });
    Response::builder().header("content-type", "text/event-stream").body(Written(receiver)).unwrap()
}
