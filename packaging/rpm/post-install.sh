if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
if [ "$1" = 1 ]; then
    echo 'tallyd is installed and not started. As root: tallyd init. It asks for your servers and says what comes next.'
else
    echo 'tallyd: the former version goes on running. /usr/share/doc/tallyd/docs/operations/upgrade.md says how to restart it.'
fi
