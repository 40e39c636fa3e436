//! A separate machine for installations. At first, the separate machine has the same files as this machine. In the end,
//! the separate machine drops all its changes.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::{fs, io};

/// Mounts everything in a namespace that ends with the process. A folder in memory covers `/` and receives all changes.
/// `/run` is empty, so programs don't find this machine's systemd. The separate machine uses the network of this
/// machine. The package may already be installed on this machine.
const MOUNT: &str = r#"
set -e
top=$1
mount -t tmpfs -o mode=755 tmpfs "$top"
mkdir "$top/changed" "$top/work" "$top/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$top/changed,workdir=$top/work" "$top/root"
mount --rbind /proc "$top/root/proc"
mount --rbind /dev "$top/root/dev"
mount -t tmpfs tmpfs "$top/root/run"
mount -t tmpfs tmpfs "$top/root/tmp"
chroot "$top/root" sh -c 'dpkg --purge tallyd; userdel tallyd; userdel tallyd-gateway; groupdel tallyd; groupdel tallyd-gateway; rm -rf /etc/credstore' >/dev/null 2>&1 || true
# Without the index of manual pages, which takes half a minute at each installation.
rm -f "$top/root/var/lib/man-db/auto-update"
touch "$top/changed/begun"
echo "ready $$"
# Until whoever holds the other end is gone, killed or not.
exec cat
"#;

pub struct Machine {
    holder: Child,
    /// The process that holds the namespace. With sudo, the child of the test is sudo, not this process.
    pid: String,
    root: String,
}

impl Machine {
    pub fn new(folder: &Path) -> Self {
        let top = folder.join("machine");
        fs::create_dir(&top).unwrap();
        let mut holder = as_root("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", MOUNT, "sh"])
            .arg(&top)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(holder.stdout.take().unwrap()), &mut line).unwrap();
        let pid = line
            .strip_prefix("ready ")
            .expect("the test needs the right to mount: run it as root, or allow sudo without a password");
        Self { holder, pid: pid.trim_end().to_owned(), root: top.join("root").to_str().unwrap().to_owned() }
    }

    /// A command on the machine, as root.
    pub fn command(&self, script: &str) -> Command {
        let mut command = as_root("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.pid));
        command.args(["chroot", &self.root, "env", "-i", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"]);
        command.args(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "sh", "-c", script]);
        command
    }

    /// Runs a script, which must succeed. Returns its output.
    pub fn run(&self, script: &str) -> String {
        let Output { status, stdout, stderr } = self.command(script).output().unwrap();
        let said = String::from_utf8_lossy(&stdout).into_owned();
        assert!(status.success(), "{script}\n{said}{}", String::from_utf8_lossy(&stderr));
        said
    }

    /// Writes a file that only root can read.
    pub fn write(&self, path: &str, text: &str) {
        let mut writer = self.command(&format!("umask 077 && cat >'{path}'")).stdin(Stdio::piped()).spawn().unwrap();
        io::Write::write_all(&mut writer.stdin.take().unwrap(), text.as_bytes()).unwrap();
        assert!(writer.wait().unwrap().success(), "write {path}");
    }

    /// Installs a package. Returns the output of dpkg and of the package's scripts.
    pub fn install(&self, package: &Path) -> String {
        let bytes = fs::read(package).unwrap();
        let mut writer = self.command("cat >/tmp/package.deb").stdin(Stdio::piped()).spawn().unwrap();
        io::Write::write_all(&mut writer.stdin.take().unwrap(), &bytes).unwrap();
        assert!(writer.wait().unwrap().success());
        self.run("dpkg --force-unsafe-io --force-confold --install /tmp/package.deb 2>&1")
    }

    /// Returns the files that were added since the machine was made, except files of dpkg and of the accounts.
    pub fn left(&self) -> String {
        let mut command = as_root("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.pid));
        // The script searches the folder `changed`, which holds the changed files of the separate machine. A character
        // device in this folder means a deleted file, so the script skips the device.
        let script = "cd \"$1/../changed\" && find . -newer begun '(' -type f -o -type l ')' \
            ! -path './var/lib/dpkg/*' ! -path './var/log/*' ! -path './var/cache/*' ! -name begun \
            ! -regex './etc/\\(passwd\\|group\\|shadow\\|gshadow\\|subuid\\|subgid\\)-?' ! -name .pwd.lock";
        let output = command.args(["sh", "-c", script, "sh", &self.root]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

fn as_root(program: &str) -> Command {
    if fs::metadata("/proc/self").map(|own| std::os::unix::fs::MetadataExt::uid(&own)).unwrap() == 0 {
        return Command::new(program);
    }
    let mut command = Command::new("sudo");
    command.args(["-n", program]);
    command
}
