//! Rules about packages: who may depend on whom, and what every manifest says.

use std::fs;

use cargo_metadata::{DependencyKind, Package, TargetKind};

use crate::code::{find_text, without_comments_and_literals};
use crate::workspace::{assert_none, folder, metadata, root};

/// The row of every package below bindings/.
const BINDINGS: &str = "bindings";

/// This package: it may take any other for its tests, and nothing takes it.
const TESTS: &str = "kvik-tests";

/// The services, which meet only on the wire.
const SERVICES: &[&str] = &["kvik-worker", "kvik-coordinator", "kvik-gateway"];

/// The arrow of ARCHITECTURE.md: a package and the packages of the workspace it may depend on.
///
/// A row names only packages of the rows above it, so no circle can be written down. A crate that
/// does not exist yet has its row already; a new crate or a new edge is a decision about the
/// architecture and belongs into that document too.
const ALLOWED_EDGES: &[(&str, &[&str])] = &[
    ("kvik-types", &[]),
    ("kvik-memory", &["kvik-types"]),
    ("kvik-tier", &["kvik-types"]),
    ("kvik-index", &["kvik-types"]),
    ("kvik-proto", &["kvik-types"]),
    ("kvik-runtime", &["kvik-types"]),
    ("kvik-tokens", &["kvik-types"]),
    ("kvik-store", &["kvik-types", "kvik-memory", "kvik-tier", "kvik-index", "kvik-proto"]),
    ("kvik-model", &["kvik-types", "kvik-memory", "kvik-tier", "kvik-tokens", "kvik-store"]),
    ("kvik-indexer", &["kvik-types", "kvik-index", "kvik-proto", "kvik-runtime", "kvik-tokens"]),
    (
        "kvik-worker",
        &[
            "kvik-types",
            "kvik-memory",
            "kvik-tier",
            "kvik-index",
            "kvik-proto",
            "kvik-runtime",
            "kvik-store",
            "kvik-tokens",
            "kvik-model",
        ],
    ),
    (
        "kvik-coordinator",
        &["kvik-types", "kvik-tier", "kvik-index", "kvik-proto", "kvik-runtime", "kvik-store"],
    ),
    (
        "kvik-gateway",
        &[
            "kvik-types",
            "kvik-index",
            "kvik-proto",
            "kvik-runtime",
            "kvik-store",
            "kvik-tokens",
            "kvik-indexer",
        ],
    ),
    (
        BINDINGS,
        &[
            "kvik-types",
            "kvik-memory",
            "kvik-tier",
            "kvik-index",
            "kvik-proto",
            "kvik-runtime",
            "kvik-store",
            "kvik-model",
        ],
    ),
    (
        "kvik",
        &[
            "kvik-types",
            "kvik-memory",
            "kvik-tier",
            "kvik-index",
            "kvik-proto",
            "kvik-runtime",
            "kvik-store",
            "kvik-tokens",
            "kvik-model",
            "kvik-indexer",
            "kvik-worker",
            "kvik-coordinator",
            "kvik-gateway",
        ],
    ),
    (TESTS, &[]),
];

/// Crates that are a function of their inputs; a rule about sources looks at their text too.
const PURE_CRATES: &[&str] = &["kvik-types", "kvik-index"];

/// Crates with unsafe code in some of their modules, which deny it everywhere else. What is in
/// none of the two lists forbids it.
const DENY_UNSAFE: &[&str] = &["kvik-index", "kvik-model", "kvik-tier"];

/// Crates whose subject is unsafe: mapping memory, and talking to other languages.
const ALLOW_UNSAFE: &[&str] = &["kvik-memory", BINDINGS];

#[test]
fn the_table_of_edges_points_one_way() {
    let mut places = Vec::new();
    for (row, (package, dependencies)) in ALLOWED_EDGES.iter().enumerate() {
        for dependency in *dependencies {
            if !ALLOWED_EDGES[..row].iter().any(|(above, _)| above == dependency) {
                places.push(format!("{package} -> {dependency}: no row above {package}"));
            }
        }
    }
    assert_none(&places, "a row of ALLOWED_EDGES may only name rows above it:");
}

#[test]
fn every_dependency_inside_the_workspace_is_an_allowed_edge() {
    let mut places = Vec::new();
    for package in &metadata().packages {
        let Some((_, allowed)) = ALLOWED_EDGES.iter().find(|(name, _)| *name == row_of(package)) else {
            places.push(format!("{} has no row in ALLOWED_EDGES", package.name));
            continue;
        };
        for (dependency, kind) in workspace_dependencies(package) {
            // What a test takes does not reach a user's build.
            if kind != DependencyKind::Development && !allowed.contains(&dependency.as_str()) {
                places.push(format!("{} -> {dependency}", package.name));
            }
        }
    }
    assert_none(&places, "dependencies that the arrow of ARCHITECTURE.md does not have:");
}

#[test]
fn services_know_each_other_only_through_the_wire() {
    let mut places = Vec::new();
    for package in &metadata().packages {
        for (dependency, kind) in workspace_dependencies(package) {
            if SERVICES.contains(&package.name.as_str()) && SERVICES.contains(&dependency.as_str()) {
                places.push(format!("{} -> {dependency} ({kind})", package.name));
            }
        }
    }
    assert_none(&places, "services that depend on each other; kvik-proto has the messages and the clients:");
}

