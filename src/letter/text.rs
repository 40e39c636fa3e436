//! Makes the content of a dead letter safe to display, because its sender chose every byte. Pure.

use std::fmt::Write;

use chrono::DateTime;
use serde::de::IgnoredAny;

use tallyd_core::model::Micros;

const DUMPED: usize = 16;

/// Maximum depth to which JSON is indented. A body can have half a million brackets, and each level would add to the
/// indentation.
const INDENTED_MAX: usize = 40;

/// Makes text safe for a terminal. Escapes characters that are not printable, for example as `\u{1b}`. These include
/// escape sequences and marks that change the reading direction.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        push_printable(&mut out, character);
    }
    out
}

pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// Bytes that are not UTF-8 become `\xff`. With `goes_on` the last character can be incomplete.
pub fn printable_bytes(bytes: &[u8], goes_on: bool) -> String {
    let mut out = String::with_capacity(bytes.len());
    let mut chunks = bytes.utf8_chunks().peekable();
    while let Some(chunk) = chunks.next() {
        chunk.valid().chars().for_each(|character| push_printable(&mut out, character));
        let is_cut = goes_on && chunks.peek().is_none();
        for byte in chunk.invalid().iter().filter(|_| !is_cut) {
            // Writing to a `String` cannot fail.
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    if goes_on {
        out.push('…');
    }
    out
}

fn push_printable(out: &mut String, character: char) {
    match character {
        // These characters are printable, but Rust escapes them in a literal.
        '"' | '\'' | '\\' => out.push(character),
        _ => out.extend(character.escape_debug()),
    }
}

pub fn printable_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii_graphic() || character == ' ' || is_printable(character) {
            out.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
    out
}

fn is_printable(character: char) -> bool {
    character.escape_debug().len() == 1
}

/// Formats JSON over several lines, and keeps every token as it was written. A parser would round long numbers and drop
/// repeated fields. Returns `None` if the body is not JSON.
pub fn pretty_json(body: &[u8]) -> Option<String> {
    serde_json::from_slice::<IgnoredAny>(body).ok()?;
    let text = std::str::from_utf8(body).ok()?;
    let mut out = String::with_capacity(text.len() * 2);
    let (mut depth, mut is_string, mut is_escaped, mut opened) = (0_usize, false, false, false);
    let line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", depth.min(INDENTED_MAX)));
    };
    for character in text.chars() {
        if is_string {
            out.push(character);
            (is_string, is_escaped) = (is_escaped || character != '"', !is_escaped && character == '\\');
            continue;
        }
        if character.is_ascii_whitespace() {
            continue;
        }
        let closes = matches!(character, ']' | '}');
        if opened && !closes {
            line(&mut out, depth);
        }
        if closes {
            depth = depth.saturating_sub(1);
            if !opened {
                line(&mut out, depth);
            }
        }
        out.push(character);
        opened = matches!(character, '[' | '{');
        match character {
            '[' | '{' => depth += 1,
            ',' => line(&mut out, depth),
            ':' => out.push(' '),
            '"' => is_string = true,
            _ => {}
        }
    }
    Some(out)
}

pub fn hex_dump(bytes: &[u8]) -> String {
    let mut out = String::new();
    for (number, line) in bytes.chunks(DUMPED).enumerate() {
        let hex: String = line.iter().map(|byte| format!("{byte:02x} ")).collect();
        let shown = |byte: &u8| if byte.is_ascii_graphic() || *byte == b' ' { char::from(*byte) } else { '.' };
        let text: String = line.iter().map(shown).collect();
        let end = if number == 0 { "" } else { "\n" };
        let _ = write!(out, "{end}{:08x}  {hex:<48} |{text}|", number * DUMPED);
    }
    out
}

pub fn instant(at: Micros) -> String {
    let at = DateTime::from_timestamp_micros(at.0).unwrap_or_default();
    at.format("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn does_something(character: char) -> bool {
        character.is_control()
            || matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200b}'..='\u{200f}')
    }

    proptest! {
        #[test]
        fn what_is_printable_does_nothing_to_a_terminal(bytes in proptest::collection::vec(any::<u8>(), 0..200), text: String) {
            let shown = [printable(&text), printable_bytes(&bytes, true), printable_json(&text)].concat();
            prop_assert!(!shown.contains(does_something), "{shown:?}");
            prop_assert!(!hex_dump(&bytes).replace('\n', "").contains(does_something));
        }

        #[test]
        fn escaped_json_says_the_same(text: String) {
            let json = serde_json::to_string(&text).unwrap();
            prop_assert_eq!(serde_json::from_str::<String>(&printable_json(&json)).unwrap(), text);
        }

        #[test]
        fn pretty_json_has_the_same_tokens(number: i64, text: String, list in proptest::collection::vec(any::<bool>(), 0..4)) {
            let value = serde_json::json!({ "n": number, "t": text, "l": list, "o": {}, "in": { "a": [{ "b": null }] } });
            let pretty = pretty_json(value.to_string().as_bytes()).unwrap();
            prop_assert_eq!(serde_json::from_str::<Value>(&pretty).unwrap(), value);
        }
    }

    #[test]
    fn escape_sequences_are_spelled_out() {
        assert_eq!(printable("a\u{1b}[2J\"\\ü\u{9b}\u{202e}\n"), "a\\u{1b}[2J\"\\ü\\u{9b}\\u{202e}\\n");
        assert_eq!(printable_lines("a\r\nb\u{7}"), "a\\r\nb\\u{7}");
        assert_eq!(printable_bytes(b"a\xff\x1b", false), "a\\xff\\u{1b}");
        assert_eq!(printable_bytes("aü".as_bytes().get(..2).unwrap(), true), "a…");
        assert_eq!(printable_json("\"\u{9b}\u{7f}\u{10ffff}ü\""), "\"\\u009b\\u007f\\udbff\\udfffü\"");
    }

    #[test]
    fn pretty_json_keeps_what_a_parser_would_lose() {
        let body = br#"{"at":12345678901234567890123,"at":1.10, "list" : [ ] ,"text":"a\"{,: b","deep":[{"x":1},2]}"#;
        let expected = "{\n  \"at\": 12345678901234567890123,\n  \"at\": 1.10,\n  \"list\": [],\n  \"text\": \"a\\\"{,: b\",\n  \
                        \"deep\": [\n    {\n      \"x\": 1\n    },\n    2\n  ]\n}";
        assert_eq!(pretty_json(body).unwrap(), expected);
        assert_eq!(pretty_json(b"{\"a\":"), None);
        assert_eq!(pretty_json(b"\"\xff\""), None);
    }

    #[test]
    fn json_that_is_nested_to_hurt_is_shown_in_little_room() {
        let body = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
        let pretty = pretty_json(&body).unwrap();
        assert!(pretty.len() < body.len() * 100, "{}", pretty.len());
    }

    #[test]
    fn bytes_are_dumped_in_lines() {
        let dumped = hex_dump(b"0123456789abcdef\x00\xff~");
        let expected = "00000000  30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66  |0123456789abcdef|\n\
                        00000010  00 ff 7e                                         |..~|";
        assert_eq!(dumped, expected);
    }

    #[test]
    fn an_instant_is_written_in_utc() {
        assert_eq!(instant(Micros(1_795_251_385_004_538)), "2026-11-21T08:56:25.004538Z");
    }
}
