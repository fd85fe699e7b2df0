#!/usr/bin/env python3
"""A proxy on loopback between a client and an S3 server, that does one fault at a given request.

    with FaultyProxy("127.0.0.1:8333") as proxy:
        proxy.arm("no_answer", at=7)      # the eighth request from now on
        ... run a client against proxy.host ...
        proxy.requests, proxy.was_done

FAULTS has them by name, each with the rows of docs/fault-rows.md that it is of.

    faulty_proxy.py RATE SEED COMMAND...      answers 5xx to that part of all requests, done or not

The server is that of AWS_ENDPOINT_URL. Returns the command's code.
"""
import asyncio
import dataclasses
import email.utils
import os
import random
import subprocess
import sys
import threading
import time
import typing

from proxying import LIMIT, Message, has_body, read_head

HOUR = 3600


class Cut(Exception):
    """Both connections end here."""


def answer(status, code="", headers="", body=None):
    text = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>" if body is None and code else body or ""
    return (f"HTTP/1.1 {status} Text\r\nContent-Length: {len(text)}\r\nx-amz-request-id: FAULT\r\n{headers}\r\n{text}").encode()


def is_write(request):
    return request.first[0] in ("PUT", "POST")


def is_commit(request):
    """Of a single object, or of the parts of one."""
    method, path = request.first[0], request.first[1]
    return "uploads" not in path and (method == "POST" and "uploadId=" in path or
                                      method == "PUT" and "if-none-match" in request.fields or "if-match" in request.fields and method == "PUT")


def is_complete(request):
    return request.first[0] == "POST" and "uploadId=" in request.first[1]


def is_copy(request):
    return request.first[0] == "PUT" and "x-amz-copy-source" in request.fields


def is_range(request):
    return request.first[0] == "GET" and "range" in request.fields


def anything(_):
    return True


def is_not_of_credentials(request):
    return request.first[0] in ("GET", "HEAD", "PUT", "POST", "DELETE")


@dataclasses.dataclass
class Exchange:
    """What a fault may do with a request."""
    request: Message
    body: bytes
    server: asyncio.StreamReader
    to_server: asyncio.StreamWriter
    to_client: asyncio.StreamWriter

    async def ask(self):
        """The server's answer: its head and body, as they came."""
        self.to_server.write(self.request.head + self.body)
        await self.to_server.drain()
        head = await read_head(self.server)
        if head is None:
            raise Cut
        if not has_body(self.request, head):
            return head, b""
        if not head.is_chunked():
            return head, await self.server.readexactly(head.length())
        body = b""
        while True:
            line = await self.server.readline()
            size = int(line.split(b";")[0], 16)
            body += line + await self.server.readexactly(size + 2)
            if size == 0:
                return head, body

    def tell(self, data):
        if self.request.first[0] == "HEAD":
            data = data[:data.index(b"\r\n\r\n") + 4]
        self.to_client.write(data)


async def dropped(_):
    raise Cut


