//! A real API server of Kubernetes with an etcd of its own, as processes of a test.

#![allow(dead_code, reason = "each test uses a part")]

use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::etcd::etcd_command;
use crate::poll::{poll, poll_for};
use crate::port::free_port;

/// Time to start: it writes hundreds of objects of its own first.
const START: Duration = Duration::from_mins(2);
/// Far above what anything else here takes.
const PATIENCE: Duration = Duration::from_secs(30);
const ADMIN_TOKEN: &str = "token-of-the-administrator";
pub(crate) const NAMESPACE: &str = "serving";

/// An API server that asks for tokens and for roles, with the namespace `serving`; killed with the test.
pub(crate) struct KubeServer {
    etcd: Child,
    process: Child,
    controllers: Option<Child>,
    folder: TempDir,
    etcd_port: u16,
    port: u16,
    client: HttpClient,
}

/// A way to a server that can be cut: connections break, and new ones are held until it is mended.
pub(crate) struct Link {
    pub(crate) port: u16,
    is_up: watch::Sender<bool>,
}

impl KubeServer {
    pub(crate) async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let signed =
            rcgen::generate_simple_self_signed(["localhost", "127.0.0.1"].map(str::to_owned)).unwrap();
        let accounts = rcgen::KeyPair::generate().unwrap();
        for (name, text) in [
            ("ca.crt", signed.cert.pem()),
            ("server.key", signed.signing_key.serialize_pem()),
            ("accounts.key", accounts.serialize_pem()),
            ("accounts.pub", accounts.public_key_pem()),
            ("tokens.csv", format!("{ADMIN_TOKEN},administrator,1,system:masters\n")),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let (etcd_port, port) = (free_port(), free_port());
        let (url, peer_url) = (loopback_url(etcd_port), loopback_url(free_port()));
        let etcd = spawn(&mut etcd_command(&folder.path().join("etcd"), &url, &peer_url), "etcd");
        let process = spawn_server(folder.path(), etcd_port, port);
        let authorities_pem = signed.cert.pem().into_bytes();
        let client = http_client(&TlsClientConfig { authorities_pem, identity_pem: None }).unwrap();
        let mut server = Self { etcd, process, controllers: None, folder, etcd_port, port, client };
        server.wait_until_ready().await;
        server.create("/api/v1/namespaces", &json!({ "metadata": { "name": NAMESPACE } })).await;
        server
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Starts it again, after [`Self::kill`], with what etcd has.
    pub(crate) async fn restart(&mut self) {
        self.process = spawn_server(self.folder.path(), self.etcd_port, self.port);
        self.wait_until_ready().await;
    }

    /// Starts the controller that writes slices for services.
    pub(crate) fn start_controllers(&mut self) {
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": {
                "server": format!("https://127.0.0.1:{}", self.port), "certificate-authority": "ca.crt",
            }}],
            "users": [{ "name": "test", "user": { "token": ADMIN_TOKEN } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        let file = self.folder.path().join("kubeconfig");
        std::fs::write(&file, kubeconfig.to_string()).unwrap();
        self.controllers = Some(spawn(
            Command::new("kube-controller-manager")
                .arg(format!("--kubeconfig={}", file.display()))
                .args(["--controllers=endpointslice", "--leader-elect=false", "--bind-address=127.0.0.1"])
                .arg(format!("--secure-port={}", free_port()))
                .arg(format!("--cert-dir={}", self.folder.path().display()))
                .stderr(Stdio::null()),
            "kube-controller-manager",
        ));
    }

    /// Makes an account and writes its token to the folder.
    pub(crate) async fn add_account(&self, account: &str) {
        let accounts = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts");
        self.create(&accounts, &json!({ "metadata": { "name": account } })).await;
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": { "expirationSeconds": 3600 },
        });
        let granted = self.create(&format!("{accounts}/{account}/token"), &request).await;
        let token = granted["status"]["token"].as_str().unwrap();
        std::fs::write(self.folder().join("token"), token).unwrap();
    }

    /// Lets an account do what the documentation says that it must be allowed.
    pub(crate) async fn grant(&self, account: &str) {
        let roles = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}");
        let rule = json!({
            "apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"],
        });
        self.create(&format!("{roles}/roles"), &json!({ "metadata": { "name": "kvik" }, "rules": [rule] }))
            .await;
        let binding = json!({
            "metadata": { "name": "kvik" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "kvik" },
            "subjects": [{ "kind": "ServiceAccount", "name": account, "namespace": NAMESPACE }],
        });
        self.create(&format!("{roles}/rolebindings"), &binding).await;
    }

    pub(crate) async fn create_slice(&self, slice: &Value) {
        self.create(&slices_path(""), slice).await;
    }

    pub(crate) async fn replace_slice(&self, slice: &Value) {
        let path = slices_path(slice["metadata"]["name"].as_str().unwrap());
        let (status, answer) = self.call(Method::PUT, &path, Some(slice)).await.unwrap();
        assert_eq!(status, StatusCode::OK, "{answer}");
    }

    pub(crate) async fn delete_slice(&self, name: &str) {
        let (status, answer) = self.call(Method::DELETE, &slices_path(name), None).await.unwrap();
        assert_eq!(status, StatusCode::OK, "{answer}");
    }

    /// Waits until the server counts something under all these labels.
    pub(crate) async fn until_metric(&self, name: &str, labels: &[&str]) {
        let is_counted = |line: &str| {
            line.starts_with(name) && labels.iter().all(|label| line.contains(label)) && !line.ends_with(" 0")
        };
        let what = format!("a count of {name} {labels:?}");
        poll(PATIENCE, &what, async || self.metrics().await.lines().any(is_counted).then_some(())).await;
    }

    /// Waits until an endpoint of some slice is as wanted.
    pub(crate) async fn until_slices(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        poll(PATIENCE, what, async || {
            let (_, list) = self.call(Method::GET, &slices_path(""), None).await.unwrap();
            let mut slices = list["items"].as_array().unwrap().iter();
            let is_so =
                |slice: &Value| slice["endpoints"].as_array().is_some_and(|all| all.iter().any(&is_so));
            slices.any(is_so).then_some(())
        })
        .await;
    }

    /// Lets etcd forget all versions but the last one.
    pub(crate) async fn compact(&self) {
        let etcd = format!("{}/v3/kv", loopback_url(self.etcd_port));
        let ask = async |call: &str, body: Value| -> Value {
            let request =
                Request::post(format!("{etcd}/{call}")).body(Full::new(Bytes::from(body.to_string())));
            let response = self.client.request(request.unwrap()).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
        };
        // The key is `a`; any answer says the version of all.
        let answer = ask("range", json!({ "key": "YQ==" })).await;
        ask("compaction", json!({ "revision": answer["header"]["revision"], "physical": true })).await;
    }

    async fn metrics(&self) -> String {
        let answer = self.send(Method::GET, "/metrics", None).await;
        answer.map(|(_, body)| String::from_utf8_lossy(&body).into_owned()).unwrap_or_default()
    }

    pub(crate) async fn create(&self, path: &str, object: &Value) -> Value {
        let (status, answer) = self.call(Method::POST, path, Some(object)).await.unwrap();
        assert_eq!(status, StatusCode::CREATED, "{path}: {answer}");
        answer
    }

    /// Asks as the administrator; `None` if there is no answer.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Option<(StatusCode, Value)> {
        let (status, body) = self.send(method, path, body).await?;
        Some((status, serde_json::from_slice(&body).unwrap_or_default()))
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Option<(StatusCode, Bytes)> {
        let content_type =
            if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let request = Request::builder()
            .method(method)
            .uri(format!("https://127.0.0.1:{}{path}", self.port))
            .header("authorization", format!("Bearer {ADMIN_TOKEN}"))
            .header("content-type", content_type)
            .body(Full::new(Bytes::from(body.map(Value::to_string).unwrap_or_default())))
            .unwrap();
        let response = self.client.request(request).await.ok()?;
        let status = response.status();
        Some((status, response.into_body().collect().await.ok()?.to_bytes()))
    }

    async fn wait_until_ready(&mut self) {
        let path = self.folder.path().join("log");
        let log = || std::fs::read_to_string(&path).unwrap_or_default();
        let is_ready = poll_for(START, async || {
            let answer = self.call(Method::GET, "/readyz", None).await;
            assert!(self.process.try_wait().unwrap().is_none(), "kube-apiserver has ended: {}", log());
            matches!(answer, Some((StatusCode::OK, _))).then_some(())
        });
        let is_ready = is_ready.await.is_some();
        assert!(is_ready, "kube-apiserver does not become ready: {}", log());
    }
}

