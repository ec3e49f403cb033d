//! Redis servers as processes of a test, on free ports of the loopback interface.

#[path = "port.rs"]
mod port;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use port::free_port;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Far above what anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server with an empty memory, killed with the test.
pub(crate) struct RedisServer {
    process: Child,
    folder: TempDir,
    port: u16,
    arguments: Vec<String>,
}

/// Three servers that share the slots of a cluster.
pub(crate) struct RedisCluster {
    pub(crate) servers: Vec<RedisServer>,
}

/// An authority and a certificate for the loopback interface that it signed, as files.
pub(crate) struct Certificates {
    pub(crate) ca_file: PathBuf,
    cert_file: PathBuf,
    key_file: PathBuf,
    _folder: TempDir,
}

impl RedisServer {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_with(|_, _| arguments.iter().map(|argument| (*argument).to_owned()).collect())
    }

    /// Starts a server with the arguments that `arguments` makes of its port and folder.
    pub(crate) fn start_with(arguments: impl Fn(u16, &Path) -> Vec<String>) -> Self {
        // Another process may take the port before the server does.
        for _ in 0..5 {
            let folder = tempfile::tempdir().unwrap();
            let port = free_port();
            let arguments = arguments(port, folder.path());
            let process = spawn(port, folder.path(), &arguments);
            let mut server = Self { process, folder, port, arguments };
            if server.wait_until_it_listens() {
                return server;
            }
        }
        panic!("redis-server does not start");
    }

    /// A server behind TLS.
    pub(crate) fn start_tls(certificates: &Certificates, more: &[&str]) -> Self {
        Self::start_with(|port, _| {
            let mut arguments: Vec<String> = ["--port", "0", "--tls-auth-clients", "no", "--tls-port"]
                .iter()
                .map(|argument| (*argument).to_owned())
                .collect();
            arguments.push(port.to_string());
            for (name, file) in [
                ("--tls-cert-file", &certificates.cert_file),
                ("--tls-key-file", &certificates.key_file),
                ("--tls-ca-cert-file", &certificates.ca_file),
            ] {
                arguments.extend([name.to_owned(), file.display().to_string()]);
            }
            arguments.extend(more.iter().map(|argument| (*argument).to_owned()));
            arguments
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Starts it again, after [`Self::kill`], where it was.
    pub(crate) fn restart(&mut self) {
        self.process = spawn(self.port, self.folder.path(), &self.arguments);
        assert!(self.wait_until_it_listens(), "redis-server does not start again");
    }

    /// Stops it as a whole: its socket still takes connections and bytes, and there is no answer.
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Runs a command on it and gives back what it printed.
    pub(crate) fn cli(&self, arguments: &[&str]) -> String {
        redis_cli(&[&["-p", &self.port.to_string()], arguments].concat())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Waits for its word that it listens, or for its end. That something answers at the port would not do:
    /// it may be another server that took the port first.
    fn wait_until_it_listens(&mut self) -> bool {
        let mut listens = false;
        wait_until("redis-server listens or ends", || {
            let has_ended = self.process.try_wait().unwrap().is_some();
            let log = fs::read_to_string(log_file(self.folder.path())).unwrap_or_default();
            listens = !has_ended && log.contains("Ready to accept connections");
            listens || has_ended
        });
        listens
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // It may be dead already.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

impl RedisCluster {
    pub(crate) fn start() -> Self {
        let servers: Vec<RedisServer> = (0..3)
            .map(|_| {
                RedisServer::start_with(|_, _| {
                    [
                        "--cluster-enabled",
                        "yes",
                        // What one server has is there although another one is gone.
                        "--cluster-require-full-coverage",
                        "no",
                        "--cluster-node-timeout",
                        "2000",
                        "--cluster-port",
                        &free_port().to_string(),
                    ]
                    .map(str::to_owned)
                    .to_vec()
                })
            })
            .collect();
        let addresses: Vec<String> =
            servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        let mut arguments = vec!["--cluster", "create"];
        arguments.extend(addresses.iter().map(String::as_str));
        arguments.extend(["--cluster-replicas", "0", "--cluster-yes"]);
        redis_cli(&arguments);
        let cluster = Self { servers };
        for server in &cluster.servers {
            wait_until("the cluster is ready", || {
                let info = server.cli(&["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok") && info.contains("cluster_slots_assigned:16384")
            });
        }
        cluster
    }

    /// The address of all servers.
    pub(crate) fn url(&self) -> String {
        let hosts: Vec<String> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// The index of the server that has a key.
    pub(crate) fn owner_of(&self, name: &str) -> usize {
        self.servers.iter().position(|server| !server.cli(&["EXISTS", name]).contains("MOVED")).unwrap()
    }

    /// The name that the cluster has for a server.
    pub(crate) fn id_of(&self, server_idx: usize) -> String {
        self.servers[server_idx].cli(&["CLUSTER", "MYID"])
    }
}

impl Certificates {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ca_key = rcgen::KeyPair::generate().unwrap();
        let mut ca = rcgen::CertificateParams::default();
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca_cert = ca.self_signed(&ca_key).unwrap();
        let issuer = rcgen::Issuer::from_params(&ca, &ca_key);
        let key = rcgen::KeyPair::generate().unwrap();
        let cert = rcgen::CertificateParams::new(["127.0.0.1".to_owned(), "localhost".to_owned()])
            .unwrap()
            .signed_by(&key, &issuer)
            .unwrap();
        let write = |name: &str, pem: String| {
            let path = folder.path().join(name);
            fs::write(&path, pem).unwrap();
            path
        };
        Self {
            ca_file: write("ca.pem", ca_cert.pem()),
            cert_file: write("cert.pem", cert.pem()),
            key_file: write("key.pem", key.serialize_pem()),
            _folder: folder,
        }
    }
}

/// Waits for a condition, without a fixed time.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "this never came: {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn log_file(folder: &Path) -> PathBuf {
    folder.join("log")
}

fn spawn(port: u16, folder: &Path, arguments: &[String]) -> Child {
    // Of an earlier run there.
    drop(fs::remove_file(log_file(folder)));
    Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no"])
        .args(["--daemonize", "no", "--enable-debug-command", "yes", "--dir"])
        .arg(folder)
        .arg("--logfile")
        .arg(log_file(folder))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run redis-server ({error}): apt-get install redis-server"))
}

fn redis_cli(arguments: &[&str]) -> String {
    let output = Command::new("redis-cli")
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("cannot run redis-cli ({error}): apt-get install redis-tools"));
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}
