//! Summarizes for each board the data that `tallyd board list` shows.

use anyhow::Result;

use crate::boards::{BoardState, Boards, Listed};
use crate::config::{self, Config};
use crate::telemetry::Board;
use tallyd_core::model::Micros;
use tallyd_mysql::Store;
use tallyd_redis::Cache;

pub(super) async fn look(config: &Config, store: &Store, cache: &Cache, now: Micros) -> Result<Vec<Board>> {
    let of = Boards { boards: &config.boards, store, cache };
    let (saved, mut boards) = (of.saved().await?, Vec::new());
    for board in &config.boards {
        let listed = of.list_of(board, &saved, now).await?;
        boards.push(sum(label(config, board), board.archive_grace.0.as_secs(), &listed, now));
    }
    Ok(boards)
}

fn label(config: &Config, board: &config::Board) -> String {
    match config.boards.iter().filter(|other| other.name == board.name).count() {
        1 => board.name.clone(),
        _ => format!("{}/{}", board.name, format!("{:?}", board.period).to_lowercase()),
    }
}

const VERY_OLD_S: u64 = 31_536_000;

fn sum(board: String, grace_s: u64, listed: &[Listed], now: Micros) -> Board {
    let at = |seconds: u64| now.0 / 1_000_000 * 1_000_000 + i64::try_from(seconds).unwrap_or(0) * 1_000_000;
    let mut sum = Board { board, ..Board::default() };
    if let Some(current) = listed.first() {
        sum.period.clone_from(&current.period);
        sum.state = current.state.text().to_owned();
        sum.members = current.members;
        sum.ends_at = current.ends_in_s.map(at);
    }
    sum.lost =
        listed.iter().filter(|listed| listed.state == BoardState::Lost).map(|listed| listed.period.clone()).collect();
    for past in listed.iter().skip(1) {
        // If the end time is unknown, the period is assumed to be older than any `archive_grace`.
        let ended_s_ago = past.ended_s_ago.unwrap_or(VERY_OLD_S);
        if matches!(past.state, BoardState::Closed | BoardState::Frozen) && ended_s_ago > grace_s {
            sum.unarchived.push(past.period.clone());
            let ended = now.0 - i64::try_from(ended_s_ago).unwrap_or(0) * 1_000_000;
            sum.oldest_unarchived_at = Some(sum.oldest_unarchived_at.map_or(ended, |oldest: i64| oldest.min(ended)));
        }
        if sum.archived.is_none() && matches!(past.state, BoardState::Done | BoardState::Ended) {
            sum.archived = Some((past.period.clone(), past.members));
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_closed_and_not_archived_is_told_once_its_grace_is_over() {
        let listed = |period: &str, state, ends_in_s, ended_s_ago| Listed {
            board: "likes".to_owned(),
            period: period.to_owned(),
            state,
            members: 7,
            ends_in_s,
            ended_s_ago,
            saved_s_ago: None,
        };
        let all = [
            listed("2026-W47", BoardState::Open, Some(100), None),
            listed("2026-W46", BoardState::Closed, None, Some(50)),
            listed("2026-W45", BoardState::Frozen, None, Some(1_000)),
            listed("2026-W44", BoardState::Lost, None, Some(1_500)),
            listed("2026-W44", BoardState::Done, None, Some(2_000)),
            listed("2026-W43", BoardState::Ended, None, Some(3_000)),
        ];
        let sum = sum("likes".to_owned(), 60, &all, Micros(5_000_000_000));
        assert_eq!((sum.period.as_str(), sum.members, sum.ends_at), ("2026-W47", 7, Some(5_100_000_000)));
        assert_eq!(sum.lost, ["2026-W44"]);
        assert_eq!((sum.unarchived, sum.oldest_unarchived_at), (vec!["2026-W45".to_owned()], Some(4_000_000_000)));
        assert_eq!(sum.archived, Some(("2026-W44".to_owned(), 7)));
    }
}
