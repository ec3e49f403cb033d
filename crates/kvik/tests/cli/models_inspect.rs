//! `kvik models inspect`.

use std::os::unix::fs::symlink;

use serde_json::json;

use super::support::{ModelFolder, bundled_folder, kvik, run};

fn inspect(model: &ModelFolder) -> String {
    let text = run(["models".as_ref(), "inspect".as_ref(), model.path().as_os_str()]).success();
    let name = model.path().file_name().unwrap().to_string_lossy();
    text.replace(&*name, "[NAME]")
}

#[test]
fn the_bundled_model_is_described() {
    insta::assert_snapshot!(run(["models", "inspect"]).success());
}

#[test]
fn a_folder_is_described_like_the_bundled_model() {
    let folder = bundled_folder();
    let answer = run(["models".as_ref(), "inspect".as_ref(), folder.as_os_str()]);
    assert_eq!(answer.success(), run(["models", "inspect"]).success());
}

#[test]
fn a_model_of_a_hub_is_found_in_the_cache_by_its_name() {
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join("models--owner--tiny");
    for name in ["refs", "snapshots"] {
        std::fs::create_dir_all(folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("refs/v1"), "c0ffee").unwrap();
    symlink(std::fs::canonicalize(bundled_folder()).unwrap(), folder.join("snapshots/c0ffee")).unwrap();
    let inspect = |name: &str| {
        let mut command = kvik();
        command
            .args(["models", "inspect", name])
            .env("HF_HUB_CACHE", cache.path())
            .env("HF_HUB_OFFLINE", "1");
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let expected = run(["models", "inspect"]).success().replacen("kvik-tiny", "owner/tiny", 1);
    assert_eq!(inspect("owner/tiny@v1"), (Some(0), expected, String::new()));
    let (code, _, message) = inspect("owner/tiny");
    assert_eq!(code, Some(3));
    assert!(
        message.contains("owner/tiny is no folder and is not in ") && message.contains("HF_HUB_OFFLINE"),
        "{message}"
    );
}

#[test]
fn json_has_the_numbers_without_units() {
    let inspection = run(["models", "inspect", "--json"]).json();
    assert_eq!(inspection["architecture"], "LlamaForCausalLM");
    assert_eq!(inspection["parameters"], 7_344_384);
    assert_eq!(
        inspection["kv"][1],
        json!({"dtype": "f16", "bytes_per_token": 4096, "bytes_per_context": 4096 * 4096})
    );
}

#[test]
fn sliding_windows_are_described() {
    insta::assert_snapshot!(inspect(&ModelFolder::reference("mistral_sliding_window")));
}

#[test]
fn windows_in_some_layers_are_described() {
    insta::assert_snapshot!(inspect(&ModelFolder::reference("qwen2_sliding_layers")));
}

#[test]
fn scaled_rotary_positions_are_described() {
    let text = inspect(&ModelFolder::reference("llama_rope_llama3_new_spelling"));
    assert!(text.contains("llama3 scaling by "), "{text}");
    let text = inspect(&ModelFolder::reference("llama_rope_linear_old"));
    assert!(text.contains("linear scaling by "), "{text}");
}

#[test]
fn learned_positions_are_described() {
    insta::assert_snapshot!(inspect(&ModelFolder::reference("gpt2")));
}
