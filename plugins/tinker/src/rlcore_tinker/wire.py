"""The protobuf messages of the protocol: package `tinker_public`, as client 0.38 has them.

The descriptors are built from MESSAGES in a pool of their own, so that a process which also imports the client has both.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
CONTENT_TYPE = "application/x-protobuf"
ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
"""The names of each enum's values, from 0."""
MESSAGES = {
    "SampleResponse": "1 sequences *SampledSequence, 2 prompt_logprobs ?bytes, 4 prompt_cache_hit_tokens int32",
    "SampledSequence": "1 stop_reason StopReason, 2 tokens bytes, 3 logprobs ?bytes",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense |bytes, 2 sparse_csr |SparseCsr, 3 dtype DType, 4 shape *int64",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype DType, 4 trailing_shape *int64",
    "ArrayRecord": "1 type_tag string, 2 fields %BatchedTensor, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs *ArrayRecord, 3 metrics %double",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data *Datum, 4 loss_fn string, 5 loss_fn_config %double, "
    "6 forward_only bool, 7 loss_fn_config_v2 %LossConfigValue",
    "LossConfigValue": "1 number |double, 2 text |string",
    "Datum": "1 model_input *Chunk, 2 loss_fn_inputs %Tensor",
    "Chunk": "1 encoded_text |EncodedTextChunk, 2 image |OtherChunk, 3 dmel |OtherChunk",
    "EncodedTextChunk": "1 tokens bytes",
    "OtherChunk": "",
}
"""The fields of each message: number, name, type. `*` is repeated, `?` optional, `|` of the message's oneof, `%` a map from
string. Fields that the server does not read are left out; protobuf keeps them as unknown ones."""
_SCALARS = {"bytes": 12, "string": 9, "int64": 3, "int32": 5, "double": 1, "bool": 8}
_Field = descriptor_pb2.FieldDescriptorProto


def _describe(message: Any, number: str, name: str, kind: str) -> None:
    mark, kind = (kind[0], kind[1:]) if kind[0] in "*?|%" else ("", kind)
    field = message.field.add(name=name, number=int(number), label=3 if mark in ("*", "%") else 1)
    if mark == "%":
        entry = message.nested_type.add(name=f"{''.join(part.capitalize() for part in name.split('_'))}Entry")
        entry.options.map_entry = True
        _describe(entry, "1", "key", "string")
        _describe(entry, "2", "value", kind)
        kind = f"{message.name}.{entry.name}"
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="kind")
        field.oneof_index = 0
    if mark == "?":  # proto3's optional is a oneof of one field
        field.oneof_index, field.proto3_optional = len(message.oneof_decl), True
        message.oneof_decl.add(name=f"_{name}")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = (14 if kind in ENUMS else 11), f".{PACKAGE}.{kind}"


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            _describe(message, *field.split(" "))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _build()
"""The class of each message by its name."""
