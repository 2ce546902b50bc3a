"""A client made from the schema's table (`schema.txt`) alone: no code of ours, and none that was generated for us."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

TABLE = Path(__file__).with_name("schema.txt")
PACKAGE = "openengine.v1"
Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
    "bool": Field.TYPE_BOOL,
    "double": Field.TYPE_DOUBLE,
    "int32": Field.TYPE_INT32,
    "int64": Field.TYPE_INT64,
    "uint32": Field.TYPE_UINT32,
    "uint64": Field.TYPE_UINT64,
}
FIELD = re.compile(r"(\d+) (\w+) \((?:(opt|rep) |oneof (\w+): )?(\w+)\)")
METHOD = re.compile(r"(\w+)\((\w+)\) (stream )?(\w+)")


def read_table(table: Path = TABLE) -> descriptor_pb2.FileDescriptorProto:
    """The whole table as one file."""
    file = descriptor_pb2.FileDescriptorProto(name="table.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append("google/protobuf/struct.proto")
    lines = [line for line in table.read_text().splitlines() if line.startswith(("message ", "enum ", "service "))]
    enums = {line.split()[1].rstrip(":") for line in lines if line.startswith("enum ")}
    for line in lines:
        kind, name, rest = re.fullmatch(r"(\w+) (\w+):(.*)", line).groups()  # type: ignore[union-attr]
        match kind:
            case "enum":
                enum = file.enum_type.add(name=name)
                for value, number in re.findall(r"(\w+)=(\d+)", rest):
                    enum.value.add(name=value, number=int(number))
            case "message":
                _add_fields(file.message_type.add(name=name), rest, enums)
            case "service":
                service = file.service.add(name=name)
                for method, request, stream, response in METHOD.findall(rest):
                    service.method.add(
                        name=method,
                        input_type=f".{PACKAGE}.{request}",
                        output_type=f".{PACKAGE}.{response}",
                        server_streaming=bool(stream),
                    )
    return file


def _add_fields(message: descriptor_pb2.DescriptorProto, text: str, enums: set[str]) -> None:
    oneofs: dict[str, int] = {}
    optional: list[Field] = []
    for number, name, label, oneof, kind in FIELD.findall(text):
        field = message.field.add(name=name, number=int(number))
        field.label = Field.LABEL_REPEATED if label == "rep" else Field.LABEL_OPTIONAL
        if kind in SCALARS:
            field.type = SCALARS[kind]
        else:
            field.type = Field.TYPE_ENUM if kind in enums else Field.TYPE_MESSAGE
            field.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".{PACKAGE}.{kind}"
        if oneof:
            if oneof not in oneofs:
                oneofs[oneof] = len(message.oneof_decl)
                message.oneof_decl.add(name=oneof)
            field.oneof_index = oneofs[oneof]
        elif label == "opt":
            field.proto3_optional = True
            optional.append(field)
    for field in optional:
        # Explicit presence is a oneof of its own, after all real ones.
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


class Stub:
    """Both services of a server. Messages are attributes (`stub.GenerateRequest(...)`), and so are methods (lower case
    first: `stub.generate(...)`), which take a message and return a message, or an iterator of them."""

    def __init__(self, address: str, metadata: tuple[tuple[str, str], ...] = (), deadline_s: float = 60.0) -> None:
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
        pool.Add(read_table())
        self._file = pool.FindFileByName("table.proto")
        self._metadata = metadata
        self._deadline_s = deadline_s
        self.channel = grpc.insecure_channel(address)
        for name, message in self._file.message_types_by_name.items():
            setattr(self, name, message_factory.GetMessageClass(message))

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def __getattr__(self, name: str) -> Any:
        wanted = name[:1].upper() + name[1:]
        for service in self._file.services_by_name.values():
            if wanted in service.methods_by_name:
                return self._method(service.methods_by_name[wanted])
        raise AttributeError(name)

    def _method(self, method: Any) -> Any:
        plain: Any = self.channel
        make = plain.unary_stream if method.server_streaming else plain.unary_unary
        call = make(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )

        def ask(message: Any, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
            return call(message, metadata=(*self._metadata, *metadata), timeout=self._deadline_s)

        return ask
