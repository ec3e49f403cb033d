use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

static TINY: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::open(&bundled_model()).unwrap()));
static BYTE_FALLBACK: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(byte_fallback_tokenizer()));
static WORD_TOKENIZERS: LazyLock<[Arc<Tokenizer>; 3]> = LazyLock::new(|| {
    [
        word_tokenizer(&Value::Null),
        word_tokenizer(&json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
        word_tokenizer(
            &json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}),
        ),
    ]
});

fn bundled_model() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/kvik-tiny"))
}

/// A vocabulary of whole words under a decoder that looks at the place of a token.
fn word_tokenizer(decoder: &Value) -> Arc<Tokenizer> {
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "post_processor": null, "decoder": decoder,
        "model": {"type": "WordLevel", "unk_token": "<s>",
            "vocab": {"<s>": 0, "\u{2581}a": 1, "\u{2581}": 2, "b": 3, "##c": 4, "STOP": 5, " ": 6}},
    });
    Arc::new(Tokenizer::from_parts(tokenizer.to_string().as_bytes(), None, None, None).unwrap())
}

/// A vocabulary as `SentencePiece` makes it: spaces as U+2581, bytes as `<0xNN>`.
fn byte_fallback_tokenizer() -> Tokenizer {
    let mut vocab = json!({"<unk>": 0, "<s>": 1, "</s>": 2});
    let pieces = ["\u{2581}a", "\u{2581}", "b", "STOP", "S", "\u{fffd}"];
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    for (idx, piece) in bytes.chain(pieces.map(str::to_owned)).enumerate() {
        vocab[piece] = json!(idx + 3);
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": []},
    });
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": true});
    let generation_config = json!({"eos_token_id": [2, 5]});
    Tokenizer::from_parts(
        tokenizer.to_string().as_bytes(),
        Some(config.to_string().as_bytes()),
        None,
        Some(generation_config.to_string().as_bytes()),
    )
    .unwrap()
}

fn with_template(template: &str) -> Tokenizer {
    let folder = bundled_model();
    let tokenizer_json = fs::read(folder.join("tokenizer.json")).unwrap();
    let config = fs::read(folder.join("tokenizer_config.json")).unwrap();
    Tokenizer::from_parts(&tokenizer_json, Some(&config), Some(template), None).unwrap()
}

fn render(template: &str) -> Result<String> {
    let messages = [ChatMessage::new("user", "a<b>'&\\u003c\n\"")];
    with_template(template).render_chat(&messages, &ChatOptions::default())
}

/// Streams tokens and returns the joined deltas with the stop string that matched.
fn stream(
    tokenizer: &Arc<Tokenizer>,
    ids: &[u32],
    options: &TextStreamOptions,
) -> (String, Option<StopMatch>) {
    let mut stream = TextStream::try_new(Arc::clone(tokenizer), options.clone()).unwrap();
    let mut text = String::new();
    for id in ids {
        text.push_str(&stream.push(*id).text);
    }
    text.push_str(&stream.finish());
    (text, stream.stopped().cloned())
}

/// Cuts a whole text at the first stop string to be complete, one character after the other.
fn cut(text: &str, stops: &[String], include_stop: bool) -> String {
    for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
        let ended =
            stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).max_by_key(|stop| stop.len());
        if let Some(stop) = ended {
            return text[..if include_stop { end } else { end - stop.len() }].to_owned();
        }
    }
    text.to_owned()
}

#[test]
fn golden_prompts_encode_as_the_reference_does() {
    let golden = fs::read_to_string(bundled_model().join("golden.jsonl")).unwrap();
    let mut n_lines = 0;
    for line in golden.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let expected: Vec<u32> = serde_json::from_value(line["prompt_ids"].clone()).unwrap();
        let prompt = line["prompt"].as_str().unwrap();
        assert_eq!(TINY.encode(prompt, AddSpecial::Yes).unwrap(), expected, "{prompt}");
        let greedy_ids: Vec<u32> = serde_json::from_value(line["greedy_ids"].clone()).unwrap();
        let (text, _) = stream(&TINY, &greedy_ids, &TextStreamOptions::default());
        assert_eq!(text, TINY.decode(&greedy_ids, true).unwrap());
        n_lines += 1;
    }
    assert_eq!(n_lines, 21);
}

