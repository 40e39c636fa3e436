//! The zsets of a board in the models.

pub(crate) const MEMBERS: usize = 2;

/// The scores of the members. A member without a score is zero.
pub(crate) type Zset = [u8; MEMBERS];

pub(crate) const EMPTY: Zset = [0; MEMBERS];

pub(crate) fn both(one: Zset, other: Zset, of: fn(u8, u8) -> u8) -> Zset {
    std::array::from_fn(|member| of(one[member], other[member]))
}

pub(crate) fn members(zset: Zset) -> u64 {
    zset.iter().filter(|score| **score > 0).count() as u64
}

/// Whether no score in `other` is higher than in `one`.
pub(crate) fn has_all(one: Zset, other: Zset) -> bool {
    one.iter().zip(other).all(|(one, other)| *one >= other)
}
