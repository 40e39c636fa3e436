//! Finds the placeholders in a site's own SQL: the query of a `[[recount]]` or an `[[import]]`, or the statement of an
//! `[[export]]`. Pure.
//!
//! The parser recognises only quotes, comments, and the words outside of quotes and comments. MySQL checks everything
//! else.

pub const OF_RECOUNT: &[&str] = &["after", "limit"];

pub const OF_LIKES: &[&str] = &["after_target", "after_user", "rows"];

pub const OF_NUMBERS: &[&str] = &["after_target", "rows"];

pub const OF_EXPORT: &[&str] = &["target", "user", "at", "deleted"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Value(usize),
}

enum Token<'a> {
    Word(&'a str),
    Placeholder(&'a str),
    Other(&'a str),
}

impl Query {
    pub fn parse(text: &str, placeholders: &[&str]) -> Result<Self, String> {
        let (query, words) = read(text, placeholders)?;
        check_words(&words)?;
        query.check_has(placeholders, placeholders.len())
    }

    /// Does the same as [`Self::parse`] for a statement that writes one row and begins with one of `verbs`. Only the
    /// first `needed` placeholders are required.
    pub fn parse_write(text: &str, verbs: &[&str], placeholders: &[&str], needed: usize) -> Result<Self, String> {
        let (query, words) = read(text, placeholders)?;
        if !words.first().is_some_and(|word| verbs.contains(&word.as_str())) {
            return Err(format!("query does not begin with {}", verbs.join(" or ").to_ascii_uppercase()));
        }
        query.check_has(placeholders, needed)
    }

    pub fn has(&self, place: usize) -> bool {
        self.parts.contains(&Part::Value(place))
    }

    fn check_has(self, placeholders: &[&str], needed: usize) -> Result<Self, String> {
        match placeholders.iter().take(needed).enumerate().find(|(place, _)| !self.has(*place)) {
            Some((_, name)) => Err(format!("query lacks :{name}")),
            None => Ok(self),
        }
    }

    /// Returns the statement with the values in place of the placeholders. `values` are in the order of the
    /// placeholders that [`Self::parse`] received. A value is a number, or SQL text for one value.
    pub fn sql<V: ToString>(&self, values: &[V]) -> String {
        let text = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Value(place) => values.get(*place).map_or_else(|| "0".to_owned(), V::to_string),
        };
        self.parts.iter().map(text).collect()
    }
}

fn read(text: &str, placeholders: &[&str]) -> Result<(Query, Vec<String>), String> {
    let (mut parts, mut words) = (Vec::new(), Vec::new());
    let (mut ended, mut depth) = (false, 0_usize);
    let mut rest = text.trim();
    while let Some(token) = next(rest)? {
        let (Token::Word(taken) | Token::Placeholder(taken) | Token::Other(taken)) = &token;
        rest = rest.get(taken.len()..).unwrap_or_default();
        let is_blank = matches!(token, Token::Other(text) if text.trim().is_empty() || is_comment(text));
        if ended && !is_blank {
            return Err("query has more than one statement".to_owned());
        }
        match token {
            Token::Other(";") => {
                ended = true;
                continue;
            }
            Token::Placeholder(name) => {
                let known = placeholders.iter().position(|known| name.strip_prefix(':') == Some(known));
                if depth > 0 && matches!(name, ":rows" | ":limit") {
                    return Err(format!(
                        "query has {name} in parentheses: write LIMIT {name} at its end, because a filter after the limit would \
                         make the page look like the last"
                    ));
                }
                let unknown =
                    || format!("query has the unknown placeholder {name}; allowed are {}", listed(placeholders));
                parts.push(Part::Value(known.ok_or_else(unknown)?));
            }
            Token::Word(word) => {
                words.push(word.to_ascii_lowercase());
                parts.push(Part::Text(word.to_owned()));
            }
            Token::Other(other) => {
                match other {
                    "(" => depth += 1,
                    ")" => depth = depth.saturating_sub(1),
                    _ => {}
                }
                parts.push(Part::Text(other.to_owned()));
            }
        }
    }
    Ok((Query { parts }, words))
}

fn listed(placeholders: &[&str]) -> String {
    let names: Vec<String> = placeholders.iter().map(|name| format!(":{name}")).collect();
    match names.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => names.concat(),
    }
}

