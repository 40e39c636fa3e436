//! An error with its causes, in one line.

use std::error::Error;
use std::fmt;

pub struct Chain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.0, f)?;
        let mut next = self.0.source();
        while let Some(cause) = next {
            write!(f, ": {cause}")?;
            next = cause.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failure {
        #[error("no answer")]
        Cause,
        #[error("connect")]
        Connect(#[source] Box<Failure>),
    }

    #[test]
    fn an_error_is_written_with_all_of_its_causes() {
        let error = Failure::Connect(Box::new(Failure::Connect(Box::new(Failure::Cause))));
        assert_eq!(Chain(&error).to_string(), "connect: connect: no answer");
    }
}
