//! A fault that fills the disk of MySQL's tables.
//!
//! The fault moves the run's database to a small file system. All data of this file system are in one image file. This
//! file system is mounted only for the server, in a mount namespace that ends with the server. So the file system never
//! stays mounted, even if the run crashes.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::process::Command;
use tokio::time::sleep;

use super::{Fault, Server, then_undo};
use crate::dice::Dice;
use crate::site::Site;

/// Free space of the file system, before a ballast file fills this space. In MiB.
const ROOM_MB: u64 = 64;

pub fn all() -> Vec<Fault> {
    let full =
        Fault::new(Server::Mysql, "mysql-disk-full", "the disk of MySQL's tables is full", |site, dice, hold| {
            Box::pin(full(site, dice, hold))
        });
    vec![full.needs(needs).hold(20, 40)]
}

fn needs(_: &Site) -> Option<String> {
    let tried = std::process::Command::new("unshare")
        .args([
            "--mount",
            "sh",
            "-c",
            "mount -t tmpfs none /mnt && command -v mkfs.ext4 nsenter && [ -e /dev/loop-control ]",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let can = tried.is_ok_and(|status| status.success());
    (!can).then(|| "it needs root, mkfs.ext4, loop devices, and the right to mount a file system".to_owned())
}

async fn full(site: &Site, _: Dice, hold: Duration) -> Result<()> {
    let folder = site.stack.folder(Server::Mysql);
    let place =
        Place { tables: folder.join("data").join(&site.name), image: folder.join("small.img"), up: site.stack.up() };
    let begun = async {
        site.stack.stop(Server::Mysql).await?;
        place.move_in().await?;
        fill(site.stack.pid(Server::Mysql)?, &place.tables).await?;
        sleep(hold).await;
        Ok(())
    };
    let undo = async {
        site.stack.stop(Server::Mysql).await?;
        place.move_out().await?;
        site.stack.start(&[Server::Mysql]).await
    };
    then_undo(begun, undo).await
}

struct Place {
    tables: PathBuf,
    image: PathBuf,
    /// The script that starts servers.
    up: PathBuf,
}

impl Place {
    /// Copies the tables into a new file system. Starts the server with the new file system mounted at the folder of
    /// the tables. InnoDB reserves space for a page before it writes the page. A sparse copy of the file would not
    /// contain the reserved space. Without this space InnoDB could not write the page, and the table would be damaged.
    async fn move_in(&self) -> Result<()> {
        let script = format!(
            "used=$(du -sm --apparent-size \"$1\" | cut -f1) && rm -f \"$2\" && truncate -s $((used + {ROOM_MB}))M \"$2\" && mkfs.ext4 -q -F -m 0 \"$2\" &&
             mount -o loop \"$2\" /mnt && cp -a --sparse=never \"$1\"/. /mnt/ && mount --move /mnt \"$1\" && \"$3\" mysql"
        );
        self.run(&script).await
    }

    /// Copies the tables back. The server has ended, so its files are complete. The server either was stopped cleanly,
    /// or will recover from its files at its next start.
    async fn move_out(&self) -> Result<()> {
        let script = "[ -e \"$2\" ] || exit 0
             mount -o loop \"$2\" /mnt && rm -f /mnt/ballast && rm -rf \"$1.new\" && cp -a --sparse=never /mnt \"$1.new\" && rm -rf \"$1.new/lost+found\" &&
             rm -rf \"$1\" && mv \"$1.new\" \"$1\" && umount /mnt && rm -f \"$2\"";
        self.run(script).await
    }

    async fn run(&self, script: &str) -> Result<()> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(&self.tables).arg(&self.image).arg(&self.up);
        succeed(command).await
    }
}

/// Fills the server's free disk space.
async fn fill(pid: u32, tables: &Path) -> Result<()> {
    let mut command = Command::new("nsenter");
    let script = "dd if=/dev/zero of=\"$1/ballast\" bs=64K; dd if=/dev/zero of=\"$1/ballast\" bs=512 oflag=append conv=notrunc; true";
    command.args(["--mount", "--target", &pid.to_string(), "sh", "-c", script, "sh"]).arg(tables);
    succeed(command).await
}

async fn succeed(mut command: Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().await?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
