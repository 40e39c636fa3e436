"""The tests call the installed package through this program. Calls and results are JSON lines. Calls can overlap."""

import asyncio
import json
import os
import sys
import threading

from tallyd import AsyncTallyd, Tallyd

lock = threading.Lock()


def answer(request, **said):
    with lock:
        print(json.dumps({"id": request["id"], **said}), flush=True)


def value_of(value):
    return list(value.items()) if isinstance(value, dict) and "type" not in value else value


def failed(request, error):
    event = getattr(error, "event", getattr(error, "events", None))
    answer(request, error=type(error).__name__, message=str(error), event=event)


def fork(site):
    """Acts as a server process that makes its client and then forks."""
    child = os.fork()
    if child == 0:
        try:
            site.like("video", 77, os.getpid())
            site.close()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def with_threads():
    site = None

    def call(site, request):
        try:
            if request["do"] == "fork":
                value = fork(site)
            else:
                value = getattr(site, request["do"])(*request["with"], **request["options"])
            answer(request, value=value_of(value))
        except Exception as error:
            failed(request, error)

    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "open":
            if site is not None:
                site.close()
            site = Tallyd(**request["options"])
            answer(request, value=None)
        else:
            threading.Thread(target=call, args=(site, request), daemon=True).start()
    site.close()


async def with_asyncio():
    site, tasks = None, set()

    async def call(site, request):
        try:
            answer(request, value=value_of(await getattr(site, request["do"])(*request["with"], **request["options"])))
        except Exception as error:
            failed(request, error)

    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        if request["do"] == "open":
            if site is not None:
                await site.close()
            site = AsyncTallyd(**request["options"])
            answer(request, value=None)
        else:
            task = loop.create_task(call(site, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    await site.close()


if sys.argv[1] == "asyncio":
    asyncio.run(with_asyncio())
else:
    with_threads()
