use tallyd_core::event::{EventId, LikeEvent, encode_count, encode_like};
use tallyd_core::model::{Kind, Metric, Target, TargetId, UserId};

use super::boards::{HOT, PAST, SEEN};
use super::letters::mark;
use super::numbers::VIEW;
use super::*;
use crate::history::{Answer, Loses, Window, event_id, period};

const UNREAD: u8 = 4;

const S: Micros = 1_000_000;

/// Calls that the broker confirmed, and the state to which these calls must lead.
struct Story {
    history: History,
    state: State,
    now: Micros,
}

impl Story {
    /// Makes a history of a quarter of an hour without faults.
    fn new() -> Self {
        let mut story = Self { history: History::default(), state: State::default(), now: 1_795_000_000 * S };
        for round in 0..40_u64 {
            let (target, user) = (1 + round % 3, 1 + round % 5);
            story.like(target, user, round % 7 != 0, None);
            story.count(target, VIEW, 2, round, None);
            story.count(target, UNREAD, 1, 1_000 + round, None);
            if round % 11 == 5 {
                story.set(target, UNREAD, 3);
            }
            story.gain(1 + round % 4, None);
            story.late(20_000, 1 + round % 6);
            story.letter(round);
        }
        story.settle();
        story
    }

    fn call(&mut self, what: What, answer: Option<Answer>) -> Micros {
        self.now += S;
        let at = self.now;
        let answer = answer.unwrap_or(Answer::Done { at });
        self.history.calls.push(Call { begin: at - S / 100, end: at + S / 100, who: 1, what, answer });
        at
    }

    fn like(&mut self, target: u64, user: u64, liked: bool, answer: Option<Answer>) {
        let is_lost = answer.is_some();
        let at = self.call(What::Like { target, user, liked }, answer);
        if !is_lost {
            self.state.rows.insert((target, user), (at, liked));
        }
    }

    fn count(&mut self, target: u64, metric: u8, delta: i64, event: u64, answer: Option<Answer>) {
        let is_lost = answer.is_some();
        let at = self.call(What::Add { target, metric, delta, event }, answer);
        if !is_lost {
            self.state.ledger.insert(key(target, metric, event, at));
            *self.state.counters.entry((target, metric)).or_default() += delta;
            if metric == VIEW {
                for period in ["total", "2026-11-22"] {
                    *self.state.boards.entry(board(SEEN, period)).or_default().entry(target).or_default() += delta;
                }
            }
        }
    }

    fn set(&mut self, target: u64, metric: u8, value: i64) {
        let at = self.call(What::Set { target, metric, value }, None);
        self.state.sets.insert((target, metric), (at, value));
        self.state.counters.insert((target, metric), value);
    }

    fn gain(&mut self, member: u64, answer: Option<Answer>) {
        self.call(What::Gain { member, delta: 1 }, answer);
        for period in ["total", "2026-11-22"] {
            *self.state.boards.entry(board(HOT, period)).or_default().entry(member).or_default() += 1;
        }
    }

    fn late(&mut self, day: i32, member: u64) {
        self.call(What::Late { day, member, delta: 1 }, None);
        *self.state.frozen.entry(board(PAST, &period(day))).or_default().entry(member).or_default() += 1;
    }

    fn letter(&mut self, letter: u64) {
        self.call(What::Letter { letter, reason: "malformed-json" }, None);
        let body = format!("{{ {}", mark(letter));
        let letter = Letter { body, reason: "malformed-json".to_owned(), is_replayed: false };
        self.state.letters.push(letter);
    }

    /// Calculates three parts of the state from its other parts. These three parts are the counters, Redis's copy of
    /// the counters, and the archives.
    fn settle(&mut self) {
        for ((target, _), (_, liked)) in &self.state.rows {
            *self.state.counters.entry((*target, LIKE)).or_default() += i64::from(*liked);
        }
        self.state.redis = self.state.counters.clone();
        for (key, scores) in &self.state.frozen {
            let mut places: Vec<(u64, i64)> = scores.iter().map(|(member, score)| (*member, *score)).collect();
            places.sort_by_key(|(member, score)| (-score, *member));
            let archive = Archive { state: "done".to_owned(), places, is_gapless: true };
            self.state.archives.insert(key.clone(), archive);
        }
    }

