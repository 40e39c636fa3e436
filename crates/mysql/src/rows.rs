//! Shared code for statements with many rows: limits the number of rows per statement, and converts values.

use chrono::{DateTime, NaiveDateTime};
use sqlx::Row;
use sqlx::mysql::MySqlRow;
use tallyd_core::model::{Kind, Micros, Target, TargetId};

pub fn target(row: &MySqlRow, column: usize) -> Result<Target, sqlx::Error> {
    Ok(Target { kind: Kind(row.try_get(column)?), id: TargetId(row.try_get(column + 1)?) })
}

/// Converts a time to `DATETIME(6)` in UTC. Every event's `at` fits, because the decoder of events checks the range.
pub fn datetime(at: Micros) -> NaiveDateTime {
    DateTime::from_timestamp_micros(at.0).unwrap_or_default().naive_utc()
}

pub fn micros(datetime: NaiveDateTime) -> Micros {
    Micros(datetime.and_utc().timestamp_micros())
}

/// The allowed numbers of rows per statement, the largest first. So there are only a few different statements, and the
/// cache of prepared statements can contain all of them.
const SHAPES: [usize; 4] = [512, 64, 8, 1];

/// The allowed numbers of values in an IN list of (kind, target, user), the largest first. MariaDB rewrites a list of
/// 1,000 values or more into a join.
pub const TRIPLE_SHAPES: [usize; 4] = [256, 32, 4, 1];

pub fn in_shapes<T>(rows: &[T]) -> impl Iterator<Item = &[T]> {
    in_shapes_of(SHAPES, rows)
}

/// Cuts `rows` into pieces whose lengths are all in `shapes`. The last shape must be 1.
pub fn in_shapes_of<T>(shapes: [usize; 4], mut rows: &[T]) -> impl Iterator<Item = &[T]> {
    std::iter::from_fn(move || {
        let shape = shapes.into_iter().find(|shape| *shape <= rows.len())?;
        let (piece, rest) = rows.split_at(shape);
        rows = rest;
        Some(piece)
    })
}

pub fn placeholders(rows: usize, columns: usize) -> String {
    let group = format!("({})", vec!["?"; columns].join(", "));
    vec![group; rows].join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_into_few_shapes_without_loss() {
        for count in [0, 1, 7, 8, 63, 577, 5_000] {
            let rows: Vec<usize> = (0..count).collect();
            let pieces: Vec<&[usize]> = in_shapes(&rows).collect();
            assert!(pieces.iter().all(|piece| SHAPES.contains(&piece.len())));
            assert_eq!(pieces.concat(), rows);
        }
        assert_eq!(placeholders(2, 3), "(?, ?, ?), (?, ?, ?)");
    }

    #[test]
    fn times_keep_their_microseconds() {
        for at in [Micros(1), Micros(1_764_000_000_123_456), Micros::MAX] {
            assert_eq!(micros(datetime(at)), at);
        }
    }
}
