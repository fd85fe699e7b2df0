"""A Hugging Face Hub on loopback, as its API is documented, and the server that it sends readers to.

The Hub has repositories, whose commits are dicts of files. It tells revisions, trees by pages, and where the bytes of
a file are: those of LFS lie at a signed address of another port, the others in a cache of the Hub itself.
"""
import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse


class Repo:
    """`readers`: the tokens that may read it; None: everybody. `is_gated`: they may read its list, not its files."""

    def __init__(self, files, readers=None, is_gated=False):
        self.readers, self.is_gated = readers, is_gated
        self.commits, self.refs = {}, {}
        self.push(files)

    def push(self, files, ref="main"):
        commit = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        return commit


class Refused(Exception):
    def __init__(self, status, code, message=""):
        super().__init__(code)
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message or code}


def is_large(name):
    return name.endswith((".safetensors", ".bin", ".pt", ".distcp"))


def entry_of(name, data):
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry = {"type": "file", "oid": blob, "size": len(data), "path": name}
    if is_large(name):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


class Hub:
    page = 1000  # entries
    link = '<{}>; rel="next"'

    def __init__(self, **repos):
        self.repos = {f"models/org/{name}": repo for name, repo in repos.items()}
        self.tokens = {"hf_good", "hf_other"}
        self.lock = threading.Lock()
        self.requests = []  # of the Hub: method, path
        self.sent = {}      # bytes of each file, by its digest
        self.leaks = []     # what the other server saw that is none of its business
        self.busy = 0       # so many requests are answered by 429
        self.signature_lives = 10**9  # so many requests
        self.signatures = {}
        self.refusal = None  # what every request for a repository gets: status and message
        self.before_tree = lambda: None
        self.links_at = ""  # whose address links to next pages have; a mirror's are of what it mirrors

    # What the API says.

    def repo(self, key, token):
        if token is not None and token not in self.tokens:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        if self.refusal:
            raise Refused(self.refusal[0], "", self.refusal[1])
        repo = self.repos.get(key)
        if repo is None or (repo.readers is not None and not repo.is_gated and token not in repo.readers):
            raise Refused(401 if token is None else 404, "RepoNotFound", "Repository not found")
        return repo

    @staticmethod
    def commit(repo, revision):
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    @staticmethod
    def tree(files, directory, is_recursive):
        below = directory + "/" if directory else ""
        if directory in files:
            return [entry_of(directory, files[directory])]
        entries, directories = [], set()
        for name, data in files.items():
            if not name.startswith(below):
                continue
            parts = name[len(below):].split("/")
            for depth in range(1, len(parts)):
                if is_recursive or depth == 1:
                    directories.add(below + "/".join(parts[:depth]))
            if is_recursive or len(parts) == 1:
                entries.append(entry_of(name, data))
        if not entries and not directories and directory:
            raise Refused(404, "EntryNotFound", f"{directory} does not exist")
        entries += [{"type": "directory", "oid": "d" * 40, "size": 0, "path": name} for name in directories]
        return sorted(entries, key=lambda entry: (entry["type"], entry["path"]))

    def answer_api(self, path, query, token):
        """Status, headers and JSON."""
        found = re.fullmatch(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path)
        if not found:
            raise Refused(404, "", "no such route")
        kind, name, what, revision, directory = found.groups()
        repo = self.repo(f"{kind}/{name}", token)
        commit = self.commit(repo, urllib.parse.unquote(revision or "main"))
        if what != "tree":
            return {}, {"id": name, "sha": commit, "private": repo.readers is not None}
        self.before_tree()
        entries = self.tree(repo.commits[commit], urllib.parse.unquote(directory or ""), query.get("recursive") == "true")
        begin = int(query.get("cursor", 0))
        headers = {}
        if begin + self.page < len(entries):
            more = urllib.parse.urlencode({**query, "cursor": begin + self.page})
            headers["Link"] = self.link.format(f"{self.links_at}{path}?{more}")
        return headers, entries[begin:begin + self.page]

    def answer_resolve(self, path, token):
        """Where a file is: status and headers."""
        found = re.fullmatch(r"/((?:datasets/|spaces/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not found:
            raise Refused(404, "", "no such route")
        name, revision, file = found[1], found[2], urllib.parse.unquote(found[3])
        repo = self.repo(name if name.count("/") == 2 else f"models/{name}", token)
        commit = self.commit(repo, urllib.parse.unquote(revision))
        if repo.is_gated and token not in repo.readers:
            raise Refused(403 if token else 401, "GatedRepo", "Access to this model is restricted")
        if file not in repo.commits[commit]:
            raise Refused(404, "EntryNotFound", "Entry not found")
        data = repo.commits[commit][file]
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(data))}
        if not is_large(file):
            return 307, {**headers, "Location": f"/api/resolve-cache/{digest}"}
        with self.lock:
            signature = f"s{len(self.signatures)}"
            self.signatures[signature] = self.signature_lives
        headers["X-Linked-ETag"] = f'"{digest}"'
        return 302, {**headers, "Location": f"{self.other}/blobs/{digest}?signature={signature}"}

    def data_of(self, digest):
        for repo in self.repos.values():
            for files in repo.commits.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == digest:
                        return data
        raise Refused(404, "EntryNotFound")

    # The two servers.

    @contextlib.contextmanager
    def serving(self):
        """The address of the Hub."""
        hub = self

        class Answer(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.answer_safely(True)

            def do_HEAD(self):
                self.answer_safely(False)

            def answer_safely(self, has_body):
                try:
                    self.answer(has_body)
                except Refused as refused:
                    self.give(refused.status, refused.headers, b"", has_body)

            def give(self, status, headers, body, has_body):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if has_body:
                    self.wfile.write(body)

            def give_bytes(self, digest, has_body):
                data = hub.data_of(digest)
                asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if not asked:
                    return self.give(200, {}, data, has_body)
                first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
                with hub.lock:
                    hub.sent[digest] = hub.sent.get(digest, 0) + last + 1 - first
                return self.give(206, {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first:last + 1], has_body)

        class OfHub(Answer):
            def answer(self, has_body):
                url = urllib.parse.urlsplit(self.path)
                token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
                with hub.lock:
                    hub.requests.append((self.command, url.path))
                    is_busy, hub.busy = hub.busy > 0, hub.busy - 1
                if is_busy:
                    return self.give(429, {"Retry-After": "1"}, b"", has_body)
                if url.path.startswith("/api/resolve-cache/"):
                    return self.give_bytes(url.path.rsplit("/", 1)[-1], has_body)
                if url.path.startswith("/api/"):
                    headers, found = hub.answer_api(url.path, dict(urllib.parse.parse_qsl(url.query)), token)
                    return self.give(200, headers, json.dumps(found).encode(), has_body)
                status, headers = hub.answer_resolve(url.path, token)
                return self.give(status, headers, b"", has_body)

        class OfOther(Answer):
            def answer(self, has_body):
                url = urllib.parse.urlsplit(self.path)
                signature = urllib.parse.parse_qs(url.query)["signature"][0]
                with hub.lock:
                    if "Authorization" in self.headers:
                        hub.leaks.append(self.headers["Authorization"])
                    hub.signatures[signature] -= 1
                    is_expired = hub.signatures[signature] < 0
                if is_expired:
                    return self.give(403, {}, b"<Error><Code>AccessDenied</Code></Error>", has_body)
                return self.give_bytes(url.path.rsplit("/", 1)[-1], has_body)

        with served(OfOther) as self.other, served(OfHub) as place:
            self.links_at = place
            yield place


@contextlib.contextmanager
def served(handler):
    """Answers in a thread of its own; gives the address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
