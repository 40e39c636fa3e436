#!/bin/sh
# Creates the accounts of the daemon and of the API servers. Choose your own passwords. Run this script as root, or as RabbitMQ's user.
set -eu
rabbitmqctl add_user tallyd choose-one
rabbitmqctl set_permissions tallyd '^tally\.' '^(tally\.|amq\.default$)' '^tally\.'
rabbitmqctl add_user tallyd_api choose-another
rabbitmqctl set_permissions tallyd_api '' '^tally\.events$' ''
