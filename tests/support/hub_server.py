"""A fake Hub on 127.0.0.1 with the part of the HTTP API that `huggingface_hub` needs to push and load models.

As on the real Hub, small files arrive inside the commit, and binary files by LFS, checked against their hash.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE = (".safetensors", ".bin", ".pt")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A context manager that runs the server at `hub.url`; `hub.repos` maps repository names to {path: bytes}, and
    `hub.private` holds the names of private ones.

    Requests whose path matches the regular expression `refuse` get the error `status`, at most `times` times.
    """

    def __init__(self, token="x", refuse=None, status=500, times=10**6):
        self.token, self.refuse, self.status, self.times = token, refuse, status, times
        self.repos, self.objects, self.requests, self.private = {}, {}, [], set()

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub, path = self.hub, self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        method = self.command
        hub.requests.append(f"{method} {path}")
        if hub.refuse and hub.times and re.search(hub.refuse, path):
            hub.times -= 1
            return self._reply({"error": "the Hub is out of order"}, hub.status)
        if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._reply({"error": "Invalid username or password."}, 401)
        if match := re.fullmatch(f"/{_REPO}/resolve/[^/]+/(.+)", path):
            return self._send_file(*match.groups())
        for pattern, answer in _ROUTES.items():
            if match := re.fullmatch(pattern, f"{method} {path}"):
                return self._reply(*answer(self, body, *match.groups()))
        return self._reply({"error": f"no such thing: {method} {path}"}, 404)

    do_HEAD = do_POST = do_PUT = do_GET

    def _send_file(self, repo, name):
        content = self.hub.repos.get(repo, {}).get(name)
        if content is None:
            return self._reply({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        return self._reply(content, 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _reply(self, value, status=200, headers=()):
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in dict(headers).items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def whoami(self, body):
        return {"type": "user", "name": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}}, 200

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'user'}/{asked['name']}"
        known = name in self.hub.repos
        self.hub.repos.setdefault(name, {})
        if not known and (asked.get("private") or asked.get("visibility") == "private"):
            self.hub.private.add(name)
        return {"url": f"{self.hub.url}/{name}", "name": name, "error": "exists"}, 409 if known else 200

    def validate_card(self, body):
        return {"errors": [], "warnings": []}, 200

    def preupload(self, body, repo):
        files = json.loads(body)["files"]
        mode = {file["path"]: "lfs" if file["path"].endswith(LARGE) else "regular" for file in files}
        return {
            "files": [{"path": p, "uploadMode": m, "shouldIgnore": False, "oid": None} for p, m in mode.items()]
        }, 200

    def lfs_batch(self, body, repo):
        """Objects that are there already have no action, so that the client does not send them again."""
        objects = json.loads(body)["objects"]
        for one in objects:
            if one["oid"] not in self.hub.objects:
                one["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}"}}
        return {"transfer": "basic", "objects": objects}, 200

    def lfs_upload(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            return {"error": "these are not the bytes that were announced"}, 400
        self.hub.objects[oid] = body
        return {}, 200

    def commit(self, body, repo):
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.hub.repos[repo][value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del self.hub.repos[repo][value["path"]]
        return {"commitUrl": f"{self.hub.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}, 200

    def info(self, body, repo):
        files = [{"rfilename": path} for path in self.hub.repos.get(repo, {})]
        names, private = dict.fromkeys(("id", "modelId"), repo), repo in self.hub.private
        return {**names, "sha": COMMIT, "private": private, "tags": [], "siblings": files}, 200

    def tree(self, body, repo):
        files = self.hub.repos.get(repo, {}).items()
        return [{"type": "file", "path": p, "size": len(content), "oid": COMMIT} for p, content in files], 200


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = {
    "GET /api/whoami-v2": _Handler.whoami,
    "POST /api/repos/create": _Handler.create,
    "POST /api/validate-yaml": _Handler.validate_card,
    f"POST /api/models/{_REPO}/preupload/main": _Handler.preupload,
    f"POST /{_REPO}.git/info/lfs/objects/batch": _Handler.lfs_batch,
    r"PUT /objects/(\w+)": _Handler.lfs_upload,
    f"POST /api/models/{_REPO}/commit/main": _Handler.commit,
    f"GET /api/models/{_REPO}(?:/revision/(?:main|{COMMIT}))?": _Handler.info,
    f"GET /api/models/{_REPO}/tree/(?:main|{COMMIT})": _Handler.tree,
}
