#!/bin/sh
# Makes tallyd's accounts in MySQL, RabbitMQ and Redis. `tallyd init` wrote it for an administrator, who reads it first.
# It holds no password: it reads the files beside it. It can run again, which sets passwords and rights again.
#
#   sh accounts.sh                all three, as root on the machine of the servers
#   sh accounts.sh mysql redis    some of them; for a server elsewhere copy this folder there
#
# How an administrator logs in. REDISCLI_AUTH can hold Redis' password.
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

# password FILE: prints it. Statements hold it between quotes, so a quote, a backslash or a space would break them.
password() {
    LC_ALL=C
    [ -r "$1" ] && [ -s "$1" ] ||
        stop "$PWD/$1 is missing, empty or not readable: put it there and run this again. No account was changed"
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

# rabbitmq_account NAME PASSWORD: makes it, or sets its password again. Other users would see an argument, and Debian's rabbitmqctl 4 does
# not read a piped password: hence a file of definitions, which change nothing else.
rabbitmq_account() {
    file=$(mktemp)
    printf '{"users": [{"name": "%s", "password": "%s", "tags": []}]}\n' "$1" "$2" >"$file"
    # Debian's rabbitmqctl becomes this user. As its input the file reaches a rabbitmqctl in a container, too.
    chown rabbitmq "$file" 2>/dev/null || true
    $RABBITMQCTL -q import_definitions /dev/stdin <"$file" >/dev/null && failed='' || failed=1
    rm -f -- "$file"
    [ ! "$failed" ]
}

# One that logs in by its certificate.
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
        stop "redis: $1 answers '$answer'. An administrator's password is read from REDISCLI_AUTH"
}

redis_node() {
@REDIS@
    # In the file of the accounts, or in redis.conf: otherwise a restart forgets them.
    [ "$(redis_ask "$1" 'ACL SAVE')" = OK ] || [ "$(redis_ask "$1" 'CONFIG REWRITE')" = OK ] ||
        echo "accounts.sh: Redis at $1 forgets the accounts at its next restart: it has no file for them" >&2
}

make_redis() {
    for node in $REDIS_NODES; do redis_node "$node"; done
}

for server in ${*:-mysql rabbitmq redis}; do
    case $server in
    mysql | rabbitmq | redis) ;;
    *)
        echo "accounts.sh: there is no '$server': mysql, rabbitmq or redis" >&2
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
