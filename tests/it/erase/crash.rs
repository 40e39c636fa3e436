//! An erase that dies between any two steps.

use redis::AsyncCommands;
use tallyd::moving::erase::FAULT_POINTS;
use tallyd_core::model::UserId;
use tallyd_core::period::{Calendar, Period, PeriodKind};

use super::{BY_DAEMON, Likes, VIDEO, erase, named, report};
use crate::common::{World, assert_redis_equals, stderr, target};

const BOARD: &str =
    "board = \"hot\"\n[[board]]\nname = \"hot\"\nperiod = \"day\"\narchive_grace = \"0s\"\nexpire_after = \"1h\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn an_erase_that_is_killed_anywhere_is_ended_by_the_next() {
    for (number, point) in FAULT_POINTS.into_iter().enumerate() {
        let world = World::new(&format!("erase_killed_{number}"), &format!("{BY_DAEMON}{BOARD}")).await;
        let publisher = world.publisher().await;
        let mut likes = Likes::new();
        for user in 1..=20 {
            likes.add(target(VIDEO), UserId(user));
            likes.add(target(user), UserId(user));
        }
        likes.publish(&world, &publisher).await;
        let mut daemon = world.daemon();
        world.drained(&publisher).await;
        // An archived day that the target was on, among equals.
        let today = Period::containing(PeriodKind::Day, tallyd::runtime::clock::now(), &Calendar::UTC);
        let key = world.cache.keys.board("hot", &today.previous().unwrap().to_string());
        for member in [VIDEO, 7, 90_000_000_000] {
            let () = world.redis().await.zadd(&key, member.to_string(), 3.0).await.unwrap();
        }
        assert!(world.tallyd(&["archive"]).status.success());

        let name = format!("video:{VIDEO}");
        let mut command = world.command();
        let killed = command.args(["erase", "--target", &name]).env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert!(stderr(&killed).contains("fault-point"), "{point}: {}", stderr(&killed));
        // Its leases run out.
        sqlx::query("UPDATE job_lock SET lease_until = NOW(6)").execute(&world.pool).await.unwrap();
        let resumed = report(&erase(&world, &["--target", &name, "--resume"]), 0);
        assert_eq!(resumed["liked_again"], 0, "{point}");
        assert_eq!(named(&world, VIDEO).await, [] as [String; 0], "{point}");

        likes.model.rows.retain(|(of, _), _| *of != target(VIDEO));
        world.assert_equals(&likes.model).await;
        world.outbox_added().await;
        assert_redis_equals(&world, &likes.model).await;
        let places = "SELECT COUNT(*) FROM leaderboard_archive WHERE member = '0' AND place = 3";
        assert_eq!(world.count(places).await, 1, "{point}");
        assert!(daemon.stop().success());
        world.close().await;
    }
}