    fn verdict(&self) -> Vec<(Class, About)> {
        check(&self.history, &self.state).into_iter().map(|found| (found.class, found.about)).collect()
    }

    fn window(&mut self, loses: Loses) {
        let (begin, end) = (self.now - 2 * S, self.now);
        let window = Window { fault: "a fault", begin, end, loses, loses_since: begin, loses_until: end };
        self.history.windows.push(window);
    }
}

fn key(target: u64, metric: u8, event: u64, at: Micros) -> (i64, [u8; 16]) {
    let of = Target { kind: Kind(1), id: TargetId(target) };
    (at / S, EventId::of(of, Metric(metric), &event_id(event)).0)
}

fn board(name: &str, period: &str) -> (String, String) {
    (name.to_owned(), period.to_owned())
}

#[test]
fn an_orderly_site_breaks_no_promise() {
    assert_eq!(Story::new().verdict(), []);
}

#[test]
fn a_row_that_is_gone_is_lost_with_its_like() {
    let mut story = Story::new();
    let pair = (2, 2);
    assert!(story.state.rows.remove(&pair).unwrap().1);
    let (target, user) = pair;
    assert_eq!(
        story.verdict(),
        [(Class::Lost, About::Pair { target, user }), (Class::Doubled, About::Likes { target })]
    );
}

#[test]
fn a_row_of_an_older_event_is_reordered() {
    let mut story = Story::new();
    let older = story.state.rows[&(1, 1)];
    story.like(1, 1, older.1, None);
    story.state.rows.insert((1, 1), older);
    assert_eq!(story.verdict(), [(Class::Reordered, About::Pair { target: 1, user: 1 })]);
}

#[test]
fn a_row_that_nobody_has_sent_is_invented() {
    let mut story = Story::new();
    story.state.rows.insert((3, 77), (story.now, false));
    assert_eq!(story.verdict(), [(Class::Invented, About::Pair { target: 3, user: 77 })]);
    // Only the `at` of this row is wrong.
    let mut story = Story::new();
    story.state.rows.get_mut(&(1, 1)).unwrap().0 += 1;
    assert_eq!(story.verdict(), [(Class::Invented, About::Pair { target: 1, user: 1 })]);
}

#[test]
fn a_counter_that_is_not_its_rows_and_a_redis_that_is_not_the_counter_are_found() {
    let mut story = Story::new();
    *story.state.counters.get_mut(&(1, LIKE)).unwrap() += 1;
    story.state.redis = story.state.counters.clone();
    assert_eq!(story.verdict(), [(Class::Doubled, About::Likes { target: 1 })]);
    let mut story = Story::new();
    *story.state.redis.get_mut(&(1, LIKE)).unwrap() -= 1;
    assert_eq!(story.verdict(), [(Class::Lost, About::Likes { target: 1 })]);
    let mut story = Story::new();
    story.state.redis.insert((99, UNREAD), 1);
    assert_eq!(story.verdict(), [(Class::Doubled, About::Number { target: 99, metric: UNREAD })]);
}

#[test]
fn a_count_that_was_added_twice_or_not_at_all_is_found() {
    let mut story = Story::new();
    for numbers in [&mut story.state.counters, &mut story.state.redis] {
        *numbers.get_mut(&(2, VIEW)).unwrap() += 2;
    }
    assert_eq!(story.verdict(), [(Class::Doubled, About::Number { target: 2, metric: VIEW })]);

    let mut story = Story::new();
    let call = story.history.calls.iter().find(|call| matches!(call.what, What::Add { event: 1_007, .. })).unwrap();
    let (What::Add { target, metric, .. }, Answer::Done { at }) = (call.what, call.answer) else { panic!() };
    assert!(story.state.ledger.remove(&key(target, metric, 1_007, at)));
    let found = story.verdict();
    assert_eq!(found[0], (Class::Lost, About::Event { event: 1_007 }));

    let mut story = Story::new();
    story.state.ledger.insert((5, [7; 16]));
    assert_eq!(story.verdict(), [(Class::Invented, About::Nothing)]);
}

