use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::testing::{bundled_model, bundled_with};

fn text_request(model: &str, text: &str) -> TokenizeRequest {
    let input = TokenizeInput::Text { text: text.to_owned(), add_special: AddSpecial::Yes };
    TokenizeRequest { model: model.to_owned(), input }
}

fn tokenized(pool: &TokenizersPool, request: TokenizeRequest) -> Result<Tokenized> {
    match pool.tokenize_blocking(request)? {
        Outcome::Tokenized(tokenized) => Ok(tokenized),
        Outcome::Busy => panic!("the pool is busy"),
    }
}

fn config() -> PoolConfig {
    PoolConfig { root: Some(bundled_model().parent().unwrap().to_owned()), ..PoolConfig::default() }
}

fn write_tokenizer(folder: &Path, tokenizer: &Value) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

fn json_of(text: &str) -> Json {
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_prompt_gets_the_tokens_that_the_tokenizer_gives() {
    let pool = TokenizersPool::try_new(config()).unwrap();
    let tokenizer = Tokenizer::open(&bundled_model()).unwrap();
    let text = "Once upon a time there was a little dog. ".repeat(40);
    for _ in 0..2 {
        let tokenized = tokenized(&pool, text_request("kvik-tiny", &text)).unwrap();
        assert_eq!(tokenized.tokens, tokenizer.encode(&text, AddSpecial::Yes).unwrap());
        assert_eq!(tokenized.n_text_bytes, text.len());
    }
    let known = tokenized(&pool, text_request("kvik-tiny", &text)).unwrap().n_known_bytes;
    assert!(text.len() - 512 < known);
    assert!(0 < pool.prefix_store_bytes());
}

#[test]
fn a_prompt_that_is_tokenized_behind_its_caller_is_known_to_the_next() {
    let pool = TokenizersPool::try_new(PoolConfig { n_threads: 1, ..config() }).unwrap();
    let tokenizer = Tokenizer::open(&bundled_model()).unwrap();
    let text = "Once upon a time there was a little dog. ".repeat(40);
    let first = pool.tokenize_behind(text_request("kvik-tiny", &text)).unwrap();
    assert_eq!(first, Tokenized::default(), "nothing is known, and nothing is waited for");
    // The only thread takes requests in their order, also those whose caller is gone.
    tokenized(&pool, text_request("kvik-tiny", "after it")).unwrap();
    let longer = format!("{text} And a cat.");
    let known = pool.tokenize_behind(text_request("kvik-tiny", &longer)).unwrap();
    assert!(text.len() - 512 < known.n_known_bytes, "{}", known.n_known_bytes);
    assert_eq!(known.n_text_bytes, longer.len());
    let whole = tokenizer.encode(&longer, AddSpecial::Yes).unwrap();
    assert_eq!(known.tokens, whole[..known.tokens.len()]);
    let nowhere = PoolConfig { prefix_store: PrefixStoreKind::None, ..config() };
    let nowhere = TokenizersPool::try_new(nowhere).unwrap();
    assert_eq!(nowhere.tokenize_behind(text_request("kvik-tiny", &text)).unwrap(), Tokenized::default());
    assert_eq!(nowhere.n_waiting(), 0);
}

#[test]
fn tokens_are_their_own_answer_even_without_a_tokenizer() {
    let pool = TokenizersPool::try_new(PoolConfig::default()).unwrap();
    let request = TokenizeRequest { model: "nobody".to_owned(), input: TokenizeInput::Tokens(vec![3, 4]) };
    let answer = Tokenized { tokens: vec![3, 4], n_text_bytes: 0, n_known_bytes: 0 };
    assert_eq!(tokenized(&pool, request).unwrap(), answer);
}

#[test]
fn a_conversation_is_rendered_as_an_engine_does_it() {
    let pool = TokenizersPool::try_new(config()).unwrap();
    let tokenizer = Tokenizer::open(&bundled_model()).unwrap();
    let messages = vec![
        json_of(r#"{"role": "system", "content": "Note 1: x."}"#),
        json_of(
            r#"{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]}"#,
        ),
    ];
    let input = TokenizeInput::Chat { messages, options: ChatOptions::default() };
    let answer = tokenized(&pool, TokenizeRequest { model: "kvik-tiny".to_owned(), input }).unwrap();
    let rendered = "<|bos|><|system|>Note 1: x.<|user|>Wh\no?<|assistant|>";
    assert_eq!(answer.tokens, tokenizer.encode(rendered, AddSpecial::No).unwrap());
    assert_eq!(answer.n_text_bytes, rendered.len());
}

#[test]
fn conversations_that_cannot_be_rendered_are_refused() {
    let pool = TokenizersPool::try_new(config()).unwrap();
    for (messages, reason) in [
        ("[]", "at least one message"),
        (r#"["hello"]"#, "not an object"),
        (r#"[{"content": "a"}]"#, "without a role"),
        (r#"[{"role": "user", "content": 5}]"#, "unusable `content`"),
        (r#"[{"role": "user", "content": [{"type": "image_url"}]}]"#, "`image_url`"),
    ] {
        let messages = serde_json::from_str(messages).unwrap();
        let input = TokenizeInput::Chat { messages, options: ChatOptions::default() };
        let error = tokenized(&pool, TokenizeRequest { model: "kvik-tiny".to_owned(), input }).unwrap_err();
        assert!(matches!(error, TokensError::InvalidRequest { field: "messages", .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn a_model_without_a_tokenizer_is_named_with_the_place_that_was_searched() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("bad")).unwrap();
    fs::write(folder.path().join("bad/tokenizer.json"), "{").unwrap();
    let models = BTreeMap::from([("given".to_owned(), folder.path().join("elsewhere"))]);
    let root = Some(folder.path().join("root"));
    let missing_for = Duration::ZERO;
    let pool =
        TokenizersPool::try_new(PoolConfig { models, root, missing_for, ..PoolConfig::default() }).unwrap();
    let error = |model: &str| tokenized(&pool, text_request(model, "a")).unwrap_err().to_string();
    let searched = folder.path().join("root/org/model/tokenizer.json");
    let expected = format!("model `org/model` has no tokenizer; looked in: {}", searched.display());
    assert_eq!(error("org/model"), expected);
    assert!(error("given").ends_with("elsewhere/tokenizer.json"));
    for name in ["", "..", "../bad", "a/../../bad", "/etc", "./bad", "a\0b", "..\\bad"] {
        assert!(error(name).contains("the name is no path there"), "{name}: {}", error(name));
    }
    let pool =
        TokenizersPool::try_new(PoolConfig { root: Some(folder.path().to_owned()), ..PoolConfig::default() });
    let error = tokenized(&pool.unwrap(), text_request("bad", "a")).unwrap_err().to_string();
    assert!(
        error.starts_with("the tokenizer of model `bad` cannot be used: tokenizer: tokenizer.json: EOF"),
        "{error}"
    );
}

#[test]
fn a_missing_tokenizer_is_looked_for_again_only_after_a_while() {
    let root = tempfile::tempdir().unwrap();
    let missing_for = Duration::from_secs(10);
    let tokenizers = Tokenizers::new(BTreeMap::new(), Some(root.path().to_owned()), 20, missing_for);
    let start = Instant::now();
    assert!(tokenizers.get("late", start).is_err());
    write_tokenizer(&root.path().join("late"), &bundled_with(json!({})));
    assert!(tokenizers.get("late", start + Duration::from_secs(9)).is_err());
    assert!(tokenizers.get("late", start + Duration::from_secs(10)).is_ok());
    // From now on it is kept, whatever happens to the folder.
    fs::remove_dir_all(root.path().join("late")).unwrap();
    assert!(tokenizers.get("late", start + Duration::from_secs(100)).is_ok());
    for idx in 0..3000 {
        assert!(tokenizers.get(&format!("nobody-{idx}"), start).is_err());
    }
    assert!(tokenizers.get("late", start).is_ok());
}

#[test]
fn the_least_recently_used_tokenizer_makes_room() {
    let root = tempfile::tempdir().unwrap();
    for model in ["a", "b", "c"] {
        write_tokenizer(&root.path().join(model), &bundled_with(json!({})));
    }
    let tokenizers = Tokenizers::new(BTreeMap::new(), Some(root.path().to_owned()), 2, Duration::ZERO);
    let now = Instant::now();
    let first = tokenizers.get("a", now).unwrap();
    tokenizers.get("b", now).unwrap();
    assert!(Arc::ptr_eq(&first, &tokenizers.get("a", now).unwrap()));
    tokenizers.get("c", now).unwrap();
    assert!(Arc::ptr_eq(&first, &tokenizers.get("a", now).unwrap()));
    fs::remove_dir_all(root.path().join("b")).unwrap();
    assert!(tokenizers.get("b", now).is_err());
}

#[test]
fn a_tokenizer_that_changed_and_is_opened_again_takes_nothing_from_before() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("model");
    write_tokenizer(&folder, &bundled_with(json!({})));
    write_tokenizer(&root.path().join("other"), &bundled_with(json!({})));
    let config =
        PoolConfig { root: Some(root.path().to_owned()), max_tokenizers: 1, ..PoolConfig::default() };
    let pool = TokenizersPool::try_new(config).unwrap();
    let text = "Once upon a time there was a little dog. ".repeat(40);
    tokenized(&pool, text_request("model", &text)).unwrap();
    // Spaces alone are tokens now.
    let whitespace = json!({"type": "Sequence", "pretokenizers": [{"type": "Whitespace"},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
    write_tokenizer(&folder, &bundled_with(json!({"pre_tokenizer": whitespace})));
    tokenized(&pool, text_request("other", "a")).unwrap();
    let answer = tokenized(&pool, text_request("model", &text)).unwrap();
    assert_eq!(answer.n_known_bytes, 0);
    assert_eq!(answer.tokens, Tokenizer::open(&folder).unwrap().encode(&text, AddSpecial::Yes).unwrap());
}

#[test]
fn a_full_queue_is_told_at_once_and_a_stopped_pool_answers_all() {
    let queue = Queue::new(2);
    assert!(queue.push(1) && queue.push(2));
    assert!(!queue.push(3));
    assert_eq!(queue.pop(), Some(1));
    assert!(queue.push(4));
    assert_eq!(queue.len(), 2);
    queue.close();
    assert_eq!(queue.pop(), None);
    assert!(!queue.push(5));

    let shared = Shared {
        queue: Queue::new(1),
        tokenizers: Tokenizers::new(BTreeMap::new(), None, 1, Duration::ZERO),
        store: None,
        threads: Mutex::default(),
    };
    // No threads: what is submitted waits.
    let pool = TokenizersPool { shared: Arc::new(shared) };
    let waiting = pool.submit(text_request("m", "a")).unwrap();
    assert_eq!(pool.n_waiting(), 1);
    assert_eq!(pool.tokenize_blocking(text_request("m", "b")).unwrap(), Outcome::Busy);
    drop(pool);
    assert!(waiting.blocking_recv().is_err());
}

#[tokio::test]
async fn a_request_that_is_taken_back_is_not_worked_on() {
    let shared = Arc::new(Shared {
        queue: Queue::new(4),
        tokenizers: Tokenizers::new(BTreeMap::new(), None, 1, Duration::from_secs(10)),
        store: None,
        threads: Mutex::default(),
    });
    let pool = TokenizersPool { shared: Arc::clone(&shared) };
    let mut taken_back = Box::pin(pool.tokenize(text_request("first", "a")));
    assert!(tokio::time::timeout(Duration::ZERO, &mut taken_back).await.is_err());
    drop(taken_back);
    let second = pool.submit(text_request("second", "a")).unwrap();
    let worker = thread::spawn({
        let shared = Arc::clone(&shared);
        move || shared.work()
    });
    assert!(
        matches!(second.await.unwrap(), Err(TokensError::NoTokenizer { model, .. }) if model == "second")
    );
    drop(pool);
    worker.join().unwrap();
    assert!(!shared.tokenizers.is_missing("first") && shared.tokenizers.is_missing("second"));
}

#[test]
fn threads_do_not_outlive_many_tokenizers() {
    let root = tempfile::tempdir().unwrap();
    let words = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "u", "vocab": {"u": 0, "a": 1}}});
    for model in ["a", "b"] {
        write_tokenizer(&root.path().join(model), &words);
    }
    let root = Some(root.path().to_owned());
    let config = PoolConfig { n_threads: 1, max_tokenizers: 1, root, ..PoolConfig::default() };
    let pool = TokenizersPool::try_new(config).unwrap();
    let thread_id = || pool.shared.threads.lock().last().unwrap().thread().id();
    let first = thread_id();
    for _ in 0..20 {
        for model in ["a", "b"] {
            assert_eq!(tokenized(&pool, text_request(model, "a b")).unwrap().tokens, [1, 0]);
        }
    }
    assert_ne!(thread_id(), first);
    assert!(pool.shared.threads.lock().len() <= 3);
}

#[test]
fn numbers_of_the_configuration_are_checked() {
    let error = TokenizersPool::try_new(PoolConfig { n_threads: 0, ..PoolConfig::default() }).unwrap_err();
    assert_eq!(error.to_string(), "`n_threads` is 0; allowed: 1 or more");
}
