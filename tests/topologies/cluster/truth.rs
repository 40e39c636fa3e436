//! The counters and boards are distributed over all masters of a Redis Cluster.

use std::collections::BTreeMap;

use futures_util::{StreamExt, stream};
use tallyd_core::model::{Target, UserId};
use tallyd_core::period::PeriodKind;
use tallyd_redis::ranks::Ranking;

use super::common::{Dice, Model, as_api, redis_likes, target};
use super::nodes::MASTERS;
use super::{AT_ONCE, Stage};
use crate::common::scripts::OnBoard;

const TARGETS: u64 = 3_000;

const SETTINGS: &str = "bucket_bits = 9\n[reconcile]\nscrub_parts = 2\n\
    [[board]]\nname = \"videos\"\nperiod = \"day\"\n[[board]]\nname = \"videos\"\nperiod = \"week\"\n\
    [[board]]\nname = \"videos\"\nperiod = \"total\"\n[[board]]\nname = \"users\"\nperiod = \"total\"\n";

/// The score of each member of a board.
type Scores = BTreeMap<Vec<u8>, u64>;

/// Likes each target, and then undoes some of the likes. Each like and each undo changes two boards.
async fn traffic(stage: &Stage, model: &mut Model) -> (Scores, Scores) {
    let (mut dice, mut videos, mut users) = (Dice::of_run(7), Scores::new(), Scores::new());
    let likes: Vec<(Target, UserId)> = (1..=TARGETS)
        .flat_map(|id| (0..1 + id % 4).map(move |user| (target(id), UserId(1 + (id * 7 + user) % 300))))
        .collect();
    let unlikes: Vec<(Target, UserId)> = likes.iter().copied().filter(|_| dice.percent(20)).collect();
    for (pairs, liked) in [(&likes, true), (&unlikes, false)] {
        let set = |(target, user): (Target, UserId)| async move {
            let (video, user_id) = (target.id.to_string(), user.to_string());
            let on = [
                OnBoard { board: "videos", member: video.as_bytes() },
                OnBoard { board: "users", member: user_id.as_bytes() },
            ];
            let counted = if liked {
                stage.client.like(target, user, &on).await
            } else {
                stage.client.unlike(target, user, &on).await
            };
            counted.unwrap().counted().unwrap()
        };
        let counted: Vec<_> = stream::iter(pairs.iter().copied()).map(set).buffer_unordered(AT_ONCE).collect().await;
        for counted in counted {
            assert_eq!(counted.boards_failed, 0);
            model.apply(&counted.event);
            for (scores, member) in
                [(&mut videos, counted.event.target.id.to_string()), (&mut users, counted.event.user.to_string())]
            {
                let score = scores.entry(member.into_bytes()).or_default();
                *score = if liked { *score + 1 } else { *score - 1 };
            }
        }
    }
    videos.retain(|_, score| *score > 0);
    users.retain(|_, score| *score > 0);
    (videos, users)
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_on_all_masters_end_as_the_model_says_and_every_drift_on_any_of_them_is_repaired() {
    let stage = Stage::new("cluster_truth", &as_api(SETTINGS), &[]).await;
    let mut model = Model::default();
    let (videos, users) = traffic(&stage, &mut model).await;
    let world = &stage.world;
    world.drained(&stage.publisher).await;
    world.assert_rows_equal(&model).await;
    stage.nodes.assert_equal(world, &model).await;
    for (board, scores) in [
        (("videos", PeriodKind::Day), &videos),
        (("videos", PeriodKind::Week), &videos),
        (("videos", PeriodKind::Total), &videos),
        (("users", PeriodKind::Total), &users),
    ] {
        let page = stage.client.board_page(board, 1, 10_000, Ranking::Ordinal).await.unwrap();
        let shown: Scores = page.entries.into_iter().map(|entry| (entry.member, entry.score as u64)).collect();
        assert_eq!(&shown, scores, "{board:?}");
    }
    let numbers = redis_likes(&stage.client, &model.counters().into_keys().collect::<Vec<_>>()).await;
    assert_eq!(numbers, model.counters().into_values().map(Some).collect::<Vec<_>>());
    for mode in ["--full", "--changed", "--scrub", "--scrub"] {
        stage.is_exact(mode).await;
    }

    let parts = stage.nodes.counters(world).await;
    for (place, (counters, loaded)) in parts.iter().enumerate() {
        assert!(counters.len() > 500 && loaded.len() > 100, "node {place} has {} counters", counters.len());
        let off: Vec<Target> = counters.keys().copied().step_by(counters.len() / 2).take(2).collect();
        stage.nodes.drift(world, off[0], 5).await;
        stage.nodes.drift(world, off[1], 1).await;
    }
    let mut phantoms = BTreeMap::new();
    for id in 1_000_000.. {
        let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(id)));
        let place = stage.nodes.place_of(&key).await;
        if phantoms.insert(place, target(id)).is_none() {
            stage.nodes.drift(world, target(id), 3).await;
        } else {
            phantoms.insert(place, target(id));
        }
        if phantoms.len() == MASTERS {
            break;
        }
    }
    let report = world.report(&["reconcile"]);
    let found = ["drifted", "repaired", "phantoms", "drift_sum"].map(|number| report[number].as_u64().unwrap());
    assert_eq!(found, [9, 9, 3, 27], "{report}");
    stage.close(&model).await;
}
