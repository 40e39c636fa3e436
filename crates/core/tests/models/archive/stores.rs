//! The stores of the model. Each function does what one script of `crates/redis/lua` or one statement of `crates/mysql`
//! does.

use tallyd_core::archive::{BoardKeys, Done, LATE_MEMBERS_MISSING, PeriodRow, PeriodState};
use tallyd_core::model::{Freeze, Micros};
use tallyd_core::tally::Tally;

use crate::zsets::{EMPTY, MEMBERS, Zset, both, members};

pub(super) fn tally_of(zset: Zset) -> Tally {
    Tally { members: members(zset), checksum: zset.iter().fold(0, |sum, score| sum * 256 + u64::from(*score)) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Redis {
    pub live: Zset,
    pub frozen: Zset,
    /// Whether the frozen zset expires.
    pub expires: bool,
    pub freeze: Freeze,
    pub late_members: u64,
    /// The run that has the claim; 0 if no run has it.
    pub claim: u8,
    /// The pages that this server received of a raise.
    pub pages: u64,
}

pub(super) enum Changed {
    Done(u64),
    Absent,
    Refused,
    Lost,
}

/// The zset that a run raises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Raised {
    Live,
    Frozen { late_members: u64 },
}

impl Redis {
    pub(super) const FLUSHED: Self = Self {
        live: EMPTY,
        frozen: EMPTY,
        expires: false,
        freeze: Freeze::UNCLAIMED,
        late_members: 0,
        claim: 0,
        pages: 0,
    };

    pub(super) fn keys(&self) -> BoardKeys {
        let Self { live, frozen, freeze, late_members, .. } = *self;
        BoardKeys { live: live != EMPTY, frozen: frozen != EMPTY, freeze, late_members }
    }

    /// `board_claim.lua`.
    pub(super) fn claims(&mut self, run: u8, number: u64, frozen: Option<Freeze>) {
        self.claim = run;
        if self.freeze == Freeze::UNCLAIMED {
            self.freeze = Freeze { generation: number, note: None };
        }
        if let Some(Freeze { generation, note }) = frozen
            && generation == self.freeze.generation
            && self.freeze.note < note
            && self.live == EMPTY
        {
            self.freeze.note = note;
        }
    }

    /// `board_freeze.lua`.
    pub(super) fn freezes(&mut self, run: u8, note: Option<u64>, pages: Option<u64>) -> Changed {
        if self.claim != run {
            return Changed::Refused;
        }
        if self.frozen != EMPTY {
            return Changed::Done(0);
        }
        if self.live == EMPTY {
            return Changed::Absent;
        }
        if pages.is_some_and(|pages| pages != self.pages) {
            return Changed::Lost;
        }
        (self.frozen, self.live) = (self.live, EMPTY);
        (self.freeze.note, self.late_members, self.expires) = (note, 0, false);
        Changed::Done(1)
    }

    /// `board_merge.lua`, with pages of one member.
    pub(super) fn merges(&mut self, run: u8) -> Changed {
        if self.claim != run {
            return Changed::Refused;
        }
        if self.frozen == EMPTY {
            return Changed::Absent;
        }
        self.expires = false;
        let Some(member) = (0..MEMBERS).find(|member| self.live[*member] > 0) else { return Changed::Done(0) };
        self.frozen[member] += self.live[member];
        self.live[member] = 0;
        self.late_members += 1;
        Changed::Done(1)
    }

    /// `board_raise.lua`.
    pub(super) fn raises(&mut self, run: u8, to: Raised, pages: u64, scores: Zset) -> Changed {
        if self.claim != run {
            return Changed::Refused;
        }
        match to {
            Raised::Live if self.frozen != EMPTY => return Changed::Absent,
            Raised::Frozen { .. } if self.frozen == EMPTY => return Changed::Absent,
            Raised::Frozen { late_members } if self.late_members != late_members => return Changed::Refused,
            _ => {}
        }
        if pages != 0 && self.pages != pages {
            return Changed::Refused;
        }
        self.pages = pages + 1;
        if to != Raised::Live && pages > 0 && scores == EMPTY {
            self.late_members += 1;
        }
        let zset = if to == Raised::Live { &mut self.live } else { &mut self.frozen };
        *zset = both(*zset, scores, u8::max);
        Changed::Done(0)
    }

    /// `board_stay.lua`.
    pub(super) fn stays(&mut self, run: u8, expires: bool) -> Changed {
        if self.claim != run {
            return Changed::Refused;
        }
        if self.frozen == EMPTY {
            return Changed::Absent;
        }
        self.expires = expires;
        Changed::Done(1)
    }

    /// `board_end.lua`.
    pub(super) fn ends(&mut self, run: u8) -> Changed {
        if self.claim != run {
            return Changed::Refused;
        }
        if self.live != EMPTY {
            return Changed::Done(0);
        }
        (self.frozen, self.expires) = (EMPTY, false);
        Changed::Done(1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MySql {
    pub row: Option<PeriodRow>,
    /// The rows of the two copies.
    pub rows: [Zset; 2],
    /// The run that holds the job's lock.
    pub holder: u8,
    /// The number of the next run.
    pub next: u64,
}

impl MySql {
    /// The archive that readers get.
    pub(super) fn archived(&self) -> Zset {
        self.row.and_then(|row| row.copy).map_or(EMPTY, |copy| self.rows[usize::from(copy)])
    }

    /// Changes something, if the run still holds the job's lock.
    pub(super) fn holds(&mut self, run: u8, change: impl FnOnce(&mut Self)) -> bool {
        let is_held = self.holder == run;
        if is_held {
            change(self);
        }
        is_held
    }

    pub(super) fn notes_frozen(&mut self, generation: u64) {
        let frozen = Freeze { generation, note: Some(0) };
        let (state, tally, copy) = (PeriodState::Frozen, Tally::default(), None);
        let new =
            PeriodRow { state, tally, left_out: 0, done_at: None, restored_at: None, copy, frozen, late_members: 0 };
        self.row = Some(PeriodRow { state, ..self.row.unwrap_or(new) });
    }

    pub(super) fn notes_late_members_missing(&mut self) {
        let (state, late_members) = (PeriodState::Frozen, LATE_MEMBERS_MISSING);
        self.row = self.row.map(|row| PeriodRow { state, late_members, ..row });
    }

    pub(super) fn notes_done(&mut self, done: Done, now: Micros) {
        self.row = self.row.map(|row| PeriodRow { done_at: Some(now), restored_at: row.restored_at, ..done.into() });
    }

    pub(super) fn notes_ended(&mut self) {
        self.row = self.row.map(|row| PeriodRow { state: PeriodState::Ended, ..row });
    }
}
