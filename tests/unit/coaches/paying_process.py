"""Asks 100 questions of a server over HTTP, 8 at a time, and uses every reply: `run_folder url [cache]`.

The key comes from the environment, as a provider's does, and goes into a header.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.provider import CoachReply, CoachRequest
from tests.unit.coaches.calls import PRICES, make_reply, make_request

CALLS = 100
IN_FLIGHT = 8


def post(url: str, request: CoachRequest) -> CoachReply:
    body = json.dumps({"question": request.question}).encode()
    headers = {"x-api-key": os.environ["COACH_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
        return make_reply(answer.read().decode())


async def main(folder: Path, url: str, cache: str | None) -> None:
    guard = BudgetGuard(model="m", prices={"m": PRICES}, budget_usd=1.0, cache=cache)
    guard.bind(folder)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def verdict(number: int) -> None:
        request = make_request(f"step {number}")
        async with slots:
            reply = await guard.before(request)
            if reply is None:
                await guard.sent(request)
                reply = await asyncio.to_thread(post, url, request)
                await guard.after(request, reply)
        print(json.dumps([number, reply.text]), flush=True)

    await asyncio.gather(*(verdict(number) for number in range(CALLS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None))
