"""What the routes take, and how the OpenAPI document describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field

from echo_sgl.batches.http.service import (
    MAX_EXPIRY_S,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARS,
    MIN_EXPIRY_S,
)


def _described(**schema: Any) -> Any:
    """A bound as the OpenAPI document shows it; `BatchService` applies it with a better message."""
    return Field(json_schema_extra=schema)


_PAIRS = {
    "type": "object",
    "maxProperties": MAX_METADATA_PAIRS,
    "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARS},
}


class ExpiresAfter(BaseModel):
    """When the output files are deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, _described(minimum=MIN_EXPIRY_S, maximum=MAX_EXPIRY_S)]


class CreateBatch(BaseModel):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, _described(pattern="^([1-9]|1[0-9]|2[0-4])h$")]
    metadata: Annotated[dict[str, str] | None, _described(anyOf=[_PAIRS, {"type": "null"}])] = None
    output_expires_after: ExpiresAfter | None = None


def creation_schema(endpoints: Sequence[str]) -> dict[str, Any]:
    """What `POST /v1/batches` takes, without references: they would point out of this part."""
    schema = CreateBatch.model_json_schema()
    definitions = schema.pop("$defs", {})
    text = orjson.dumps(schema).decode()
    for name, definition in definitions.items():
        reference = orjson.dumps({"$ref": f"#/$defs/{name}"}).decode()
        text = text.replace(reference, orjson.dumps(definition).decode())
    inlined = orjson.loads(text)
    inlined["properties"]["endpoint"]["enum"] = list(endpoints)
    content = {"application/json": {"schema": inlined}}
    return {"requestBody": {"required": True, "content": content}}


UPLOAD_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}
