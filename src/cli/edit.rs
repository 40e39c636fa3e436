//! Opens a dead letter's body in the operator's editor.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::dead_letters::preview::Judge;
use crate::letter::text::{pretty_json, printable};
use tallyd_base::cli::consent::asked;
use tallyd_base::runtime::clock;
use tallyd_mysql::letters::Letter;

const EDITOR: &str = "vi";

/// Lets the operator edit the body until tallyd would accept it. With `force`, returns any edited body. Returns `None`
/// if the operator leaves the file empty, or does not correct a rejected body.
pub(super) fn edit(letter: &Letter, judge: &Judge, force: bool) -> Result<Option<Vec<u8>>> {
    // Other users can't read this file. The file is deleted when `file` is dropped.
    let mut file = tempfile::Builder::new()
        .prefix(&format!("tallyd-dead-{}-", letter.id))
        .suffix(".json")
        .tempfile()
        .context("make a file to edit")?;
    let offered = pretty_json(&letter.body).map_or_else(|| letter.body.clone(), String::into_bytes);
    file.write_all(&offered).and_then(|()| file.flush()).context("write the file to edit")?;
    loop {
        open(file.path())?;
        // Reads the file by its name, because many editors write a new file and rename the new file to the old name.
        let edited = std::fs::read(file.path()).context("read the edited file")?;
        let body = if edited == offered { letter.body.clone() } else { edited.trim_ascii().to_vec() };
        if body.is_empty() {
            return Ok(None);
        }
        let preview = judge.judge(letter, &body, clock::now());
        if force || preview.is_taken() {
            return Ok(Some(body));
        }
        writeln!(std::io::stderr(), "tallyd: {}", printable(&preview.words())).context("print")?;
        if !asked("edit it again? [Y/n] ", true)? {
            return Ok(None);
        }
    }
}

fn open(path: &Path) -> Result<()> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let mut editor = set("VISUAL").or_else(|| set("EDITOR")).unwrap_or_else(|| OsString::from(EDITOR));
    // The shell runs the editor, because $VISUAL or $EDITOR can contain arguments.
    editor.push(" \"$@\"");
    let ended = Command::new("sh").arg("-c").arg(editor).arg("sh").arg(path).status().context("start the editor")?;
    ensure!(ended.success(), "the editor failed ({ended}): nothing was replayed");
    Ok(())
}
