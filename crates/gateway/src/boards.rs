//! `GET /v1/boards/NAME?period=2026-W48&top=100&around=42&radius=5`: the first members of a board, and a member with
//! its neighbours.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Number;

use super::answer::{Answer, Refused};
use super::query::Query;
use super::{Gate, Shared};
use tallyd_base::config::Board;
use tallyd_base::http::json;
use tallyd_client::ClientError;
use tallyd_client::boards::Entry;
use tallyd_core::period::Period;
use tallyd_core::score::Tie;
use tallyd_core::site::Site;
use tallyd_redis::ranks::Ranking;

pub(super) const TOP: u64 = 100;
pub(super) const TOP_MAX: u64 = 1_000;
pub(super) const RADIUS: u64 = 5;
pub(super) const RADIUS_MAX: u64 = 100;

/// A board in one period.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct BoardPage {
    pub board: String,
    /// 2026-11-21, 2026-W47, 2026-11 or total.
    pub period: String,
    /// Whether Redis has lost this open board since its last snapshot. If so, members or points are missing until an operator
    /// restores the board.
    pub lost: bool,
    /// The first members, best first.
    pub members: Vec<Member>,
    /// The requested member with its neighbours. Empty if the member is not on the board.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub around: Option<Vec<Member>>,
}

/// A member of a board.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Member {
    /// The place, from 1.
    pub rank: u64,
    pub member: String,
    /// The score that determines the rank.
    #[schemars(with = "f64")]
    pub score: Number,
    /// The second score, which orders equal scores. Only for boards with `tie = "second"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub second: Option<u64>,
}

pub(super) async fn show(
    State(gate): Shared,
    name: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Answer<Response> {
    let Path(name) = name.map_err(|_| Refused::bad("not-utf-8", "the board's name is not UTF-8"))?;
    let query = Query::parse(query.as_deref(), ["period", "top", "around", "radius"])?;
    let (top, radius) = (query.number("top", TOP, TOP_MAX)?, query.number("radius", RADIUS, RADIUS_MAX)?);
    let _permit = gate.may_read()?;
    let (board, period) = find(&gate, &name, query.get("period")).await?;
    let failed = |error| Refused::of_client(&error);
    let page = gate.client.board_page_of((&name, &period), 1, top, Ranking::Ordinal).await.map_err(failed)?;
    let around = match query.get("around") {
        None => None,
        Some(member) => {
            let at = (name.as_str(), period.as_str());
            let page = gate.client.board_around_of(at, member.as_bytes(), radius, Ranking::Ordinal).await;
            Some(members(page.map_err(failed)?.entries, &board))
        }
    };
    let (lost, members) = (page.is_lost, members(page.entries, &board));
    Ok(json(StatusCode::OK, &BoardPage { board: name, period, lost, members, around }))
}

async fn find(gate: &Gate, name: &str, period: Option<&str>) -> Answer<(Board, String)> {
    let has = |site: &Site| site.boards.iter().any(|board| board.name == name);
    let mut site = gate.client.site().await;
    if !has(&site) {
        site = gate.client.site_refreshed().await;
    }
    let named: Vec<&Board> = site.boards.iter().filter(|board| board.name == name).collect();
    let Some(first) = named.first() else {
        if !site.is_known {
            return Err(Refused::of_client(&ClientError::NoCard));
        }
        let message = format!("no [[board]] is named {name:?}");
        return Err(Refused::new(StatusCode::NOT_FOUND, "unknown-board", message));
    };
    if let Some(period) = period {
        let kind = period.parse::<Period>().map(Period::kind).ok();
        let board = named.iter().find(|board| kind == Some(board.period)).unwrap_or(first);
        return Ok(((*board).clone(), period.to_owned()));
    }
    if named.len() > 1 {
        let lengths: Vec<String> = named.iter().map(|board| board.period.to_string()).collect();
        let message =
            format!("the board {name} has the period lengths {}: add the parameter period", lengths.join(", "));
        return Err(Refused::bad("no-period", message));
    }
    let current = gate.client.board_period(name, first.period).await;
    Ok(((*first).clone(), current.map_err(|error| Refused::of_client(&error))?))
}

fn members(entries: Vec<Entry>, board: &Board) -> Vec<Member> {
    let member = |entry: Entry| Member {
        rank: entry.place,
        member: String::from_utf8_lossy(&entry.member).into_owned(),
        score: number(entry.columns.map_or(entry.score, |columns| columns.primary as f64)),
        second: entry.columns.filter(|_| board.tie == Tie::Second).map(|columns| columns.low),
    };
    entries.into_iter().map(member).collect()
}

fn number(score: f64) -> Number {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if score.fract() == 0.0 && score.abs() <= EXACT {
        #[expect(clippy::cast_possible_truncation, reason = "it is a whole number that an i64 holds")]
        return Number::from(score as i64);
    }
    Number::from_f64(score).unwrap_or_else(|| Number::from(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_score_is_written_as_an_integer() {
        let written = [17.0, -3.0, 0.5, 9_007_199_254_740_992.0].map(|score| number(score).to_string());
        assert_eq!(written, ["17", "-3", "0.5", "9007199254740992"]);
    }
}
