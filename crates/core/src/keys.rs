//! The names of all Redis keys. Pure.

use std::collections::BTreeMap;

use super::layout::{self, Form, Layout};
use super::template::escaped;
use crate::kinds::{Kinds, Metrics};
use crate::model::{Kind, Metric, Target, UserId};

/// The bucket field that says which run loaded the bucket. No target's id is equal to this name.
pub const LOADED: &str = "_";

/// The bucket field with the time when a counter of the bucket was last set (lua/count.lua).
pub const SET_AT: &str = "_s";

/// The first character of bucket fields that belong to no target.
pub const NO_TARGET: char = '_';

/// Every bucket can contain `_` and `_s`. If the daemon writes counters, also `_o`, `_m`, one field per partition, and
/// one for the corrections of reconciles.
pub fn fields_beside(partitions: u16) -> u64 {
    u64::from(partitions) + 5
}

#[derive(Clone, Debug)]
pub struct Keys {
    prefix: String,
    layout: Layout,
    metrics: BTreeMap<u8, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub key: String,
    /// Where the value of `key` holds the counter. In a bucket: the counter's position in the field's text. Otherwise:
    /// `entity:` with a field's name, or `string`.
    pub part: String,
    /// The key of the target's bucket, or `None` if `key` is already the bucket's key.
    pub bucket: Option<String>,
}

impl Keys {
    pub fn new(prefix: &str, metrics: &Metrics, layout: Layout) -> Self {
        Self { prefix: prefix.to_owned(), layout, metrics: by_code(metrics) }
    }

    #[must_use]
    pub fn named(&self, metrics: &Metrics) -> Self {
        Self { metrics: by_code(metrics), ..self.clone() }
    }

