//! Checks of the Bash scripts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{read, root, sources};

/// Returns whether a line of a script pipes its input into a command that can end before it has read everything.
fn ends_early(line: &str) -> bool {
    let code = line.trim_start();
    !code.starts_with('#')
        && code.replace("||", "").split('|').skip(1).map(str::trim_start).any(|reader| {
            reader.starts_with("head ")
                || (reader.starts_with("grep ")
                    && reader.split(' ').any(|word| word.starts_with('-') && word.contains('q')))
                || (reader.starts_with("awk ") && reader.contains("exit"))
        })
}

/// With `pipefail`, a script fails if the writer of a pipe gets SIGPIPE. Whether it gets the signal depends on the load
/// of the machine.
#[test]
fn no_script_closes_a_pipe_before_it_has_read_it() {
    let scripts = fs::read_dir(root().join("dev")).unwrap().map(|entry| entry.unwrap().path());
    let files = scripts.filter(|path| path.is_file()).chain([root().join(".ci/run")]);
    for path in files {
        for (index, line) in read(&path).lines().enumerate() {
            assert!(!ends_early(line), "{}:{}: {line}", path.display(), index + 1);
        }
    }
}

/// dev/test ignores a name without tests, if other names have some.
#[test]
fn each_name_for_the_lab_is_a_test_or_a_module_of_tests() {
    let files: Vec<(PathBuf, String)> = ["tests", "crates"].into_iter().flat_map(sources).collect();
    let names = read("dev/lab.names");
    for name in names.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let module = name.replace("::", "/");
        let is_one = |(path, text): &(PathBuf, String)| {
            let path = path.with_extension("");
            let is_in = |folder: &Path| folder.ends_with(&module);
            is_in(&path) || path.parent().is_some_and(is_in) || text.contains(&format!(" fn {name}()"))
        };
        assert!(files.iter().any(is_one), "dev/lab.names: there is no test {name}");
    }
}

#[test]
fn each_mutant_fits_the_sources_and_its_tests_exist() {
    let output = Command::new(root().join("dev/mutants")).arg("--check").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