async def half_sent(exchange):
    whole = exchange.request.head + exchange.body
    exchange.to_server.write(whole[:len(exchange.request.head) + len(exchange.body) // 2])
    await exchange.to_server.drain()
    raise Cut


async def no_answer(exchange):
    await exchange.ask()
    raise Cut


async def half_an_answer(exchange):
    head, body = await exchange.ask()
    exchange.to_client.write(head.head + body[:len(body) // 2])
    await exchange.to_client.drain()
    raise Cut


async def one_byte_a_second(exchange):
    head, body = await exchange.ask()
    for byte in head.head + body:
        exchange.to_client.write(bytes([byte]))
        await exchange.to_client.drain()
        await asyncio.sleep(1)


def refused(status, code="", headers=lambda: ""):
    async def fault(exchange):
        exchange.tell(answer(status, code, headers()))
    return fault


def done_and_refused(status, code):
    async def fault(exchange):
        await exchange.ask()
        exchange.tell(answer(status, code))
    return fault


async def another_range(exchange):
    head, body = await exchange.ask()
    told = head.fields.get("content-range", "")
    first = told.removeprefix("bytes ").split("-")[0]
    exchange.tell(head.head.replace(f"bytes {first}-".encode(), f"bytes {int(first or 0) + 1}-".encode()) + body)


async def all_for_a_range(exchange):
    head, body = await exchange.ask()
    exchange.tell(head.head.replace(b" 206 ", b" 200 ") + body)


async def other_bytes(exchange):
    head, body = await exchange.ask()
    middle = len(body) // 2
    exchange.tell(head.head + body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1:] if body else head.head)


def misread(status):
    """Where a condition does not hold, that status instead of 412."""
    async def fault(exchange):
        head, body = await exchange.ask()
        exchange.tell(answer(status) if head.first[1] == "412" else head.head + body)
    return fault


def date(seconds):
    return lambda: f"Date: {email.utils.formatdate(time.time() + seconds, usegmt=True)}\r\n"


def elsewhere():
    return "x-amz-bucket-region: eu-west-7\r\n"


@dataclasses.dataclass
class Fault:
    rows: str
    do: typing.Callable
    fits: typing.Callable = anything
    times: int = 1  # requests, one behind the other
    waits: bool = False  # the client has to notice that it takes too long


FAULTS = {
    "slow_down": Fault("O01", refused(503, "SlowDown"), times=3),
    "internal_error": Fault("O02", refused(500, "InternalError")),
    "internal_error_when_done": Fault("O02", done_and_refused(500, "InternalError")),
    "dropped": Fault("O03", dropped),
    "half_sent": Fault("O04", half_sent),
    "no_answer": Fault("O05 O10 O21", no_answer),
    "half_an_answer": Fault("O06", half_an_answer),
    "other_bytes": Fault("O07", other_bytes, is_range),
    "another_range": Fault("O08", another_range, is_range),
    "all_for_a_range": Fault("O08", all_for_a_range, is_range),
    "error_in_200": Fault("O09", refused(200, "InternalError"), lambda r: is_complete(r) or is_copy(r)),
    "error_in_200_when_done": Fault("O09", done_and_refused(200, "InternalError"), lambda r: is_complete(r) or is_copy(r)),
    "gone_when_done": Fault("O10", done_and_refused(404, "NoSuchUpload"), is_complete),
    "refused_when_done": Fault("O11", done_and_refused(412, "PreconditionFailed"), is_commit),
    "refused": Fault("O11", refused(412, "PreconditionFailed"), is_commit),
    "conflict": Fault("O12", refused(409, "ConditionalRequestConflict"), is_commit),
    "not_modified": Fault("O13", misread(304), is_write),
    "not_implemented": Fault("O14", misread(501), is_write),
    "skewed_clock": Fault("O15", refused(403, "RequestTimeTooSkewed", date(0)), is_not_of_credentials),
    "expired_token": Fault("O15", refused(400, "ExpiredToken"), lambda r: r.first[0] != "HEAD"),
    "another_region": Fault("O16", refused(301, "PermanentRedirect", elsewhere)),
    "absent": Fault("O17", refused(404, "NoSuchKey"), lambda r: r.first[0] in ("GET", "HEAD")),
    "one_byte_a_second": Fault("O19", one_byte_a_second, waits=True),
    "bad_digest": Fault("O23", refused(400, "BadDigest"), lambda r: is_write(r) and r.length() > 0),
    "replaced": Fault("O24", refused(412, "PreconditionFailed"), is_range),
    "not_removed": Fault("O25 O27", refused(403, "AccessDenied"), lambda r: r.first[0] == "DELETE"),
    "denied": Fault("O30", refused(403, "AccessDenied")),
}


RANDOM = ["internal_error", "internal_error_when_done", "slow_down"]


class FaultyProxy:
    def __init__(self, upstream, rate=0.0, seed=1):
        self.upstream = upstream.rsplit(":", 1)
        self.rate, self.draw = rate, random.Random(seed)
        self.disarm()

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self.serve, "127.0.0.1", 0, limit=LIMIT), self.loop).result()
        self.host = "127.0.0.1:%d" % self.server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *failure):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def arm(self, fault, at):
        """From the request with that number on, from 0. Before the client starts."""
        self.requests, self.fault, self.at, self.done, self.seen = 0, fault, at, 0, ""

    def disarm(self):
        self.arm(None, -1)

    @property
    def was_done(self):
        return self.done > 0

    def next_fault(self, request):
        number = self.requests
        self.requests += 1
        if self.draw.random() < self.rate:
            self.done += 1
            return FAULTS[self.draw.choice(RANDOM)]
        fault = FAULTS.get(self.fault)
        if fault is None or not self.at <= number or self.done >= fault.times or not fault.fits(request):
            return None
        if fault.times == 1 and number != self.at:
            return None
        self.done += 1
        self.seen += f" {request.first[0]} {request.first[1]}"
        return fault

    async def serve(self, client, to_client):
        server, to_server = await asyncio.open_connection(*self.upstream, limit=LIMIT)
        try:
            while request := await read_head(client):
                body = await client.readexactly(request.length())
                fault = self.next_fault(request)
                exchange = Exchange(request, body, server, to_server, to_client)
                if fault is None:
                    head, data = await exchange.ask()
                    to_client.write(head.head + data)
                else:
                    await fault.do(exchange)
                await to_client.drain()
        except (Cut, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # either side may go at any time
        finally:
            to_server.close()
            to_client.close()


def main():
    rate, seed, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"), rate, seed) as proxy:
        code = subprocess.run(command, env={**os.environ, "AWS_ENDPOINT_URL": f"http://{proxy.host}"}, check=False).returncode
        print(f"{proxy.done} of {proxy.requests} requests were answered with 500 or 503")
    return code


if __name__ == "__main__":
    sys.exit(main())
