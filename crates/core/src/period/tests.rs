//! Periods in zones whose clocks change at midnight.

use proptest::prelude::*;

use super::*;

const KINDS: [PeriodKind; 3] = [PeriodKind::Day, PeriodKind::Week, PeriodKind::Month];

/// Zones whose clocks behave differently at midnight. In some zones nothing happens. The clocks of Sao Paulo (until
/// 2018), Beirut, and Toronto (1919, from 23:30) jump over midnight. Until 2011, the clocks of St John's went back at
/// 00:01, to before midnight. On Lord Howe Island, daylight saving time moves the clocks by only half an hour. Apia
/// skipped a whole day (2011-12-30).
const ZONES: [&str; 12] = [
    "UTC",
    "Asia/Shanghai",
    "America/New_York",
    "Europe/Berlin",
    "America/Sao_Paulo",
    "Asia/Beirut",
    "America/Toronto",
    "America/St_Johns",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Africa/Cairo",
    "America/Havana",
];

const WEEK_STARTS: [WeekStart; 7] = [
    WeekStart::Monday,
    WeekStart::Tuesday,
    WeekStart::Wednesday,
    WeekStart::Thursday,
    WeekStart::Friday,
    WeekStart::Saturday,
    WeekStart::Sunday,
];

fn zone(name: &str) -> Calendar {
    calendar(name, WeekStart::Monday)
}

fn calendar(name: &str, week_starts: WeekStart) -> Calendar {
    Calendar::new(TimeZone::get(name).unwrap(), week_starts)
}

fn at(text: &str) -> Micros {
    Micros(text.parse::<Timestamp>().unwrap().as_microsecond())
}

fn period(text: &str) -> Period {
    text.parse().unwrap()
}

#[test]
fn an_instant_lies_in_the_period_that_the_zones_calendar_shows() {
    for (name, instant, expected) in [
        ("Asia/Shanghai", "2026-11-20T15:59:59.999999Z", ["2026-11-20", "2026-W47", "2026-11"]),
        ("Asia/Shanghai", "2026-11-20T16:00:00Z", ["2026-11-21", "2026-W47", "2026-11"]),
        ("America/New_York", "2026-11-01T03:59:59Z", ["2026-10-31", "2026-W44", "2026-10"]),
        ("Europe/Berlin", "2026-03-29T21:59:59Z", ["2026-03-29", "2026-W13", "2026-03"]),
        ("Europe/Berlin", "2026-03-29T22:00:00Z", ["2026-03-30", "2026-W14", "2026-03"]),
        // If a week contains days of two years, the year of the week can differ from the year of the day.
        ("UTC", "2027-01-01T00:00:00Z", ["2027-01-01", "2026-W53", "2027-01"]),
        ("UTC", "2024-12-30T12:00:00Z", ["2024-12-30", "2025-W01", "2024-12"]),
        ("UTC", "2028-02-29T12:00:00Z", ["2028-02-29", "2028-W09", "2028-02"]),
    ] {
        let found = KINDS.map(|kind| Period::containing(kind, at(instant), &zone(name)).to_string());
        assert_eq!(found, expected, "{name} {instant}");
    }
}

#[test]
fn days_are_as_long_as_the_clocks_make_them() {
    for (name, day, hours) in [
        ("Asia/Shanghai", "2026-03-29", 24),
        ("America/New_York", "2026-03-08", 23),
        ("America/New_York", "2026-11-01", 25),
        ("Europe/Berlin", "2026-03-29", 23),
        ("Europe/Berlin", "2026-10-25", 25),
        ("America/Sao_Paulo", "2018-11-04", 23),
        ("America/Sao_Paulo", "2018-02-17", 25),
        ("Pacific/Apia", "2011-12-30", 0),
        ("Pacific/Apia", "2011-12-31", 24),
    ] {
        let (day, zone) = (period(day), zone(name));
        assert_eq!(day.end(&zone).0 - day.start(&zone).0, hours * 3_600_000_000, "{name} {day}");
    }
}

#[test]
fn a_day_without_midnight_begins_with_the_jump() {
    for (name, day, start) in [
        ("America/Sao_Paulo", "2018-11-04", "2018-11-04T03:00:00Z"),
        ("Asia/Beirut", "2026-03-29", "2026-03-28T22:00:00Z"),
        // 23:30 became 00:30.
        ("America/Toronto", "1919-03-31", "1919-03-31T04:30:00Z"),
    ] {
        assert_eq!(period(day).start(&zone(name)), at(start), "{name}");
    }
}

#[test]
fn a_clock_set_back_over_midnight_opens_no_period_again() {
    // St John's, 2010-11-07: at 00:01 it became 23:01 of the day before.
    let zone = zone("America/St_Johns");
    for instant in ["2010-11-07T02:30:00Z", "2010-11-07T02:45:00Z", "2010-11-07T03:30:00Z"] {
        assert_eq!(Period::containing(PeriodKind::Day, at(instant), &zone), period("2010-11-07"), "{instant}");
    }
}