/// Accepts only queries that read and take no locks.
fn check_words(words: &[String]) -> Result<(), String> {
    if !words.first().is_some_and(|word| matches!(word.as_str(), "select" | "with")) {
        return Err("query is not a SELECT".to_owned());
    }
    for pair in words.windows(2) {
        let [first, second] = pair else { continue };
        if matches!((first.as_str(), second.as_str()), ("for", "update" | "share") | ("lock", "in")) {
            return Err(format!("query locks the rows that it reads ({first} {second}): remove these words"));
        }
    }
    let writes = ["into", "insert", "update", "delete"];
    match words.iter().find(|word| writes.contains(&word.as_str())) {
        Some(word) => Err(format!(
            "query has the word {word}, but it must only read. If {word} is a name, write it with backticks: `{word}`"
        )),
        None => Ok(()),
    }
}

fn is_comment(text: &str) -> bool {
    text.starts_with("/*") || text.starts_with('#') || text.starts_with("--")
}

fn next(text: &str) -> Result<Option<Token<'_>>, String> {
    let Some(first) = text.chars().next() else { return Ok(None) };
    let taken = |length: usize| text.get(..length).unwrap_or(text);
    let token = match first {
        '\'' | '"' | '`' => Token::Other(taken(quoted(text, first)?)),
        // The MySQL server executes such comments (/*! ... */, /*M! ... */), and this parser cannot check their
        // content.
        _ if text.starts_with("/*!") || text.starts_with("/*M!") => {
            return Err("query has a comment that servers execute (/*! */): remove it".to_owned());
        }
        _ if text.starts_with("/*") => {
            let end = text.find("*/").ok_or("query has a comment without an end")?;
            Token::Other(taken(end + 2))
        }
        '#' => Token::Other(taken(text.find('\n').unwrap_or(text.len()))),
        // In MySQL and MariaDB, `--` begins a comment only if white space follows. So 5--1 is a subtraction.
        '-' if text.starts_with("--") && text.chars().nth(2).is_none_or(char::is_whitespace) => {
            Token::Other(taken(text.find('\n').unwrap_or(text.len())))
        }
        ':' => match text.get(1..).map_or(0, word_length) {
            0 => Token::Other(taken(1)),
            length => Token::Placeholder(taken(1 + length)),
        },
        _ => match word_length(text) {
            0 => Token::Other(taken(first.len_utf8())),
            length => Token::Word(taken(length)),
        },
    };
    Ok(Some(token))
}

fn word_length(text: &str) -> usize {
    let is_of_word = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '$' | '@');
    text.find(|letter| !is_of_word(letter)).unwrap_or(text.len())
}

