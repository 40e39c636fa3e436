//! Runs the samples of the READMEs as a new user does: after `tallyd init`, in a folder with only the package. The root's
//! sample publishes the first event.

use std::fs;
use std::process::Command;

use super::{Example, Package, root, run};
use crate::common::first_day::FirstDay;
use crate::common::{eventually, stack};

/// Returns the document's samples in that language as one program, with the addresses of the stack's servers.
fn program(day: &FirstDay, document: &str, language: &str) -> String {
    let text = fs::read_to_string(root().join(document)).unwrap();
    let begin = format!("```{language}\n");
    let blocks: Vec<&str> = text.split(&begin).skip(1).map(|block| block.split("```").next().unwrap()).collect();
    let (first, others) = blocks.split_first().unwrap();
    let prefix = format!("{}:", day.name);
    // The later samples use the client of the first sample, which closes it at its end.
    let (whole, end, with_prefix) = match language {
        "js" => {
            let (open, close) = first.split_once("await site.close();").unwrap();
            let whole = format!("{open}{}await site.close();{close}", others.concat());
            (whole, "6379/0' });", format!("6379/0', keyPrefix: '{prefix}' }});"))
        }
        _ => {
            let others: Vec<String> =
                others.iter().flat_map(|block| block.lines()).map(|line| format!("    {line}\n")).collect();
            (format!("{first}{}", others.concat()), ") as site", format!(", key_prefix=\"{prefix}\") as site"))
        }
    };
    assert_eq!(whole.matches(end).count(), 1, "{whole}");
    // The machine can be under heavy load.
    let whole = whole.replace(end, &with_prefix).replace("time.sleep(1)", "time.sleep(5)");
    let redis = day.as_api(&stack("REDIS_URL"));
    let addresses = [
        ("amqp://tallyd_api:choose-another@127.0.0.1:5672/%2f", day.api().url.expose().to_owned()),
        ("redis://tallyd_api:choose-another@127.0.0.1:6379/0", redis),
    ];
    addresses.iter().fold(whole, |whole, (from, to)| {
        assert_eq!(whole.matches(from).count(), 1, "{document} has no {from}");
        whole.replace(from, to)
    })
}

fn run_samples(day: &FirstDay, document: &str, package: Package) -> String {
    let folder = package.install();
    let (language, mut command) = match package {
        Package::Node => ("js", Command::new("node")),
        _ => ("python", Example::Python.interpreter()),
    };
    let path = folder.path().join("sample.mjs");
    fs::write(&path, program(day, document, language)).unwrap();
    run(command.arg(&path).env("PYTHONPATH", folder.path().join("installed")))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_sample_of_the_readmes_runs_after_tallyd_init() {
    let day = FirstDay::new("samples");
    day.initialized(&day.environment(), &[]);
    day.accounts(&[], &stack("MYSQL_URL"), &[]);
    day.done("migrate.toml", &["migrate"]);
    let daemon = day.daemon().await;
    daemon.logged("redis-loaded").await;
    let said = run_samples(&day, "README.md", Package::Threads);
    assert_eq!(said, "{42: 1}\n", "the sample must work on the very first run");
    // The first sample has the same like. The second sample adds likes of two further users.
    assert_eq!(run_samples(&day, "clients/python/README.md", Package::Threads), "{42: 1}\n");
    eventually("the likes of three users are in both stores", || async {
        let shown = day.done("config.toml", &["show", "video:42", "--format", "json"]);
        ["\"redis\":3", "\"counter\":3", "\"rows\":3"].iter().all(|number| shown.contains(number))
    })
    .await;
    assert_eq!(run_samples(&day, "clients/node/README.md", Package::Node), "Map(1) { '42' => 3 }\n");
    let log = daemon.log();
    assert!(daemon.stop().success(), "{log}");
    day.close().await;
}
