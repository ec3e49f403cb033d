//! Sockets between processes of one user: addresses, the check of the peer's user, and frames in and out.

use std::fmt;
use std::fs::{DirBuilder, File};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recv, recvmsg, send, sendmsg, shutdown, socket_with,
};

use crate::wire::MAX_FRAME_BYTES;

/// Descriptors that go with one frame at most.
pub const MAX_FRAME_DESCRIPTORS: usize = 4;

/// Connections that may wait to be accepted. In ordinary operation there are few; while one process takes a socket over
/// from another, all clients connect again.
const BACKLOG: i32 = 128;

/// Where a process listens.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SocketAddress {
    /// A socket file, in a directory that only this user can enter.
    Path(PathBuf),
    /// A name in the abstract namespace, which goes with its process.
    ///
    /// Any process in the network namespace may try such a name; the peer's user is checked.
    Abstract(String),
}

/// A listening socket; closing it removes its file.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// The file and its inode, to remove no other's.
    file: Option<(PathBuf, u64)>,
    owner: Owner,
}

/// An open connection to a peer of the same user; both ends see when it is dropped.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    owner: Owner,
}

/// The process at the other end, as the kernel saw it when the connection was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its id; none where it is in a namespace that this process cannot see.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
}

/// The process that made something: its forked children have a copy that must not end the original.
#[derive(Debug)]
pub(crate) struct Owner {
    pid: u32,
}

impl fmt::Display for SocketAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(formatter),
            Self::Abstract(name) => write!(formatter, "@{name}"),
        }
    }
}

// === impl SocketAddress ===

impl SocketAddress {
    fn socket_address(&self) -> io::Result<SocketAddrUnix> {
        let address = match self {
            Self::Path(path) => SocketAddrUnix::new(path.as_path()),
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
        };
        address.map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "longer than 107 bytes or with a zero byte")
        })
    }
}

// === impl Listener ===

impl Listener {
    /// Listens at an address; a file that a dead process left is replaced.
    ///
    /// The directory of a file is made with mode 0700 if it is missing. Fails where the directory
    /// belongs to another user or others can enter it, or where a live process listens already.
    pub fn open(address: &SocketAddress) -> io::Result<Self> {
        let socket_address = address.socket_address()?;
        let socket = new_socket()?;
        let SocketAddress::Path(path) = address else {
            bind(&socket, &socket_address)?;
            listen(&socket, BACKLOG)?;
            return Ok(Self { socket, file: None, owner: Owner::this_process() });
        };
        // Held until the socket listens, so that of two that start at once one sees the other live.
        let _directory = lock_private_directory(path)?;
        if let Err(error) = bind(&socket, &socket_address) {
            if error != Errno::ADDRINUSE {
                return Err(error.into());
            }
            match connect(new_socket()?, &socket_address) {
                Err(Errno::CONNREFUSED) => std::fs::remove_file(path)?,
                Err(Errno::NOENT) => {}
                _ => return Err(error.into()),
            }
            bind(&socket, &socket_address)?;
        }
        let inode = std::fs::symlink_metadata(path)?.ino();
        let file = Some((path.clone(), inode));
        let listener = Self { socket, file, owner: Owner::this_process() };
        listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// Goes on with the socket of another process, which [leaves](Self::leave) it to this one. Connections that wait
    /// are kept.
    ///
    /// # Errors
    /// If it does not listen, or its file at `address` cannot be found.
    pub fn adopt(socket: OwnedFd, address: &SocketAddress) -> io::Result<Self> {
        if !socket_acceptconn(&socket)? {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the descriptor does not listen"));
        }
        let file = match address {
            SocketAddress::Path(path) => Some((path.clone(), std::fs::symlink_metadata(path)?.ino())),
            SocketAddress::Abstract(_) => None,
        };
        Ok(Self { socket, file, owner: Owner::this_process() })
    }

    /// Closes this process' descriptor of the socket and nothing else: a process that has a copy of it goes on
    /// listening.
    pub fn leave(mut self) {
        self.file = None;
    }

    /// Takes a waiting connection; `None` where there is none, or where the caller is gone.
    ///
    /// Fails with `PermissionDenied` where the peer is another user.
    pub fn accept(&self) -> io::Result<Option<Connection>> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Connection::from_same_user(socket).map(Some),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes all threads that wait for this socket; no connection is accepted after that.
    pub fn close(&self) {
        // It can only fail for a socket that is closed already.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some((path, inode)) = self.file.take().filter(|_| self.owner.is_this_process()) else {
            return;
        };
        let Ok(_directory) = lock_private_directory(&path) else {
            return;
        };
        let is_ours = std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.ino() == inode);
        if is_ours {
            // A file that stays is replaced by the next process that listens here.
            let _ = std::fs::remove_file(&path);
        }
    }
}

// === impl Connection ===

impl Connection {
    /// Connects to a rank, without waiting.
    pub fn open(address: &SocketAddress) -> io::Result<Self> {
        let socket = new_socket()?;
        connect(&socket, &address.socket_address()?)?;
        Self::from_same_user(socket)
    }

