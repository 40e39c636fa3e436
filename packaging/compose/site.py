"""The small site of compose.yaml: a page of videos, and visitors who like them. It only uses tallyd's gateway.

GET / is the page, POST /like/ID and /unlike/ID are your own clicks. GATEWAY and TOKEN are the gateway's address and token.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GATEWAY, TOKEN = os.environ["GATEWAY"], os.environ["TOKEN"]
PORT = 8080
VIDEOS = ["A cat opens a door", "Sourdough in a day", "Night train to Lisbon", "How a lock works", "Rain on a tin roof", "Ten chess traps"]
ME = 1  # your user id; visitors have the others
VISITORS = 100_000
CLICKS_A_SECOND = 40

PAGE = """<!doctype html><meta charset="utf-8"><title>Videos</title>
<style>body{font:1rem system-ui;max-width:36rem;margin:3rem auto;color-scheme:light dark}li{margin:.6rem 0}output{float:right}</style>
<h1>Videos</h1><ol>%s</ol><p>Visitors like about %d videos a second. <a href="http://127.0.0.1:8255/">tallyd's status page</a>
(any user, password <code>%s</code>)</p>
<script>
async function refresh() {
  const answer = await fetch('/counters')
  if (answer.ok) for (const video of (await answer.json()).counters)
    document.querySelector(`output[name="${video.id}"]`).value = video.like ?? 'unknown'
}
const click = button => fetch(button.dataset.path, {method: 'POST'}).then(refresh)
setInterval(refresh, 1000); refresh()
</script>"""
ROW = """<li>%s <button data-path="/like/%d" onclick="click(this)">Like</button>
<button data-path="/unlike/%d" onclick="click(this)">Unlike</button> <output name="%d"></output>"""


def ask(path, events=None):
    """Returns the gateway's answer. If there are events, publishes them with POST."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    body = None if events is None else json.dumps(events).encode()
    with urllib.request.urlopen(urllib.request.Request(GATEWAY + path, body, headers), timeout=10) as answer:
        return answer.read()


def event(kind, video, user):
    # The time of the click. If the same like is sent again with this time, tallyd counts it only once.
    return {"type": kind, "kind": "video", "target_id": str(video), "user_id": str(user), "at": time.time_ns() // 1000}


def visit():
    """Simulates visitors until the process ends. Sends clicks again that failed during an outage of the gateway."""
    popularity = [1 / rank for rank in range(1, len(VIDEOS) + 1)]
    while True:
        videos = random.choices(range(1, len(VIDEOS) + 1), popularity, k=CLICKS_A_SECOND)
        clicks = [event(random.choice(["like"] * 4 + ["unlike"]), video, random.randint(2, VISITORS)) for video in videos]
        while True:
            time.sleep(1)
            try:
                ask("/v1/events", clicks)
                break
            except OSError as error:
                print(f"the gateway did not accept {len(clicks)} clicks, sending them again: {error}")


class Site(BaseHTTPRequestHandler):
    def answer(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def relay(self, path, events=None):
        try:
            self.answer("application/json", ask(path, events))
        except OSError as error:
            self.send_error(502, explain=str(error))

    def do_GET(self):
        ids = range(1, len(VIDEOS) + 1)
        if self.path == "/counters":
            self.relay(f"/v1/counters?kind=video&metrics=like&ids={','.join(map(str, ids))}")
        elif self.path == "/":
            rows = "".join(ROW % (title, video, video, video) for video, title in zip(ids, VIDEOS))
            self.answer("text/html; charset=utf-8", (PAGE % (rows, CLICKS_A_SECOND, TOKEN)).encode())
        else:
            self.send_error(404)

    def do_POST(self):
        _, kind, video = (self.path.split("/") + ["", ""])[:3]
        if kind in ("like", "unlike") and video.isdigit() and 1 <= int(video) <= len(VIDEOS):
            self.relay("/v1/events", event(kind, video, ME))
        else:
            self.send_error(404)

    def log_message(self, *_):
        """Logs nothing. By default, the server would log a line for each request."""


# The first process of a container ignores SIGTERM unless it sets a handler.
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
threading.Thread(target=visit, daemon=True).start()
print(f"http://127.0.0.1:{PORT}/")
ThreadingHTTPServer(("", PORT), Site).serve_forever()