impl Drop for KubeServer {
    fn drop(&mut self) {
        for child in self.controllers.iter_mut().chain([&mut self.process, &mut self.etcd]) {
            // It may be dead already.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

impl Link {
    pub(crate) async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (is_up, state) = watch::channel(true);
        let link = Self { port: listener.local_addr().unwrap().port(), is_up };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(carry(stream, port, state.clone()));
            }
        });
        link
    }

    pub(crate) fn cut(&self) {
        self.is_up.send_replace(false);
    }

    pub(crate) fn mend(&self) {
        self.is_up.send_replace(true);
    }
}

/// Carries bytes both ways from when the link is up until it is cut.
async fn carry(mut from: TcpStream, port: u16, mut is_up: watch::Receiver<bool>) {
    if is_up.wait_for(|is_up| *is_up).await.is_err() {
        return;
    }
    let Ok(mut to) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
        _ = is_up.wait_for(|is_up| !*is_up) => {}
    }
}

/// An address of this machine that a slice may have: none of the loopback interface.
pub(crate) fn own_address() -> IpAddr {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // Sends nothing: the system only chooses by which interface it would go.
    socket
        .connect("192.0.2.1:9")
        .expect("this machine has an address besides those of the loopback interface");
    socket.local_addr().unwrap().ip()
}

