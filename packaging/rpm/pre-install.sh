# Creates the users of packaging/sysusers.d/tallyd.conf before the files are installed, because one of the files belongs to a user's group.
make_user() {
    getent group "$1" >/dev/null || groupadd --system "$1"
    getent passwd "$1" >/dev/null ||
        useradd --system --gid "$1" --home-dir / --no-create-home --shell /usr/sbin/nologin --comment "$2" "$1"
}
make_user tallyd "tallyd, keeps like counts correct"
make_user tallyd-gateway "tallyd's gateway, receives events over HTTP"
