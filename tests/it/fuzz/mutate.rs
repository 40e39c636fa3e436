//! Mutations of a corpus. The same seed always makes the same mutations.

use crate::common::Dice;

/// The maximum length of an input.
const BYTES_MAX: usize = 20_000;

/// These pieces of input often break parsers: the limits of integer types, pieces of JSON, TOML and Redis' protocol,
/// and invalid text.
const TOKENS: [&[u8]; 48] = [
    b"0",
    b"-1",
    b"-0",
    b"127",
    b"255",
    b"256",
    b"65535",
    b"65536",
    b"2147483648",
    b"-2147483648",
    b"4294967296",
    b"9007199254740992",
    b"9007199254740993",
    b"9223372036854775807",
    b"9223372036854775808",
    b"-9223372036854775809",
    b"18446744073709551615",
    b"18446744073709551616",
    b"253402300799999999",
    b"1795251385004538",
    b"1e999",
    b"0.1",
    b"null",
    b"true",
    b"\"\"",
    b"\"\\u0000\"",
    b"\"\\ud800\"",
    b"\\",
    b"[",
    b"]",
    b"{",
    b"}",
    b"{\"type\":",
    b",",
    b":",
    b"\xff",
    b"\xf0\x9f\x98\x80",
    b"\xe2\x80\xae",
    b"\0",
    b"\n",
    b"\r\n",
    b"$-1\r\n",
    b"*3\r\n",
    b"[[board]]\n",
    b"~3:9",
    b"{id}",
    b"\"\"\"",
    b"= \"30d\"\n",
];

pub struct Mutations<'a> {
    corpus: &'a [Vec<u8>],
    dice: Dice,
    now: Vec<u8>,
}

impl<'a> Mutations<'a> {
    pub fn of(corpus: &'a [Vec<u8>], dice: Dice) -> Self {
        Self { corpus, dice, now: Vec::new() }
    }

    /// Takes an input of the corpus, changes it in a few places, and returns the result.
    pub fn next(&mut self) -> &[u8] {
        let from = self.below(self.corpus.len());
        self.now.clone_from(&self.corpus[from]);
        for _ in 0..=self.below(4) {
            self.step();
        }
        self.now.truncate(BYTES_MAX);
        &self.now
    }

    fn step(&mut self) {
        let at = self.below(self.now.len() + 1);
        match self.below(8) {
            0 if at < self.now.len() => self.now[at] ^= 1 << self.dice.below(8),
            1 if at < self.now.len() => self.now[at] = u8::try_from(self.dice.below(256)).unwrap(),
            2 => {
                let until = (at + 1 + self.below(8)).min(self.now.len());
                self.now.drain(at..until);
            }
            3 => self.token(at),
            // Replaces a number or a word of the input.
            4 => {
                let is_word = |byte: &u8| byte.is_ascii_alphanumeric();
                let until = at + self.now[at..].iter().take_while(|byte| is_word(byte)).count();
                self.now.drain(at..until);
                self.token(at);
            }
            // Repeats a piece of the input, sometimes many times.
            5 => {
                let until = (at + 1 + self.below(24)).min(self.now.len());
                let piece = self.now[at..until].to_vec();
                let times = [1, 2, 200][self.below(3)];
                self.put(at, &piece.repeat(times));
            }
            // Inserts a piece of another input.
            6 => {
                let corpus = self.corpus;
                let other = &corpus[self.below(corpus.len())];
                let from = self.below(other.len() + 1);
                let piece = &other[from..(from + self.below(64)).min(other.len())];
                self.put(at, piece);
            }
            _ => self.now.truncate(at),
        }
    }

    fn token(&mut self, at: usize) {
        let token = TOKENS[self.below(TOKENS.len())];
        self.put(at, token);
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.now.splice(at..at, bytes.iter().copied());
    }

    fn below(&mut self, below: usize) -> usize {
        usize::try_from(self.dice.below(below as u64)).unwrap()
    }
}
