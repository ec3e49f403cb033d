//! Model folders that are refused: one line that names the file or tensor.

use std::ffi::OsStr;

use super::support::{ModelFolder, run};

/// The message with which `kvik generate` refuses the model.
#[track_caller]
fn refusal(model: &ModelFolder) -> String {
    model.redact(&model.generate().failure(3))
}

#[test]
fn a_missing_folder_is_refused() {
    let message = run(["generate", "--prompt", "Once", "--model", "/does/not/exist"]).failure(3);
    insta::assert_snapshot!(message, @"error: failed to open the model: `model` is /does/not/exist, which is missing; allowed: a folder with config.json, safetensors and tokenizer.json");
    assert_eq!(run(["models", "inspect", "/does/not/exist"]).failure(3), message);
}

#[test]
fn a_file_in_place_of_a_folder_is_refused() {
    let model = ModelFolder::bundled();
    let file = model.path().join("config.json");
    let answer = run(["models".as_ref(), "inspect".as_ref(), file.as_os_str()]);
    insta::assert_snapshot!(model.redact(&answer.failure(3)), @"error: failed to open the model: `model` is [DIR]/config.json, which is not a folder; allowed: a folder with config.json, safetensors and tokenizer.json");
    let flags = ["worker", "--listen", "127.0.0.1:0", "--log", "error", "--model"];
    let worker = run(flags.into_iter().map(OsStr::new).chain([file.as_os_str()]));
    let message = model.redact(&worker.failure(3));
    assert!(
        message.contains("load the model: `model` is [DIR]/config.json, which is not a folder; "),
        "{message}"
    );
}

#[test]
fn a_missing_configuration_is_refused() {
    let model = ModelFolder::bundled();
    model.remove("config.json");
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: [DIR] has no config.json");
}

#[test]
fn a_missing_tokenizer_is_refused() {
    let model = ModelFolder::bundled();
    model.remove("tokenizer.json");
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: [DIR] has no tokenizer.json");
}

#[test]
fn a_damaged_tokenizer_is_refused() {
    let model = ModelFolder::bundled();
    model.write("tokenizer.json", b"{");
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: tokenizer: tokenizer.json: EOF while parsing an object at line 1 column 1");
}

#[test]
fn missing_weights_are_refused() {
    let model = ModelFolder::bundled();
    model.remove("model.safetensors");
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: [DIR] has no model.safetensors or model.safetensors.index.json");
}

#[test]
fn truncated_weights_are_refused() {
    let model = ModelFolder::bundled();
    let bytes = model.read("model.safetensors");
    model.write("model.safetensors", &bytes[..bytes.len() / 2]);
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: weights: [DIR]/model.safetensors: the header describes 14688768 bytes of data, the file has 7340372");
    model.write("model.safetensors", &bytes[..100]);
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: weights: [DIR]/model.safetensors: the header claims 8016 bytes, the file has 100 in all");
    model.write("model.safetensors", b"");
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: weights: [DIR]/model.safetensors: the file has 0 bytes, too few for a header");
}

#[test]
fn weights_of_the_wrong_shape_are_refused() {
    let model = ModelFolder::bundled();
    model.edit("model.safetensors", "[4096,256]", "[256,4096]");
    insta::assert_snapshot!(refusal(&model), @"error: failed to load the model: weights: model.embed_tokens.weight: the shape is [256, 4096]; expected: [4096, 256]");
}

#[test]
fn weights_that_are_not_numbers_fail_the_run() {
    let model = ModelFolder::bundled();
    let mut bytes = model.read("model.safetensors");
    let n_header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for element in bytes[n_header..].chunks_exact_mut(2) {
        element.copy_from_slice(&0x7fc0_u16.to_le_bytes());
    }
    model.write("model.safetensors", &bytes);
    let message = model.generate().failure(1);
    insta::assert_snapshot!(message, @"error: failed to run the request: the model's logits are not finite at position 1; the weights are damaged");
}

#[test]
fn an_unknown_architecture_is_refused() {
    let model = ModelFolder::bundled();
    model.edit("config.json", "LlamaForCausalLM", "MambaForCausalLM");
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: architecture `MambaForCausalLM` is not supported; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, GPT2LMHeadModel");
}

#[test]
fn a_configuration_that_is_not_json_is_refused() {
    let model = ModelFolder::bundled();
    model.write("config.json", b"{\"architectures\":\n[");
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: config.json: `(the whole file)` is not JSON: EOF while parsing a list at line 2 column 1; allowed: a JSON object");
}

#[test]
fn a_configuration_with_a_bad_number_is_refused() {
    let model = ModelFolder::bundled();
    model.edit("config.json", "\"num_hidden_layers\": 8", "\"num_hidden_layers\": -8");
    insta::assert_snapshot!(refusal(&model), @"error: failed to open the model: config.json: `num_hidden_layers` is -8; allowed: an integer from 1 to 1024");
}

#[test]
fn a_tokenizer_of_a_larger_model_is_refused_when_its_tokens_do_not_exist() {
    let model = ModelFolder::reference("llama_gqa");
    insta::assert_snapshot!(refusal(&model), @"error: failed to run the request: `prompt` is 605; allowed: token ids below 64");
}

#[test]
fn a_chat_with_a_model_that_has_no_template_is_refused() {
    let model = ModelFolder::bundled();
    model.remove("tokenizer_config.json");
    let arguments = ["generate", "--chat", "--prompt", "Hello", "--model"];
    let answer = run(arguments.iter().map(AsRef::as_ref).chain([model.path().as_os_str()]));
    insta::assert_snapshot!(model.redact(&answer.failure(3)), @"error: failed to render the conversation: `chat` is asked for; allowed: a plain prompt, because the model has no chat template");
}
