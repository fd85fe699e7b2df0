#!/usr/bin/env python3
"""A proxy on loopback between a client and an S3 server, that does one fault at a given request.

    with FaultyProxy("127.0.0.1:8333") as proxy:
        proxy.arm("no_answer", at=7)      # the eighth request from now on
        ... run a client against proxy.host ...
        proxy.requests, proxy.was_done

FAULTS has them by name, each with the rows of docs/fault-rows.md that it is of.

    faulty_proxy.py RATE SEED COMMAND...      answers 5xx to that part of all requests, done or not
    faulty_proxy.py strange RATE SEED COMMAND...     gives these what is no answer: cut, empty, foreign or late

The server is that of AWS_ENDPOINT_URL; the command finds it as weka:// without the proxy. Returns the command's code.
"""
import asyncio
import collections
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
    earlier: typing.Callable = lambda: b""  # a good answer to another request

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


def with_body(status, body, headers=""):
    """An answer that says what it has."""
    return (f"HTTP/1.1 {status} Text\r\nContent-Length: {len(body)}\r\n{headers}\r\n").encode() + body


PAGE = b"<!DOCTYPE html><html><body>The network asks you to sign in.</body></html>"
OF_A_PAGE = "Content-Type: text/html\r\n"


def strange(status, body=b"", headers="", is_done=False):
    """A good status, and no answer of S3. `is_done`: the server has done what it was asked for."""
    async def fault(exchange):
        method = exchange.request.first[0]
        # What is empty is S3's own answer to a DELETE, and with an ETag to a HEAD of an empty object.
        if is_done or (method == "DELETE" and not body):
            await exchange.ask()
        is_empty_object = method == "HEAD" and not body
        exchange.tell(with_body(status, body, "" if is_empty_object else headers))
    return fault


def cut_whole(is_done):
    """What came of an answer, as if it were all of it."""
    async def fault(exchange):
        status, body = "200", b"   <Error><Code>InternalErr"
        if is_done:
            head, told = await exchange.ask()
            status, body = head.first[1], told[:len(told) // 2]
        exchange.tell(with_body(status, body))
    return fault


def answer_to_another(is_done):
    """A good one that the server gave to an earlier request, of which the proxy keeps the last of each kind."""
    async def fault(exchange):
        if is_done or exchange.request.first[0] == "DELETE":
            await exchange.ask()
        kept = exchange.earlier()
        exchange.tell(kept if kept else with_body("200", b""))
    return fault


async def late(exchange):
    """The client has given up by then."""
    head, body = await exchange.ask()
    await asyncio.sleep(LATE)
    exchange.tell(head.head + body)


async def twice(exchange):
    """What comes behind the answer is not that to the next request."""
    head, body = await exchange.ask()
    exchange.tell(head.head + body)
    exchange.tell(exchange.earlier() or b"HTTP/1.1 200 Text\r\nContent-Length: 0\r\n\r\n")


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


async def works(exchange):
    """For longer than the client has patience with others, with a blank now and then, as AWS does."""
    exchange.to_client.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(5):
        exchange.to_client.write(b"1\r\n \r\n")
        await exchange.to_client.drain()
        await asyncio.sleep(1)
    head, body = await exchange.ask()
    if head.is_chunked():
        exchange.to_client.write(body)
    else:
        exchange.to_client.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))


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
    "works": Fault("O19", works, is_complete, times=2, waits=True),
    "one_byte_a_second": Fault("O19", one_byte_a_second, waits=True),
    "bad_digest": Fault("O23", refused(400, "BadDigest"), lambda r: is_write(r) and r.length() > 0),
    "replaced": Fault("O24", refused(412, "PreconditionFailed"), is_range),
    "not_removed": Fault("O25 O27", refused(403, "AccessDenied"), lambda r: r.first[0] == "DELETE"),
    "denied": Fault("O30", refused(403, "AccessDenied")),
    "page_of_a_proxy": Fault("O09", strange("200", PAGE, OF_A_PAGE), times=3),
    "page_of_a_proxy_when_done": Fault("O09", strange("200", PAGE, OF_A_PAGE, True), times=3),
    "empty_answer": Fault("O09", strange("200"), times=3),
    "cut_answer": Fault("O09", cut_whole(False), times=3),
    "cut_answer_when_done": Fault("O09", cut_whole(True), times=3),
}