/// A slice of the service `vllm` with one endpoint on this machine, whose port `kv` is `port`.
pub(crate) fn slice(name: &str, pod: &str, port: u16, conditions: &Value) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": { "name": name, "labels": { "kubernetes.io/service-name": "vllm" } },
        "addressType": "IPv4",
        "ports": [{ "name": "http", "port": 8000 }, { "name": "kv", "port": port, "protocol": "TCP" }],
        "endpoints": [{
            "addresses": [own_address()], "conditions": conditions,
            "targetRef": { "kind": "Pod", "name": pod, "namespace": NAMESPACE },
        }],
    })
}

fn slices_path(name: &str) -> String {
    let path = format!("/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices/{name}");
    path.trim_end_matches('/').to_owned()
}

fn loopback_url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

fn spawn_server(folder: &Path, etcd_port: u16, port: u16) -> Child {
    let file = |name: &str| folder.join(name).display().to_string();
    let log = std::fs::File::create(folder.join("log")).unwrap();
    spawn(
        Command::new("kube-apiserver")
            .arg(format!("--etcd-servers={}", loopback_url(etcd_port)))
            .args(["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"])
            .arg(format!("--secure-port={port}"))
            .arg(format!("--cert-dir={}", folder.display()))
            .arg(format!("--tls-cert-file={}", file("ca.crt")))
            .arg(format!("--tls-private-key-file={}", file("server.key")))
            .arg("--service-account-issuer=https://kubernetes.default.svc")
            .arg(format!("--service-account-key-file={}", file("accounts.pub")))
            .arg(format!("--service-account-signing-key-file={}", file("accounts.key")))
            .arg(format!("--token-auth-file={}", file("tokens.csv")))
            .args(["--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24"])
            .stderr(log),
        "kube-apiserver",
    )
}

fn spawn(command: &mut Command, name: &str) -> Child {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().unwrap_or_else(|error| panic!("cannot run {name} ({error}): is it on the path?"))
}
