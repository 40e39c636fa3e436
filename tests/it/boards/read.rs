//! Reads from a board its pages, the neighbours of a member, and the ranking of a list of friends. The tests compare
//! these results with a naive model.

use std::collections::BTreeMap;

use tallyd_client::boards::Entry;
use tallyd_core::model::UserId;
use tallyd_core::period::PeriodKind;
use tallyd_redis::ranks::Ranking;

use super::common::{Dice, World, as_api, target};
use crate::common::scripts::{ApiServer, OnBoard};

const BOARDS: &str = "[metrics]\nlike = 1\ncomment = 2\n\
    [[board]]\nname = \"videos\"\nperiod = \"day\"\nscore = [\"like\", \"comment\"]\ntie = \"second\"\n\
    [[board]]\nname = \"videos\"\nperiod = \"total\"\nscore = [\"like\", \"comment\"]\ntie = \"second\"\n\
    [[board]]\nname = \"users\"\nperiod = \"total\"\n";

const RANKINGS: [Ranking; 3] = [Ranking::Ordinal, Ranking::Competition, Ranking::Dense];

const TOTAL: (&str, PeriodKind) = ("videos", PeriodKind::Total);

/// The members of a board, with their numbers of likes and comments.
type Model = BTreeMap<Vec<u8>, (u64, u64)>;

/// Computes the place of each member separately.
fn placed(model: &Model, ranking: Ranking) -> Vec<(u64, Vec<u8>, (u64, u64))> {
    let mut board: Vec<_> = model.iter().collect();
    board.sort_unstable_by(|a, b| (b.1, b.0).cmp(&(a.1, a.0)));
    let place = |index: usize, score: &(u64, u64)| {
        let higher = board.iter().filter(|(_, other)| *other > score).map(|(_, other)| *other);
        match ranking {
            Ranking::Ordinal => 1 + index as u64,
            Ranking::Competition => 1 + higher.count() as u64,
            Ranking::Dense => 1 + higher.collect::<std::collections::BTreeSet<_>>().len() as u64,
        }
    };
    board.iter().enumerate().map(|(index, (member, score))| (place(index, score), (*member).clone(), **score)).collect()
}

fn shown(entries: &[Entry]) -> Vec<(u64, Vec<u8>, (u64, u64))> {
    let entry = |entry: &Entry| {
        let columns = entry.columns.unwrap();
        (entry.place, entry.member.clone(), (columns.primary, columns.low))
    };
    entries.iter().map(entry).collect()
}

async fn filled(name: &str, members: u64) -> (World, ApiServer, Model) {
    let world = World::new(name, BOARDS).await;
    let client = world.api_server();
    let (mut model, mut dice) = (Model::new(), Dice::of_run(5));
    for _ in 0..members * 3 {
        let member = format!("m{}", dice.below(members)).into_bytes();
        let on = OnBoard { board: "videos", member: &member };
        let (likes, comments) = model.entry(member.clone()).or_default();
        if dice.percent(30) {
            client.add_to_board(on, "comment", 1).await.unwrap();
            *comments += 1;
        } else {
            client.add_to_board(on, "like", 1).await.unwrap();
            *likes += 1;
        }
    }
    (world, client, model)
}

#[tokio::test]
async fn pages_have_the_places_of_the_whole_board_in_every_ranking() {
    let (_world, client, model) = filled("board_pages", 60).await;
    for ranking in RANKINGS {
        let whole = placed(&model, ranking);
        for (from, count) in [(1, 5), (3, 10), (28, 7), (1, 1_000), (whole.len() as u64, 3), (1_000, 5)] {
            let page = client.board_page(TOTAL, from, count, ranking).await.unwrap();
            let first = (from as usize - 1).min(whole.len());
            let expected = &whole[first..whole.len().min(first + count as usize)];
            assert_eq!(shown(&page.entries), expected, "{ranking:?}, {count} from {from}");
            assert_eq!(page.members, whole.len() as u64);
        }
    }
    assert!(client.board_page(TOTAL, 0, 1, Ranking::Ordinal).await.is_err(), "the first place is 1");
    let none = client.board_page(TOTAL, 1, 0, Ranking::Dense).await.unwrap();
    assert_eq!((none.entries, none.members), (Vec::new(), model.len() as u64));
    let all = client.board_page(TOTAL, 1, u64::MAX, Ranking::Dense).await.unwrap();
    assert_eq!(all.entries.len(), model.len());
}

