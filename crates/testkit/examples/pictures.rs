//! Takes the pictures docs/status-page-light.png and -dark.png of a running daemon's page: `pictures URL FOLDER`.
//! Called by `dev/pictures`.

use std::path::Path;
use std::time::{Duration, Instant};

use tallyd_testkit::browser::Browser;

const WIDTH: u32 = 1_200;
const DRAWN_MAX: Duration = Duration::from_secs(20);

#[tokio::main]
async fn main() {
    let mut words = std::env::args().skip(1);
    let (Some(url), Some(folder)) = (words.next(), words.next()) else { panic!("usage: pictures URL FOLDER") };
    let browser = Browser::start().await;
    browser.open(&url).await;
    let began = Instant::now();
    while browser.value("document.querySelectorAll('#plot-events path').length").await == 0 {
        assert!(began.elapsed() < DRAWN_MAX, "the page did not draw the plot in time");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for scheme in ["light", "dark"] {
        browser.show_as(WIDTH, 900, scheme).await;
        browser.picture(&Path::new(&folder).join(format!("status-page-{scheme}.png"))).await;
    }
    browser.close().await;
}
