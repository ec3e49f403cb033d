//! Every secret of a role's configuration, looked for in everything that the role prints.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};

use kvik_coordinator::CoordinatorConfig;
use kvik_gateway::GatewayConfig;
use kvik_runtime::config::{Sources, changes};
use kvik_worker::WorkerConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::cluster::{Role, start};
use crate::{http, process};

/// A part of every secret.
const CANARY: &str = "canary";
/// A secret of which no part is a word.
const DIGEST: &str = "c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00";
const TOKENS: &str = "  cluster_token: canary-of-the-cluster\n  admin_token: canary-of-the-admin\n";

/// The configuration of one role, as a file.
struct Configured {
    role: &'static str,
    folder: TempDir,
}

impl Configured {
    fn new(role: &'static str, yaml: &str) -> Self {
        let configured = Self { role, folder: TempDir::new().unwrap() };
        configured.write(yaml);
        configured
    }

    fn write(&self, yaml: &str) {
        // Replaced as a whole: a role may look at it at any time.
        let partial = self.folder.path().join("partial");
        fs::write(&partial, format!("{}:\n{TOKENS}{yaml}", self.role)).unwrap();
        fs::rename(&partial, self.path()).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("kvik.yaml")
    }

    fn config<C: Serialize + DeserializeOwned + Default>(&self) -> C {
        Sources::read(Some(&self.path())).unwrap().load::<C>(self.role).unwrap().value
    }

    /// Looks at what `kvik config` prints, and at the forms that the configuration has in the program.
    fn check_printed<C: Serialize + DeserializeOwned + Default + Debug>(&self) {
        for form in [&["config"][..], &["config", "--json"]] {
            let output = process::kvik().args(form).arg("--config").arg(self.path()).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success() && text.contains("cluster_token"), "{text}");
            assert!(text.contains("(hidden)"), "{text}");
            assert_hidden(&text);
            assert_hidden(&String::from_utf8(output.stderr).unwrap());
        }
        let config: C = self.config();
        assert_hidden(&format!("{config:?}"));
        assert_hidden(&serde_json::to_string(&config).unwrap());
        let changes = changes(&C::default(), &config).unwrap();
        assert!(changes.iter().any(|change| change.field == "cluster_token"));
        assert_hidden(&format!("{changes:?}"));
    }

    /// Runs the role with `yaml`, which it refuses.
    fn check_refusal(&self, yaml: &str, word: &str) {
        self.write(yaml);
        let mut command = process::kvik();
        command.args([self.role, "--listen", "127.0.0.1:0", "--config"]).arg(self.path());
        let output = command.output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && message.contains(word), "{yaml}: {message}");
        assert_hidden(&message);
    }

    fn start(&self) -> Role {
        let path = self.path();
        start(self.role, "127.0.0.1:0", &["--log", "trace", "--config", path.to_str().unwrap()], &[])
    }
}

/// Looks at the metrics of a role, ends it, and looks at all that it logged.
fn check_running(mut role: Role) {
    let (status, metrics) = http::get(&role.client.address, "/metrics").unwrap();
    assert_eq!(status, 200);
    assert_hidden(&metrics);
    role.process.signal("TERM");
    role.process.ended();
    let logged = role.process.logged_text();
    assert!(logged.contains("TRACE") || logged.contains("DEBUG"), "{logged}");
    assert_hidden(&logged);
}

#[track_caller]
fn assert_hidden(text: &str) {
    for secret in [CANARY, DIGEST] {
        if let Some(at) = text.find(secret) {
            let around = text[..at].char_indices().rev().nth(300).map_or(0, |(start, _)| start);
            panic!("{secret} is printed: {}", &text[around..at + secret.len()]);
        }
    }
}

fn secret_file(folder: &Path) -> PathBuf {
    let path = folder.join("secret");
    fs::write(&path, "canary-in-a-file\n").unwrap();
    path
}