#[test]
fn a_bos_token_is_added_once_and_only_where_asked() {
    assert_eq!(TINY.encode("", AddSpecial::Yes).unwrap(), [1]);
    assert_eq!(TINY.encode("", AddSpecial::No).unwrap(), Vec::<u32>::new());
    assert_eq!(BYTE_FALLBACK.encode("b", AddSpecial::Yes).unwrap()[0], 1);
    assert_eq!(BYTE_FALLBACK.encode("b", AddSpecial::Yes).unwrap().len(), 2);
}

#[test]
fn end_tokens_of_both_files_are_merged() {
    assert_eq!(TINY.eos_token_ids(), [0]);
    assert_eq!(TINY.bos_token_id(), Some(1));
    assert_eq!(BYTE_FALLBACK.eos_token_ids(), [2, 5]);
    assert_eq!(TINY.vocab_size(), 4096);
    assert_eq!(TINY.token_text(1).as_deref(), Some("<|bos|>"));
    assert_eq!(TINY.token_text(1 << 20), None);
}

#[test]
fn a_conversation_renders_with_the_bundled_template() {
    let messages = [ChatMessage::new("system", "Note 1: x."), ChatMessage::new("user", "Who?")];
    let text = TINY.render_chat(&messages, &ChatOptions::default()).unwrap();
    assert_eq!(text, "<|bos|><|system|>Note 1: x.<|user|>Who?<|assistant|>");
    let ids = TINY.encode(&text, AddSpecial::No).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 1).count(), 1);
    let options = ChatOptions { add_generation_prompt: false, ..ChatOptions::default() };
    assert!(TINY.render_chat(&messages, &options).unwrap().ends_with("Who?"));
}

#[test]
fn tools_and_calls_reach_the_template_in_the_order_of_the_original() {
    let json = |text: &str| -> Json { serde_json::from_str(text).unwrap() };
    let tools = json(
        r#"[{"type": "function", "function": {"name": "f", "a": [1, 2.5, null, true], "z": -1, "b": {}}}]"#,
    );
    let call = r#"{"role": "assistant", "content": null, "tool_calls": [{"z": 1, "id": "a"}]}"#;
    let messages = [ChatMessage::from_json(json(call)).unwrap()];
    let options = ChatOptions {
        tools: Some(tools),
        template_variables: vec![
            ("thinking".to_owned(), Json::Bool(false)),
            ("add_generation_prompt".to_owned(), Json::Text("not this".to_owned())),
        ],
        ..ChatOptions::default()
    };
    let template = "{{ tools | tojson }} {{ messages[0].content is none }} {{ messages[0].tool_calls | tojson }} \
                    {{ messages[0].tool_calls[0].id }} {% for k, v in tools[0].function.items() %}{{ k }}{% endfor %} \
                    {{ thinking }} {{ add_generation_prompt }}";
    let expected = "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"a\": [1, 2.5, null, true], \"z\": -1, \
                    \"b\": {}}}] True [{\"z\": 1, \"id\": \"a\"}] a nameazb False True";
    assert_eq!(with_template(template).render_chat(&messages, &options).unwrap(), expected);
}

#[test]
fn parts_are_lines_of_a_text_unless_the_template_goes_through_them() {
    let json =
        r#"{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}"#;
    let message = ChatMessage::from_json(serde_json::from_str(json).unwrap()).unwrap();
    assert_eq!(message, ChatMessage::from_parts("user", vec!["a".to_owned(), "b".to_owned()]));
    let templates = [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<a\nb><c>"),
        ("{% for m in messages %}<{{ m['content'] | trim }}>{% endfor %}", "<a\nb><c>"),
        // It does not go through a list.
        (
            "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}?{% endif %}{% endfor %}",
            "<a\nb><c>",
        ),
        (
            "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}\
             {% for part in m.content %}[{{ part.type }} {{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}",
            "[text a][text b]<c>",
        ),
    ];
    for (template, expected) in templates {
        let messages = [message.clone(), ChatMessage::new("user", "c")];
        let text = with_template(template).render_chat(&messages, &ChatOptions::default());
        assert_eq!(text.unwrap(), expected, "{template}");
    }
}

