//! A proxy before a rank: it reads every request and does what the test says, at an exact place.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use kvik_memory::ranks::frame::{MAX_FRAME_BYTES, Reply, Request};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    connect, listen, recv, send, shutdown, socket_with,
};

/// What happens to one request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Act {
    Forward,
    /// The rank gets it twice and must say the same twice.
    Repeat,
    /// Both connections end before the rank gets it.
    BreakBefore,
    /// The rank has done it, and its reply is lost with the connections.
    BreakAfter,
    /// The victim dies before the rank gets it; no connection is accepted again.
    KillBefore,
    /// The rank has done it and its victim dies before the reply is passed on.
    KillAfter,
    /// The leader gets bytes that are no reply.
    Garble,
}

/// Listens where the leader looks for a rank, and passes frames on.
pub(crate) struct Proxy {
    listener: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// A blocking socket of packets.
pub(crate) struct Packets(OwnedFd);

impl Proxy {
    /// `decide` sees each request; `kill` ends the victim and returns when it is dead.
    pub(crate) fn start(
        front: &Path,
        back: &Path,
        mut decide: impl FnMut(&Request) -> Act + Send + 'static,
        mut kill: impl FnMut() + Send + 'static,
    ) -> Self {
        let listener = Arc::new(new_socket());
        bind(&listener, &SocketAddrUnix::new(front).unwrap()).unwrap();
        listen(&listener, 4).unwrap();
        let back = back.to_owned();
        let accepting = Arc::clone(&listener);
        let thread = std::thread::spawn(move || {
            while let Ok(leader) = accept(&accepting) {
                let leader = Packets(leader);
                let Some(rank) = Packets::try_connect(&back) else {
                    continue;
                };
                if pass_on(&leader, &rank, &mut decide) {
                    // The dead do not listen.
                    let _ = shutdown(&accepting, Shutdown::Both);
                    kill();
                    return;
                }
            }
        });
        Self { listener, thread: Some(thread) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = shutdown(&self.listener, Shutdown::Both);
        let outcome = self.thread.take().unwrap().join();
        assert!(outcome.is_ok() || std::thread::panicking(), "the proxy saw something wrong");
    }
}

/// Passes frames on until a connection ends; `true` when the victim is to be killed.
fn pass_on(leader: &Packets, rank: &Packets, decide: &mut impl FnMut(&Request) -> Act) -> bool {
    while let Some(frame) = leader.receive() {
        let request = Request::decode(&frame).unwrap();
        let act = decide(&request);
        match act {
            Act::BreakBefore => return false,
            Act::KillBefore => return true,
            _ => {}
        }
        let Some(reply) = rank.ask_bytes(&frame) else {
            return false;
        };
        match act {
            Act::BreakAfter => return false,
            Act::KillAfter => return true,
            Act::Garble => leader.send(b"KVRA but no reply"),
            Act::Repeat => {
                assert_eq!(rank.ask_bytes(&frame).as_deref(), Some(&reply[..]), "{request:?} said twice");
                leader.send(&reply)
            }
            _ => leader.send(&reply),
        };
    }
    false
}

impl Packets {
    pub(crate) fn connect(path: &Path) -> Self {
        Self::try_connect(path).unwrap()
    }

    pub(crate) fn try_connect(path: &Path) -> Option<Self> {
        Self::try_connect_to(&SocketAddrUnix::new(path).unwrap())
    }

    pub(crate) fn try_connect_to(address: &SocketAddrUnix) -> Option<Self> {
        let socket = new_socket();
        connect(&socket, address).is_ok().then_some(Self(socket))
    }

    /// Sends a frame; `false` where the peer is gone.
    pub(crate) fn send(&self, frame: &[u8]) -> bool {
        send(&self.0, frame, SendFlags::NOSIGNAL).is_ok()
    }

    /// The next frame; `None` where the peer is gone.
    pub(crate) fn receive(&self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; MAX_FRAME_BYTES];
        match recv(&self.0, &mut buffer[..], RecvFlags::empty()) {
            Ok((_, n_bytes)) if n_bytes > 0 => Some(buffer[..n_bytes].to_vec()),
            _ => None,
        }
    }

    /// The reply to a request; `None` where the peer is gone.
    pub(crate) fn ask(&self, request: &Request) -> Option<Reply> {
        self.ask_bytes(&request.encode()).map(|reply| Reply::decode(&reply).unwrap())
    }

    fn ask_bytes(&self, frame: &[u8]) -> Option<Vec<u8>> {
        if self.send(frame) { self.receive() } else { None }
    }
}

impl Drop for Packets {
    fn drop(&mut self) {
        let _ = shutdown(&self.0, Shutdown::Both);
    }
}

fn new_socket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}
