//! A read returns all metrics of a target. Each count comes from the server that has it, Redis or MySQL.

use tallyd_client::{Number, Source};
use tallyd_core::model::{Metric, UserId};

use super::settled;
use crate::common::scripts::ApiServer;
use crate::common::{lose, target};

const METRICS: &str = "[metrics]\nlike = 1\nview = 3\n[[rule]]\nmetric = \"view\"\nwriter = \"api\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_page_has_all_numbers_in_every_layout() {
    for (name, layout) in [("read_packed", "packed"), ("read_entity", "entity"), ("read_string", "string")] {
        let (world, daemon, publisher) = settled(name, &format!("[redis]\nlayout = \"{layout}\"\n{METRICS}")).await;
        let client = world.api_server();
        client.like(target(2), UserId(7), &[]).await.unwrap();
        client.add(target(2), Metric(3), 9, "a").await.unwrap();
        world.counted(&publisher).await;
        let page: Vec<_> = (1..=100).map(target).collect();
        let numbers = client.read(&page).await.unwrap();
        let redis = |value| Some(Number { value, source: Source::Redis });
        let of = |place: usize| [1, 3, 2].map(|metric| numbers[place].get(Metric(metric)));
        assert_eq!((of(0), of(1)), ([redis(0), redis(0), None], [redis(1), redis(9), None]), "{layout}");
        assert!(client.read(&vec![target(1); 1_001]).await.is_err());
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_redis_has_lost_is_read_from_mysql_and_told_apart() {
    let (world, _daemon, publisher) = settled("read_lost", METRICS).await;
    let client = world.api_server();
    for user in 1..=3 {
        client.like(target(2), UserId(user), &[]).await.unwrap();
    }
    client.add(target(2), Metric(3), 9, "a").await.unwrap();
    world.drained(&publisher).await;
    lose(&world).await;
    let numbers = client.read(&[target(1), target(2)]).await.unwrap();
    let likes: Vec<_> = numbers.iter().map(|numbers| numbers.get(Metric(1))).collect();
    let mysql = |value| Some(Number { value, source: Source::Mysql });
    assert_eq!(likes, [mysql(0), mysql(3)]);
    assert_eq!(numbers[1].get(Metric(3)), mysql(9));
    let mut config = world.api.clone();
    // No server listens at this address.
    config.mysql.url = "mysql://tallyd@127.0.0.1:9/tally".into();
    let client = ApiServer::new(&config);
    let numbers = client.read(&[target(2)]).await.unwrap();
    assert_eq!(numbers[0].get(Metric(1)), None);
}
