//! docs/configuration.md: every setting of every role, made of the defaults and of the comments in the code.
//!
//! `kvik config --json` gives the fields and their defaults; the documentation of a field is the comment at its
//! declaration, found by following the configuration's types from their roots.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::support::run;

/// Roles in the order of the document, and the type of each one's configuration.
const ROLES: [(&str, &str); 5] = [
    ("gateway", "GatewayConfig"),
    ("epp", "EppConfig"),
    ("coordinator", "CoordinatorConfig"),
    ("worker", "WorkerConfig"),
    ("store", "DaemonConfig"),
];

const HEAD: &str = "\
# Configuration

Every setting of every role, with its default. The unit of a time or size is part of its name. A value comes from, later
ones win: the default, the role's section of the YAML file (`--config FILE`), the environment, and flags (`--set
FIELD=VALUE` or a flag of its own). `kvik config` prints the effective values and where each comes from.

    # kvik.yaml
    gateway:
      listen: 127.0.0.1:8080
    worker:
      store: {ram: 2GiB}

The environment variable of a field is `KVIK_<ROLE>_<FIELD>`, with dots as underscores: `KVIK_WORKER_STORE_RAM=2GiB`. A
field that does not exist, or a value of the wrong type, is refused by name; nothing is half applied.

This page is generated; `crates/kvik/tests/cli/configuration.rs` says how, and fails when it is out of date.
";

/// A struct of the configuration: the documentation and the type of each field.
type Fields = BTreeMap<String, (String, String)>;

#[test]
fn the_document_of_all_settings_is_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let types = config_types(&root.join("crates"));
    let roles = run(["config", "--json"]).json();
    let mut document = HEAD.to_owned();
    for (role, root_type) in ROLES {
        writeln!(document, "\n## {role}\n\n| field | default | meaning |\n|---|---|---|").unwrap();
        for (field, entry) in roles[role].as_object().unwrap() {
            let meaning = documentation(&types, root_type, field);
            writeln!(document, "| `{field}` | {} | {meaning} |", shown(&entry["value"])).unwrap();
        }
    }
    let path = root.join("docs/configuration.md");
    let committed = fs::read_to_string(&path).unwrap_or_default();
    if committed != document {
        let proposed = Path::new(env!("CARGO_TARGET_TMPDIR")).join("configuration.md");
        fs::write(&proposed, &document).unwrap();
        panic!("docs/configuration.md is out of date: cp {} {}", proposed.display(), path.display());
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        Value::String(text) => format!("`{text}`"),
        other => format!("`{other}`"),
    }
}

/// The comment of the field at `path`, less its sentence about the default, which has a column of its own.
#[track_caller]
fn documentation(types: &BTreeMap<String, Fields>, root_type: &str, path: &str) -> String {
    let mut owner = root_type.to_owned();
    let mut text = String::new();
    for name in path.split('.') {
        let fields = types.get(&owner).unwrap_or_else(|| panic!("{path}: no struct {owner} was found"));
        let (documentation, kind) =
            fields.get(name).unwrap_or_else(|| panic!("{path}: {owner} has no field {name}"));
        text.clone_from(documentation);
        owner = kind.rsplit("::").next().unwrap_or_default().to_owned();
    }
    assert!(!text.is_empty(), "{path} has no documentation");
    text.replace('|', "\\|")
}

/// All public structs of the crates' sources whose fields are public, by their names.
fn config_types(crates: &Path) -> BTreeMap<String, Fields> {
    let mut types = BTreeMap::new();
    let mut folders: Vec<PathBuf> =
        fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path().join("src")).collect();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                read_structs(&fs::read_to_string(&path).unwrap(), &mut types);
            }
        }
    }
    types
}

fn read_structs(source: &str, types: &mut BTreeMap<String, Fields>) {
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let Some(name) = line.strip_prefix("pub struct ").and_then(|rest| rest.strip_suffix(" {")) else {
            continue;
        };
        let (mut fields, mut comment) = (Fields::new(), Vec::new());
        for line in lines.by_ref().map(str::trim).take_while(|line| *line != "}") {
            if let Some(text) = line.strip_prefix("///") {
                comment.push(text.trim().to_owned());
            } else if let Some((field, kind)) =
                line.strip_prefix("pub ").and_then(|rest| rest.split_once(": "))
            {
                let documentation = std::mem::take(&mut comment).join(" ");
                fields.insert(field.to_owned(), (documentation, kind.trim_end_matches(',').to_owned()));
            }
        }
        // A name that exists twice keeps the struct with the most documentation: configurations are documented.
        let is_larger = types.get(name).is_none_or(|known: &Fields| known.len() < fields.len());
        if is_larger {
            types.insert(name.to_owned(), fields);
        }
    }
}
