"""The table of models says what the tests' own lists say, and what is refused of each row."""

import json
import re
import sys

import pytest
from markdown_blocks import ROOT

sys.path.insert(0, str(ROOT / "tests" / "fsdp2_backend"))
sys.path.insert(0, str(ROOT / "tests" / "vllm_generation"))
sys.path.insert(0, str(ROOT / "tests" / "megatron_backend"))

from decoder_families import BASE, DESCRIBED, DIVIDED, OWN_ATTENTION, REFUSED, TRAINED
from megatron_families import FAMILIES as OF_MEGATRON
from vllm_families import SHOWN

from rlcore.spi import CheckContext, ModelSpec
from rlcore_fsdp2.families.command import image_class_names
from rlcore_fsdp2.families.table import BEGIN, END, IMAGE_BEGIN, IMAGE_END
from rlcore_megatron.families.models import FAMILIES
from rlcore_torchkit.architectures.decoders import IMAGE_MODELS
from rlcore_torchkit.architectures.image_faults import image_fault
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.huggingface.models import any_decoder_problems, architecture_problems
from rlcore_torchkit.testing.families.corrections import UNTRIED
from rlcore_torchkit.testing.families.engine_outcome import SOUND
from rlcore_torchkit.testing.families.engine_table import marks
from rlcore_transformers.check import check
from rlcore_transformers.config import TransformersConfig

PLAN_ROW = re.compile(r"^\| (\w+) \| (\w+) \| (\w*) ?\|$", re.MULTILINE)
ROW = re.compile(r"^\| (\w+) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", re.MULTILINE)
OF_ALL = re.compile(r"^\| ([\w-]+) \| ([\w ]+) \| ([\w ]*)\| ([\w ]+) \| .*\|$", re.MULTILINE)
IMAGE_ROW = re.compile(r"^\| ([\w.-]+) \| (\w+) \| (.*?) ?\|$", re.MULTILINE)
OF_ENGINE = re.compile(r"^\| ([\w-]+) \| ([\w ]+) \| .*\|$", re.MULTILINE)
OPTIONS = {**DESCRIBED, **TRAINED, **OWN_ATTENTION, **{name: options for name, (options, _) in REFUSED.items()}}


@pytest.fixture(scope="module")
def table():
    text = (ROOT / "docs/models.md").read_text()
    return {name: tuple(columns) for name, *columns in ROW.findall(text.partition(BEGIN)[0]) if name != "model_type"}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_says_what_tests_show_and_checks_refuse(name, table, tmp_path):
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(name, **{**BASE, **OPTIONS[name]}).to_dict()
    config |= {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    context = CheckContext(model=ModelSpec(path=str(tmp_path)), device="cpu", world_size=1, max_sequence_length=8)
    generator = "refused" if name in REFUSED or check(context, TransformersConfig()) else "tested"
    assert bool(architecture_problems(str(tmp_path), families=FAMILIES)) == (name not in {**DESCRIBED, **OF_MEGATRON})
    megatron = "tested" if name in {**DESCRIBED, **OF_MEGATRON} else "refused"
    engine = "refused" if any_decoder_problems(ModelSpec(path=str(tmp_path))) else "untried"
    trainer = "refused" if name in REFUSED else "tested"
    assert table[name] == (trainer, megatron, generator, "tested" if name in SHOWN else engine)


def test_the_rows_are_those_of_the_tests(table):
    assert table.keys() == OPTIONS.keys()
    further = re.findall(r"^\| (`.+?`) \| ", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    listed = {name for names in further for name in re.findall(r"`(\w+)`", names)}
    assert OF_MEGATRON.keys() - table.keys() <= listed
    assert set(installed_model_types()) == DESCRIBED.keys()


def test_no_family_is_wrong_or_left_out():
    table = (ROOT / "docs/models.md").read_text().partition(BEGIN)[2].partition(END)[0]
    verdicts = {name: {trainer, generator} for name, trainer, _, generator in OF_ALL.findall(table) if name != "model_type"}
    assert len(verdicts) > 150
    others = {name for name, found in verdicts.items() if not found <= {"agrees", "refused"}}
    assert others == UNTRIED.keys()


def test_models_of_images_agree_or_are_refused_with_their_reason():
    table = (ROOT / "docs/models.md").read_text().partition(IMAGE_BEGIN)[2].partition(IMAGE_END)[0]
    rows = {name: (verdict, reason) for name, verdict, reason in IMAGE_ROW.findall(table) if name != "model_type"}
    expected = {name: ("refused", image_fault(name)) for name in image_class_names()}
    assert rows == expected | dict.fromkeys(IMAGE_MODELS, ("agrees", ""))
    listed = (ROOT / "docs/images.md").read_text().partition("| models |")[2].partition("\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == IMAGE_MODELS.keys()


@pytest.mark.parametrize(("page", "command", "least"), [("vllm", "rlcore_vllm", 90), ("sglang", "rlcore_sglang", 5)])
def test_no_family_of_an_engine_is_wrong_or_crashes(page, command, least):
    text = (ROOT / f"docs/{page}.md").read_text()
    for device, expected in (("cpu", least), ("cuda", 0)):
        begin, end = marks(f"{command}.families", device)
        table = text.partition(begin)[2].partition(end)[0]
        verdicts = {name: verdict for name, verdict in OF_ENGINE.findall(table) if name != "family"}
        assert len(verdicts) >= expected
        assert set(verdicts.values()) <= SOUND


def test_tensor_parallelism_is_what_tests_show_and_plans_divide():
    from transformers import AutoConfig

    section = (ROOT / "docs/models.md").read_text().partition("## Tensor parallelism of families")[2]
    rows = {name: columns for name, *columns in PLAN_ROW.findall(section) if name != "model_type"}
    assert rows.keys() == TRAINED.keys()
    for name, (found, attention) in rows.items():
        plan = AutoConfig.for_model(name).base_model_tp_plan or {}
        divided = any("self_attn" in module and style == "colwise" for module, style in plan.items())
        expected = ("tested", "divided" if divided else "whole") if name in DIVIDED else ("refused", "")
        assert (found, attention) == expected, name