#[test]
fn a_worker_prints_no_secret() {
    let worker = Configured::new(
        "worker",
        "  threads: 1\n  store:\n    ram: 16MiB\n    remote: redis://u:a/canary@b@127.0.0.1:1/0\n    \
         remote_url: redis://u:a/canary@b@127.0.0.1:1/0\n    remote_options:\n      \
         secret_access_key: canary\n      access_key_id: canary\n",
    );
    worker.check_printed::<WorkerConfig>();
    let role = worker.start();
    let token = [("x-kvik-cluster-token", "canary-of-the-cluster")];
    let body = serde_json::json!({"model": "kvik-tiny", "prompt": "Once upon a time", "max_tokens": 4});
    let mut answer =
        http::send_with(&role.client.address, "POST", "/v1/completions", &token, Some(&body)).unwrap();
    assert_eq!(answer.status, 200);
    assert_hidden(&answer.text().unwrap());
    check_running(role);
    for (yaml, word) in [
        ("  store: {remote: 'redis://u:canary@127.0.0.1:x'}", "a port that is no number"),
        ("  store: {remote: 'canary'}", "store.remote"),
        ("  store: {remote: 's3://b?token=canary'}", "store.remote"),
        ("  store: {remote: ['redis://u:canary@h']}", "store.remote"),
        ("  store: {remote: 'redis://a:canary@h', remote_url: 'redis://b:canary@h'}", "one of the two names"),
        ("  store: {remote_options: canary}", "store.remote_options"),
        ("  store: {remote_options: {key: [canary]}}", "store.remote_options"),
        ("  coordinators: ['http://u:canary@h:1']", "`coordinators` is http://(hidden)@h:1"),
        ("  cluster_token_file: /etc/hostname", "one of the two"),
        ("  store: [canary", "kvik.yaml"),
    ] {
        worker.check_refusal(yaml, word);
    }
}

#[test]
fn a_coordinator_prints_no_secret() {
    let folder = TempDir::new().unwrap();
    let coordinator = Configured::new(
        "coordinator",
        &format!(
            "  state:\n    backend: etcd\n    etcd:\n      endpoints: ['http://{}']\n      \
             username: kvik\n      password_file: {}\n",
            process::free_address(),
            secret_file(folder.path()).display()
        ),
    );
    coordinator.check_printed::<CoordinatorConfig>();
    check_running(coordinator.start());
    for (yaml, word) in [
        ("  state: {backend: etcd, etcd: {endpoints: ['http://u:canary@h:1']}}", "state.etcd.endpoints"),
        ("  advertise: 'http://u:canary@h:1'", "`advertise` is http://(hidden)@h:1"),
        ("  tls: 'redis://u:canary@h'", "`tls`"),
    ] {
        coordinator.check_refusal(yaml, word);
    }
}

#[test]
fn a_gateway_prints_no_secret() {
    let folder = TempDir::new().unwrap();
    let yaml = format!(
        "  api_keys: [{{name: me, sha256: {DIGEST}}}]\n  index:\n    \
         backend: redis://u:canary/x@127.0.0.1:1\n    tokenizers:\n      hub:\n        \
         models: {{m: owner/name}}\n        url: http://127.0.0.1:1\n        folder: {}\n        \
         token_file: {}\n",
        folder.path().display(),
        secret_file(folder.path()).display()
    );
    let gateway = Configured::new("gateway", &yaml);
    gateway.check_printed::<GatewayConfig>();
    let mut role = gateway.start();
    // A secret that changes is a change, in the log too.
    gateway.write(&yaml.replace("u:canary/x", "u:other-canary/x").replace("c0ffee00c0", "c0ffee00c1"));
    role.process.logged("configuration reloaded");
    let (_, score) = http::get(&role.client.address, "/index/stats").unwrap();
    assert_hidden(&score);
    let logged = role.process.logged_text();
    for field in ["index.backend", "api_keys"] {
        assert!(logged.contains(&format!("\"field\":\"{field}\"")), "{field} in\n{logged}");
    }
    check_running(role);
    for (yaml, word) in [
        ("  index: {backend: 'redis://u:canary@h:x'}", "`index.backend`"),
        ("  index: {backend: 'canary'}", "`index.backend`"),
        ("  index: {backend: 'unix://canary?pass=canary'}", "`index.backend`"),
        ("  api_keys: canary", "`api_keys`"),
        ("  api_keys: [canary]", "`api_keys`"),
        ("  api_keys: [{name: me, sha256: canary}]", "64 hexadecimal digits"),
        ("  backends: [{url: 'http://u:canary@h:1'}]", "`backends[0].url` is http://(hidden)@h:1"),
        ("  tracing: {otlp_endpoint: 'http://u:canary@h:1'}", "otlp_endpoint"),
        ("  index: {tokenizers: {hub: {url: 'https://u:canary@h'}}}", "tokenizers.hub.url"),
    ] {
        gateway.check_refusal(yaml, word);
    }
}
