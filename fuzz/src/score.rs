//! Fuzzes the scores of boards: packed scores keep their order and can be unpacked, and numbers that don't fit are
//! rejected.

use tallyd_core::model::BoardMember;
use tallyd_redis::ranks::{Before, Ranking, order, place};
use tallyd_redis::score::{Columns, Packing};

use super::Bytes;

/// The input starts with the number of bits for the lower number of a score. Two pairs of numbers follow, then any
/// double, and then the members of a board.
pub fn score(data: &[u8]) {
    let mut bytes = Bytes(data);
    let packing = Packing::new(u32::from(bytes.byte()));
    let mut columns = || {
        // The bits are shifted, so that small numbers are as likely as large numbers.
        let (primary, low) = (bytes.number() >> (bytes.byte() % 64), bytes.number() >> (bytes.byte() % 64));
        Columns { primary, low }
    };
    let (one, other) = (columns(), columns());
    for columns in [one, other] {
        let fits = columns.primary <= packing.primary_max() && columns.low <= packing.low_max();
        match packing.pack(columns) {
            Ok(score) => assert!(fits && packing.unpack(score) == Some(columns), "{columns:?} as {score}"),
            Err(error) => assert!(!fits && !error.to_string().is_empty(), "{columns:?}: {error}"),
        }
    }
    if let (Ok(first), Ok(second)) = (packing.pack(one), packing.pack(other)) {
        assert_eq!(first.total_cmp(&second), one.cmp(&other), "{one:?} and {other:?}");
    }
    let any = f64::from_bits(bytes.number());
    if let Some(columns) = packing.unpack(any) {
        assert_eq!(packing.pack(columns).map(f64::to_bits), Ok(any.abs().to_bits()), "{any}");
    }
    placed(&mut bytes);
}

/// For any board, the ranks of a page must have no gap.
fn placed(bytes: &mut Bytes<'_>) {
    let before = bytes.number() >> 1;
    let before = Before { members: before, higher: before / 2, distinct: before / 3 };
    let mut page = Vec::new();
    while !bytes.0.is_empty() && page.len() < 20 {
        let score = f64::from_bits(bytes.number());
        if !score.is_nan() {
            page.push(BoardMember { member: bytes.some(3).to_vec(), score });
        }
    }
    page.sort_by(order);
    for ranking in [Ranking::Ordinal, Ranking::Competition, Ranking::Dense] {
        let placed = place(ranking, before, page.clone());
        assert_eq!(placed.len(), page.len());
        assert!(placed.windows(2).all(|pair| pair[0].place <= pair[1].place), "{placed:?}");
    }
}
