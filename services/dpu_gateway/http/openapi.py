"""The OpenAPI document, made of the models that requests are parsed with."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json

from services.dpu_gateway.http.responses import ChatCompletion, Completion, Failure, ServedModel, ServedModels
from services.dpu_gateway.http.schema import ChatCompletionBody, CompletionBody

REFERENCE = "#/components/schemas/{model}"
JSON_TYPE = "application/json"
FAILURES = {
    400: "a field is wrong, unknown or not supported; `param` names it",
    401: "an API key is needed",
    404: "another model or path",
    405: "another method",
    413: "the body is too long",
    415: "the body is not application/json",
    429: "no room, or a limit of the key is reached; `code` says which",
    500: "a fault of the server's",
    503: "starting, stopping, or the engine is gone",
}
RETRYABLE = {429, 503}
RATES = ("limit", "remaining", "reset")
REQUEST_ID = {
    "name": "x-request-id",
    "in": "header",
    "required": False,
    "description": "names the request in logs and is the answer's id",
    "schema": {"type": "string", "pattern": "^[!-~]{1,100}$"},
}
MODEL_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}

Json = dict[str, Any]


@lru_cache(maxsize=4)
def openapi_json(model: str | None) -> bytes:
    """The document of a gateway that serves ``model``; None while that is not known."""
    models: list[type[BaseModel]] = [
        *(CompletionBody, ChatCompletionBody),
        *(Completion, ChatCompletion, ServedModel, ServedModels, Failure),
    ]
    _, definitions = models_json_schema([(each, "validation") for each in models], ref_template=REFERENCE)
    schemas = definitions["$defs"]
    if model is not None:
        for body in (CompletionBody, ChatCompletionBody):
            schemas[body.__name__]["properties"]["model"]["enum"] = [model]
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Blink",
            "version": version("blink"),
            "description": "OpenAI's API as Blink serves it. Fields that are not in it are refused by name.",
        },
        "paths": {
            "/v1/completions": {"post": _generation("createCompletion", CompletionBody, Completion)},
            "/v1/chat/completions": {"post": _generation("createChatCompletion", ChatCompletionBody, ChatCompletion)},
            "/v1/models": {"get": _get("listModels", "the served model", ServedModels, 401, 503)},
            "/v1/models/{name}": {
                "get": {
                    **_get("retrieveModel", "the model of that name", ServedModel, 401, 404, 503),
                    "parameters": [MODEL_NAME],
                }
            },
            "/health": {"get": _probe("health", "the worker lives")},
            "/ready": {"get": _probe("ready", "new requests will be served", 503)},
            "/metrics": {"get": _probe("metrics", "figures for Prometheus", kind="text/plain")},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return to_json(document)


def _generation(name: str, body: type[BaseModel], answer: type[BaseModel]) -> Json:
    rates = {
        f"x-ratelimit-{what}-{of}": {"schema": {"type": "string"}} for of in ("requests", "tokens") for what in RATES
    }
    done = {
        "description": "the whole answer, or with `stream` its parts as server-sent events that end with [DONE]",
        "headers": {"x-request-id": {"schema": {"type": "string"}, "required": True}, **rates},
        "content": {JSON_TYPE: {"schema": _reference(answer)}, "text/event-stream": {}},
    }
    return {
        "operationId": name,
        "security": [{}, {"key": []}],
        "parameters": [REQUEST_ID],
        "requestBody": {"required": True, "content": {JSON_TYPE: {"schema": _reference(body)}}},
        "responses": {"200": done, **_failures(*FAILURES.keys() - {405})},
    }


def _get(name: str, description: str, answer: type[BaseModel], *failures: int) -> Json:
    done = {"description": description, "content": {JSON_TYPE: {"schema": _reference(answer)}}}
    return {
        "operationId": name,
        "security": [{}, {"key": []}],
        "responses": {"200": done, **_failures(*failures)},
    }


def _probe(name: str, description: str, *failures: int, kind: str = "") -> Json:
    done: Json = {"description": description}
    if kind:
        done["content"] = {kind: {"schema": {"type": "string"}}}
    return {"operationId": name, "responses": {"200": done, **_failures(*failures)}}


def _failures(*statuses: int) -> Json:
    retry = {"retry-after": {"schema": {"type": "string"}}, "retry-after-ms": {"schema": {"type": "string"}}}
    return {
        str(status): {
            "description": FAILURES[status],
            "content": {JSON_TYPE: {"schema": _reference(Failure)}},
            **({"headers": retry} if status in RETRYABLE else {}),
        }
        for status in sorted(statuses)
    }


def _reference(model: type[BaseModel]) -> Json:
    return {"$ref": REFERENCE.format(model=model.__name__)}
