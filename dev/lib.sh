# shellcheck shell=bash
#
# Shared by the scripts in dev: the folders and ports of the private servers, how to recognize our own processes, and waiting with a deadline. Source it, do not run it.
#
# Settings, from the environment:
#   TALLYD_STACK_DIR        the folder that holds all data, logs and pid files   (default: target/stack of this checkout)
#   TALLYD_STACK_PORT_BASE  the first of the stack's ports                       (default: 21000, or the folder's recorded one)
#   TALLYD_STACK_TIMEOUT    seconds for one server to become healthy             (default: 120)
#   TALLYD_STACK_MYSQL_FROM, TALLYD_STACK_REDIS_FROM, TALLYD_STACK_RABBITMQ_FROM
#                           another version, by its name in VERSIONS             (default: the installed one, or the folder's recorded one)

# The scripts that source this file read the variables in capitals.
# shellcheck disable=SC2034

set -euo pipefail

# mariadbd is in /usr/sbin, which can be missing in an ordinary user's PATH.
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
# C.UTF-8 exists on every Debian. With a LANG that is not installed, Redis does not start and Elixir prints warnings.
export LC_ALL=C.UTF-8

ALL_SERVICES=(mysql redis rabbitmq)
EX_USAGE=64

# With fault points, a test can end the daemon between any two steps. Releases are built without fault points. Cargo always gets this whole list of
# packages. With a shorter list, dependencies would get other features, and cargo would build them again.
TESTED=(--package=tallyd --package=tallyd-torture --features fault-points)
for tested in crates/*; do
    case ${tested#crates/} in
    lossy-strings | no-roots | testkit) ;;
    *) TESTED+=(--package="tallyd-${tested#crates/}") ;;
    esac
done
unset tested

# Prints the mirror of Debian's packages.
debian_mirror() {
    if [[ ${TALLYD_LAB_MIRROR:-} ]]; then echo "$TALLYD_LAB_MIRROR" && return; fi
    # shellcheck disable=SC2016 # Not a shell variable.
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep -m 1 -E '/debian/?$'
}

say() { printf '%s\n' "$*" >&2; }

die() {
    say "dev/${0##*/}: $*"
    exit 1
}

usage_error() {
    say "dev/${0##*/}: $*"
    say "Try 'dev/${0##*/} --help'."
    exit "$EX_USAGE"
}

# ---------------------------------------------------------------------------------------------- folder and ports