    #[must_use]
    pub fn in_layout(&self, metrics: &Metrics, layout: Layout) -> Self {
        Self::new(&self.prefix, metrics, layout)
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn buckets(&self) -> u32 {
        self.layout.buckets()
    }

    pub fn bucket(&self, target: Target) -> u32 {
        layout::bucket(target.id, self.layout.bucket_bits)
    }

    /// `video:3a2f`: the bucket's name. In keys the name is between braces, because the name is the hash tag in a Redis
    /// Cluster.
    pub fn bucket_name(&self, kind: &str, bucket: u32) -> String {
        format!("{kind}:{}", self.layout.bucket_name(bucket))
    }

    /// `c:{video:3a2f}`: the hash of one bucket of the kind. In the layout `packed` this hash contains the counters.
    pub fn counters(&self, kind: &str, bucket: u32) -> String {
        format!("{}c:{{{}}}", self.prefix, self.bucket_name(kind, bucket))
    }

    pub fn place(&self, kind: &str, target: Target, metric: Metric) -> Place {
        let bucket = self.counters(kind, self.bucket(target));
        let Some(template) = &self.layout.template else {
            return Place { key: bucket, part: metric.0.to_string(), bucket: None };
        };
        let name = self.metric(metric);
        let key = format!("{}{}", self.prefix, template.name(kind, target.id, name));
        Place { key, part: self.part(metric), bucket: Some(bucket) }
    }

    /// Returns the pattern of the counters' keys, as messages show it: `like:count:{id}`, or `tally:c:{...}` if buckets
    /// hold the counters.
    pub fn counter_names(&self) -> String {
        match &self.layout.template {
            Some(template) => format!("{}{template}", self.prefix),
            None => format!("{}c:{{...}}", self.prefix),
        }
    }

    pub fn part(&self, metric: Metric) -> String {
        match self.layout.form {
            Form::Packed => metric.0.to_string(),
            Form::Entity => format!("entity:{}", self.metric(metric)),
            Form::String => "string".to_owned(),
        }
    }

    pub fn metric(&self, metric: Metric) -> &str {
        self.metrics.get(&metric.0).map_or("", String::as_str)
    }

    pub fn pattern(&self, kind: &str, metric: Metric) -> Option<String> {
        let template = self.layout.template.as_ref()?;
        Some(format!("{}{}", escaped(&self.prefix), template.pattern(kind, self.metric(metric))))
    }

    pub fn target(&self, key: &str, kind: (&str, Kind), metric: Metric) -> Option<Target> {
        let name = key.strip_prefix(&self.prefix)?;
        self.layout.template.as_ref()?.target(name, kind, self.metric(metric))
    }

    /// `recent:{video:3a2f}` and `recent:{video:3a2f}:former`: the recent clicks of a bucket's targets, in two hashes
    /// that alternate. Both hashes are in the same Cluster slot as the bucket.
    pub fn recent(&self, kind: &str, bucket: u32) -> [String; 2] {
        let key = format!("{}recent:{{{}}}", self.prefix, self.bucket_name(kind, bucket));
        let former = format!("{key}:former");
        [key, former]
    }

    /// `filter:{video:3a2f}:42` contains a target's Bloom filter. The same key with `:config` (Redisson's name)
    /// contains the filter's shape. The same key with `:added` contains new likers: users who like the target but are
    /// not yet in the filter. All these keys are in the same Cluster slot as the bucket.
    pub fn filter(&self, kind: &str, target: Target) -> [String; 3] {
        let bucket = self.bucket_name(kind, self.bucket(target));
        let key = format!("{}filter:{{{bucket}}}:{}", self.prefix, target.id);
        let (config, added) = (format!("{key}:config"), format!("{key}:added"));
        [key, config, added]
    }

    /// `filter:{video:3a2f}:42:next`: a filter that a run is building.
    pub fn next_filter(&self, kind: &str, target: Target) -> String {
        let [key, ..] = self.filter(kind, target);
        format!("{key}:next")
    }

    pub fn filters(&self) -> String {
        format!("{}filter:*", escaped(&self.prefix))
    }

    /// `filter:epoch`: the number by which readers recognize filters that they can trust.
    pub fn filter_epoch(&self) -> String {
        format!("{}filter:epoch", self.prefix)
    }

    /// `limit:{7}`: counts the recent clicks of the user 7.
    pub fn limit(&self, user: UserId) -> String {
        format!("{}limit:{{{}}}", self.prefix, user.0)
    }

    /// `c:missing`: the set of buckets that readers found missing. A member is, for example, `video:3a2f`.
    pub fn missing(&self) -> String {
        format!("{}c:missing", self.prefix)
    }

    /// `c:site`: the site card, from which clients learn the site's settings.
    pub fn site_card(&self) -> String {
        format!("{}c:site", self.prefix)
    }

    /// `c:compared:{7}:packed:13`: the time up to which reconciles have compared the counters of this layout with
    /// MySQL. In a Cluster, the number in braces (here 7) decides in which slot the key is.
    pub fn compared(&self, number: u16) -> String {
        format!("{}c:compared:{{{number}}}:{}", self.prefix, self.layout.full_name())
    }

    /// `board:{likes}:2026-W47`: the zset of one period. All periods of a board are in one slot of a Cluster.
    pub fn board(&self, board: &str, period: &str) -> String {
        format!("{}board:{{{board}}}:{period}", self.prefix)
    }

    /// `board:{likes}:added`: maps each partition to the number of the last outbox row that was added to the board.
    pub fn board_added(&self, board: &str) -> String {
        self.board(board, "added")
    }

    /// `board:{likes}:2026-W46:frozen`: the zset of a closed period. This zset receives no more writes.
    pub fn frozen_board(&self, board: &str, period: &str) -> String {
        format!("{}:frozen", self.board(board, period))
    }

    /// `board:{likes}:2026-W47:snapshot`: the number of the run that began the last snapshot of the period. When the
    /// period's zset is deleted, this key is deleted, too.
    pub fn board_mark(&self, board: &str, period: &str) -> String {
        format!("{}:snapshot", self.board(board, period))
    }

    /// `board:{likes}:2026-W47:lost`: set while Redis lacks a part of the board. The value is the board's mark, or an
    /// empty text. If the board now has another mark, it was restored.
    pub fn lost_board(&self, board: &str, period: &str) -> String {
        format!("{}:lost", self.board(board, period))
    }

    /// `board:{likes}:2026-W47:filling`: a zset that is being restored and is not complete.
    pub fn filling_board(&self, board: &str, period: &str) -> String {
        format!("{}:filling", self.board(board, period))
    }

    /// `board:{likes}:2026-W47:restored-s7`: the complete zset, restored from the source with this tag. In the next
    /// step of a restore, this zset replaces the zset of the period.
    pub fn restored_board(&self, board: &str, period: &str, tag: &str) -> String {
        format!("{}:restored-{tag}", self.board(board, period))
    }

    /// `board:{likes}:freezes`: a hash with one field for each frozen period. The field contains the number of the run
    /// that restored the period's zset, or 0 if no run restored the zset. The field `-` contains the number of the
    /// first run that claimed the board since Redis lost all data.
    pub fn board_freezes(&self, board: &str) -> String {
        self.board(board, "freezes")
    }

    /// `board:{likes}:2026-W46:raised`: the number of archive pages that were added to a live zset, because the zset
    /// was older than the archive.
    pub fn raised_board(&self, board: &str, period: &str) -> String {
        format!("{}:raised", self.board(board, period))
    }

    /// `board:{likes}:claim`: the number of the archiver run that is allowed to change the board's closed periods.
    pub fn board_claim(&self, board: &str) -> String {
        format!("{}board:{{{board}}}:claim", self.prefix)
    }
}

fn by_code(metrics: &Metrics) -> BTreeMap<u8, String> {
    metrics.0.iter().map(|(name, code)| (*code, name.clone())).collect()
}

#[derive(Clone, Debug)]
pub struct KindNames(BTreeMap<u8, String>);

impl KindNames {
    pub fn new(kinds: &Kinds) -> Self {
        Self(kinds.0.iter().map(|(name, code)| (*code, name.clone())).collect())
    }

