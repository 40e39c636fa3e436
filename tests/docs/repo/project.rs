//! Checks that the project's addresses are the same in Cargo.toml and in other files.

use super::read;

/// Returns the string that Cargo.toml has at `path`.
fn setting(path: &[&str]) -> String {
    let manifest: toml::Value = toml::from_str(&read("Cargo.toml")).unwrap();
    path.iter().fold(&manifest, |value, key| &value[key]).as_str().unwrap().to_owned()
}

#[test]
fn addresses_of_the_project_are_those_of_cargo_toml() {
    let security = setting(&["workspace", "metadata", "security"]);
    assert!(read("SECURITY.md").contains(&format!("By mail to <{security}>")), "SECURITY.md, \"How to report\"");
    let maintainer = setting(&["package", "metadata", "deb", "maintainer"]);
    assert!(maintainer.ends_with(&format!(" <{security}>")), "Cargo.toml, [package.metadata.deb] maintainer");
    for (label, key) in [("url", "homepage"), ("source", "repository")] {
        let address = setting(&["workspace", "package", key]);
        let line = format!("LABEL org.opencontainers.image.{label}={address}\n");
        assert!(read("Dockerfile").contains(&line), "Dockerfile: {line}");
    }
}
