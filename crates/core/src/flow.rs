//! Decides what a session with the broker does next: which message joins the open batch, when the batch is written, when
//! messages are acknowledged, and when the session ends. Pure: no I/O, no clock.
//!
//! There are at most two batches: the open one, and the one that is written. Messages are acknowledged after their
//! batch is committed. At the end of a session all received messages are written, and only then acknowledged: the
//! broker delivers more messages after each acknowledgement, and counts each message that is returned. Only messages that
//! were returned often are returned once more, because each of them would need an acknowledgement of its own.

use std::collections::VecDeque;

use crate::prefetch::{Limits, Prefetch, portion};

pub trait Message {
    fn returns(&self) -> i64;
    fn bytes(&self) -> usize;
}

#[derive(Debug)]
pub enum Step<M, T> {
    Join(M),
    Write,
    /// Acknowledges all messages that are committed. The tag is that of the last one.
    Acknowledge(T),
    Close,
}

/// The messages of a session, from their arrival to their acknowledgement. `T` is the tag of a message, which acknowledges
/// it and all messages before it.
#[derive(Debug)]
pub struct Flow<M, T> {
    prefetch: Prefetch,
    limits: Limits,
    inbox: VecDeque<(M, T)>,
    inbox_bytes: usize,
    open: usize,
    writing: usize,
    committed: usize,
    open_returns: i64,
    open_last: Option<T>,
    writing_last: Option<T>,
    committed_last: Option<T>,
    is_ending: bool,
    is_behind: bool,
}

impl<M: Message, T> Flow<M, T> {
    pub fn new(prefetch: Prefetch, limits: Limits) -> Self {
        Self {
            prefetch,
            limits,
            inbox: VecDeque::new(),
            inbox_bytes: 0,
            open: 0,
            writing: 0,
            committed: 0,
            open_returns: 0,
            open_last: None,
            writing_last: None,
            committed_last: None,
            is_ending: false,
            is_behind: false,
        }
    }

    pub fn close(&mut self) -> Prefetch {
        self.inbox = VecDeque::new();
        std::mem::take(&mut self.prefetch)
    }

    /// Returns the bytes of all messages that wait, if they are too many because the messages are much larger than the
    /// prefetch assumed. The session must then fail.
    pub fn received(&mut self, message: M, tag: T) -> Result<(), usize> {
        self.inbox_bytes += message.bytes();
        self.inbox.push_back((message, tag));
        let sizes = self.inbox.iter().map(|(message, _)| message.bytes());
        let is_overfull = self.prefetch.is_overfull(self.inbox_bytes, self.limits, sizes);
        if is_overfull { Err(self.inbox_bytes) } else { Ok(()) }
    }

    pub fn committed(&mut self) {
        self.committed_last = self.writing_last.take().or(self.committed_last.take());
        self.committed += std::mem::take(&mut self.writing);
    }

    /// The session must end once it has written what it has received.
    pub fn end(&mut self) {
        self.is_ending = true;
    }

    pub fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// Whether more messages waited when the last batch was written, here or in the queue.
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    pub fn is_writing(&self) -> bool {
        self.writing_last.is_some()
    }

    pub fn failed(&mut self) -> Option<T> {
        self.committed_last.take()
    }

    pub fn waiting(&self) -> usize {
        self.inbox.len()
    }

