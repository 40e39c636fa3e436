//! packaging/kubernetes, checked without a cluster. dev/release.check compares the files with the published schemas.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn yaml(path: &str) -> Value {
    serde_saphyr::from_str(&read(path)).unwrap()
}

fn config() -> toml::Value {
    toml::from_str(&read("packaging/kubernetes/config.toml")).unwrap()
}

#[test]
fn kubernetes_has_the_alerts_that_prometheus_has() {
    let rules = yaml("packaging/kubernetes/monitoring/rules.yaml");
    let same = rules["spec"]["groups"] == yaml("ops/prometheus/tallyd.rules.yml")["groups"];
    assert!(same, "packaging/kubernetes/monitoring/rules.yaml is outdated: run dev/release rules");
}

#[test]
fn the_daemon_accepts_its_configuration_and_secrets_in_a_pod() {
    let secrets = tempfile::tempdir().unwrap();
    let deployment = yaml("packaging/kubernetes/deployment.yaml");
    let pod = &deployment["spec"]["template"]["spec"];
    // The number is octal in YAML 1.1, which Kubernetes reads, but not in YAML 1.2.
    for file in ["deployment.yaml", "migrate.yaml"] {
        assert!(read(&format!("packaging/kubernetes/{file}")).contains("defaultMode: 0440\n"), "{file}");
    }
    assert_eq!(pod["securityContext"]["fsGroup"], pod["securityContext"]["runAsGroup"]);
    for (section, key) in
        [("amqp", "password_file"), ("mysql", "password_file"), ("redis", "password_file"), ("admin", "token_file")]
    {
        let file = secrets.path().join(config()[section][key].as_str().unwrap());
        fs::write(&file, "choose-one-of-16-or-more").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o440)).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_tallyd"))
        .args(["--config", "packaging/kubernetes/config.toml", "config", "check", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("CREDENTIALS_DIRECTORY", secrets.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn pods_are_asked_at_the_port_that_the_daemon_listens_on() {
    let deployment = yaml("packaging/kubernetes/deployment.yaml");
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let service = yaml("packaging/kubernetes/service.yaml");
    let config = config();
    let (_, port) = config["admin"]["listen"].as_str().unwrap().rsplit_once(':').unwrap();
    assert_eq!(container["ports"][0]["containerPort"].to_string(), port);
    assert_eq!(service["spec"]["ports"][0]["port"].to_string(), port);
    for (probe, path) in [("livenessProbe", "/livez"), ("readinessProbe", "/readyz")] {
        assert_eq!(container[probe]["httpGet"]["path"], path);
        assert_eq!(container[probe]["httpGet"]["port"], container["ports"][0]["name"]);
    }
}

#[test]
fn kubernetes_runs_this_version_and_lets_it_drain() {
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(yaml("packaging/kubernetes/kustomization.yaml")["images"][0]["newTag"], version);
    let job = yaml("packaging/kubernetes/migrate.yaml");
    assert_eq!(job["metadata"]["name"], format!("tallyd-migrate-{}", version.replace('.', "-")).as_str());
    let deployment = yaml("packaging/kubernetes/deployment.yaml");
    let grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace > 80, "the maximum of [daemon] drain_max_s");
}
