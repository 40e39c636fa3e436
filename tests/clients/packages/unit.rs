//! The packages' own tests, and checks of their documents.

use std::fs;

use super::{Example, root, run};

#[test]
fn the_own_tests_of_the_python_package_pass() {
    let package = root().join("clients/python");
    let mut python = Example::Python.interpreter();
    let tests = python.args(["-W", "error::ResourceWarning", "-m", "unittest", "discover", "-s", "tests"]);
    run(tests.env("PYTHONPATH", package.join("src")).current_dir(package));
}

#[test]
fn the_own_tests_of_the_node_package_pass() {
    // dev/test links the sources into the folder that contains the libraries.
    let tests = root().join("target/clients/clients/node/test");
    for test in ["card", "events", "gateway", "groups"] {
        run(Example::Node.interpreter().arg(tests.join(test).with_extension("test.js")));
    }
}

#[test]
fn both_packages_have_the_same_errors_and_one_version() {
    let read = |path: &str| fs::read_to_string(root().join("clients").join(path)).unwrap();
    let (python, node, types) =
        (read("python/src/tallyd/errors.py"), read("node/src/errors.js"), read("node/src/index.d.ts"));
    let named = |text: &str, before: &str| -> Vec<String> {
        let names = text.lines().filter_map(|line| line.strip_prefix(before));
        names.map(|rest| rest.chars().take_while(|letter| letter.is_alphanumeric()).collect()).collect()
    };
    let classes = named(&python, "class ");
    assert!(classes.len() > 7, "{classes:?}");
    assert_eq!(named(&node, "export class "), classes);
    assert_eq!(named(&types, "export class ")[1..], classes);
    for document in ["python/README.md", "node/README.md"] {
        let text = read(document);
        for class in classes.iter().filter(|class| !["TallydError", "PublishError"].contains(&class.as_str())) {
            assert!(text.contains(&format!("| `{class}` |")), "{document} lacks {class}");
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    assert!(read("python/pyproject.toml").contains(&format!("\nversion = \"{version}\"\n")));
    assert!(read("python/src/tallyd/__init__.py").contains(&format!("__version__ = \"{version}\"")));
    assert!(read("node/package.json").contains(&format!("\"version\": \"{version}\"")));
}

#[test]
fn the_node_package_and_the_examples_share_their_libraries() {
    let read =
        |path: &str| -> serde_json::Value { serde_json::from_slice(&fs::read(root().join(path)).unwrap()).unwrap() };
    let (package, examples) = (read("clients/node/package.json"), read("examples/node/package.json"));
    for (name, range) in package["dependencies"].as_object().unwrap() {
        let installed = examples["dependencies"][name].as_str().unwrap();
        assert_eq!(range.as_str().unwrap().strip_prefix('^'), Some(installed), "{name}");
    }
}