#[test]
fn nothing_depends_on_the_binaries_or_the_bindings() {
    let metadata = metadata();
    let ends: Vec<String> = metadata
        .packages
        .iter()
        .filter(|package| matches!(row_of(package), "kvik" | BINDINGS | TESTS))
        .map(|package| package.name.to_string())
        .collect();
    let mut places = Vec::new();
    for package in metadata.packages.iter().filter(|package| row_of(package) != TESTS) {
        for (dependency, kind) in workspace_dependencies(package) {
            if ends.contains(&dependency) {
                places.push(format!("{} -> {dependency} ({kind})", package.name));
            }
        }
    }
    assert_none(&places, "dependencies on an end of the arrow:");
}

#[test]
fn pure_crates_take_no_async_runtime() {
    let mut places = Vec::new();
    for package in metadata().packages.iter().filter(|package| PURE_CRATES.contains(&package.name.as_str())) {
        for dependency in
            package.dependencies.iter().filter(|dependency| dependency.kind == DependencyKind::Normal)
        {
            if dependency.name.split('-').any(|word| matches!(word, "tokio" | "async" | "futures" | "smol")) {
                places.push(format!("{} -> {}", package.name, dependency.name));
            }
        }
    }
    assert_none(&places, "pure crates with a dependency that waits:");
}

#[test]
fn comparison_benches_and_fuzz_targets_are_not_members() {
    let places: Vec<String> = metadata()
        .packages
        .iter()
        .map(folder)
        .filter(|folder| ["benches/compare", "fuzz"].iter().any(|outside| folder.starts_with(outside)))
        .collect();
    assert_none(
        &places,
        "packages with heavy dependencies or another compiler belong into a workspace of their own:",
    );
}

#[test]
fn every_crate_inherits_the_lints_of_the_workspace() {
    let mut places = Vec::new();
    for package in &metadata().packages {
        let manifest = fs::read_to_string(&package.manifest_path).expect("cargo has read this manifest");
        let mut section = String::new();
        let mut inherits = false;
        for line in manifest.lines().map(str::trim) {
            if line.starts_with('[') {
                line.clone_into(&mut section);
            }
            let dense: String = line.chars().filter(|c| !c.is_whitespace()).collect();
            inherits |= section == "[lints]" && dense == "workspace=true";
        }
        if !inherits {
            places.push(format!("{}/Cargo.toml", folder(package)));
        }
    }
    assert_none(&places, "manifests without `[lints]` and `workspace = true`:");
}

#[test]
fn every_crate_is_named_in_the_architecture() {
    let architecture =
        fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md is readable");
    let folders = fs::read_dir(root().join("crates")).expect("crates/ is readable");
    let mut places = Vec::new();
    for entry in folders {
        let entry = entry.expect("crates/ can be listed");
        let name = entry.file_name().to_string_lossy().into_owned();
        // The name ends where the next character cannot continue it: kvik is not named by kvik-types.
        let is_named = architecture.match_indices(&name).any(|(start, _)| {
            let around = [
                architecture[..start].chars().next_back(),
                architecture[start + name.len()..].chars().next(),
            ];
            !around.into_iter().flatten().any(|c| c.is_alphanumeric() || c == '-' || c == '_')
        });
        if entry.path().is_dir() && !is_named {
            places.push(format!("crates/{name}"));
        }
    }
    assert_none(&places, "crates that ARCHITECTURE.md does not name:");
}

#[test]
fn every_crate_says_whether_it_has_unsafe_code() {
    let mut places = Vec::new();
    for package in &metadata().packages {
        let row = row_of(package);
        let attribute = match row {
            _ if ALLOW_UNSAFE.contains(&row) => continue,
            _ if DENY_UNSAFE.contains(&row) => "#![deny(unsafe_code)]",
            _ => "#![forbid(unsafe_code)]",
        };
        for target in &package.targets {
            let is_shipped = target.kind.iter().any(|kind| {
                !matches!(
                    kind,
                    TargetKind::Test | TargetKind::Bench | TargetKind::Example | TargetKind::CustomBuild
                )
            });
            let source = fs::read_to_string(&target.src_path).expect("the root of a target is readable");
            if is_shipped && find_text(&without_comments_and_literals(&source), attribute).is_empty() {
                places.push(format!("{}: {attribute}", target.src_path));
            }
        }
    }
    assert_none(&places, "crate roots without their attribute about unsafe code:");
}

/// Returns the name of a package's row in the table.
fn row_of(package: &Package) -> &str {
    if folder(package).starts_with("bindings/") { BINDINGS } else { package.name.as_str() }
}

/// Returns the dependencies of a package that lie in this repository.
fn workspace_dependencies(package: &Package) -> impl Iterator<Item = (String, DependencyKind)> {
    package
        .dependencies
        .iter()
        .filter(|dependency| dependency.path.is_some())
        .map(|dependency| (dependency.name.clone(), dependency.kind))
}
