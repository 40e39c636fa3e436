//! Finds the node of a Redis Cluster that stores a key. This module does no I/O.

use std::collections::BTreeSet;

use redis::{Arg, Cmd, Value};

const SLOTS: u16 = 16_384;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SlotMap {
    /// The first slot, last slot and `host:port` of each range, sorted.
    ranges: Vec<(u16, u16, String)>,
}

impl SlotMap {
    /// `asked` gave the answer, and is the host of nodes for which it names none. `None` if no node serves any slot.
    pub(super) fn read(answer: &Value, asked: &str) -> Option<Self> {
        let Value::Array(ranges) = answer else { return None };
        let mut ranges: Vec<_> = ranges.iter().filter_map(|range| read_range(range, asked)).collect();
        ranges.sort_unstable();
        (!ranges.is_empty()).then_some(Self { ranges })
    }

    pub(super) fn node(&self, slot: u16) -> Option<&str> {
        let range = self.ranges.partition_point(|(_, last, _)| *last < slot);
        self.ranges.get(range).filter(|(first, ..)| *first <= slot).map(|(.., node)| node.as_str())
    }

    pub(super) fn masters(&self) -> BTreeSet<&str> {
        self.ranges.iter().map(|(.., node)| node.as_str()).collect()
    }
}

/// Reads the first slot, the last slot and the master of a range. The master comes before its replicas.
fn read_range(range: &Value, asked: &str) -> Option<(u16, u16, String)> {
    let Value::Array(parts) = range else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = parts.as_slice() else { return None };
    let [host, Value::Int(port), ..] = master.as_slice() else { return None };
    let host = match host {
        Value::Nil => asked,
        host => super::text(host)?,
    };
    Some((u16::try_from(*first).ok()?, u16::try_from(*last).ok()?, address(host, &port.to_string(), asked)?))
}

pub(super) fn redirected(node: &str, asked: &str) -> Option<String> {
    let (host, port) = node.rsplit_once(':')?;
    address(host, port, asked)
}

fn address(host: &str, port: &str, asked: &str) -> Option<String> {
    match host {
        // The node that answered doesn't know the host of this node yet.
        "?" => None,
        "" => Some(format!("{asked}:{port}")),
        // An IPv6 address needs brackets before a port.
        host if host.contains(':') && !host.starts_with('[') => Some(format!("[{host}]:{port}")),
        host => Some(format!("{host}:{port}")),
    }
}

/// Returns the slot of a command's first key. All other keys of the command must be in the same slot.
pub(super) fn slot_of(command: &Cmd) -> u16 {
    let argument = |place: usize| match command.args_iter().nth(place) {
        Some(Arg::Simple(argument)) => argument,
        _ => b"",
    };
    let key = match argument(0) {
        b"EVAL" | b"EVALSHA" => argument(3),
        _ => argument(1),
    };
    slot(key)
}

/// The CRC-16 (XMODEM) of the text between the first `{` and the next `}`, or of the whole key.
fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = key.get(open + 1..)?;
        rest.get(..rest.iter().position(|byte| *byte == b'}')?).filter(|tag| !tag.is_empty())
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

fn crc16(bytes: &[u8]) -> u16 {
    let shift = |crc: u16, _| (crc << 1) ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 };
    bytes.iter().fold(0, |crc, byte| (0..8).fold(crc ^ (u16::from(*byte) << 8), shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_servers() {
        // These expected slots were computed with CLUSTER KEYSLOT of Redis 7.0.
        for (key, expected) in [
            ("", 0),
            ("123456789", 12_739),
            ("foo", 12_182),
            ("c:{video:1088}", 10_859),
            ("app:c:{video:0}", 11_428),
            ("board:{likes}:2026-W47:frozen", 10_723),
            ("tally:c:missing", 7_328),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar", 15_278),
        ] {
            assert_eq!(slot(key.as_bytes()), expected, "{key}");
        }
    }

    #[test]
    fn a_command_goes_by_its_first_key() {
        for (command, expected) in [
            (redis::cmd("HLEN").arg("foo"), 12_182),
            (redis::cmd("EVALSHA").arg("hash").arg(2).arg("foo").arg("{foo}:2").arg("bar"), 12_182),
            (redis::cmd("TIME").arg(""), 0),
        ] {
            assert_eq!(slot_of(command), expected);
        }
        assert_eq!(slot_of(&redis::cmd("PING")), 0, "no key");
    }

    #[test]
    fn the_map_is_read_and_a_slot_that_nobody_serves_has_no_node() {
        let text = |text: &str| Value::BulkString(text.into());
        let range = |first, last, nodes: Vec<(Value, i64)>| {
            let node = |(host, port)| Value::Array(vec![host, Value::Int(port), text("id"), Value::Array(vec![])]);
            Value::Array([vec![Value::Int(first), Value::Int(last)], nodes.into_iter().map(node).collect()].concat())
        };
        let answer = Value::Array(vec![
            range(8_000, 16_383, vec![(Value::Nil, 7_003)]),
            range(0, 99, vec![(text("10.0.0.1"), 7_001), (text("10.0.0.9"), 7_009)]),
            range(100, 100, vec![(text(""), 7_004)]),
            range(200, 7_999, vec![(text("fe80::2"), 7_002)]),
            range(150, 160, vec![(text("?"), 7_002)]),
        ]);
        let map = SlotMap::read(&answer, "seed").unwrap();
        for (slot, expected) in [
            (0, Some("10.0.0.1:7001")),
            (99, Some("10.0.0.1:7001")),
            (100, Some("seed:7004")),
            (101, None),
            (155, None),
            (200, Some("[fe80::2]:7002")),
            (7_999, Some("[fe80::2]:7002")),
            (16_383, Some("seed:7003")),
        ] {
            assert_eq!(map.node(slot), expected, "{slot}");
        }
        assert_eq!(map.masters().len(), 4);
        assert_eq!(SlotMap::read(&Value::Array(vec![]), "seed"), None, "it serves nothing");
        assert_eq!(SlotMap::read(&Value::Okay, "seed"), None);
    }

    #[test]
    fn a_redirection_names_a_node() {
        for (node, expected) in [
            ("10.0.0.1:7001", Some("10.0.0.1:7001")),
            (":7001", Some("asked:7001")),
            ("fe80::2:7001", Some("[fe80::2]:7001")),
            ("?:7001", None),
            ("7001", None),
        ] {
            assert_eq!(redirected(node, "asked").as_deref(), expected, "{node}");
        }
    }
}