    /// The process at the other end.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn peer(&self) -> io::Result<Peer> {
        peer_of(self.socket.as_fd())
    }

    fn from_same_user(socket: OwnedFd) -> io::Result<Self> {
        let peer_uid = peer_of(socket.as_fd())?.uid;
        let own_uid = rustix::process::geteuid().as_raw();
        if peer_uid != own_uid {
            let reason = format!("the peer is user {peer_uid}, and this process is user {own_uid}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        Ok(Self { socket, owner: Owner::this_process() })
    }

    /// The process at the other end, as the kernel saw it when the connection was made; 0 for one of another namespace.
    pub fn peer_pid(&self) -> u32 {
        self.peer().ok().and_then(|peer| peer.pid).unwrap_or(0)
    }

    /// Sends one frame; `false` where the peer's buffer is full.
    pub fn send(&self, frame: &[u8]) -> io::Result<bool> {
        loop {
            match send(&self.socket, frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => return Ok(true),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives one frame into `buffer`; `None` where there is none yet.
    ///
    /// Fails with `UnexpectedEof` where the peer is gone, and with `InvalidData` where the frame is
    /// larger than any can be.
    pub fn receive<'buffer>(&self, buffer: &'buffer mut FrameBuffer) -> io::Result<Option<&'buffer [u8]>> {
        let n_bytes = loop {
            match recv(&self.socket, &mut buffer.bytes[..], RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
                Ok((_, n_bytes)) => break n_bytes,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        buffer.frame(n_bytes).map(Some)
    }

    /// Sends one frame with descriptors, at most [`MAX_FRAME_DESCRIPTORS`]; `false` where the peer's buffer is full.
    ///
    /// # Errors
    /// If the peer is gone, or there are more descriptors.
    pub fn send_with_descriptors(&self, frame: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FRAME_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            let reason = format!("{} descriptors with one frame", descriptors.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(frame)], &mut control, flags) {
                Ok(_) => return Ok(true),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives one frame with its descriptors; `None` if no frame has arrived.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_with_descriptors<'buffer>(
        &self,
        buffer: &'buffer mut FrameBuffer,
    ) -> io::Result<Option<(&'buffer [u8], Vec<OwnedFd>)>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FRAME_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC | RecvFlags::CMSG_CLOEXEC;
        let n_bytes = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut buffer.bytes)], &mut control, flags) {
                Ok(message) => break message.bytes,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        Ok(Some((buffer.frame(n_bytes)?, descriptors)))
    }

    /// Ends the connection for both ends, also where a copy of the descriptor is left.
    pub fn close(&self) {
        // It can only fail for a socket that is closed already.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.owner.is_this_process() {
            // A copy of the descriptor in a forked child would keep the connection open for the peer.
            self.close();
        }
    }
}

// === impl Owner ===

impl Owner {
    pub(crate) fn this_process() -> Self {
        Self { pid: std::process::id() }
    }

    pub(crate) fn is_this_process(&self) -> bool {
        self.pid == std::process::id()
    }
}

/// Room for the largest frame.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Box<[u8]>,
}

impl FrameBuffer {
    /// An empty one.
    pub fn new() -> Self {
        Self { bytes: vec![0; MAX_FRAME_BYTES].into_boxed_slice() }
    }

    /// The frame of `n_bytes` that was received.
    fn frame(&self, n_bytes: usize) -> io::Result<&[u8]> {
        match self.bytes.get(..n_bytes) {
            Some([]) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended")),
            Some(frame) => Ok(frame),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {n_bytes} bytes"))),
        }
    }
}

impl Default for FrameBuffer {
    fn default() -> Self {
        Self::new()
    }
}

/// Waits until one of `descriptors` is ready; `false` when `deadline` passed first.
pub fn wait_ready(descriptors: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let timeout = deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
        match poll(descriptors, timeout.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a descriptor has something to read, or its peer is gone.
pub fn is_readable(descriptor: &PollFd<'_>) -> bool {
    descriptor.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn peer_of(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` and `length` are live for the call and `length` is the size of `peer`, of which any
    // bytes are a value. (The safe wrapper demands a pid, which a peer in another namespace has not.)
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer { pid: u32::try_from(peer.pid).ok().filter(|pid| *pid > 0), uid: peer.uid })
}

/// Makes sure that the directory of `path` is only for this user, and locks it.
fn lock_private_directory(path: &Path) -> io::Result<File> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let opened: File = rustix::fs::open(
        directory,
        rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?
    .into();
    let metadata = opened.metadata()?;
    let own_uid = rustix::process::geteuid().as_raw();
    if metadata.uid() != own_uid || metadata.mode() & 0o077 != 0 {
        let reason = format!(
            "{} has owner {} and mode {:o}; it must have owner {own_uid} and mode 700",
            directory.display(),
            metadata.uid(),
            metadata.mode() & 0o7777,
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    flock(&opened, FlockOperation::LockExclusive)?;
    Ok(opened)
}
