//! Unpacks bodies that a producer has compressed. Pure.

use std::borrow::Cow;
use std::io::Read;

use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use ruzstd::decoding::StreamingDecoder;

use tallyd_core::event::{LIST_BYTES_MAX, Reason, Refusal};

pub const ENCODINGS: &str = "gzip, deflate and zstd";

/// The first bytes of a body in gzip (RFC 1952) and in Zstandard (RFC 8878).
const GZIP: &[u8] = b"\x1f\x8b";
const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd";

/// The largest window of Zstandard, which is memory: the window of its level 19.
const WINDOW_MAX: u64 = 8 << 20;

/// Another encoding is returned unchanged: some producers write a character set into `content_encoding`, and some
/// proxies unpack a body and keep the property.
pub fn unpacked<'a>(body: &'a [u8], encoding: Option<&str>) -> Result<Cow<'a, [u8]>, Refusal> {
    let read = match encoding {
        Some("gzip") if body.starts_with(GZIP) => read(MultiGzDecoder::new(body)),
        Some("deflate") if is_zlib(body) => read(ZlibDecoder::new(body)),
        Some("deflate") if !is_plain(body) => read(DeflateDecoder::new(body)),
        Some("zstd") if body.starts_with(ZSTD) => read_frames(body),
        _ => return Ok(Cow::Borrowed(body)),
    };
    let encoding = encoding.unwrap_or_default();
    let refuse = |reason, error| Err(Refusal { reason, error });
    match read {
        Err(error) => refuse(Reason::MalformedJson, format!("the body is not valid {encoding}: {error}")),
        Ok(body) if body.len() > LIST_BYTES_MAX => refuse(
            Reason::TooLarge,
            format!("the body has more than {LIST_BYTES_MAX} bytes when {encoding} is unpacked, which are not allowed"),
        ),
        Ok(body) => Ok(Cow::Owned(body)),
    }
}

/// Reads until the end, but only a little more than is allowed.
fn read(packed: impl Read) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    packed.take(LIST_BYTES_MAX as u64 + 1).read_to_end(&mut body)?;
    Ok(body)
}

/// Reads all frames of Zstandard (RFC 8878, section 3).
fn read_frames(mut packed: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    while !packed.is_empty() && body.len() <= LIST_BYTES_MAX {
        let frame = StreamingDecoder::new_with_max_window_size(&mut packed, WINDOW_MAX);
        let frame = frame.map_err(std::io::Error::other)?;
        frame.take((LIST_BYTES_MAX + 1 - body.len()) as u64).read_to_end(&mut body)?;
    }
    Ok(body)
}

fn is_plain(body: &[u8]) -> bool {
    matches!(body.trim_ascii_start().first(), Some(b'{' | b'['))
}

/// Whether the body begins with the two bytes that RFC 1950 describes. Some producers send `deflate` without them.
fn is_zlib(body: &[u8]) -> bool {
    matches!(body, [method, flags, ..] if method & 15 == 8 && u16::from_be_bytes([*method, *flags]) % 31 == 0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use proptest::prelude::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn packed(encoding: &str, body: &[u8]) -> Vec<u8> {
        let fast = Compression::fast();
        match encoding {
            "gzip" => {
                let mut to = GzEncoder::new(Vec::new(), fast);
                to.write_all(body).unwrap();
                to.finish().unwrap()
            }
            "zlib" => {
                let mut to = ZlibEncoder::new(Vec::new(), fast);
                to.write_all(body).unwrap();
                to.finish().unwrap()
            }
            "deflate" => {
                let mut to = DeflateEncoder::new(Vec::new(), fast);
                to.write_all(body).unwrap();
                to.finish().unwrap()
            }
            _ => compress_to_vec(body, CompressionLevel::Fastest),
        }
    }

    const ALL: [(&str, &str); 4] = [("gzip", "gzip"), ("zlib", "deflate"), ("deflate", "deflate"), ("zstd", "zstd")];

    #[test]
    fn bodies_of_each_encoding_are_unpacked_up_to_the_limit() {
        for (how, encoding) in ALL {
            let body = vec![b' '; LIST_BYTES_MAX];
            assert_eq!(unpacked(&packed(how, &body), Some(encoding)).unwrap(), body, "{how}");
            let bomb = packed(how, &vec![0; 64 * LIST_BYTES_MAX]);
            let refusal = unpacked(&bomb, Some(encoding)).unwrap_err();
            assert_eq!(refusal.reason, Reason::TooLarge, "{how}");
            assert!(refusal.error.contains(encoding), "{}", refusal.error);
            if how != "zlib" && how != "deflate" {
                let twice = [packed(how, b"[1"), packed(how, b"]")].concat();
                assert_eq!(unpacked(&twice, Some(encoding)).unwrap(), b"[1]".as_slice(), "{how}");
            }
            let half = packed(how, b"{}");
            let refusal = unpacked(&half[..half.len() / 2], Some(encoding)).unwrap_err();
            assert_eq!(refusal.reason, Reason::MalformedJson, "{how}");
        }
    }

    #[test]
    fn bodies_that_are_not_packed_are_left_as_they_are() {
        for encoding in [None, Some("utf-8"), Some("br"), Some("gzip"), Some("deflate"), Some("zstd")] {
            assert_eq!(unpacked(b"{}", encoding).unwrap(), &b"{}"[..]);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_unpacking_panic(body in prop::collection::vec(any::<u8>(), 0..300), which in 0..4_usize) {
            let (how, encoding) = ALL[which];
            let _ = unpacked(&body, Some(encoding));
            let mut damaged = packed(how, &body);
            let place = damaged.len() / 2;
            damaged[place] ^= 1;
            let _ = unpacked(&damaged, Some(encoding));
        }
    }
}
