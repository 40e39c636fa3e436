//! Bodies in the forms in which producers send them: packed, with a byte order mark, and in long lists.

use std::io::Write;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use lapin::BasicProperties;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;

use crate::common::{World, body, eventually, target};

/// A list of likes of the users `from` to `to`.
fn list(users: std::ops::Range<u64>) -> Vec<u8> {
    let at = tallyd_base::runtime::clock::now();
    let like = |user| body(&LikeEvent { target: target(1 + user % 7), user: UserId(user), at, liked: true }).1;
    [b"[".as_slice(), &users.map(like).collect::<Vec<_>>().join(&b","[..]), b"]"].concat()
}

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut to = GzEncoder::new(Vec::new(), Compression::fast());
    to.write_all(body).unwrap();
    to.finish().unwrap()
}

fn deflate(body: &[u8]) -> Vec<u8> {
    let mut to = ZlibEncoder::new(Vec::new(), Compression::fast());
    to.write_all(body).unwrap();
    to.finish().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn packed_bodies_and_long_lists_are_counted_like_others() {
    let world = World::new("consumer_bodies", "").await;
    let (publisher, daemon) = (world.publisher().await, world.consuming().await);
    let send = async |encoding: &str, body: Vec<u8>| {
        let properties = BasicProperties::default().with_content_encoding(encoding.into());
        publisher.publish_with(&world.broker.exchange(), "7", &body, properties).await.unwrap();
    };
    let long = list(1..9_001);
    assert!(long.len() > 700_000);
    send("utf-8", long).await;
    send("gzip", gzip(&list(9_001..12_001))).await;
    send("deflate", deflate(&list(12_001..13_001))).await;
    send("zstd", compress_to_vec(list(13_001..14_001).as_slice(), CompressionLevel::Fastest)).await;
    // A list with a byte order mark whose other events can't be applied.
    let some = list(14_001..14_002);
    let refused = vec!["1"; 1_200].join(",");
    let mixed = [b"\xef\xbb\xbf", &some[..some.len() - 1], format!(",{refused}]").as_bytes()].concat();
    send("UTF-8", mixed.clone()).await;
    send("br", b"\x0b\x02\x80{}".to_vec()).await;
    send("gzip", gzip(&vec![b' '; 64 << 20])).await;
    eventually("all likes are written", || async {
        world.count("SELECT COUNT(*) FROM like_record WHERE NOT is_del").await == 14_001
    })
    .await;
    eventually("the others are letters", || async { world.count("SELECT COUNT(*) FROM dead_letter").await == 3 }).await;
    let letters: Vec<(String, Vec<u8>, String)> =
        sqlx::query_as("SELECT reason, body, error FROM dead_letter ORDER BY id").fetch_all(&world.pool).await.unwrap();
    let [whole, unknown, bomb] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!((whole.0.as_str(), &whole.1), ("malformed-json", &mixed));
    assert!(
        whole.2.starts_with("1200 events of the list are refused, and this letter has the whole list"),
        "{}",
        whole.2
    );
    assert!(unknown.2.contains("its content_encoding is \"br\", and tallyd unpacks only gzip"), "{}", unknown.2);
    assert!(bomb.0 == "too-large" && bomb.1.len() < 1 << 20, "{}: {} bytes", bomb.2, bomb.1.len());
    assert!(daemon.status_kib("VmHWM") < 300 << 10, "{} KiB", daemon.status_kib("VmHWM"));
}
