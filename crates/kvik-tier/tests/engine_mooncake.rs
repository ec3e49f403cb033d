//! The tier of `bindings/c/examples/mooncake_tier.c` on Mooncake's master, as a process. `KVIK_MOONCAKE` names a virtual
//! environment that has Mooncake; its Python must be a shared library with headers. `./check --engines` makes one and runs this.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[path = "../../../tests/support/port.rs"]
mod port;

use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvik_tier::conformance::{self, Traits};
use kvik_tier::{Checksummed, RemoteOptions, open_remote};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_mins(1);

/// Mooncake's master, killed with the test.
struct Master {
    process: Child,
    port: u16,
}

impl Master {
    fn start(environment: &Path) -> Self {
        let (port, metrics_port) = (port::free_port(), port::free_port());
        let process = Command::new(environment.join("bin/mooncake_master"))
            .args([format!("--rpc_port={port}"), format!("--metrics_port={metrics_port}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut master = Self { process, port };
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(master.process.try_wait().unwrap().is_none(), "Mooncake's master has ended");
            assert!(Instant::now() < deadline, "Mooncake's master does not start");
            thread::park_timeout(Duration::from_millis(20));
        }
        master
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// What the environment's Python says.
fn python(environment: &Path, program: &str) -> String {
    let output = Command::new(environment.join("bin/python")).args(["-c", program]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn compile(environment: &Path, folder: &TempDir) -> PathBuf {
    let say = |expression: &str| python(environment, &format!("import sysconfig as s; print({expression})"));
    let (headers, libraries) = (say("s.get_path('include')"), say("s.get_config_var('LIBDIR')"));
    let version = say("s.get_config_var('LDVERSION')");
    let c = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bindings/c");
    let library = folder.path().join("mooncake_tier.so");
    let status = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"])
        .arg("-I")
        .arg(c.join("include"))
        .arg(format!("-I{headers}"))
        .arg(c.join("examples/mooncake_tier.c"))
        .arg("-o")
        .arg(&library)
        .args([format!("-L{libraries}"), format!("-lpython{version}"), format!("-Wl,-rpath,{libraries}")])
        .status();
    assert!(status.unwrap().success());
    library
}

#[test]
fn mooncakes_store_is_a_tier() {
    let environment = std::env::var_os("KVIK_MOONCAKE").map(PathBuf::from);
    let environment = environment.expect("KVIK_MOONCAKE names an environment with Mooncake");
    let folder = tempfile::tempdir().unwrap();
    let (library, master) = (compile(&environment, &folder), Master::start(&environment));
    let packages = python(&environment, "import sysconfig as s; print(s.get_path('purelib'))");
    let open = |more: &str| {
        let (library, port) = (library.display(), master.port);
        let url = format!("mooncakestore://127.0.0.1:{port}?library={library}&packages={packages}&{more}");
        open_remote(&url.parse().unwrap(), &RemoteOptions::default()).unwrap()
    };
    // Gives the memory that all others use.
    let _owner = open("segment_bytes=1073741824&buffer_bytes=16777216");
    let n_tiers = AtomicUsize::new(0);
    let make = || {
        let prefix = n_tiers.fetch_add(1, Ordering::Relaxed);
        open(&format!("buffer_bytes=67108864&prefix=t{prefix}"))
    };
    let traits = Traits { knows_keys: false, knows_counts: false, ..Traits::default() };
    conformance::run(&make, &traits);
    conformance::run(&|| Box::new(Checksummed::new(make())), &traits);
}
