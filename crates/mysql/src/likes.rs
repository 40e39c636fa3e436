//! The SQL statements that apply a batch of events, in one transaction.
//!
//! There are two ways of writing rows. Both are exact even if two writers write the same (target, user) pair
//! (decision 0004). With [`upsert`], one statement writes each row and returns the row's old state, under the row's
//! lock. This is 1.5 times as fast, but needs user variables, which MySQL deprecates. The second way reads and locks
//! the existing rows ([`old_states`]), and inserts the missing ones with a plain INSERT, which fails for the later of
//! two writers (error 1062).

use std::collections::HashMap;

use chrono::NaiveDateTime;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tallyd_connect::fate::Fate;
use tallyd_core::coalesce::{Before, LikeState, Pair};
use tallyd_core::model::{Difference, Kind, Micros, Target, TargetId, UserId};

use super::text::Text;
use super::{Context, Result, TRIPLE_SHAPES, datetime, in_shapes, in_shapes_of, micros, placeholders};

/// Reads and locks the states of `pairs`, which must be sorted by key. The result contains no entry for a pair without
/// a row.
pub async fn old_states(connection: &mut MySqlConnection, pairs: &[Pair]) -> Result<HashMap<Pair, LikeState>> {
    const ACTION: &str = "read the old states";
    let mut states = HashMap::with_capacity(pairs.len());
    for piece in in_shapes_of(TRIPLE_SHAPES, pairs) {
        let sql = format!(
            "SELECT kind, target_id, user_id, is_del, update_at FROM like_record \
             WHERE (kind, target_id, user_id) IN ({}) FOR UPDATE",
            placeholders(piece.len(), 3)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for (target, user) in piece {
            query = query.bind(target.kind.0).bind(target.id.0).bind(user.0);
        }
        for row in query.fetch_all(&mut *connection).await.context(ACTION)? {
            let (pair, state) = read_state(&row).context(ACTION)?;
            states.insert(pair, state);
        }
    }
    Ok(states)
}

fn read_state(row: &sqlx::mysql::MySqlRow) -> std::result::Result<(Pair, LikeState), sqlx::Error> {
    let target = Target { kind: Kind(row.try_get(0)?), id: TargetId(row.try_get(1)?) };
    let state = LikeState { liked: !row.try_get::<bool, _>(3)?, at: micros(row.try_get::<NaiveDateTime, _>(4)?) };
    Ok(((target, UserId(row.try_get(2)?)), state))
}

/// Writes the newest states. [`old_states`] has locked their rows, or did not find them. Both lists are sorted by key.
pub async fn write_winners(
    connection: &mut MySqlConnection,
    winners: &[(Pair, LikeState)],
    before: &[Before],
) -> Result<()> {
    let those = |wanted: fn(&Before) -> bool| -> Vec<(Pair, LikeState)> {
        winners.iter().zip(before).filter(|(_, before)| wanted(before)).map(|(winner, _)| *winner).collect()
    };
    insert_states(connection, &those(|before| *before == Before::Absent)).await?;
    update_states(connection, &those(|before| matches!(before, Before::Older(_)))).await
}

/// Inserts rows that [`old_states`] did not find. The rows must be sorted by key.
///
/// # Errors
/// Fails with MySQL's error 1062 if another writer has inserted one of the rows meanwhile. In this case the caller must
/// repeat the whole transaction.
pub async fn insert_states(connection: &mut MySqlConnection, rows: &[(Pair, LikeState)]) -> Result<()> {
    for piece in in_shapes(rows) {
        write_states(connection, piece, "").await?;
    }
    Ok(())
}

/// Writes rows that [`old_states`] has locked. The rows must be sorted by key.
pub async fn update_states(connection: &mut MySqlConnection, rows: &[(Pair, LikeState)]) -> Result<()> {
    for piece in in_shapes(rows) {
        write_states(
            connection,
            piece,
            "ON DUPLICATE KEY UPDATE is_del = VALUES(is_del), update_at = VALUES(update_at)",
        )
        .await?;
    }
    Ok(())
}

/// The condition that the new row is newer than the existing row. If both rows have the same `at`, an unlike counts as
/// newer, as in `tallyd_core::coalesce`.
macro_rules! newer {
    () => {
        "(VALUES(update_at) > update_at OR (VALUES(update_at) = update_at AND VALUES(is_del) > is_del))"
    };
}

/// The maximum number of rows in one statement. Such a statement is smaller than 400 KB.
const STATEMENT_ROWS: usize = 4_000;

/// The maximum number of rows in one statement that appends to `@former`. The number is small because each append
/// copies the whole text.
const NOTED_ROWS: usize = 500;

/// Appends each existing row to `@former` as `kind:target:user:was_del`, with 2 if the row stays unchanged. MySQL
/// assigns columns from left to right, so the version is assigned last.
const UPSERT: &str = concat!(
    "ON DUPLICATE KEY UPDATE is_del = IF(LENGTH(@former := CONCAT(@former, kind, ':', target_id, ':', user_id, ':', IF(",
    newer!(),
    ", is_del, 2), ' ')) AND ",
    newer!(),
    ", VALUES(is_del), is_del), update_at = GREATEST(update_at, VALUES(update_at))"
);

/// Returns the former states. `None` if the server's user variables do not work as needed: the caller must then roll
/// back. `rows` must be sorted by key.
pub async fn upsert(connection: &mut MySqlConnection, rows: &[(Pair, LikeState)]) -> Result<Option<Vec<Before>>> {
    const ACTION: &str = "write like records";
    let mut text = Text::default();
    for piece in rows.chunks(NOTED_ROWS) {
        text.statement("SET @former = ''");
        text.statement("INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES ");
        for ((target, user), state) in piece {
            let (target_id, user_id) = (target.id.0.cast_signed(), user.0.cast_signed());
            text.row([target.kind.0.into(), target_id, user_id, (!state.liked).into()], state.at);
        }
        text.push(UPSERT);
        text.statement("SELECT @former");
    }
    let answers = text.run(connection, ACTION).await?;
    let mut answers = answers.iter();
    let mut before = Vec::with_capacity(rows.len());
    for piece in rows.chunks(NOTED_ROWS) {
        let Some(answer) = answers.next() else { return Ok(None) };
        let former: Option<Vec<u8>> = answer.try_get_unchecked(0).context(ACTION)?;
        let Some(met) = former.and_then(|former| read_former(&former, piece)) else { return Ok(None) };
        before.extend(met);
    }
    Ok(Some(before))
}

/// Tests whether [`upsert`] is exact on this server. The test writes a row of kind 0 and rolls it back. If a server
/// assigned the columns in another order, a row would silently keep its old state and get the new version.
///
/// # Errors
/// If the server does not support the statement, or if a trigger refuses the statement, the result is `Ok(false)`.
/// Fails on every other error of MySQL.
pub async fn upserts_in_order(connection: &mut MySqlConnection, partition: u16) -> Result<bool> {
    const ACTION: &str = "test the upsert of rows";
    let pair = (Target { kind: Kind(0), id: TargetId(u64::from(partition) + 1) }, UserId(1));
    let state = |at, liked| LikeState { at: Micros(at), liked };
    let mut tx = connection.begin().await.context(ACTION)?;
    let mut met = Vec::new();
    for state in [state(1, true), state(3, false), state(2, true)] {
        match upsert(&mut tx, &[(pair, state)]).await {
            Ok(before) => met.extend(before.unwrap_or_default()),
            Err(error) if error.is_unsupported() || error.fate() == Fate::Item => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    let is = old_states(&mut tx, &[pair]).await?;
    tx.rollback().await.context(ACTION)?;
    Ok(met == [Before::Absent, Before::Older(true), Before::NotOlder] && is.get(&pair) == Some(&state(3, false)))
}

/// Parses the text that [`UPSERT`] writes. The text describes the rows of `piece` before the statement: it contains one
/// entry for each row that already existed. Returns `None` if the text is invalid.
fn read_former(former: &[u8], piece: &[(Pair, LikeState)]) -> Option<Vec<Before>> {
    let mut notes = std::str::from_utf8(former).ok()?.split_ascii_whitespace();
    let mut next = notes.next();
    let mut before = Vec::with_capacity(piece.len());
    for ((target, user), _) in piece {
        // The server writes the rows in the order of the statement, so the entries have the same order.
        let was = next.map(read_note).and_then(|note| {
            let (kind, id, by, was) = note?;
            (kind == target.kind.0 && id == target.id.0 && by == user.0).then_some(was)
        });
        before.push(match was {
            None => Before::Absent,
            Some(2) => Before::NotOlder,
            Some(was_del) => Before::Older(was_del == 0),
        });
        if was.is_some() {
            next = notes.next();
        }
    }
    // If an entry is left here, it belongs to no row of the piece, so the text is invalid.
    if next.is_some() { None } else { Some(before) }
}

fn read_note(note: &str) -> Option<(u8, u64, u64, u8)> {
    let mut parts = note.split(':');
    let note = (
        parts.next()?.parse().ok()?,
        parts.next()?.parse().ok()?,
        parts.next()?.parse().ok()?,
        parts.next()?.parse().ok()?,
    );
    if parts.next().is_none() { Some(note) } else { None }
}

/// Writes a piece of rows. `in_shapes` splits rows into pieces of only a few different lengths. So only a few different
/// statements exist.
async fn write_states(connection: &mut MySqlConnection, piece: &[(Pair, LikeState)], on_duplicate: &str) -> Result<()> {
    let sql = format!(
        "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES {} {on_duplicate}",
        placeholders(piece.len(), 5)
    );
    let mut query = sqlx::query(AssertSqlSafe(sql));
    for ((target, user), state) in piece {
        query = query.bind(target.kind.0).bind(target.id.0).bind(user.0).bind(!state.liked).bind(datetime(state.at));
    }
    query.execute(connection).await.context("write like records")?;
    Ok(())
}

/// Adds each difference to the counter's row with this `slot` (decision 0007). The differences must be sorted by key.
pub fn add_differences(text: &mut Text, slot: u16, differences: &[Difference]) {
    for piece in differences.chunks(STATEMENT_ROWS) {
        text.statement("INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES ");
        for Difference { target, metric, delta, at } in piece {
            let id = target.id.0.cast_signed();
            text.row([target.kind.0.into(), id, metric.0.into(), slot.into(), *delta], *at);
        }
        // MySQL assigns columns from left to right. The version is assigned last, so the other assignments can compare
        // with the old version.
        text.push(
            "ON DUPLICATE KEY UPDATE value = value + VALUES(value), update_at = GREATEST(update_at, VALUES(update_at))",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(target: u64, user: u64) -> (Pair, LikeState) {
        ((Target { kind: Kind(1), id: TargetId(target) }, UserId(user)), LikeState { at: Micros(1), liked: true })
    }

    #[test]
    fn notes_are_matched_to_their_rows_in_order() {
        let rows = [row(1, 7), row(2, 7), row(2, 8), row(3, 7)];
        let met = [Before::Absent, Before::Older(true), Before::NotOlder, Before::Older(false)];
        assert_eq!(read_former(b"1:2:7:0 1:2:8:2 1:3:7:1 ", &rows).as_deref(), Some(met.as_slice()));
        assert_eq!(read_former(b"", &rows).as_deref(), Some([Before::Absent; 4].as_slice()));
    }

    #[test]
    fn notes_that_do_not_fit_are_refused() {
        let rows = [row(1, 7), row(2, 7)];
        for notes in ["1:9:9:0 ", "1:2:7:0 1:1:7:0 ", "nonsense ", "1:2:7 ", "1:1:7:0:0 "] {
            assert_eq!(read_former(notes.as_bytes(), &rows), None, "{notes}");
        }
    }
}
