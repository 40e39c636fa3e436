//! The number and checksum of a board's members. With them, an archive in MySQL is compared with the board in Redis.
//! Pure.

use crate::model::BoardMember;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tally {
    pub members: u64,
    /// The checksum over members and scores, independent of their order.
    pub checksum: u64,
}

impl Tally {
    pub fn add(&mut self, other: Self) {
        self.members += other.members;
        self.checksum = self.checksum.wrapping_add(other.checksum);
    }

    #[must_use]
    pub fn replaced(self, member: &BoardMember, by: &BoardMember) -> Self {
        let checksum = self.checksum.wrapping_sub(digest(member)).wrapping_add(digest(by));
        Self { checksum, ..self }
    }

    pub fn add_members(&mut self, page: &[BoardMember]) {
        let checksum = page.iter().fold(0_u64, |sum, member| sum.wrapping_add(digest(member)));
        self.add(Self { members: page.len() as u64, checksum });
    }
}

/// FNV-1a (64 bits) over the member's bytes and the eight bytes of its score, lowest byte first. This checksum is easy
/// to compute in any language.
fn digest(member: &BoardMember) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    // Adding zero turns -0 into 0. Both stores treat -0 and 0 as equal, so their checksums must be equal, too.
    let score = (member.score + 0.0).to_bits().to_le_bytes();
    let bytes = member.member.iter().chain(&score);
    bytes.fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(scores: &[(&str, f64)]) -> Vec<BoardMember> {
        scores.iter().map(|(member, score)| BoardMember { member: (*member).into(), score: *score }).collect()
    }

    #[test]
    fn a_tally_does_not_depend_on_the_order_but_on_every_member_and_score() {
        let tally = |scores: &[(&str, f64)]| {
            let mut tally = Tally::default();
            tally.add_members(&members(scores));
            tally
        };
        let board = tally(&[("a", 3.0), ("b", 2.0)]);
        assert_eq!(board.members, 2);
        assert_eq!(board, tally(&[("b", 2.0), ("a", 3.0)]));
        for other in [[("a", 2.0), ("b", 3.0)], [("a", 3.0), ("c", 2.0)], [("a", 3.0), ("b", 2.000_000_1)]] {
            assert_ne!(board, tally(&other), "{other:?}");
        }
        assert_eq!(tally(&[("a", 0.0)]), tally(&[("a", -0.0)]));
        let [a, c] = [("a", 3.0), ("c", 3.0)].map(|of| members(&[of]).remove(0));
        assert_eq!(board.replaced(&a, &c), tally(&[("c", 3.0), ("b", 2.0)]));
    }

    #[test]
    fn a_digest_is_the_same_everywhere() {
        // The published FNV-1a hash of "a" is 0xaf63dc4c8601ec8c. The test then adds the score's bytes.
        let member = BoardMember { member: b"a".to_vec(), score: 1.0 };
        let score = [0, 0, 0, 0, 0, 0, 0xf0, 0x3f];
        let by_hand =
            score.iter().fold(0xaf63_dc4c_8601_ec8c_u64, |hash, byte| (hash ^ byte).wrapping_mul(0x0100_0000_01b3));
        assert_eq!(digest(&member), by_hand);
    }
}