stack_paths() {
    local root base recorded
    root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)
    CHECKOUT=$root
    # The path is absolute and without symbolic links, because it is part of the mark that identifies our processes.
    STACK_DIR=$(realpath -m -- "${TALLYD_STACK_DIR:-$root/target/stack}")
    [[ $STACK_DIR != / && $STACK_DIR != *[[:space:]]* ]] ||
        die "TALLYD_STACK_DIR is '$STACK_DIR': use a path without blanks, because RabbitMQ's scripts can't handle them."

    recorded=
    [[ ! -s $STACK_DIR/port-base ]] || recorded=$(<"$STACK_DIR/port-base")
    base=${TALLYD_STACK_PORT_BASE:-${recorded:-21000}}
    if [[ ! $base =~ ^[0-9]{4,5}$ ]] || ((10#$base < 1024 || 10#$base > 65530)); then
        die "TALLYD_STACK_PORT_BASE is '$base': set a number from 1024 to 65530."
    fi
    PORT_BASE=$((10#$base))
    RECORDED_PORT_BASE=$recorded

    MYSQL_PORT=$((PORT_BASE + 1))
    REDIS_PORT=$((PORT_BASE + 2))
    AMQP_PORT=$((PORT_BASE + 3))
    DIST_PORT=$((PORT_BASE + 4))
    EPMD_PORT=$((PORT_BASE + 5))
    RABBIT_NODE=tallyd-$PORT_BASE@localhost

    TIMEOUT=${TALLYD_STACK_TIMEOUT:-120}
    [[ $TIMEOUT =~ ^[1-9][0-9]{0,4}$ ]] || die "TALLYD_STACK_TIMEOUT is '$TIMEOUT': set a number of seconds."

    LAB_DIR=$root/target/lab
    stack_versions
}

# A folder's stack cannot move to other ports while one of its servers runs, or after RabbitMQ has stored data. RabbitMQ's node name
# contains the port base, and RabbitMQ uses the node name as the name of its database. With another port base, the node's queues
# would seem lost.
require_recorded_port_base() {
    local service
    [[ $RECORDED_PORT_BASE && $RECORDED_PORT_BASE != "$PORT_BASE" ]] || return 0
    for service in "${ALL_SERVICES[@]}"; do
        if [[ -d $STACK_DIR/rabbitmq/data ]] || running_pid "$service" >/dev/null; then
            die "$STACK_DIR was made with port base $RECORDED_PORT_BASE, not $PORT_BASE: leave TALLYD_STACK_PORT_BASE unset," \
                "set TALLYD_STACK_DIR to another folder, or wipe this one with 'dev/down --wipe'."
        fi
    done
}

# Fills SERVICES from the names on the command line, each once, in a fixed order. Without names, SERVICES gets all
# services.
choose_services() {
    local known name
    SERVICES=()
    for name in "$@"; do
        [[ " ${ALL_SERVICES[*]} " == *" $name "* ]] || usage_error "there is no service '$name'; the services are: ${ALL_SERVICES[*]}."
    done
    for known in "${ALL_SERVICES[@]}"; do
        if (($# == 0)) || [[ " $* " == *" $known "* ]]; then SERVICES+=("$known"); fi
    done
}

# Allows one dev/up or dev/down at a time per folder. 'dev/down --wipe' removes the lock file with the folder. A script may have
# waited for the lock of a removed file. So the script checks whether its lock file still exists, and locks the new file if necessary.
take_lock() {
    local file=$STACK_DIR/lock
    while :; do
        mkdir -p -- "$(dirname -- "$STACK_DIR")"
        # Only the owner can read the folder, because it has passwords and the servers can run as root.
        (umask 077 && mkdir -p -- "$STACK_DIR")
        [[ -w $STACK_DIR ]] || die "$STACK_DIR belongs to $(stat -c %U -- "$STACK_DIR"): set TALLYD_STACK_DIR to another folder."
        # Fails if the folder was just wiped.
        { exec {LOCK_FD}>>"$file"; } 2>/dev/null || continue
        if ! flock -n "$LOCK_FD"; then
            say "waiting for another dev/up or dev/down of $STACK_DIR ..."
            flock -w 600 "$LOCK_FD" || die "another dev/up or dev/down has held $file for ten minutes: wait for it, or stop it."
        fi
        [[ $file -ef /proc/self/fd/$LOCK_FD ]] && break
        exec {LOCK_FD}>&-
    done
}

# ---------------------------------------------------------------------------------------------- versions

# The versions in Debian's releases: name, service, release, package, the server's program. If a version belongs to this machine's
# release, its program is the one that this machine has installed. dev/lab installs all other versions into root folders,
# target/lab/roots/RELEASE.
VERSIONS=(
    "mariadb-10.11 mysql bookworm mariadb-server mariadbd"
    "mariadb-11.8 mysql trixie mariadb-server mariadbd"
    "mysql-9.7 mysql sid mysql-server mysqld"
    "redis-7.0 redis bookworm redis-server redis-server"
    "redis-8.0 redis trixie redis-server redis-server"
    "valkey-8 redis trixie valkey-server valkey-server"
    "valkey-9 redis sid valkey-server valkey-server"
    "rabbitmq-3.10 rabbitmq bookworm rabbitmq-server rabbitmq-server"
    "rabbitmq-4.0 rabbitmq trixie rabbitmq-server rabbitmq-server"
    "rabbitmq-4.3 rabbitmq sid rabbitmq-server rabbitmq-server"
)

# version_row NAME: prints its line of VERSIONS.
version_row() {
    local row
    for row in "${VERSIONS[@]}"; do
        if [[ ${row%% *} == "$1" ]]; then echo "$row" && return; fi
    done
    return 1
}

# Prints this machine's release, if it is Debian.
own_release() { sed -n 's/^VERSION_CODENAME=//p' /etc/os-release 2>/dev/null || true; }

# Fills FROM, ROOT and PROGRAM for each service. FROM has the version's name, and is empty for the installed version. ROOT has
# the version's root folder, and is empty if the version has no root folder. PROGRAM has the server's program.
declare -A FROM=() ROOT=() PROGRAM=()
stack_versions() {
    local service variable recorded row of release
    for service in "${ALL_SERVICES[@]}"; do
        variable=TALLYD_STACK_${service^^}_FROM recorded=
        [[ ! -s $STACK_DIR/$service/from ]] || recorded=$(<"$STACK_DIR/$service/from")
        FROM[$service]=${!variable:-$recorded} ROOT[$service]=
        case $service in
        mysql) PROGRAM[$service]=mariadbd ;;
        *) PROGRAM[$service]=$service-server ;;
        esac
        [[ ${FROM[$service]} ]] || continue
        # A folder can belong to a version that has been removed from VERSIONS. dev/down can still stop the servers of this folder and
        # wipe the folder, but dev/up rejects the folder.
        row=$(version_row "${FROM[$service]}") || { [[ ! ${!variable:-} ]] && continue; } ||
            die "$variable is '${FROM[$service]}', which is not in 'dev/lab --list'."
        read -r _ of release _ "PROGRAM[$service]" <<<"$row"
        [[ $of == "$service" ]] || die "$variable is '${FROM[$service]}', but this is a version of $of, not of $service."
        [[ $release == "$(own_release)" ]] || ROOT[$service]=$LAB_DIR/roots/$release
    done
}

# A server must not use data that a server of another version wrote.
require_recorded_version() {
    local recorded=
    [[ ! -s $STACK_DIR/$1/from ]] || recorded=$(<"$STACK_DIR/$1/from")
    [[ $recorded == "${FROM[$1]}" ]] || { [[ ! -d $STACK_DIR/$1/data ]] && ! running_pid "$1" >/dev/null; } ||
        die "$1: $STACK_DIR was made with ${recorded:-the installed version}, not with ${FROM[$1]:-the installed version}: set TALLYD_STACK_DIR to another folder, or" \
            "wipe this one with 'dev/down --wipe $1'."
    [[ ! ${FROM[$1]} ]] || version_row "${FROM[$1]}" >/dev/null ||
        die "$1: $STACK_DIR/$1 was made with ${FROM[$1]}, which is no longer in 'dev/lab --list': wipe it with 'dev/down --wipe $1'."
    [[ ! ${ROOT[$1]} || -d ${ROOT[$1]} ]] || die "$1: ${FROM[$1]} is not installed: install it with 'dev/lab --build'."
}

# inside SERVICE: fills INSIDE with the first words of a command that runs a program in the service's version. If the version
# is installed in a root folder, the program runs in its own mount namespace. There, the folder's /usr and /etc replace the machine's
# /usr and /etc. All other paths stay the same, including the data and /tmp. No process is forked, and nothing stays mounted afterwards.
inside() { inside_root "${ROOT[$1]}"; }
inside_root() {
    INSIDE=()
    [[ $1 ]] || return 0
    local checkout=
    # A checkout under /usr would be hidden, so it is mounted into the folder first.
    [[ $CHECKOUT != /usr/* ]] || checkout="mkdir -p \"\$0$CHECKOUT\" && mount --bind '$CHECKOUT' \"\$0$CHECKOUT\" && "
    # shellcheck disable=SC2016 # Expanded by the inner shell.
    INSIDE=(unshare --mount -- /bin/sh -c "$checkout"'mount --rbind "$0/etc" /etc && mount --rbind "$0/usr" /usr || exit 125
        PATH=/usr/sbin:/usr/bin exec "$@"' "$1")
}

# ---------------------------------------------------------------------------------------------- processes

# Besides the three services there is epmd, Erlang's port mapper, which belongs to RabbitMQ.
is_program() {
    case $1:$2 in
    mysql:mariadbd | mysql:mysqld | redis:redis-server | redis:valkey-server | rabbitmq:beam.smp | epmd:epmd) ;;
    *) return 1 ;;
    esac
}

# Every server starts with this mark in its environment. The mark identifies our processes: a pid alone is not enough, because the system reuses pids.
process_mark() { echo "TALLYD_STACK_SERVER=$STACK_DIR/$1"; }

# is_ours SERVICE PID: checks the program and our mark. (A zombie has no program and no environment, and /proc hides the environments of other users.)
is_ours() {
    local comm mark match=-zqxF
    [[ $2 =~ ^[1-9][0-9]*$ ]] || return 1
    { read -r comm <"/proc/$2/comm"; } 2>/dev/null || return 1
    is_program "$1" "$comm" || return 1
    mark=$(process_mark "$1")
    # If our epmd has died, the broker or rabbitmqctl starts another epmd. This epmd inherits the mark of the program
    # that started it.
    if [[ $1 == epmd ]]; then mark=$(process_mark '') match=-zqF; fi
    grep "$match" -- "$mark" "/proc/$2/environ" 2>/dev/null
}

# running_pid SERVICE: prints the pid in the service's pid file, if that process is running and ours.
running_pid() {
    local pid=
    [[ ! -s $STACK_DIR/$1/pid ]] || pid=$(<"$STACK_DIR/$1/pid")
    is_ours "$1" "$pid" && echo "$pid"
}

# all_pids SERVICE: prints the pids of all our processes of the service, even if the pid file is missing ('cargo clean' deletes the whole folder while
# the servers run).
all_pids() {
    local proc comm
    for proc in /proc/[1-9]*; do
        # Reading a name is cheap, so only processes with a matching name are checked further.
        { read -r comm <"$proc/comm"; } 2>/dev/null || continue
        if is_program "$1" "$comm" && is_ours "$1" "${proc##*/}"; then echo "${proc##*/}"; fi
    done
}

# stop_pids SERVICE SECONDS PID...: sends SIGTERM, then SIGKILL to processes that still run after SECONDS. With 0 seconds, stop_pids sends
# SIGKILL immediately.
stop_pids() {
    local service=$1 seconds=$2 pid
    shift 2
    for pid in "$@"; do
        is_ours "$service" "$pid" || continue
        if ((seconds > 0)); then
            # A process frozen with SIGSTOP handles SIGTERM only after SIGCONT.
            kill -TERM "$pid" 2>/dev/null || true
            kill -CONT "$pid" 2>/dev/null || true
            wait_until "$seconds" gone "$service" "$pid" && continue
            say "$service: pid $pid did not stop within $seconds s, killing it"
        fi
        kill -KILL "$pid" 2>/dev/null || true
        wait_until 10 gone "$service" "$pid" || die "$service: pid $pid is still running 10 s after SIGKILL."
    done
}

gone() { ! is_ours "$1" "$2"; }

# ---------------------------------------------------------------------------------------------- waiting

now_ms() { echo $((${EPOCHREALTIME/[.,]/} / 1000)); }

# wait_until SECONDS COMMAND...: repeats the command until it succeeds. Fails after SECONDS.
wait_until() {
    local deadline=$(($(now_ms) + $1 * 1000))
    shift
    until "$@"; do
        (($(now_ms) < deadline)) || return 1
        sleep 0.05
    done
}

port_answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# ---------------------------------------------------------------------------------------------- RabbitMQ

# Fills RABBIT_ENV. With these variables, RabbitMQ's server and command line tools use our node, and ignore /etc and the caller's environment. Use
# only the scripts in RABBIT_BIN with them: the scripts in /usr/sbin switch the user and drop the environment.
RABBIT_BIN=/usr/lib/rabbitmq/bin
rabbit_env() {
    local dir=$STACK_DIR/rabbitmq
    RABBIT_ENV=(
        PATH="$PATH" LC_ALL="$LC_ALL" HOME="$dir/home"
        ERL_EPMD_PORT="$EPMD_PORT" ERL_EPMD_ADDRESS=127.0.0.1
        RABBITMQ_NODENAME="$RABBIT_NODE"
        RABBITMQ_DIST_PORT="$DIST_PORT"
        RABBITMQ_CONF_ENV_FILE="$dir/rabbitmq-env.conf"
        RABBITMQ_CONFIG_FILE="$dir/rabbitmq.conf"
        RABBITMQ_ADVANCED_CONFIG_FILE="$dir/advanced.config"
        RABBITMQ_ENABLED_PLUGINS_FILE="$dir/enabled_plugins"
        RABBITMQ_MNESIA_BASE="$dir/data"
        RABBITMQ_LOG_BASE="$dir"
        RABBITMQ_LOGS="$dir/server.log"
        RABBITMQ_GENERATED_CONFIG_DIR="$dir/generated"
        # The command line tools are Erlang nodes, too. By default, these tools would listen on all addresses.
        RABBITMQ_CTL_ERL_ARGS="-kernel inet_dist_use_interface {127,0,0,1}"
    )
}
