//! Rules about packages: which may depend on which, and what every manifest says.

use std::fs;

use cargo_metadata::{DependencyKind, Package, TargetKind};

use crate::code::{find_text, without_comments_and_literals};
use crate::workspace::{assert_none, folder, metadata, root};

/// The row of every package below bindings/.
const BINDINGS: &str = "bindings";

/// What measures: only the command line takes it.
const BENCH: &str = "kvik-bench";

/// This package: it may take any other for its tests, and nothing takes it.
const TESTS: &str = "kvik-tests";

/// The services, which meet only on the wire.
const SERVICES: &[&str] = &["kvik-worker", "kvik-coordinator", "kvik-gateway"];

/// The arrow of ARCHITECTURE.md: a package and the packages of the workspace it depends on.
///
/// A row names only packages of the rows above it, so no circle can be written down, and only edges that exist: a new
/// crate or a new edge is a decision about the architecture and belongs into that document too.
const ALLOWED_EDGES: &[(&str, &[&str])] = &[
    ("kvik-types", &[]),
    ("kvik-codec", &["kvik-types"]),
    ("kvik-memory", &["kvik-types"]),
    ("kvik-tier", &["kvik-types", "kvik-codec"]),
    ("kvik-index", &[]),
    ("kvik-proto", &["kvik-types"]),
    ("kvik-runtime", &["kvik-types"]),
    ("kvik-tokens", &["kvik-types"]),
    ("kvik-store", &["kvik-types", "kvik-memory", "kvik-tier"]),
    ("kvik-node", &["kvik-types", "kvik-memory", "kvik-tier", "kvik-proto", "kvik-runtime", "kvik-store"]),
    ("kvik-model", &["kvik-types", "kvik-memory", "kvik-tokens"]),
    ("kvik-indexer", &["kvik-types", "kvik-index", "kvik-proto", "kvik-runtime", "kvik-tokens"]),
    (
        "kvik-worker",
        &[
            "kvik-types",
            "kvik-memory",
            "kvik-tier",
            "kvik-proto",
            "kvik-runtime",
            "kvik-tokens",
            "kvik-store",
            "kvik-node",
            "kvik-model",
        ],
    ),
    ("kvik-coordinator", &["kvik-index", "kvik-proto", "kvik-runtime"]),
    ("kvik-gateway", &["kvik-index", "kvik-proto", "kvik-runtime", "kvik-indexer"]),
    ("kvik-engines", &["kvik-types", "kvik-memory", "kvik-proto", "kvik-runtime", "kvik-gateway"]),
    ("kvik-epp", &["kvik-runtime", "kvik-indexer", "kvik-gateway"]),
    (
        BINDINGS,
        &["kvik-types", "kvik-memory", "kvik-tier", "kvik-index", "kvik-proto", "kvik-store", "kvik-node"],
    ),
    (
        BENCH,
        &[
            "kvik-types",
            "kvik-codec",
            "kvik-memory",
            "kvik-tier",
            "kvik-index",
            "kvik-proto",
            "kvik-runtime",
            "kvik-tokens",
            "kvik-store",
            "kvik-node",
            "kvik-model",
            "kvik-worker",
            "kvik-gateway",
            "kvik-epp",
        ],
    ),
    (
        "kvik",
        &[
            "kvik-types",
            "kvik-memory",
            "kvik-proto",
            "kvik-runtime",
            "kvik-tokens",
            "kvik-store",
            "kvik-node",
            "kvik-model",
            "kvik-worker",
            "kvik-coordinator",
            "kvik-gateway",
            "kvik-engines",
            "kvik-epp",
            BENCH,
        ],
    ),
    (TESTS, &[]),
];

/// Edges that only tests take; these may point against the arrow, but not in a circle with it.
const TEST_EDGES: &[(&str, &[&str])] = &[
    // With the suite of behaviors that every tier runs.
    ("kvik-tier", &["kvik-tier"]),
    ("kvik-store", &["kvik-tier"]),
    ("kvik-node", &["kvik-tier"]),
    // The messages of engines and of the index.
    ("kvik-epp", &["kvik-proto"]),
    // A real worker whose events are heard.
    ("kvik-indexer", &["kvik-worker"]),
];

/// Crates that are a function of their inputs; a rule about sources looks at their text too.
const PURE_CRATES: &[&str] = &["kvik-types", "kvik-index"];

/// Crates with unsafe code in some of their modules, which deny it everywhere else. What is in
/// none of the two lists forbids it.
const DENY_UNSAFE: &[&str] = &["kvik-codec", "kvik-index", "kvik-model", "kvik-tier"];

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
        let row = row_of(package);
        if !ALLOWED_EDGES.iter().any(|(name, _)| *name == row) {
            places.push(format!("{} has no row in ALLOWED_EDGES", package.name));
        }
        for (dependency, kind) in workspace_dependencies(package) {
            // What a test takes does not reach a user's build.
            let is_test = kind == DependencyKind::Development;
            if row != TESTS && !edges(table(is_test)).any(|edge| edge == (row, dependency.as_str())) {
                places.push(format!("{} -> {dependency} ({kind})", package.name));
            }
        }
    }
    assert_none(&places, "dependencies that the arrow of ARCHITECTURE.md does not have:");
}

#[test]
fn every_allowed_edge_is_a_dependency() {
    let metadata = metadata();
    let mut places = Vec::new();
    for is_test in [false, true] {
        for (row, dependency) in edges(table(is_test)) {
            let is_taken = metadata.packages.iter().filter(|package| row_of(package) == row).any(|package| {
                workspace_dependencies(package).any(|(name, kind)| {
                    name == dependency && (kind == DependencyKind::Development) == is_test
                })
            });
            if !is_taken {
                places.push(format!("{row} -> {dependency}{}", if is_test { " (tests)" } else { "" }));
            }
        }
    }
    assert_none(&places, "edges that are allowed and that no package has:");
}

#[test]
fn only_the_command_line_depends_on_what_measures() {
    let mut places = Vec::new();
    for package in metadata().packages.iter().filter(|package| !matches!(row_of(package), "kvik" | TESTS)) {
        for (dependency, kind) in workspace_dependencies(package) {
            if dependency == BENCH {
                places.push(format!("{} -> {dependency} ({kind})", package.name));
            }
        }
    }
    assert_none(&places, "dependencies on kvik-bench:");
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

/// The table of the edges that only tests take, or of all others.
fn table(is_test: bool) -> &'static [(&'static str, &'static [&'static str])] {
    if is_test { TEST_EDGES } else { ALLOWED_EDGES }
}

/// The edges of a table, one by one.
fn edges(
    table: &'static [(&'static str, &'static [&'static str])],
) -> impl Iterator<Item = (&'static str, &'static str)> {
    table.iter().flat_map(|(package, dependencies)| dependencies.iter().map(move |to| (*package, *to)))
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
