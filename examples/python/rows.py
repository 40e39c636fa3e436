"""Queries MySQL, with a timeout for every wait."""

import os
import time
import urllib.parse

import pymysql

MYSQL_URL = os.environ.get("MYSQL_URL", "mysql://root@127.0.0.1:3306/tally")  # the primary server
TIMEOUT_S = int(os.environ.get("TIMEOUT_S", "5"))  # the timeout of each server
# After a failure, MySQL gets no query during this time, so that not every request has to wait for MySQL.
REST_S = 5

rests_until = 0.0


def query(sql, *values):
    """Runs a query and returns the rows."""
    global rests_until
    if time.monotonic() < rests_until:
        raise pymysql.OperationalError("MySQL failed a moment ago and is skipped")
    url = urllib.parse.urlsplit(MYSQL_URL)
    try:
        connection = pymysql.connect(
            host=url.hostname,
            port=url.port or 3306,
            user=urllib.parse.unquote(url.username or ""),
            password=urllib.parse.unquote(url.password or ""),
            database=url.path.lstrip("/"),
            connect_timeout=TIMEOUT_S,
            read_timeout=TIMEOUT_S,
            write_timeout=TIMEOUT_S,
        )
        # This statement closes the connection, even if the query times out.
        with connection, connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall()
    except pymysql.OperationalError:
        rests_until = time.monotonic() + REST_S
        raise