/// Includes the quotes. The text continues after a doubled quote, and in a string also after a backslash and a quote.
fn quoted(text: &str, quote: char) -> Result<usize, String> {
    let mut letters = text.char_indices().skip(1).peekable();
    while let Some((place, letter)) = letters.next() {
        if letter == '\\' && quote != '`' {
            letters.next();
        } else if letter == quote && letters.next_if(|(_, next)| *next == quote).is_none() {
            return Ok(place + letter.len_utf8());
        }
    }
    Err(format!("query has a {quote} without an end"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLAIN: &str =
        "SELECT video_id, COUNT(*) FROM c WHERE video_id > :after GROUP BY video_id ORDER BY video_id LIMIT :limit";

    fn parse(text: &str) -> Result<Query, String> {
        Query::parse(text, OF_RECOUNT)
    }

    #[test]
    fn each_kind_of_query_has_placeholders_of_its_own() {
        let text = "SELECT target, user FROM l WHERE target > :after_target OR (target = :after_target AND user > :after_user) \
                    ORDER BY target, user LIMIT :rows";
        let sql = Query::parse(text, OF_LIKES).unwrap().sql(&[7, 8, 9]);
        assert!(sql.contains("target > 7 OR (target = 7 AND user > 8)") && sql.ends_with("LIMIT 9"), "{sql}");
        let error = Query::parse(text, OF_NUMBERS).unwrap_err();
        assert_eq!(error, "query has the unknown placeholder :after_user; allowed are :after_target and :rows");
        let error = Query::parse(text, OF_RECOUNT).unwrap_err();
        assert_eq!(error, "query has the unknown placeholder :after_target; allowed are :after and :limit");
        let error = Query::parse(&text.replace(":rows", "5"), OF_LIKES).unwrap_err();
        assert_eq!(error, "query lacks :rows");
        let error = Query::parse("SELECT :x, :rows", &["rows"]).unwrap_err();
        assert_eq!(error, "query has the unknown placeholder :x; allowed are :rows");
    }

    #[test]
    fn placeholders_are_replaced_by_numbers() {
        let sql = parse(&format!("{PLAIN};\n-- the end")).unwrap().sql(&[42, 7]);
        assert_eq!(sql.trim(), PLAIN.replace(":after", "42").replace(":limit", "7") + "\n-- the end");
        let with = "with c as (select id from x where id>:after) select id, 1 from c limit :limit -- :x\n";
        assert_eq!(parse(with).unwrap().sql(&[0, 9]).matches(":x").count(), 1);
    }

    #[test]
    fn what_stands_in_quotes_and_comments_is_left_alone() {
        for kept in [
            "':after'",
            "\":limit\"",
            "`:after`",
            "'it''s :after'",
            r"'it\'s :after'",
            r#""a\":limit""#,
            "/* :after; ' */",
            "# :limit '\n",
            "-- :after \"\n",
            "'; :x'",
            "'\u{e9}:after'",
        ] {
            let query = parse(&format!("SELECT {kept} {PLAIN}")).unwrap();
            assert!(query.sql(&[1, 2]).starts_with(&format!("SELECT {kept} ")), "{kept}");
        }
        for end in ["# the end", "/* the end */", "-- the end", " \n"] {
            assert!(parse(&format!("{PLAIN};{end}")).is_ok(), "{end}");
        }
        // In a name, a backslash is an ordinary character. Two minus signs without white space are not a comment.
        assert!(parse(r"SELECT `\`, 5--:after, :limit").unwrap().sql(&[3, 4]).ends_with("5--3, 4"));
        assert!(parse("SELECT @x := 1, `update`, :after, :limit").is_ok());
    }

    #[test]
    fn what_is_no_query_of_a_recount_is_refused() {
        for (text, why) in [
            ("", "is not a SELECT"),
            ("SELECT 1, 2 LIMIT :limit", "lacks :after"),
            ("SELECT 1, ':limit' FROM c WHERE id > :after", "lacks :limit"),
            (
                "SELECT 1 WHERE id > :after AND x = :from LIMIT :limit",
                "has the unknown placeholder :from; allowed are :after and :limit",
            ),
            ("SELECT 1 WHERE id > :After LIMIT :limit", "placeholder :After"),
            ("UPDATE c SET x = :after LIMIT :limit", "is not a SELECT"),
            ("SELECT :after, :limit; SELECT 1", "more than one statement"),
            ("SELECT :after, :limit;;", "more than one statement"),
            ("SELECT :after, :limit; /* the end */ SELECT 1", "more than one statement"),
            ("SELECT :after, :limit INTO OUTFILE 'x'", "has the word into"),
            ("WITH c AS (SELECT 1) DELETE FROM x WHERE id > :after LIMIT :limit", "has the word delete"),
            ("SELECT :after, :limit FOR\nUPDATE", "locks the rows that it reads (for update)"),
            ("SELECT :after, :limit LOCK IN SHARE MODE", "locks the rows that it reads (lock in)"),
            (
                "SELECT x, 1 FROM (SELECT x FROM c WHERE x > :after LIMIT :limit) t WHERE x <> 13",
                "has :limit in parentheses",
            ),
            ("SELECT ':after, :limit", "has a ' without an end"),
            ("SELECT /* :after, :limit", "has a comment without an end"),
            ("SELECT /*!50000 :after */, :limit", "a comment that servers execute"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_statement_that_writes_has_its_verb_and_its_placeholders() {
        let parse = |text: &str| Query::parse_write(text, &["insert", "update"], OF_EXPORT, 2);
        let text = "INSERT INTO l VALUES (:target, :user, :at) ON DUPLICATE KEY UPDATE at = at";
        let statement = parse(text).unwrap();
        assert_eq!((statement.has(2), statement.has(3)), (true, false));
        let sql = statement.sql(&["7", "8", "'2026-01-01 00:00:00'"]);
        assert_eq!(sql, "INSERT INTO l VALUES (7, 8, '2026-01-01 00:00:00') ON DUPLICATE KEY UPDATE at = at");
        for (text, why) in [
            ("DELETE FROM l WHERE p = :target AND u = :user", "does not begin with INSERT OR UPDATE"),
            ("INSERT INTO l VALUES (:target, ':user')", "lacks :user"),
            (
                "INSERT INTO l VALUES (:target, :user, :when)",
                "has the unknown placeholder :when; allowed are :target, :user, :at and :deleted",
            ),
            ("INSERT INTO l VALUES (:target, :user); DROP TABLE l", "more than one statement"),
            ("INSERT /*! IGNORE */ INTO l VALUES (:target, :user)", "a comment that servers execute"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_gets_an_answer(text in "[a-z:;'\"`#\\-/*\\\\ \n\u{e9}]{0,40}") {
            if let Ok(query) = parse(&text) {
                query.sql(&[1, 2]);
            }
            if let Ok(query) = parse(&format!("{PLAIN}{text}")) {
                prop_assert!(query.sql(&[1, 2]).contains("> 1 GROUP"));
            }
        }
    }
}