#[test]
fn weeks_and_months_follow_each_other_over_new_year() {
    for (before, after) in [
        ("2026-W52", "2026-W53"),
        ("2026-W53", "2027-W01"),
        ("2025-W52", "2026-W01"),
        ("2026-12", "2027-01"),
        ("2028-02-28", "2028-02-29"),
        ("2028-02-29", "2028-03-01"),
        ("2027-02-28", "2027-03-01"),
    ] {
        assert_eq!(period(before).next(), Some(period(after)));
        assert_eq!(period(after).previous(), Some(period(before)));
    }
}

#[test]
fn a_week_begins_with_the_day_that_is_set_and_is_named_after_the_iso_week_of_most_of_its_days() {
    for (week_starts, start, end) in [
        (WeekStart::Monday, "2026-11-15T16:00:00Z", "2026-11-22T16:00:00Z"),
        (WeekStart::Tuesday, "2026-11-16T16:00:00Z", "2026-11-23T16:00:00Z"),
        (WeekStart::Wednesday, "2026-11-17T16:00:00Z", "2026-11-24T16:00:00Z"),
        (WeekStart::Thursday, "2026-11-18T16:00:00Z", "2026-11-25T16:00:00Z"),
        (WeekStart::Friday, "2026-11-12T16:00:00Z", "2026-11-19T16:00:00Z"),
        (WeekStart::Saturday, "2026-11-13T16:00:00Z", "2026-11-20T16:00:00Z"),
        (WeekStart::Sunday, "2026-11-14T16:00:00Z", "2026-11-21T16:00:00Z"),
    ] {
        let calendar = calendar("Asia/Shanghai", week_starts);
        let week = period("2026-W47");
        assert_eq!((week.start(&calendar), week.end(&calendar)), (at(start), at(end)), "{week_starts:?}");
        assert_eq!(Period::containing(PeriodKind::Week, at(start), &calendar), week, "{week_starts:?}");
        assert_eq!(Period::containing(PeriodKind::Week, at(end), &calendar), period("2026-W48"), "{week_starts:?}");
        // Days and months follow the zone.
        assert_eq!(Period::containing(PeriodKind::Month, at(start), &calendar), period("2026-11"));
    }
    // Over New Year: Sunday, 27 December 2026, to Saturday, 2 January 2027.
    let sunday = calendar("America/New_York", WeekStart::Sunday);
    for instant in ["2026-12-27T05:00:00Z", "2027-01-03T04:59:59Z"] {
        assert_eq!(Period::containing(PeriodKind::Week, at(instant), &sunday), period("2026-W53"), "{instant}");
    }
}

#[test]
fn what_names_no_period_is_refused_with_how_to_write_it() {
    for text in [
        "",
        "2026",
        "2026-W54",
        "2025-W53",
        "2026-W0",
        "2026-W7",
        "2026-13",
        "2026-1",
        "2026-02-29",
        "2026-11-31",
        "26-11",
        "+2026-11",
        "2026-w47",
        "2026-W47-1",
        "2026-11-21-1",
        "Total",
        " 2026-11",
        "20261121",
    ] {
        let error = text.parse::<Period>().unwrap_err().to_string();
        assert!(error.contains("an ISO week as 2026-W47"), "{text}: {error}");
    }
}

#[test]
fn closed_periods_begin_with_the_newest_that_is_over_and_end_somewhere() {
    let berlin = zone("Europe/Berlin");
    let hour = Duration::from_secs(3_600);
    let closed = |now| Period::closed(PeriodKind::Week, &berlin, hour, at(now)).collect::<Vec<_>>();
    // Week 46 ends on Sunday, 15 November, at midnight: 23:00 UTC.
    assert_eq!(closed("2026-11-15T23:59:59.999999Z")[0], period("2026-W45"));
    let weeks = closed("2026-11-16T00:00:00Z");
    assert_eq!(weeks[..3], [period("2026-W46"), period("2026-W45"), period("2026-W44")]);
    assert_eq!(weeks.len(), 60);
}