    pub fn get(&self, kind: Kind) -> Option<&str> {
        self.0.get(&kind.0).map(String::as_str)
    }

    pub fn named(&self, name: &str) -> Option<Kind> {
        self.0.iter().find(|(_, known)| *known == name).map(|(code, _)| Kind(*code))
    }

    pub fn all(&self) -> impl Iterator<Item = (Kind, &str)> {
        self.0.iter().map(|(code, name)| (Kind(*code), name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::TargetId;

    fn keys(form: Form) -> Keys {
        Keys::new("app:", &Metrics::default(), Layout::new(form, 13, "").unwrap())
    }

    #[test]
    fn each_layout_has_its_own_place_for_a_number() {
        let target = Target { kind: Kind(1), id: TargetId(42) };
        let place = |form| {
            let Place { key, part, bucket } = keys(form).place("video", target, Metric(1));
            (key, part, bucket.unwrap_or_default())
        };
        let expected = |key: &str, part: &str, bucket: &str| (key.to_owned(), part.to_owned(), bucket.to_owned());
        assert_eq!(place(Form::Packed), expected("app:c:{video:3088}", "1", ""));
        assert_eq!(place(Form::Entity), expected("app:counter:video:42", "entity:like", "app:c:{video:h3088}"));
        assert_eq!(place(Form::String), expected("app:counter:42:like", "string", "app:c:{video:s3088}"));
        let keys = keys(Form::String);
        assert_eq!(keys.pattern("video", Metric(1)).unwrap(), "app:counter:*:like");
        assert_eq!(keys.target("app:counter:42:like", ("video", Kind(1)), Metric(1)), Some(target));
    }

    #[test]
    fn no_two_kinds_of_keys_have_a_name_in_common() {
        let keys = Keys { prefix: String::new(), ..keys(Form::Packed) };
        let mut names = vec![keys.missing(), keys.filter_epoch(), keys.compared(1), keys.limit(UserId(1))];
        names.push(keys.site_card());
        for name in
            ["c", "missing", "writers", "site", "compared", "recent", "filter", "epoch", "limit", "gw", "board", "1"]
        {
            let target = Target { kind: Kind(1), id: TargetId(1) };
            let of_filter = keys.filter(name, target).into_iter().chain([keys.next_filter(name, target)]);
            names.extend(of_filter.chain(keys.recent(name, 1)).chain([keys.counters(name, 1)]));
            names.extend([keys.board_added(name), keys.board_freezes(name), keys.board_claim(name)]);
            for period in ["total", "2026-11", "2026-W47"] {
                names.extend([
                    keys.board(name, period),
                    keys.frozen_board(name, period),
                    keys.board_mark(name, period),
                ]);
                names.extend([keys.filling_board(name, period), keys.restored_board(name, period, "s7")]);
                names.push(keys.raised_board(name, period));
            }
        }
        let unique: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(unique.len(), names.len(), "{names:?}");
        // A name that `counter_key` creates has digits and no braces. All other names without braces have no digits.
        let of_template = |name: &&String| !name.contains('{') && name.contains(|it: char| it.is_ascii_digit());
        assert_eq!(names.iter().find(of_template), None);
    }

    #[test]
    fn keys_are_as_the_contract_has_them() {
        let keys = keys(Form::Packed);
        let target = Target { kind: Kind(1), id: TargetId(42) };
        // python3 -c 'import zlib; print(hex(1 << 13 | zlib.crc32(b"42") & 0x1fff))'
        assert_eq!(keys.counters("video", keys.bucket(target)), "app:c:{video:3088}");
        assert_eq!(keys.recent("video", 26), ["app:recent:{video:201a}", "app:recent:{video:201a}:former"]);
        let filter =
            ["app:filter:{video:3088}:42", "app:filter:{video:3088}:42:config", "app:filter:{video:3088}:42:added"];
        assert_eq!(keys.filter("video", target), filter);
        assert_eq!(keys.next_filter("video", target), "app:filter:{video:3088}:42:next");
        assert_eq!((keys.filters(), keys.filter_epoch()), ("app:filter:*".to_owned(), "app:filter:epoch".to_owned()));
        assert_eq!(keys.limit(UserId(7)), "app:limit:{7}");
        assert_eq!(keys.missing(), "app:c:missing");
        assert_eq!(keys.site_card(), "app:c:site");
        assert_eq!(keys.compared(7), "app:c:compared:{7}:packed:13");
        assert_eq!(keys.board("likes", "2026-W47"), "app:board:{likes}:2026-W47");
        assert_eq!(keys.frozen_board("likes", "2026-W47"), "app:board:{likes}:2026-W47:frozen");
        assert_eq!(keys.board_mark("likes", "total"), "app:board:{likes}:total:snapshot");
        assert_eq!(keys.lost_board("likes", "total"), "app:board:{likes}:total:lost");
        assert_eq!(keys.filling_board("likes", "total"), "app:board:{likes}:total:filling");
        assert_eq!(keys.restored_board("likes", "total", "s7"), "app:board:{likes}:total:restored-s7");
        assert_eq!(keys.raised_board("likes", "2026-W46"), "app:board:{likes}:2026-W46:raised");
        assert_eq!(keys.board_freezes("likes"), "app:board:{likes}:freezes");
        assert_eq!(keys.board_claim("likes"), "app:board:{likes}:claim");
    }

    #[test]
    fn messages_show_the_pattern_of_the_counters_names() {
        assert_eq!(keys(Form::Packed).counter_names(), "app:c:{...}");
        assert_eq!(keys(Form::Entity).counter_names(), "app:counter:{kind}:{id}");
        assert_eq!((keys(Form::Packed).buckets(), fields_beside(3)), (8_192, 8));
    }

    #[test]
    fn keys_can_be_named_for_metrics_that_came_later() {
        let metrics = Metrics([("like".to_owned(), 1), ("view".to_owned(), 3)].into());
        let named =
            [keys(Form::String).metric(Metric(3)).to_owned(), keys(Form::String).named(&metrics).part(Metric(3))];
        assert_eq!(named, ["", "string"]);
        assert_eq!(keys(Form::Entity).named(&metrics).part(Metric(3)), "entity:view");
    }

    #[test]
    fn a_kind_is_found_by_its_name_and_by_its_code() {
        let kinds = KindNames::new(&Kinds([("video".to_owned(), 7), ("post".to_owned(), 2)].into()));
        assert_eq!(["video", "post", "song"].map(|name| kinds.named(name)), [Some(Kind(7)), Some(Kind(2)), None]);
        assert_eq!([7, 1].map(|code| kinds.get(Kind(code))), [Some("video"), None]);
        assert!(kinds.all().eq([(Kind(2), "post"), (Kind(7), "video")]));
    }
}
