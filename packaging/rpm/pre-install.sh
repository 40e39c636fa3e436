# Creates the user of packaging/sysusers.d/tallyd.conf before the files are installed, because one of the files belongs to the user's group.
getent group tallyd >/dev/null || groupadd --system tallyd
getent passwd tallyd >/dev/null ||
    useradd --system --gid tallyd --home-dir / --no-create-home --shell /usr/sbin/nologin --comment "tallyd, keeps like counts correct" tallyd