/// From 1970 into 2100.
fn instants() -> impl Strategy<Value = Micros> {
    (0..4_100_000_000_000_000_i64).prop_map(Micros)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn every_instant_is_in_exactly_one_period(
        now in instants(),
        name in prop::sample::select(&ZONES[..]),
        week_starts in prop::sample::select(&WEEK_STARTS[..]),
    ) {
        let zone = calendar(name, week_starts);
        for kind in KINDS {
            let period = Period::containing(kind, now, &zone);
            prop_assert!(period.start(&zone) <= now && now < period.end(&zone), "{} {}", period, name);
            for other in [period.previous().unwrap(), period.next().unwrap()] {
                prop_assert!(!(other.start(&zone) <= now && now < other.end(&zone)), "{} {}", other, name);
            }
        }
    }

    #[test]
    fn periods_are_contiguous_and_next_undoes_previous(
        now in instants(),
        name in prop::sample::select(&ZONES[..]),
        week_starts in prop::sample::select(&WEEK_STARTS[..]),
    ) {
        let zone = calendar(name, week_starts);
        for kind in KINDS {
            let period = Period::containing(kind, now, &zone);
            let (before, after) = (period.previous().unwrap(), period.next().unwrap());
            prop_assert_eq!(before.end(&zone), period.start(&zone));
            prop_assert_eq!(period.end(&zone), after.start(&zone));
            prop_assert_eq!(before.next(), Some(period));
            prop_assert_eq!(after.previous(), Some(period));
        }
    }

    #[test]
    fn a_start_lies_in_its_own_period(now in instants(), name in prop::sample::select(&ZONES[..])) {
        let zone = zone(name);
        for kind in KINDS {
            let start = Period::containing(kind, now, &zone).start(&zone).max(Micros(0));
            prop_assert_eq!(Period::containing(kind, start, &zone), Period::containing(kind, now, &zone));
        }
    }

    #[test]
    fn a_periods_text_names_it(now in instants(), name in prop::sample::select(&ZONES[..])) {
        for kind in KINDS {
            let period = Period::containing(kind, now, &zone(name));
            prop_assert_eq!(period.to_string().parse(), Ok(period));
            prop_assert_eq!(period.kind(), kind);
        }
    }

    #[test]
    fn a_closed_period_has_ended_and_its_grace_has_passed(
        now in instants(),
        grace_s in 0..200_000_u64,
        name in prop::sample::select(&ZONES[..]),
    ) {
        let (zone, grace) = (zone(name), Duration::from_secs(grace_s));
        for kind in KINDS {
            let newest = Period::closed(kind, &zone, grace, now).next().unwrap();
            let ended_by = now.before(grace).max(Micros(0));
            prop_assert!(newest.end(&zone) <= ended_by && ended_by < newest.next().unwrap().end(&zone));
        }
    }

    #[test]
    fn no_text_is_too_strange(text in "\\PC{0,12}") {
        if let Ok(period) = text.parse::<Period>() {
            prop_assert_eq!(period.to_string(), text);
        }
    }
}

#[test]
fn all_time_never_ends() {
    for name in ZONES {
        let total = Period::containing(PeriodKind::Total, Micros(1_764_000_000_000_000), &zone(name));
        assert_eq!(total.to_string(), "total");
        assert_eq!("total".parse(), Ok(total));
        assert_eq!((total.start(&zone(name)), total.end(&zone(name))), (Micros(0), Micros::MAX));
        assert_eq!((total.next(), total.previous()), (None, None));
    }
    let closed = Period::closed(PeriodKind::Total, &Calendar::UTC, Duration::ZERO, Micros::MAX).count();
    assert_eq!(closed, 0, "a total period must never close");
}

#[test]
fn the_time_that_is_left_fits_into_its_bits() {
    for name in ZONES {
        let zone = zone(name);
        for day in (0..366 * 4).map(|day| Micros(1_700_000_000_000_000 + day * 86_400_000_000)) {
            for kind in [PeriodKind::Day, PeriodKind::Week, PeriodKind::Month] {
                let period = Period::containing(kind, day, &zone);
                let steps = (period.time_ends_s(&zone) - period.start(&zone).0 / 1_000_000) / kind.step_s();
                assert!(steps < 1 << kind.time_bits(), "{name} {period}: {steps}");
            }
        }
    }
    // Until 2097.
    let steps = (TOTAL_ENDS_S - 1_764_000_000) / PeriodKind::Total.step_s();
    assert!((1..1 << PeriodKind::Total.time_bits()).contains(&steps));
}

#[test]
fn a_pattern_of_sql_fits_each_name_of_its_kind_of_period() {
    let names = ["2026-11-20", "2026-W47", "2026-11", "total"];
    for (kind, name) in KINDS.into_iter().chain([PeriodKind::Total]).zip(names) {
        let fits = |of: &PeriodKind| {
            of.like().len() == name.len()
                && of.like().chars().zip(name.chars()).all(|(one, it)| one == '_' || one == it)
        };
        let fitting: Vec<PeriodKind> = KINDS.into_iter().chain([PeriodKind::Total]).filter(fits).collect();
        assert_eq!(fitting, [kind], "{name}");
    }
}

#[test]
fn the_time_that_is_left_ends_with_the_period_or_in_2097() {
    let ends_s = |name| period(name).time_ends_s(&zone("Asia/Shanghai"));
    assert_eq!(ends_s("2026-11-20") * 1_000_000, at("2026-11-20T16:00:00Z").0);
    assert_eq!(ends_s("total"), TOTAL_ENDS_S);
    let kinds = KINDS.map(|kind| kind.to_string());
    assert_eq!(
        (kinds.each_ref().map(String::as_str), PeriodKind::Total.to_string()),
        (["day", "week", "month"], "total".into())
    );
}
