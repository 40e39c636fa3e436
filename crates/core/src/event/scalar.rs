//! A field's JSON value of any type. A later step checks the value.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Each integer below 2^53 has a floating-point number that no other integer has.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// A field's JSON value. A text without escapes is borrowed from the body.
#[derive(Debug, Default)]
pub(crate) enum Scalar<'a> {
    #[default]
    Missing,
    Unsigned(u64),
    Negative(i64),
    Text(Cow<'a, str>),
    Fraction(f64),
    /// A value that no field allows: a boolean, null, a list or an object. The text is the name of the value's type.
    Other(&'static str),
}

impl Scalar<'_> {
    /// Converts a number that was written with a decimal point or an exponent. A number that is exactly an integer is
    /// that integer.
    #[expect(clippy::cast_possible_truncation, reason = "integers below 2^53 are exact in both types")]
    pub(crate) fn of(number: f64) -> Self {
        if number.fract() != 0.0 || number.abs() >= EXACT_MAX {
            return Self::Fraction(number);
        }
        u64::try_from(number as i64).map_or(Self::Negative(number as i64), Self::Unsigned)
    }

    pub(crate) fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    pub(crate) fn integer(&self) -> Option<i64> {
        match self {
            Self::Unsigned(number) => i64::try_from(*number).ok(),
            Self::Negative(number) => Some(*number),
            _ => None,
        }
    }
}

impl fmt::Display for Scalar<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("missing"),
            Self::Unsigned(number) => number.fmt(f),
            Self::Negative(number) => number.fmt(f),
            // The beginning of the text is enough here, because `dead_letter` contains the whole body.
            Self::Text(text) => write!(f, "{:?}", text.chars().take(40).collect::<String>()),
            Self::Fraction(number) => write!(f, "{number}"),
            Self::Other(name) => f.write_str(name),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Scalar<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor)
    }
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Scalar::Unsigned(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
        Ok(Scalar::Negative(number))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Self::Value, E> {
        Ok(Scalar::of(number))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Scalar::Other("a boolean"))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Scalar::Other("null"))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Scalar::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Scalar::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("an object"))
    }
}
