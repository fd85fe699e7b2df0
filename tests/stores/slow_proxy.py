#!/usr/bin/env python3
"""A proxy on loopback that hands requests of HTTP/1.1 on to one server, each some milliseconds late.

    slow_proxy.py HOST:PORT MILLISECONDS [PORT]

Prints its address, then a line for each request: "METHOD PATH RANGE". The Host header stays as the client has signed it.
"""
import asyncio
import sys

CHUNK = 1 << 18


class Message:
    """The head of a request or an answer."""

    def __init__(self, head):
        self.head = head
        lines = head.decode("latin-1").split("\r\n")
        self.first = lines[0].split(" ")
        self.fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}

    def length(self):
        return int(self.fields.get("content-length", 0))

    def is_chunked(self):
        return "chunked" in self.fields.get("transfer-encoding", "").lower()


async def read_head(reader):
    """None where the other side has ended."""
    try:
        return Message(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.IncompleteReadError:
        return None


async def pass_bytes(reader, writer, left):
    while left > 0:
        data = await reader.read(min(left, CHUNK))
        if not data:
            raise ConnectionError("a body was cut")
        writer.write(data)
        await writer.drain()
        left -= len(data)


async def pass_body(reader, writer, message):
    if not message.is_chunked():
        await pass_bytes(reader, writer, message.length())
        return
    while True:
        line = await reader.readline()
        writer.write(line)
        size = int(line.split(b";")[0], 16)
        await pass_bytes(reader, writer, size + 2)  # with the line's end
        if size == 0:
            return


async def serve(client, to_client, upstream, delay):
    host, port = upstream
    server, to_server = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        while request := await read_head(client):
            print(request.first[0], request.first[1], request.fields.get("range", ""), flush=True)
            await asyncio.sleep(delay)
            to_server.write(request.head)
            if "100-continue" not in request.fields.get("expect", ""):
                await pass_body(client, to_server, request)
            await to_server.drain()
            answer = await read_head(server)
            while answer and answer.first[1] == "100":
                to_client.write(answer.head)
                await pass_body(client, to_server, request)
                answer = await read_head(server)
            if answer is None:
                return
            to_client.write(answer.head)
            has_body = request.first[0] != "HEAD" and answer.first[1] not in ("204", "304")
            if has_body:
                await pass_body(server, to_client, answer)
            await to_client.drain()
    except ConnectionError:
        pass  # either side may go at any time
    finally:
        to_server.close()
        to_client.close()


async def main():
    upstream = sys.argv[1].rsplit(":", 1)
    delay = float(sys.argv[2]) / 1000
    port = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    server = await asyncio.start_server(lambda r, w: serve(r, w, upstream, delay), "127.0.0.1", port, limit=1 << 20)
    print("127.0.0.1:%d" % server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


asyncio.run(main())
