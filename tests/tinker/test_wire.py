"""The protobuf messages against those of the installed client."""

import pytest

from rlcore_tinker.wire import CLASSES, ENUMS, MESSAGES

tinker_public = pytest.importorskip("tinker.proto.tinker_public_pb2", reason="needs the client: pip install tinker")


@pytest.mark.parametrize("name", [name for name in MESSAGES if name != "OtherChunk"])
def test_fields_are_the_clients(name: str) -> None:
    """Each field has the client's number, type, and kind: of those of a oneof and of a map too."""
    theirs = {field.name: field for field in getattr(tinker_public, name).DESCRIPTOR.fields}
    for field in CLASSES[name].DESCRIPTOR.fields:
        other = theirs[field.name]
        assert (field.number, field.type, field.has_presence, field.is_repeated) == (
            other.number,
            other.type,
            other.has_presence,
            other.is_repeated,
        )
        assert (field.containing_oneof is None) == (other.containing_oneof is None)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            assert field.message_type.fields_by_name["value"].type == other.message_type.fields_by_name["value"].type


@pytest.mark.parametrize("name", ENUMS)
def test_enums_are_the_clients(name: str) -> None:
    assert dict(zip(ENUMS[name], range(9), strict=False)) == dict(getattr(tinker_public, name).items())


def test_a_request_reads_as_the_client_wrote_it() -> None:
    written = tinker_public.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="ppo", forward_only=True)
    written.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    datum = written.data.add()
    datum.model_input.add().encoded_text.tokens = b"1234"
    datum.loss_fn_inputs["weights"].dense = b"5678"
    read = CLASSES["ForwardBackwardRequest"].FromString(written.SerializeToString())
    assert read.SerializeToString(deterministic=True) == written.SerializeToString(deterministic=True)
    assert read.data[0].loss_fn_inputs["weights"].WhichOneof("kind") == "dense"
