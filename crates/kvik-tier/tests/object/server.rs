//! An S3 server of a test: real requests over TCP, objects in a temporary folder.

use std::net::{Ipv4Addr, SocketAddr};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

pub(crate) const BUCKET: &str = "chunks";
pub(crate) const ACCESS_KEY: &str = "key-of-a-test";
pub(crate) const SECRET_KEY: &str = "secret-of-a-test";

/// A server with one empty bucket. It stops with all its connections when it is stopped or dropped.
pub(crate) struct S3Server {
    folder: TempDir,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

impl S3Server {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let mut server = Self { folder, address: (Ipv4Addr::LOCALHOST, 0).into(), runtime: None };
        server.restart();
        server
    }

    /// Starts it again, after [`Self::stop`], where it was.
    pub(crate) fn restart(&mut self) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(self.folder.path()).unwrap());
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let service = builder.build();
        runtime.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                // Without it every small answer waits for the client to acknowledge its head.
                stream.set_nodelay(true).unwrap();
                let service = service.clone();
                tokio::spawn(async move {
                    let http = auto::Builder::new(TokioExecutor::new());
                    // A client that goes away is none of the server's business.
                    drop(http.serve_connection(TokioIo::new(stream), service).await);
                });
            }
        });
        self.runtime = Some(runtime);
    }

    pub(crate) fn stop(&mut self) {
        drop(self.runtime.take());
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The folder with the objects of the bucket.
    pub(crate) fn bucket(&self) -> std::path::PathBuf {
        self.folder.path().join(BUCKET)
    }
}
