//! Patterns of key names, such as `counter:{kind}:{id}`. They are used in layouts in which each target or counter has
//! its own key. Pure.

use std::fmt;

use crate::model::{Target, TargetId};

/// A pattern of key names. It contains each of `{kind}`, `{id}` and `{metric}` at most once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<Part>);

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| match part {
            Part::Text(text) => f.write_str(text),
            Part::Kind => f.write_str("{kind}"),
            Part::Id => f.write_str("{id}"),
            Part::Metric => f.write_str("{metric}"),
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Kind,
    Id,
    Metric,
}

impl Template {
    /// Parses a pattern.
    ///
    /// # Errors
    /// Fails if the pattern is invalid. The caller writes the pattern before the error, so that both form a sentence.
    pub fn parse(pattern: &str) -> Result<Self, String> {
        let (mut parts, mut rest) = (Vec::new(), pattern);
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}').ok_or("has a { without a }")?;
            let part = match name {
                "kind" => Part::Kind,
                "id" => Part::Id,
                "metric" => Part::Metric,
                other => return Err(format!("has {{{other}}}; known: {{kind}}, {{id}} and {{metric}}")),
            };
            if parts.contains(&part) {
                return Err(format!("has {{{name}}} twice"));
            }
            if before.contains('}') {
                return Err("has a } without a {".to_owned());
            }
            // Without a text between two placeholders, a reader of the name could not see where the first value ends.
            if before.is_empty() && matches!(parts.last(), Some(Part::Kind | Part::Id | Part::Metric)) {
                return Err(format!("needs a character between {{{name}}} and the part before it"));
            }
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            parts.push(part);
            rest = after;
        }
        if rest.contains('}') {
            return Err("has a } without a {".to_owned());
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        let beside_id = parts.windows(2).any(|pair| match pair {
            [Part::Text(text), Part::Id] => text.ends_with(|character: char| character.is_ascii_digit()),
            [Part::Id, Part::Text(text)] => text.starts_with(|character: char| character.is_ascii_digit()),
            _ => false,
        });
        if beside_id {
            return Err("has a digit beside {id}".to_owned());
        }
        let template = Self(parts);
        if template.has(&Part::Id) { Ok(template) } else { Err("lacks {id}".to_owned()) }
    }

    fn has(&self, part: &Part) -> bool {
        self.0.contains(part)
    }

    pub fn has_kind(&self) -> bool {
        self.has(&Part::Kind)
    }

    pub fn has_metric(&self) -> bool {
        self.has(&Part::Metric)
    }

    pub fn name(&self, kind: &str, id: TargetId, metric: &str) -> String {
        let mut name = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Kind => name.push_str(kind),
                Part::Id => name.push_str(&id.to_string()),
                Part::Metric => name.push_str(metric),
            }
        }
        name
    }

    pub fn pattern(&self, kind: &str, metric: &str) -> String {
        let mut pattern = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => pattern.push_str(&escaped(text)),
                Part::Kind => pattern.push_str(kind),
                Part::Id => pattern.push('*'),
                Part::Metric => pattern.push_str(metric),
            }
        }
        pattern
    }

    pub fn target(&self, name: &str, (kind, code): (&str, crate::model::Kind), metric: &str) -> Option<Target> {
        let around = self.name(kind, TargetId(0), metric);
        // All key names for this kind and metric differ only in the id. Each name contains the id once.
        let before: usize =
            self.0.iter().take_while(|part| **part != Part::Id).map(|part| part.len(kind, metric)).sum();
        let (head, tail) = (around.get(..before)?, around.get(before + 1..)?);
        let id = name.strip_prefix(head)?.strip_suffix(tail)?;
        let parsed: u64 = id.parse().ok()?;
        // Accepts an id only in tallyd's spelling: neither 042 nor +42.
        (parsed.to_string() == id).then_some(Target { kind: code, id: TargetId(parsed) })
    }
}

impl Part {
    fn len(&self, kind: &str, metric: &str) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Kind => kind.len(),
            Self::Metric => metric.len(),
            Self::Id => 1,
        }
    }
}

pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if matches!(character, '*' | '?' | '[' | ']' | '\\' | '^') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Kind;
    use proptest::prelude::*;

    #[test]
    fn a_pattern_that_tells_nothing_apart_is_refused() {
        for (pattern, error) in [
            ("counter", "lacks {id}"),
            ("{kind}{id}", "needs a character between"),
            ("{id}:{id}", "has {id} twice"),
            ("{user}:{id}", "known: {kind}, {id} and {metric}"),
            ("a1{id}", "has a digit beside {id}"),
            ("{id}0{kind}", "has a digit beside {id}"),
            ("{id", "has a { without a }"),
            ("id}:{id}", "has a } without a {"),
            ("", "lacks {id}"),
        ] {
            let found = Template::parse(pattern).err();
            assert!(found.as_ref().is_some_and(|found| found.contains(error)), "{pattern}: {found:?}");
        }
    }

    #[test]
    fn names_are_those_of_the_field() {
        let name = |pattern| Template::parse(pattern).unwrap().name("video", TargetId(42), "like");
        assert_eq!(name("counter:{id}:{metric}"), "counter:42:like");
        assert_eq!(name("counter:{kind}:{id}"), "counter:video:42");
        let template = Template::parse("a*[{id}]:{metric}").unwrap();
        assert_eq!(template.pattern("video", "like"), "a\\*\\[*\\]:like");
        let target = |name| template.target(name, ("video", Kind(1)), "like").map(|target| target.id.0);
        assert_eq!((target("a*[7]:like"), target("a*[07]:like"), target("a*[7]:likes")), (Some(7), None, None));
        assert_eq!((target("a*[]:like"), target("a*[7"), target("a*[7]:view")), (None, None, None));
    }

    #[test]
    fn a_pattern_of_keys_is_written_as_it_was_read() {
        for (pattern, has_kind, has_metric) in
            [("n:{id}", false, false), ("{kind}:{id}:likes", true, false), ("{id}:{metric}.{kind}", true, true)]
        {
            let template = Template::parse(pattern).unwrap();
            assert_eq!(template.to_string(), pattern);
            assert_eq!((template.has_kind(), template.has_metric()), (has_kind, has_metric), "{pattern}");
        }
    }

    proptest! {
        #[test]
        fn a_name_is_read_back(id: u64, before in "[a-z:]{0,6}", between in "[a-z:.-]{1,3}", after in "[a-z:*]{0,6}") {
            let template = Template::parse(&format!("{before}{{kind}}{between}{{id}}{between}{{metric}}{after}")).unwrap();
            let name = template.name("video", TargetId(id), "like");
            let target = Target { kind: Kind(3), id: TargetId(id) };
            prop_assert_eq!(template.target(&name, ("video", Kind(3)), "like"), Some(target));
        }

        #[test]
        fn any_pattern_and_name_is_read_or_refused(pattern in ".*", name in ".*") {
            if let Ok(template) = Template::parse(&pattern) {
                let _ = template.target(&name, ("video", Kind(3)), "like");
            }
        }
    }
}
