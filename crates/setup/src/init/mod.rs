//! `tallyd init`: writes a first configuration from three addresses and the state of their servers. It writes only new
//! files and changes nothing on a server. An administrator reads accounts.sh and runs it.
//!
//! address.rs, plan.rs, config_text.rs and script.rs are pure: they turn facts into a plan, and the plan into the texts
//! of files.

mod address;
mod ask;
mod config_text;
mod files;
mod look;
mod plan;
mod script;

use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use address::host_and_port;
use ask::{Terminal, variable};
use look::{Look, is_untrusted};
use plan::{Load, Plan, Server};
use tallyd_base::cli::{EXIT_DONE, start_runtime};
use tallyd_base::config::{self, Config};
use tallyd_redis::topology::Topology;

const TARGETS: u64 = 1_000_000;
const EVENTS_PER_S: u32 = 1_000;

/// Check the three servers, and write a first configuration.
///
/// The files are config.toml, gateway.toml, passwords, and a script that creates the accounts.
///
/// The addresses come from TALLYD__AMQP__URL, TALLYD__MYSQL__URL and TALLYD__REDIS__URL, or from questions on the
/// terminal. An administrator's logins come from TALLYD_INIT_AMQP_URL, TALLYD_INIT_MYSQL_URL and TALLYD_INIT_REDIS_URL.
/// `tallyd init` uses these logins once and never stores them.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Write the files into this folder. With the default, the passwords are in /etc/credstore, for systemd.
    #[arg(long, value_name = "DIR", default_value = "/etc/tallyd")]
    dir: PathBuf,
    /// Plan for this many targets of one kind, in a year or two. The number determines `[redis] bucket_bits`.
    #[arg(long, value_name = "NUMBER")]
    targets: Option<u64>,
    /// Plan for this many events per second in the busiest hour. The number determines `[amqp] partitions`.
    #[arg(long, value_name = "NUMBER")]
    events_per_second: Option<u32>,
    /// Count likes of these kinds, separated by commas. The first kind gets the code 1.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    kinds: Vec<String>,
}

pub fn run(args: &InitArgs) -> Result<u8> {
    let folder = std::path::absolute(&args.dir).with_context(|| format!("find {}", args.dir.display()))?;
    let secrets = plan::secrets_of(&folder);
    files::check_free(files::paths(&folder, &secrets))?;
    files::check_writable(&folder)?;
    files::check_writable(&secrets)?;
    let daemon = config::load_environment()?;
    start_runtime()?.block_on(async {
        let given: Vec<String> = Server::ALL.into_iter().filter_map(ask::given).collect();
        let terminal = if given.len() == Server::ALL.len() { None } else { Some(Terminal::open()?) };
        let mut look = Look::new(daemon);
        for server in Server::ALL {
            see(&mut look, server, terminal.as_ref()).await?;
        }
        let load = load(args, &look, terminal.as_ref()).await?;
        let warnings = look.warnings().await?;
        let plan = Plan::new(&folder, &look.daemon, look.facts, load).map_err(tallyd_base::cli::Usage)?;
        let written = files::write(&plan)?;
        let mut text = seen(&plan);
        for warning in warnings {
            // Writing to a String can't fail.
            let _ = writeln!(text, "{warning}");
        }
        text += &next_steps(&plan, &written, &given);
        write!(std::io::stdout(), "{text}").context("print")?;
        Ok(EXIT_DONE)
    })
}

async fn see(look: &mut Look, server: Server, terminal: Option<&Terminal>) -> Result<()> {
    if let Some(addresses) = ask::from_environment(server, &look.daemon)? {
        let settings = variable(server).replace("__URL", "__*");
        let action = || format!("check {} (its settings come from {settings} in the environment)", server.name());
        return look.at(server, addresses).await.with_context(action);
    }
    let terminal = terminal.context("there is no terminal for questions")?;
    loop {
        let error = match look.at(server, terminal.addresses(server)?).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        terminal.print(&format!("{error:#}"))?;
        if is_untrusted(&error) {
            let file = terminal.ask("File with the certificate of the server's authority (or empty)", "")?;
            match config::read_authorities(&file) {
                Ok(authorities) => look.trust(server, &file, &authorities),
                Err(_) if file.is_empty() => {}
                Err(problem) => terminal.print(&problem)?,
            }
        }
    }
}

