//! A hub of the tests' own: one server for names, another one for the bytes of large files.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use parking_lot::Mutex;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};

/// A request that came in.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    /// Header lines in lower case.
    pub(crate) headers: Vec<String>,
}

/// What the servers do; changed by tests while they run.
#[derive(Debug, Default)]
pub(crate) struct Behavior {
    /// The commit of each revision.
    pub(crate) commits: BTreeMap<String, String>,
    /// The files of each commit.
    pub(crate) files: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Answered to everything.
    pub(crate) status: Option<u16>,
    /// After how many bytes of a body the next connections for large files end.
    pub(crate) cuts: Vec<usize>,
    /// Whether large files come with one other byte.
    pub(crate) is_damaging: bool,
    /// Whether parts are not given.
    pub(crate) is_without_ranges: bool,
    /// The size that is said of large files.
    pub(crate) said_bytes: Option<u64>,
    /// Whether large files never end: half of one comes, and the connection stays.
    pub(crate) is_stalling: bool,
    pub(crate) hub_requests: Vec<Request>,
    pub(crate) store_requests: Vec<Request>,
}

pub(crate) struct Hub {
    pub(crate) url: String,
    pub(crate) behavior: Arc<Mutex<Behavior>>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    fn read(stream: &TcpStream) -> Option<Self> {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let first = lines.next()?;
        let mut words = first.split(' ').map(str::to_owned);
        let (method, path) = (words.next()?, words.next()?);
        let headers = lines.take_while(|line| !line.is_empty()).map(|line| line.to_lowercase()).collect();
        Some(Self { method, path, headers })
    }
}

impl Hub {
    /// A hub with one model at `main`.
    pub(crate) fn start(files: &[(&str, &[u8])]) -> Self {
        let behavior = Arc::new(Mutex::new(Behavior::default()));
        let store = listen(&behavior, |request, behavior, stream| {
            behavior.lock().store_requests.push(request.clone());
            send_large(&request, behavior, stream);
        });
        let url = listen(&behavior, move |request, behavior, stream| {
            behavior.lock().hub_requests.push(request.clone());
            answer(&request, &behavior.lock(), &store, stream);
        });
        let hub = Self { url, behavior };
        hub.commit("main", "c0ffee", files);
        hub
    }

    /// Makes `revision` a commit with these files.
    pub(crate) fn commit(&self, revision: &str, commit: &str, files: &[(&str, &[u8])]) {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        let mut behavior = self.behavior.lock();
        behavior.commits.insert(revision.to_owned(), commit.to_owned());
        behavior.files.insert(commit.to_owned(), files);
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Behavior)) {
        change(&mut self.behavior.lock());
    }

    pub(crate) fn store_requests(&self) -> Vec<Request> {
        self.behavior.lock().store_requests.clone()
    }

    pub(crate) fn hub_requests(&self) -> Vec<Request> {
        self.behavior.lock().hub_requests.clone()
    }
}

/// Serves each connection on a thread of its own until the process ends.
fn listen(
    behavior: &Arc<Mutex<Behavior>>,
    answer: impl Fn(Request, &Mutex<Behavior>, &mut TcpStream) + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (behavior, answer) = (Arc::clone(behavior), Arc::new(answer));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let (behavior, answer) = (Arc::clone(&behavior), Arc::clone(&answer));
            std::thread::spawn(move || {
                if let Some(request) = Request::read(&stream) {
                    answer(request, &behavior, &mut stream);
                }
            });
        }
    });
    url
}

fn is_large(file: &str) -> bool {
    file.ends_with("safetensors")
}

/// The answer of the hub itself.
fn answer(request: &Request, behavior: &Behavior, store: &str, stream: &mut TcpStream) {
    if let Some(status) = behavior.status {
        return send(stream, status, "", b"no");
    }
    if let Some(revision) = request.path.strip_prefix("/api/models/owner/name/revision/") {
        let commit = behavior.commits.get(revision).map_or(revision, String::as_str);
        let Some(files) = behavior.files.get(commit) else { return send(stream, 404, "", b"") };
        let siblings: Vec<_> = files.keys().map(|file| serde_json::json!({"rfilename": file})).collect();
        let body = serde_json::json!({"sha": commit, "siblings": siblings}).to_string();
        return send(stream, 200, "", body.as_bytes());
    }
    let place = request.path.strip_prefix("/owner/name/resolve/").and_then(|rest| rest.split_once('/'));
    let file = place.and_then(|(commit, file)| Some((file, behavior.files.get(commit)?.get(file)?)));
    let Some((file, bytes)) = file else { return send(stream, 404, "", b"") };
    if is_large(file) {
        let commit = place.map_or("", |(commit, _)| commit);
        let size = behavior.said_bytes.unwrap_or(bytes.len() as u64);
        let headers = format!(
            "location: {store}/{commit}/{file}\r\nx-linked-etag: \"{}\"\r\nx-linked-size: {size}\r\n",
            sha256(bytes)
        );
        return send(stream, 302, &headers, b"Found");
    }
    let body: &[u8] = if request.method == "HEAD" { b"" } else { bytes };
    let head = format!(
        "HTTP/1.1 200 x\r\netag: \"{}\"\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        git_name(bytes),
        bytes.len()
    );
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

/// The answer of the server with the bytes of large files.
fn send_large(request: &Request, behavior: &Mutex<Behavior>, stream: &mut TcpStream) {
    let (bytes, cut, is_stalling, ranges) = {
        let mut behavior = behavior.lock();
        let Some((commit, file)) = request.path[1..].split_once('/') else { return };
        let mut bytes = behavior.files[commit][file].clone();
        if behavior.is_damaging {
            bytes[0] ^= 1;
        }
        let cut = if behavior.cuts.is_empty() { None } else { Some(behavior.cuts.remove(0)) };
        (bytes, cut, behavior.is_stalling, !behavior.is_without_ranges)
    };
    let from = request.header("range").filter(|_| ranges);
    let from = from.map(|range| range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap());
    let body = &bytes[from.unwrap_or(0)..];
    let head = match from {
        None => "200 x\r\n".to_owned(),
        Some(from) => {
            format!("206 x\r\ncontent-range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len())
        }
    };
    let head = format!("HTTP/1.1 {head}content-length: {}\r\nconnection: close\r\n\r\n", body.len());
    let n_sent = cut.unwrap_or(if is_stalling { body.len() / 2 } else { body.len() });
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body[..n_sent]));
    if is_stalling {
        // Until the other side has gone.
        let _ = std::io::copy(stream, &mut std::io::sink());
    }
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status} x\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n");
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hexadecimal(digest(&SHA256, bytes).as_ref())
}

/// Git's name of a content.
pub(crate) fn git_name(bytes: &[u8]) -> String {
    let mut all = format!("blob {}\0", bytes.len()).into_bytes();
    all.extend_from_slice(bytes);
    hexadecimal(digest(&SHA1_FOR_LEGACY_USE_ONLY, &all).as_ref())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
