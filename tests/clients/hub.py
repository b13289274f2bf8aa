"""A hub with one repository, `owner/name`, which has the built-in model: `hub.py GGUF` prints its address."""

import hashlib
import http.server
import json
import pathlib
import sys

MODEL = pathlib.Path(sys.argv[1]).read_bytes()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = "stories-Q8_0.gguf"
DIGEST = hashlib.sha256(MODEL).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        listing = "/api/models/owner/name/revision/"
        if self.path.startswith(listing):
            lfs = {"sha256": DIGEST, "size": len(MODEL), "pointerSize": 134}
            siblings = [{"rfilename": FILE, "size": len(MODEL), "blobId": "0" * 40, "lfs": lfs}]
            return self.answer(200, json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode())
        if self.path == f"/owner/name/resolve/{COMMIT}/{FILE}":
            return self.answer(200, MODEL, {"X-Linked-ETag": f'"{DIGEST}"', "X-Linked-Size": str(len(MODEL))})
        self.answer(404, b"", {"X-Error-Message": "Repository not found"})

    do_HEAD = do_GET

    def answer(self, status, body, headers={}):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