    /// The caller does this step before the next call. `is_full`: the open batch takes no other message.
    /// `has_lingered`: it need not wait for more. It never waits for a message that can't come before it is acknowledged.
    pub fn next(&mut self, is_full: bool, has_lingered: impl FnOnce() -> bool) -> Option<Step<M, T>> {
        if !is_full && let Some(message) = self.joining() {
            return Some(Step::Join(message));
        }
        let is_idle = self.writing_last.is_none();
        // The next message can join neither this batch nor, after an acknowledgement, another one.
        let is_blocked = !self.inbox.is_empty() && self.committed_last.is_none();
        let must_go = is_full || self.is_ending || is_blocked || self.prefetch.is_used_up(self.open);
        if is_idle && self.open_last.is_some() && (must_go || has_lingered()) {
            self.writing_last = self.open_last.take();
            let unacknowledged = self.open + self.committed;
            let is_all_sent = self.prefetch.is_used_up(unacknowledged) && !self.prefetch.is_lowest();
            self.is_behind = is_all_sent || !self.inbox.is_empty();
            (self.writing, self.open, self.open_returns) = (self.open, 0, 0);
            return Some(Step::Write);
        }
        let is_last = is_idle && self.open_last.is_none();
        // The writer does not wait for an acknowledgement.
        if (is_last || !self.is_ending)
            && let Some(tag) = self.committed_last.take()
        {
            self.committed = 0;
            return Some(Step::Acknowledge(tag));
        }
        (self.is_ending && is_last).then_some(Step::Close)
    }

