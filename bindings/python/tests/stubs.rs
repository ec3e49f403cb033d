//! The stubs for type checkers have everything that the native module has.

#[test]
fn every_class_and_method_of_the_native_module_has_a_stub() {
    let stubs = include_str!("../python/kvik/_kvik.pyi");
    let sources = [
        include_str!("../src/chain.rs"),
        include_str!("../src/client.rs"),
        include_str!("../src/elastic.rs"),
        include_str!("../src/error.rs"),
        include_str!("../src/index.rs"),
        include_str!("../src/job.rs"),
        include_str!("../src/memory.rs"),
        include_str!("../src/paged.rs"),
        include_str!("../src/store.rs"),
    ];
    let mut missing = Vec::new();
    for source in sources {
        let mut is_class = false;
        let mut is_method = false;
        for line in source.lines() {
            match line {
                line if line.starts_with("#[pyclass") => is_class = true,
                line if line.starts_with("#[pymethods]") => is_method = true,
                "}" => is_method = false,
                line if is_class && line.starts_with("pub(crate) struct ") => {
                    let name = line.split_whitespace().nth(2).unwrap();
                    missing.extend((!stubs.contains(&format!("class {name}"))).then_some(name));
                    is_class = false;
                }
                line if line.starts_with("create_exception!(kvik, ") => {
                    let name = line.split([' ', ',']).nth(2).unwrap();
                    missing.extend((!stubs.contains(&format!("class {name}("))).then_some(name));
                }
                line if is_method && line.starts_with("    fn ") => {
                    let name = line["    fn ".len()..].split(['(', '<']).next().unwrap();
                    let name = if name == "new" { "__init__" } else { name };
                    missing.extend((!stubs.contains(&format!("def {name}("))).then_some(name));
                }
                _ => {}
            }
        }
    }
    assert!(missing.is_empty(), "without a stub: {missing:?}");
}
