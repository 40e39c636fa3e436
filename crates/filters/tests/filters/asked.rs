//! Clients ask filters only if `[filter] asked` says so, because daemons without `[filter]` note no users.

use tallyd_base::runtime::clock;
use tallyd_client::{Client, LikedBy};
use tallyd_core::card::Card;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;

use super::{run, seed};
use crate::common;
use common::{World, body, eventually, stranger_of, target};

/// `future_max` shows that the card in Redis is from a daemon with these settings.
const NOT_ASKED: &str = "[consumer]\nfuture_max = \"4m\"\n[filter]\nlikes_min = 20\ncron = \"\"\n";

/// Returns the answer of a client that reads the site card just now.
async fn answer(client: &Client, user: u64) -> (bool, LikedBy) {
    client.site_refreshed().await;
    let liked = client.likes_of(UserId(user), &[target(1)]).await.unwrap()[0];
    (liked.liked, liked.by)
}

/// Waits until Redis has the card of the daemon with this `future_max`.
async fn card(world: &World, future_max_s: u64) {
    eventually("the daemon has written the card", || async {
        let text = world.cache.site_card().await.unwrap();
        text.is_some_and(|text| Card::decode(&text).unwrap().future_max_s == future_max_s)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_without_filters_makes_no_answer_wrong_before_they_are_asked() {
    let world = World::new("filters_asked", NOT_ASKED).await;
    seed(&world, target(1), 1..=30).await;
    let publisher = world.publisher().await;
    world.write("");
    let without = world.daemon();
    without.logged("\"consuming\"").await;
    card(&world, 300).await;
    world.write(NOT_ASKED);
    let with = world.daemon();
    card(&world, 240).await;
    assert_eq!(run(&world).await.built, 1);
    let like = LikeEvent { target: target(1), user: UserId(40), at: clock::now(), liked: true };
    world.publish(&publisher, &[body(&like)]).await;
    world.drained(&publisher).await;
    world.outbox_added().await;
    let client = stranger_of(&world.api);
    assert_eq!(answer(&client, 40).await, (true, LikedBy::Mysql));

    assert!(without.stop().success());
    assert!(world.tallyd(&["admin", "filters", "rebuild"]).status.success());
    assert_eq!(run(&world).await.built, 1);
    let (asks, asks_not) = ((false, LikedBy::Redis), (false, LikedBy::Mysql));
    for (settings, expected) in [(&*format!("{NOT_ASKED}asked = true\n"), asks), (NOT_ASKED, asks_not)] {
        assert_ne!(answer(&client, 5_000_000).await, expected);
        world.write(settings);
        with.signal("HUP");
        eventually("the reload changes whether clients ask", || async { answer(&client, 5_000_000).await == expected })
            .await;
        assert_eq!(answer(&client, 40).await, (true, LikedBy::Mysql));
    }
}
