//! A client knows a user's likes immediately and exactly.

use std::collections::BTreeSet;

use redis::AsyncCommands;
use tallyd_core::model::{Target, UserId};

use crate::common::{Dice, World, as_api, target};

#[tokio::test(flavor = "multi_thread")]
async fn what_a_user_likes_is_known_whether_it_is_in_mysql_yet_or_not() {
    let world = World::new("status", &as_api("")).await;
    let client = world.api_server();
    let (publisher, daemon) = (world.publisher().await, world.daemon());
    let (user, mut dice, mut likes) = (UserId(7), Dice::of_run(3), BTreeSet::new());
    let targets: Vec<Target> = (1..=500).map(target).collect();
    let mut click = async |likes: &mut BTreeSet<Target>, clicks: usize| {
        for _ in 0..clicks {
            let target = targets[dice.below(500) as usize];
            if likes.insert(target) {
                client.like(target, user, &[]).await.unwrap();
            } else {
                likes.remove(&target);
                client.unlike(target, user, &[]).await.unwrap();
            }
        }
    };
    click(&mut likes, 300).await;
    world.drained(&publisher).await;
    let mut redis = world.redis().await;
    let keys: Vec<String> = redis.keys(format!("{}:recent:*", world.name)).await.unwrap();
    let () = redis.del(keys).await.unwrap();
    assert!(daemon.stop().success());
    // These clicks are not in MySQL yet, because the daemon has stopped.
    click(&mut likes, 100).await;
    let liked = client.liked(user, &targets).await.unwrap();
    let expected: Vec<bool> = targets.iter().map(|target| likes.contains(target)).collect();
    assert_eq!(liked, expected);
    assert_eq!(client.liked(UserId(8), &targets).await.unwrap(), vec![false; 500]);
    assert_eq!(client.liked(user, &[]).await.unwrap(), Vec::<bool>::new());
    assert!(client.liked(user, &vec![target(1); 501]).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_likes_a_target_is_read_page_by_page() {
    let world = World::new("likers", "").await;
    let client = world.api_server();
    let (publisher, _daemon) = (world.publisher().await, world.daemon());
    for user in 1..=25 {
        client.like(target(1), UserId(user * 10), &[]).await.unwrap();
    }
    client.unlike(target(1), UserId(50), &[]).await.unwrap();
    client.like(target(2), UserId(51), &[]).await.unwrap();
    world.drained(&publisher).await;
    let (mut users, mut after) = (Vec::new(), 0);
    loop {
        let page = client.likers(target(1), after, 10).await.unwrap();
        let Some(last) = page.last() else { break };
        after = last.0;
        users.extend(page);
    }
    let expected: Vec<UserId> = (1..=25).filter(|user| *user != 5).map(|user| UserId(user * 10)).collect();
    assert_eq!(users, expected);
}
