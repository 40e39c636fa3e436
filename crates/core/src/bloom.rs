//! The arithmetic of a Bloom filter. The bits are the same as in Redisson's `RBloomFilter<String>`, so Java servers can
//! read tallyd's filters. A test compares this code with the results of Redisson's own code in
//! tests/vectors/filters.json. Pure.

use highway::{HighwayHash, HighwayHasher, Key};

use crate::model::UserId;

const KEY: Key = Key([0x9e37_79b9_7f4a_7c15, 0xf39c_c060_5ced_c834, 0x1082_276b_f3a2_7251, 0xf86c_6a11_d0c1_8e95]);

const SIZE_MAX: u64 = 2 * i32::MAX as u64;

/// The maximum number of bits per user. 64 bits are enough for the lowest rate of false positives that the
/// configuration allows.
const ITERATIONS_MAX: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub size: u64,
    /// The number of bits that are set for one user. The hash can choose the same bit twice.
    pub iterations: u32,
}

impl Shape {
    /// If the largest filter cannot hold `expected` users at this rate of wrong "yes" answers, returns the shape of the
    /// largest filter.
    pub fn of(expected: u64, false_positive: f64) -> Self {
        let users = expected.max(1) as f64;
        let ln_2 = std::f64::consts::LN_2;
        // The cast drops the fraction, as Redisson does.
        let size = ((-users * false_positive.ln() / (ln_2 * ln_2)) as u64).clamp(1, SIZE_MAX);
        let iterations = (size as f64 / users * ln_2 + 0.5).floor().max(1.0);
        Self { size, iterations: iterations as u32 }
    }

    /// Returns the shape, or `None` if tallyd's filters cannot have this size or this number of bits per user.
    pub fn checked(size: i64, iterations: i64) -> Option<Self> {
        let size = u64::try_from(size).ok().filter(|size| (1..=SIZE_MAX).contains(size))?;
        let iterations = u32::try_from(iterations).ok().filter(|count| (1..=ITERATIONS_MAX).contains(count))?;
        Some(Self { size, iterations })
    }

    pub fn capacity_max(false_positive: f64) -> u64 {
        let ln_2 = std::f64::consts::LN_2;
        (SIZE_MAX as f64 * ln_2 * ln_2 / -false_positive.ln()) as u64
    }

    pub fn bytes(self) -> u64 {
        self.size.div_ceil(8)
    }

    /// Redisson with its string codec hashes the same decimal text. Bit 0 is the highest bit of the first byte, as in
    /// Redis' SETBIT.
    pub fn bits(self, user: UserId) -> impl Iterator<Item = u64> {
        let [first, second] = hash(user);
        let mut sum = first;
        (0..self.iterations).map(move |turn| {
            let bit = (sum & i64::MAX as u64) % self.size.max(1);
            sum = sum.wrapping_add(if turn % 2 == 0 { second } else { first });
            bit
        })
    }
}

fn hash(user: UserId) -> [u64; 2] {
    HighwayHasher::new(KEY).hash128(user.to_string().as_bytes())
}

pub fn number_of(text: &str) -> u64 {
    HighwayHasher::new(KEY).hash64(text.as_bytes())
}

pub struct Window {
    /// The position of the first bit, a multiple of eight.
    from: u64,
    bytes: Vec<u8>,
}

impl Window {
    pub fn new(from: u64, bytes: usize) -> Self {
        Self { from: from * 8, bytes: vec![0; bytes] }
    }

