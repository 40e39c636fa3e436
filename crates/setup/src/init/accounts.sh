#!/bin/sh
# Creates tallyd's accounts in MySQL, RabbitMQ and Redis. `tallyd init` wrote this script for an administrator. Read it
# first. The script contains no passwords: it reads them from the files in PASSWORDS. It changes no account that exists.
#
#   sh accounts.sh                creates the accounts of all three servers, as root on their machine
#   sh accounts.sh mysql redis    creates only these accounts, if a server is on another machine
#
# To run the script on another machine, copy it and the password files of that server (see the functions read_...), and
# set PASSWORDS to their folder. The commands must log in as an administrator. For Redis, set REDISCLI_AUTH to the password.
: "${PASSWORDS:=@PASSWORDS@}"
: "${MYSQL:=@MYSQL_CLIENT@}"
: "${RABBITMQCTL:=rabbitmqctl}"
: "${RABBITMQ_PLUGINS:=rabbitmq-plugins}"
: "${REDIS_CLI:=@REDIS_CLIENT@}"
: "${REDIS_NODES:=@REDIS_NODES@}"

set -eu

stop() {
    echo "accounts.sh: $1" >&2
    exit 1
}

cd -- "$PASSWORDS" || stop "run this as root, or set PASSWORDS to the folder of the password files"

# password FILE: prints the password. Statements contain the password in quotes, so quotes, backslashes and spaces are
# not allowed.
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

# free SERVER NAMES: stops if one of tallyd's accounts is among the names, because it may be the site's own.
free() {
    for account in tallyd tallyd_api; do
        if printf '%s\n' "$2" | cut -f 1 | grep -qx "$account"; then
            stop "$1: the account $account exists. If it is tallyd's, delete it and run this again. No account was changed"
        fi
    done
}

read_mysql() {
@MYSQL_PASSWORDS@
}

read_rabbitmq() {
@RABBITMQ_PASSWORDS@
    accounts=$($RABBITMQCTL -q list_users) || stop "rabbitmq: run this as root, or set RABBITMQCTL"
    free rabbitmq "$accounts"
}

read_redis() {
@REDIS_PASSWORDS@
    for node in $REDIS_NODES; do free redis "$(redis_ask "$node" 'ACL USERS')"; done
}

make_mysql() {
    $MYSQL <<SQL || stop "mysql: run this as root on the machine of the server, or set MYSQL, as in MYSQL='mysql --user=me --password'. If CREATE USER failed, the account exists: if it is tallyd's, drop it"
@SQL@
SQL
}

# rabbitmq_account NAME PASSWORD: creates the account. Other users could see a password in
# an argument, and rabbitmqctl 4 of Debian does not read a piped password. So the function imports definitions that
# contain only the account.
rabbitmq_account() {
    file=$(mktemp)
    trap 'rm -f -- "$file"; exit 1' HUP INT TERM
    printf '{"users": [{"name": "%s", "password": "%s", "tags": []}]}\n' "$1" "$2" >"$file"
    # Debian's rabbitmqctl runs as the user rabbitmq. A rabbitmqctl in a container can't open the file, so the script passes the file as standard
    # input.
    chown rabbitmq "$file" 2>/dev/null || true
    $RABBITMQCTL -q import_definitions /dev/stdin <"$file" >/dev/null && failed='' || failed=1
    rm -f -- "$file"
    [ ! "$failed" ]
}

# rabbitmq_account_without_password NAME: creates an account that logs in with a certificate.
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
    # Saves the accounts in the ACL file or in redis.conf. Otherwise Redis loses the accounts at its next restart.
    [ "$(redis_ask "$1" 'ACL SAVE')" = OK ] || [ "$(redis_ask "$1" 'CONFIG REWRITE')" = OK ] ||
        echo "accounts.sh: Redis at $1 loses the accounts at its next restart: give it an aclfile or a configuration file, restart it, and run 'sh accounts.sh redis'" >&2
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
