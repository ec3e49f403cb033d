//! One phase of a transaction: the same requests to all ranks at once, each rank at its own pace.

use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::remote::Remote;
use crate::geometry::Extent;
use crate::ranks::frame::{Body, Kind, MAX_FRAME_EXTENTS, Reply, Request, Status};
use crate::ranks::participant::Participant;
use crate::socket::{FrameBuffer, wait_ready};

/// A request with its bytes, which are the same for all ranks.
#[derive(Debug)]
pub(super) struct Frame {
    request: Request,
    bytes: Vec<u8>,
}

/// The requests of one transaction: all prepares, then the commit.
#[derive(Debug)]
pub(super) struct Script {
    kind: Kind,
    frames: Vec<Frame>,
}

/// How a phase ended for one rank.
#[derive(Debug)]
pub(super) enum Conclusion {
    /// The rank did all, or said why not.
    Answered(u32, Reply),
    /// The rank has no part of the transaction: nothing of it was sent.
    Unreached {
        /// The rank.
        rank: u32,
        /// What happened.
        reason: String,
    },
    /// The rank may have done any part of it.
    Lost {
        /// The rank.
        rank: u32,
        /// What happened.
        reason: String,
    },
}

/// How far one rank is.
struct Progress<'remotes> {
    remote: &'remotes mut Remote,
    /// The frame that is to be sent or answered.
    next: usize,
    is_sent: bool,
    /// Whether this rank has got anything of the transaction.
    is_reached: bool,
    /// Whether it was connected again in this phase; a second break is final.
    is_resumed: bool,
    conclusion: Option<Conclusion>,
}

// === impl Frame ===

impl Frame {
    fn new(request: Request) -> Self {
        Self { bytes: request.encode(), request }
    }
}

// === impl Script ===

impl Script {
    /// The requests for `extents`, in as many parts as frames are needed.
    pub(super) fn new(kind: Kind, transaction: u64, group: u32, extents: &[Extent]) -> Self {
        let mut frames: Vec<Frame> = extents
            .chunks(MAX_FRAME_EXTENTS)
            .enumerate()
            .map(|(part, extents)| {
                let body = Body::Prepare { kind, part: part as u32, extents: extents.to_vec() };
                Frame::new(Request { transaction, group, body })
            })
            .collect();
        frames.push(Frame::new(Request { transaction, group, body: Body::Commit(kind) }));
        Self { kind, frames }
    }

    pub(super) fn prepares(&self) -> &[Frame] {
        &self.frames[..self.frames.len() - 1]
    }

    pub(super) fn all(&self) -> &[Frame] {
        &self.frames
    }

    pub(super) fn transaction(&self) -> u64 {
        self.frames[0].request.transaction
    }

    pub(super) fn abort(&self) -> Frame {
        Frame::new(Request { body: Body::Abort(self.kind), ..self.frames[0].request })
    }
}

/// Takes all connected ranks and the local one through `script` from frame `start` on.
///
/// A rank whose connection breaks is connected again once and gets the script from its first frame: it
/// has dropped what was not committed, and answers the rest as before. A rank that has not concluded
/// by `deadline` is disconnected.
pub(super) fn run(
    remotes: &mut [Remote],
    local: Option<&mut (u32, Participant)>,
    script: &[Frame],
    start: usize,
    deadline: Instant,
    buffer: &mut FrameBuffer,
) -> Vec<Conclusion> {
    let mut ranks: Vec<Progress<'_>> = remotes
        .iter_mut()
        .filter(|remote| remote.is_connected())
        .map(|remote| Progress {
            remote,
            next: start,
            is_sent: false,
            is_reached: 0 < start,
            is_resumed: false,
            conclusion: None,
        })
        .collect();
    for rank in &mut ranks {
        rank.advance(script, deadline, buffer);
    }
    // The others work while this one does.
    let mut conclusions = Vec::with_capacity(ranks.len() + 1);
    conclusions.extend(local.and_then(|(rank, participant)| run_local(*rank, participant, &script[start..])));
    while ranks.iter().any(|rank| rank.conclusion.is_none()) {
        let mut descriptors: Vec<PollFd<'_>> = ranks.iter().filter_map(Progress::descriptor).collect();
        let reason = match wait_ready(&mut descriptors, Some(deadline)) {
            Ok(true) => None,
            Ok(false) => Some("no answer in time".to_owned()),
            Err(error) => Some(format!("poll: {error}")),
        };
        for rank in ranks.iter_mut().filter(|rank| rank.conclusion.is_none()) {
            match &reason {
                None => rank.advance(script, deadline, buffer),
                Some(reason) => rank.lose(reason.clone()),
            }
        }
    }
    conclusions.extend(ranks.into_iter().filter_map(|rank| rank.conclusion));
    conclusions
}

