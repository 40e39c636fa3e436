//! Periods.
/// The length of a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeriodKind {
    /// A calendar day.
    Day,
    /// An ISO week.
    Week,
    /// A calendar month.
    Month,
}
