"""The OpenAPI document: schemas come from the structs that are answered, and every call has an example."""

from typing import Any

import msgspec
from fastapi import FastAPI

from opengyre.gateway.problems import MEDIA_TYPE, ProblemDocument

REF = "#/components/schemas/{name}"
PROBLEMS = {
    400: "The body is not JSON",
    401: "The API key is missing or wrong",
    404: "There is no such thing; the sentence names what there is",
    409: "It conflicts with what is there",
    413: "The body is too large",
    415: "The body is not application/json",
    422: "A field is not allowed; the sentence names it and what is allowed",
    429: "Too much is waiting; try again after Retry-After seconds",
    503: "A service that is needed does not answer; try again after Retry-After seconds",
}


_answers: dict[str, Any] = {ProblemDocument.__name__: ProblemDocument}
"""Structs that routes answer with, by the name of their schema; filled as the routes are defined."""


def documented(kind: type, example: Any, description: str = "The answer", status: int = 200) -> dict[int | str, Any]:
    """`responses` of a route that answers with the struct `kind`, and with problems."""
    _answers[kind.__name__] = kind
    schema = {"$ref": REF.format(name=kind.__name__)}
    content = {"application/json": {"schema": schema, "example": example}}
    return {status: {"description": description, "content": content}, **problem_responses()}


def answers() -> dict[str, Any]:
    """The structs that routes answer with, by the name of their schema."""
    return dict(_answers)


def problem_responses() -> dict[int | str, Any]:
    schema = {"$ref": REF.format(name=ProblemDocument.__name__)}
    return {code: {"description": text, "content": {MEDIA_TYPE: {"schema": schema}}} for code, text in PROBLEMS.items()}


def body_example(**examples: Any) -> dict[str, Any]:
    """`openapi_examples` of a request body, by name."""
    return {name: {"value": value} for name, value in examples.items()}


def install(app: FastAPI) -> None:
    """Make `app.openapi` add the structs' schemas."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            _, components = msgspec.json.schema_components(_answers.values(), ref_template=REF)
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            if app.state.deps.settings.api_keys:
                document["components"]["securitySchemes"] = {
                    "key": {"type": "http", "scheme": "bearer"},
                    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                }
                document["security"] = [{"key": []}, {"header": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to replace the document