RANDOM = ["internal_error", "internal_error_when_done", "slow_down"]
# What is no answer, to a request that was done and to one that was not.
LATE = 3  # seconds
STRANGE = {
    "cut": [cut_whole(False), cut_whole(True)],
    "empty": [strange("200"), strange("204"), strange("200", is_done=True), strange("200", headers='ETag: "e"\r\n')],
    "foreign": [strange("200", PAGE, OF_A_PAGE), strange("200", PAGE, OF_A_PAGE, True), strange("202", b'{"ok": true}'),
                strange("200", PAGE, OF_A_PAGE + 'ETag: "page"\r\n'), answer_to_another(False), answer_to_another(True)],
    "late": [late, twice],
}
LATE_OF_ALL = 0.04  # each takes as long as the client has patience


class FaultyProxy:
    def __init__(self, upstream, rate=0.0, seed=1, is_strange=False):
        self.upstream = upstream.rsplit(":", 1)
        self.rate, self.draw, self.is_strange = rate, random.Random(seed), is_strange
        self.kept, self.counts = {}, collections.Counter()
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
        asyncio.run_coroutine_threadsafe(self.end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def end(self):
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def arm(self, fault, at):
        """From the request with that number on, from 0. Before the client starts."""
        self.requests, self.fault, self.at, self.done, self.seen, self.completes = 0, fault, at, 0, "", 0

    def disarm(self):
        self.arm(None, -1)

    @property
    def was_done(self):
        return self.done > 0

    def next_fault(self, request):
        number = self.requests
        self.requests += 1
        self.completes += is_complete(request)
        if self.draw.random() < self.rate:
            self.done += 1
            return self.drawn_strange(request) if self.is_strange else FAULTS[self.draw.choice(RANDOM)]
        fault = FAULTS.get(self.fault)
        if fault is None or not self.at <= number or self.done >= fault.times or not fault.fits(request):
            return None
        if fault.times == 1 and number != self.at:
            return None
        self.done += 1
        self.seen += f" {request.first[0]} {request.first[1]}"
        return fault

    def drawn_strange(self, request):
        kind = "late" if self.draw.random() < LATE_OF_ALL else self.draw.choice(["cut", "empty", "foreign"])
        self.counts[f"{kind} {request.first[0]}"] += 1
        return Fault("O09", self.draw.choice(STRANGE[kind]))

    def keep(self, request, head, body):
        """Not of the same object: an older answer about that is what a slow server says, and no proxy's."""
        is_empty_object = request.first[0] == "HEAD" and head.length() == 0
        if head.first[1] not in ("200", "204", "206") or is_empty_object:
            return
        path = request.first[1].partition("?")[0]
        kind = f"{request.first[0]} {'uploads' in request.first[1]} {'partNumber' in request.first[1]}"
        if not head.is_chunked():
            self.kept[kind] = (path, head.head + body)

    def earlier_than(self, request):
        """To a HEAD that to one: any other without a body would be what S3 says of an empty object, and one with a length to no
        HEAD has the client wait for a body."""
        path = request.first[1].partition("?")[0]
        found = [answer for kind, (of, answer) in self.kept.items()
                 if of != path and (request.first[0] == "HEAD") == kind.startswith("HEAD")]
        return self.draw.choice(found) if found else b""

    async def serve(self, client, to_client):
        server, to_server = await asyncio.open_connection(*self.upstream, limit=LIMIT)
        try:
            while request := await read_head(client):
                body = await client.readexactly(request.length())
                fault = self.next_fault(request)
                exchange = Exchange(request, body, server, to_server, to_client, lambda: self.earlier_than(request))
                if fault is None:
                    head, data = await exchange.ask()
                    self.keep(request, head, data)
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
    is_strange = sys.argv[1] == "strange"
    rate, seed, *command = sys.argv[2:] if is_strange else sys.argv[1:]
    upstream = os.environ["AWS_ENDPOINT_URL"]
    with FaultyProxy(upstream.removeprefix("http://"), float(rate), int(seed), is_strange) as proxy:
        environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://{proxy.host}", "WEKA_ENDPOINT_URL": upstream}
        if is_strange:
            environment.update(TESSERA_HTTP_STALL="1", TESSERA_HTTP_DEADLINE="10")
        code = subprocess.run(command, env=environment, check=False).returncode
        what = "with what is no answer" if is_strange else "with 500 or 503"
        print(f"{proxy.done} of {proxy.requests} requests were answered {what}")
        if is_strange:
            print(", ".join(f"{kind} {count}" for kind, count in sorted(proxy.counts.items())))
    return code


if __name__ == "__main__":
    sys.exit(main())
