"""What a rank holds of each exported tensor, and brings of it; tests/system sends it from two ranks."""

import pytest
import torch
from fsdp2_support import exported

from rlcore.spi import ExportWeightsRequest
from rlcore_fsdp2.shards import Parts


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_sharded_export_holds_every_tensor_and_brings_no_bucket(architecture, model_directory, backend):
    """With fused experts too, which are whole tensors of their own names."""
    trainer = backend(model_directory(architecture))
    request = ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=2**14, sharded=True)
    export = trainer.export_weights(request)
    [held] = export.shards.held
    assert [(box.name, box.shape) for box in held] == [(spec.name, spec.shape) for spec in export.specs]
    assert list(export.buckets) == []
    assert {spec.name for spec in export.specs} == exported(trainer).keys()


def test_parts_are_read_as_held_or_made_of_a_gathered_parameter_once():
    class Exported:
        def __init__(self, parameter, *names):
            self.parameter, self.shapes = parameter, dict.fromkeys(names, (2,))

    own, fused = Exported("own", "own"), Exported("fused", "left", "right")
    parameters = {"own": torch.ones(2), "fused": torch.arange(4.0)}
    made = []

    def gathered(each):
        made.append(each.parameter)
        return {"left": parameters["fused"][:2], "right": parameters["fused"][2:]}

    parts = Parts([own, fused], lambda each: each is own, parameters)
    read = parts.reader(gathered)
    boxes = parts.held()
    assert [box.name for box in boxes] == ["own", "left", "right"]
    specs = {box.name: box for box in boxes}
    found = read([Spec("own"), Spec("left")]) | read([Spec("right")])
    assert found[specs["own"]] is not None
    assert found[specs["right"]].tolist() == [2.0, 3.0]
    assert made == ["fused"]


class Spec:
    shape = (2,)

    def __init__(self, name):
        self.name = name