#[tokio::test]
async fn a_member_is_found_with_its_neighbours() {
    let (_world, client, model) = filled("board_around", 40).await;
    for ranking in RANKINGS {
        let whole = placed(&model, ranking);
        for (index, (_, member, _)) in whole.iter().enumerate() {
            let around = client.board_around(TOTAL, member, 2, ranking).await.unwrap();
            let expected = &whole[index.saturating_sub(2)..whole.len().min(index + 3)];
            assert_eq!(shown(&around.entries), expected, "{ranking:?}");
        }
    }
    assert!(client.board_around(TOTAL, b"nobody", 2, Ranking::Ordinal).await.unwrap().entries.is_empty());
}

#[tokio::test]
async fn a_thousand_friends_are_placed_among_themselves() {
    let (_world, client, model) = filled("board_friends", 1_500).await;
    let mut friends: Vec<Vec<u8>> = (0..1_500).step_by(2).map(|id| format!("m{id}").into_bytes()).collect();
    friends.extend((2_000..2_250).map(|id| format!("m{id}").into_bytes()));
    friends.push(friends[0].clone());
    assert_eq!(friends.len(), 1_001);
    let among: Model = model.into_iter().filter(|(member, _)| friends.contains(member)).collect();
    for ranking in RANKINGS {
        let entries = client.board_of(TOTAL, &friends, ranking).await.unwrap();
        assert_eq!(shown(&entries), placed(&among, ranking), "{ranking:?}");
    }
    assert_eq!(client.board_of(TOTAL, &[], Ranking::Ordinal).await.unwrap(), []);
}

#[tokio::test]
async fn a_like_counts_on_all_current_periods_of_its_boards() {
    let world = World::new("board_likes", &as_api(BOARDS)).await;
    let client = world.api_server();
    let on = [OnBoard { board: "videos", member: b"42" }, OnBoard { board: "users", member: b"7" }];
    for user in 1..=3 {
        client.count(target(42), UserId(user), true, &on).await.unwrap();
    }
    client.count(target(42), UserId(1), false, &on).await.unwrap();
    for (board, columns) in
        [(("videos", PeriodKind::Day), Some((2, 0))), (TOTAL, Some((2, 0))), (("users", PeriodKind::Total), None)]
    {
        let page = client.board_page(board, 1, 10, Ranking::Ordinal).await.unwrap();
        let columns_of = |entry: &Entry| entry.columns.map(|columns| (columns.primary, columns.low));
        assert_eq!(page.entries.iter().map(columns_of).collect::<Vec<_>>(), [columns], "{board:?}");
    }
    let plain = client.board_page(("users", PeriodKind::Total), 1, 10, Ranking::Ordinal).await.unwrap();
    assert_eq!(plain.entries[0].score, 2.0);
    let left = client.board_ends_in("videos", PeriodKind::Day).await.unwrap().unwrap();
    assert!(left.as_secs() <= 86_400, "{left:?}");
    assert_eq!(client.board_ends_in("videos", PeriodKind::Total).await.unwrap(), None);
    let error = client.add_to_board(on[0], "share", 1).await.unwrap_err().to_string();
    assert!(error.contains("has no column share: its columns are like, comment"), "{error}");
    let error = client.board_page(("videos", PeriodKind::Week), 1, 1, Ranking::Ordinal).await.unwrap_err().to_string();
    assert!(error.contains("no [[board]] is named videos and has period \"week\""), "{error}");
}

#[tokio::test]
async fn an_archived_period_reads_as_it_did_in_redis() {
    let (world, client, model) = filled("board_archived", 60).await;
    let day = world.cache.keys.board("videos", "2026-10-01");
    let mut redis = world.redis().await;
    let total = world.cache.keys.board("videos", "total");
    let () = redis::cmd("COPY").arg(&total).arg(&day).query_async(&mut redis).await.unwrap();
    for archived in [false, true] {
        if archived {
            assert!(world.tallyd(&["archive"]).status.success());
        }
        for ranking in RANKINGS {
            for from in [1, 2, 10, 57, 1_000] {
                let page = client.board_page_of(("videos", "2026-10-01"), from, 7, ranking).await.unwrap();
                let expected: Vec<_> = placed(&model, ranking).into_iter().skip(from as usize - 1).take(7).collect();
                assert_eq!(page.members, model.len() as u64, "{from}");
                assert_eq!(shown(&page.entries), expected, "{archived} {ranking:?} {from}");
            }
        }
    }
}