#[test]
fn a_client_that_reads_no_views_after_there_were_some_is_found() {
    let reads_zero = |story: &mut Story, target| story.call(What::Zero { target }, Some(Answer::Done { at: 0 }));
    let mut story = Story::new();
    reads_zero(&mut story, 1);
    assert_eq!(story.verdict(), [(Class::Lost, About::Views { target: 1 })]);
    story.window(Loses::Tables);
    assert_eq!(story.verdict(), []);

    let mut story = Story::new();
    story.count(9, VIEW, 2, 2_000, None);
    story.state.redis = story.state.counters.clone();
    reads_zero(&mut story, 9);
    assert_eq!(story.verdict(), [], "the view can be in flight");
}

#[test]
fn a_number_that_an_older_set_decides_is_reordered() {
    let mut story = Story::new();
    let older = story.state.sets[&(1, UNREAD)];
    story.set(1, UNREAD, 9);
    story.state.sets.insert((1, UNREAD), older);
    let found = story.verdict();
    assert_eq!(found[0], (Class::Reordered, About::Number { target: 1, metric: UNREAD }));
}

#[test]
fn a_member_that_is_missing_or_counts_twice_on_a_board_is_found() {
    let mut story = Story::new();
    story.state.boards.get_mut(&board(HOT, "total")).unwrap().remove(&2);
    assert_eq!(story.verdict(), [(Class::Lost, About::Gain { member: 2 })]);
    let mut story = Story::new();
    *story.state.boards.get_mut(&board(SEEN, "2026-11-22")).unwrap().get_mut(&2).unwrap() += 2;
    assert_eq!(story.verdict(), [(Class::Doubled, About::Views { target: 2 })]);
}

#[test]
fn an_archive_that_lacks_a_member_or_its_order_or_its_end_is_found() {
    let key = board(PAST, &period(20_000));
    let day = 20_000;
    let mut story = Story::new();
    let archive = story.state.archives.get_mut(&key).unwrap();
    archive.places.pop();
    let found = story.verdict();
    assert!(matches!(
        found[..],
        [(Class::Lost, About::Late { member: Some(_), .. }), (Class::Lost, About::Late { member: None, .. })]
    ));

    let mut story = Story::new();
    story.state.archives.get_mut(&key).unwrap().places.reverse();
    assert_eq!(story.verdict(), [(Class::Reordered, About::Late { day, member: None })]);

    let mut story = Story::new();
    story.state.archives.get_mut(&key).unwrap().state = "frozen".to_owned();
    assert_eq!(story.verdict(), [(Class::Lost, About::Late { day, member: None })]);

    let mut story = Story::new();
    let archive = story.state.archives[&key].clone();
    story.state.archives.insert((PAST.to_owned(), period(day + 1)), archive);
    assert_eq!(story.verdict(), [(Class::Invented, About::Late { day: day + 1, member: None })]);

    let mut story = Story::new();
    story.state.boards.entry(key).or_default().insert(1, 1);
    assert_eq!(story.verdict(), [(Class::Lost, About::Late { day, member: None })]);
}

#[test]
fn a_dead_letter_that_is_missing_twice_or_of_nobody_is_found() {
    let mut story = Story::new();
    let letter = story.state.letters.remove(3);
    assert_eq!(story.verdict(), [(Class::Lost, About::Letter { letter: Some(3) })]);
    story.state.letters.extend([letter.clone(), letter]);
    assert_eq!(story.verdict(), [(Class::Doubled, About::Letter { letter: Some(3) })]);
    let mut story = Story::new();
    story.state.letters.push(Letter { body: "{}".to_owned(), reason: "at-in-future".to_owned(), is_replayed: false });
    assert_eq!(story.verdict(), [(Class::Invented, About::Letter { letter: None })]);
    // A daemon with a wrong clock rejected the event, so the operator replayed the event.
    story.state.letters.last_mut().unwrap().is_replayed = true;
    assert_eq!(story.verdict(), [(Class::Invented, About::Letter { letter: None })]);
    let window =
        Window { fault: "clock-stepped", begin: 0, end: 1, loses: Loses::Nothing, loses_since: 0, loses_until: 1 };
    story.history.windows.push(window);
    assert_eq!(story.verdict(), []);
    // The broker may dead-letter this message only if a fault of the run can cause that.
    story.state.letters[3].reason = "returned-by-broker".to_owned();
    assert_eq!(story.verdict(), [(Class::Invented, About::Letter { letter: Some(3) })]);
    story.history.windows.push(Window { fault: "twenty-five-deaths", ..window });
    assert_eq!(story.verdict(), []);
}

