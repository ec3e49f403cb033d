//! A real etcd.

use std::process::Child;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kvik_coordinator::{CoordinatorConfig, EtcdConfig, StateBackendKind, StateConfig};
use serde_json::json;

use crate::etcd::etcd_command;
use crate::port::free_port;
use crate::suite::{PATIENCE, SharedState};
use crate::support::poll::poll_for;
use crate::support::{call, config};

/// An etcd of its own on free ports, killed with the test.
pub(crate) struct Etcd {
    process: Child,
    url: String,
    peer: String,
    folder: tempfile::TempDir,
}

impl SharedState for Etcd {
    const REPLACED_WITHIN: Duration = Duration::from_secs(5);
    const CAMPAIGN_PATH: &str = "/v3/kv/txn";

    async fn start() -> Self {
        // Between the choice of a free port and its use another process can take it.
        for _ in 0..5 {
            let folder = tempfile::tempdir().unwrap();
            let (url, peer) = (free_url(), free_url());
            let process = spawn(&folder, &url, &peer);
            let mut etcd = Self { process, url, peer, folder };
            if etcd.answers().await {
                return etcd;
            }
        }
        panic!("etcd does not start");
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    async fn restart(&mut self) {
        self.process = spawn(&self.folder, &self.url, &self.peer);
        assert!(self.answers().await, "etcd does not start again");
    }

    async fn leader(&self) -> Option<String> {
        let body = json!({ "key": STANDARD.encode("/kvik/leader") }).to_string();
        let (_, answer) = call("POST", &format!("{}/v3/kv/range", self.url), &body).await.ok()?;
        let value = STANDARD.decode(answer["kvs"][0]["value"].as_str()?).unwrap();
        Some(String::from_utf8(value).unwrap())
    }

    async fn remove_leader(&self) {
        let body = json!({ "key": STANDARD.encode("/kvik/leader") }).to_string();
        let (code, answer) = call("POST", &format!("{}/v3/kv/deleterange", self.url), &body).await.unwrap();
        assert_eq!((code, &answer["deleted"]), (200, &json!("1")));
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn config(&self) -> CoordinatorConfig {
        config_with(&self.url, 2)
    }

    fn config_at(&self, url: &str) -> CoordinatorConfig {
        config_with(url, 60)
    }
}

impl Etcd {
    async fn answers(&mut self) -> bool {
        let health = format!("{}/health", self.url);
        let answers = poll_for(PATIENCE, async || {
            if self.process.try_wait().unwrap().is_some() {
                return Some(false);
            }
            let answer = call("GET", &health, "").await;
            matches!(answer, Ok((200, body)) if body["health"] == "true").then_some(true)
        });
        answers.await.unwrap_or(false)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(folder: &tempfile::TempDir, url: &str, peer: &str) -> Child {
    etcd_command(folder.path(), url, peer)
        .spawn()
        .unwrap_or_else(|error| panic!("run etcd: {error}; install the Debian package etcd-server"))
}

fn free_url() -> String {
    format!("http://127.0.0.1:{}", free_port())
}

fn config_with(url: &str, session_ttl_s: u64) -> CoordinatorConfig {
    let etcd = EtcdConfig { endpoints: vec![url.to_owned()], session_ttl_s, ..EtcdConfig::default() };
    let state = StateConfig { backend: StateBackendKind::Etcd, etcd, ..StateConfig::default() };
    CoordinatorConfig { state, ..config() }
}
