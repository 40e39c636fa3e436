//! Counts drifts by size. Pure.

use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sizes {
    /// Drifts by 1.
    #[serde(rename = "1")]
    pub one: u64,
    /// Drifts by 2 to 9.
    #[serde(rename = "2-9")]
    pub some: u64,
    /// Drifts by 10 to 99.
    #[serde(rename = "10-99")]
    pub many: u64,
    /// Drifts by 100 or more.
    #[serde(rename = "100+")]
    pub most: u64,
}

impl Sizes {
    pub fn note(&mut self, drift: u64) {
        *match drift {
            0..=1 => &mut self.one,
            2..=9 => &mut self.some,
            10..=99 => &mut self.many,
            _ => &mut self.most,
        } += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_drift_is_counted_in_the_class_of_its_size() {
        let mut sizes = Sizes::default();
        [0, 1, 2, 9, 9, 10, 99, 100, 5_000, 6_000].into_iter().for_each(|drift| sizes.note(drift));
        assert_eq!(sizes, Sizes { one: 2, some: 3, many: 2, most: 3 });
    }
}
