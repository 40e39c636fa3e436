//! Parses SHOW GRANTS, and finds the rights that an account lacks on a table.

/// `needed` lists rights. Returns the rights from this list that the account lacks on `database`.`table`, in the same
/// order. If the account has roles, the list is empty, because SHOW GRANTS does not list the rights of roles.
pub(super) fn lacking<'a>(grants: &[String], database: &str, table: &str, needed: &[&'a str]) -> Vec<&'a str> {
    let mut lacking = needed.to_vec();
    for grant in grants {
        let Some(text) = grant.strip_prefix("GRANT ") else { continue };
        match split(text, " ON ") {
            Some((rights, on)) if is_on(on, database, table) => {
                let rights: Vec<&str> = rights.split(", ").collect();
                lacking.retain(|right| !rights.contains(right) && !rights.contains(&"ALL PRIVILEGES"));
            }
            Some(_) => {}
            // GRANT `role` TO `account`
            None => return Vec::new(),
        }
    }
    lacking
}

/// Whether the text after ON covers the table: it names all databases, this database or this table. The database name
/// in a grant is a pattern, except in a grant for one table.
fn is_on(on: &str, database: &str, table: &str) -> bool {
    let Some((first, rest)) = name(on) else { return false };
    let Some((second, rest)) = rest.strip_prefix('.').and_then(name) else { return false };
    if !rest.starts_with(" TO ") {
        return false;
    }
    match (first.as_str(), second.as_str()) {
        ("*", "*") => true,
        (of, "*") => fits(of.as_bytes(), database.as_bytes()),
        (of, named) => of == database && named == table,
    }
}

fn name(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('`') else {
        return text.find(['.', ' ']).map(|end| (text[..end].to_owned(), &text[end..]));
    };
    let mut end = 0;
    loop {
        end += quoted.get(end..)?.find('`')?;
        match quoted.get(end + 1..)? {
            // A quote within a quoted name is written twice.
            rest if rest.starts_with('`') => end += 2,
            rest => return Some((quoted[..end].replace("``", "`"), rest)),
        }
    }
}

/// Returns the text before and the text after `at`. Skips an `at` between backticks, because that text is part of a
/// name.
fn split<'a>(text: &'a str, at: &str) -> Option<(&'a str, &'a str)> {
    let is_outside = |place: &usize| text[..*place].matches('`').count().is_multiple_of(2);
    let (place, _) = text.match_indices(at).find(|(place, _)| is_outside(place))?;
    Some((&text[..place], &text[place + at.len()..]))
}

/// Matches a LIKE pattern: `%` matches any text, and `_` matches any character. After a backslash, `%` and `_` are
/// ordinary characters.
fn fits(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern, text) {
        ([], _) => text.is_empty(),
        ([b'%', rest @ ..], _) => (0..=text.len()).any(|skipped| fits(rest, &text[skipped..])),
        ([b'\\', sign @ (b'%' | b'_' | b'\\'), rest @ ..], [first, others @ ..]) => sign == first && fits(rest, others),
        ([b'_', rest @ ..], [_, others @ ..]) => fits(rest, others),
        ([sign, rest @ ..], [first, others @ ..]) => sign == first && fits(rest, others),
        (_, []) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGE: [&str; 3] = ["CREATE", "ALTER", "DROP"];

    fn lacks(grants: &[&str]) -> Vec<&'static str> {
        let grants: Vec<String> = grants.iter().map(|grant| (*grant).to_owned()).collect();
        lacking(&grants, "tally_app", "applied_event", &CHANGE)
    }

    #[test]
    fn a_grant_counts_where_it_is_on_all_the_database_or_the_table() {
        for on in
            ["*.*", "`tally_app`.*", r"`tally\_app`.*", "`tally%`.*", "`tall__app`.*", "`tally_app`.`applied_event`"]
        {
            let grant = format!("GRANT SELECT, CREATE, DROP, INDEX, ALTER ON {on} TO `a`@`%`");
            assert!(lacks(&["GRANT USAGE ON *.* TO `a`@`%`", &grant]).is_empty(), "{on}");
        }
        for on in [
            "`shop`.*",
            r"`tally\%`.*",
            "`tally`.*",
            "`tally_app`.`recent_delta`",
            "`shop`.`applied_event`",
            r"`tally\_app`.`applied_event`",
            "PROCEDURE `tally_app`.`applied_event`",
        ] {
            assert_eq!(lacks(&[&format!("GRANT ALL PRIVILEGES ON {on} TO `a`@`%`")]), CHANGE, "{on}");
        }
    }

    #[test]
    fn rights_come_together_from_several_grants() {
        let create = "GRANT SELECT, CREATE ON *.* TO `a`@`%` IDENTIFIED BY PASSWORD '*94BD'";
        let alter = "GRANT ALTER, DROP ON `tally_app`.`applied_event` TO `a`@`%`";
        assert!(lacks(&[create, alter]).is_empty());
        assert_eq!(lacks(&[create]), ["ALTER", "DROP"]);
        assert_eq!(lacks(&[alter]), ["CREATE"]);
        assert_eq!(lacks(&["GRANT CREATE VIEW, ALTER ROUTINE, DROP ROLE ON *.* TO `a`@`%`"]), CHANGE);
        assert!(lacks(&["GRANT ALL PRIVILEGES ON *.* TO `a`@`%` WITH GRANT OPTION"]).is_empty());
    }

    #[test]
    fn what_a_role_may_do_is_not_known() {
        assert!(lacks(&["GRANT USAGE ON *.* TO `a`@`%`", "GRANT `r ON s`@`%` TO `a`@`%`"]).is_empty());
        let none =
            ["GRANT PROXY ON ``@`%` TO `root`@`localhost` WITH GRANT OPTION", "SET DEFAULT ROLE `r` FOR `a`@`%`"];
        assert_eq!(lacks(&none), CHANGE);
    }

    #[test]
    fn quotes_within_names_are_read() {
        let grants = ["GRANT CREATE, ALTER, DROP ON `tally``app`.* TO `a`@`%`".to_owned()];
        assert!(lacking(&grants, "tally`app", "applied_event", &CHANGE).is_empty());
        assert_eq!(lacking(&grants, "tally", "applied_event", &CHANGE), CHANGE);
    }
}
