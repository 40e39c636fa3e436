if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
if [ "$1" = 1 ]; then
    echo 'tallyd is installed and not started. As root: tallyd init. It asks for your servers and prints the next steps.'
else
    echo 'tallyd: the former version keeps running. To restart it, see /usr/share/doc/tallyd/docs/operations/upgrade.md.'
fi
