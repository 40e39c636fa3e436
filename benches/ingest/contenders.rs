//! The contenders.

use crate::common::contender::{Contender, Keeps};
use crate::common::peers::Runtime;
use tallyd_core::rules::Writes;

/// Names of the contenders from which figures are computed.
pub const NOOP: &str = "noop";
pub const FLOOR: &str = "floor";
pub const FLOOR_1000: &str = "floor-1000";
/// What a peer with exact counters can reach at most: it reads the old rows, has a peer's batches, and no broker.
pub const FLOOR_EXACT: &str = "floor-exact";
pub const TALLYD: &str = "tallyd";
/// tallyd on a site whose API servers count likes in Redis.
pub const TALLYD_API: &str = "tallyd-api";
pub const TALLYD_4: &str = "tallyd-4";
pub const TALLYD_ARRAYS: &str = "tallyd-arrays";
pub const TALLYD_ARRAYS_2: &str = "tallyd-arrays-2";
pub const TALLYD_ARRAYS_2_GROUPED: &str = "tallyd-arrays-2-grouped";
pub const NODE_ROW: &str = "node-row";
pub const GO_EXACT: &str = "go-exact";
pub const BATCHED: [&str; 3] = ["node-batch", "python-batch", "go-batch"];

/// The number of events in a message of [`TALLYD_ARRAYS`].
const ARRAY_EVENTS: usize = 100;

/// The number of groups of users in [`TALLYD_ARRAYS_2_GROUPED`].
const GROUPS: u64 = 64;

pub const ALL: [Contender; 16] = [
    Contender::role(NOOP, Keeps::Nothing),
    Contender::role(FLOOR, Keeps::RowsAndCounters),
    Contender { name: FLOOR_1000, batch_events_max: Some(1_000), ..Contender::role(FLOOR, Keeps::RowsAndCounters) },
    Contender::role(FLOOR_EXACT, Keeps::RowsAndCounters),
    Contender::tallyd(TALLYD, 1),
    Contender { likes_by: Writes::Api, ..Contender::tallyd(TALLYD_API, 1) },
    Contender::tallyd("tallyd-2", 2),
    Contender::tallyd(TALLYD_4, 4),
    Contender { per_message: ARRAY_EVENTS, ..Contender::tallyd(TALLYD_ARRAYS, 1) },
    Contender { per_message: ARRAY_EVENTS, ..Contender::tallyd(TALLYD_ARRAYS_2, 2) },
    Contender { per_message: ARRAY_EVENTS, groups: GROUPS, ..Contender::tallyd(TALLYD_ARRAYS_2_GROUPED, 2) },
    Contender::peer(NODE_ROW, Runtime::Node, "row", Keeps::Rows),
    Contender::peer(BATCHED[0], Runtime::Node, "batch", Keeps::Rows),
    Contender::peer(BATCHED[1], Runtime::Python, "batch", Keeps::Rows),
    Contender::peer(BATCHED[2], Runtime::Go, "batch", Keeps::Rows),
    Contender::peer(GO_EXACT, Runtime::Go, "exact", Keeps::RowsAndCounters),
];
