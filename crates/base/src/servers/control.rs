//! An operator can order the daemons to pause or to throttle a task. Each daemon reads the operators' orders from MySQL
//! once per second. A task checks here whether it is paused.
//!
//! MySQL's clock decides when an order ends. If MySQL does not answer, a daemon continues to follow the orders from its
//! last successful read. The daemon follows each of these orders until the order ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, watch};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use crate::telemetry::telemetry;
use tallyd_core::control::{Command, Order, Task};
use tallyd_mysql::{Store, StoreError};

pub(crate) const READ_EVERY: Duration = Duration::from_secs(1);

/// The current orders. `None` before the first read of MySQL.
type Known = Option<Vec<InForce>>;

#[derive(Clone, Debug)]
struct InForce {
    order: Order,
    until: Instant,
}

#[derive(Clone, Debug)]
pub struct Control {
    known: Arc<watch::Sender<Known>>,
    /// A read of MySQL holds this lock, so that no read overwrites the result of a later read.
    reading: Arc<Mutex<()>>,
}

impl Default for Control {
    fn default() -> Self {
        Self { known: Arc::new(watch::Sender::new(None)), reading: Arc::default() }
    }
}

impl Control {
    pub fn paused(&self, tasks: &[Task]) -> Option<Order> {
        paused(&self.known.borrow(), tasks).map(|it| it.order.clone())
    }

    pub fn allows(&self, tasks: &[Task]) -> bool {
        let known = self.known.borrow();
        known.is_some() && paused(&known, tasks).is_none()
    }

    pub fn targets_per_second(&self) -> Option<u32> {
        let known = self.known.borrow();
        in_force(&known).find_map(|it| match (it.order.task, it.order.command) {
            (Task::Reconcile, Command::Throttle { targets_per_second }) => Some(targets_per_second),
            _ => None,
        })
    }

    pub async fn until_paused(&self, tasks: &[Task]) {
        // `self` owns the sender, so the channel stays open.
        let _ = self.known.subscribe().wait_for(|known| paused(known, tasks).is_some()).await;
    }

    /// Waits until this process has read the operators' orders and no order pauses any task in `tasks`.
    pub async fn until_allowed(&self, tasks: &[Task]) {
        let mut known = self.known.subscribe();
        loop {
            let ends = match &*known.borrow_and_update() {
                None => None,
                it => match paused(it, tasks) {
                    None => return,
                    Some(pause) => Some(pause.until),
                },
            };
            let end = async {
                match ends {
                    Some(end) => tokio::time::sleep_until(end.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = end => {}
                _ = known.changed() => {}
            }
        }
    }

    pub async fn refresh(&self, store: &Store) -> Result<(), StoreError> {
        let _reading = self.reading.lock().await;
        let orders = store.orders().await?;
        let now = Instant::now();
        self.note(orders.into_iter().map(|(order, left)| InForce { order, until: now + left }).collect());
        Ok(())
    }

    /// Reads the operators' orders from MySQL repeatedly, until `stop` is cancelled.
    pub async fn follow(self, store: Store, beat: Heartbeat, stop: CancellationToken) {
        let mut outage = Outage::new("reading the orders of operators");
        while !stop.is_cancelled() {
            match beat.during(self.refresh(&store)).await {
                Ok(()) => outage.over(),
                Err(error) => {
                    outage.failed(&format!("{:#}", anyhow::Error::from(error)));
                    self.end_overdue();
                }
            }
            beat.pause(READ_EVERY, &stop).await;
        }
    }

    /// While MySQL does not answer, this process's clock decides which orders of operators have ended. Removes these
    /// orders.
    fn end_overdue(&self) {
        let Some(mut left) = self.known.borrow().clone() else { return };
        left.retain(|it| it.until > Instant::now());
        self.note(left);
    }

    fn note(&self, orders: Vec<InForce>) {
        let before = self.known.send_replace(Some(orders.clone())).unwrap_or_default();
        let has = |all: &[InForce], one: &InForce| all.iter().any(|it| it.order == one.order);
        // A new order for the task replaced this order, so the task is still paused or throttled.
        let is_replaced = |one: &InForce| {
            let same =
                |it: &InForce| (it.order.task, it.order.command.name()) == (one.order.task, one.order.command.name());
            orders.iter().any(same)
        };
        for it in before.iter().filter(|it| !is_replaced(it)) {
            let (task, command) = (it.order.task.name(), it.order.command.name());
            info!(event = "order-ended", task, command, "{task}: the {command} that an operator ordered has ended");
        }
        for it in orders.iter().filter(|it| !has(&before, it)) {
            let (task, command, by) = (it.order.task.name(), it.order.command.name(), &it.order.by);
            info!(event = "order-begun", task, command, by, "{}", it.order);
        }
        telemetry().ordered(orders.into_iter().map(|it| it.order).collect());
    }
}

fn in_force(known: &Known) -> impl Iterator<Item = &InForce> {
    let now = Instant::now();
    known.iter().flatten().filter(move |it| it.until > now)
}

fn paused<'a>(known: &'a Known, tasks: &[Task]) -> Option<&'a InForce> {
    in_force(known).find(|it| it.order.command == Command::Pause && tasks.contains(&it.order.task))
}

#[cfg(test)]
mod tests {
    use tallyd_core::model::Micros;

    use super::*;

    fn pause(task: Task, lasts: Duration) -> InForce {
        let (since, until) = (Micros(0), Micros(1));
        let order = Order { task, command: Command::Pause, since, until, by: String::new(), reason: String::new() };
        InForce { order, until: Instant::now() + lasts }
    }

    #[tokio::test]
    async fn a_task_waits_until_orders_are_known_and_pause_it_no_more() {
        let control = Control::default();
        assert!(!control.allows(&[Task::Outbox]), "MySQL was not read");
        control.note(vec![pause(Task::Outbox, Duration::from_secs(60))]);
        assert!(control.allows(&[Task::Consumer]) && !control.allows(&[Task::Archive, Task::Outbox]));
        control.until_paused(&[Task::Outbox]).await;
        let waits = tokio::spawn({
            let control = control.clone();
            async move { control.until_allowed(&[Task::Outbox]).await }
        });
        control.note(Vec::new());
        waits.await.unwrap();
    }

    #[tokio::test]
    async fn a_pause_ends_at_its_time_though_mysql_does_not_answer() {
        let control = Control::default();
        control.note(vec![pause(Task::Consumer, Duration::from_millis(50))]);
        assert!(control.paused(&[Task::Consumer]).is_some());
        control.until_allowed(&[Task::Consumer]).await;
        control.end_overdue();
        assert!(control.known.borrow().as_ref().unwrap().is_empty());
    }
}