#[test]
fn the_last_message_is_continued_where_it_ends() {
    let continued = |template: &str, content: &str| {
        let messages = [ChatMessage::new("user", "Yes. "), ChatMessage::new("assistant", content)];
        let options = ChatOptions {
            add_generation_prompt: false,
            continue_final_message: true,
            ..ChatOptions::default()
        };
        with_template(template).render_chat(&messages, &options)
    };
    let plain = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    assert_eq!(continued(plain, "Yes. ").unwrap(), "<Yes. ><Yes. ");
    assert_eq!(continued(plain, " No").unwrap(), "<Yes. >< No");
    let trimmed = "{% for m in messages %}<{{ m.content.strip() }}>{% endfor %}";
    assert_eq!(continued(trimmed, "No ").unwrap(), "<Yes.><No");
    let error = continued("{{ messages | length }}", "No").unwrap_err();
    assert!(matches!(error, TokensError::InvalidRequest { field: "continue_final_message", .. }), "{error}");
    let both = ChatOptions { continue_final_message: true, ..ChatOptions::default() };
    let error = TINY.render_chat(&[ChatMessage::new("assistant", "a")], &both).unwrap_err().to_string();
    assert!(error.contains("together with `add_generation_prompt`"), "{error}");
}

#[test]
fn json_in_templates_is_that_of_python() {
    let json = r#"[{"role": "user", "content": "a<b>'&\\u003c\n\""}]"#;
    assert_eq!(render("{{ messages | tojson(ensure_ascii=False) }}").unwrap(), json);
}

#[test]
fn templates_know_methods_globals_and_block_trimming_of_hugging_face() {
    let template = "{% for message in messages %}\n  {% if message.role.startswith('us') %}\n{{ eos_token }}\n  \
                    {% endif %}\n{% endfor %}\n{{ tools is none }}";
    assert_eq!(render(template).unwrap(), "<|endoftext|>\nTrue");
}

#[test]
fn a_date_reaches_the_template_only_if_given() {
    let tokenizer = with_template("{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no date' }}");
    let today = CalendarDate::try_new(2024, 2, 29);
    let options = ChatOptions { today, ..ChatOptions::default() };
    assert_eq!(tokenizer.render_chat(&[], &options).unwrap(), "29 Feb 2024");
    assert_eq!(tokenizer.render_chat(&[], &ChatOptions::default()).unwrap(), "no date");
    assert_eq!(CalendarDate::try_new(2023, 2, 29), None);
}

#[test]
fn a_template_that_raises_refuses_the_request_and_not_the_model() {
    let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert!(matches!(error, TokensError::InvalidRequest { field: "messages", .. }), "{error}");
    assert!(error.to_string().contains("roles must alternate"), "{error}");
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let template =
        "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}";
    let error = render(template).unwrap_err();
    assert!(matches!(error, TokensError::InvalidTokenizer(_)), "{error}");
    let error = render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").unwrap_err();
    assert!(matches!(error, TokensError::InvalidTokenizer(_)), "{error}");
}

#[test]
fn a_template_that_does_not_compile_leaves_completion_usable() {
    let tokenizer = with_template("{% if %}");
    assert!(tokenizer.encode("text", AddSpecial::Yes).is_ok());
    let error = tokenizer.render_chat(&[], &ChatOptions::default()).unwrap_err().to_string();
    assert!(error.contains("does not compile"), "{error}");
    let error = BYTE_FALLBACK.render_chat(&[], &ChatOptions::default()).unwrap_err().to_string();
    assert!(error.contains("no chat template"), "{error}");
}

