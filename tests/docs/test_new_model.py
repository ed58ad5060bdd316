"""A model that nothing describes trains and samples by docs/models.md alone: a file of code, and the command of the page."""

import json
import re

import pytest
import torch
from markdown_blocks import ROOT
from safetensors.torch import save_file

from rlcore_fsdp2.families.command import main
from rlcore_fsdp2.families.trial import try_model
from rlcore_torchkit.testing.models import make_model, make_tokenizer

CODE = '''
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class AcmeConfig(PreTrainedConfig):
    model_type = "acme"
    hidden_size: int = 16
    vocab_size: int = 64
    num_hidden_layers: int = 2


class AcmeLayer(nn.Module):
    """Each token adds the mean of what came before it."""

    def __init__(self, size):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(size), nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, hidden):
        rows = self.mix(self.norm(hidden))
        counts = torch.arange(1, rows.shape[1] + 1, device=rows.device)[:, None]
        return hidden + self.out(torch.tanh(rows.cumsum(1) / counts))


class AcmePreTrainedModel(PreTrainedModel):
    config_class = AcmeConfig
    base_model_prefix = "model"


class AcmeModel(AcmePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(AcmeLayer(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids, use_cache=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutput(last_hidden_state=hidden)


class AcmeForCausalLM(AcmePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = AcmeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, use_cache=None, **kwargs):
        return CausalLMOutput(logits=0.7 * self.lm_head(self.model(input_ids).last_hidden_state))
'''

PAGE = (ROOT / "docs/models.md").read_text()
SECTION = " ".join(PAGE.partition("## A model that is new")[2].partition("\n## ")[0].split())


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The model as the page has it written: its code beside config.json, which names the classes as the page does."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    keys = re.findall(r'`("(?:auto_map|model_type|architectures)": [^`]*)`', SECTION)
    assert len(keys) == 3
    place = write_model(tmp_path / "acme-model", json.loads("{" + ", ".join(keys) + "}"))
    (place / "modeling_acme.py").write_text(CODE)
    return place


def write_model(place, config):
    """Write config.json, a tokenizer and random weights of Acme's class."""
    config = config | {"hidden_size": 16, "num_hidden_layers": 2}
    config["vocab_size"] = make_tokenizer(place, alphabet="abcdefghijklmnopqrstuvwxyz 0123456789")
    (place / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], 16), "lm_head.weight": (config["vocab_size"], 16)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.{name}.weight": (16, 16) for name in ("mix", "out")}
        shapes |= {f"{layer}.{name}": (16,) for name in ("norm.weight", "norm.bias", "mix.bias", "out.bias")}
    tensors = {name: torch.randn(shape) * 0.5 for name, shape in shapes.items()}
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


def test_the_command_of_the_page_passes(directory, capsys):
    assert main(["--model", str(directory), "--trust-remote-code"]) == 0
    assert "agrees, agrees" in capsys.readouterr().out


def test_the_code_is_run_only_where_it_is_trusted(directory, tmp_path):
    outcome = try_model(directory, tmp_path)
    assert (outcome.trainer, outcome.generator) == ("refused", "refused")
    assert "whose code comes with the model" in outcome.trainer_reason


DESCRIPTION = """
from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(model_type="novella", class_name="NovellaForCausalLM")
"""
CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM


class NovellaConfig(LlamaConfig):
    model_type = "novella"


class NovellaForCausalLM(LlamaForCausalLM):
    config: NovellaConfig
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The folder of an installed package that has the entry points and the function of the page, for Nova and for Novella,
    which has the form of Llama."""
    names = re.findall(r"`([^`]*nova_models:register[^`]*)`", SECTION)
    groups = re.findall(r"`(rlcore\.model_\w+)`", SECTION)
    calls = re.findall(r"`(Auto\w+\.register\([^`]*\))`", SECTION)
    assert (len(names), len(groups), len(calls)) == (1, 1, 2)
    of_novella = [call.replace("nova", "novella").replace("Nova", "Novella") for call in calls]
    lines = ["from transformers import AutoConfig, AutoModelForCausalLM", CODE.replace("acme", "nova").replace("Acme", "Nova")]
    lines += [CLASSES, "def register():", *(f"    {call}" for call in [*calls, *of_novella])]
    (tmp_path / "nova_models.py").write_text("\n".join(lines))
    (tmp_path / "nova_description.py").write_text(DESCRIPTION)
    metadata = tmp_path / "nova_models-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nova-models\nVersion: 1.0\n")
    novella = names[0].replace("nova ", "novella ")
    described = "[rlcore.architectures]\nnovella = nova_description:ARCHITECTURE\n"
    (metadata / "entry_points.txt").write_text(f"[{groups[0]}]\n{names[0]}\n{novella}\n{described}".replace('"', ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_brings_the_class(site, tmp_path):
    place = write_model(tmp_path / "nova-model", {"model_type": "nova", "architectures": ["NovaForCausalLM"]})
    assert main(["--model", str(place)]) == 0
    outcome = try_model(place, tmp_path, trainer="megatron")
    assert (outcome.trainer, outcome.generator) == ("refused", "agrees")


@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_a_package_brings_a_class_and_its_description(trainer, site, tmp_path):
    """Trainers compute it by the description: by transformers' class no step would be equal to that of `megatron`."""
    pytest.importorskip("megatron.core" if trainer == "megatron" else "torch")
    place = make_model(tmp_path / "novella-model", "llama")
    config = json.loads((place / "config.json").read_text())
    config |= {"model_type": "novella", "architectures": ["NovellaForCausalLM"]}
    (place / "config.json").write_text(json.dumps(config))
    outcome = try_model(place, tmp_path, trainer=trainer)
    assert outcome.agrees, outcome.line
    assert outcome.way == ("its description" if trainer == "fsdp2" else trainer)


def test_a_package_that_fails_is_named(site, tmp_path):
    (site / "nova_models-1.0.dist-info" / "entry_points.txt").write_text("[rlcore.model_classes]\nnone = nova_none:register\n")
    place = write_model(tmp_path / "none-model", {"model_type": "none", "architectures": ["NoneForCausalLM"]})
    outcome = try_model(place, tmp_path)
    assert (outcome.trainer, outcome.generator) == ("refused", "refused")
    assert "nova_none:register of nova-models 1.0" in outcome.trainer_reason
