//! The trial of a new map. A wrong map refuses nearly all events, so it is stopped before it fills the dead letters.
//! Pure.

const EVENTS: u32 = 1_000;

/// The map is stopped if at least this number of ten events is refused.
const REFUSED_OF_TEN: u32 = 9;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trial {
    pub taken: u32,
    pub refused: u32,
    /// Whether nearly all events were refused. Then no daemon consumes the map's queue.
    pub is_stopped: bool,
}

impl Trial {
    pub const PASSED: Self = Self { taken: EVENTS, refused: 0, is_stopped: false };

    pub fn is_over(self) -> bool {
        self.all() >= EVENTS
    }

    #[must_use]
    pub fn with(self, taken: usize, refused: usize) -> Self {
        let sum = |old: u32, new: usize| old.saturating_add(u32::try_from(new).unwrap_or(u32::MAX));
        let new = Self { taken: sum(self.taken, taken), refused: sum(self.refused, refused), ..self };
        let is_wrong = u64::from(new.refused) * 10 >= u64::from(new.all()) * u64::from(REFUSED_OF_TEN);
        Self { is_stopped: !self.is_over() && new.is_over() && is_wrong, ..new }
    }

    fn all(self) -> u32 {
        self.taken.saturating_add(self.refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_stopped_if_nine_in_ten_of_its_first_events_are_refused() {
        let after = |batches: &[(usize, usize)]| {
            batches.iter().fold(Trial::default(), |trial, (taken, refused)| trial.with(*taken, *refused))
        };
        assert!(!after(&[(0, 999)]).is_over());
        assert!(after(&[(0, 999), (1, 0)]).is_stopped);
        assert!(after(&[(50, 450), (50, 450)]).is_stopped);
        assert!(!after(&[(50, 450), (51, 449)]).is_stopped);
        assert!(!after(&[(101, 899), (0, 90_000)]).is_stopped, "the trial is over");
        assert!(!Trial::PASSED.with(0, 90_000).is_stopped);
    }
}
