//! The committed headers are those of the code.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use support::{compile_text, library_folder, package};

/// The files with the types and functions of `kvik.h`.
const SOURCES: [&str; 9] = [
    "abi.rs",
    "allocations.rs",
    "config.rs",
    "handle.rs",
    "layouts.rs",
    "pointers.rs",
    "ranks.rs",
    "stats.rs",
    "status.rs",
];

fn generate(sources: &[&str]) -> String {
    let config = cbindgen::Config::from_file(package().join("cbindgen.toml")).unwrap();
    let builder = cbindgen::Builder::new().with_config(config);
    let with_sources =
        sources.iter().fold(builder, |builder, source| builder.with_src(package().join("src").join(source)));
    let mut header = Vec::new();
    with_sources.generate().unwrap().write(&mut header);
    String::from_utf8(header).unwrap()
}

#[test]
fn kvik_h_is_what_the_code_says() {
    let path = package().join("include/kvik.h");
    let generated = generate(&SOURCES);
    if std::env::var_os("KVIK_WRITE_HEADERS").is_some() {
        fs::write(&path, &generated).unwrap();
    }
    assert!(
        generated == fs::read_to_string(&path).unwrap(),
        "include/kvik.h is out of date: run KVIK_WRITE_HEADERS=1 cargo test --package kvik-c --test headers"
    );
}

/// C refuses two declarations of a function that differ.
#[test]
fn kvcached_trtllm_h_has_the_signatures_of_the_code() {
    let generated = generate(&["kvcached.rs"]);
    for function in
        ["init", "shutdown", "alloc_block", "free_block", "alloc_blocks", "free_blocks", "block_pointers"]
    {
        assert!(generated.contains(&format!("kvcached_{function}_trtllm(")), "{generated}");
    }
    for function in ["init", "alloc", "free", "set_bypass"] {
        assert!(generated.contains(&format!("kvcached_{function}(")), "{generated}");
    }
    compile(&format!("#include \"kvcached_trtllm.h\"\n{generated}"));
}

#[test]
fn a_wrong_signature_would_be_noticed() {
    let generated = generate(&["kvcached.rs"]).replace("num_blocks);", "num_blocks, int more);");
    let words = compile_text(&format!("#include \"kvcached_trtllm.h\"\n{generated}"), "c").unwrap_err();
    assert!(words.contains("conflicting types for"), "{words}");
}

#[test]
fn the_headers_can_be_included_in_any_order_and_twice() {
    let headers =
        ["kvik.h", "kvcached_trtllm.h", "kvik_memory.h"].map(|name| format!("#include \"{name}\"\n"));
    compile(&[headers.concat(), headers.concat()].concat());
    let mut reversed = headers.clone();
    reversed.reverse();
    compile(&reversed.concat());
}

#[test]
fn the_shared_library_exports_what_the_headers_declare_and_nothing_else() {
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=just-symbols"])
        .arg(library_folder().join("libkvik.so"))
        .output()
        .unwrap();
    let symbols = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<&str> = symbols.lines().collect();
    let headers = ["kvik.h", "kvcached_trtllm.h"]
        .map(|header| fs::read_to_string(package().join("include").join(header)).unwrap());
    let declared: BTreeSet<&str> = headers.iter().flat_map(|header| declared_functions(header)).collect();
    assert_eq!(exported, declared);
}

/// The names at the start of a parameter list, outside of comments.
fn declared_functions(header: &str) -> impl Iterator<Item = &str> {
    let code = header.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
    code.filter(|line| !line.starts_with("typedef") && !line.starts_with("extern"))
        .filter_map(|line| line.split_once('(').map(|(head, _)| head))
        .filter_map(|head| head.rsplit([' ', '*']).next())
}

#[track_caller]
fn compile(text: &str) {
    for extension in ["c", "cpp"] {
        compile_text(text, extension).unwrap();
    }
}
