//! Tokenizers from a hub that is away at first, sends on elsewhere, and wants a token.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[path = "../../../tests/support/poll.rs"]
mod poll;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvik_indexer::config::TokenizersConfig;
use kvik_indexer::hub::HubConfig;
use kvik_indexer::{IndexConfig, Indexer, Prompt};
use kvik_runtime::shutdown::Shutdown;
use kvik_types::TokenId;
use parking_lot::Mutex;
use poll::poll;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const PATIENCE: Duration = Duration::from_mins(1);
const TEXT: &str = "The capital of the notes is a question.";

fn bundled_model() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/kvik-tiny"))
}

/// A server; `answer` gets the head of a request and its number, and gives the status, a header and the body.
async fn serve(
    answer: impl Fn(&str, usize) -> (u16, String, Vec<u8>) + Send + Sync + 'static,
) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&heads);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let Ok(byte) = stream.read_u8().await else { break };
                head.push(byte);
            }
            let head = String::from_utf8(head).unwrap();
            let number = seen.lock().len();
            seen.lock().push(head.clone());
            let (status, header, body) = answer(&head, number);
            let length = body.len();
            let text = format!(
                "HTTP/1.1 {status} x\r\n{header}content-length: {length}\r\nconnection: close\r\n\r\n"
            );
            let _ = stream.write_all(text.as_bytes()).await;
            let _ = stream.write_all(&body).await;
        }
    });
    (address, heads)
}

fn config(url: &str, folder: &Path, token_file: Option<PathBuf>) -> IndexConfig {
    let models = BTreeMap::from([("tiny".to_owned(), "kvik/tiny@v2".to_owned())]);
    let (url, folder) = (url.to_owned(), Some(folder.to_owned()));
    let hub = HubConfig { models, url, folder, token_file, timeout_s: 10 };
    let tokenizers = TokenizersConfig { hub, ..TokenizersConfig::default() };
    IndexConfig { tokenizers, ..IndexConfig::default() }
}

/// The tokens of a text, as soon as there is a tokenizer.
async fn tokens(indexer: &Indexer, model: &str) -> Vec<TokenId> {
    poll(PATIENCE, "a tokenizer", async || indexer.tokenize(model, Prompt::Text(TEXT.to_owned())).await.ok())
        .await
}

#[tokio::test]
async fn a_tokenizer_comes_from_the_hub_once_and_is_there_without_it_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, "secret\n").unwrap();
    let file = |name: &str| std::fs::read(bundled_model().join(name)).unwrap();
    let (store, store_heads) = serve(move |_, _| (200, String::new(), file("tokenizer.json"))).await;
    let (hub, hub_heads) = serve(move |head, number| {
        let name = head.split_whitespace().nth(1).unwrap().rsplit('/').next().unwrap().to_owned();
        match name.as_str() {
            // Away at first.
            _ if number == 0 => (503, String::new(), Vec::new()),
            "tokenizer.json" => (302, format!("location: {store}/blob\r\n"), Vec::new()),
            "tokenizer_config.json" => (200, String::new(), file(&name)),
            _ => (404, String::new(), b"Entry not found".to_vec()),
        }
    })
    .await;

    let shutdown = Shutdown::new();
    let cache = folder.path().join("cache");
    let indexer = Indexer::start(&config(&hub, &cache, Some(token_file)), &shutdown).await.unwrap();
    let fetched = tokens(&indexer, "tiny").await;
    shutdown.stop();

    let hub_heads = hub_heads.lock().clone();
    assert!(hub_heads.iter().all(|head| head.to_lowercase().contains("authorization: bearer secret")));
    assert!(hub_heads[0].starts_with("GET /kvik/tiny/resolve/v2/tokenizer.json "), "{}", hub_heads[0]);
    assert_eq!(hub_heads.len(), 5, "one refusal, then one request a file: {hub_heads:?}");
    // The token is for the hub alone.
    assert!(store_heads.lock().iter().all(|head| !head.to_lowercase().contains("authorization")));
    let mut kept: Vec<_> = std::fs::read_dir(cache.join("kvik/tiny@v2"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    kept.sort();
    assert_eq!(kept, ["tokenizer.json", "tokenizer_config.json"]);
    assert_eq!(std::fs::read_dir(cache.join("kvik")).unwrap().count(), 1, "nothing is left beside it");

    // Nothing listens there.
    let shutdown = Shutdown::new();
    let mut offline = config("http://127.0.0.1:1", &cache, None);
    offline.tokenizers.models.insert("local".to_owned(), bundled_model());
    let indexer = Indexer::start(&offline, &shutdown).await.unwrap();
    assert_eq!(tokens(&indexer, "tiny").await, fetched);
    assert_eq!(tokens(&indexer, "local").await, fetched);
    shutdown.stop();
}

#[tokio::test]
async fn files_that_end_early_or_are_refused_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (hub, heads) = serve(|_, number| match number % 2 {
        0 => (401, String::new(), Vec::new()),
        // More is announced than comes.
        _ => (200, "transfer-encoding: chunked\r\n".to_owned(), b"ffff\r\n{\"half".to_vec()),
    })
    .await;
    let shutdown = Shutdown::new();
    let indexer = Indexer::start(&config(&hub, folder.path(), None), &shutdown).await.unwrap();
    poll(PATIENCE, "three requests", async || (heads.lock().len() >= 3).then_some(())).await;
    let error = indexer.tokenize("tiny", Prompt::Text(TEXT.to_owned())).await.unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    shutdown.stop();
    assert!(!folder.path().join("kvik/tiny@v2").try_exists().unwrap());
}