    /// Takes the next message if it can be written together with the open batch. Before a message that may crash the
    /// daemon is decoded, the messages before it are acknowledged.
    fn joining(&mut self) -> Option<M> {
        let returns = self.open_returns.max(self.inbox.front()?.0.returns());
        let portion = portion(returns);
        let is_acknowledged = self.writing_last.is_none() && self.committed_last.is_none();
        let may_join = is_acknowledged && !self.is_ending && self.open < usize::from(portion);
        if portion < u16::MAX && !may_join {
            return None;
        }
        let (message, tag) = self.inbox.pop_front()?;
        self.inbox_bytes -= message.bytes();
        (self.open, self.open_returns) = (self.open + 1, returns);
        self.open_last = Some(tag);
        self.prefetch.note(message.returns(), message.bytes());
        self.is_ending |= self.prefetch.is_off(self.limits);
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Seen(i64);

    impl Message for Seen {
        fn returns(&self) -> i64 {
            self.0
        }

        fn bytes(&self) -> usize {
            100
        }
    }

    /// A session that may hold `messages` messages, with messages that were returned so often. All that can have joined
    /// the open batch.
    fn flow(messages: u16, returns: &[i64]) -> Flow<Seen, usize> {
        let limits = Limits { messages, bytes: 1 << 25 };
        let mut prefetch = Prefetch::default();
        prefetch.note(0, 100);
        assert_eq!(prefetch.begin(limits), messages);
        let mut flow = Flow::new(prefetch, limits);
        for (tag, returns) in returns.iter().enumerate() {
            flow.received(Seen(*returns), tag).unwrap();
        }
        while flow.joining().is_some() {}
        flow
    }

    #[test]
    fn a_batch_waits_only_for_messages_that_can_come_before_it() {
        let next = |messages, returns: &[i64]| flow(messages, returns).next(false, || false);
        assert!(next(3, &[0, 0]).is_none(), "a third message can come");
        assert!(matches!(next(2, &[0, 0]), Some(Step::Write)), "the broker sends no third message");
        assert!(matches!(next(9, &[0, 11]), Some(Step::Write)), "the second message is written alone");
    }

    #[test]
    fn an_acknowledgement_that_lets_a_message_join_comes_first() {
        let mut flow = flow(9, &[0]);
        assert!(matches!(flow.next(false, || true), Some(Step::Write)));
        flow.committed();
        flow.received(Seen(0), 1).unwrap();
        flow.received(Seen(6), 2).unwrap();
        assert!(matches!(flow.next(false, || false), Some(Step::Join(Seen(0)))));
        assert!(matches!(flow.next(false, || false), Some(Step::Acknowledge(0))));
        assert!(matches!(flow.next(false, || false), Some(Step::Join(Seen(6)))));
        assert!(flow.next(false, || false).is_none());
    }

    #[test]
    fn a_full_batch_goes_although_more_messages_can_come() {
        let mut flow = flow(9, &[0, 0]);
        assert_eq!(flow.waiting(), 0);
        flow.received(Seen(0), 2).unwrap();
        assert!(flow.waiting() == 1 && !flow.is_writing());
        assert!(matches!(flow.next(true, || false), Some(Step::Write)));
        assert!(flow.waiting() == 1 && flow.is_writing(), "the third message is of the next batch");
        flow.committed();
        assert!(!flow.is_writing());
    }

    #[test]
    fn a_session_is_behind_if_more_messages_wait_than_a_batch_has() {
        let is_behind = |messages, returns: &[i64], is_full| {
            let mut flow = flow(messages, returns);
            if is_full {
                flow.received(Seen(0), 9).unwrap();
            }
            assert!(!flow.is_behind() && matches!(flow.next(is_full, || true), Some(Step::Write)));
            flow.is_behind()
        };
        assert!(!is_behind(9, &[0, 0], false));
        assert!(is_behind(9, &[0, 0], true), "the third message is of the next batch");
        assert!(is_behind(3, &[0, 0, 0], false), "the broker sends no fourth message");
        assert!(!is_behind(2, &[0, 0], false), "a prefetch of two says nothing about the queue");
        assert!(is_behind(9, &[0, 11], false), "the second message is written alone");
    }

    #[test]
    fn a_session_is_behind_while_the_broker_may_send_no_more_messages() {
        let mut flow = flow(4, &[0, 0]);
        for is_behind in [false, true, true] {
            assert!(matches!(flow.next(true, || false), Some(Step::Write)));
            assert_eq!(flow.is_behind(), is_behind);
            flow.committed();
            (0..2).for_each(|tag| flow.received(Seen(0), tag).unwrap());
            for _ in 0..2 {
                assert!(matches!(flow.next(false, || false), Some(Step::Join(_))));
            }
        }
        assert!(matches!(flow.next(false, || false), Some(Step::Acknowledge(_))));
        assert!(matches!(flow.next(true, || false), Some(Step::Write)));
        assert!(!flow.is_behind(), "all messages before are acknowledged");
    }

    #[test]
    fn a_session_that_must_end_writes_acknowledges_and_closes() {
        let mut flow = flow(9, &[0, 0]);
        assert!(!flow.is_ending() && flow.next(false, || false).is_none());
        flow.end();
        assert!(flow.is_ending());
        assert!(matches!(flow.next(false, || false), Some(Step::Write)));
        assert!(flow.next(false, || false).is_none(), "the batch is not committed yet");
        flow.committed();
        assert!(matches!(flow.next(false, || false), Some(Step::Acknowledge(1))));
        assert!(matches!(flow.next(false, || false), Some(Step::Close)));
    }

    #[test]
    fn a_session_that_fails_acknowledges_what_is_committed() {
        let mut flow = flow(9, &[0]);
        assert!(flow.next(false, || true).is_some() && flow.failed().is_none());
        flow.committed();
        assert_eq!((flow.failed(), flow.failed()), (Some(0), None));
        assert!(flow.next(false, || true).is_none(), "an idle session neither writes nor closes");
    }

    #[test]
    fn a_session_ends_for_another_prefetch_once_it_has_seen_enough() {
        let limits = Limits { messages: 9, bytes: 1 << 25 };
        let mut prefetch = Prefetch::default();
        assert_eq!(prefetch.begin(limits), 1);
        let mut flow = Flow::new(prefetch, limits);
        for tag in 0..10 {
            assert!(!flow.is_ending());
            flow.received(Seen(0), tag).unwrap();
            assert!(flow.joining().is_some());
        }
        assert!(flow.is_ending());
    }

    #[test]
    fn only_messages_that_wait_count_as_bytes() {
        let limits = Limits { messages: 9, bytes: 500 };
        let mut flow: Flow<Seen, u32> = Flow::new(flow(9, &[]).close(), limits);
        for tag in 0..10 {
            flow.received(Seen(0), tag).unwrap();
        }
        assert!((0..4).all(|_| flow.joining().is_some()));
        for tag in 10..14 {
            flow.received(Seen(0), tag).unwrap();
        }
        assert_eq!(flow.received(Seen(0), 14), Err(1_100), "six of the first ten and five");
    }
}
