//! Tests boards whose scores come from metrics other than likes.

use std::collections::BTreeMap;

use tallyd_core::period::PeriodKind;
use tallyd_redis::ranks::Ranking;

use super::common::{World, eventually, stderr, target};
use super::{Product, SHARE, VIEW};

const BOARDS: &str = "[metrics]\nlike = 1\nview = 2\nshare = 4\n\
    [[rule]]\nmetric = \"view\"\nwriter = \"api\"\nboard = \"hot\"\n\
    [[rule]]\nmetric = \"share\"\nboard = \"hot\"\n\
    [[board]]\nname = \"hot\"\nperiod = \"total\"\nscore = [\"share\", \"view\"]\ntie = \"second\"\n\
    [[board]]\nname = \"hot\"\nperiod = \"day\"\nscore = [\"share\", \"view\"]\ntie = \"second\"\n";

/// Returns the numbers of shares and views that the board has for each member.
async fn on_board(product: &Product, period: PeriodKind) -> BTreeMap<String, (u64, u64)> {
    let page = product.client.board_page(("hot", period), 1, 100, Ranking::Ordinal).await.unwrap();
    let columns = |entry: tallyd_client::boards::Entry| {
        let columns = entry.columns.unwrap();
        (String::from_utf8(entry.member).unwrap(), (columns.primary, columns.low))
    };
    page.entries.into_iter().map(columns).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_board_follows_what_api_servers_and_the_daemon_count_whatever_is_sent_again() {
    let world = World::new("metrics_board", BOARDS).await;
    let mut product = Product::of(world).await;
    assert!(product.daemon.take().unwrap().stop().success());
    let mut expected: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for number in 0..60_u64 {
        let (id, delta) = (1 + number % 7, 1 + number % 3);
        let metric = if number % 2 == 0 { SHARE } else { VIEW };
        product.client.add(target(id), metric, delta.cast_signed(), &format!("a{number}")).await.unwrap();
        let of = expected.entry(id.to_string()).or_default();
        *if metric == SHARE { &mut of.0 } else { &mut of.1 } += delta;
    }
    for point in ["outbox:adding", "outbox:amidst", "outbox:added"] {
        let crashed = product.world.command().env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert!(stderr(&crashed).contains("fault-point"), "{}", stderr(&crashed));
    }
    product.daemon = Some(product.world.daemon());
    product.settled().await;
    for period in [PeriodKind::Total, PeriodKind::Day] {
        eventually("the board has all shares and views", || async { on_board(&product, period).await == expected })
            .await;
    }
    product.close().await;
}
