//! The image and compose.yaml, checked without a container engine.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tallyd_base::config::Config;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn compose() -> Value {
    serde_saphyr::from_str(&read("compose.yaml")).unwrap()
}

/// Returns the instructions with this name in the Dockerfile, each on one line.
fn instructions(name: &str) -> Vec<String> {
    let text = read("Dockerfile").replace("\\\n", " ");
    text.lines().filter_map(|line| Some(line.strip_prefix(name)?.strip_prefix(' ')?.trim().to_owned())).collect()
}

/// Returns the source files that `.dockerignore` does not exclude from the image's build.
fn context() -> Vec<String> {
    let text = read(".dockerignore");
    assert!(text.lines().any(|line| line == "*"), ".dockerignore must first exclude everything");
    text.lines().filter_map(|line| Some(line.strip_prefix('!')?.to_owned())).collect()
}

#[test]
fn the_image_is_built_from_all_that_it_needs() {
    let folder = tempfile::tempdir().unwrap();
    for path in context() {
        let copied = Command::new("cp").arg("-r").arg(root().join(&path)).arg(folder.path()).status().unwrap();
        assert!(copied.success(), "{path}");
    }
    // Cargo needs the files of all targets in Cargo.toml, and the versions in Cargo.lock.
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"])
        .current_dir(&folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for copied in instructions("COPY").iter().filter(|copied| !copied.starts_with("--from")) {
        let source = copied.split(' ').find(|word| !word.starts_with("--")).unwrap();
        assert!(source == "." || context().iter().any(|path| path == source), "{source} is not in the context");
    }
    // The folders whose files are compiled into the program.
    for included in ["crates", "lua", "migrations", "ops", "src"] {
        assert!(context().iter().any(|path| path == included), "{included}");
    }
}

#[test]
fn the_image_runs_the_program_as_nobody_and_stops_it_in_order() {
    let user = instructions("USER");
    let (user, group) = user[0].split_once(':').unwrap();
    assert!(user.parse::<u32>().unwrap() > 0 && group.parse::<u32>().unwrap() > 0);
    assert_eq!(instructions("STOPSIGNAL"), ["SIGTERM"]);
    assert_eq!(instructions("ENTRYPOINT"), [r#"["/usr/bin/tallyd"]"#]);
    assert_eq!(instructions("CMD"), [r#"["run"]"#]);
    let health = &instructions("HEALTHCHECK")[0];
    let command: Vec<String> = serde_json::from_str(health.split_once("CMD ").unwrap().1).unwrap();
    // The check tests liveness, not readiness, because an orchestrator restarts an unhealthy container.
    assert_eq!(command, ["/usr/bin/tallyd", "admin", "healthcheck", "--live"]);
    let known = Command::new(env!("CARGO_BIN_EXE_tallyd")).args(&command[1..]).arg("--help").output().unwrap();
    assert!(known.status.success(), "{command:?}");
}

/// Debian's slim image has only the C library, libgcc and little more.
#[test]
fn the_program_needs_no_library_that_the_image_lacks() {
    let output = Command::new("ldd").arg(env!("CARGO_BIN_EXE_tallyd")).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let names: Vec<&str> = said.lines().map(|line| line.trim().split([' ', '.']).next().unwrap()).collect();
    for name in names {
        let known = ["linux-vdso", "libgcc_s", "libm", "libc", "/lib64/ld-linux-x86-64", "/lib/ld-linux-aarch64"];
        assert!(known.contains(&name), "{name}");
    }
}

#[test]
fn services_of_compose_wait_for_what_there_is() {
    let compose = compose();
    let services = compose["services"].as_object().unwrap();
    for (name, service) in services {
        for (other, wait) in service["depends_on"].as_object().into_iter().flatten() {
            let other = services
                .get(other)
                .unwrap_or_else(|| panic!("{name} waits for {other}, but compose.yaml has no such service"));
            match wait["condition"].as_str().unwrap() {
                "service_healthy" => assert!(other["healthcheck"]["test"].is_array(), "{name}"),
                "service_completed_successfully" => assert_eq!(other["restart"], "no", "{name}"),
                condition => panic!("{name}: {condition}"),
            }
        }
        for mount in service["volumes"].as_array().into_iter().flatten() {
            let source = mount.as_str().unwrap().split(':').next().unwrap();
            let there = match source.starts_with("./") {
                true => root().join(source).exists(),
                false => compose["volumes"].as_object().unwrap().contains_key(source),
            };
            assert!(there, "{name}: {source}");
        }
    }
}

/// Returns the environment of a service, including the image's variables.
fn environment(service: &str) -> BTreeMap<String, String> {
    let mut environment: BTreeMap<String, String> = instructions("ENV")
        .iter()
        .flat_map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .map(|pair| pair.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())).unwrap())
        .collect();
    let compose = compose();
    let own = compose["services"][service]["environment"].as_object().unwrap();
    environment.extend(own.iter().map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned())));
    environment
}

#[test]
fn the_configurations_of_compose_are_valid() {
    for service in ["migrate", "tallyd"] {
        let output = Command::new(env!("CARGO_BIN_EXE_tallyd"))
            .args(["--config", "config.toml", "config", "check", "--offline"])
            .current_dir(root())
            .envs(environment(service))
            .output()
            .unwrap();
        assert!(output.status.success(), "{service}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let compose = compose();
    // Without this folder, the gateway ends after it has read its settings.
    let listen = "unix:/nowhere/http.sock";
    let output = Command::new(env!("CARGO_BIN_EXE_tallyd"))
        .args(compose["services"]["gateway"]["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()))
        .envs(environment("gateway"))
        .env("TALLYD__GATEWAY__LISTEN", listen)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&format!("[gateway] listen = \"{listen}\": No such file")), "{said}");
    let grace = compose["services"]["tallyd"]["stop_grace_period"].as_str().unwrap().strip_suffix('s').unwrap();
    assert!(grace.parse::<u64>().unwrap() > Config::default().daemon.drain_max_s);
}

#[test]
fn compose_makes_the_accounts_that_its_services_log_in_with() {
    let made = compose()["services"]["mariadb"]["volumes"][0].as_str().unwrap().to_owned();
    let accounts = read(made.strip_prefix("./").unwrap().split(':').next().unwrap());
    for (service, account) in [("migrate", "tallyd_migrate"), ("tallyd", "tallyd"), ("gateway", "tallyd_api")] {
        let environment = environment(service);
        let password = &environment["TALLYD__MYSQL__PASSWORD"];
        assert!(accounts.contains(&format!("CREATE USER '{account}'@'%' IDENTIFIED BY '{password}';")));
        assert!(environment["TALLYD__MYSQL__URL"].starts_with(&format!("mysql://{account}@")));
    }
    let broker: Value = serde_json::from_str(&read("packaging/compose/rabbitmq/definitions.json")).unwrap();
    let permissions = read("ops/rabbitmq/permissions.sh");
    for (user, permitted) in broker["users"].as_array().unwrap().iter().zip(broker["permissions"].as_array().unwrap()) {
        let (name, password) = (user["name"].as_str().unwrap(), user["password"].as_str().unwrap());
        assert!(permissions.contains(&format!("add_user {name} {password}\n")), "{name}");
        let rights = ["configure", "write", "read"].map(|right| permitted[right].as_str().unwrap());
        let line = format!("set_permissions {name} '{}' '{}' '{}'\n", rights[0], rights[1], rights[2]);
        assert!(permissions.contains(&line), "{line}");
    }
    for (service, account) in [("tallyd", 0), ("gateway", 1)] {
        let environment = environment(service);
        assert_eq!(broker["users"][account]["password"], environment["TALLYD__AMQP__PASSWORD"].as_str());
        let url = format!("amqp://{}@rabbitmq", broker["users"][account]["name"].as_str().unwrap());
        assert!(environment["TALLYD__AMQP__URL"].starts_with(&url), "{service}");
    }
}

#[test]
fn the_site_of_compose_reaches_the_gateway_with_its_token() {
    let gateway = environment("gateway");
    let compose = compose();
    let site = &compose["services"]["site"]["environment"];
    assert_eq!(site["TOKEN"], gateway["TALLYD__GATEWAY__TOKEN"].as_str());
    let port = gateway["TALLYD__GATEWAY__LISTEN"].rsplit_once(':').unwrap().1;
    assert_eq!(site["GATEWAY"], format!("http://gateway:{port}").as_str());
    let prometheus = read("packaging/compose/prometheus.yml");
    let daemon = environment("tallyd");
    assert!(prometheus.contains(&format!("credentials: {}\n", daemon["TALLYD__ADMIN__TOKEN"])));
    let admin = daemon["TALLYD__ADMIN__LISTEN"].rsplit_once(':').unwrap().1;
    assert_eq!(daemon["TALLYD__ADMIN__HOSTS"], r#"["tallyd"]"#);
    assert!(prometheus.contains(&format!("\"tallyd:{admin}\"")) && prometheus.contains(&format!("\"gateway:{port}\"")));
}

#[test]
fn a_release_is_checked_with_the_images_that_are_named() {
    let known = read("dev/release.images");
    let compose = compose();
    let services = compose["services"].as_object().unwrap().values();
    let named = services.map(|service| service["image"].as_str().unwrap().to_owned());
    let based = instructions("FROM").into_iter().map(|from| from.split(' ').next().unwrap().to_owned());
    // The Grafana image is left out, because Debian has no Grafana that could replace it.
    for image in named.chain(based).filter(|image| image != "tallyd" && !image.starts_with("grafana/")) {
        let path = if image.contains('/') { image } else { format!("library/{image}") };
        assert!(known.contains(&format!("[docker.io/{path}]=")), "{path}");
    }
}

#[test]
fn one_image_is_built_and_the_first_event_can_be_sent_from_outside() {
    let compose = compose();
    let services = compose["services"].as_object().unwrap();
    let built: Vec<&String> =
        services.iter().filter(|(_, service)| service["build"].is_string()).map(|(name, _)| name).collect();
    assert_eq!(built, ["tallyd"]);
    for other in ["migrate", "gateway"] {
        assert_eq!(services[other]["image"], services["tallyd"]["image"], "{other}");
    }
    let published = [
        ("mariadb", "3306"),
        ("redis", "6379"),
        ("rabbitmq", "5672"),
        ("tallyd", "8255"),
        ("gateway", "9191"),
        ("site", "8080"),
    ];
    for (service, port) in published {
        assert_eq!(services[service]["ports"], serde_json::json!([format!("127.0.0.1:{port}:{port}")]));
    }
    let token = environment("gateway")["TALLYD__GATEWAY__TOKEN"].clone();
    let call = format!("curl -s http://127.0.0.1:9191/v1/events -H 'Authorization: Bearer {token}' ");
    assert!(read("docs/operations/containers.md").contains(&call));
}

/// In a container the program also rejects password files that everyone can read, as the manual says.
#[test]
fn a_password_file_is_taken_if_not_everybody_can_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tallyd.mysql-password");
    fs::write(&file, "secret").unwrap();
    let config = folder.path().join("config.toml");
    fs::write(&config, "[mysql]\npassword_file = \"tallyd.mysql-password\"\n").unwrap();
    for (mode, taken) in [(0o400, true), (0o440, true), (0o444, false), (0o644, false)] {
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_tallyd"))
            .args(["config", "check", "--offline", "--config"])
            .arg(&config)
            .env("CREDENTIALS_DIRECTORY", folder.path())
            .output()
            .unwrap();
        assert_eq!(output.status.success(), taken, "{mode:o}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
