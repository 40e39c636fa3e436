//! A table for terminals. A column is as wide as its longest cell, and numbers are right-aligned.

use std::fmt::{self, Display, Formatter};

use super::printable;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Style {
    #[default]
    Plain,
    Good,
    Mild,
    Grave,
    Header,
}

impl Style {
    /// Returns the control sequence (Select Graphic Rendition of ECMA-48). The sequence selects one of the terminal's
    /// own colours, which fit its background.
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Good => "\u{1b}[32m",
            Self::Mild => "\u{1b}[33m",
            Self::Grave => "\u{1b}[1;31m",
            Self::Header => "\u{1b}[1m",
        }
    }
}

/// A text on one line, without control characters, because they could change the terminal's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    pub(super) fn new(text: impl Display) -> Self {
        Self { text: printable(&text.to_string()), style: Style::Plain }
    }

    pub(super) fn or(text: Option<impl Display>, none: &str) -> Self {
        text.map_or_else(|| Self::new(none), Self::new)
    }

    pub(super) fn style(self, style: Style) -> Self {
        Self { style, ..self }
    }

    pub(super) fn style_if(self, condition: bool, style: Style) -> Self {
        if condition { self.style(style) } else { self }
    }

    pub(super) fn shown(&self, colour: bool) -> String {
        match self.style.code() {
            code if colour && !code.is_empty() && !self.text.is_empty() => format!("{code}{}\u{1b}[0m", self.text),
            _ => self.text.clone(),
        }
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }

    fn is_number(&self) -> bool {
        !self.text.is_empty() && self.text.chars().all(|character| character.is_ascii_digit() || character == '?')
    }
}

#[derive(Clone, Debug)]
pub(super) struct Table {
    header: Vec<Cell>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub(super) fn new<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [Cell; N]>) -> Self {
        let header = header.map(|text| Cell::new(text).style(Style::Header)).into();
        Self { header, rows: rows.map(Vec::from).collect() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn write(&self, f: &mut Formatter<'_>, colour: bool) -> fmt::Result {
        let columns: Vec<(usize, bool)> =
            self.header.iter().enumerate().map(|(at, head)| self.column(at, head)).collect();
        for row in std::iter::once(&self.header).chain(&self.rows) {
            let cells = row.iter().zip(&columns).map(|(cell, (width, is_right))| {
                let (text, room) = (cell.shown(colour), width.saturating_sub(cell.width()));
                if *is_right { format!("{:room$}{text}", "") } else { format!("{text}{:room$}", "") }
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }

    fn column(&self, place: usize, head: &Cell) -> (usize, bool) {
        let cells = || self.rows.iter().filter_map(|row| row.get(place));
        let width = cells().map(Cell::width).chain([head.width()]).max().unwrap_or(0);
        (width, cells().all(Cell::is_number))
    }
}
