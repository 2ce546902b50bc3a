"""What we serve is the public schema: names, numbers, types, presence and shapes as its table has them."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2

from openengine.v1 import (
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    server_pb2,
    service_pb2,
)
from tests.openengine.stub import read_table

FILES = (generation_pb2, kv_pb2, error_pb2, lifecycle_pb2, server_pb2, model_pb2, lora_pb2, service_pb2)


def parts(file: descriptor_pb2.FileDescriptorProto) -> dict[str, Any]:
    """Everything that stands on the wire, by name."""
    found: dict[str, Any] = {}
    for message in file.message_type:
        found[f"message {message.name}"] = {
            field.name: (
                field.number,
                field.type,
                field.type_name,
                field.label,
                field.proto3_optional,
                message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
            )
            for field in message.field
        }
    for enum in file.enum_type:
        found[f"enum {enum.name}"] = {value.name: value.number for value in enum.value}
    for service in file.service:
        found[f"service {service.name}"] = {
            method.name: (method.input_type, method.output_type, method.client_streaming, method.server_streaming)
            for method in service.method
        }
    return found


def test_our_schema_is_the_table() -> None:
    ours: dict[str, Any] = {}
    for module in FILES:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        ours |= parts(file)

    assert ours == parts(read_table())
