"""A Hub on this machine, for tests of uploads."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """A request handler that sends JSON or bytes and logs nothing."""

    def log_message(self, *arguments):
        pass

    def answer(self, status, content=None, **headers):
        """Send a status and a body: bytes as they are, all else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class HubHandler(QuietHandler):
    """The calls that an upload makes. Requests and stored files are attributes of the server."""

    def read(self):
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.calls.append((self.command, self.path, self.headers.get("Authorization"), body))
        return hub, body

    def do_HEAD(self):
        self.read()
        self.answer(404, X_Error_Code="EntryNotFound")

    def do_GET(self):
        hub, _ = self.read()
        if self.path == "/api/whoami-v2":
            return self.answer(200, {"name": "somebody"})
        repository = hub.repositories.get(self.path.removeprefix("/api/models/").removeprefix("/api/spaces/"))
        if repository is not None:
            repo_id = f"{repository['organization']}/{repository['name']}"
            return self.answer(200, {"id": repo_id, "private": repository.get("visibility") == "private"})
        self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")

    def do_PUT(self):
        hub, body = self.read()
        hub.objects[self.path.rsplit("/", 1)[1]] = body
        self.answer(200)

    def do_POST(self):
        hub, body = self.read()
        if hub.refusal is not None:
            status, message = hub.refusal
            return self.answer(status, {"error": message}, X_Error_Message=message)
        if self.path == "/api/repos/create":
            request = json.loads(body)
            repo_id = f"{request['organization']}/{request['name']}"
            status = 409 if repo_id in hub.repositories else 200
            hub.repositories.setdefault(repo_id, request)
            return self.answer(status, {"url": f"{hub.url}/{repo_id}"})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [file | {"uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            for file in files:
                if file["path"].endswith(hub.lfs_suffixes):
                    file["uploadMode"] = "lfs"
            return self.answer(200, {"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{hub.url}/store/{entry['oid']}", "header": {}}}
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if "/branch/" in self.path:
            hub.branches.append(self.path.rsplit("/", 1)[1])
            return self.answer(201)
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            repo_id, branch = re.sub("^/api/(models|spaces)/", "", self.path).split("/commit/")
            return self.answer(200, hub.commit(lines, repo_id, branch))
        return self.answer(404)


class StandIn(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.calls, self.repositories, self.commits, self.branches, self.refusal = [], {}, [], [], None
        # Files with these endings are uploaded alone, by LFS, and not with the commit.
        self.objects, self.lfs_suffixes = {}, ()

    def commit(self, lines, repo_id, branch):
        values = [line["value"] for line in lines[1:]]
        files = {
            value["path"]: self.objects[value["oid"]] if "oid" in value else base64.b64decode(value["content"])
            for value in values
        }
        self.commits.append((branch, lines[0]["value"]["summary"], files))
        oid = hashlib.sha1(repr(sorted(files)).encode()).hexdigest()
        return {"commitUrl": f"{self.url}/{repo_id}/commit/{oid}", "commitOid": oid}
