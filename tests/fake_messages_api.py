"""A loopback server that speaks the Messages API and the Chat Completions API, and breaks off where a test wants it."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

MODEL = "claude-haiku-5-5"
KEY = "sk-ant-api03-this-is-no-real-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    number: int
    """From 0, over POST requests."""
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    at: float
    """Monotonic."""

    @property
    def case(self) -> str:
        """The token of the case that is asked about."""
        return re.findall(r"Case ([0-9a-f]{16})", json.dumps(self.body["messages"]))[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int = 200
    body: Any = None
    """bytes are sent as they are, anything else as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float | None = None
    """Seconds between two bytes."""
    cut_after: int | None = None
    """The connection is closed after so many bytes of the body."""


def message(text: str | None, *, stop_reason: str = "end_turn", thinking: bool = False, **fields: Any) -> Answer:
    """A reply of the Messages API; no text, no text block."""
    content: list[dict[str, Any]] = [{"type": "thinking", "thinking": "hm", "signature": "s"}] if thinking else []
    content += [] if text is None else [{"type": "text", "text": text}]
    return Answer(
        body={
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 100,
                "cache_read_input_tokens": 1000,
                "cache_creation_input_tokens": 10,
                "output_tokens": 20,
                "output_tokens_details": {"thinking_tokens": 5},
            },
            **fields,
        },
        headers={"request-id": "req_1"},
    )


def completion(text: str | None, *, finish_reason: str = "stop", **fields: Any) -> Answer:
    """A reply of the Chat Completions API."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 110, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 10}}
    return Answer(
        body={"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        | fields
    )


def error(status: int, kind: str, text: str = "no", **headers: str) -> Answer:
    body = {"type": "error", "error": {"type": kind, "message": text}, "request_id": "req_1"}
    return Answer(status=status, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def verdict(call: Call, score: Any, reason: str = "because") -> str:
    return json.dumps({"case": call.case, "reason": reason, "score": score})


class FakeMessagesAPI:
    """`answer(call)` runs in the server's threads, one for each connection."""

    def __init__(self, answer: Callable[[Call], Answer]) -> None:
        self.calls: list[Call] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._answer = answer
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> FakeMessagesAPI:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def respond(self, path: str, headers: Mapping[str, str], body: Any) -> Answer:
        with self._lock:
            call = Call(number=len(self.calls), path=path, headers=headers, body=body, at=time.monotonic())
            self.calls.append(call)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            refusal = _misuse(call) if path == "/v1/messages" else None
            answer = refusal or self._answer(call)
            time.sleep(answer.delay_s)
            return answer
        finally:
            with self._lock:
                self.in_flight -= 1


def _misuse(call: Call) -> Answer | None:
    """What the Messages API refuses."""
    body = call.body
    if "anthropic-version" not in call.headers or not {"x-api-key", "authorization"} & set(call.headers):
        return error(401, "authentication_error", "no key")
    for name in ("temperature", "top_p", "top_k", "output_format"):
        if name in body:
            return error(400, "invalid_request_error", f"{name}: not permitted")
    if body["messages"][-1]["role"] != "user":
        return error(400, "invalid_request_error", "prefill is not supported")
    blocks = [*body["system"], *(block for turn in body["messages"] for block in turn["content"])]
    if sum("cache_control" in block for block in blocks) > 4:
        return error(400, "invalid_request_error", "at most 4 cache breakpoints")
    if not isinstance(body["max_tokens"], int) or not all(block["text"].strip() for block in blocks):
        return error(400, "invalid_request_error", "max_tokens and text must be given")
    schema = body.get("output_config", {}).get("format", {}).get("schema", {"additionalProperties": False})
    if schema["additionalProperties"] is not False or any(
        word in json.dumps(schema) for word in ('"minimum"', '"$ref"')
    ):
        return error(400, "invalid_request_error", "schema not supported")
    return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are what many tests are about."""


def _handler(api: FakeMessagesAPI) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            known = {
                "id": name,
                "type": "model",
                "object": "model",
                "display_name": name,
                "created_at": "2026-10-07T00:00:00Z",
            }
            self._send(Answer(body=known) if name in (MODEL, "m") else error(404, "not_found_error", f"model: {name}"))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self._send(api.respond(self.path, headers, body))

        def _send(self, answer: Answer) -> None:
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in {"content-type": "application/json", **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if answer.cut_after is not None:
                self.wfile.write(body[: answer.cut_after])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            elif answer.drip_s is not None:
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    time.sleep(answer.drip_s)
            else:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
