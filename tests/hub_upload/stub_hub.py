"""A Hub on loopback: speaks what HfApi and from_pretrained use, keeps what it receives, and fails when it is told to.

Paths and answers follow huggingface_hub's client; contents are stored once, by SHA-256 for large files (LFS, basic and
multipart, or xet with chunks that are not compressed) and in the commit for small ones. Not a Hub otherwise: one branch, no history but whole trees, no users' pages.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


WRITER, READER = "hf_" + "w" * 34, "hf_" + "r" * 34
REPO = "someone/tiny-aligned"


def contents(folder):
    """Every file of a folder, by its path in it."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def arrived(hub, repo_id=REPO):
    """The same of a repository, but for the file that the Hub itself puts there."""
    files = {name: blob.content for name, blob in hub.repos[repo_id].files.items()}
    files.pop(".gitattributes")
    return files


def key_of_upload(route):
    """Under which name the content of an upload is counted, or None for what is no upload."""
    found = re.fullmatch(r"/(?:lfs|v1/xorbs/default)/([0-9a-f]{64}(?:/[0-9]+)?)", route)
    return found and found[1]


@dataclass(frozen=True)
class Blob:
    """The content of one file at one commit."""

    content: bytes
    lfs: bool

    @property
    def sha256(self):
        return hashlib.sha256(self.content).hexdigest()

    @property
    def etag(self):
        """What the Hub compares: SHA-256 for LFS, SHA-1 of the git blob otherwise."""
        return self.sha256 if self.lfs else git_sha1(self.content)


