#!/bin/sh
# Publishes a like through `tallyd gateway`, and reads the number: like.sh KIND TARGET_ID USER_ID
set -eu
gateway=${TALLYD_GATEWAY:-http://127.0.0.1:9191} authorization="Authorization: Bearer ${TALLYD_TOKEN-}"
# The time of the click. A retry sends the same time.
at=$(($(date +%s%N) / 1000))
curl --silent --show-error --fail-with-body --max-time 5 --retry 5 --retry-connrefused \
    --header "$authorization" --header 'Content-Type: application/json' --url "$gateway/v1/events" \
    --data "{\"type\": \"like\", \"kind\": \"$1\", \"target_id\": \"$2\", \"user_id\": \"$3\", \"at\": $at}"
echo
curl --silent --show-error --fail-with-body --max-time 5 --header "$authorization" --url "$gateway/v1/counters?kind=$1&ids=$2"
