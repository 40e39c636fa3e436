//! Reports the results: a table for humans, and target/bench/NAME.json for programs.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;

/// The result file of a benchmark.
#[derive(Serialize)]
pub struct Results<M, R> {
    /// Named numbers. The named figures. The benchmark's target values apply to these figures.
    pub figures: BTreeMap<String, f64>,
    pub machine: M,
    /// The command-line arguments.
    pub arguments: Vec<String>,
    /// The contenders that could not take part, with the reasons.
    pub missing: BTreeMap<String, String>,
    pub results: R,
}

impl<M: Serialize, R: Serialize> Results<M, R> {
    /// Writes target/bench/`name`.json.
    pub fn write(&self, name: &str) -> Result<()> {
        write_file(&format!("{name}.json"), &serde_json::to_vec_pretty(self)?)
    }
}

/// Writes target/bench/`name`.svg.
pub fn write_picture(name: &str, picture: &str) -> Result<()> {
    write_file(&format!("{name}.svg"), picture.as_bytes())
}

fn write_file(name: &str, bytes: &[u8]) -> Result<()> {
    let folder = tallyd_testkit::root().join("target/bench");
    fs::create_dir_all(&folder)?;
    let path = folder.join(name);
    fs::write(&path, bytes).with_context(|| format!("write {}", path.display()))?;
    println!("\n{}", path.display());
    Ok(())
}

/// The value that a figure should reach.
pub enum Aim {
    AtLeast(f64),
    AtMost(f64),
}

/// Prints the figures and the values that they should reach.
pub fn print_figures(figures: &BTreeMap<String, f64>, aims: &[(&str, Aim)]) {
    let mut rows = Vec::new();
    for (name, value) in figures {
        let aim = aims.iter().find(|(known, _)| known == name).map(|(_, aim)| aim);
        let (text, verdict) = match aim {
            None => (String::new(), ""),
            Some(Aim::AtLeast(least)) => (format!(">= {least}"), if value >= least { "met" } else { "missed" }),
            Some(Aim::AtMost(most)) => (format!("<= {most}"), if value <= most { "met" } else { "missed" }),
        };
        rows.push(vec![name.clone(), number(*value), text, verdict.to_owned()]);
    }
    println!();
    print_table(&["figure", "value", "aim", ""], &rows);
}

/// Prints a table: the titles of the columns, then the rows. The first column is aligned to the left, the other columns
/// to the right.
pub fn print_table(titles: &[&str], rows: &[Vec<String>]) {
    let titles: Vec<String> = titles.iter().map(|title| (*title).to_owned()).collect();
    let all: Vec<&Vec<String>> = std::iter::once(&titles).chain(rows).collect();
    let widths: Vec<usize> = (0..titles.len())
        .map(|column| all.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    for row in all {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            line += &if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
        }
        println!("{}", line.trim_end());
    }
}

/// Formats a number with three significant digits, but always with all digits before the decimal point.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Returns the median: the middle value, or the mean of the two middle values.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.get(middle) {
        None => f64::NAN,
        Some(upper) if values.len() % 2 == 1 => *upper,
        Some(upper) => f64::midpoint(values.get(middle - 1).copied().unwrap_or(*upper), *upper),
    }
}

/// Returns the percentile: the value that the given share of the sorted values does not exceed.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    let place = (sorted.len() as f64 * part).ceil() as usize;
    sorted.get(place.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}
