# $1 is 0 for an uninstall, and 1 for an upgrade. An upgrade must not stop the services.
if [ "$1" = 0 ] && [ -d /run/systemd/system ]; then systemctl --quiet disable --now tallyd.service tallyd-gateway.service || true; fi