async fn load(args: &InitArgs, look: &Look, terminal: Option<&Terminal>) -> Result<Load> {
    let default: Vec<String> = Config::default().kinds.0.into_keys().collect();
    let kinds = match (args.kinds.is_empty(), terminal) {
        (false, _) => args.kinds.clone(),
        (true, None) => default,
        (true, Some(terminal)) => {
            let answer = terminal.ask("Kinds that users can like (names, separated by commas)", &default.join(","))?;
            answer.split(',').map(|kind| kind.trim().to_owned()).collect()
        }
    };
    let estimate = look.targets(kinds.len()).await.unwrap_or(0).max(TARGETS);
    Ok(Load {
        targets: match (args.targets, terminal) {
            (Some(targets), _) => targets,
            (None, Some(terminal)) => terminal.number("Targets of one kind, in a year or two", estimate)?,
            (None, None) => estimate,
        },
        events_per_s: match (args.events_per_second, terminal) {
            (Some(events), _) => events,
            (None, Some(terminal)) => terminal.number("Likes per second in the busiest hour", EVENTS_PER_S)?,
            (None, None) => EVENTS_PER_S,
        },
        kinds,
    })
}

fn seen(plan: &Plan) -> String {
    let Plan { config, facts, .. } = plan;
    let unknown = || "answers; it shows its version only after a login".to_owned();
    let plugin = match facts.plugin {
        Some(true) => "; rabbitmq_consistent_hash_exchange is on",
        Some(false) => "; rabbitmq_consistent_hash_exchange is off",
        None => "",
    };
    let tls = facts.mysql_tls.as_ref().map(|tls| format!(", {tls}")).unwrap_or_default();
    let topology = match &facts.topology {
        Topology::Single => String::new(),
        Topology::Cluster(nodes) => format!(", a Redis Cluster of {} nodes", nodes.len()),
        Topology::Sentinel(_) => format!(", found the master {} through the sentinels", config.redis.sentinel_master),
    };
    [
        (Server::Rabbitmq, 5_672, facts.rabbitmq.clone().unwrap_or_else(unknown) + plugin),
        (Server::Mysql, 3_306, facts.mysql.clone().unwrap_or_else(unknown) + &tls),
        (Server::Redis, 6_379, facts.redis.clone().unwrap_or_else(unknown) + &topology),
    ]
    .map(|(server, port, text)| {
        let text = text.replace(char::is_control, " ");
        format!("{:<9} {}: {text}\n", server.name(), host_and_port(server.url(config), port))
    })
    .concat()
}

fn next_steps(plan: &Plan, written: &[PathBuf], given: &[String]) -> String {
    let names = |folder: &Path| {
        let names = written.iter().filter_map(|path| path.strip_prefix(folder).ok()?.to_str());
        names.collect::<Vec<_>>().join(", ")
    };
    let path = |name: &str| plan.folder.join(name).display().to_string();
    let is_default = plan.has_store();
    let option = if is_default { String::new() } else { format!("--config {} ", path("config.toml")) };
    let start = if is_default { "systemctl enable --now tallyd".to_owned() } else { format!("tallyd {option}run") };
    let gateway = match is_default {
        true => "systemctl enable --now tallyd-gateway".to_owned(),
        false => format!("tallyd --config {} gateway", path("gateway.toml")),
    };
    let mut text = format!("wrote to {}: {}\n", plan.folder.display(), names(&plan.folder));
    if is_default {
        // Writing to a String can't fail, here and below.
        let _ = writeln!(text, "wrote to {}: {}", plan.secrets.display(), names(&plan.secrets));
    }
    text += "Next:\n";
    let mut steps = vec![
        format!("sh {}    (as an administrator; read it first)", path("accounts.sh")),
        format!("tallyd --config {} migrate", path("migrate.toml")),
        format!("tallyd {option}config check"),
        start,
        format!("{gateway}    (if clients send events over HTTP)"),
    ];
    if !given.is_empty() {
        steps.insert(1, format!("unset {}    (they would override the files)", given.join(" ")));
    }
    for (number, step) in (1..).zip(steps) {
        let _ = writeln!(text, "  {number}. {step}");
    }
    text
}
