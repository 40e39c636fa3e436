//! Makes many sorts of invalid messages and requests.

use std::fs;
use std::path::Path;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use tallyd_core::event::{BODY_BYTES_MAX, LIST_BYTES_MAX};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::Daemon;
use crate::common::Dice;
use crate::fuzz::mutate::Mutations;

/// Returns the decoder's corpus, mutations of the corpus, and messages that are too large or nested too deep. Each
/// message has one of several sets of properties.
pub fn messages(mutations: usize) -> Vec<(Vec<u8>, BasicProperties)> {
    let mut files: Vec<_> = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/event"))
        .unwrap()
        .map(|it| it.unwrap().path())
        .collect();
    files.sort_unstable();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let mut bodies = corpus.clone();
    let mut more = Mutations::of(&corpus, Dice::of_run(7));
    bodies.extend((0..mutations).map(|_| more.next().to_vec()));
    // The daemon ignores a fence message of an unknown run. But a random mutation can become a fence message of a known
    // run. So the test removes all mutations that are fence messages.
    bodies.retain(|body| !body.windows(7).any(|part| part == b"\"fence\""));
    let padded = |length: usize| {
        let (head, tail) = (r#"{"type":"like","kind":"video","target_id":1,"user_id":9,"at":1,"x":""#, "\"}");
        format!("{head}{}{tail}", "x".repeat(length - head.len() - tail.len())).into_bytes()
    };
    bodies.extend([padded(BODY_BYTES_MAX), padded(BODY_BYTES_MAX + 1)]);
    bodies.extend([vec![b'['; LIST_BYTES_MAX], vec![b'{'; 60_000], vec![b' '; LIST_BYTES_MAX + 1]]);
    bodies.push([vec![b'['; 300_000], vec![b']'; 300_000]].concat());
    let numbers: Vec<String> = (0..1_000).map(|number| number.to_string()).collect();
    bodies.push(format!("[{}]", numbers.join(",")).into_bytes());
    let count = properties().len();
    let odd = |(place, body)| (body, properties().swap_remove(place % count));
    bodies.into_iter().enumerate().map(odd).collect()
}

fn properties() -> Vec<BasicProperties> {
    let header = |name: &str, value: AMQPValue| {
        let mut headers = FieldTable::default();
        headers.insert(name.into(), value);
        BasicProperties::default().with_headers(headers)
    };
    vec![
        BasicProperties::default(),
        BasicProperties::default().with_content_type("text/html".into()).with_content_encoding("gzip".into()),
        BasicProperties::default().with_priority(255).with_delivery_mode(1),
        BasicProperties::default().with_expiration("3600000".into()).with_timestamp(u64::MAX),
        BasicProperties::default()
            .with_message_id("\u{1b}[2J\u{202e}\"'\\\0".into())
            .with_app_id("'; DROP TABLE".into()),
        BasicProperties::default().with_reply_to("nobody".into()).with_cluster_id("x".into()),
        header("x-delivery-count", AMQPValue::LongString("many".into())),
        header("x-death", AMQPValue::FieldTable(FieldTable::default())),
        // RabbitMQ rejects NaN and infinity, so the test can't send them.
        header("", AMQPValue::Double(-1e308)),
        header("bytes", AMQPValue::ByteArray(vec![0xff; 300].into())),
        header("large", AMQPValue::LongString(vec![b'x'; 50_000].into())),
        header("time", AMQPValue::Timestamp(u64::MAX)),
    ]
}

/// Sends invalid and unusual requests to the admin port.
pub async fn ask(daemon: &Daemon, times: usize) {
    let log = daemon.log();
    let (_, after) = log.split_once("the admin port is ").expect("the admin port");
    let address: String = after.chars().take_while(|it| it.is_ascii_digit() || matches!(it, '.' | ':')).collect();
    let requests: Vec<Vec<u8>> = [
        "GET /v1/counters/video/42 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /v1/counters/%00%ff/18446744073709551616?x=%zz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "POST /metrics HTTP/1.0\r\nContent-Length: 99999999999999999999\r\n\r\nx",
        "GET /%0d%0aevent=forged HTTP/1.1\r\nHost: localhost\r\nX: \u{1b}[2J\r\n\r\n",
        "GET http://evil.example/ HTTP/1.1\r\nHost: [::1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    ]
    .map(|request| request.as_bytes().to_vec())
    .to_vec();
    let mut mutations = Mutations::of(&requests, Dice::of_run(3));
    for _ in 0..times {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        // The daemon can disconnect before the whole request is sent.
        let _ = stream.write_all(mutations.next()).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
    }
    assert!(!daemon.log().contains("event=forged"), "{}", daemon.log());
}
