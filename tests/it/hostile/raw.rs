//! A publisher that builds its AMQP frames itself. The broker library is recursive, so it can't send headers that are
//! nested so deeply. It also sends only UTF-8 in short strings. The frames follow section 4.2 of the AMQP 0-9-1
//! specification.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use url::Url;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const FRAME_END: u8 = 0xce;

/// The maximum size of a frame, unless client and server agree on a smaller maximum.
const FRAME_BYTES_MAX: u32 = 131_072;

/// A frame has room for this number of nested lists. Each list needs five bytes.
pub const LISTS_MAX: usize = 26_000;

/// A frame has room for this number of nested tables. Each table needs six bytes, because its field has an empty name.
pub const TABLES_MAX: usize = 21_700;

/// Makes nested lists: each list contains the next list, and the last list is empty. A list is written as a type, a
/// length and its content.
pub fn lists(levels: usize) -> Vec<u8> {
    (0..levels).rev().flat_map(|within| [b"A", &long(5 * u32::try_from(within).unwrap())[..]].concat()).collect()
}

/// Makes nested tables. Each table has one field.
pub fn tables(levels: usize) -> Vec<u8> {
    let table = |within: usize| {
        let length = long(6 * u32::try_from(within).unwrap());
        let name: &[u8] = if within > 0 { &[0] } else { &[] };
        [b"F", &length[..], name].concat()
    };
    (0..levels).rev().flat_map(table).collect()
}

/// Makes a text so long that the headers fill the payload of the largest frame. Together with its head and its end
/// byte, this frame is larger than a client accepts.
pub fn too_large() -> Vec<u8> {
    let others = [2, 2, 8, 2, 4, "nested".len() + 1, 1, 4];
    let bytes = FRAME_BYTES_MAX as usize - others.iter().sum::<usize>();
    text(&vec![b'x'; bytes])
}

/// The properties of a message. Maps the complement of each property's flag to the property's value, because the values
/// follow in descending order of the flags.
#[derive(Default)]
pub struct Properties(BTreeMap<u16, Vec<u8>>);

/// The flags of all properties that are short strings and that RabbitMQ does not check.
pub const SHORT_STRINGS: [(&str, u16); 8] = [
    ("content_type", 0x8000),
    ("content_encoding", 0x4000),
    ("correlation_id", 0x0400),
    ("reply_to", 0x0200),
    ("message_id", 0x0080),
    ("type", 0x0020),
    ("app_id", 0x0008),
    ("cluster_id", 0x0004),
];

impl Properties {
    /// Adds a header. AMQP writes its value as a type and the value's bytes.
    pub fn header(mut self, name: &[u8], value: &[u8]) -> Self {
        self.0.insert(!0x2000, long_text(&[&short_text(name)[..], value].concat()));
        self
    }

    pub fn short_string(mut self, flag: u16, text: &[u8]) -> Self {
        self.0.insert(!flag, short_text(text));
        self
    }
}

/// Makes a header's value from bytes.
pub fn text(bytes: &[u8]) -> Vec<u8> {
    [b"S", &long_text(bytes)[..]].concat()
}

/// Publishes `body` to an exchange with a routing key. Waits until the broker has the message.
pub fn publish(url: &str, (exchange, key): (&str, &[u8]), properties: &Properties, body: &[u8]) {
    let url = Url::parse(url).unwrap();
    let mut stream = TcpStream::connect((url.host_str().unwrap(), url.port().unwrap())).unwrap();
    let password = url.password().unwrap();
    stream.write_all(b"AMQP\x00\x00\x09\x01").unwrap();
    expect(&mut stream, (10, 10));
    let login = [b"\x00", url.username().as_bytes(), b"\x00", password.as_bytes()].concat();
    // The arguments are the client's properties (empty), the mechanism, the credentials, and the language.
    method(&mut stream, 0, (10, 11), &[&long(0)[..], &short_text(b"PLAIN"), &long_text(&login), &short_text(b"en_US")]);
    expect(&mut stream, (10, 30));
    let (channels, no_heartbeat) = ([0, 1], [0, 0]);
    method(&mut stream, 0, (10, 31), &[&channels, &long(FRAME_BYTES_MAX), &no_heartbeat]);
    method(&mut stream, 0, (10, 40), &[&short_text(b"/"), &[0, 0]]);
    expect(&mut stream, (10, 41));
    method(&mut stream, 1, (20, 10), &[&[0]]);
    expect(&mut stream, (20, 11));
    method(&mut stream, 1, (85, 10), &[&[0]]);
    expect(&mut stream, (85, 11));
    let is_mandatory = [1];
    method(&mut stream, 1, (60, 40), &[&[0, 0], &short_text(exchange.as_bytes()), &short_text(key), &is_mandatory]);
    let class_and_weight = [0, 60, 0, 0];
    let length = (body.len() as u64).to_be_bytes();
    let flags = properties.0.keys().map(|complement| !complement).sum::<u16>().to_be_bytes();
    let values: Vec<u8> = properties.0.values().flatten().copied().collect();
    frame(&mut stream, HEADER, 1, &[&class_and_weight[..], &length, &flags, &values].concat());
    frame(&mut stream, BODY, 1, body);
    expect(&mut stream, (60, 80));
}

fn long(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

fn short_text(text: &[u8]) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap()], text].concat()
}

fn long_text(bytes: &[u8]) -> Vec<u8> {
    [&long(u32::try_from(bytes.len()).unwrap())[..], bytes].concat()
}

fn frame(stream: &mut TcpStream, kind: u8, channel: u16, payload: &[u8]) {
    let length = long(u32::try_from(payload.len()).unwrap());
    stream.write_all(&[&[kind], &channel.to_be_bytes()[..], &length, payload, &[FRAME_END]].concat()).unwrap();
}

fn method(stream: &mut TcpStream, channel: u16, (class, method): (u16, u16), arguments: &[&[u8]]) {
    frame(stream, METHOD, channel, &[&class.to_be_bytes()[..], &method.to_be_bytes(), &arguments.concat()].concat());
}

/// Reads one AMQP method, and fails if it is not the expected method.
fn expect(stream: &mut TcpStream, (class, method): (u16, u16)) {
    let mut head = [0; 7];
    stream.read_exact(&mut head).unwrap();
    let mut payload = vec![0; u32::from_be_bytes(head[3..].try_into().unwrap()) as usize + 1];
    stream.read_exact(&mut payload).unwrap();
    let said = payload.escape_ascii();
    assert_eq!(payload[..4], [class.to_be_bytes(), method.to_be_bytes()].concat(), "{said}");
}
