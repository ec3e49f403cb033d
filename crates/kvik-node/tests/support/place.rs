//! Daemons that take over from each other in one folder, all in this process.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, FrameBuffer, wait_ready};
use kvik_node::{
    AttachOptions, NodeClient, NodeError, NodeOptions, NodeServer, StoreParts, TakeOver, TakeOverFrame,
    TakeOverOptions, TenantOpener, TenantTerms,
};
use kvik_store::{KeptMemory, LowerTier};
use kvik_tier::{Arena, ArenaOptions, Checksummed, NvmeOptions, NvmeTier, RamTier};
use kvik_types::BlockSize;
use rustix::event::{PollFd, PollFlags};

use super::{CHUNK_TOKENS, attach_options, store_options};

pub const ARENA_BYTES: u64 = 16 << 20;

/// Opens stores of memory, and of a disk where there is a folder.
#[derive(Debug, Default)]
pub struct Opener {
    pub folder: Option<PathBuf>,
    pub is_failing: AtomicBool,
    pub is_taken_over: AtomicBool,
}

impl Opener {
    pub fn on_disk(folder: &Path) -> Arc<Self> {
        Arc::new(Self { folder: Some(folder.join("disk")), ..Self::default() })
    }
}

impl TenantOpener for Opener {
    fn parts(&self, _tenant: &str) -> Result<StoreParts, NodeError> {
        if self.is_failing.load(Ordering::SeqCst) {
            return Err(NodeError::Open { reason: "told to fail".to_owned() });
        }
        let mut tiers = Vec::new();
        if let Some(folder) = &self.folder {
            let tier = NvmeTier::open(&NvmeOptions::new(folder, 64 << 20))?;
            tiers.push(LowerTier::local(Arc::new(Checksummed::new(tier))));
        }
        Ok(StoreParts { options: store_options(), tiers, cuda_device: None })
    }

    fn taken_over(&self) {
        self.is_taken_over.store(true, Ordering::SeqCst);
    }
}

pub fn terms() -> TenantTerms {
    TenantTerms {
        name: String::new(),
        token: String::new(),
        chunk_tokens: BlockSize::try_new(CHUNK_TOKENS).unwrap(),
        stores_tails: false,
        digest_key: None,
        ram_bytes: ARENA_BYTES,
    }
}

/// A folder with a daemon's socket and disk, and what is said to daemons there.
pub struct Place {
    pub folder: tempfile::TempDir,
    pub socket: SocketAddress,
}

impl Place {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = SocketAddress::Path(folder.path().join("private/node.sock"));
        Self { folder, socket }
    }

    pub fn start(&self, opener: &Arc<Opener>) -> NodeServer {
        self.start_with(opener, |_| {})
    }

    pub fn start_with(&self, opener: &Arc<Opener>, change: impl FnOnce(&mut NodeOptions)) -> NodeServer {
        let ram = RamTier::new(Arena::new(ArenaOptions::new(ARENA_BYTES)).unwrap());
        let store = opener.parts("").unwrap().open(KeptMemory::new(ram)).unwrap();
        let mut options = NodeOptions::new(self.socket.clone(), store);
        options.opener = Some(Arc::clone(opener) as _);
        options.take_over_grace = Duration::from_secs(30);
        change(&mut options);
        NodeServer::start(options).unwrap()
    }

    pub fn take_over(&self, opener: &Arc<Opener>) -> Result<NodeServer, NodeError> {
        self.take_over_with(opener, vec![terms()])
    }

    pub fn take_over_with(
        &self,
        opener: &Arc<Opener>,
        tenants: Vec<TenantTerms>,
    ) -> Result<NodeServer, NodeError> {
        NodeServer::take_over(TakeOverOptions {
            socket: self.socket.clone(),
            tenants,
            opener: Arc::clone(opener) as _,
            max_sessions: 64,
            take_over_grace: Duration::from_secs(30),
            audit_log: None,
        })
    }

    pub fn options(&self) -> AttachOptions {
        attach_options(self.socket.clone())
    }

    pub fn attach(&self) -> NodeClient {
        NodeClient::attach(&self.options()).unwrap()
    }

    /// Asks to take over as a daemon does, and nothing more.
    pub fn ask(&self) -> Connection {
        let connection = Connection::open(&self.socket).unwrap();
        let asked = TakeOver { tenants: vec![terms()] }.encode().unwrap();
        assert!(connection.send(&asked).unwrap());
        connection
    }
}

pub fn receive(connection: &Connection) -> (TakeOverFrame, Vec<OwnedFd>) {
    let mut buffer = FrameBuffer::new();
    loop {
        if let Some((frame, descriptors)) = connection.receive_with_descriptors(&mut buffer).unwrap() {
            return (TakeOverFrame::decode(frame).unwrap(), descriptors);
        }
        wait_ready(&mut [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)], None).unwrap();
    }
}

pub fn used_bytes(server: &NodeServer) -> u64 {
    server.tenants().iter().map(|tenant| tenant.store.arena().stat().used_bytes).sum()
}