def git_sha1(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def head(self):
        return list(self.commits)[-1]

    @property
    def files(self):
        """The tree of the last commit."""
        return self.commits[self.head]

    def commit(self, tree, message):
        sha = hashlib.sha1(f"{len(self.commits)}{sorted((k, v.etag) for k, v in tree.items())}".encode()).hexdigest()
        self.commits[sha] = tree
        self.messages.append(message)
        return sha

    def resolve(self, revision):
        """The commit of `main`, a tag or a full hash; None for anything else."""
        if revision in ("main", "HEAD"):
            return self.head
        sha = self.tags.get(revision, revision)
        return sha if sha in self.commits else None


@dataclass
class Fault:
    """Answers requests that match with an error, `times` times, once `after` of them have passed."""

    pattern: str
    status: int
    body: dict
    headers: dict
    times: int
    after: int


_BLOCK = 4096  # a request's body is read in such pieces


class Drop(Exception):
    """The connection ends without an answer."""


class Answer(Exception):
    """Ends the handling of a request."""

    def __init__(self, status, body=b"", headers=None):
        self.status, self.headers = status, dict(headers or {})
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if not isinstance(body, bytes):
            self.headers.setdefault("Content-Type", "application/json")


class StubHub:
    """`with StubHub() as hub:` serves at `hub.url` until the end of the block."""

    def __init__(self, part_size=None):
        self.repos: dict[str, Repo] = {}
        self.tokens = {WRITER: ("someone", "write"), READER: ("reader", "read")}
        self.stored: dict[str, bytes] = {}  # large files by SHA-256
        self.parts: dict[tuple[str, int], bytes] = {}
        self.xorbs: dict[str, list[bytes]] = {}  # xet's groups of chunks, by xet's own hash
        self.part_size = part_size
        self.requests: list[str] = []
        self.bytes_received = (
            Counter()
        )  # by SHA-256 (or SHA-256/part, or xet's hash) of large files, by path of small ones
        self.times_whole = Counter()  # the same keys: how often all of it arrived
        self.faults: list[Fault] = []
        self.rejected_card = None
        self.cut_at, self.cut_how, self.cut_request, self.dead = None, None, None, False
        self.before = None  # called with each request before it is handled
        # called with a request and how far it is: "begins", the bytes of its body that came, "handled" or "answered";
        # may raise Drop, after which nothing more of the request is read or answered
        self.watch = None
        self.lock = threading.RLock()

    def __enter__(self):
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    # --- what a test asks for

    def fail(self, pattern, status, body=None, times=1_000, after=0, **headers):
        """Requests whose `METHOD /path` matches get this status, but not the first `after` of them."""
        named = {key.replace("_", "-"): str(value) for key, value in headers.items()}
        self.faults.append(Fault(pattern, status, body or {"error": "told to fail"}, named, times, after))

    def cut(self, at, how):
        """The request number `at` ends without an answer and nothing is answered after it, until `revive`.

        Args:
            how: "before" any of its body is read, "during" it (half is read), or "after" it was handled.
        """
        self.cut_at, self.cut_how, self.cut_request, self.requests = at, how, None, []

    def revive(self):
        self.cut_at, self.dead, self.requests = None, False, []

    def forget(self):
        """As if nothing had ever been sent; who watches is forgotten too."""
        for record in (self.repos, self.stored, self.parts, self.xorbs, self.bytes_received, self.times_whole):
            record.clear()
        self.watch = None

    def writes(self):
        """The requests that were not reading alone."""
        return [line for line in self.requests if not line.startswith(("GET", "HEAD"))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; together with delayed answers each costs 40 ms
    hub: StubHub

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def serve(self):
        try:
            with self.hub.lock:
                answer = self.handle_one()
            self.send(answer)
            self.watched("answered")
        except (Drop, ConnectionError):
            # a reset, as when a machine goes away: the client must not take it for the end of an answer
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

    def send(self, answer):
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def handle_one(self):
        hub, parts = self.hub, urlsplit(self.path)
        self.route, self.query = unquote(parts.path), parse_qs(parts.query)
        line = f"{self.command} {self.route}"
        length = int(self.headers.get("Content-Length") or 0)
        self.body = b""
        if hub.dead:
            raise Drop
        hub.requests.append(line)
        how = hub.cut_how if len(hub.requests) == hub.cut_at else None
        if how:
            hub.dead, hub.cut_request = True, line
        if how == "before":
            raise Drop
        self.watched("begins")
        self.read_body(length // 2 if how == "during" else length, length)
        if how == "during":
            raise Drop
        if hub.before:
            hub.before(line)
        for fault in hub.faults:
            if fault.times and re.search(fault.pattern, line):
                fault.after -= 1
                if fault.after >= 0:
                    continue
                fault.times -= 1
                return Answer(fault.status, fault.body, fault.headers)
        answer = Answer(404, {"error": f"the stub has no {line}"})
        try:
            self.dispatch()
        except Answer as found:
            answer = found
        if how == "after":
            raise Drop
        self.watched("handled")
        return answer

    def read_body(self, wanted, length):
        whole = False
        try:
            while len(self.body) < wanted:
                block = self.rfile.read(min(_BLOCK, wanted - len(self.body)))
                if not block:
                    raise Drop
                self.body += block
                self.watched(len(self.body))
            whole = wanted == length
        finally:
            self.count_bytes(whole)

    def watched(self, state):
        if self.hub.watch:
            self.hub.watch(self, state)

    def count_bytes(self, whole):
        if key := key_of_upload(self.route):
            self.hub.bytes_received[key] += len(self.body)
            self.hub.times_whole[key] += whole

    def dispatch(self):
        for method, pattern, handler in _ROUTES:
            found = re.fullmatch(pattern, self.route)
            if found and method in (self.command, self.command.replace("HEAD", "GET")):
                handler(self, **found.groupdict())

    # --- who asks, and for what

    def account(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Answer(401, {"error": f"Invalid credentials {token}"}, {"X-Error-Message": "Invalid credentials"})
        return self.hub.tokens.get(token)

    def repo(self, repo_id, write=False):
        account, repo = self.account(), self.hub.repos.get(repo_id)
        if write and account is None:
            raise Answer(401, {"error": "Log in"})
        if repo is None or (repo.private and (account is None or not repo_id.startswith(f"{account[0]}/"))):
            raise Answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if write and (account[1] != "write" or not repo_id.startswith(f"{account[0]}/")):
            raise Answer(403, {"error": "You have no right to write here"})
        return repo

    def revision(self, repo, revision):
        sha = repo.resolve(revision)
        if sha is None:
            raise Answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        return sha

    # --- the endpoints

    def whoami(self):
        account = self.account()
        if account is None:
            raise Answer(401, {"error": "Log in"})
        name, role = account
        raise Answer(200, {"type": "user", "name": name, "orgs": [], "auth": {"accessToken": {"role": role}}})

    def create(self):
        account, wanted = self.account(), json.loads(self.body)
        if account is None:
            raise Answer(401, {"error": "Log in"})
        repo_id = f"{wanted.get('organization') or account[0]}/{wanted['name']}"
        if not repo_id.startswith(f"{account[0]}/"):
            raise Answer(403, {"error": f"You have no right to create a model under {wanted['organization']}"})
        if repo_id in self.hub.repos:
            raise Answer(409, {"error": "You already created this model repo"})
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        repo = self.hub.repos[repo_id] = Repo(private)
        repo.commit({".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}, "initial commit")
        raise Answer(200, {"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": "0"})

    def info(self, repo_id, revision="main"):
        repo = self.repo(repo_id)
        sha = self.revision(repo, revision)
        files = [{"rfilename": name} for name in sorted(repo.commits[sha])]
        raise Answer(
            200,
            {"id": repo_id, "modelId": repo_id, "sha": sha, "private": repo.private, "siblings": files, "tags": []},
        )

    def tree(self, repo_id, revision, folder=""):
        repo = self.repo(repo_id)
        files = repo.commits[self.revision(repo, revision)]
        prefix = f"{folder}/" if folder else ""
        entries = [self.entry(name, blob) for name, blob in sorted(files.items()) if name.startswith(prefix)]
        if folder and not entries:
            raise Answer(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
        # in two pages, so that a client has to follow the link to the second
        half, start = (len(entries) + 1) // 2, "cursor" in self.query
        link = (
            {} if start else {"Link": f'<{self.hub.url}{self.path.split("?")[0]}?recursive=true&cursor=1>; rel="next"'}
        )
        raise Answer(200, entries[half:] if start else entries[:half], link)

    @staticmethod
    def entry(name, blob):
        pointer = b"version https://git-lfs.github.com/spec/v1\n" + blob.sha256.encode()
        entry = {"type": "file", "path": name, "size": len(blob.content), "oid": git_sha1(blob.content)}
        if blob.lfs:
            lfs = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": len(pointer)}
            entry |= {"oid": git_sha1(pointer), "lfs": lfs}
        return entry

    def validate(self):
        if self.hub.rejected_card:
            raise Answer(400, {"errors": [{"message": self.hub.rejected_card}], "warnings": []})
        raise Answer(200, {"errors": [], "warnings": []})

    def preupload(self, repo_id, revision):
        repo = self.repo(repo_id, write=True)
        ignored = repo.files.get(".gitignore", Blob(b"", False)).content.decode().split()
        answers = []
        for file in json.loads(self.body)["files"]:
            blob = repo.files.get(file["path"])
            mode = "lfs" if file["path"].endswith(".safetensors") or file["size"] > 10_000_000 else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": file["path"] in ignored})
            answers[-1]["oid"] = blob and blob.etag
        raise Answer(200, {"files": answers})

    def batch(self, repo_id):
        self.repo(repo_id, write=True)
        asked, objects = json.loads(self.body), []
        if "xet" in asked["transfers"]:  # an older client asks before it takes that way
            raise Answer(200, {"transfer": "xet", "objects": asked["objects"]})
        for wanted in asked["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            if oid not in self.hub.stored:
                action = {"href": f"{self.hub.url}/lfs/{oid}?X-Signature=signed-{oid[:8]}"}
                if self.hub.part_size and size > self.hub.part_size:
                    numbers = range(1, -(-size // self.hub.part_size) + 1)
                    urls = {str(i): f"{self.hub.url}/lfs/{oid}/{i}?X-Signature=signed" for i in numbers}
                    action["header"] = {"chunk_size": str(self.hub.part_size), **urls}
                wanted = {**wanted, "actions": {"upload": action, "verify": {"href": f"{self.hub.url}/verify"}}}
            objects.append(wanted)
        raise Answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Answer(400, {"error": "the content has another SHA-256"})
        self.hub.stored[oid] = self.body
        raise Answer(200)

    def upload_part(self, oid, number):
        self.hub.parts[oid, int(number)] = self.body
        raise Answer(200, headers={"ETag": f'"{number}"'})

    # xet: https://github.com/huggingface/xet-core/tree/main/spec (api.md, xorb.md, shard.md), first version of each route

    def xet_token(self, repo_id, revision):
        self.repo(repo_id, write=True)
        expires = int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": self.hub.url,
            "X-Xet-Access-Token": "xet",
            "X-Xet-Token-Expiration": str(expires),
        }
        raise Answer(200, {"casUrl": self.hub.url, "accessToken": "xet", "exp": expires}, headers)

    def xorb(self, name):
        """Takes a group of chunks, each after 8 bytes of header that say its length."""
        chunks, at = [], 0
        while at < len(self.body):
            size, scheme = int.from_bytes(self.body[at + 1 : at + 4], "little"), self.body[at + 4]
            if scheme:
                raise Answer(
                    400, {"error": "the stub reads no compressed chunks: HF_XET_XORB_COMPRESSION_POLICY=none"}
                )
            chunks.append(self.body[at + 8 : at + 8 + size])
            at += 8 + size
        self.hub.xorbs[name] = chunks
        raise Answer(200, {"was_inserted": True})

    def shard(self):
        """Puts files together from ranges of chunks in xorbs; records are of 48 bytes."""
        records = [self.body[i : i + 48] for i in range(48, len(self.body), 48)]
        while records[0][:32] != b"\xff" * 32:
            flags, count = struct.unpack("<II", records[0][32:40])
            content = b""
            for entry in records[1 : 1 + count]:
                name = "".join(f"{number:016x}" for number in struct.unpack("<4Q", entry[:32]))
                first, end = struct.unpack("<II", entry[40:48])
                content += b"".join(self.hub.xorbs[name][first:end])
            self.hub.stored[hashlib.sha256(content).hexdigest()] = content
            verified, described = flags >> 31, flags >> 30 & 1
            del records[: 1 + count + count * verified + described]
        raise Answer(200, {"result": 1})

    def complete(self, oid):
        given = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        self.body = b"".join(self.hub.parts[oid, number] for number in given)
        self.upload(oid)

    def verify(self):
        raise Answer(200 if json.loads(self.body)["oid"] in self.hub.stored else 404)

    def commit(self, repo_id, revision):
        repo = self.repo(repo_id, write=True)
        lines = [json.loads(line) for line in self.body.splitlines()]
        header, tree = lines[0]["value"], dict(repo.files)
        for line in lines[1:]:
            name, value = line["value"]["path"], line["value"]
            if line["key"] == "file":
                blob = Blob(base64.b64decode(value["content"]), False)
                self.hub.bytes_received[name] += len(blob.content)
                self.hub.times_whole[name] += 1
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    raise Answer(400, {"error": f"The LFS object of {name} was never uploaded"})
                blob = Blob(self.hub.stored[value["oid"]], True)
            elif line["key"] == "deletedFile":
                tree.pop(name)
                continue
            tree[name] = blob
        if header.get("parentCommit") not in (None, repo.head):
            raise Answer(412, {"error": "The branch has moved since that parent commit"})
        sha = repo.commit(tree, header["summary"])
        url = f"{self.hub.url}/{repo_id}/commit/{sha}"
        raise Answer(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def tag(self, repo_id, revision):
        repo, name = self.repo(repo_id, write=True), json.loads(self.body)["tag"]
        if name in repo.tags:
            raise Answer(409, {"error": "Tag reference exists already"})
        repo.tags[name] = self.revision(repo, revision)
        raise Answer(200, {})

    def resolve(self, repo_id, revision, name):
        repo = self.repo(repo_id)
        sha = self.revision(repo, revision)
        blob = repo.commits[sha].get(name)
        headers = {"X-Repo-Commit": sha}
        if blob is None:
            raise Answer(404, {"error": "Entry not found"}, {**headers, "X-Error-Code": "EntryNotFound"})
        size = str(len(blob.content))
        headers |= {"ETag": f'"{blob.etag}"', "X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": size}
        raise Answer(200, blob.content, headers)


_ID = r"(?P<repo_id>[\w.-]+/[\w.-]+)"
_ROUTES = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("GET", f"/api/models/{_ID}", _Handler.info),
    ("GET", f"/api/models/{_ID}/revision/(?P<revision>[^/]+)", _Handler.info),
    ("GET", f"/api/models/{_ID}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    ("POST", f"/api/models/{_ID}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    ("POST", f"/api/models/{_ID}/commit/(?P<revision>[^/]+)", _Handler.commit),
    ("POST", f"/api/models/{_ID}/tag/(?P<revision>[^/]+)", _Handler.tag),
    ("POST", f"/{_ID}\\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", _Handler.upload),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})/(?P<number>[0-9]+)", _Handler.upload_part),
    ("POST", "/lfs/(?P<oid>[0-9a-f]{64})", _Handler.complete),
    ("POST", "/verify", _Handler.verify),
    ("GET", f"/api/models/{_ID}/xet-write-token/(?P<revision>[^/]+)", _Handler.xet_token),
    ("POST", "/v1/xorbs/default/(?P<name>[0-9a-f]{64})", _Handler.xorb),
    ("POST", "/v1/shards", _Handler.shard),
    ("GET", f"/{_ID}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
]
