# As packaging/sysusers.d/tallyd.conf says it; before the files are there, because one belongs to the group.
getent group tallyd >/dev/null || groupadd --system tallyd
getent passwd tallyd >/dev/null ||
    useradd --system --gid tallyd --home-dir / --no-create-home --shell /usr/sbin/nologin --comment "tallyd, which keeps like counts true" tallyd