/// The local rank's answer to the last frame that it was given.
fn run_local(rank: u32, participant: &mut Participant, frames: &[Frame]) -> Option<Conclusion> {
    let mut conclusion = None;
    for frame in frames {
        let reply = participant.handle(&frame.request, 0);
        let is_done = reply.status == Status::Done;
        conclusion = Some(Conclusion::Answered(rank, reply));
        if !is_done {
            break;
        }
    }
    conclusion
}

// === impl Progress ===

impl Progress<'_> {
    /// What this rank waits for; `None` when it has concluded.
    fn descriptor(&self) -> Option<PollFd<'_>> {
        let connection = self.remote.connection().filter(|_| self.conclusion.is_none())?;
        Some(PollFd::new(connection, if self.is_sent { PollFlags::IN } else { PollFlags::OUT }))
    }

    /// Sends and receives until the rank has concluded or would have to wait.
    fn advance(&mut self, script: &[Frame], deadline: Instant, buffer: &mut FrameBuffer) {
        while self.conclusion.is_none() {
            let Some(connection) = self.remote.connection() else {
                return self.lose("not connected".to_owned());
            };
            let frame = &script[self.next];
            let broken = if self.is_sent {
                match connection.receive(buffer) {
                    Ok(None) => return,
                    Ok(Some(bytes)) => match Reply::decode(bytes) {
                        Ok(reply) if self.remote.is_answered_by(&frame.request, &reply) => {
                            self.take_reply(reply, script.len());
                            continue;
                        }
                        Ok(_) => return self.lose("the rank answered something else".to_owned()),
                        Err(error) => return self.lose(error.to_string()),
                    },
                    Err(error) => error,
                }
            } else {
                match connection.send(&frame.bytes) {
                    Ok(true) => {
                        self.is_sent = true;
                        self.is_reached = true;
                        return;
                    }
                    Ok(false) => return,
                    Err(error) => error,
                }
            };
            self.reconnect(&broken, deadline, buffer);
        }
    }

    fn take_reply(&mut self, reply: Reply, n_frames: usize) {
        self.is_sent = false;
        self.next += 1;
        if reply.status != Status::Done || self.next == n_frames {
            self.conclusion = Some(Conclusion::Answered(self.remote.rank(), reply));
        }
    }

    fn reconnect(&mut self, broken: &std::io::Error, deadline: Instant, buffer: &mut FrameBuffer) {
        if self.is_resumed {
            return self.lose(broken.to_string());
        }
        self.is_resumed = true;
        match self.remote.resume(deadline, buffer) {
            Ok(()) => {
                self.next = 0;
                self.is_sent = false;
            }
            Err(reason) => self.lose(format!("{broken}; {reason}")),
        }
    }

    fn lose(&mut self, reason: String) {
        self.remote.disconnect();
        let rank = self.remote.rank();
        self.conclusion = Some(if self.is_reached {
            Conclusion::Lost { rank, reason }
        } else {
            Conclusion::Unreached { rank, reason }
        });
    }
}
