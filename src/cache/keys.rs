//! Every key name. Pure.

use std::collections::BTreeMap;

use super::layout;
use crate::config::Redis;
use crate::model::{Kind, Target, UserId};

/// The field of a bucket that says who loaded it. No id looks like it.
pub const LOADED: &str = "_";

/// How keys are named, by configuration.
#[derive(Clone, Debug)]
pub struct Keys {
    prefix: String,
    bucket_bits: u8,
}

impl Keys {
    pub(super) fn new(config: &Redis) -> Self {
        Self { prefix: config.key_prefix.clone(), bucket_bits: config.bucket_bits }
    }

    /// How many buckets a kind has.
    pub fn buckets(&self) -> u32 {
        1 << self.bucket_bits
    }

    /// The bucket that a target lives in.
    pub fn bucket(&self, target: Target) -> u32 {
        layout::bucket(target.id, self.bucket_bits)
    }

    /// `c:{video:1a2f}`: the hash of one bucket of the kind. The braces are the Cluster's hash tag.
    pub fn counters(&self, kind: &str, bucket: u32) -> String {
        format!("{}c:{{{kind}:{bucket:x}}}", self.prefix)
    }

    /// `recent:{video:1a2f}` and `recent:{video:1a2f}:former`: who clicked lately in a bucket, in two hashes that take turns. In the
    /// bucket's slot.
    pub fn recent(&self, kind: &str, bucket: u32) -> [String; 2] {
        let key = format!("{}recent:{{{kind}:{bucket:x}}}", self.prefix);
        let former = format!("{key}:former");
        [key, former]
    }

    /// `limit:{7}`: how much a user has clicked.
    pub fn limit(&self, user: UserId) -> String {
        format!("{}limit:{{{}}}", self.prefix, user.0)
    }

    /// `tally:missing`: the set of the buckets that readers found missing, as `video:1a2f`.
    pub fn missing(&self) -> String {
        format!("{}tally:missing", self.prefix)
    }

    /// `board:{likes}:2026-W47`: the zset of one period. All periods of a board are in one slot of a Cluster.
    pub fn board(&self, board: &str, period: &str) -> String {
        format!("{}board:{{{board}}}:{period}", self.prefix)
    }

    /// `board:{likes}:2026-W46:frozen`: a closed period's zset, which nobody writes to any more.
    pub fn frozen_board(&self, board: &str, period: &str) -> String {
        format!("{}:frozen", self.board(board, period))
    }

    /// `board:{likes}:2026-W47:snapshot`: the number of the run that began the period's last snapshot. Gone with the zset.
    pub fn board_mark(&self, board: &str, period: &str) -> String {
        format!("{}:snapshot", self.board(board, period))
    }

    /// `board:{likes}:2026-W47:filling`: a zset that is being restored, as far as it is.
    pub fn filling_board(&self, board: &str, period: &str) -> String {
        format!("{}:filling", self.board(board, period))
    }

    /// `board:{likes}:2026-W47:restored-s7`: the whole of it, from the source of that tag, which takes the zset's place next.
    pub fn restored_board(&self, board: &str, period: &str, tag: &str) -> String {
        format!("{}:restored-{tag}", self.board(board, period))
    }

    /// `board:{likes}:claim`: the number of the archiver's run that may change the board's closed periods.
    pub fn board_claim(&self, board: &str) -> String {
        format!("{}board:{{{board}}}:claim", self.prefix)
    }
}

/// The names of kinds by code, as keys need them.
#[derive(Clone, Debug)]
pub struct KindNames(BTreeMap<u8, String>);

impl KindNames {
    /// From `[kinds]`.
    pub fn new(kinds: &crate::config::Kinds) -> Self {
        Self(kinds.0.iter().map(|(name, code)| (*code, name.clone())).collect())
    }

    /// The kind's name; none where the configuration no longer knows it.
    pub fn get(&self, kind: Kind) -> Option<&str> {
        self.0.get(&kind.0).map(String::as_str)
    }

    /// The kind of that name.
    pub fn named(&self, name: &str) -> Option<Kind> {
        self.0.iter().find(|(_, known)| *known == name).map(|(code, _)| Kind(*code))
    }

    /// All of them, by code.
    pub fn all(&self) -> impl Iterator<Item = (Kind, &str)> {
        self.0.iter().map(|(code, name)| (Kind(*code), name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::TargetId;

    #[test]
    fn keys_are_as_the_contract_has_them() {
        let keys = Keys { prefix: "app:".to_owned(), bucket_bits: 13 };
        let target = Target { kind: Kind(1), id: TargetId(42) };
        // python3 -c 'import zlib; print(hex(zlib.crc32(b"42") & 0x1fff))'
        assert_eq!(keys.counters("video", keys.bucket(target)), "app:c:{video:1088}");
        assert_eq!(keys.recent("video", 26), ["app:recent:{video:1a}", "app:recent:{video:1a}:former"]);
        assert_eq!(keys.limit(UserId(7)), "app:limit:{7}");
        assert_eq!(keys.missing(), "app:tally:missing");
        assert_eq!(keys.board("likes", "2026-W47"), "app:board:{likes}:2026-W47");
        assert_eq!(keys.frozen_board("likes", "2026-W47"), "app:board:{likes}:2026-W47:frozen");
        assert_eq!(keys.board_mark("likes", "total"), "app:board:{likes}:total:snapshot");
        assert_eq!(keys.filling_board("likes", "total"), "app:board:{likes}:total:filling");
        assert_eq!(keys.restored_board("likes", "total", "s7"), "app:board:{likes}:total:restored-s7");
        assert_eq!(keys.board_claim("likes"), "app:board:{likes}:claim");
    }
}
