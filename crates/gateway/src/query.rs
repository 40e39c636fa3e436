//! Parses the parameters of a request, and the ids in them. Pure.

use std::borrow::Cow;

use super::answer::{Answer, Refused};
use tallyd_core::event::ID_MAX;

pub(super) const IDS_MAX: usize = 500;

pub(super) struct Query<'a, const N: usize> {
    names: [&'static str; N],
    values: [Option<Cow<'a, str>>; N],
}

impl<'a, const N: usize> Query<'a, N> {
    pub(super) fn parse(query: Option<&'a str>, names: [&'static str; N]) -> Answer<Self> {
        let mut values = [const { None }; N];
        for (name, value) in url::form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
            let known = names.iter().zip(&mut values).find(|(known, _)| **known == name);
            let Some((_, slot)) = known else {
                let message = format!("the parameter {name} is unknown: allowed are {}", names.join(", "));
                return Err(Refused::bad("unknown-parameter", message));
            };
            if slot.replace(value).is_some() {
                return Err(Refused::bad(
                    "repeated-parameter",
                    format!("the parameter {name} was sent twice: send it once"),
                ));
            }
        }
        Ok(Self { names, values })
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let found = self.names.iter().zip(&self.values).find(|(known, _)| **known == name);
        found.and_then(|(_, value)| value.as_deref())
    }

    pub(super) fn must(&self, name: &str) -> Answer<&str> {
        let missing = || Refused::bad("missing-parameter", format!("the parameter {name} is missing"));
        self.get(name).ok_or_else(missing)
    }

    pub(super) fn number(&self, name: &str, default: u64, max: u64) -> Answer<u64> {
        let Some(text) = self.get(name) else { return Ok(default) };
        let number = text.parse().ok().filter(|number| (1..=max).contains(number));
        number.ok_or_else(|| Refused::bad("out-of-range", format!("{name} is {text:?}, allowed are 1 to {max}")))
    }

    pub(super) fn ids(&self) -> Answer<Vec<u64>> {
        let ids: Vec<u64> = self.must("ids")?.split(',').map(|text| id("ids", text)).collect::<Answer<_>>()?;
        if ids.len() > IDS_MAX {
            let message = format!("ids has {} ids, at most {IDS_MAX} are allowed", ids.len());
            return Err(Refused::bad("too-many-ids", message));
        }
        Ok(ids)
    }
}

/// Parses an id: digits without sign, space or leading zero.
pub(super) fn id(name: &str, text: &str) -> Answer<u64> {
    let digits = !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && (1..=ID_MAX).contains(number));
    number.ok_or_else(|| {
        let text: String = text.chars().take(40).collect();
        Refused::bad("id-out-of-range", format!("{name} has {text:?}, allowed are integers, 1 to {ID_MAX}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(query: &str) -> Answer<Query<'_, 2>> {
        Query::parse(Some(query), ["ids", "top"])
    }

    fn code<T>(answer: Answer<T>) -> String {
        let response = axum::response::Response::from(answer.err().unwrap());
        response.status().as_u16().to_string()
    }

    #[test]
    fn a_parameter_is_known_and_there_once() {
        assert_eq!(parsed("ids=1%2C2&top=3").unwrap().ids().unwrap(), [1, 2]);
        assert_eq!(parsed("").unwrap().get("ids"), None);
        assert!(parsed("id=1").is_err() && parsed("ids=1&ids=2").is_err());
        assert_eq!(code(parsed("").unwrap().ids()), "400");
    }

    #[test]
    fn ids_are_the_decoders_and_not_too_many() {
        let ids = |text: &str| parsed(&format!("ids={text}")).unwrap().ids();
        assert_eq!(ids("9223372036854775807").unwrap(), [ID_MAX]);
        for wrong in ["", "0", "01", "-1", "+1", "1,", "1.5", "9223372036854775808", "x", "1,%202"] {
            assert!(ids(wrong).is_err(), "{wrong}");
        }
        let many = |count: usize| vec!["7"; count].join(",");
        assert_eq!(ids(&many(500)).unwrap().len(), 500);
        assert!(ids(&many(501)).is_err());
    }

    #[test]
    fn a_number_has_a_default_and_bounds() {
        assert_eq!(parsed("").unwrap().number("top", 100, 1_000).unwrap(), 100);
        assert_eq!(parsed("top=1000").unwrap().number("top", 100, 1_000).unwrap(), 1_000);
        for wrong in ["0", "1001", "x", ""] {
            assert!(parsed(&format!("top={wrong}")).unwrap().number("top", 100, 1_000).is_err(), "{wrong}");
        }
    }
}
