//! An event's fields before they are checked.

use super::scalar::Scalar;
use crate::unit::Unit;

/// The fields that this version reads. Other fields are ignored, so producers can add fields.
#[derive(serde::Deserialize)]
pub(crate) struct Raw<'a> {
    #[serde(rename = "type", default, borrow)]
    pub(crate) event_type: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) kind: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) target_id: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) user_id: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) at: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) metric: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) delta: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) value: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) event_id: Scalar<'a>,
    #[serde(default, borrow)]
    pub(crate) fence: Scalar<'a>,
    #[serde(skip)]
    pub(crate) unit: Unit,
}
