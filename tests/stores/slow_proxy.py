#!/usr/bin/env python3
"""A proxy on loopback that hands requests of HTTP/1.1 on to one server, each some milliseconds late.

    slow_proxy.py HOST:PORT MILLISECONDS [PORT]

Prints its address, then a line for each request: "METHOD PATH RANGE".
"""
import asyncio
import sys

from proxying import LIMIT, has_body, pass_body, read_head


async def serve(client, to_client, upstream, delay):
    host, port = upstream
    server, to_server = await asyncio.open_connection(host, port, limit=LIMIT)
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
            if has_body(request, answer):
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
    server = await asyncio.start_server(lambda r, w: serve(r, w, upstream, delay), "127.0.0.1", port, limit=LIMIT)
    print("127.0.0.1:%d" % server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


asyncio.run(main())