#[test]
fn what_was_not_confirmed_may_be_there_or_not_and_what_was_not_published_may_not() {
    for is_there in [false, true] {
        let mut story = Story::new();
        let at = story.now + S;
        story.like(1, 1, false, Some(Answer::NotConfirmed { at }));
        story.count(1, VIEW, 2, 9_000, Some(Answer::NotConfirmed { at: at + S }));
        if is_there {
            let before = story.state.rows.insert((1, 1), (at, false)).unwrap();
            for numbers in [&mut story.state.counters, &mut story.state.redis] {
                *numbers.get_mut(&(1, LIKE)).unwrap() -= i64::from(before.1);
                *numbers.get_mut(&(1, VIEW)).unwrap() += 2;
            }
            story.state.ledger.insert(key(1, VIEW, 9_000, at + S));
            for period in ["total", "2026-11-22"] {
                *story.state.boards.get_mut(&board(SEEN, period)).unwrap().get_mut(&1).unwrap() += 2;
            }
        }
        assert_eq!(story.verdict(), [], "{is_there}");
    }
    let mut story = Story::new();
    story.like(3, 50, true, Some(Answer::NotCounted));
    assert_eq!(story.verdict(), []);
    story.state.rows.insert((3, 50), (story.now, false));
    assert_eq!(story.verdict(), [(Class::Invented, About::Pair { target: 3, user: 50 })]);
}

#[test]
fn what_was_late_counts_once_whatever_redis_went_through() {
    let mut story = Story::new();
    let (key, day) = (board(PAST, &period(20_000)), 20_000);
    let places = &mut story.state.archives.get_mut(&key).unwrap().places;
    let (member, before) = places[0];
    places[0].1 = before * 2;
    story.state.frozen.remove(&key);
    for fault in ["redis-flushed", "redis-failover"] {
        let (begin, end) = (story.now - 10_000 * S, story.now + S);
        let loses = Loses::Boards;
        story.history.windows = vec![Window { fault, begin, end, loses, loses_since: begin, loses_until: end }];
        assert_eq!(story.verdict(), [(Class::Doubled, About::Late { day, member: Some(member) })], "{fault}");
    }
}

#[test]
fn a_window_excuses_what_it_may_lose_and_nothing_else() {
    let mut story = Story::new();
    story.like(3, 50, true, None);
    story.state.rows.remove(&(3, 50));
    story.window(Loses::Boards);
    assert_eq!(story.verdict(), [(Class::Lost, About::Pair { target: 3, user: 50 })]);
    story.window(Loses::Queued);
    assert_eq!(story.verdict(), []);
    story.gain(4, None);
    story.state.boards.get_mut(&board(HOT, "total")).unwrap().insert(4, 10);
    story.window(Loses::Queued);
    assert_eq!(story.verdict(), [(Class::Lost, About::Gain { member: 4 })]);
    story.window(Loses::Boards);
    assert_eq!(story.verdict(), []);
    // No rule named the board of this view.
    let mut story = Story::new();
    story.count(1, VIEW, 2, 9_000, None);
    *story.state.redis.get_mut(&(1, VIEW)).unwrap() += 2;
    *story.state.boards.get_mut(&board(SEEN, "total")).unwrap().get_mut(&1).unwrap() -= 2;
    assert_eq!(story.verdict(), [(Class::Lost, About::Views { target: 1 })]);
    story.window(Loses::BoardOfViews);
    assert_eq!(story.verdict(), []);
}

/// Returns a dead letter whose body is the client's event for this like.
fn ahead_letter(target: u64, user: u64, at: Micros) -> Letter {
    let of = Target { kind: Kind(1), id: TargetId(target) };
    let event = LikeEvent { target: of, user: UserId(user), liked: true, at: tallyd_core::model::Micros(at) };
    let body = String::from_utf8(encode_like(&event, "video", None)).unwrap();
    Letter { body, reason: "at-in-future".to_owned(), is_replayed: false }
}

