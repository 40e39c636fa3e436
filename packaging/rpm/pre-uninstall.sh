# Not at an upgrade, which is 1.
if [ "$1" = 0 ] && [ -d /run/systemd/system ]; then systemctl --quiet disable --now tallyd.service tallyd-gateway.service || true; fi
