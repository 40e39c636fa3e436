#!/bin/sh
# The accounts of the daemon and of the API servers, with passwords of your own; as root, or as the user that RabbitMQ runs as.
set -eu
rabbitmqctl add_user tallyd choose-one
rabbitmqctl set_permissions tallyd '^tally\.' '^(tally\.|amq\.default$)' '^tally\.'
rabbitmqctl add_user tallyd_api choose-another
rabbitmqctl set_permissions tallyd_api '' '^tally\.events$' ''