#[test]
fn an_event_that_is_ahead_waits_as_a_letter_or_is_lost() {
    let pair = About::Pair { target: 3, user: 50 };
    let stray = (Class::Invented, About::Letter { letter: None });
    let mut story = Story::new();
    let at = story.now + 3_600 * S;
    story.window(Loses::Ahead);
    story.like(3, 50, true, Some(Answer::Done { at }));
    assert_eq!(story.verdict(), [(Class::Lost, pair.clone())]);
    story.state.letters.push(ahead_letter(3, 50, at));
    assert_eq!(story.verdict(), []);
    // The broker redelivered the event too often before a daemon checked it.
    story.state.letters.last_mut().unwrap().reason = "returned-by-broker".to_owned();
    assert_eq!(story.verdict(), []);
    // In the first case, the event in the dead letter is not the event that the user sent. In the second case, the user
    // sent the event before a fault set the clock ahead.
    story.state.letters.push(ahead_letter(3, 50, at + 1));
    assert_eq!(story.verdict(), std::slice::from_ref(&stray));
    story.state.letters.pop();
    story.history.windows[0].begin = story.now + S;
    assert_eq!(story.verdict(), [(Class::Lost, pair.clone()), stray.clone()]);
    // The daemon dead-letters an event for this reason only if the event's `at` is ahead of the clock.
    let mut story = Story::new();
    story.window(Loses::Ahead);
    let at = story.now + S;
    story.like(3, 50, true, Some(Answer::Done { at }));
    story.state.letters.push(ahead_letter(3, 50, at));
    assert_eq!(story.verdict(), [(Class::Lost, pair), stray]);
}

#[test]
fn a_count_that_is_ahead_waits_as_a_letter_or_is_lost() {
    let mut story = Story::new();
    let at = story.now + 3_600 * S;
    story.window(Loses::Ahead);
    story.count(1, VIEW, 2, 9_000, Some(Answer::Done { at }));
    assert_eq!(story.verdict(), [(Class::Lost, About::Event { event: 9_000 })]);
    let names = ("video", "view");
    let body = encode_count(TargetId(1), names, 2, tallyd_core::model::Micros(at), &event_id(9_000), None);
    let body = String::from_utf8(body).unwrap();
    story.state.letters.push(Letter { body, reason: "at-in-future".to_owned(), is_replayed: false });
    assert_eq!(story.verdict(), []);
    // The checker accepts only the reasons that a wrong clock can cause.
    story.state.letters.last_mut().unwrap().reason = "unknown-metric".to_owned();
    assert_eq!(
        story.verdict(),
        [(Class::Lost, About::Event { event: 9_000 }), (Class::Invented, About::Letter { letter: None })]
    );
}

#[test]
fn what_mysql_got_after_its_copy_may_be_gone_and_nothing_else() {
    let mut story = Story::new();
    story.like(3, 50, true, None);
    story.count(1, VIEW, 2, 9_000, None);
    story.state.rows.remove(&(3, 50));
    let (what, answer) =
        (What::Add { target: 1, metric: VIEW, delta: 2, event: 9_000 }, Answer::Done { at: story.now });
    assert!(story.state.ledger.remove(&key(1, VIEW, 9_000, story.now)));
    // The count never reached Redis.
    *story.state.counters.get_mut(&(1, VIEW)).unwrap() -= 2;
    let at = story.now;
    assert!(story.verdict().contains(&(Class::Lost, About::Pair { target: 3, user: 50 })));
    story.window(Loses::Tables);
    assert_eq!(story.verdict(), []);
    // The view is sent a second time, so the board may count the view twice. If the board counts the view three times,
    // the checker must report a violation.
    story.history.calls.push(Call { begin: at + S, end: at + S, who: 1, what, answer });
    story.state.ledger.insert(key(1, VIEW, 9_000, at));
    for numbers in [&mut story.state.counters, &mut story.state.redis] {
        *numbers.get_mut(&(1, VIEW)).unwrap() += 2;
    }
    let add = |story: &mut Story| {
        for period in ["total", "2026-11-22"] {
            *story.state.boards.get_mut(&board(SEEN, period)).unwrap().get_mut(&1).unwrap() += 2;
        }
    };
    add(&mut story);
    assert_eq!(story.verdict(), []);
    add(&mut story);
    assert_eq!(
        story.verdict(),
        [(Class::Doubled, About::Views { target: 1 }), (Class::Doubled, About::Views { target: 1 })]
    );
    // This event was stored before the copy was taken.
    let mut story = Story::new();
    assert!(story.state.rows.remove(&(2, 2)).unwrap().1);
    story.now += 10 * S;
    story.window(Loses::Tables);
    assert!(story.verdict().contains(&(Class::Lost, About::Pair { target: 2, user: 2 })));
}
