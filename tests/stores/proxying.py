"""Messages of HTTP/1.1 as a proxy passes them on. The Host header stays as the client has signed it."""
import asyncio

CHUNK = 1 << 18
LIMIT = 1 << 20  # bytes of a head


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


def has_body(request, answer):
    return request.first[0] != "HEAD" and answer.first[1] not in ("204", "304")
