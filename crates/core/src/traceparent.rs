//! The header `traceparent` of W3C Trace Context: the trace and the span of a message. Pure.

pub const HEADER: &str = "traceparent";

/// `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`. Later versions of the standard can append fields.
const LENGTH: usize = 55;

/// Without fields that a later version of the standard has appended. The standard wants an invalid header to be
/// ignored.
pub fn parse(value: &str) -> Option<&str> {
    let (fields, rest) = value.split_at_checked(LENGTH)?;
    let mut parts = fields.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let ends = match version {
        "00" => rest.is_empty(),
        "ff" => false,
        _ => rest.is_empty() || rest.starts_with('-'),
    };
    let is_valid = ends && is_hex(version, 2) && is_id(trace, 32) && is_id(span, 16) && is_hex(flags, 2);
    is_valid.then_some(fields)
}

/// An id that consists of zeros is invalid.
fn is_id(part: &str, length: usize) -> bool {
    is_hex(part, length) && part.bytes().any(|byte| byte != b'0')
}

fn is_hex(part: &str, length: usize) -> bool {
    part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn the_fields_of_later_versions_are_read_without_the_rest() {
        assert_eq!(parse(VALID), Some(VALID));
        let later = VALID.replacen("00", "cc", 1);
        assert_eq!(parse(&later), Some(later.as_str()));
        assert_eq!(parse(&format!("{later}-what-comes-later")), Some(later.as_str()));
    }

    #[test]
    fn what_the_standard_calls_invalid_is_ignored() {
        for invalid in [
            "",
            "00",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01more",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0",
            " 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b70-01",
        ] {
            assert_eq!(parse(invalid), None, "{invalid}");
        }
    }

    proptest! {
        #[test]
        fn every_header_of_two_ids_is_valid(trace in 1..=u128::MAX, span in 1..=u64::MAX, flags in any::<u8>()) {
            let header = format!("00-{trace:032x}-{span:016x}-{flags:02x}");
            prop_assert_eq!(parse(&header), Some(header.as_str()));
        }

        #[test]
        fn a_header_with_a_foreign_character_is_invalid(place in 0..VALID.len(), other in "[^0-9a-f-]") {
            let mut header = VALID.to_owned();
            header.replace_range(place..=place, &other);
            prop_assert_eq!(parse(&header), None);
        }

        #[test]
        fn no_text_yields_more_than_the_beginning_of_itself(text in ".*") {
            if let Some(fields) = parse(&text) {
                prop_assert!(text.starts_with(fields) && fields.len() == LENGTH && fields.is_ascii());
            }
        }

        #[test]
        fn what_is_nearly_a_header_is_read_or_ignored(text in "[0c][0f]-[0-2a]{31,33}-[0-2a]{15,17}-[0-9a-g]{1,3}(-.*)?") {
            if let Some(fields) = parse(&text) {
                let ids: Vec<&str> = fields.split('-').collect();
                prop_assert_eq!(ids.iter().map(|id| id.len()).collect::<Vec<_>>(), [2, 32, 16, 2]);
                prop_assert!(ids.iter().skip(1).take(2).all(|id| id.bytes().any(|byte| byte != b'0')));
            }
        }
    }
}
