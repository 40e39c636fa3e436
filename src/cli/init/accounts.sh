#!/bin/sh
# Creates tallyd's accounts in MySQL, RabbitMQ and Redis. `tallyd init` wrote it for an administrator. Read it first.
# It contains no passwords: it reads them from the files beside it. Run it again to set passwords and rights again.
#
#   sh accounts.sh                all three, as root on the machine of the servers
#   sh accounts.sh mysql redis    some of them; for a server on another machine copy this folder there
#
# Commands with an administrator's login. REDISCLI_AUTH can contain Redis' password.
: "${MYSQL:=@MYSQL_CLIENT@}"
: "${RABBITMQCTL:=rabbitmqctl}"
: "${RABBITMQ_PLUGINS:=rabbitmq-plugins}"
: "${REDIS_CLI:=@REDIS_CLIENT@}"
: "${REDIS_NODES:=@REDIS_NODES@}"

set -eu
cd -- "$(dirname -- "$0")"

stop() {
    echo "accounts.sh: $1" >&2
    exit 1
}

# password FILE: prints the password. Statements have it in quotes, so a quote, a backslash or a space would break them.
password() {
    LC_ALL=C
    [ -r "$1" ] && [ -s "$1" ] ||
        stop "$PWD/$1 is missing, empty or not readable: put the file there and run this again. No account was changed"
    text=$(cat "$1")
    case $text in
    '' | *[!A-Za-z0-9._~-]*) stop "$PWD/$1: write a password of letters, digits and . _ ~ - and run this again. No account was changed" ;;
    esac
    printf '%s\n' "$text"
}

read_mysql() {
@MYSQL_PASSWORDS@
}

read_rabbitmq() {
@RABBITMQ_PASSWORDS@
}

read_redis() {
@REDIS_PASSWORDS@
}

make_mysql() {
    $MYSQL <<SQL || stop "mysql: run this as root on the machine of the server, or set MYSQL, as in MYSQL='mysql --user=me --password'"
@SQL@
SQL
}

# rabbitmq_account NAME PASSWORD: creates the account, or sets its password again. Other users could see an argument, and Debian's rabbitmqctl 4
# does not read a piped password. So it imports a file of definitions, which changes nothing else.
rabbitmq_account() {
    file=$(mktemp)
    printf '{"users": [{"name": "%s", "password": "%s", "tags": []}]}\n' "$1" "$2" >"$file"
    # Debian's rabbitmqctl runs as this user. As standard input, the file also reaches a rabbitmqctl in a container.
    chown rabbitmq "$file" 2>/dev/null || true
    $RABBITMQCTL -q import_definitions /dev/stdin <"$file" >/dev/null && failed='' || failed=1
    rm -f -- "$file"
    [ ! "$failed" ]
}

# An account that logs in with its certificate.
rabbitmq_account_without_password() {
    rabbitmq_account "$1" "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
    $RABBITMQCTL -q clear_password "$1"
}

make_rabbitmq() {
@RABBITMQ@
}

# redis_ask NODE COMMAND
redis_ask() {
    host=${1%:*}
    host=${host#[}
    printf '%s\n' "$2" | $REDIS_CLI -h "${host%]}" -p "${1##*:}"
}

redis_account() {
    answer=$(redis_ask "$1" "$2")
    [ "$answer" = OK ] ||
        stop "redis: $1 answers '$answer'. If it requires a login, set REDISCLI_AUTH to an administrator's password"
}

redis_node() {
@REDIS@
    # Saves them in the ACL file or in redis.conf. Otherwise a restart forgets them.
    [ "$(redis_ask "$1" 'ACL SAVE')" = OK ] || [ "$(redis_ask "$1" 'CONFIG REWRITE')" = OK ] ||
        echo "accounts.sh: Redis at $1 loses the accounts at its next restart: give it an aclfile or a configuration file, and run this again" >&2
}

make_redis() {
    for node in $REDIS_NODES; do redis_node "$node"; done
}

for server in ${*:-mysql rabbitmq redis}; do
    case $server in
    mysql | rabbitmq | redis) ;;
    *)
        echo "accounts.sh: '$server' is unknown: use mysql, rabbitmq or redis" >&2
        exit 64
        ;;
    esac
    "read_$server"
done
for server in ${*:-mysql rabbitmq redis}; do
    echo "accounts.sh: $server ..."
    "make_$server"
done
echo "accounts.sh: done"
