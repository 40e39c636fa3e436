//! The handle to the current configuration. A reload replaces the whole configuration (decision 0057).

use std::sync::Arc;

use tokio::sync::watch;

use super::Config;

/// Gives tasks the current configuration. Tasks read the configuration each time they start a piece of work, because a
/// reload can replace the configuration.
#[derive(Clone, Debug)]
pub struct ConfigHandle(watch::Receiver<Arc<Config>>);

impl ConfigHandle {
    pub fn new(config: Config) -> (watch::Sender<Arc<Config>>, Self) {
        let (sender, receiver) = watch::channel(Arc::new(config));
        (sender, Self(receiver))
    }

    pub fn current(&self) -> Arc<Config> {
        Arc::clone(&self.0.borrow())
    }

    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            // The sender is dropped, so the configuration can't change.
            std::future::pending().await
        }
    }

    /// Caches a value that `make` computes from the configuration and that every event needs, for example the rules.
    pub fn derive<T>(&self, make: fn(&Config) -> T) -> Derived<T> {
        let mut receiver = self.0.clone();
        let of = Arc::clone(&receiver.borrow_and_update());
        Derived { receiver, make, made: make(&of), of }
    }
}

pub struct Derived<T> {
    receiver: watch::Receiver<Arc<Config>>,
    make: fn(&Config) -> T,
    of: Arc<Config>,
    made: T,
}

impl<T> Derived<T> {
    /// Returns the current value. If the configuration has not changed, this call only compares a version number.
    pub fn get(&mut self) -> &T {
        // An error means that the sender is dropped. Even then, the last change can still be unread.
        if self.receiver.has_changed().unwrap_or(true) && !Arc::ptr_eq(&self.of, &self.receiver.borrow()) {
            self.of = Arc::clone(&self.receiver.borrow_and_update());
            self.made = (self.make)(&self.of);
        }
        &self.made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_of_the_configuration_follows_it() {
        let (sender, live) = ConfigHandle::new(Config::default());
        let mut bound = live.derive(|config| config.daemon.drain_max_s);
        assert_eq!((*bound.get(), live.current().daemon.drain_max_s), (45, 45));
        let mut next = Config::default();
        next.daemon.drain_max_s = 7;
        sender.send(Arc::new(next)).unwrap();
        assert_eq!((*bound.get(), live.current().daemon.drain_max_s), (7, 7));
        assert_eq!(*live.derive(|config| config.daemon.drain_max_s).get(), 7);
        let mut last = Config::default();
        last.daemon.drain_max_s = 9;
        sender.send(Arc::new(last)).unwrap();
        drop(sender);
        assert_eq!(
            (*bound.get(), live.current().daemon.drain_max_s),
            (9, 9),
            "the last configuration before the sender was dropped"
        );
        assert_eq!(*bound.get(), 9);
    }
}
