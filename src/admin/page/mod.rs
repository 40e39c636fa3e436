//! `GET /`: the status page. One answer contains the whole page. The page gets its data from `/v1/status` and
//! `/v1/history`.
//!
//! The data can be malicious, especially error texts from the servers, so the script inserts the data only as text. The
//! content security policy blocks all scripts except the page's own script. It also blocks all resources from other
//! origins.

use std::sync::LazyLock;

use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

const STYLE: &str = include_str!("style.css");

/// The parts of the script. A file uses only code of the files before it in this list.
const SCRIPT: &str = concat!(
    "\"use strict\";\n",
    include_str!("format.js"),
    include_str!("dom.js"),
    include_str!("slider.js"),
    include_str!("plot.js"),
    include_str!("drift.js"),
    include_str!("page.js"),
);

static PAGE: LazyLock<String> =
    LazyLock::new(|| include_str!("index.html").replace("{{style}}", STYLE).replace("{{script}}", SCRIPT));

/// Allows only the page's own style and script, by their digests, and requests to its own origin.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let digest = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
    format!(
        "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        digest(SCRIPT),
        digest(STYLE),
    )
});

pub(super) async fn show() -> Response {
    let head = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (REFERRER_POLICY, "no-referrer"),
    ];
    (head, PAGE.as_str()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_loads_nothing() {
        assert!(!PAGE.contains("{{") && PAGE.contains(STYLE) && PAGE.contains(SCRIPT));
        for (number, line) in PAGE.lines().enumerate() {
            assert!(!line.contains("://") || line.contains("http://www.w3.org/2000/svg"), "line {number}: {line}");
        }
        for word in ["innerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=\"", "</script>"] {
            assert!(!SCRIPT.contains(word), "the script has {word}");
        }
        assert!(!STYLE.contains("url(") && !STYLE.contains("@import"));
    }
}
