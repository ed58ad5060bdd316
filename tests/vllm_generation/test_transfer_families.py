"""Refits of families that no description is for, each in an engine of its own, of which a process holds one at most."""

import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "fsdp2_backend"))

from decoder_families import TRAINED, make_family
from vllm_families import OTHERS, SIZES
from vllm_refit_support import export_of

pytest.importorskip("vllm")

from vllm_refitted import Refitted

from rlcore.spi import RefitError


@pytest.mark.wide
@pytest.mark.parametrize("family", OTHERS)
def test_a_family_that_no_description_is_for_is_refitted_also_after_weights_of_nan(family, tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, **SIZES[family]}
    directory = make_family(tmp_path / family, family, {**TRAINED[family], **sizes})
    with contextlib.closing(Refitted(directory)) as refitted:
        refitted.refit(export_of(refitted.weights(1), 1))
        refitted.assert_holds(1, 2)
        refitted.spoil(2)
        refitted.refit(export_of(refitted.weights(3), 3))
        refitted.assert_holds(3, 1)


def test_what_vllm_loads_past_its_layerwise_reload_is_refused(tmp_path):
    """By name, as `check` does before a run."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
    directory = make_family(tmp_path / "gpt_oss", "gpt_oss", {**TRAINED["gpt_oss"], **sizes})
    with contextlib.closing(Refitted(directory)) as refitted, pytest.raises(RefitError, match=r"incomplete: .*mlp\.experts"):
        refitted.refit(export_of(refitted.weights(1), 1))
