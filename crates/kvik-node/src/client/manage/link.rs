//! One attachment of a manager: requests and answers, one after the other.
//!
//! A failure says whether the daemon may have done what was asked: only what it has not seen is asked again.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::socket::{Connection, FrameBuffer, wait_ready};
use kvik_store::{Chain, Space};
use rustix::event::{PollFd, PollFlags};

use crate::error::{NodeError, Result};
use crate::manage::{MAX_FRAME_CHUNKS, ManageAnswer, ManageRequest};
use crate::operation::MAX_CHAIN_CHUNKS;

/// An attachment.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) connection: Arc<Connection>,
    pub(super) space: Space,
    buffer: FrameBuffer,
}

/// How an exchange failed.
pub(super) enum Failure {
    /// Nothing was done: it may be asked again of a daemon that is there.
    NotAsked(NodeError),
    /// It may be done or not.
    Lost(NodeError),
}

impl Link {
    pub(super) fn new(connection: Connection, space: Space) -> Self {
        Self { connection: Arc::new(connection), space, buffer: FrameBuffer::new() }
    }

    /// Sends a chain, if the request is about one, and the request.
    pub(super) fn exchange(
        &mut self,
        chain: Option<&Chain>,
        request: &ManageRequest,
        file: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> std::result::Result<ManageAnswer, Failure> {
        // What is there before a request is no answer to it: the daemon has said that it is taken over, or is gone.
        match self.receive_now() {
            Ok(None) => {}
            Ok(Some(ManageAnswer::Moving)) => return Err(Failure::NotAsked(NodeError::Moving)),
            Ok(Some(answer)) => return Err(Failure::NotAsked(unexpected(&answer))),
            Err(error) => return Err(Failure::NotAsked(error)),
        }
        if let Some(chain) = chain {
            self.send_chain(chain, timeout)?;
        }
        let deadline = Instant::now() + timeout;
        self.send(request, file, deadline)?;
        match self.receive(deadline) {
            Ok(ManageAnswer::Moving) => Err(Failure::NotAsked(NodeError::Moving)),
            Ok(answer) => Ok(answer),
            Err(error) => Err(Failure::Lost(error)),
        }
    }

    fn send_chain(&mut self, chain: &Chain, timeout: Duration) -> std::result::Result<(), Failure> {
        let n_chunks = chain.n_chunks();
        if !chain.space().names_as(&self.space) {
            let error = NodeError::invalid("chain", &"of another space", "one that this client's space made");
            return Err(Failure::Lost(error));
        }
        if n_chunks > MAX_CHAIN_CHUNKS {
            let error = NodeError::invalid("chunks", &n_chunks, format!("at most {MAX_CHAIN_CHUNKS}"));
            return Err(Failure::Lost(error));
        }
        let chunks: Vec<_> = chain.names().iter().copied().zip(chain.digests(n_chunks)).collect();
        for part in chunks.chunks(MAX_FRAME_CHUNKS) {
            let deadline = Instant::now() + timeout;
            self.send(&ManageRequest::Chunks(part.to_vec()), None, deadline)?;
            match self.receive(deadline).map_err(Failure::Lost)? {
                ManageAnswer::Done => {}
                ManageAnswer::Moving => return Err(Failure::NotAsked(NodeError::Moving)),
                answer => return Err(Failure::Lost(unexpected(&answer))),
            }
        }
        Ok(())
    }

    /// Sends a request, which the daemon has not seen if that fails.
    fn send(
        &mut self,
        request: &ManageRequest,
        file: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> std::result::Result<(), Failure> {
        let frame = request.encode();
        let failed = || NodeError::io("ask the store daemon");
        loop {
            let sent = match file {
                Some(file) => self.connection.send_with_descriptors(&frame, &[file]),
                None => self.connection.send(&frame),
            };
            match sent {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                // Its last word may wait here.
                Err(error) => {
                    return Err(Failure::NotAsked(match self.receive_now() {
                        Ok(Some(ManageAnswer::Moving)) => NodeError::Moving,
                        _ => failed()(error),
                    }));
                }
            }
            let mut waiting = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::OUT)];
            match wait_ready(&mut waiting, Some(deadline)) {
                Ok(true) => {}
                Ok(false) => {
                    return Err(Failure::NotAsked(NodeError::Gone { reason: "it does not read requests" }));
                }
                Err(error) => return Err(Failure::NotAsked(failed()(error))),
            }
        }
    }

    fn receive(&mut self, deadline: Instant) -> Result<ManageAnswer> {
        loop {
            if let Some(answer) = self.receive_now()? {
                return Ok(answer);
            }
            let mut waiting = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::IN)];
            if !wait_ready(&mut waiting, Some(deadline)).map_err(NodeError::io("read the daemon's answer"))? {
                return Err(NodeError::Gone { reason: "it does not answer" });
            }
        }
    }

    /// The answer that is there.
    fn receive_now(&mut self) -> Result<Option<ManageAnswer>> {
        let first = self.connection.receive(&mut self.buffer).map(|frame| frame.map(<[u8]>::to_vec));
        let frame = match first {
            // A daemon that ended with a request unread: what it said before that is still there.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                self.connection.receive(&mut self.buffer).map(|frame| frame.map(<[u8]>::to_vec))
            }
            first => first,
        };
        match frame {
            Ok(frame) => frame.as_deref().map(ManageAnswer::decode).transpose(),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Err(gone()),
            Err(error) => Err(NodeError::io("read the daemon's answer")(error)),
        }
    }
}

pub(super) fn gone() -> NodeError {
    NodeError::Gone { reason: "its connection ended" }
}

pub(super) fn unexpected(answer: &ManageAnswer) -> NodeError {
    NodeError::invalid("answer of the store daemon", &format!("{answer:?}"), "one to what was asked")
}