#[test]
fn files_of_a_folder_are_found_and_the_jinja_file_wins() {
    let folder = tempfile::tempdir().unwrap();
    let error = Tokenizer::open(folder.path()).unwrap_err().to_string();
    assert!(error.ends_with("has no tokenizer.json"), "{error}");
    fs::copy(bundled_model().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    assert!(!Tokenizer::open(folder.path()).unwrap().has_chat_template());
    let config = json!({"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "d"}]});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let rendered =
        || Tokenizer::open(folder.path()).unwrap().render_chat(&[], &ChatOptions::default()).unwrap();
    assert_eq!(rendered(), "d");
    fs::write(folder.path().join("chat_template.jinja"), "j").unwrap();
    assert_eq!(rendered(), "j");
    fs::write(folder.path().join("tokenizer_config.json"), "[]").unwrap();
    let error = Tokenizer::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json is not a JSON object"), "{error}");
}

#[test]
fn a_character_split_over_tokens_comes_out_whole() {
    let text = "\u{1F600}\u{20AC}";
    let ids = TINY.encode(text, AddSpecial::No).unwrap();
    assert!(ids.len() > 2);
    let mut stream = TextStream::try_new(Arc::clone(&TINY), TextStreamOptions::default()).unwrap();
    let deltas: Vec<String> = ids.iter().map(|id| stream.push(*id).text).collect();
    assert_eq!(deltas.concat(), text);
    assert!(!deltas.iter().any(|delta| delta.contains('\u{fffd}')));
}

#[test]
fn text_after_a_stop_string_never_comes_out() {
    let ids = TINY.encode("One two three four", AddSpecial::No).unwrap();
    let options =
        TextStreamOptions { stop: vec!["x".to_owned(), "o three".to_owned()], ..Default::default() };
    let stop = StopMatch { stop_idx: 1, text: "o three".to_owned() };
    assert_eq!(stream(&TINY, &ids, &options), ("One tw".to_owned(), Some(stop.clone())));
    let options = TextStreamOptions { include_stop: true, ..options };
    assert_eq!(stream(&TINY, &ids, &options), ("One two three".to_owned(), Some(stop)));
}

#[test]
fn unusable_stop_strings_are_refused() {
    for stop in [vec![String::new()], vec!["x".repeat(5000)], vec!["x".to_owned(); 65]] {
        let options = TextStreamOptions { stop, ..Default::default() };
        let error = TextStream::try_new(Arc::clone(&TINY), options).unwrap_err();
        assert!(matches!(error, TokensError::InvalidRequest { field: "stop", .. }), "{error}");
    }
}

fn any_stops() -> impl Strategy<Value = Vec<String>> {
    let stop = prop_oneof!["[ae ]{1,2}", "[a-z]{1,3}", Just("\u{fffd}".to_owned()), Just("STOP".to_owned())];
    proptest::collection::vec(stop, 0..3)
}

fn any_options() -> impl Strategy<Value = TextStreamOptions> {
    (any::<bool>(), any_stops(), any::<bool>())
        .prop_map(|(skip_special, stop, include_stop)| TextStreamOptions { skip_special, stop, include_stop })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    // The first 261 tokens are special tokens and single bytes, so half of these sequences are
    // mostly broken UTF-8.
    #[test]
    fn streamed_byte_level_text_is_the_decoded_text(
        ids in prop_oneof![
            proptest::collection::vec(0u32..4100, 0..40),
            proptest::collection::vec(0u32..270, 0..40),
        ],
        options in any_options(),
    ) {
        let whole = TINY.decode(&ids, options.skip_special).unwrap();
        prop_assert_eq!(stream(&TINY, &ids, &options).0, cut(&whole, &options.stop, options.include_stop));
    }

    #[test]
    fn streamed_byte_fallback_text_is_the_decoded_text(
        ids in proptest::collection::vec(
            prop_oneof![0u32..3, 3u32..268, 259u32..265, Just(3 + 0xE2), Just(3 + 0x82), Just(3 + 0xAC)], 0..40),
        options in any_options(),
    ) {
        let whole = BYTE_FALLBACK.decode(&ids, options.skip_special).unwrap();
        prop_assert_eq!(stream(&BYTE_FALLBACK, &ids, &options).0, cut(&whole, &options.stop, options.include_stop));
    }

    #[test]
    fn streamed_text_of_other_decoders_is_the_decoded_text(
        decoder_idx in 0usize..WORD_TOKENIZERS.len(),
        ids in proptest::collection::vec(0u32..8, 0..20),
        options in any_options(),
    ) {
        let tokenizer = &WORD_TOKENIZERS[decoder_idx];
        let whole = tokenizer.decode(&ids, options.skip_special).unwrap();
        prop_assert_eq!(stream(tokenizer, &ids, &options).0, cut(&whole, &options.stop, options.include_stop));
    }

    #[test]
    fn streamed_emoji_are_the_encoded_text(text in "[a-z\u{1F600}-\u{1F64F}\u{4e00}-\u{4eff} ]{0,20}") {
        let ids = TINY.encode(&text, AddSpecial::No).unwrap();
        prop_assert_eq!(stream(&TINY, &ids, &TextStreamOptions::default()).0, text);
    }

    #[test]
    fn no_template_makes_rendering_panic(template in "(\\{\\{|\\}\\}|\\{%|%\\}|[a-z \\[\\]().'|~*0-9-]|for|if|in){0,30}") {
        if let Ok(template) = ChatTemplate::compile(template, &BTreeMap::new()) {
            let _ = template.render(&[ChatMessage::new("user", "text")], &ChatOptions::default());
        }
    }
}