    pub fn add(&mut self, shape: Shape, user: UserId) {
        for bit in shape.bits(user) {
            let Some(place) = bit.checked_sub(self.from) else { continue };
            if let Some(byte) = usize::try_from(place / 8).ok().and_then(|place| self.bytes.get_mut(place)) {
                *byte |= 0x80 >> (place % 8);
            }
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Formats a probability as Java prints a `double`. Redisson writes probabilities in this format.
pub fn java_double(number: f64) -> String {
    if (1e-3..1e7).contains(&number) {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    match text.split_once('e') {
        Some((digits, power)) if digits.contains('.') => format!("{digits}E{power}"),
        Some((digits, power)) => format!("{digits}.0E{power}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_shape_that_no_filter_of_tallyd_has_is_none() {
        for (size, iterations) in [(1, 1), (SIZE_MAX as i64, 64)] {
            let shape = Shape { size: size as u64, iterations: iterations as u32 };
            assert_eq!(Shape::checked(size, iterations), Some(shape));
        }
        for (size, iterations) in [(0, 1), (-1, 1), (SIZE_MAX as i64 + 1, 1), (1, 0), (1, -1), (1, 65)] {
            assert_eq!(Shape::checked(size, iterations), None, "{size} {iterations}");
        }
        assert_eq!([1, 8, 9].map(|size| Shape { size, iterations: 1 }.bytes()), [1, 1, 2]);
        assert_ne!(number_of("a"), number_of("b"));
    }

    #[test]
    fn it_computes_what_redisson_computes() {
        let file: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/vectors/filters.json")).unwrap();
        let vectors = file["vectors"].as_array().unwrap();
        assert!(vectors.len() > 50);
        for vector in vectors {
            let text = |name: &str| vector[name].as_str().unwrap();
            let number = |name: &str| text(name).parse::<u64>().unwrap();
            let user = UserId(number("user_id"));
            let rate: f64 = text("falseProbability").parse().unwrap();
            assert_eq!(java_double(rate), text("falseProbability"));
            let shape = Shape::of(number("expectedInsertions"), rate);
            assert_eq!(shape.size, number("size"), "{vector}");
            assert_eq!(u64::from(shape.iterations), number("hashIterations"), "{vector}");
            let signed = ["h1", "h2"].map(|name| text(name).parse::<i64>().unwrap());
            assert_eq!(hash(user).map(u64::cast_signed), signed, "{vector}");
            let bits: Vec<String> = shape.bits(user).map(|bit| bit.to_string()).collect();
            assert_eq!(bits.join(","), text("indexes"), "{vector}");
        }
    }

    #[test]
    fn the_largest_filter_has_a_bound_and_still_works() {
        let shape = Shape::of(u64::MAX, 1e-5);
        assert_eq!((shape.size, shape.iterations), (SIZE_MAX, 1));
        let most = Shape::capacity_max(1e-5);
        assert!((170_000_000..190_000_000).contains(&most), "{most}");
        assert!(Shape::of(most, 1e-5).size <= SIZE_MAX);
        assert_eq!(Shape::of(0, 1e-5), Shape::of(1, 1e-5));
    }

    #[test]
    fn numbers_look_as_java_writes_them() {
        for (number, text) in [
            (1e-5, "1.0E-5"),
            (0.01, "0.01"),
            (0.001, "0.001"),
            (2.5e-4, "2.5E-4"),
            (0.5, "0.5"),
            (1.23e-10, "1.23E-10"),
        ] {
            assert_eq!(java_double(number), text);
        }
    }

    proptest! {
        #[test]
        fn windows_side_by_side_are_the_whole(users in prop::collection::vec(1..=u64::MAX >> 1, 1..50), cut in 1_usize..200) {
            let shape = Shape::of(200, 1e-3);
            let bytes = usize::try_from(shape.bytes()).unwrap();
            let mut parts = [Window::new(0, cut), Window::new(cut as u64, bytes - cut)];
            let mut whole = Window::new(0, bytes);
            for user in &users {
                parts.iter_mut().for_each(|part| part.add(shape, UserId(*user)));
                whole.add(shape, UserId(*user));
            }
            prop_assert_eq!(whole.bytes().len(), bytes);
            prop_assert_eq!(parts.each_ref().map(Window::bytes).concat(), whole.bytes());
            for user in users {
                let is_set = |bit: u64| bit < shape.size && whole.bytes[bit as usize / 8] & (0x80 >> (bit % 8)) != 0;
                prop_assert!(shape.bits(UserId(user)).all(is_set));
            }
        }
    }
}
