//! Tests `tallyd init` with a sentinel as `[redis] url`.

use super::common::first_day::FirstDay;
use super::common::stack;
use super::group::Group;

#[tokio::test(flavor = "multi_thread")]
async fn init_finds_what_a_sentinel_watches_and_makes_accounts_there() {
    let group = Group::start().await;
    let day = FirstDay::new("sen");
    let mut environment = day.environment();
    environment.push(("TALLYD__REDIS__URL", group.sentinels()[0].clone()));
    environment.push(("TALLYD__REDIS__SENTINEL_PASSWORD_FILE", group.password_file()));
    let config = day.initialized(&environment, &[]);
    assert!(config.contains("sentinel_master = \"tally\"\n"), "{config}");
    for sentinel in group.sentinels() {
        assert!(config.contains(&format!("\"{sentinel}\"")), "{sentinel}\n{config}");
    }
    day.accounts(&[], &stack("MYSQL_URL"), &[]);
    day.done("migrate.toml", &["migrate"]);
    let checked = day.done("config.toml", &["config", "check"]);
    assert!(checked.contains("is the master tally, according to its sentinels"), "{checked}");
    day.likes(&day.api()).await;
    day.likes_over_http().await;
    day.close().await;
}
